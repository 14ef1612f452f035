//! What orders memory within a block: a table, and the clocks that follow it.
//!
//! Each thread has a clock that ticks when it releases, as it comes and not as others do. What a thread knows of the others is one
//! vector, shared between threads that met last at the same place:
//!
//! ```text
//! t0 w(x) --- syncwarp ------ bar.sync --- r(y)      before(t1's w(y), t0)?
//! t1 --- w(y) ---- syncwarp --- bar.sync ---         known_by[t0][t1] >= clock of the write
//! ```

use alloc::rc::Rc;
use alloc::vec::Vec;

/// An instruction that threads meet at, or that moves data out of step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Meeting {
    /// `bar.sync`, `__syncthreads`.
    BarSync,
    /// `bar.arrive`.
    BarArrive,
    /// `bar.warp.sync`, `__syncwarp`.
    SyncWarp,
    /// `shfl.sync`.
    Shuffle,
    /// `vote.sync`.
    Vote,
    /// `redux.sync`.
    Reduce,
    /// `ldmatrix`.
    LdMatrix,
    /// `stmatrix`.
    StMatrix,
    /// `mma.sync`.
    Mma,
    /// `cp.async.commit_group`.
    CpAsyncCommit,
    /// `cp.async.wait_group`.
    CpAsyncWait,
}

/// What a meeting does to memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Rule {
    /// The instruction.
    pub meeting: Meeting,
    /// What the thread did before is seen by those who acquire at this meeting.
    pub releases: bool,
    /// The thread sees what those who release at this meeting did before.
    pub acquires: bool,
    /// The thread sees its own asynchronous copies of the groups waited for.
    pub completes_own: bool,
    /// The section of the PTX ISA that says so.
    pub anchor: &'static str,
}

const fn rule(
    meeting: Meeting,
    (releases, acquires, completes_own): (bool, bool, bool),
    anchor: &'static str,
) -> Rule {
    Rule {
        meeting,
        releases,
        acquires,
        completes_own,
        anchor,
    }
}

/// The table: which meetings order memory, and which way.
pub const RULES: [Rule; 11] = [
    rule(
        Meeting::BarSync,
        (true, true, false),
        "#parallel-synchronization-and-communication-instructions-bar",
    ),
    rule(
        Meeting::BarArrive,
        (true, false, false),
        "#parallel-synchronization-and-communication-instructions-bar",
    ),
    rule(
        Meeting::SyncWarp,
        (true, true, false),
        "#parallel-synchronization-and-communication-instructions-bar-warp-sync",
    ),
    rule(
        Meeting::Shuffle,
        (false, false, false),
        "#data-movement-and-conversion-instructions-shfl-sync",
    ),
    rule(
        Meeting::Vote,
        (false, false, false),
        "#parallel-synchronization-and-communication-instructions-vote-sync",
    ),
    rule(
        Meeting::Reduce,
        (false, false, false),
        "#parallel-synchronization-and-communication-instructions-redux-sync",
    ),
    rule(
        Meeting::LdMatrix,
        (false, false, false),
        "#warp-level-matrix-instructions-ldmatrix",
    ),
    rule(
        Meeting::StMatrix,
        (false, false, false),
        "#warp-level-matrix-instructions-stmatrix",
    ),
    rule(
        Meeting::Mma,
        (false, false, false),
        "#warp-level-matrix-instructions-mma",
    ),
    rule(
        Meeting::CpAsyncCommit,
        (false, false, false),
        "#data-movement-and-conversion-instructions-cp-async-commit-group",
    ),
    rule(
        Meeting::CpAsyncWait,
        (false, false, true),
        "#data-movement-and-conversion-instructions-cp-async-wait-group",
    ),
];

impl Meeting {
    /// The meeting's row of [`RULES`].
    #[must_use]
    pub fn rule(self) -> &'static Rule {
        &RULES[self as usize]
    }
}

/// The clocks of one block's threads.
#[derive(Debug)]
pub(super) struct Clocks {
    own: Vec<u16>,
    known: Vec<Rc<Vec<u16>>>,
}

/// The last value a clock may take.
pub(super) const LAST_CLOCK: u16 = u16::MAX;

