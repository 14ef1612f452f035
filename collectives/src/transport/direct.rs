//! Collectives performed in memory that the ranks share (`std`), instead of by messages.
//!
//! ```text
//! short inputs    copy mine into my slot | publish ... all there? | fold or copy what I need
//! threads, and    say where mine lies    | publish ... all there? | claim duties, read the inputs of all and
//! shared buffers                                                  |   write the outputs of all | all finished?
//! other slices    piece after piece: copy into my stage | publish ... all there? | fold, copy out
//! of processes    what is only copied, of middle length: read it where it lies, if that is permitted | publish ... all there?
//! ```
//!
//! The second way touches each byte of each input and each output once, which is the least there is
//! (single copy; Open MPI's xhc and XPMEM are of this kind, writing straight into the outputs is not common).
//! The first costs one turn of a cache line between any two ranks.
//!
//! Only plans that fold in rank order, or not at all, are performed this way: their result is that
//! of a serial loop over the ranks, whoever computes which part, so nothing but time changes. What such a call
//! sends is counted as the plan has it.
//!
//! `claim.rs` has the protocol, its table of orderings, and what happens when a rank gives up.

use core::ptr::NonNull;
use std::{
    sync::{Arc, atomic::AtomicU64},
    thread,
    time::{Duration, Instant},
};

use crate::transport::Call;

mod arena;
mod brief;
mod claim;
mod duty;
mod raw;
mod remote;
mod shared;
mod staged;
mod work;

pub(crate) use arena::Arena;
pub(crate) use brief::{Outline, Task};
pub use raw::copy_bytes;
pub(crate) use raw::{fold_two, goes_past};
pub(crate) use shared::Pinned;
pub(crate) use work::Memory;
#[cfg(target_os = "linux")]
pub(crate) use {arena::Plot, raw::copy};

use claim::ORDERS;

/// One rank's end of the memory that its group shares.
pub struct End {
    arena: Arc<Arena>,
    me: usize,
    /// Steps that I have published.
    step: u64,
    /// Turns and duties of the second way so far; all ranks count alike.
    turn: u64,
    due: u64,
    /// My last call, and the step that it was published with.
    call: Option<(u64, u64)>,
    /// Calls below this number are confirmed.
    confirmed: u64,
    aim: Aim,
    /// Whether the call to be announced is a short one.
    brief: bool,
    /// The step after whose publication nobody was woken yet.
    owed: Option<u64>,
    /// Whether ranks have a core each, so that to spin is not to keep others from running.
    brisk: bool,
    reach: Reach,
    /// Whether slices may be read where they lie; all ranks of the group know the same.
    remote: bool,
    bell: Arc<dyn Bell>,
    /// Where payload bytes are counted.
    moved: Arc<AtomicU64>,
}

/// What a rank waits for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Aim {
    Step(u64),
    Finished(u64),
    /// The group's end, whose cause is on its way.
    Nothing,
}

/// How the memory of other ranks is reached.
#[derive(Clone)]
pub(crate) enum Reach {
    /// By its address.
    Threads,
    /// Where it lies in a segment that all have mapped.
    Segments(Arc<dyn Segments>),
}

/// The segments of the ranks of a group.
pub(crate) trait Segments: Send + Sync {
    /// Where in my segment these bytes lie, if they do.
    fn place(&self, address: *const u8, bytes: usize) -> Option<u64>;
    /// Where a place in a rank's segment lies here.
    fn address(&self, rank: usize, place: u64, bytes: usize) -> Option<NonNull<u8>>;
    /// These bytes of mine must not be seen or written by others any more; their contents stay.
    fn part(&self, address: NonNull<u8>, bytes: usize);
    /// Whether this rank may read the memory of all others; some of it may still refuse.
    fn reads(&self) -> bool;
    /// Copies bytes out of a rank's memory, from an address of its process; false where they cannot be had.
    ///
    /// # Safety
    /// `to` is writable for `bytes`, and nobody else's.
    #[allow(unsafe_code)]
    unsafe fn read(&self, rank: usize, from: u64, to: *mut u8, bytes: usize) -> bool;
}

/// Wakes the ranks of a group.
pub(crate) trait Bell: Send + Sync {
    /// A rank that sleeps in the way `how`.
    fn ring(&self, rank: usize, how: u64);
}

/// Whether a group shares memory.
pub enum Sharing<'a> {
    /// It does not.
    Never,
    /// Whoever provides the memory has not come yet.
    NotYet,
    /// It does.
    Ready(&'a mut End),
}

/// What is known of the other ranks' calls.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Heard {
    /// All have made mine.
    All,
    /// This one has made another.
    Differs(usize),
    /// Not all have come to it.
    Some,
}

/// How long a rank that waits keeps looking before it sleeps.
const LINGER: Duration = Duration::from_micros(60);

/// The same of a thread with nothing else to do, where all ranks have made the call. To sleep and be woken costs more than
/// most of what is left to be done, and a core that falls asleep may come back slower, or elsewhere.
const AT_WORK: Duration = Duration::from_micros(500);

