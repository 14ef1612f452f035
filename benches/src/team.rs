//! Ranks that are threads, started before anything is measured.
//!
//! ```text
//!        <--ready--  rank 0 .. rank N-1
//! run(n) --order-->                       barrier, then n calls each, each on its own clock
//!        <--time---                       the slowest rank's time is the batch's
//!        <--none---                       a rank has left
//! ```

use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Barrier, Mutex, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use quintet_collectives::{Communicator, Local, World};
use quintet_ref_trainer::failure::Failure;

/// Ranks waiting for orders.
#[derive(Debug)]
pub struct Team {
    orders: Vec<Sender<u64>>,
    times: Receiver<Option<Duration>>,
    ready: bool,
    world: Option<JoinHandle<Result<(), Failure>>>,
}

/// A rank's end of the line.
#[derive(Debug)]
pub struct Orders {
    orders: Receiver<u64>,
    times: Sender<Option<Duration>>,
    barrier: Arc<Barrier>,
}

impl Orders {
    /// Does `work` as often as is ordered, until the team is dismissed.
    ///
    /// # Errors
    /// What `work` fails with.
    pub fn serve(self, mut work: impl FnMut() -> Result<(), Failure>) -> Result<(), Failure> {
        // Nobody is ordered to the barrier before all can come to it.
        if self.times.send(Some(Duration::ZERO)).is_err() {
            return Ok(());
        }
        while let Ok(calls) = self.orders.recv() {
            self.barrier.wait();
            let start = Instant::now();
            for _ in 0..calls {
                work()?;
            }
            if self.times.send(Some(start.elapsed())).is_err() {
                break;
            }
        }
        Ok(())
    }
}

impl Drop for Orders {
    fn drop(&mut self) {
        // Nobody may be listening any more.
        let _ = self.times.send(None);
    }
}

impl Team {
    /// Starts `ranks` threads, each with its communicator, that prepare and then
    /// [`Orders::serve`].
    ///
    /// # Errors
    /// For a team of none.
    pub fn start<F>(ranks: usize, body: F) -> Result<Self, Failure>
    where
        F: Fn(Communicator<Local>, Orders) -> Result<(), Failure> + Send + Sync + 'static,
    {
        let world = World::new(ranks)?;
        let barrier = Arc::new(Barrier::new(ranks));
        let (mut orders, mut ends) = (Vec::new(), Vec::new());
        let (time, times) = channel();
        for _ in 0..ranks {
            let (order, mine) = channel();
            orders.push(order);
            ends.push(Some(Orders {
                orders: mine,
                times: time.clone(),
                barrier: barrier.clone(),
            }));
        }
        drop(time);
        let ends = Mutex::new(ends);
        let run = move || {
            world.go(|comm| {
                let mut ends = ends.lock().unwrap_or_else(PoisonError::into_inner);
                let mine = ends[comm.rank()].take();
                drop(ends);
                match mine {
                    Some(mine) => body(comm, mine),
                    None => Err(Failure::aborted("a rank was started twice")),
                }
            })?;
            Ok(())
        };
        Ok(Self {
            orders,
            times,
            ready: false,
            world: Some(thread::spawn(run)),
        })
    }

    /// Lets every rank do its work `calls` times; the time of the slowest.
    ///
    /// # Errors
    /// What a rank failed with, now or while it prepared.
    pub fn run(&mut self, calls: u64) -> Result<Duration, Failure> {
        if !self.ready {
            self.slowest()?;
            self.ready = true;
        }
        for order in &self.orders {
            if order.send(calls).is_err() {
                return self.end();
            }
        }
        self.slowest()
    }

    /// Ends the ranks and waits for them.
    ///
    /// # Errors
    /// What a rank failed with.
    pub fn dismiss(mut self) -> Result<(), Failure> {
        self.orders.clear();
        self.join()
    }

    /// One answer of every rank.
    fn slowest(&mut self) -> Result<Duration, Failure> {
        let mut slowest = Duration::ZERO;
        for _ in 0..self.orders.len() {
            match self.times.recv() {
                Ok(Some(time)) => slowest = slowest.max(time),
                _ => return self.end(),
            }
        }
        Ok(slowest)
    }

    fn end(&mut self) -> Result<Duration, Failure> {
        self.orders.clear();
        self.join()?;
        Err(Failure::aborted("a rank left before its work was done"))
    }

    fn join(&mut self) -> Result<(), Failure> {
        match self.world.take().map(JoinHandle::join) {
            Some(Ok(end)) => end,
            Some(Err(_)) => Err(Failure::aborted("a rank's thread panicked")),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use quintet_collectives::ReduceOp;

    #[test]
    fn works_on_order_and_tells_failures() -> Result<(), Failure> {
        let mut team = Team::start(3, |comm, orders| {
            orders.serve(|| Ok(comm.all_reduce(&mut [1.0_f32], ReduceOp::Sum)?))
        })?;
        assert!(team.run(5)? > Duration::ZERO);
        team.run(1)?;
        team.dismiss()?;
        let broken = |comm: Communicator<Local>, orders: Orders| {
            orders.serve(|| {
                if comm.rank() == 1 {
                    return Err(Failure::usage("no"));
                }
                Ok(comm.all_reduce(&mut [1.0_f32], ReduceOp::Sum)?)
            })
        };
        let mut team = Team::start(2, broken)?;
        assert!(team.run(1).is_err());
        let absent = |comm: Communicator<Local>, orders: Orders| match comm.rank() {
            1 => Err(Failure::usage("never came")),
            _ => orders.serve(|| Ok(())),
        };
        let end = Team::start(2, absent)?.run(1);
        assert_eq!(end, Err(Failure::usage("never came")));
        Ok(())
    }
}
