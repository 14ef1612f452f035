//! Who drives the acts: the caller's thread while nothing is started, else one worker thread.
//!
//! ```text
//! caller                         worker (spawned at the first start, parked while idle)
//!   start(act, gate) --queue-->    for each act in program order:
//!                                     may it begin?  gate open, no earlier act on its track
//!                                     poll
//!                                  nothing moved: park on what all of them wait for
//! ```
//!
//! The worker holds the link only while it goes round once, so that `subgroup` gets in between.

use std::{
    boxed::Box,
    collections::VecDeque,
    string::{String, ToString},
    sync::{
        Arc, Condvar, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicUsize, Ordering},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
    vec::Vec,
};

use super::{
    act::{Act, Report, Track, Yields},
    observer::{Hearing, Observers},
    stats::{Counters, Stats},
};
use crate::{
    Error, Gate, Pending, ProcessGroup, Result,
    forked::Birth,
    pending::Completer,
    performer::Link,
    transport::{Control, Transport, Wait},
};

/// What a communicator and its worker share.
pub(super) struct Core<T> {
    engine: Mutex<Engine<T>>,
    pub(super) control: Arc<dyn Control>,
    counters: Arc<Counters>,
    birth: Birth,
    pub(super) group: ProcessGroup,
    pub(super) name: String,
    /// Who hears of its calls.
    pub(super) observers: Observers,
    queue: Mutex<Queue<T>>,
    /// Started and not over.
    unfinished: AtomicUsize,
    bell: Condvar,
    /// Threads that want the engine between two rounds of the worker.
    visitors: AtomicUsize,
}

struct Engine<T> {
    link: Link<T>,
    /// Number of the next collective.
    sequence: u64,
}

struct Queue<T> {
    new: VecDeque<Box<dyn Job<T>>>,
    closing: bool,
    worker: Option<JoinHandle<()>>,
    /// The worker panicked: a gate or a buffer did.
    dead: bool,
}

impl<T> core::fmt::Debug for Core<T> {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_struct("Core")
            .field("counters", &self.counters)
            .finish_non_exhaustive()
    }
}

