//! Waiting costs nothing: alone in its file, since it reads the time of the whole process.

#[cfg(unix)]
mod common;

use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use quintet_collectives::{Communicator, Result, World, transport::Transport};

/// One test at a time has the process to itself.
static PROCESS: Mutex<()> = Mutex::new(());

/// Milliseconds of processor time this process has used, from the kernel's table; none elsewhere.
fn cpu_ms() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/self/stat").ok()?;
    let fields: Vec<&str> = text.rsplit_once(')')?.1.split_whitespace().collect();
    // Fields 14 and 15, user and system time, in ticks of 10 ms.
    Some((fields.get(11)?.parse::<u64>().ok()? + fields.get(12)?.parse::<u64>().ok()?) * 10)
}

/// One rank sleeps for a second while all others wait for it.
fn wait_for_one<T: Transport + Send + 'static>(comm: &Communicator<T>) -> Result<()> {
    comm.barrier()?;
    let before = cpu_ms();
    if comm.rank() == 0 {
        std::thread::sleep(Duration::from_secs(1));
    }
    comm.barrier()?;
    if let (0, Some(before), Some(after)) = (comm.rank(), before, cpu_ms()) {
        assert!(after - before <= 50, "{} ms", after - before);
    }
    Ok(())
}

#[test]
fn sixteen_idle_ranks_use_no_processor() {
    let _alone = PROCESS.lock().unwrap_or_else(PoisonError::into_inner);
    World::run(16, |comm| wait_for_one(&comm)).unwrap();
}

/// Those that look for a moment before they sleep too.
#[cfg(unix)]
#[test]
fn ranks_idle_on_sockets_use_no_processor() {
    use quintet_collectives::transport::socket::Kind;
    let _alone = PROCESS.lock().unwrap_or_else(PoisonError::into_inner);
    for kind in [Kind::Tcp, Kind::Unix] {
        let seats = common::join(kind, 2, |_| {});
        std::thread::scope(|scope| {
            for seat in seats {
                scope.spawn(|| seat.run(|comm| wait_for_one(&comm)).unwrap());
            }
        });
    }
}
