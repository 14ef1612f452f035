//! A few persistent threads that share one job at a time.
//!
//! ```text
//!  caller   open job, epoch += 1, unpark -- takes parts -- close job -- waits: nobody inside
//!  worker   looks, yields, parks ... sees epoch -- enters if open -- takes parts -- leaves
//! ```
//!
//! A product of 256^3 is short and a training step makes hundreds of them, so spawning
//! (`std::thread::scope`) each time would cost far more than handing over; a worker that looks is there
//! almost at once. The caller waits only for workers that have entered: one that the
//! system has not yet woken (a busy machine) costs nothing but its help.
#![allow(unsafe_code)]

use alloc::boxed::Box;
use alloc::sync::Arc;
use alloc::vec::Vec;
use core::any::Any;
use core::fmt::{self, Debug};
use core::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use core::time::Duration;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::{Mutex, PoisonError, TryLockError};
use std::thread::{self, JoinHandle, Thread};
use std::time::Instant;

/// How long a thread that waits looks without letting go of its CPU.
const SPIN: Duration = Duration::from_micros(20);
/// How long it looks in all, then offering its CPU to others between looks, before it parks: more
/// than the gaps between the kernels of a step, and long enough that a busy system moves it to a
/// CPU of its own (one that sleeps and wakes stays where its waker runs).
const YIELD: Duration = Duration::from_millis(3);

type Part<'a> = &'a (dyn Fn(usize) + Sync);

pub(super) struct Pool {
    shared: Arc<Shared>,
    workers: Vec<JoinHandle<()>>,
    /// Held by the caller whose job is running; who finds it taken runs inline.
    turn: Mutex<()>,
}

#[derive(Default)]
struct Shared {
    /// Counts jobs: a change tells workers to look at `job`.
    epoch: AtomicUsize,
    /// What workers may enter; `None` once the caller has closed it.
    job: Mutex<Option<Job>>,
    /// Workers that are in the job. Raised only under the lock of `job`, while it is open.
    inside: AtomicUsize,
    /// Next part to be taken of the running job.
    next: AtomicUsize,
    stop: AtomicBool,
    panic: Mutex<Option<Box<dyn Any + Send>>>,
}

#[derive(Clone)]
struct Job {
    /// Borrowed from the caller of `run`, whatever the lifetime says.
    part: Part<'static>,
    parts: usize,
    caller: Thread,
}

impl Pool {
    pub(super) fn new(workers: usize) -> Self {
        let shared = Arc::new(Shared::default());
        let spawn = |i| {
            let shared = shared.clone();
            thread::Builder::new()
                .name(std::format!("quintet-{}", i + 1))
                .spawn(move || shared.work())
                .ok()
        };
        let workers = (0..workers).map_while(spawn).collect();
        Self {
            shared,
            workers,
            turn: Mutex::new(()),
        }
    }

    pub(super) fn workers(&self) -> usize {
        self.workers.len()
    }

    /// Calls `part(i)` for each `i < parts` and returns when all calls have returned.
    pub(super) fn run(&self, parts: usize, part: Part<'_>) {
        if parts > 1 && !self.workers.is_empty() {
            let turn = match self.turn.try_lock() {
                Ok(turn) => Some(turn),
                Err(TryLockError::Poisoned(turn)) => Some(turn.into_inner()),
                Err(TryLockError::WouldBlock) => None,
            };
            if turn.is_some() {
                return self.run_shared(parts, part);
            }
        }
        (0..parts).for_each(part);
    }

    fn run_shared(&self, parts: usize, part: Part<'_>) {
        let shared = &*self.shared;
        // SAFETY: only the lifetime changes. Workers get `part` from the open job alone, being
        // counted as inside from then until they are done with it. Below the job is closed and
        // nobody inside before this function returns, and nothing returns or unwinds from it
        // earlier: the caller's own parts are caught like the workers'.
        let part: Part<'static> = unsafe { core::mem::transmute::<Part<'_>, Part<'static>>(part) };
        shared.next.store(0, Ordering::Relaxed);
        *lock(&shared.job) = Some(Job {
            part,
            parts,
            caller: thread::current(),
        });
        self.wake();
        shared.take_parts(parts, part);
        *lock(&shared.job) = None;
        wait(|| shared.inside.load(Ordering::Acquire) == 0);
        let panic = lock(&shared.panic).take();
        if let Some(panic) = panic {
            resume_unwind(panic);
        }
    }

