//! The words by which ranks agree who touches whose memory, and when it is nobody any more.
//!
//! ```text
//! rank r   write own memory | publish(step) ... all reached(step)? | claim(i) touch done(i) ... | finish(count)
//!                                                                  |                            | all finished?
//! gives up at any point:      revoke(i) for every i: free -> revoked, done -> done, claimed -> wait for done
//! ```
//!
//! A collective in shared memory is cut into duties; whoever runs claims the next one, so that nobody
//! waits for a rank that is not scheduled. The word of a duty holds the turn (a number that all
//! ranks count alike) and its state; words only grow, so nothing is ever reset:
//!
//! ```text
//! turn t:   anything below CLAIMED(t) is free     CLAIMED(t) by rank r     REVOKED(t)     DONE(t)
//! ```
//!
//! A rank that has published may not return while somebody may still touch its memory. It revokes
//! what is free (who comes later finds that and stops) and waits for what is claimed. A claimer waits for
//! nothing, so this ends.
//!
//! # Orderings
//!
//! `claim::laws` runs the protocol under loom: every rank may give up, or never run again, at every
//! step; and once more with each ordering below weakened to `Relaxed`, which loom must catch.
//!
//! | ordering | where | without it |
//! |----------|-------|------------|
//! | `publish` Release | progress, before anybody may look | a claimer reads memory from before it was written |
//! | `reached` Acquire | progress, before a duty is claimed | the same |
//! | `done` Release | a duty's word, after it was performed | who gave up reuses memory that is still being written |
//! | `held` Acquire | a duty's word, by who gave up | the same |
//! | `finish` Release | the counter, after the last duty of a rank | the result is read before it is written |
//! | `finished` Acquire | the counter, before returning | the same |
//! | `sleep`, `rouse` SeqCst fences | between one's own store and the look at the other's | both look too early, and nobody is woken |
//! | `close` fence (SeqCst: after it writes may go past the caches, which Release does not order) | after the word that says my memory may be read, before I use it for something else | who has read what I wrote later takes it for what I showed |
//! | `read` Acquire fence | after the last byte was read, before that word is looked at | the same |
//! | `claim`, `revoke` Relaxed already | a duty's word | both exchange the same word, of which one order exists: one of them wins and the other sees it; neither publishes anything |

use std::sync::atomic::{AtomicU64, Ordering, fence};

/// A word that ranks share. Loom has its own.
pub(super) trait Word {
    fn load(&self, order: Ordering) -> u64;
    fn store(&self, value: u64, order: Ordering);
    fn exchange(&self, old: u64, new: u64, order: Ordering) -> Result<u64, u64>;
    fn add(&self, more: u64, order: Ordering) -> u64;
    fn fence(order: Ordering);
}

impl Word for AtomicU64 {
    fn load(&self, order: Ordering) -> u64 {
        self.load(order)
    }
    fn store(&self, value: u64, order: Ordering) {
        self.store(value, order);
    }
    fn exchange(&self, old: u64, new: u64, order: Ordering) -> Result<u64, u64> {
        self.compare_exchange(old, new, order, Ordering::Relaxed)
    }
    fn add(&self, more: u64, order: Ordering) -> u64 {
        self.fetch_add(more, order)
    }
    fn fence(order: Ordering) {
        fence(order);
    }
}

/// The orderings of the protocol; see the table of this module.
#[derive(Debug, Clone, Copy)]
pub(super) struct Orders {
    pub(super) publish: Ordering,
    pub(super) reached: Ordering,
    pub(super) done: Ordering,
    pub(super) held: Ordering,
    pub(super) finish: Ordering,
    pub(super) finished: Ordering,
    pub(super) sleep: Option<Ordering>,
    pub(super) rouse: Option<Ordering>,
    pub(super) close: Option<Ordering>,
    pub(super) read: Option<Ordering>,
}

/// Those that are used.
pub(super) const ORDERS: Orders = Orders {
    publish: Ordering::Release,
    reached: Ordering::Acquire,
    done: Ordering::Release,
    held: Ordering::Acquire,
    finish: Ordering::Release,
    finished: Ordering::Acquire,
    sleep: Some(Ordering::SeqCst),
    rouse: Some(Ordering::SeqCst),
    close: Some(Ordering::SeqCst),
    read: Some(Ordering::Acquire),
};

/// What became of the attempt to claim a duty.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Claim {
    /// Mine: it must be performed, then [`Orders::done`].
    Mine,
    /// Somebody has it or has done it.
    Taken,
    /// Somebody gave up: nothing more may be touched in this turn.
    Revoked,
}

