//! Slices of processes that can read each other's memory, though they share none of it.
//!
//! ```text
//! copies       read what is for me out of the others' inputs | am I sure of it? | publish ... all there?
//! all_reduce   step s: read piece s of my chunk of all inputs, fold it into my output, publish
//!                      read piece s - 1 of the others' chunks out of their outputs
//!              in the end:                                    | am I sure of it? | publish ... all there?
//! ```
//!
//! Each byte is copied once on its way, instead of into a stage and out of it. A rank may give up at any moment and use
//! its memory for something else: it says so first (`close`), and who has read from it looks at that last (`open`), before
//! anybody can be done. Nobody writes to another's memory, so there is nothing to wait for.
#![allow(unsafe_code)]

use core::ops::Range;

use super::{
    Aim, End, Reach, Segments,
    arena::Post,
    claim::ORDERS,
    duty::{Duties, Duty, To},
    raw::{self, Fold, Target},
    work::Memory,
};
use crate::{
    Element, ReduceOp,
    plan::{CollectiveShape as S, Plan},
};
use std::{sync::atomic::AtomicU64, vec::Vec};

/// Bytes that a rank moves before it looks whether the group is still well.
const STRIDE: usize = 8 << 20;

/// Bytes of a piece that is folded: with those of a few others it fits the second-level cache.
const PIECE: usize = 64 << 10;

/// Calls whose whole is shorter go by stages: a read costs a call of the kernel.
pub(super) const FROM: usize = 32 << 10;

/// How far a call has got.
#[derive(Debug)]
pub(super) struct Remote {
    sequence: u64,
    /// Where the ranks' memory lies.
    posts: Vec<Post>,
    /// The step that I had published when it began.
    base: u64,
    /// Elements of a piece, and pieces of the longest chunk; of an all_reduce.
    piece: usize,
    pieces: usize,
    /// Duties, or pieces, that are done.
    step: usize,
    published: bool,
    over: bool,
}

/// What came of going on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Went {
    /// To the end.
    Over,
    /// Not that far yet.
    On,
    /// A rank has given up, or is gone; the cause is on its way.
    Astray,
}

/// What is read and written.
struct Here<'a> {
    plan: &'a Plan,
    op: ReduceOp,
    memory: Memory,
    me: usize,
    segments: &'a dyn Segments,
    posts: &'a [Post],
    /// Room for a piece of each of the others: my stages, which nobody else looks at in such a call.
    scratch: *mut u8,
    /// Elements of a piece.
    piece: usize,
}

/// Somebody's memory cannot be read.
struct Gone;

impl Remote {
    /// Where all ranks can read each other's memory, and it pays.
    pub(super) fn new(plan: &Plan, width: usize, sequence: u64, end: &End) -> Option<Self> {
        let n = plan.world();
        if !pays(plan, width) {
            return None;
        }
        let posts: Vec<Post> = (0..n).map(|rank| end.arena.post(rank, sequence)).collect();
        if posts.iter().any(|post| post.input_at == 0) {
            return None;
        }
        // My stages, which lie side by side, hold a piece of each of the others.
        let room = end.arena.plot().stage() / (n - 1).max(1);
        let piece = (room.min(PIECE) / 64).max(1) * (64 / width);
        let longest = (0..n).map(|rank| plan.chunk(rank).len()).max().unwrap_or(0);
        Some(Self {
            sequence,
            posts,
            base: end.step,
            piece,
            pieces: longest.div_ceil(piece),
            step: 0,
            published: false,
            over: false,
        })
    }

    /// Goes as far as it can.
    ///
    /// # Safety
    /// The memory is mine until this is over.
    pub(super) unsafe fn poll<E: Element>(
        &mut self,
        (plan, op, memory): (&Plan, ReduceOp, Memory),
        end: &mut End,
    ) -> Went {
        let Reach::Segments(segments) = end.reach.clone() else {
            return Went::Astray;
        };
        if !self.over {
            let posts = core::mem::take(&mut self.posts);
            let here = Here {
                plan,
                op,
                memory,
                me: end.me,
                segments: &*segments,
                posts: &posts,
                scratch: end.arena.stage(end.me, 0),
                piece: self.piece,
            };
            // SAFETY: the caller's word.
            let all = unsafe {
                match plan.shape() {
                    S::AllReduce { .. } => self.all_reduce::<E>(&here, end),
                    _ => self.duties::<E>(&here),
                }
            };
            self.posts = posts;
            match all {
                Ok(true) => {}
                Ok(false) => return Went::On,
                Err(Gone) => return Self::astray(end),
            }
            ORDERS.read::<AtomicU64>();
            let open = |rank| ORDERS.open(end.arena.open(rank, self.sequence), self.sequence);
            if !(0..plan.world()).all(open) {
                return Self::astray(end);
            }
            end.publish();
            self.over = true;
        }
        if end.glance() { Went::Over } else { Went::On }
    }

    fn astray(end: &mut End) -> Went {
        end.aim = Aim::Nothing;
        Went::Astray
    }

    /// Performs what makes my output; false where that is not all yet.
    unsafe fn duties<E: Element>(&mut self, here: &Here<'_>) -> Result<bool, Gone> {
        let width = size_of::<E>();
        let piece = match here.plan.shape() {
            S::ReduceScatter { .. } => self.piece * width,
            _ => STRIDE,
        };
        let Some(duties) = Duties::of(here.plan, width, piece, usize::MAX) else {
            return Err(Gone);
        };
        let mine = duties.mine(here.me);
        let mut moved = 0;
        while self.step < mine.len() {
            if moved >= STRIDE {
                return Ok(false);
            }
            // SAFETY: the caller's word.
            moved += width * unsafe { here.perform::<E>(duties.get(mine.start + self.step)) }?;
            self.step += 1;
        }
        Ok(true)
    }

