//! Slices of processes that share no more than their stages, piece after piece.
//!
//! ```text
//! step s    copy piece s into my stage s % 2 | publish ... all there? | fold or copy piece s out of the
//!                                                                     | stages of the others
//! ```
//!
//! A stage is written again two steps later: by then all have published the step between, which each
//! does when it is through with the one before. An all_reduce is a reduce_scatter whose results go into
//! stages of their own and are copied out one step later. Pieces fit the second-level cache, so that memory
//! sees only the callers' buffers.
#![allow(unsafe_code)]

use super::{
    End, raw,
    raw::{Fold, Out, Target},
    work::{Beyond, Memory},
};
use crate::{
    Element, ReduceOp,
    plan::{CollectiveShape as S, Plan},
};
use core::ops::Range;
use std::vec::Vec;

/// How far a call has got.
#[derive(Debug)]
pub(super) struct Staged {
    /// Elements of a piece.
    piece: usize,
    steps: usize,
    step: usize,
    published: bool,
}

impl Staged {
    pub(super) fn new(plan: &Plan, width: usize, end: &End) -> Self {
        let n = plan.world();
        let stage = end.arena.plot().stage();
        let blocks = if common(plan) { 1 } else { n };
        // A cache line at least, and whole lines.
        let piece = (stage / blocks / 64).max(1) * (64 / width);
        let longest = (0..n)
            .map(|rank| block(plan, rank).len())
            .max()
            .unwrap_or(0);
        let late = usize::from(matches!(
            plan.shape(),
            S::AllReduce { .. } | S::Reduce { .. }
        ));
        Self {
            piece,
            steps: longest.div_ceil(piece) + late,
            step: 0,
            published: false,
        }
    }

    /// Goes as far as it can; true once done.
    ///
    /// # Safety
    /// The memory is mine until this is over.
    pub(super) unsafe fn poll<E: Element>(
        &mut self,
        (plan, op, memory): (&Plan, ReduceOp, Memory),
        end: &mut End,
    ) -> Result<bool, Beyond> {
        while self.step < self.steps {
            if self.published && !end.glance() {
                return Ok(false);
            }
            let here = Here {
                plan,
                op,
                memory,
                piece: self.piece,
                step: self.step,
                me: end.me,
                end,
            };
            if !self.published {
                // SAFETY: my stage of two steps ago, which all are through with.
                unsafe { here.put::<E>() };
                end.publish();
                self.published = true;
                continue;
            }
            // SAFETY: all have published this step and write no stage of it before I publish the
            // next but one.
            unsafe { here.take::<E>() };
            self.step += 1;
            self.published = false;
        }
        Ok(true)
    }
}

/// Whether all ranks want the same of a rank's input.
fn common(plan: &Plan) -> bool {
    matches!(
        plan.shape(),
        S::AllGather { .. } | S::Gather { .. } | S::Broadcast { .. }
    )
}

/// The elements of the whole that a rank puts in (`common`) or that are meant for it.
fn block(plan: &Plan, rank: usize) -> Range<usize> {
    match plan.shape() {
        S::Broadcast { len, .. } => 0..*len,
        S::AllToAll { len } => rank * len..(rank + 1) * len,
        _ => plan.chunk(rank),
    }
}

/// One step of one rank.
struct Here<'a> {
    plan: &'a Plan,
    op: ReduceOp,
    memory: Memory,
    piece: usize,
    step: usize,
    me: usize,
    end: &'a End,
}

