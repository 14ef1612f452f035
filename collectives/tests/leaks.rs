//! Runs that come and go leave nothing: alone in its file, since it counts for the whole process.
#![cfg(target_os = "linux")]

mod common;

use std::thread;
use std::time::{Duration, Instant};

use common::join;
use quintet_collectives::transport::socket::Kind;

fn count(what: &str) -> usize {
    std::fs::read_dir(format!("/proc/self/{what}")).map_or(0, Iterator::count)
}

#[test]
fn many_runs_leave_no_thread_and_no_descriptor() {
    let once = |i: usize| {
        let seats = join([Kind::Tcp, Kind::Unix][i % 2], 2, |_| {});
        thread::scope(|scope| {
            for seat in seats {
                scope.spawn(move || {
                    // Sometimes with groups, started work, or nothing at all, and dropped.
                    let comm = seat.communicator().unwrap();
                    if i.is_multiple_of(3) {
                        return;
                    }
                    let sub = comm.split(0, 0).unwrap();
                    let started = sub.start_send::<f32, _>(vec![1.0; 100], 0, 1, ());
                    drop(started.unwrap());
                    comm.barrier().unwrap();
                    drop(comm);
                    seat.finish(Ok(()));
                });
            }
        });
    };
    (0..4).for_each(once);
    let before = (count("fd"), count("task"));
    (0..300).for_each(once);
    // A handshake's thread may take a moment to go.
    let until = Instant::now() + Duration::from_secs(2);
    while (count("fd"), count("task")) != before && Instant::now() < until {
        thread::sleep(Duration::from_millis(10));
    }
    assert_eq!((count("fd"), count("task")), before);
}