impl<T: Transport + Send + 'static> Core<T> {
    pub(super) fn new(transport: T) -> Arc<Self> {
        let queue = Queue {
            new: VecDeque::new(),
            closing: false,
            worker: None,
            dead: false,
        };
        let ranks: Vec<usize> = (0..transport.world())
            .map(|r| transport.global(r))
            .collect();
        Arc::new(Self {
            birth: Birth::here(),
            group: ProcessGroup::seat(ranks, transport.rank()),
            name: transport.name().to_string(),
            control: transport.control(),
            engine: Mutex::new(Engine {
                link: Link::new(transport),
                sequence: 0,
            }),
            counters: Arc::default(),
            observers: Observers::default(),
            queue: Mutex::new(queue),
            unfinished: AtomicUsize::new(0),
            bell: Condvar::new(),
            visitors: AtomicUsize::new(0),
        })
    }

    pub(super) fn stats(&self) -> Stats {
        self.counters.read()
    }

    /// Whether a blocking call may run on its own thread.
    pub(super) fn idle(&self) -> bool {
        self.unfinished.load(Ordering::Acquire) == 0
    }

    /// Uses the link while no act is polled.
    pub(super) fn visit<R>(&self, body: impl FnOnce(&Link<T>) -> R) -> R {
        self.visitors.fetch_add(1, Ordering::SeqCst);
        self.control.wake();
        let engine = lock(&self.engine);
        self.visitors.fetch_sub(1, Ordering::SeqCst);
        body(&engine.link)
    }

    /// Performs an act on this thread.
    pub(super) fn drive<A: Act<T>>(&self, act: &mut A, deadline: Duration) -> Result<()> {
        self.own()?;
        let mut hearing = self.made(act);
        let mut engine = lock(&self.engine);
        let outcome = self.drive_on(&mut engine, act, deadline, &mut hearing);
        let how = (false, act.track() != Track::Collective);
        hearing.over(&outcome, how, || act.report(), &engine.link.transport);
        outcome
    }

    fn drive_on<A: Act<T>>(
        &self,
        engine: &mut Engine<T>,
        act: &mut A,
        deadline: Duration,
        hearing: &mut Hearing,
    ) -> Result<()> {
        let mut begin = None;
        loop {
            match self.poll(engine, act, hearing) {
                Ok(false) => {}
                over => return over.map(drop),
            }
            let now = Instant::now();
            let waited = now - *begin.get_or_insert(now);
            if waited >= deadline {
                let error = self.timeout(engine, act.report(), waited, act.track());
                act.give_up(&mut engine.link, &error);
                return Err(error);
            }
            let mut wait = Wait {
                all: true,
                eager: true,
                ..Wait::default()
            };
            act.wait(&mut wait);
            engine.link.transport.park(&wait, deadline - waited);
            self.counters.waited(now.elapsed(), true);
        }
    }

    /// A fork may not call.
    fn own(&self) -> Result<()> {
        if self.birth.elsewhere() {
            return Err(Error::Forked {
                group: self.name.clone(),
            });
        }
        Ok(())
    }

    fn made<A: Act<T>>(&self, act: &A) -> Hearing {
        self.observers
            .made(&self.name, &self.group, || act.subject())
    }

    /// Queues an act for the worker.
    pub(super) fn start<A>(
        self: &Arc<Self>,
        act: A,
        gate: impl Gate + 'static,
        deadline: Duration,
    ) -> Result<Pending<A::Output>>
    where
        A: Act<T> + Yields + Send + 'static,
    {
        self.own()?;
        let (pending, completer) = Pending::pair(self.counters.clone());
        let job = Started {
            hearing: self.made(&act),
            act,
            completer,
            gate: Some(Box::new(gate)),
            begun: false,
            since: None,
            deadline,
        };
        let mut queue = lock(&self.queue);
        if queue.dead {
            return Err(Error::Gate(String::from(
                "the worker of this communicator panicked before",
            )));
        }
        if queue.worker.is_none() {
            let core = self.clone();
            let thread = thread::Builder::new().name(String::from("collectives"));
            let spawned = thread.spawn(move || core.work());
            let spawned = spawned.map_err(|e| Error::System {
                what: "start a thread",
                reason: e.to_string(),
            })?;
            queue.worker = Some(spawned);
        }
        self.unfinished.fetch_add(1, Ordering::AcqRel);
        queue.new.push_back(Box::new(job));
        drop(queue);
        self.bell.notify_one();
        self.control.wake();
        Ok(pending)
    }

    /// The communicator is dropped: the worker ends once nothing is left to do.
    pub(super) fn close(&self) {
        if self.birth.elsewhere() {
            // The worker is the parent's.
            return;
        }
        let mut queue = lock(&self.queue);
        queue.closing = true;
        let (worker, idle) = (queue.worker.take(), self.idle());
        drop(queue);
        self.bell.notify_one();
        match worker {
            // It returns as soon as it sees the flag; what it says went to its operations.
            Some(worker) if idle => drop(worker.join()),
            // What it still has to do may depend on how this rank ends, so waiting is not done here.
            Some(worker) => self.control.adopt(worker),
            None => {}
        }
    }

    fn work(self: Arc<Self>) {
        let mut last_rites = LastRites {
            core: &self,
            armed: true,
        };
        let mut jobs: Vec<Box<dyn Job<T>>> = Vec::new();
        while self.take(&mut jobs) {
            while self.visitors.load(Ordering::SeqCst) > 0 {
                thread::yield_now();
            }
            let mut engine = lock(&self.engine);
            if !self.round(&mut engine, &mut jobs) {
                self.rest(&mut engine, &mut jobs);
            }
        }
        last_rites.armed = false;
    }

    /// Fetches new jobs, waiting for one if there are none at all; false when it is time to end.
    fn take(&self, jobs: &mut Vec<Box<dyn Job<T>>>) -> bool {
        let mut queue = lock(&self.queue);
        while jobs.is_empty() && queue.new.is_empty() {
            if queue.closing {
                return false;
            }
            queue = self
                .bell
                .wait(queue)
                .unwrap_or_else(PoisonError::into_inner);
        }
        jobs.extend(queue.new.drain(..));
        true
    }

    /// Lets every job go as far as it can; whether anything ended or began.
    fn round(&self, engine: &mut Engine<T>, jobs: &mut Vec<Box<dyn Job<T>>>) -> bool {
        let (mut moved, mut i) = (false, 0);
        while i < jobs.len() {
            let held = jobs[..i]
                .iter()
                .any(|earlier| earlier.track() == jobs[i].track());
            let begun = jobs[i].begun();
            let outcome = if held {
                Ok(false)
            } else {
                jobs[i].go(self, engine, i == 0)
            };
            moved |= jobs[i].begun() != begun;
            match outcome {
                Ok(false) => i += 1,
                over => {
                    // Out of the books first: who waits for it may call next and expects idleness.
                    let job = jobs.remove(i);
                    self.unfinished.fetch_sub(1, Ordering::AcqRel);
                    job.end(engine, over.map(drop));
                    moved = true;
                }
            }
        }
        moved
    }

    /// Sleeps for whatever any job waits for.
    fn rest(&self, engine: &mut Engine<T>, jobs: &mut [Box<dyn Job<T>>]) {
        let now = Instant::now();
        let mut wait = Wait {
            all: jobs.len() == 1,
            ..Wait::default()
        };
        let mut timeout = SLICE;
        let mut begun = false;
        let mut gated = false;
        for job in jobs.iter_mut() {
            timeout = timeout.min(job.remaining(now));
            if job.begun() {
                begun = true;
                job.wait(&mut wait);
            } else {
                gated |= job.gated();
            }
        }
        if begun {
            let timeout = if gated {
                timeout.min(GATE_SLICE)
            } else {
                timeout
            };
            engine.link.transport.park(&wait, timeout);
            self.counters.waited(now.elapsed(), false);
        } else if let Some(head) = jobs.first_mut() {
            head.doze(timeout.min(GATE_SLICE));
        }
    }

    /// One poll, with its counts published and its failure told to the group.
    fn poll<A: Act<T> + ?Sized>(
        &self,
        engine: &mut Engine<T>,
        act: &mut A,
        hearing: &mut Hearing,
    ) -> Result<bool> {
        let before = engine.link.bytes;
        hearing.polling();
        let outcome = act.poll(&mut engine.link, &mut engine.sequence);
        hearing.polled(engine.link.bytes - before, || act.report());
        self.counters
            .bytes
            .store(engine.link.bytes, Ordering::Relaxed);
        self.counters
            .messages
            .store(engine.link.messages, Ordering::Relaxed);
        if let (Err(error), Track::Collective) = (&outcome, act.track()) {
            self.control.poison(error.clone());
        }
        outcome
    }

    fn timeout(&self, engine: &Engine<T>, report: Report, waited: Duration, track: Track) -> Error {
        let transport = &engine.link.transport;
        // Who has not even called is to blame before whoever waits for it in turn.
        let absent = report
            .called
            .then(|| transport.absent(report.sequence))
            .flatten()
            .filter(|&absent| absent != transport.rank());
        let what = match absent {
            Some(_) if report.all => String::from("its part"),
            Some(absent) if report.peer != Some(absent) => String::from("its call"),
            _ => report.what,
        };
        let peer = absent.or(report.peer).map(|peer| transport.global(peer));
        let error = Error::Timeout {
            group: transport.name().to_string(),
            rank: transport.global(transport.rank()),
            op: report.op,
            sequence: report.sequence,
            peer,
            what: match peer {
                Some(peer) => std::format!("rank {peer}: {what}"),
                None => what,
            },
            waited,
        };
        if track == Track::Collective {
            self.control.poison(error.clone());
        }
        error
    }
}