    fn wake(&self) {
        self.shared.epoch.fetch_add(1, Ordering::Release);
        for worker in &self.workers {
            worker.thread().unpark();
        }
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Relaxed);
        self.wake();
        for worker in self.workers.drain(..) {
            // A worker catches what its parts throw; there is nothing to learn here.
            let _ = worker.join();
        }
    }
}

impl Debug for Pool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Pool({} workers)", self.workers.len())
    }
}

impl Shared {
    fn work(&self) {
        let mut seen = 0;
        loop {
            wait(|| self.epoch.load(Ordering::Acquire) != seen);
            seen = self.epoch.load(Ordering::Acquire);
            if self.stop.load(Ordering::Relaxed) {
                return;
            }
            let Some(job) = self.enter() else { continue };
            self.take_parts(job.parts, job.part);
            if self.inside.fetch_sub(1, Ordering::AcqRel) == 1 {
                job.caller.unpark();
            }
        }
    }

    fn enter(&self) -> Option<Job> {
        let job = lock(&self.job);
        if job.is_some() {
            self.inside.fetch_add(1, Ordering::Relaxed);
        }
        job.clone()
    }

    /// Runs parts until none is left; keeps the first panic for the caller.
    fn take_parts(&self, parts: usize, part: Part<'_>) {
        loop {
            let i = self.next.fetch_add(1, Ordering::Relaxed);
            if i >= parts {
                return;
            }
            if let Err(panic) = catch_unwind(AssertUnwindSafe(|| part(i))) {
                lock(&self.panic).get_or_insert(panic);
            }
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Returns once `ready`: looks for a while, then parks between looks.
fn wait(ready: impl Fn() -> bool) {
    let start = Instant::now();
    loop {
        for _ in 0..16 {
            if ready() {
                return;
            }
            core::hint::spin_loop();
        }
        let waited = start.elapsed();
        if waited > YIELD {
            break;
        }
        if waited > SPIN {
            thread::yield_now();
        }
    }
    while !ready() {
        thread::park();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Would see a job outlive its borrow (a crash, or sums of freed memory), a part lost or done
    /// twice, and a wake-up lost (it would hang).
    #[test]
    fn each_part_once_and_borrows_end() {
        let pool = Pool::new(3);
        for round in 0..2000_usize {
            let parts = round % 9;
            let hits: Vec<AtomicUsize> = (0..parts).map(|_| AtomicUsize::new(0)).collect();
            pool.run(parts, &|i| {
                hits[i].fetch_add(round + 1, Ordering::Relaxed);
            });
            assert!(hits.into_iter().all(|h| h.into_inner() == round + 1));
            if round % 500 == 0 {
                thread::sleep(Duration::from_millis(1)); // let them park
            }
        }
    }

    #[test]
    fn a_panic_ends_the_call_not_the_pool() {
        let pool = Pool::new(2);
        for bad in 0..6 {
            let done = AtomicUsize::new(0);
            let caught = catch_unwind(AssertUnwindSafe(|| {
                pool.run(6, &|i| {
                    assert!(i != bad, "part {bad}");
                    done.fetch_add(1, Ordering::Relaxed);
                });
            }));
            assert!(caught.is_err());
            assert_eq!(done.into_inner(), 5, "the other parts have run");
        }
        pool.run(3, &|_| {});
    }

    #[test]
    fn nested_and_concurrent_calls_run_inline() {
        let pool = Pool::new(2);
        let total = AtomicUsize::new(0);
        thread::scope(|s| {
            for _ in 0..3 {
                s.spawn(|| {
                    pool.run(4, &|_| {
                        pool.run(5, &|_| {
                            total.fetch_add(1, Ordering::Relaxed);
                        });
                    });
                });
            }
        });
        assert_eq!(total.into_inner(), 60);
    }
}
