//! Long messages over sockets, which go from the caller's memory to the caller's memory: right in pieces of any length,
//! beside those of other groups on the same connection, and after somebody has given up in the middle.
#![cfg(unix)]

mod common;

use std::thread;
use std::time::Duration;

use common::join;
use quintet_collectives::transport::fault::WireFaults;
use quintet_collectives::transport::socket::{Kind, Seat, Sockets};
use quintet_collectives::{Communicator, Error, ReduceOp, Result};

type Comm = Communicator<Sockets>;

const KINDS: [Kind; 2] = [Kind::Tcp, Kind::Unix];

fn each(seats: Vec<Seat>, body: impl Fn(&Comm) -> Result<()> + Sync) {
    thread::scope(|scope| {
        for seat in seats {
            let body = &body;
            let limit = Duration::from_secs(40);
            scope.spawn(move || seat.run(|comm| body(&comm.with_deadline(limit))).unwrap());
        }
    });
}

/// What rank `rank` brings: small whole numbers, so that no sum is rounded.
fn mine(rank: usize, len: usize, turn: usize) -> Vec<f32> {
    let x = (0..len).map(|i| ((i * 7 + rank * 13 + turn) % 101) as f32);
    x.collect()
}

fn sums(comm: &Comm, lens: &[usize]) -> Result<()> {
    let (n, me) = (comm.world(), comm.rank());
    for (turn, &len) in lens.iter().enumerate() {
        let x = mine(me, len, turn);
        let mut expected = vec![0f32; len];
        for rank in 0..n {
            let theirs = mine(rank, len, turn);
            expected
                .iter_mut()
                .zip(theirs)
                .for_each(|(sum, x)| *sum += x);
        }
        let mut apart = vec![0f32; len];
        comm.all_reduce_into(&x, &mut apart, ReduceOp::Sum)?;
        assert!(apart == expected, "{len} apart");
        let mut within = x.clone();
        comm.all_reduce(&mut within, ReduceOp::Sum)?;
        assert!(within == expected, "{len} in place");
        let mut all = vec![0f32; len * n];
        comm.all_gather(&x, &mut all)?;
        for rank in 0..n {
            assert!(
                all[rank * len..][..len] == mine(rank, len, turn),
                "{len} of {rank}"
            );
        }
        let mut root = x.clone();
        comm.broadcast(&mut root, n - 1)?;
        assert!(root == mine(n - 1, len, turn), "{len} broadcast");
        let mut part = vec![0f32; len];
        comm.reduce_scatter(&all, &mut part, ReduceOp::Max)?;
        assert!(part == mine(me, len, turn), "{len} scattered");
    }
    Ok(())
}

#[test]
fn long_messages_arrive_whole_however_they_are_cut() {
    for kind in KINDS {
        for world in [2, 3] {
            let lens = [16_383, 16_384, 40_001, 300_000];
            each(join(kind, world, |_| {}), |comm| sums(comm, &lens));
            let short = |seed| WireFaults {
                short: true,
                seed,
                ..WireFaults::default()
            };
            let seats = join(kind, world, |join| {
                join.faults = Some(short(join.rank as u64))
            });
            each(seats, |comm| sums(comm, &[20_000, 70_001]));
        }
    }
}

/// Elements beyond any socket's buffers.
const BEYOND: usize = 12 << 20;

#[test]
fn groups_share_a_connection_while_one_has_a_long_message_on_it() {
    for kind in KINDS {
        each(join(kind, 2, |_| {}), |comm| {
            let other = comm.split(0, -(comm.rank() as i64))?;
            let (lens, many) = ([400_000, 20_000, 900_001], [1, 20_000, 1, 100_000, 3]);
            thread::scope(|scope| {
                let thread = scope.spawn(|| (0..3).try_for_each(|_| sums(comm, &lens)));
                (0..6).try_for_each(|_| sums(&other, &many))?;
                thread.join().unwrap()
            })?;
            // One calls late: what the other sends him meanwhile keeps nobody else from going on.
            thread::scope(|scope| {
                let thread = scope.spawn(|| {
                    if comm.rank() == 0 {
                        thread::sleep(Duration::from_millis(300));
                    }
                    let mut x = vec![1f32; BEYOND];
                    comm.all_reduce(&mut x, ReduceOp::Sum)?;
                    assert!(x.iter().all(|x| *x == 2.0));
                    Ok(())
                });
                thread::sleep(Duration::from_millis(50));
                sums(&other, &[5, 30_000])?;
                thread.join().unwrap()
            })
        });
    }
}

#[test]
fn who_gives_up_in_the_middle_leaves_the_connection_to_others() {
    for kind in KINDS {
        each(join(kind, 2, |_| {}), |comm| {
            let other = comm.split(0, comm.rank() as i64)?;
            let given_up = comm.split(0, comm.rank() as i64)?;
            if comm.rank() == 0 {
                let brief = given_up.with_deadline(Duration::from_millis(150));
                let error = brief.all_reduce(&mut vec![1f32; BEYOND], ReduceOp::Sum);
                assert!(
                    matches!(error, Err(Error::Timeout { peer: Some(1), .. })),
                    "{error:?}"
                );
            } else {
                thread::sleep(Duration::from_millis(300));
            }
            sums(&other, &[7, 100_000, 1_000_000])
        });
    }
}
