//! A flag that one thread sets and others wait for.

use alloc::sync::Arc;
use std::sync::{Condvar, Mutex, PoisonError};

/// A point of a queue. Clones are the same point.
#[derive(Debug, Clone)]
pub struct CpuEvent(Option<Arc<Flag>>);

/// `None` above is an event that happened before it was made: no lock, no allocation.
#[derive(Debug, Default)]
struct Flag {
    set: Mutex<bool>,
    changed: Condvar,
}

impl CpuEvent {
    /// An event that has happened.
    #[must_use]
    pub fn done() -> Self {
        Self(None)
    }

    /// An event still to come; whoever makes it must see that [`CpuEvent::set`] is called, on
    /// failure too, or waiters wait for ever.
    #[must_use]
    pub fn pending() -> Self {
        Self(Some(Arc::default()))
    }

    /// Lets the event happen and wakes all who wait. Setting it again does nothing.
    pub fn set(&self) {
        if let Some(flag) = &self.0 {
            *flag.set.lock().unwrap_or_else(PoisonError::into_inner) = true;
            flag.changed.notify_all();
        }
    }

    /// Whether the event has happened.
    #[must_use]
    pub fn is_set(&self) -> bool {
        self.0
            .as_ref()
            .is_none_or(|flag| *flag.set.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Blocks until the event has happened.
    pub fn wait(&self) {
        if let Some(flag) = &self.0 {
            let mut set = flag.set.lock().unwrap_or_else(PoisonError::into_inner);
            while !*set {
                set = flag
                    .changed
                    .wait(set)
                    .unwrap_or_else(PoisonError::into_inner);
            }
        }
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
