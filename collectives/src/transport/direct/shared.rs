//! One rank's part of one collective in shared memory, as far as it has got.
#![allow(unsafe_code)]

use core::ptr::{NonNull, with_exposed_provenance_mut};
use std::{boxed::Box, sync::Arc, thread, time::Instant};

use super::{
    Arena, End, Reach,
    arena::{DUTIES, Post},
    claim::{Claim, ORDERS},
    duty::Duties,
    remote::{self, Remote, Went},
    staged::Staged,
    work::{Beyond, Hands, Memory},
};
use crate::{Element, ReduceOp, plan::Plan};

/// A call under way. Dropped before its end it sees to it that nobody writes to the caller's memory
/// any more, and that what others still read of it is worth nothing to them.
pub(crate) struct Shared {
    pub(super) plan: Arc<Plan>,
    pub(super) op: ReduceOp,
    pub(super) memory: Memory,
    sequence: u64,
    stage: Stage,
    turn: u64,
    me: usize,
    arena: Arc<Arena>,
    reach: Reach,
}

enum Stage {
    /// I have said where my memory lies.
    Posted,
    /// I have done what I could.
    Finishing,
    /// Somebody gave up; the cause is on its way.
    Revoked,
    Remote(Remote),
    Staged(Staged),
    Over,
}

/// Bytes of a duty's piece: long enough to be worth a claim (and, of a long call, to be read ahead), short enough to be
/// shared out.
const PIECE: usize = 64 << 10;
const LONG_PIECE: usize = 256 << 10;

/// No memory of mine is needed.
const NONE: u64 = u64::MAX;

impl core::fmt::Debug for Shared {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_struct("Shared")
            .field("sequence", &self.sequence)
            .finish_non_exhaustive()
    }
}

impl Shared {
    pub(super) fn begin(
        end: &End,
        (plan, op): (Arc<Plan>, ReduceOp),
        memory: Memory,
        sequence: u64,
    ) -> Self {
        let (me, arena, reach) = (end.me, end.arena.clone(), end.reach.clone());
        let post = post(&reach, &memory);
        if post.input_at != 0 && remote::pays(&plan, memory.width()) {
            // SAFETY: the caller's input.
            unsafe { remote::present(memory.input, memory.input_bytes) };
        }
        arena.set_post(me, sequence, post);
        Self {
            plan,
            op,
            memory,
            sequence,
            stage: Stage::Posted,
            turn: end.turn + 1,
            me,
            arena,
            reach,
        }
    }

    /// Goes as far as it can, once all ranks have made this call; true once done.
    pub(crate) fn poll<E: Element>(&mut self, end: &mut End) -> Result<bool, usize> {
        let over = match &mut self.stage {
            Stage::Over => true,
            Stage::Revoked => false,
            Stage::Posted => return self.begin_work::<E>(end),
            Stage::Finishing => end.glance(),
            Stage::Remote(remote) => {
                let call = (&*self.plan, self.memory);
                // SAFETY: my own memory; that of others is read by the kernel.
                match unsafe { remote.poll::<E>(call, end) } {
                    Went::Over => true,
                    Went::On => false,
                    Went::Unreadable => {
                        let staged = Staged::new(&self.plan, size_of::<E>(), end);
                        self.stage = Stage::Staged(staged);
                        return self.poll::<E>(end);
                    }
                    Went::Astray => {
                        self.stage = Stage::Revoked;
                        false
                    }
                }
            }
            Stage::Staged(staged) => {
                let call = (&*self.plan, self.op, self.memory);
                // SAFETY: my own memory, and stages by turns as `staged` explains.
                unsafe { staged.poll::<E>(call, end) }.map_err(|Beyond(rank)| rank)?
            }
        };
        if over {
            self.stage = Stage::Over;
        }
        Ok(over)
    }

    fn begin_work<E: Element>(&mut self, end: &mut End) -> Result<bool, usize> {
        let plan = self.plan.clone();
        let (n, width) = (plan.world(), size_of::<E>());
        let share = plan.shape().len(n).saturating_mul(width) / n;
        // Who gives up waits for a piece of everybody's memory.
        let piece = (share / 8).min((1 << 20) / n).clamp(PIECE, LONG_PIECE);
        let duties = Duties::of(&plan, width, piece, DUTIES);
        match (self.hands::<E>(), duties) {
            (Some(hands), Some(duties)) => {
                end.turn = self.turn;
                end.due += duties.len() as u64;
                self.work(&hands, &duties, end)?;
            }
            _ => {
                self.stage = match Remote::new(&plan, width, self.sequence, end) {
                    Some(remote) => Stage::Remote(remote),
                    None => Stage::Staged(Staged::new(&plan, width, end)),
                };
            }
        }
        self.poll::<E>(end)
    }