    unsafe fn all_reduce<E: Element>(
        &mut self,
        here: &Here<'_>,
        end: &mut End,
    ) -> Result<bool, Gone> {
        let (me, n) = (here.me, here.plan.world());
        let part = |rank: usize, piece: usize| -> Range<usize> {
            let chunk = here.plan.chunk(rank);
            let start = (chunk.start + piece * self.piece).min(chunk.end);
            start..(start + self.piece).min(chunk.end)
        };
        let mut moved = 0;
        while self.step <= self.pieces {
            if moved >= STRIDE {
                return Ok(false);
            }
            if !self.published {
                if self.step < self.pieces {
                    let part = part(me, self.step);
                    moved += part.len() * size_of::<E>();
                    // SAFETY: my output.
                    unsafe {
                        let to = here.memory.output.cast::<E>().add(part.start);
                        here.fold(part, to)?;
                    }
                    end.publish();
                }
                self.published = true;
            }
            if let Some(before) = self.step.checked_sub(1) {
                end.aim = Aim::Step(self.base + self.step as u64);
                if !end.glance() {
                    return Ok(false);
                }
                for rank in (1..n).map(|i| (me + i) % n) {
                    let part = part(rank, before);
                    // SAFETY: my output.
                    unsafe {
                        let to = here.memory.output.cast::<E>().add(part.start);
                        here.read(rank, here.posts[rank].output_at, part, to)?;
                    }
                }
            }
            self.step += 1;
            self.published = false;
        }
        Ok(true)
    }
}

impl Here<'_> {
    /// Performs a duty that writes my output; how many elements it moved.
    unsafe fn perform<E: Element>(&self, duty: Duty) -> Result<usize, Gone> {
        let (input, output) = (
            self.memory.input.cast::<E>(),
            self.memory.output.cast::<E>(),
        );
        match duty {
            Duty::Copy {
                source,
                from,
                at,
                len,
                ..
            } if source == self.me => {
                // SAFETY: my own memory, as long as the plan says; it lies apart where it is not the same.
                unsafe {
                    let (from, to) = (input.add(from), output.add(at));
                    if !core::ptr::eq(from, to) {
                        raw::copy_into(self.target(), from.cast(), to.cast(), len * size_of::<E>());
                    }
                }
                Ok(len)
            }
            Duty::Copy {
                source,
                from,
                at,
                len,
                ..
            } => {
                // SAFETY: my output.
                unsafe {
                    self.read(
                        source,
                        self.posts[source].input_at,
                        from..from + len,
                        output.add(at),
                    )?
                };
                Ok(len)
            }
            Duty::Fold {
                from,
                len,
                to: To::One(_, at) | To::All(at),
            } => {
                // SAFETY: my output, and my stages.
                unsafe { self.fold(from..from + len, output.add(at))? };
                Ok(len * self.plan.world())
            }
        }
    }

    /// The left fold of a part of all inputs.
    unsafe fn fold<E: Element>(&self, part: Range<usize>, to: *mut E) -> Result<(), Gone> {
        if part.is_empty() {
            return Ok(());
        }
        if part.len() > self.piece {
            return Err(Gone);
        }
        let mut room = self.scratch.cast::<E>();
        let mut ins: Vec<*const E> = Vec::with_capacity(self.plan.world());
        for rank in 0..self.plan.world() {
            if rank == self.me {
                // SAFETY: in my input.
                ins.push(unsafe { self.memory.input.cast::<E>().add(part.start) });
                continue;
            }
            // SAFETY: there is room for a piece of each of the others.
            unsafe {
                self.read(rank, self.posts[rank].input_at, part.clone(), room)?;
                ins.push(room);
                room = room.add(self.piece);
            }
        }
        let fold = Fold {
            op: self.op,
            world: self.plan.world(),
            len: part.len(),
        };
        // SAFETY: the caller's word for the output; the rest is mine.
        unsafe { raw::fold(fold, &ins, &[(to, Target::Caches)]) };
        Ok(())
    }

    /// Reads elements of a rank's memory that begins at an address of its own.
    unsafe fn read<E: Element>(
        &self,
        rank: usize,
        at: u64,
        part: Range<usize>,
        to: *mut E,
    ) -> Result<(), Gone> {
        if part.is_empty() {
            return Ok(());
        }
        let (from, bytes) = (
            at + (part.start * size_of::<E>()) as u64,
            part.len() * size_of::<E>(),
        );
        // SAFETY: the caller's word.
        let whole = unsafe { self.segments.read(rank, from, to.cast(), bytes) };
        if whole { Ok(()) } else { Err(Gone) }
    }

    /// How my output is written where I copy it myself.
    fn target(&self) -> Target {
        if self.memory.output_bytes >= raw::PAST {
            Target::Memory
        } else {
            Target::Caches
        }
    }
}

/// Whether calls of this plan are to go this way where it is open.
fn pays(plan: &Plan, width: usize) -> bool {
    let n = plan.world();
    let fits = !matches!(
        plan.shape(),
        S::Reduce { .. } | S::AllToAllV { .. } | S::Barrier
    );
    fits && plan.shape().len(n).saturating_mul(width) >= FROM
}