/// The longest sleep of the worker: a bound on how late it notices its deadlines.
const SLICE: Duration = Duration::from_millis(250);

/// How often a closed gate is asked while something else is under way.
const GATE_SLICE: Duration = Duration::from_micros(500);

/// A started act, whatever it works on.
trait Job<T>: Send {
    fn track(&self) -> Track;
    fn begun(&self) -> bool;
    fn gated(&self) -> bool;
    /// Goes as far as it can; `head`: nothing was started before it.
    fn go(&mut self, core: &Core<T>, engine: &mut Engine<T>, head: bool) -> Result<bool>;
    fn wait(&self, wait: &mut Wait);
    /// Until its deadline.
    fn remaining(&self, now: Instant) -> Duration;
    /// Sleeps until its gate may have opened.
    fn doze(&mut self, timeout: Duration);
    fn end(self: Box<Self>, engine: &Engine<T>, outcome: Result<()>);
}

struct Started<A: Yields> {
    act: A,
    hearing: Hearing,
    completer: Completer<A::Output>,
    gate: Option<Box<dyn Gate>>,
    begun: bool,
    since: Option<Instant>,
    deadline: Duration,
}

impl<T: Transport + Send + 'static, A: Act<T> + Yields + Send> Job<T> for Started<A> {
    fn track(&self) -> Track {
        self.act.track()
    }

    fn begun(&self) -> bool {
        self.begun
    }

    fn gated(&self) -> bool {
        self.gate.is_some()
    }

    fn go(&mut self, core: &Core<T>, engine: &mut Engine<T>, head: bool) -> Result<bool> {
        let since = *self.since.get_or_insert_with(Instant::now);
        if let Some(gate) = &mut self.gate
            && (head || !gate.blocks())
            && gate.wait(Duration::ZERO)?
        {
            self.gate = None;
            self.since = Some(Instant::now());
        }
        if self.gate.is_none() {
            self.begun = true;
            let over = core.poll(engine, &mut self.act, &mut self.hearing);
            if !matches!(over, Ok(false)) {
                return over;
            }
        }
        let waited = since.elapsed();
        if waited < self.deadline {
            return Ok(false);
        }
        let mut report = self.act.report();
        if !self.begun {
            report.peer = None;
            report.what = String::from("its gate");
        }
        let error = core.timeout(engine, report, waited, self.act.track());
        if self.begun {
            self.act.give_up(&mut engine.link, &error);
        }
        Err(error)
    }

    fn wait(&self, wait: &mut Wait) {
        self.act.wait(wait);
    }

    fn remaining(&self, now: Instant) -> Duration {
        let since = self.since.unwrap_or(now);
        self.deadline
            .saturating_sub(now.saturating_duration_since(since))
            + Duration::from_micros(50)
    }

    fn doze(&mut self, timeout: Duration) {
        if let Some(gate) = self.gate.as_mut().filter(|gate| !gate.blocks()) {
            // An error shows again when it is asked next.
            let _ = gate.wait(timeout);
        }
    }

    fn end(mut self: Box<Self>, engine: &Engine<T>, outcome: Result<()>) {
        let (how, transport) = (
            (true, self.act.track() != Track::Collective),
            &engine.link.transport,
        );
        self.hearing
            .over(&outcome, how, || self.act.report(), transport);
        let Self { act, completer, .. } = *self;
        completer.complete(outcome.map(|()| act.output()));
    }
}

