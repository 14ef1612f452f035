//! Communicators: where their ids come from, and their ends, in every order.

use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use quintet_collectives::nccl::Nccl;
use quintet_collectives::plan::CollectiveShape as S;
use quintet_collectives::store::FileStore;
use quintet_collectives::transport::local::World;
use quintet_collectives::{Communicator, ReduceOp};

use crate::shim::{Told, call, library};
use crate::{common, outcomes, step};

#[test]
fn every_drop_order_ends_well() {
    let told = Told::new("drops");
    let lib = told.library();
    let begin = Instant::now();
    let orders = [[0, 1, 2], [2, 1, 0], [1, 0, 2], [1, 2, 0]];
    for outcome in outcomes(4, &lib, |comm| {
        let world = comm.subgroup(comm.group(), "everyone")?;
        let half = comm.split((comm.rank() % 2) as i64, 0)?;
        let alone = comm.split(comm.rank() as i64, 0)?;
        let groups = [world, half, alone];
        for group in &groups {
            step(group, &lib)?;
            let mut y = [0i32];
            call(
                group,
                &lib,
                S::AllReduce { len: 1 },
                ReduceOp::Sum,
                &[1],
                &mut y,
            )?;
            assert_eq!(y, [group.world() as i32]);
        }
        // Each rank in an order of its own: nobody may wait in one for who waits in another.
        let mut groups = groups.map(Some);
        for at in orders[comm.rank()] {
            drop(groups[at].take());
        }
        Ok(())
    }) {
        outcome.unwrap();
    }
    assert!(
        begin.elapsed() < Duration::from_secs(3),
        "{:?}",
        begin.elapsed()
    );
    assert_eq!((told.faults(), told.live()), (String::new(), 0));
}

#[test]
fn ids_may_lie_in_a_store() {
    let folder = common::Folder::new();
    let (lib, path) = (library(), folder.0.clone());
    let world = World::new(3).unwrap();
    thread::scope(|scope| {
        for seat in world.seats() {
            let (lib, path) = (&lib, &path);
            scope.spawn(move || {
                let store = Arc::new(FileStore::new(path).unwrap());
                let end = Nccl::with_store(seat.endpoint(), lib.clone(), store, "run-0");
                let comm = Communicator::new(end);
                for name in ["a", "b", "a"] {
                    let part = comm.subgroup(comm.group(), name).unwrap();
                    let mut y = [0i32];
                    call(
                        &part,
                        lib,
                        S::AllReduce { len: 1 },
                        ReduceOp::Sum,
                        &[1],
                        &mut y,
                    )
                    .unwrap();
                    assert_eq!(y, [3]);
                }
                drop(comm);
                seat.finish(Ok(()));
            });
        }
    });
    let keys = std::fs::read_dir(&path).unwrap().count();
    assert!(keys >= 3, "{keys} ids");
}
