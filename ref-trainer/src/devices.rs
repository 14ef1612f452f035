//! Which GPU is whose, where ranks are processes and NCCL moves what lies on GPUs.
//!
//! ```text
//! local rank, CUDA_VISIBLE_DEVICES  --all ranks to rank 0-->  Device { host, ordinal, name } of each
//!                                                             two alike: refused    a tp group of two hosts: said
//! ```

use serde::{Deserialize, Serialize};

use crate::failure::Failure;

/// What one process knows of its place.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Seat {
    /// Its host.
    pub host: String,
    /// Its number on the host, where its launcher says so; else it is counted.
    pub local_rank: Option<usize>,
    /// `CUDA_VISIBLE_DEVICES`, where it is set.
    pub visible: Option<String>,
}

/// A rank's GPU.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Device {
    /// The host.
    pub host: String,
    /// Its number among those that the process sees: what CUDA is asked for.
    pub ordinal: usize,
    /// Its number or identity on the host.
    pub name: String,
}

/// The GPU of each rank: the one of its local rank, among those it sees. A process that sees one has that
/// one, as `srun --gpus-per-task=1` means it.
///
/// # Errors
/// Exit 2 where a rank has none.
pub fn devices(seats: &[Seat]) -> Result<Vec<Device>, Failure> {
    let device = |(rank, seat): (usize, &Seat)| {
        let before = || seats[..rank].iter().filter(|s| s.host == seat.host).count();
        let local = seat.local_rank.unwrap_or_else(before);
        let (ordinal, name) = match &seat.visible {
            None => (local, local.to_string()),
            Some(list) => {
                let names: Vec<&str> = list
                    .split(',')
                    .map(str::trim)
                    .filter(|n| !n.is_empty())
                    .collect();
                let ordinal = if names.len() == 1 { 0 } else { local };
                let name = names.get(ordinal).ok_or_else(|| {
                    Failure::usage(format!(
                        "rank {rank} is number {local} on {}, and its CUDA_VISIBLE_DEVICES={list} leaves it no GPU; name one for each rank of the host",
                        seat.host
                    ))
                })?;
                (ordinal, String::from(*name))
            }
        };
        Ok(Device {
            host: seat.host.clone(),
            ordinal,
            name,
        })
    };
    seats.iter().enumerate().map(device).collect()
}

/// Two ranks that would share a GPU, in a sentence, if there are such.
#[must_use]
pub fn shared(devices: &[Device]) -> Option<String> {
    let alike = |a: &Device, b: &Device| (&a.host, &a.name) == (&b.host, &b.name);
    let mut pairs = (0..devices.len()).flat_map(|b| (0..b).map(move |a| (a, b)));
    let (a, b) = pairs.find(|&(a, b)| alike(&devices[a], &devices[b]))?;
    let Device { host, name, .. } = &devices[a];
    Some(format!(
        "ranks {a} and {b} would share GPU {name} of {host}, which NCCL refuses; start one rank a GPU, or set NCCL_MULTI_RANK_GPU_ENABLE=1 with NCCL 2.30 or newer"
    ))
}

/// A tensor-parallel group that leaves its host, in a sentence, if there is one.
#[must_use]
pub fn apart(devices: &[Device], groups: impl IntoIterator<Item = Vec<usize>>) -> Option<String> {
    groups.into_iter().find_map(|ranks| {
        let first = *ranks.first()?;
        let other = ranks.iter().find(|&&r| devices[r].host != devices[first].host)?;
        Some(format!(
            "ranks {first} and {other} are of one tp group and on {} and {}: each layer waits for the network between them; tp is best kept within a host",
            devices[first].host, devices[*other].host
        ))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn seat(host: &str, local_rank: Option<usize>, visible: Option<&str>) -> Seat {
        Seat {
            host: host.into(),
            local_rank,
            visible: visible.map(String::from),
        }
    }

    fn named(seats: &[Seat]) -> Vec<(usize, String)> {
        let devices = devices(seats).unwrap();
        devices.into_iter().map(|d| (d.ordinal, d.name)).collect()
    }

    #[test]
    fn a_rank_takes_the_gpu_of_its_local_rank() {
        let of = |o: usize, n: &str| (o, String::from(n));
        // torchrun: all see all.
        let seats = [
            seat("a", Some(0), None),
            seat("a", Some(1), None),
            seat("b", Some(0), None),
        ];
        assert_eq!(named(&seats), [of(0, "0"), of(1, "1"), of(0, "0")]);
        assert_eq!(shared(&devices(&seats).unwrap()), None);
        // Nobody counts on the host: by rank.
        let seats = [
            seat("a", None, Some("4,6")),
            seat("b", None, Some("4,6")),
            seat("a", None, Some("4,6")),
        ];
        assert_eq!(named(&seats), [of(0, "4"), of(0, "4"), of(1, "6")]);
        // srun --gpus-per-task=1: each sees its own.
        let seats = [seat("a", Some(0), Some("0")), seat("a", Some(1), Some("1"))];
        assert_eq!(named(&seats), [of(0, "0"), of(0, "1")]);
        assert_eq!(shared(&devices(&seats).unwrap()), None);
        let failure = devices(&[seat("a", Some(2), Some("0,1"))]).unwrap_err();
        assert!(
            failure.sentence.contains("rank 0 is number 2 on a"),
            "{failure}"
        );
        assert!(devices(&[seat("a", Some(0), Some(""))]).is_err());
    }

    #[test]
    fn two_ranks_on_a_gpu_and_tp_over_hosts_are_found() {
        let seats = [
            seat("a", Some(0), None),
            seat("a", Some(1), Some("0")),
            seat("b", Some(0), None),
        ];
        let devices = devices(&seats).unwrap();
        let said = shared(&devices).unwrap();
        assert!(
            said.starts_with("ranks 0 and 1 would share GPU 0 of a"),
            "{said}"
        );
        assert_eq!(apart(&devices, [vec![0, 1], vec![2]]), None);
        let said = apart(&devices, [vec![0, 1], vec![1, 2]]).unwrap();
        assert!(
            said.starts_with("ranks 1 and 2 are of one tp group and on a and b"),
            "{said}"
        );
    }
}
