//! Starting ranks as threads, and what their end means for the others.
//!
//! ```text
//! World::new(4) --seats()--> Seat 0..3, one per thread --communicator()--> Communicator<Local>
//!                              |
//!                              +-- finish(Ok)   what it sent may still be read
//!                              +-- finish(Err), panic: its groups are poisoned with the first cause
//! ```

use std::{
    any::Any,
    format,
    string::{String, ToString},
    sync::Arc,
    thread,
    vec::Vec,
};

use super::{Local, Mutex, Registry, Shared, lock};
use crate::{Communicator, Error, Result};

/// A world of ranks that are threads of this process.
///
/// ```
/// use quintet_collectives::{ReduceOp, World};
/// let sums = World::run(4, |comm| {
///     let mut x = [comm.rank() as f32, 1.0];
///     comm.all_reduce(&mut x, ReduceOp::Sum)?;
///     Ok(x)
/// })?;
/// assert!(sums.iter().all(|x| *x == [6.0, 4.0]));
/// # Ok::<(), quintet_collectives::Error>(())
/// ```
#[derive(Debug)]
pub struct World {
    shared: Arc<Shared>,
}

/// A rank's place in a [`World`]; one per thread. Dropped without [`Seat::finish`] it counts as
/// finished well, or, while its thread panics, as failed.
#[derive(Debug)]
pub struct Seat {
    shared: Arc<Shared>,
    rank: usize,
    over: bool,
}

impl World {
    /// A world of `world` ranks; each directed pair of ranks of a group buffers up to 64 MiB.
    ///
    /// # Errors
    /// [`Error::Layout`] for a world of no ranks.
    pub fn new(world: usize) -> Result<Self> {
        Self::with(world, DEFAULT_BUFFER, false)
    }

    /// A world whose ranks do nothing in shared memory but send each other what their plans say, as
    /// between hosts: the same results and bytes, later.
    ///
    /// # Errors
    /// [`Error::Layout`] for a world of no ranks.
    pub fn by_messages(world: usize) -> Result<Self> {
        Self::with(world, DEFAULT_BUFFER, true)
    }

    /// A world in which a directed pair of ranks of a group buffers up to `bytes` of payload. One
    /// message passes whatever its length, where nothing else is buffered.
    ///
    /// # Errors
    /// [`Error::Layout`] for a world of no ranks.
    pub fn with_buffer(world: usize, bytes: usize) -> Result<Self> {
        Self::with(world, bytes, false)
    }

    fn with(world: usize, bytes: usize, by_messages: bool) -> Result<Self> {
        if world == 0 {
            return Err(Error::Layout(String::from("a world has at least one rank")));
        }
        let shared = Shared {
            world,
            bound: bytes,
            by_messages,
            registry: Mutex::new(Registry::default()),
            adopted: Mutex::new(Vec::new()),
        };
        Ok(Self {
            shared: Arc::new(shared),
        })
    }

    /// One seat per rank, in rank order; to be moved to the ranks' threads. Called once: a second
    /// set of seats would be a second set of the same ranks.
    #[must_use]
    pub fn seats(&self) -> Vec<Seat> {
        (0..self.shared.world)
            .map(|rank| Seat {
                shared: self.shared.clone(),
                rank,
                over: false,
            })
            .collect()
    }

    /// Makes every operation of every group fail with [`Error::Aborted`], now and later.
    pub fn abort(&self) {
        self.shared.abort(0);
    }

    /// Runs `body` once per rank, each on a thread of its own, and collects what they return.
    ///
    /// # Errors
    /// The error of the rank that failed first; a panic is [`Error::Panicked`].
    pub fn run<R, F>(world: usize, body: F) -> Result<Vec<R>>
    where
        R: Send,
        F: Fn(Communicator<Local>) -> Result<R> + Sync,
    {
        Self::new(world)?.go(body)
    }

    /// [`World::run`] for bodies with an error of their own, and on a world made beforehand.
    ///
    /// # Errors
    /// The error of the rank that failed first; a panic is [`Error::Panicked`].
    pub fn go<R, E, F>(&self, body: F) -> Result<Vec<R>, E>
    where
        R: Send,
        E: From<Error> + Send + ToString,
        F: Fn(Communicator<Local>) -> Result<R, E> + Sync,
    {
        let first: Mutex<Option<E>> = Mutex::new(None);
        let results: Vec<Option<R>> = thread::scope(|scope| {
            let mut threads = Vec::new();
            for seat in self.seats() {
                let (body, first, rank) = (&body, &first, seat.rank);
                let named = thread::Builder::new().name(format!("rank {rank}"));
                match named.spawn_scoped(scope, move || seat.occupy(body, first)) {
                    Ok(thread) => threads.push(thread),
                    Err(e) => {
                        // The seat went with the closure and was dropped: the others see it gone.
                        let error = Error::System {
                            what: "start a thread",
                            reason: e.to_string(),
                        };
                        self.shared.abort(rank);
                        lock(first).get_or_insert(E::from(error));
                    }
                }
            }
            threads
                .into_iter()
                .map(|thread| thread.join().ok().flatten())
                .collect()
        });
        match first
            .into_inner()
            .unwrap_or_else(std::sync::PoisonError::into_inner)
        {
            Some(error) => Err(error),
            None => Ok(results.into_iter().flatten().collect()),
        }
    }
}

