//! The handle of a started operation, the flag that says it is over, and what it may wait for
//! (`std`).
//!
//! ```text
//! start(buffer, after: Gate) -> Pending --wait()--> buffer
//!                                  |
//!                                  +--done()--> Done: clonable, others wait on it; itself a Gate
//! ```
//!
//! Dropping a [`Pending`] lets the operation go on and loses its buffer; nothing else depends on it.

use std::{
    string::ToString,
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use crate::communicator::stats::Counters;
use crate::{Error, Result};

/// What a started operation waits for before it begins.
///
/// Implemented for `()` (open), for [`Done`], and for closures, which are called once, on the
/// worker, when every operation started before has ended: a closure may block, so it must not wait
/// for an operation started later on the same communicator.
pub trait Gate: Send {
    /// Waits at most `timeout`, zero to ask only; true once open.
    ///
    /// # Errors
    /// Where what is waited for failed; the operation then fails with the same error.
    fn wait(&mut self, timeout: Duration) -> Result<bool>;

    /// Whether `wait` may take longer than it is told to.
    fn blocks(&self) -> bool {
        false
    }
}

impl Gate for () {
    fn wait(&mut self, _: Duration) -> Result<bool> {
        Ok(true)
    }
}

impl Gate for Done {
    fn wait(&mut self, timeout: Duration) -> Result<bool> {
        Self::wait(self, timeout)
    }
}

/// A closure as a gate; see [`Gate`].
impl<F: FnMut() -> Result<()> + Send> Gate for F {
    fn wait(&mut self, _: Duration) -> Result<bool> {
        self().map(|()| true)
    }

    fn blocks(&self) -> bool {
        true
    }
}

/// A closure that can be called once, as a gate.
pub fn once<F: FnOnce() -> Result<()> + Send>(body: F) -> impl Gate {
    let mut body = Some(body);
    move || body.take().map_or(Ok(()), |body| body())
}

/// Whether something is over; clones are the same flag.
///
/// Other code may use one for its own events: [`Done::new`], [`Done::set`].
#[derive(Debug, Clone, Default)]
pub struct Done {
    inner: Arc<(Mutex<Option<Result<()>>>, Condvar)>,
}

impl Done {
    /// A flag not yet set.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Sets it and wakes all who wait. Only the first outcome counts.
    pub fn set(&self, outcome: Result<()>) {
        lock(&self.inner.0).get_or_insert(outcome);
        self.inner.1.notify_all();
    }

    /// Whether it is set, well or not.
    #[must_use]
    pub fn is_done(&self) -> bool {
        lock(&self.inner.0).is_some()
    }

    /// Waits at most `timeout`; false where that was not enough.
    ///
    /// # Errors
    /// What it was set with.
    pub fn wait(&self, timeout: Duration) -> Result<bool> {
        let until = Instant::now() + timeout;
        let mut state = lock(&self.inner.0);
        loop {
            if let Some(outcome) = &*state {
                return outcome.clone().map(|()| true);
            }
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Ok(false);
            }
            state = self
                .inner
                .1
                .wait_timeout(state, left)
                .unwrap_or_else(PoisonError::into_inner)
                .0;
        }
    }

    /// Waits as long as it takes: every started operation ends by its own deadline.
    fn wait_end(&self) {
        let mut state = lock(&self.inner.0);
        while state.is_none() {
            state = self
                .inner
                .1
                .wait(state)
                .unwrap_or_else(PoisonError::into_inner);
        }
    }
}

/// A started operation that owns a buffer of type `B` and gives it back.
#[derive(Debug)]
pub struct Pending<B> {
    slot: Arc<Slot<B>>,
    /// Where the time spent in [`Pending::wait`] is counted as blocked.
    counters: Arc<Counters>,
}

#[derive(Debug)]
struct Slot<B> {
    result: Mutex<Option<Result<B>>>,
    done: Done,
}

impl<B> Pending<B> {
    /// A handle and the other end, which completes it.
    pub(crate) fn pair(counters: Arc<Counters>) -> (Self, Completer<B>) {
        let slot = Arc::new(Slot {
            result: Mutex::new(None),
            done: Done::new(),
        });
        let pending = Self {
            slot: slot.clone(),
            counters,
        };
        (pending, Completer { slot })
    }

    /// Waits for the end and gives the buffer back.
    ///
    /// # Errors
    /// What the operation ended with; the buffer is then lost, since its contents are undefined.
    pub fn wait(self) -> Result<B> {
        if !self.is_done() {
            let start = Instant::now();
            self.slot.done.wait_end();
            self.counters.stood_still(start.elapsed());
        }
        let result = lock(&self.slot.result).take();
        result.unwrap_or_else(|| Err(Error::Gate("the operation left no result".to_string())))
    }

    /// Whether [`Pending::wait`] would return at once.
    #[must_use]
    pub fn is_done(&self) -> bool {
        self.slot.done.is_done()
    }

    /// A flag that others may wait on.
    #[must_use]
    pub fn done(&self) -> Done {
        self.slot.done.clone()
    }
}

/// Completes a [`Pending`]; dropped without doing so, it completes it with an error.
#[derive(Debug)]
pub(crate) struct Completer<B> {
    slot: Arc<Slot<B>>,
}

impl<B> Completer<B> {
    pub(crate) fn complete(self, result: Result<B>) {
        let outcome = result.as_ref().map(drop).map_err(Clone::clone);
        *lock(&self.slot.result) = Some(result);
        self.slot.done.set(outcome);
    }
}

impl<B> Drop for Completer<B> {
    fn drop(&mut self) {
        if !self.slot.done.is_done() {
            let error =
                Error::Gate("the thread that performed the operation ended before it".to_string());
            *lock(&self.slot.result) = Some(Err(error.clone()));
            self.slot.done.set(Err(error));
        }
    }
}

/// Each critical section here is one assignment, so what a panicking holder leaves is whole.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
