//! What a rank does of a collective among ranks that share a device, as data.
//!
//! ```text
//! all_reduce of rank 1 of 3, in chunks |0|1|2|
//!
//!   after 0, 2 given    fold 1 of 0, 1, 2 -> 1    mark folded
//!   after 0 folded      copy 0 of rank 0's output      after 2 folded   copy 2 of rank 2's
//!   mark taken          after 0, 2 taken               the memory is the caller's again
//! ```
//!
//! A mark is a point of a rank's stream, an `after` lets a rank's stream wait for another's. Every
//! rank reads what others gave and writes its own output alone, so one mark before what others
//! read, and one behind the last that it reads of others, are all the order there is. In place
//! the same holds: a chunk of the input is overwritten only after the one rank that folds it has.

use core::ops::Range;
use std::format;
use std::string::String;
use std::vec::Vec;

use quintet_collectives::chunk::chunk;
use quintet_collectives::plan::CollectiveShape as Shape;

/// Points of a rank's stream that others wait for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Mark {
    /// My input is there.
    Given,
    /// My chunk is folded in my output.
    Folded,
    /// I have read all that I read of others.
    Taken,
}

impl Mark {
    pub(super) const COUNT: usize = 3;
}

/// Which memory of a rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Side {
    Input,
    Output,
}

/// One thing that a rank puts on its stream.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Step {
    /// A mark of mine.
    Mark(Mark),
    /// Waits for a mark of that rank.
    After(usize, Mark),
    /// Folds `at` of all inputs, in rank order, to my output from `to` on.
    Fold { at: Range<usize>, to: usize },
    /// Copies `at` of a rank's memory to my output from `to` on.
    Copy {
        of: (usize, Side),
        at: Range<usize>,
        to: usize,
    },
}

impl core::fmt::Display for Step {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        let word = |mark: &Mark| match mark {
            Mark::Given => "given",
            Mark::Folded => "folded",
            Mark::Taken => "taken",
        };
        match self {
            Step::Mark(mark) => write!(f, "mark {}", word(mark)),
            Step::After(rank, mark) => write!(f, "after {rank} {}", word(mark)),
            Step::Fold { at, to } => write!(f, "fold {at:?} of all inputs, in rank order -> {to}"),
            Step::Copy {
                of: (rank, side),
                at,
                to,
            } => {
                let side = if *side == Side::Input {
                    "input"
                } else {
                    "output"
                };
                write!(f, "copy {at:?} of rank {rank}'s {side} -> {to}")
            }
        }
    }
}

/// What rank `rank` folds of an all-reduce: whole runs of elements that the fold kernel takes 16 bytes at a
/// time of, whatever their type.
fn share(len: usize, world: usize, rank: usize) -> Range<usize> {
    const RUN: usize = 16;
    let runs = chunk(len.div_ceil(RUN), world, rank);
    (runs.start * RUN).min(len)..(runs.end * RUN).min(len)
}

/// Where rank `rank`'s part lies among `counts`.
fn part(counts: &[usize], rank: usize) -> Range<usize> {
    let first = counts.iter().take(rank).sum();
    first..first + counts.get(rank).copied().unwrap_or(0)
}

/// The steps of rank `me` where the ranks have called so, one shape a rank: they are alike but in
/// the counts of all_to_all_v.
pub(super) fn steps(shapes: &[&Shape], me: usize) -> Vec<Step> {
    let mut plan = work(shapes, me);
    plan.push(Step::Mark(Mark::Taken));
    // Then nobody reads what I have any more.
    let readers = (0..shapes.len()).filter(|&r| r != me && reads(&work(shapes, r), me));
    plan.extend(readers.map(|r| Step::After(r, Mark::Taken)));
    plan
}

/// Whether a rank with this work reads memory of rank `of`.
fn reads(work: &[Step], of: usize) -> bool {
    work.iter().any(|step| match step {
        Step::Fold { .. } => true,
        Step::Copy { of: (rank, _), .. } => *rank == of,
        Step::Mark(_) | Step::After(..) => false,
    })
}

/// What a rank does until it has all it needs.
fn work(shapes: &[&Shape], me: usize) -> Vec<Step> {
    let world = shapes.len();
    let others = || (0..world).filter(|&r| r != me);
    let mut plan = Plan::default();
    let Some(shape) = shapes.get(me) else {
        return plan.0;
    };
    match shape {
        Shape::AllReduce { len } => {
            let mine = share(*len, world, me);
            plan.fold(others(), mine.clone(), mine.start);
            plan.0.push(Step::Mark(Mark::Folded));
            for rank in others() {
                let its = share(*len, world, rank);
                plan.copy(
                    Mark::Folded,
                    (rank, Side::Output),
                    its.clone(),
                    its.start,
                    me,
                );
            }
        }
        Shape::ReduceScatter { counts } => plan.fold(others(), part(counts, me), 0),
        Shape::Reduce { len, root } if *root == me => plan.fold(others(), 0..*len, 0),
        Shape::AllGather { counts } => plan.gather(counts, me),
        Shape::Gather { counts, root } if *root == me => plan.gather(counts, me),
        Shape::Broadcast { len, root } => plan.input(*root, 0..*len, 0, me),
        Shape::Scatter { counts, root } => plan.input(*root, part(counts, me), 0, me),
        Shape::AllToAll { len } => {
            for rank in 0..world {
                plan.input(rank, me * len..(me + 1) * len, rank * len, me);
            }
        }
        Shape::AllToAllV { recv, .. } => {
            for (rank, shape) in shapes.iter().enumerate() {
                if let Shape::AllToAllV { send, .. } = shape {
                    plan.input(rank, part(send, me), part(recv, rank).start, me);
                }
            }
        }
        Shape::Reduce { .. } | Shape::Gather { .. } | Shape::Barrier => {}
    }
    plan.0
}

#[derive(Default)]
struct Plan(Vec<Step>);

impl Plan {
    fn fold(&mut self, others: impl Iterator<Item = usize>, at: Range<usize>, to: usize) {
        if !at.is_empty() {
            self.0.extend(others.map(|r| Step::After(r, Mark::Given)));
            self.0.push(Step::Fold { at, to });
        }
    }

    fn gather(&mut self, counts: &[usize], me: usize) {
        for (rank, count) in counts.iter().enumerate() {
            self.input(rank, 0..*count, part(counts, rank).start, me);
        }
    }

    fn input(&mut self, of: usize, at: Range<usize>, to: usize, me: usize) {
        self.copy(Mark::Given, (of, Side::Input), at, to, me);
    }

    fn copy(&mut self, mark: Mark, of: (usize, Side), at: Range<usize>, to: usize, me: usize) {
        if !at.is_empty() {
            self.0
                .extend((of.0 != me).then_some(Step::After(of.0, mark)));
            self.0.push(Step::Copy { of, at, to });
        }
    }
}

/// The steps of a rank, one a line.
pub(super) fn drawn(shapes: &[&Shape], me: usize) -> String {
    let lines = steps(shapes, me);
    lines.iter().map(|step| format!("  {step}\n")).collect()
}