/// The same within an operation that is being polled: looks without a pause, then with one between any two, which
/// may last as long as a cache line takes to come.
const EAGER: u32 = 200;
const GLANCES: u32 = 40;

impl core::fmt::Debug for End {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_struct("End")
            .field("step", &self.step)
            .field("aim", &self.aim)
            .finish_non_exhaustive()
    }
}

impl End {
    /// My end of an arena; `ranks` is how many share this machine's cores.
    pub(crate) fn new(
        (arena, me): (Arc<Arena>, usize),
        ranks: usize,
        reach: Reach,
        bell: Arc<dyn Bell>,
    ) -> Self {
        Self {
            me,
            step: 0,
            turn: 0,
            due: 0,
            call: None,
            confirmed: 0,
            aim: Aim::Step(0),
            brief: false,
            owed: None,
            brisk: ranks <= cores(),
            reach,
            remote: true,
            bell,
            moved: Arc::default(),
            arena,
        }
    }

    /// As after so many steps and turns.
    #[cfg(test)]
    pub(crate) fn begin_late(&mut self, steps: u64) {
        (self.step, self.turn) = (steps, steps);
    }

    /// The same, with what a plan sends counted there too.
    #[cfg(target_os = "linux")]
    pub(crate) fn counting(mut self, moved: Arc<AtomicU64>) -> Self {
        self.moved = moved;
        self
    }

    /// So many bytes of a plan need not be sent.
    pub(crate) fn count(&self, bytes: u64) {
        self.moved
            .fetch_add(bytes, std::sync::atomic::Ordering::Relaxed);
    }

    pub(crate) fn arena(&self) -> &Arena {
        &self.arena
    }

    /// Tells the others what my next call is.
    pub(crate) fn announce(&mut self, call: &Call) {
        let digest = self.arena.digest(self.me, call.sequence);
        digest.store(call.digest(), std::sync::atomic::Ordering::Relaxed);
        let step = self.advance();
        self.owed = Some(step);
        if !core::mem::take(&mut self.brief) {
            self.settle();
        }
        self.call = Some((call.sequence, step));
    }

    /// What is known of my last call.
    pub(crate) fn heard(&mut self) -> Heard {
        let Some((sequence, step)) = self.call.filter(|(s, _)| *s >= self.confirmed) else {
            return Heard::All;
        };
        let mine = self.digest(self.me, sequence);
        let mut all = true;
        for rank in 0..self.arena.world() {
            if !ORDERS.reached(self.arena.progress(rank), step) {
                all = false;
            } else if self.digest(rank, sequence) != mine {
                return Heard::Differs(rank);
            }
        }
        if all {
            self.confirmed = sequence + 1;
            Heard::All
        } else {
            Heard::Some
        }
    }

    /// Whether a rank has made another call than mine under this number, as far as is known.
    pub(crate) fn differs(&self, rank: usize, sequence: u64) -> bool {
        self.call.is_some_and(|(mine, step)| {
            mine == sequence
                && ORDERS.reached(self.arena.progress(rank), step)
                && self.digest(rank, sequence) != self.digest(self.me, sequence)
        })
    }

    /// A rank for which all others wait, where that is known.
    pub(crate) fn laggard(&self) -> Option<usize> {
        match self.aim {
            Aim::Step(step) => (0..self.arena.world())
                .find(|&rank| !ORDERS.reached(self.arena.progress(rank), step)),
            Aim::Finished(_) => (0..arena::DUTIES)
                .find_map(|index| ORDERS.holder(self.arena.duty(index), self.turn)),
            Aim::Nothing => None,
        }
    }

    /// Whether a rank has made my last call.
    pub(crate) fn has_called(&self, rank: usize) -> bool {
        let reached = |(_, step)| ORDERS.reached(self.arena.progress(rank), step);
        self.call.is_none_or(reached)
    }

    /// Whether what this rank waits for has come.
    pub(crate) fn arrived(&self) -> bool {
        match self.aim {
            Aim::Step(step) => self.arena.all_reached(step),
            Aim::Finished(count) => ORDERS.finished(self.arena.finished(), count),
            Aim::Nothing => false,
        }
    }

    /// Keeps looking for a while, at most `time`; whether `ready` has come true. `eager` says that this thread has
    /// nothing else to do.
    pub(crate) fn linger(&self, eager: bool, time: Duration, ready: impl Fn() -> bool) -> bool {
        let begin = Instant::now();
        let mut looks = 0u32;
        loop {
            if ready() {
                return true;
            }
            looks += 1;
            if self.brisk {
                core::hint::spin_loop();
            } else {
                thread::yield_now();
            }
            if self.brisk && !looks.is_multiple_of(32) {
                continue;
            }
            let looked = begin.elapsed();
            let at_work = || eager && looked <= time.min(AT_WORK) && self.all_at_work();
            if looked > time.min(LINGER) && !at_work() {
                return false;
            }
        }
    }