/// Generous: a round of a large all-reduce never waits for room.
const DEFAULT_BUFFER: usize = 64 << 20;

impl Seat {
    /// The global rank.
    #[must_use]
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// An endpoint of the group of all ranks, named `world`. The k-th call of one rank belongs
    /// to the k-th call of the others.
    #[must_use]
    pub fn endpoint(&self) -> Local {
        let group = self
            .shared
            .group("world", (0..self.shared.world).collect(), self.rank);
        Local::new(self.shared.clone(), group, self.rank)
    }

    /// [`Seat::endpoint`] as a communicator.
    #[must_use]
    pub fn communicator(&self) -> Communicator<Local> {
        Communicator::new(self.endpoint())
    }

    /// Says how this rank ended. After a failure every wait on it ends with the world's first
    /// cause; after a good end what it sent can still be received, and what it did not send is
    /// [`Error::PeerLost`].
    pub fn finish(mut self, outcome: Result<(), &dyn core::fmt::Display>) {
        self.end(outcome.err().map(|failure| self.failed(failure)));
    }

    fn failed(&self, failure: &dyn core::fmt::Display) -> Error {
        Error::PeerLost {
            rank: self.rank,
            reason: failure.to_string(),
        }
    }

    fn end(&mut self, failure: Option<Error>) {
        if core::mem::replace(&mut self.over, true) {
            return;
        }
        // A failure is told first, so that the threads joined next cannot wait for it; a good end
        // is told last, when they have sent all they had.
        let failed = failure.is_some();
        if failed {
            self.shared.leave(self.rank, failure);
        }
        let mut adopted = lock(&self.shared.adopted);
        let (mine, others) = adopted.drain(..).partition(|(rank, _)| *rank == self.rank);
        *adopted = others;
        drop(adopted);
        let mine: Vec<(usize, thread::JoinHandle<()>)> = mine;
        for (_, worker) in mine {
            // What a worker has to say went to its operations.
            let _ = worker.join();
        }
        if !failed {
            self.shared.leave(self.rank, None);
        }
    }

    /// Runs `body` on this thread and turns its end into this rank's end.
    fn occupy<R, E, F>(mut self, body: &F, first: &Mutex<Option<E>>) -> Option<R>
    where
        E: From<Error> + ToString,
        F: Fn(Communicator<Local>) -> Result<R, E>,
    {
        let comm = self.communicator();
        // The closure is not looked at again after a panic, so nothing half-done is seen.
        let outcome = std::panic::catch_unwind(core::panic::AssertUnwindSafe(|| body(comm)));
        let (error, reason) = match outcome {
            Ok(Ok(result)) => {
                self.end(None);
                return Some(result);
            }
            Ok(Err(error)) => {
                let reason = error.to_string();
                (error, reason)
            }
            Err(panic) => {
                let message = panic_message(&*panic);
                let error = Error::Panicked {
                    rank: self.rank,
                    message,
                };
                let reason = error.to_string();
                (E::from(error), reason)
            }
        };
        // Noted before the others are told, so that theirs cannot come first.
        lock(first).get_or_insert(error);
        self.end(Some(self.failed(&reason)));
        None
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        let failure = thread::panicking().then(|| self.failed(&"its thread panicked"));
        self.end(failure);
    }
}

pub(crate) fn panic_message(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().map(ToString::to_string);
    text.or_else(|| panic.downcast_ref::<String>().cloned())
        .unwrap_or_else(|| String::from("(no text)"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::transport::{Transport, direct::Sharing};

    #[test]
    fn by_messages_nothing_is_shared() {
        for (world, shares) in [(World::new(2), true), (World::by_messages(2), false)] {
            let seats = world.unwrap().seats();
            let mut ends: Vec<Local> = seats.iter().map(Seat::endpoint).collect();
            let ready = |end: &mut Local| matches!(end.direct(), Sharing::Ready(_));
            assert!(ends.iter_mut().all(|end| ready(end) == shares));
        }
    }
}
