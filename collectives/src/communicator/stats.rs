//! What a communicator counts.
//!
//! ```text
//! bytes     payload handed to the transport, as plan::bytes_sent predicts it, plus sent messages
//! messages  how many of them, empty ones included
//! waiting   time parked, on the caller's threads and the worker
//! ```

use std::{
    sync::atomic::{AtomicU64, Ordering},
    time::Duration,
};

/// What one rank has sent in one group, and how long it waited there.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Stats {
    /// Payload bytes sent.
    pub bytes: u64,
    /// Messages sent.
    pub messages: u64,
    /// Time spent parked. What the worker waits for is counted whether or not anybody noticed.
    pub waiting: Duration,
    /// Time the caller's threads waited, in blocking calls and for started operations: what
    /// communication cost the program.
    pub blocked: Duration,
}

#[derive(Debug, Default)]
pub(crate) struct Counters {
    pub(super) bytes: AtomicU64,
    pub(super) messages: AtomicU64,
    waiting: AtomicU64,
    blocked: AtomicU64,
}

impl Counters {
    pub(super) fn read(&self) -> Stats {
        let load = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        Stats {
            bytes: load(&self.bytes),
            messages: load(&self.messages),
            waiting: Duration::from_nanos(load(&self.waiting)),
            blocked: Duration::from_nanos(load(&self.blocked)),
        }
    }

    /// Time a caller stood still for an operation whose parking the worker has counted.
    pub(crate) fn stood_still(&self, time: Duration) {
        self.blocked
            .fetch_add(time.as_nanos() as u64, Ordering::Relaxed);
    }

    pub(super) fn waited(&self, time: Duration, on_caller: bool) {
        let nanos = time.as_nanos() as u64;
        self.waiting.fetch_add(nanos, Ordering::Relaxed);
        if on_caller {
            self.blocked.fetch_add(nanos, Ordering::Relaxed);
        }
    }
}
