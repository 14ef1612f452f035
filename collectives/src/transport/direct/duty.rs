//! A collective in shared memory as a list of duties, which any rank may perform: pure data.
//!
//! ```text
//! all_reduce        fold piece i of all inputs  -> piece i of all outputs
//! reduce_scatter    fold a piece of chunk q     -> output of q
//! all_gather ...    copy a piece of input r     -> its place in output q
//! ```
//!
//! Each element of each output is written by one duty. The fold is in rank order, so the result is
//! that of every plan that folds in rank order, whoever performs which duty.

use core::ops::Range;

use crate::{
    chunk::chunk,
    plan::{CollectiveShape as S, Plan},
};

/// One piece of work on the memory of all ranks; offsets and lengths in elements.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Duty {
    /// The fold of `len` elements of all inputs, from `from` on.
    Fold { from: usize, len: usize, to: To },
    /// `len` elements of one input into one output.
    Copy {
        source: usize,
        from: usize,
        target: usize,
        at: usize,
        len: usize,
    },
}

/// Where a fold goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum To {
    /// To this place in every output.
    All(usize),
    /// To this place in one rank's output.
    One(usize, usize),
}

/// All duties of a collective.
#[derive(Debug, Clone, Copy)]
pub(super) struct Duties<'a> {
    plan: &'a Plan,
    lanes: usize,
    pieces: usize,
    /// Elements of a cache line: pieces begin at its multiples.
    line: usize,
}

impl<'a> Duties<'a> {
    /// Those of a plan, cut into pieces of about `bytes`, at most `most` in all; none where this
    /// operation has no such form.
    pub(super) fn of(plan: &'a Plan, width: usize, bytes: usize, most: usize) -> Option<Self> {
        let n = plan.world();
        let lanes = match plan.shape() {
            S::AllReduce { .. } | S::Reduce { .. } => 1,
            S::ReduceScatter { .. }
            | S::Broadcast { .. }
            | S::Gather { .. }
            | S::Scatter { .. } => n,
            S::AllGather { .. } | S::AllToAll { .. } => n * n,
            S::Barrier => 0,
            S::AllToAllV { .. } => return None,
        };
        let longest = (0..lanes)
            .map(|lane| lane_len(plan, lane))
            .max()
            .unwrap_or(0);
        let pieces = longest.saturating_mul(width).div_ceil(bytes).max(1);
        if lanes > most {
            return None;
        }
        Some(Self {
            plan,
            lanes,
            pieces: pieces.min(most / lanes.max(1)).max(1),
            line: (64 / width).max(1),
        })
    }

    /// How many there are.
    pub(super) fn len(&self) -> usize {
        self.lanes * self.pieces
    }

    /// Where a rank best begins: at what is nearest to it.
    pub(super) fn first(&self, rank: usize) -> usize {
        rank * self.len() / self.plan.world()
    }

    /// Those that write this rank's output.
    pub(super) fn mine(&self, rank: usize) -> Range<usize> {
        let n = self.plan.world();
        let lanes = match self.plan.shape() {
            S::AllReduce { .. } => 0..1,
            S::Reduce { root, .. } if *root == rank => 0..1,
            S::Gather { root, .. } if *root == rank => 0..n,
            S::ReduceScatter { .. } | S::Broadcast { .. } | S::Scatter { .. } => rank..rank + 1,
            S::AllGather { .. } | S::AllToAll { .. } => rank * n..(rank + 1) * n,
            _ => 0..0,
        };
        lanes.start * self.pieces..lanes.end * self.pieces
    }

    /// Duty `index`.
    pub(super) fn get(&self, index: usize) -> Duty {
        let (lane, piece) = (index / self.pieces, index % self.pieces);
        let part = self.part(lane_len(self.plan, lane), piece);
        lane_duty(self.plan, lane, part)
    }

    fn part(&self, len: usize, piece: usize) -> Range<usize> {
        let lines = chunk(len.div_ceil(self.line), self.pieces, piece);
        (lines.start * self.line).min(len)..(lines.end * self.line).min(len)
    }
}

/// Elements that go from one place to one place.
fn lane_len(plan: &Plan, lane: usize) -> usize {
    let n = plan.world();
    match plan.shape() {
        S::AllReduce { len } | S::Reduce { len, .. } | S::Broadcast { len, .. } => *len,
        S::AllToAll { len } => *len,
        S::AllGather { counts } => counts[lane % n],
        S::ReduceScatter { counts } | S::Gather { counts, .. } | S::Scatter { counts, .. } => {
            counts[lane]
        }
        S::AllToAllV { .. } | S::Barrier => 0,
    }
}