    /// Whether all ranks, who have a core each, have made my last call and it is under way.
    fn all_at_work(&self) -> bool {
        let called = || (0..self.arena.world()).all(|rank| self.has_called(rank));
        self.brisk && self.aim != Aim::Nothing && !self.arrived() && called()
    }

    /// Looks a few times; whether it has come.
    pub(crate) fn glance(&mut self) -> bool {
        let (eager, patient) = if self.brisk { (EAGER, GLANCES) } else { (1, 0) };
        for look in 0..eager + patient {
            if self.arrived() {
                return true;
            }
            if look >= eager {
                core::hint::spin_loop();
            }
        }
        self.settle();
        false
    }

    /// Says that I sleep in the way `how`; where what I wait for has come meanwhile I must not.
    pub(crate) fn may_sleep(&self, how: u64) -> bool {
        let sleeping: &AtomicU64 = self.arena.sleeping(self.me);
        ORDERS.sleep(sleeping, how);
        !self.arrived()
    }

    /// I do not sleep.
    pub(crate) fn awake(&self) {
        let sleeping: &AtomicU64 = self.arena.sleeping(self.me);
        sleeping.store(0, std::sync::atomic::Ordering::Relaxed);
    }

    /// The next step is there for all to see; whoever comes last wakes those who sleep.
    fn publish(&mut self) {
        self.owed = Some(self.advance());
        self.settle();
    }

    /// The next step is there for all to see.
    fn advance(&mut self) -> u64 {
        self.step += 1;
        ORDERS.publish(self.arena.progress(self.me), self.step);
        self.aim = Aim::Step(self.step);
        self.step
    }

    /// Wakes those who sleep for the last step, where that was put off and nobody else is to come. Until then this
    /// rank neither sleeps nor is through with its call.
    pub(crate) fn settle(&mut self) {
        if let Some(step) = self.owed.take() {
            ORDERS.rouse::<AtomicU64>();
            if self.arena.all_reached(step) {
                self.rouse();
            }
        }
    }

    /// I begin no more duties of this turn.
    fn finish(&mut self, count: u64) {
        ORDERS.finish(self.arena.finished(), count);
        ORDERS.rouse::<AtomicU64>();
        self.aim = Aim::Finished(self.due);
        if self.arrived() {
            self.rouse();
        }
    }

    fn rouse(&self) {
        for rank in (0..self.arena.world()).filter(|&rank| rank != self.me) {
            let how = ORDERS.sleeps(self.arena.sleeping(rank));
            if how != 0 {
                self.bell.ring(rank, how);
            }
        }
    }

    fn digest(&self, rank: usize, sequence: u64) -> u64 {
        let digest = self.arena.digest(rank, sequence);
        digest.load(std::sync::atomic::Ordering::Relaxed)
    }
}

/// Cores that this process may use.
pub(crate) fn cores() -> usize {
    static CORES: std::sync::OnceLock<usize> = std::sync::OnceLock::new();
    *CORES.get_or_init(|| thread::available_parallelism().map_or(1, usize::from))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Algorithm, CollectiveShape, DType, Order, Plan};

    struct Silent;
    impl Bell for Silent {
        fn ring(&self, _: usize, _: u64) {}
    }

    /// How long rank 0 of two looks for what does not come: the least of a few goes, for a machine may halt it.
    fn looks(end: &End, eager: bool, time: Duration) -> Duration {
        let go = |_| {
            let begin = Instant::now();
            assert!(!end.linger(eager, time, || false));
            begin.elapsed()
        };
        (0..20).map(go).min().unwrap()
    }

    #[test]
    fn who_has_nothing_else_to_do_looks_longer_where_all_have_called() {
        let arena = Arc::new(Arena::heap_with(2, 0));
        let end = |rank| End::new((arena.clone(), rank), 1, Reach::Threads, Arc::new(Silent));
        let (mut mine, mut theirs) = (end(0), end(1));
        let shape = CollectiveShape::AllReduce { len: 1 << 20 };
        let plan = Plan::new(shape, Algorithm::Pairwise, 2).unwrap();
        let call = Call::new(0, plan.shape(), 2, DType::F32, None, Order::Rank);
        mine.announce(&call);
        assert!(looks(&mine, true, AT_WORK) < AT_WORK, "one has not called");
        theirs.announce(&call);
        assert!(
            looks(&mine, true, AT_WORK) < AT_WORK,
            "nothing is under way"
        );
        mine.publish();
        assert!(looks(&mine, true, 2 * AT_WORK) >= AT_WORK);
        assert!(looks(&mine, false, 2 * AT_WORK) < AT_WORK, "others compute");
        assert!(
            looks(&mine, true, LINGER) < AT_WORK,
            "it may wait no longer"
        );
        theirs.publish();
        assert!(looks(&mine, true, AT_WORK) < AT_WORK, "it has come");
    }
}
