//! Before the work: each process learns its number on its host, and what NCCL would fail at is refused.
//!
//! ```text
//! told to all, by all    seat, and whether its NCCL lets ranks share a GPU      -> numbers on hosts
//! told to all, by all    where the GPU of that number sits                      -> the same verdict on every rank
//! ```

use std::io::Write;

use quintet_collectives::{Axis, Communicator, Transport};
use serde::Serialize;
use serde::de::DeserializeOwned;

use super::Crew;
use crate::devices::{Device, Seat, apart, number, shared};
use crate::failure::Failure;
use crate::job::{DeviceKind, Job};
use crate::reach;

impl Crew {
    /// Gives each process its number on its host, where it computes on a device. Where NCCL moves what lies there,
    /// refuses ranks of which two would share a GPU, and says where a tp group leaves its host.
    ///
    /// # Errors
    /// Exit 2, on every rank, with what the first rank says that cannot go on.
    pub(super) fn seated(&mut self, job: &Job) -> Result<(), Failure> {
        if job.device == DeviceKind::Cpu {
            return Ok(());
        }
        let mine = match job.nccl {
            true => reach::gpus_may_be_shared(job),
            // Ranks that send through the host share what they like.
            false => Ok(true),
        };
        let mut seats = Vec::new();
        let may_share = match &self.process {
            None => mine?,
            Some(process) => {
                let seat = Seat {
                    host: host(),
                    local_rank: process.place().local_rank,
                };
                let comm = process.communicator()?;
                let mut all = true;
                for (seat, may) in told_by_all(&comm, &(seat, mine))? {
                    seats.push(seat);
                    all &= may?;
                }
                self.number = Some(number(&seats, comm.rank()));
                all
            }
        };
        if !may_share && let Some(sentence) = shared(&self.devices(&seats)?) {
            return Err(Failure::usage(sentence));
        }
        if job.nccl && self.leads() && !seats.is_empty() {
            let mesh = quintet_planner::model::mesh(&job.layout)?;
            let tp = |rank| mesh.group(rank, &[mesh.factor(Axis::Tp)]);
            if let Some(warning) = apart(&seats, (0..self.world).map(tp)) {
                let _ = writeln!(std::io::stderr(), "quintet: {warning}");
            }
        }
        Ok(())
    }

    /// The GPU of each rank.
    fn devices(&self, seats: &[Seat]) -> Result<Vec<Device>, Failure> {
        let device = |number| -> Result<Device, Failure> {
            Ok(Device {
                host: host(),
                bus_id: bus_id(number)?,
            })
        };
        match &self.process {
            None => (0..self.world).map(device).collect(),
            Some(process) => {
                let mine = device(number(seats, process.rank()));
                let all = told_by_all(&process.communicator()?, &mine)?;
                all.into_iter().collect()
            }
        }
    }
}

/// What two processes of one host have in common.
fn host() -> String {
    std::env::var("QUINTET_HOST").unwrap_or_else(|_| {
        let name = rustix::system::uname();
        name.nodename().to_string_lossy().into_owned()
    })
}

#[cfg(feature = "cuda")]
use crate::gpus::bus_id;

#[cfg(not(feature = "cuda"))]
fn bus_id(_: usize) -> Result<String, Failure> {
    Err(crate::precompile::no_cuda())
}

/// What each rank tells, in rank order, on every rank.
fn told_by_all<V: Serialize + DeserializeOwned, T: Transport + Send + 'static>(
    comm: &Communicator<T>,
    mine: &V,
) -> Result<Vec<V>, Failure> {
    let wrong =
        |e: serde_json::Error| Failure::aborted(format!("what a rank says of its place: {e}"));
    let all = comm.gather_bytes(&serde_json::to_vec(mine).map_err(wrong)?, 0)?;
    let all = comm.broadcast_bytes(&serde_json::to_vec(&all).map_err(wrong)?, 0)?;
    let all: Vec<Vec<u8>> = serde_json::from_slice(&all).map_err(wrong)?;
    let read = |told: Vec<u8>| serde_json::from_slice(&told).map_err(wrong);
    all.into_iter().map(read).collect()
}