    /// The memory of all ranks, where all of it can be reached.
    fn hands<E: Element>(&self) -> Option<Hands<E>> {
        let n = self.plan.world();
        let mut hands = Hands::new(n);
        for rank in 0..n {
            let post = self.arena.post(rank, self.sequence);
            let (input, output) = match &self.reach {
                Reach::Threads => (
                    with_exposed_provenance_mut(post.input as usize),
                    with_exposed_provenance_mut(post.output as usize),
                ),
                Reach::Segments(segments) => {
                    let at = |place: u64, bytes: u64| match place {
                        0 => None,
                        NONE => Some(core::ptr::null_mut()),
                        place => segments
                            .address(rank, place - 1, bytes as usize)
                            .map(NonNull::as_ptr)
                            .filter(|at| at.cast::<E>().is_aligned()),
                    };
                    if rank == self.me && post.input != 0 && post.output != 0 {
                        (self.memory.input.cast_mut(), self.memory.output)
                    } else {
                        (
                            at(post.input, post.input_bytes)?,
                            at(post.output, post.output_bytes)?,
                        )
                    }
                }
            };
            hands.add(
                (input, post.input_bytes as usize),
                (output, post.output_bytes as usize),
            );
        }
        Some(hands)
    }

    /// Performs every duty that nobody else has claimed.
    fn work<E: Element>(
        &mut self,
        hands: &Hands<E>,
        duties: &Duties<'_>,
        end: &mut End,
    ) -> Result<(), usize> {
        let (len, first) = (duties.len(), duties.first(self.me));
        let mut count = 0;
        self.stage = Stage::Finishing;
        for i in 0..len {
            let index = (first + i) % len;
            match ORDERS.claim(self.arena.duty(index), self.turn, self.me) {
                Claim::Taken => {}
                Claim::Revoked => {
                    self.stage = Stage::Revoked;
                    break;
                }
                Claim::Mine => {
                    // SAFETY: every rank has published its memory and keeps it until this duty is done or
                    // revoked; I hold the claim, and no two duties touch the same output, or one's output
                    // another's input.
                    let done = unsafe { hands.perform(self.op, duties.get(index)) };
                    ORDERS.done(self.arena.duty(index), self.turn, self.me);
                    done.map_err(|Beyond(rank)| rank)?;
                    count += 1;
                }
            }
        }
        end.finish(count);
        Ok(())
    }

    /// Nobody touches my memory after this.
    fn withdraw(&self) {
        let begin = Instant::now();
        let mut held = false;
        for index in 0..DUTIES {
            while let Some(rank) = ORDERS.revoke(self.arena.duty(index), self.turn) {
                if rank == self.me {
                    break;
                }
                if let Reach::Segments(_) = &self.reach
                    && begin.elapsed() > GRACE
                {
                    // Its process may be stopped or dead.
                    held = true;
                    break;
                }
                thread::yield_now();
            }
        }
        if let Reach::Segments(segments) = &self.reach
            && held
            && self.memory.output_bytes > 0
            && let Some(output) = NonNull::new(self.memory.output)
        {
            segments.part(output, self.memory.output_bytes);
        }
    }
}

/// How long a rank that gives up waits for another process to be done with a piece of its memory,
/// before it takes the memory away from it.
const GRACE: std::time::Duration = std::time::Duration::from_millis(2);

impl Drop for Shared {
    fn drop(&mut self) {
        if !matches!(self.stage, Stage::Over) {
            ORDERS.close(self.arena.open(self.me, self.sequence));
        }
        if matches!(
            self.stage,
            Stage::Posted | Stage::Finishing | Stage::Revoked
        ) {
            self.withdraw();
        }
    }
}

fn post(reach: &Reach, memory: &Memory) -> Post {
    let (input, output) = (memory.input, memory.output);
    let place = |address: *const u8, bytes: usize| match reach {
        Reach::Threads => address.expose_provenance() as u64,
        Reach::Segments(_) if bytes == 0 => NONE,
        Reach::Segments(segments) => segments.place(address, bytes).map_or(0, |place| place + 1),
    };
    Post {
        input: place(input, memory.input_bytes),
        input_bytes: memory.input_bytes as u64,
        output: place(output, memory.output_bytes),
        output_bytes: memory.output_bytes as u64,
        input_at: match reach {
            Reach::Segments(segments) if segments.reads() => input.expose_provenance() as u64,
            _ => 0,
        },
    }
}

/// Something at a fixed address, reached by that address only: what points into it stays good
/// though the value that owns it moves.
#[derive(Debug)]
pub(crate) struct Pinned<M>(NonNull<M>);

// SAFETY: it owns the value as a box does.
unsafe impl<M: Send> Send for Pinned<M> {}

impl<M> Pinned<M> {
    pub(crate) fn new(value: M) -> Self {
        Self(NonNull::from(Box::leak(Box::new(value))))
    }

    /// The value; whatever was pointing into it is not used after this.
    pub(crate) fn get(&mut self) -> &mut M {
        // SAFETY: from a box that is only freed below.
        unsafe { self.0.as_mut() }
    }

    pub(crate) fn into_inner(self) -> M {
        let this = core::mem::ManuallyDrop::new(self);
        // SAFETY: it came from a box, and `this` does not free it again.
        *unsafe { Box::from_raw(this.0.as_ptr()) }
    }
}

impl<M> Drop for Pinned<M> {
    fn drop(&mut self) {
        // SAFETY: it came from a box.
        drop(unsafe { Box::from_raw(self.0.as_ptr()) });
    }
}
