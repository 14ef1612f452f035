//! NCCL as it is called; and what goes wrong, told to every rank. By the stand-in over threads and host memory
//! (tests/nccl_shim); the library that pip installs is looked at where there is one.
#![cfg(feature = "nccl")]
#![allow(unsafe_code)] // it works on addresses

#[path = "../common/mod.rs"]
mod common;
mod failures;
mod lifetime;
mod loading;
mod measured;
mod messages;
mod operations;
#[path = "../common/nccl.rs"]
mod shim;

use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use quintet_collectives::nccl::{Library, Nccl};
use quintet_collectives::plan::CollectiveShape as S;
use quintet_collectives::transport::local::{Local, World};
use quintet_collectives::{Communicator, ReduceOp, Result};

use shim::{call, library};

type Comm = Communicator<Nccl<Local>>;

/// Runs `body` on every rank over this library; what each rank's call returned.
fn outcomes<R: Send>(
    world: usize,
    library: &Arc<Library>,
    body: impl Fn(&Comm) -> Result<R> + Sync,
) -> Vec<Result<R>> {
    let world = World::new(world).unwrap();
    let results = Mutex::new(Vec::new());
    thread::scope(|scope| {
        for seat in world.seats() {
            let (results, body) = (&results, &body);
            scope.spawn(move || {
                let comm = Communicator::new(Nccl::new(seat.endpoint(), library.clone()));
                let outcome = body(&comm);
                drop(comm);
                results.lock().unwrap().push((seat.rank(), outcome));
                seat.finish(Ok(()));
            });
        }
    });
    let mut results = results.into_inner().unwrap();
    results.sort_by_key(|(rank, _)| *rank);
    results.into_iter().map(|(_, outcome)| outcome).collect()
}

fn all_well(world: usize, body: impl Fn(&Comm) -> Result<()> + Sync) {
    for outcome in outcomes(world, &library(), body) {
        outcome.unwrap();
    }
}

/// Everybody calls all_reduce over and over with a deadline of 300 ms, on memory of its own.
fn step(comm: &Comm, lib: &Arc<Library>) -> Result<()> {
    let comm = comm
        .subgroup(comm.group(), "step")?
        .with_deadline(Duration::from_millis(300));
    let x = vec![1i64; 100];
    let mut y = vec![0; 100];
    call(
        &comm,
        lib,
        S::AllReduce { len: 100 },
        ReduceOp::Sum,
        &x,
        &mut y,
    )
}