fn lane_duty(plan: &Plan, lane: usize, part: Range<usize>) -> Duty {
    let n = plan.world();
    let (at, len) = (part.start, part.len());
    let copy = |source, from, target, to| Duty::Copy {
        source,
        from: from + at,
        target,
        at: to + at,
        len,
    };
    let fold = |from, to| Duty::Fold { from, len, to };
    match plan.shape() {
        S::AllReduce { .. } | S::AllToAllV { .. } | S::Barrier => fold(at, To::All(at)),
        S::Reduce { root, .. } => fold(at, To::One(*root, at)),
        S::ReduceScatter { .. } => fold(plan.chunk(lane).start + at, To::One(lane, at)),
        S::AllGather { .. } => copy(lane % n, 0, lane / n, plan.chunk(lane % n).start),
        S::Broadcast { root, .. } => copy(*root, 0, lane, 0),
        S::Gather { root, .. } => copy(lane, 0, *root, plan.chunk(lane).start),
        S::Scatter { root, .. } => copy(*root, plan.chunk(lane).start, lane, 0),
        S::AllToAll { len } => {
            let (target, source) = (lane / n, lane % n);
            copy(source, target * len, target, source * len)
        }
    }
}

/// Elements of the longest input of any rank.
pub(super) fn longest_input(plan: &Plan) -> usize {
    let inputs = (0..plan.world()).map(|rank| plan.input_len(rank));
    inputs.max().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Algorithm;
    use std::{vec, vec::Vec};

    /// Every element of every output is written once, from or for the right elements.
    #[test]
    fn duties_cover_every_output_once() {
        for n in 1..=7 {
            for len in [0, 1, 5, 64, 1000] {
                let counts: Vec<usize> = (0..n).map(|r| if r == 2 { 0 } else { len + r }).collect();
                let root = n / 2;
                let shapes = [
                    (S::AllReduce { len }, Algorithm::Direct),
                    (S::Reduce { len, root }, Algorithm::Direct),
                    (
                        S::ReduceScatter {
                            counts: counts.clone(),
                        },
                        Algorithm::Pairwise,
                    ),
                    (
                        S::AllGather {
                            counts: counts.clone(),
                        },
                        Algorithm::Pairwise,
                    ),
                    (S::Broadcast { len, root }, Algorithm::Direct),
                    (
                        S::Gather {
                            counts: counts.clone(),
                            root,
                        },
                        Algorithm::Direct,
                    ),
                    (S::Scatter { counts, root }, Algorithm::Direct),
                    (S::AllToAll { len }, Algorithm::Pairwise),
                ];
                for (shape, algorithm) in shapes {
                    let plan = Plan::new(shape, algorithm, n).unwrap();
                    let duties = Duties::of(&plan, 4, 256, 200).unwrap();
                    assert!(duties.len() <= 200);
                    let mine = (0..n).map(|r| duties.mine(r).len()).sum::<usize>();
                    let whole = matches!(plan.shape(), S::AllReduce { .. });
                    assert_eq!(mine, duties.len() * if whole { n } else { 1 });
                    let mut written: Vec<Vec<u8>> =
                        (0..n).map(|r| vec![0; plan.output_len(r)]).collect();
                    for index in 0..duties.len() {
                        match duties.get(index) {
                            Duty::Fold { from, len, to } => {
                                assert!((0..n).all(|r| from + len <= plan.input_len(r)));
                                let (ranks, at) = match to {
                                    To::All(at) => (0..n, at),
                                    To::One(rank, at) => (rank..rank + 1, at),
                                };
                                for rank in ranks {
                                    written[rank][at..at + len].iter_mut().for_each(|w| *w += 1);
                                }
                            }
                            Duty::Copy {
                                source,
                                from,
                                target,
                                at,
                                len,
                            } => {
                                assert!(from + len <= plan.input_len(source));
                                written[target][at..at + len]
                                    .iter_mut()
                                    .for_each(|w| *w += 1);
                            }
                        }
                    }
                    assert!(written.iter().flatten().all(|&w| w == 1), "{plan}");
                }
            }
        }
    }
}