impl Here<'_> {
    /// The part of a block that belongs to a step.
    fn part(&self, block: Range<usize>, step: usize) -> Range<usize> {
        let start = (block.start + step * self.piece).min(block.end);
        start..(start + self.piece).min(block.end)
    }

    /// Where in a stage the block for a rank lies.
    fn stage<E>(&self, rank: usize, index: usize, block: usize) -> *mut E {
        let at = if common(self.plan) {
            0
        } else {
            block * self.piece
        };
        // SAFETY: as many blocks of a piece fit a stage.
        unsafe { self.end.arena.stage(rank, index).cast::<E>().add(at) }
    }

    fn others(&self) -> impl Iterator<Item = usize> + '_ {
        // Each begins after itself, so that not all read the same stage at once.
        let n = self.plan.world();
        (1..n).map(move |i| (self.me + i) % n)
    }

    /// How my output is written.
    fn target(&self) -> Target {
        let memory = &self.memory;
        let (input, output) = (memory.input as usize, memory.output as usize);
        let apart = input + memory.input_bytes <= output || output + memory.output_bytes <= input;
        if apart && raw::goes_past(memory.output_bytes, self.plan.world()) {
            Target::Memory
        } else {
            Target::Caches
        }
    }

    /// Fills my stage.
    unsafe fn put<E: Element>(&self) {
        let input = self.memory.input.cast::<E>();
        let now = self.step % 2;
        let copy = |block: Range<usize>, from: usize, to: usize| {
            let part = self.part(block.clone(), self.step);
            let from = from + (part.start - block.start);
            let bytes = part.len() * size_of::<E>();
            // SAFETY: in my input, whose length the plan has, and my stage.
            unsafe {
                raw::copy_into(
                    Target::Shared,
                    input.add(from).cast(),
                    self.stage::<E>(self.me, now, to).cast(),
                    bytes,
                )
            };
        };
        let mine = block(self.plan, self.me);
        match self.plan.shape() {
            S::AllGather { .. } => copy(mine, 0, 0),
            S::Gather { root, .. } if *root != self.me => copy(mine, 0, 0),
            S::Broadcast { root, .. } if *root == self.me => copy(mine, 0, 0),
            S::Scatter { root, .. } if *root != self.me => {}
            S::AllReduce { .. }
            | S::Reduce { .. }
            | S::ReduceScatter { .. }
            | S::Scatter { .. }
            | S::AllToAll { .. } => {
                for rank in self.others() {
                    let block = block(self.plan, rank);
                    copy(block.clone(), block.start, rank);
                }
            }
            _ => {}
        }
    }

    /// Takes what is for me out of the others' stages.
    unsafe fn take<E: Element>(&self) {
        let (me, now) = (self.me, self.step % 2);
        let output = self.memory.output.cast::<E>();
        // SAFETY of the closures: in my output and in stages, as long as the plan says.
        let how = self.target();
        let get = |from: *const E, at: usize, len: usize| unsafe {
            raw::copy_into(
                how,
                from.cast(),
                output.add(at).cast(),
                len * size_of::<E>(),
            );
        };
        // SAFETY: from my input to my output, where it is not there already.
        let own = |from: usize, at: usize, len: usize| unsafe {
            let (from, to) = (self.memory.input.cast::<E>().add(from), output.add(at));
            if !core::ptr::eq(from, to) {
                raw::copy_into(how, from.cast(), to.cast(), len * size_of::<E>());
            }
        };
        let mine = block(self.plan, me);
        let part = self.part(mine.clone(), self.step);
        let inside = part.start - mine.start;
        match self.plan.shape() {
            // SAFETY: my own output.
            S::ReduceScatter { .. } => unsafe { self.fold(part, &[(output.add(inside), how)]) },
            S::AllReduce { .. } => unsafe {
                let to = [
                    (output.add(part.start), how),
                    (self.stage::<E>(me, 2 + now, 0), Target::Shared),
                ];
                self.fold(part, &to);
                self.results::<E>(&get);
            },
            // SAFETY: the root's own output, or my own stage.
            S::Reduce { root, .. } => unsafe {
                if *root == me {
                    self.fold(part.clone(), &[(output.add(part.start), how)]);
                    self.results::<E>(&get);
                } else {
                    self.fold(part, &[(self.stage::<E>(me, 2 + now, 0), Target::Shared)]);
                }
            },
            S::AllToAll { len } => {
                own(part.start, part.start, part.len());
                for rank in self.others() {
                    get(self.stage(rank, now, me), rank * len + inside, part.len());
                }
            }
            S::Scatter { root, .. } if *root == me => own(part.start, inside, part.len()),
            S::Scatter { root, .. } => get(self.stage(*root, now, me), inside, part.len()),
            S::Broadcast { root, .. } if *root == me => own(part.start, part.start, part.len()),
            S::Broadcast { root, .. } => get(self.stage(*root, now, 0), part.start, part.len()),
            S::Gather { root, .. } if *root != me => {}
            S::AllGather { .. } | S::Gather { .. } => {
                own(inside, part.start, part.len());
                for rank in self.others() {
                    let theirs = self.part(block(self.plan, rank), self.step);
                    get(self.stage(rank, now, 0), theirs.start, theirs.len());
                }
            }
            S::AllToAllV { .. } | S::Barrier => {}
        }
    }

    /// The fold of my chunk's piece, whose parts lie in my input and the others' stages.
    unsafe fn fold<E: Element>(&self, part: Range<usize>, outs: &[Out<E>]) {
        if part.is_empty() {
            return;
        }
        let now = self.step % 2;
        let ins: Vec<*const E> = (0..self.plan.world())
            .map(|rank| {
                if rank == self.me {
                    // SAFETY: in my input.
                    unsafe { self.memory.input.cast::<E>().add(part.start) }
                } else {
                    self.stage::<E>(rank, now, self.me).cast_const()
                }
            })
            .collect();
        let fold = Fold {
            op: self.op,
            world: self.plan.world(),
            len: part.len(),
        };
        // SAFETY: the caller's word for the outputs; what is read nobody writes in this step.
        unsafe { raw::fold(fold, &ins, outs) };
    }

    /// The results of the step before, out of the stages of those who folded them.
    unsafe fn results<E: Element>(&self, get: &impl Fn(*const E, usize, usize)) {
        let Some(before) = self.step.checked_sub(1) else {
            return;
        };
        for rank in self.others() {
            let part = self.part(block(self.plan, rank), before);
            // A result has a stage for itself.
            let from = self.end.arena.stage(rank, 2 + before % 2).cast::<E>();
            get(from, part.start, part.len());
        }
    }
}