/// Bits below the turn: the state, and the claimer.
const STATE: u64 = 2;
const RANK: u64 = 12;
const CLAIMED: u64 = 1;
const REVOKED: u64 = 2;
const DONE: u64 = 3;

/// The most ranks whose number a word can hold.
pub(super) const RANKS: usize = 1 << RANK;

fn word(turn: u64, rank: usize, state: u64) -> u64 {
    (turn << (RANK + STATE)) | ((rank as u64) << STATE) | state
}

/// The state in this turn, or 0 where it is of an earlier one.
fn state(word: u64, turn: u64) -> u64 {
    if word >> (RANK + STATE) < turn {
        0
    } else {
        word & ((1 << STATE) - 1)
    }
}

fn claimer(word: u64) -> usize {
    ((word >> STATE) as usize) & (RANKS - 1)
}

impl Orders {
    /// What I wrote before is there for all who see `step`.
    pub(super) fn publish<W: Word>(&self, progress: &W, step: u64) {
        progress.store(step, self.publish);
    }

    /// Whether a rank has got so far.
    pub(super) fn reached<W: Word>(&self, progress: &W, step: u64) -> bool {
        progress.load(self.reached) >= step
    }

    /// Turns count from 1.
    pub(super) fn claim<W: Word>(&self, duty: &W, turn: u64, me: usize) -> Claim {
        let mut seen = duty.load(Ordering::Relaxed);
        loop {
            match state(seen, turn) {
                0 => {}
                REVOKED => return Claim::Revoked,
                _ => return Claim::Taken,
            }
            match duty.exchange(seen, word(turn, me, CLAIMED), Ordering::Relaxed) {
                Ok(_) => return Claim::Mine,
                Err(other) => seen = other,
            }
        }
    }

    /// A claimed duty was performed.
    pub(super) fn done<W: Word>(&self, duty: &W, turn: u64, me: usize) {
        duty.store(word(turn, me, DONE), self.done);
    }

    /// Nobody may begin this duty any more; who still holds it, if somebody does.
    pub(super) fn revoke<W: Word>(&self, duty: &W, turn: u64) -> Option<usize> {
        let mut seen = duty.load(self.held);
        loop {
            match state(seen, turn) {
                0 => {}
                CLAIMED => return Some(claimer(seen)),
                _ => return None,
            }
            match duty.exchange(seen, word(turn, 0, REVOKED), Ordering::Relaxed) {
                Ok(_) => return None,
                Err(_) => seen = duty.load(self.held),
            }
        }
    }

    /// Who has claimed a duty and not done it.
    pub(super) fn holder<W: Word>(&self, duty: &W, turn: u64) -> Option<usize> {
        let seen = duty.load(Ordering::Relaxed);
        (state(seen, turn) == CLAIMED).then(|| claimer(seen))
    }

    /// I have performed so many duties and begin no more in this turn.
    pub(super) fn finish<W: Word>(&self, finished: &W, count: u64) {
        finished.add(count, self.finish);
    }

    /// Whether so many duties have been performed, counted over all turns.
    pub(super) fn finished<W: Word>(&self, finished: &W, count: u64) -> bool {
        finished.load(self.finished) >= count
    }

    /// Says that I am about to sleep; look again before doing so.
    pub(super) fn sleep<W: Word>(&self, sleeping: &W, how: u64) {
        sleeping.store(how, Ordering::Relaxed);
        if let Some(order) = self.sleep {
            W::fence(order);
        }
    }

    /// After what others may wait for: how a rank sleeps, 0 where it does not.
    pub(super) fn sleeps<W: Word>(&self, sleeping: &W) -> u64 {
        sleeping.load(Ordering::Relaxed)
    }

    /// Others that have read my memory for this call have read in vain, unless they are done already.
    pub(super) fn close<W: Word>(&self, open: &W) {
        open.store(0, Ordering::Relaxed);
        if let Some(order) = self.close {
            W::fence(order);
        }
    }

    /// I have read all that I need; look at [`Orders::open`] of each rank after this.
    pub(super) fn read<W: Word>(&self) {
        if let Some(order) = self.read {
            W::fence(order);
        }
    }

    /// Whether what I read was what a rank showed for this call.
    pub(super) fn open<W: Word>(&self, open: &W, sequence: u64) -> bool {
        open.load(Ordering::Relaxed) == sequence + 1
    }

    /// Between what others may wait for and [`Orders::sleeps`].
    pub(super) fn rouse<W: Word>(&self) {
        if let Some(order) = self.rouse {
            W::fence(order);
        }
    }
}

#[cfg(test)]
#[path = "claim_laws.rs"]
mod laws;