/// If the worker unwinds, what is queued fails instead of waiting for ever.
struct LastRites<'a, T> {
    core: &'a Core<T>,
    armed: bool,
}

impl<T> Drop for LastRites<'_, T> {
    fn drop(&mut self) {
        if self.armed {
            let mut queue = lock(&self.core.queue);
            queue.dead = true;
            self.core.unfinished.store(0, Ordering::Release);
            let lost = core::mem::take(&mut queue.new);
            drop(queue);
            // Dropping a job completes its handle with an error.
            drop(lost);
        }
    }
}

/// What a panicking holder leaves is whole or fails by itself later: queues and counters change in
/// single steps, and the group of a half-performed act does not confirm it.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use crate::{Communicator, ReduceOp, World, transport::local::Local};
    use std::{thread, vec};

    /// Numbers of calls and messages go on beyond what 32 bits hold.
    #[test]
    fn numbers_beyond_four_billion_go_on() {
        let late = u64::from(u32::MAX) - 5;
        thread::scope(|scope| {
            for seat in World::new(3).unwrap().seats() {
                scope.spawn(move || {
                    let comm: Communicator<Local> = Communicator::new(seat.endpoint());
                    {
                        let mut engine = super::lock(&comm.core.engine);
                        engine.sequence = late;
                        engine.link.transport.begin_late(late);
                    }
                    for turn in 0..20u64 {
                        // In slots, in the callers' memory, and by messages.
                        for len in [1, 100_000] {
                            let mut x = vec![turn as f32; len];
                            comm.all_reduce(&mut x, ReduceOp::Sum).unwrap();
                            assert!(x.iter().all(|x| *x == 3.0 * turn as f32));
                        }
                        let (right, left) = ((comm.rank() + 1) % 3, (comm.rank() + 2) % 3);
                        let mut got = [0u64];
                        let tag = late + turn;
                        comm.sendrecv(&[turn], right, &mut got, left, tag).unwrap();
                        assert_eq!(got, [turn]);
                        let counts = [1, 1, 1];
                        let mut all = [0u64; 3];
                        comm.all_to_all_v(&[turn; 3], &counts, &mut all, &counts)
                            .unwrap();
                        assert_eq!(all, [turn; 3]);
                    }
                    assert!(super::lock(&comm.core.engine).sequence > u64::from(u32::MAX) + 10);
                });
            }
        });
    }
}