impl Clocks {
    pub(super) fn new(threads: usize) -> Self {
        let nothing = Rc::new(alloc::vec![0; threads]);
        Self {
            own: alloc::vec![1; threads],
            known: alloc::vec![nothing; threads],
        }
    }

    /// The clock that stamps what `thread` does now.
    pub(super) fn now(&self, thread: usize) -> u16 {
        self.own[thread]
    }

    /// Whether what `other` did at `clock` is seen by `thread`.
    #[inline]
    pub(super) fn before(&self, other: usize, clock: u16, thread: usize) -> bool {
        other == thread || self.known[thread][other] >= clock
    }

    /// What `thread` lets others see as it comes to a meeting; what it does next comes after.
    /// Fails where the clock would pass [`LAST_CLOCK`].
    pub(super) fn release(&mut self, thread: usize) -> Result<Release, ()> {
        let clock = self.own[thread];
        if clock == LAST_CLOCK {
            return Err(());
        }
        self.own[thread] += 1;
        Ok(Release {
            thread,
            clock,
            known: self.known[thread].clone(),
        })
    }

    /// Lets each of `who` see all of `released`.
    pub(super) fn acquire(&mut self, who: impl Iterator<Item = usize>, released: &[Release]) {
        let Some(first) = released.first() else {
            return;
        };
        let mut sum = first.known.to_vec();
        let mut seen = alloc::vec![Rc::as_ptr(&first.known)];
        for release in released {
            if !seen.contains(&Rc::as_ptr(&release.known)) {
                seen.push(Rc::as_ptr(&release.known));
                join(&mut sum, &release.known);
            }
        }
        for release in released {
            sum[release.thread] = sum[release.thread].max(release.clock);
        }
        let sum = Rc::new(sum);
        for thread in who {
            if seen.contains(&Rc::as_ptr(&self.known[thread])) {
                self.known[thread] = sum.clone();
            } else {
                let mut own = self.known[thread].to_vec();
                join(&mut own, &sum);
                self.known[thread] = Rc::new(own);
            }
        }
    }

    /// A meeting at which all of `who` stand, under one rule.
    pub(super) fn meet(&mut self, who: &[usize], rule: &Rule) -> Result<(), ()> {
        let mut released = Vec::new();
        for &thread in who.iter().filter(|_| rule.releases) {
            released.push(self.release(thread)?);
        }
        self.acquire(who.iter().copied().filter(|_| rule.acquires), &released);
        Ok(())
    }
}

/// What a thread had done and seen when it came to a meeting.
#[derive(Debug, Clone)]
pub(super) struct Release {
    thread: usize,
    clock: u16,
    known: Rc<Vec<u16>>,
}

fn join(into: &mut [u16], other: &[u16]) {
    for (x, y) in into.iter_mut().zip(other) {
        *x = (*x).max(*y);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_meeting_has_its_row() {
        for (i, rule) in RULES.iter().enumerate() {
            assert_eq!(rule.meeting as usize, i);
            assert_eq!(rule.meeting.rule(), rule);
            assert!(rule.anchor.starts_with('#'));
        }
    }

    #[test]
    fn barriers_order_both_ways_and_arrivals_one() {
        let mut clocks = Clocks::new(3);
        let arrived = clocks.release(0).unwrap();
        let synced = clocks.release(1).unwrap();
        clocks.acquire([1].into_iter(), &[arrived, synced]);
        assert!(clocks.before(0, 1, 1));
        assert!(!clocks.before(1, 1, 0));
        assert!(!clocks.before(0, 2, 1), "what comes after is not ordered");
        clocks.meet(&[1, 2], Meeting::BarSync.rule()).unwrap();
        assert!(clocks.before(0, 1, 2), "order is transitive");
        assert!(!clocks.before(2, 1, 0));
    }

    #[test]
    fn shuffles_order_nothing() {
        let mut clocks = Clocks::new(2);
        clocks.meet(&[0, 1], Meeting::Shuffle.rule()).unwrap();
        assert!(!clocks.before(0, 1, 1) && !clocks.before(1, 1, 0));
    }
}
