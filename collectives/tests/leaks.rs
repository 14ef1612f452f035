//! Runs that come and go leave nothing: alone in its file, since it counts for the whole process.
#![cfg(target_os = "linux")]

mod common;

use std::thread;
use std::time::{Duration, Instant};

use common::join;
use quintet_collectives::ReduceOp;
use quintet_collectives::transport::socket::Kind;

fn count(what: &str) -> usize {
    std::fs::read_dir(format!("/proc/self/{what}")).map_or(0, Iterator::count)
}

/// Mappings of shared memory; those of threads' stacks come and go as the system likes.
fn maps() -> usize {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    maps.lines()
        .filter(|line| line.contains("quintet"))
        .filter(|line| line.contains("memfd"))
        .count()
}

#[test]
fn many_runs_leave_no_thread_and_no_descriptor() {
    let once = |i: usize| {
        let kind = [Kind::Tcp, Kind::Unix, Kind::Shm][i % 3];
        let seats = join(kind, 2, |join| join.window = 1 << 28);
        thread::scope(|scope| {
            for seat in seats {
                scope.spawn(move || {
                    // Sometimes with groups, started work, or nothing at all, and dropped.
                    let comm = seat.communicator().unwrap();
                    if i.is_multiple_of(7) {
                        return;
                    }
                    let sub = comm.split(0, 0).unwrap();
                    let started = sub.start_send::<f32, _>(vec![1.0; 100], 0, 1, ());
                    drop(started.unwrap());
                    let mut x = comm.alloc::<f32>(5000).unwrap();
                    comm.all_reduce(&mut x, ReduceOp::Sum).unwrap();
                    comm.barrier().unwrap();
                    drop(comm);
                    seat.finish(Ok(()));
                });
            }
        });
    };
    (0..20).for_each(once);
    let counts = || (count("fd"), count("task"), maps());
    let before = settled(&counts);
    (0..1000).for_each(once);
    assert_eq!(settled(&counts), before);
}

/// Counts that have not changed for a while: a handshake's thread may take a moment to go.
fn settled<T: PartialEq>(counts: &impl Fn() -> T) -> T {
    let (mut last, mut since) = (counts(), Instant::now());
    let until = Instant::now() + Duration::from_secs(10);
    while since.elapsed() < Duration::from_millis(500) && Instant::now() < until {
        thread::sleep(Duration::from_millis(10));
        let now = counts();
        if now != last {
            (last, since) = (now, Instant::now());
        }
    }
    last
}
