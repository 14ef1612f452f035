//! A flag that one thread sets and others wait for.

use alloc::sync::Arc;
use core::time::Duration;
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::Instant;

/// A point of a queue. Clones are the same point.
#[derive(Debug, Clone)]
pub struct CpuEvent(Point);

#[derive(Debug, Clone)]
enum Point {
    /// Happened before it was made: no lock, no allocation.
    Done,
    Flag(Arc<Flag>),
    /// The end of a started collective, well or not.
    #[cfg(feature = "wire")]
    Wire(quintet_collectives::Done),
}

#[derive(Debug, Default)]
struct Flag {
    set: Mutex<bool>,
    changed: Condvar,
}

impl CpuEvent {
    /// An event that has happened.
    #[must_use]
    pub fn done() -> Self {
        Self(Point::Done)
    }

    /// An event still to come; whoever makes it must see that [`CpuEvent::set`] is called, on
    /// failure too, or waiters wait for ever.
    #[must_use]
    pub fn pending() -> Self {
        Self(Point::Flag(Arc::default()))
    }

    /// Lets the event happen and wakes all who wait. Setting it again does nothing.
    pub fn set(&self) {
        match &self.0 {
            Point::Done => {}
            Point::Flag(flag) => {
                *flag.set.lock().unwrap_or_else(PoisonError::into_inner) = true;
                flag.changed.notify_all();
            }
            #[cfg(feature = "wire")]
            Point::Wire(done) => done.set(Ok(())),
        }
    }

    /// Whether the event has happened.
    #[must_use]
    pub fn is_set(&self) -> bool {
        match &self.0 {
            Point::Done => true,
            Point::Flag(flag) => *flag.set.lock().unwrap_or_else(PoisonError::into_inner),
            #[cfg(feature = "wire")]
            Point::Wire(done) => done.is_done(),
        }
    }

    /// Blocks until the event has happened.
    pub fn wait(&self) {
        while !self.wait_for(Duration::from_secs(1)) {}
    }

    /// Blocks until the event has happened, at most for `timeout`; whether it has.
    pub fn wait_for(&self, timeout: Duration) -> bool {
        match &self.0 {
            Point::Done => true,
            Point::Flag(flag) => flag.wait_for(timeout),
            #[cfg(feature = "wire")]
            Point::Wire(done) => done.wait(timeout).unwrap_or(true),
        }
    }
}

#[cfg(feature = "wire")]
impl From<quintet_collectives::Done> for CpuEvent {
    /// The end of a started collective. A failed one has ended too: its error is given to whoever
    /// waits for the buffer.
    fn from(done: quintet_collectives::Done) -> Self {
        Self(Point::Wire(done))
    }
}

/// What a started collective waits for. One that failed fails those that were to come after it.
#[cfg(feature = "wire")]
impl quintet_collectives::Gate for CpuEvent {
    fn wait(&mut self, timeout: Duration) -> Result<bool, quintet_collectives::Error> {
        match &self.0 {
            Point::Wire(done) => done.wait(timeout),
            _ => Ok(self.wait_for(timeout)),
        }
    }
}

impl Flag {
    fn wait_for(&self, timeout: Duration) -> bool {
        let until = Instant::now() + timeout;
        let mut set = self.set.lock().unwrap_or_else(PoisonError::into_inner);
        while !*set {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return false;
            }
            set = self
                .changed
                .wait_timeout(set, left)
                .unwrap_or_else(PoisonError::into_inner)
                .0;
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn another_thread_sets_it() {
        let event = CpuEvent::pending();
        assert!(!event.is_set());
        std::thread::scope(|s| {
            s.spawn(|| event.set());
            event.clone().wait();
        });
        assert!(event.is_set() && CpuEvent::done().is_set());
    }
}
