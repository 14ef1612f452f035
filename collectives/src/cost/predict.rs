//! The closed forms: what a plan takes by a few multiplications, whatever the world.
//!
//! ```text
//! round = latency + messages x (overhead + bytes x send) + folded x fold
//!         send of the whole buffer; of a piece, what pairs gather of a sum that goes in pieces
//!         between hosts: at least what the card of the fullest host needs for all its ranks
//! ```

use super::net::Net;
use crate::{
    Algorithm as A, DType,
    plan::{CollectiveShape, Operation as O},
};

/// A call, as far as its time depends on it; equal on all ranks.
#[derive(Debug, Clone, Copy)]
pub(super) struct Query {
    pub(super) op: O,
    pub(super) world: usize,
    /// Elements of the whole; 0 for all_to_all_v, whose counts are not equal on all ranks.
    pub(super) len: usize,
    /// Elements of the longest chunk.
    longest: usize,
    pub(super) dtype: DType,
    /// Whether all ranks are known to be on one host.
    pub(super) near: bool,
}

impl Query {
    pub(super) fn of(shape: &CollectiveShape, world: usize, dtype: DType, near: bool) -> Self {
        let op = shape.operation();
        let len = if op == O::AllToAllV {
            0
        } else {
            shape.len(world)
        };
        let even = len.div_ceil(world.max(1));
        let longest = shape.counts().iter().copied().max().unwrap_or(even);
        Self {
            op,
            world,
            len,
            longest,
            dtype,
            near,
        }
    }

    /// `bytes` of f32 in even chunks.
    pub(super) fn even(op: O, bytes: usize, world: usize) -> Self {
        let len = if matches!(op, O::Barrier | O::AllToAllV) {
            0
        } else {
            bytes / 4
        };
        Self {
            op,
            world: world.max(1),
            len,
            longest: len.div_ceil(world.max(1)),
            dtype: DType::F32,
            near: false,
        }
    }

    /// Bytes of the whole.
    pub(super) fn bytes(&self) -> u64 {
        (self.len as u64).saturating_mul(self.dtype.bytes() as u64)
    }
}

impl Net<'_> {
    /// Seconds of `query` by an algorithm in `pieces` pieces.
    pub(super) fn seconds(&self, query: &Query, algorithm: A, pieces: usize) -> f64 {
        let n = self.n;
        if n == 1 {
            return 0.0;
        }
        let whole = query.bytes() as f64;
        let wide = query.dtype.accumulator().bytes() as f64 / query.dtype.bytes() as f64;
        let call = Sizes {
            whole,
            part: whole / n as f64,
            longest: (query.longest * query.dtype.bytes()) as f64,
            wide,
            pieces: pieces as f64,
            piece: query.len.div_ceil(pieces) as u64 * query.dtype.bytes() as u64,
            nodes: n.ilog2() as usize,
            odd: !n.is_power_of_two(),
            levels: n.next_power_of_two().trailing_zeros() as usize,
        };
        match query.op {
            O::AllReduce => self.all_reduce(&call, algorithm),
            O::ReduceScatter => self.reduce_scatter(&call, algorithm),
            O::AllGather => self.all_gather(&call, algorithm),
            O::Broadcast => self.rooted(&call, algorithm, 1.0, 0.0),
            O::Reduce => self.rooted(&call, algorithm, wide, 1.0),
            O::Gather | O::Scatter => self.star(call.part),
            O::AllToAll | O::AllToAllV => self.all_to_all(&call, algorithm),
            _ => self.barrier(&call, algorithm),
        }
    }

    fn all_reduce(&self, call: &Sizes, algorithm: A) -> f64 {
        let (n, s, wide) = (self.n, call.whole, call.wide);
        let others = (n - 1) as f64;
        let extra = if call.odd {
            self.flip(0, s * wide) + self.fold(s) + self.flip(0, s)
        } else {
            0.0
        };
        match algorithm {
            A::Direct => self.peers(s) + self.fold(others * s),
            A::Pairwise => {
                let (part, k) = (call.longest / call.pieces, call.pieces);
                let gathered = self.of_buffer(call.piece).peers(part);
                k * (self.peers(part) + gathered + self.fold(others * part))
            }
            A::Ring => {
                let chunk = call.longest;
                self.ring(others, 0.0, chunk * wide, self.fold(chunk))
                    + self.ring(others, 0.0, chunk, 0.0)
            }
            A::Tree => self.binomial(call, wide) + self.binomial(call, 1.0) + self.climbs(call),
            A::RecursiveDoubling => {
                let rounds = (0..call.nodes).map(|k| self.flip(k, s * wide) + self.fold(s));
                rounds.sum::<f64>() + extra
            }
            A::HalvingDoubling => {
                let half = |k: usize| s / (2u64 << k) as f64;
                let rounds = (0..call.nodes).map(|k| {
                    self.flip(k, half(k) * wide) + self.fold(half(k)) + self.flip(k, half(k))
                });
                rounds.sum::<f64>() + extra
            }
            A::Bruck => self.bruck(call, s) + self.fold(others * s),
            A::DoubleTree => {
                // An inner node folds two messages, sends one up and two down, and is a leaf of
                // the other tree.
                let (messages, bytes) = if call.pieces > 1.0 {
                    (4.0, s / 2.0 / call.pieces)
                } else {
                    (2.0, s / 2.0)
                };
                // Each waits in every round for one that waits for it in the other tree, so
                // latency is not hidden.
                let (height, later) = (n.ilog2() as f64, call.pieces - 1.0);
                let round = self.tree_round(messages, bytes * (1.0 + wide) / 2.0);
                (2.0 * height + later) * round + (height + later) * self.fold(2.0 * bytes)
            }
            A::TwoLevel => {
                self.reduce_scatter(call, A::TwoLevel) + self.all_gather(call, A::TwoLevel)
            }
        }
    }

    fn reduce_scatter(&self, call: &Sizes, algorithm: A) -> f64 {
        let (s, wide) = (call.whole, call.wide);
        let others = (self.n - 1) as f64;
        match algorithm {
            A::Ring => self.ring(others, 0.0, call.longest * wide, self.fold(call.longest)),
            A::HalvingDoubling => {
                let half = |k: usize| s / (2u64 << k) as f64;
                let far = |k: usize| call.nodes - 1 - k;
                let rounds =
                    (0..call.nodes).map(|k| self.flip(far(k), half(k) * wide) + self.fold(half(k)));
                let extra = if call.odd {
                    self.flip(0, s * wide) + self.fold(s) + self.flip(0, call.part)
                } else {
                    0.0
                };
                rounds.sum::<f64>() + extra
            }
            A::TwoLevel => {
                let (mates, carried, leaving) = self.levels();
                let within = call.part * (1.0 + carried);
                self.level(mates, 0.0, 0.0, within)
                    + self.fold(mates * within)
                    + self.level(0.0, carried, leaving, call.part * wide)
                    + self.fold((self.h - 1) as f64 * call.part)
            }
            _ => self.peers(call.longest) + self.fold(others * call.longest),
        }
    }

    fn all_gather(&self, call: &Sizes, algorithm: A) -> f64 {
        match algorithm {
            A::Ring => self.ring((self.n - 1) as f64, 0.0, call.longest, 0.0),
            A::RecursiveDoubling => {
                let extra = if call.odd {
                    self.flip(0, call.part) + self.flip(0, call.whole)
                } else {
                    0.0
                };
                let share = call.whole / (1u64 << call.nodes) as f64;
                let rounds = (0..call.nodes).map(|k| self.flip(k, (1u64 << k) as f64 * share));
                rounds.sum::<f64>() + extra
            }
            A::Bruck => self.bruck(call, call.part),
            A::TwoLevel => {
                let (mates, carried, leaving) = self.levels();
                self.level(0.0, carried, leaving, call.part)
                    + self.level(mates, 0.0, 0.0, call.part * (1.0 + carried))
            }
            _ => self.peers(call.longest),
        }
    }

    /// Broadcast, or reduce with its folds.
    fn rooted(&self, call: &Sizes, algorithm: A, wide: f64, folds: f64) -> f64 {
        let (n, s, k) = (self.n, call.whole * wide, call.pieces);
        let piece = call.whole / k;
        match algorithm {
            A::Ring => self.ring((n - 1) as f64, k - 1.0, s / k, folds * self.fold(piece)),
            A::Tree => self.binomial(call, wide) + folds * self.climbs(call),
            A::DoubleTree => {
                let height = (n - 1).max(1).ilog2() as f64;
                (height + k) * (self.tree_round(2.0, s / 2.0 / k) + folds * self.fold(piece))
            }
            A::TwoLevel => {
                let depth = |n: usize| n.next_power_of_two().trailing_zeros() as f64;
                let hop = self.fold(call.whole) * folds;
                depth(self.m) * (self.round(1.0, 0.0, 0.0, s) + hop)
                    + depth(self.h) * (self.round(0.0, 1.0, 1.0, s) + hop)
            }
            _ => self.star(call.whole) + folds * self.fold((n - 1) as f64 * call.whole),
        }
    }

    fn all_to_all(&self, call: &Sizes, algorithm: A) -> f64 {
        let n = self.n;
        match algorithm {
            A::Bruck => {
                let blocks = |k: usize| (0..n).filter(|j| j >> k & 1 == 1).count() as f64;
                (0..call.levels)
                    .map(|k| self.shift(k, blocks(k) * call.part))
                    .sum()
            }
            A::TwoLevel => {
                let (mates, carried, leaving) = self.levels();
                self.level(mates, 0.0, 0.0, call.part * (1.0 + carried))
                    + self.level(0.0, carried, leaving, call.part * self.m as f64)
            }
            _ => self.peers(call.part),
        }
    }

    fn barrier(&self, call: &Sizes, algorithm: A) -> f64 {
        match algorithm {
            A::RecursiveDoubling => {
                let extra = if call.odd {
                    2.0 * self.flip(0, 0.0)
                } else {
                    0.0
                };
                (0..call.nodes).map(|k| self.flip(k, 0.0)).sum::<f64>() + extra
            }
            A::Bruck => (0..call.levels).map(|k| self.shift(k, 0.0)).sum(),
            A::TwoLevel => {
                let depth = self.h.next_power_of_two().trailing_zeros() as f64;
                let (mates, _, _) = self.levels();
                2.0 * self.level(mates, 0.0, 0.0, 0.0) + depth * self.round(0.0, 1.0, 1.0, 0.0)
            }
            _ => self.peers(0.0),
        }
    }

    /// One way through a binomial tree. In pieces: every round as long as the root's.
    fn binomial(&self, call: &Sizes, wide: f64) -> f64 {
        let bytes = call.whole * wide / call.pieces;
        let once: f64 = (0..call.levels).map(|k| self.edge(k, bytes)).sum();
        if call.pieces <= 1.0 {
            return once;
        }
        let ports: f64 = (0..call.levels)
            .map(|k| self.edge(k, bytes) - self.latency(k))
            .sum();
        once + (call.pieces - 1.0) * ports
    }

    /// The latency of [`Net::edge`].
    fn latency(&self, k: usize) -> f64 {
        if self.topology.map_or(0, |all| all.crossing().flip[k]) > 0 {
            self.between.latency
        } else {
            self.within.latency
        }
    }

    /// The folds at the root of a binomial tree.
    fn climbs(&self, call: &Sizes) -> f64 {
        call.levels as f64 * self.fold(call.whole)
    }

    fn bruck(&self, call: &Sizes, block: f64) -> f64 {
        let blocks = |k: usize| (1 << k).min(self.n - (1 << k)) as f64;
        (0..call.levels)
            .map(|k| self.shift(k, blocks(k) * block))
            .sum()
    }

    fn tree_round(&self, messages: f64, bytes: f64) -> f64 {
        if self.h > 1 {
            self.round(0.0, messages, messages, bytes)
        } else {
            self.round(messages, 0.0, 0.0, bytes)
        }
    }

    /// Two levels: mates, ranks elsewhere that a rank carries for, messages that leave a host.
    fn levels(&self) -> (f64, f64, f64) {
        let others = (self.n - self.m) as f64;
        ((self.m - 1) as f64, others / self.m as f64, others)
    }
}

/// Lengths in bytes and what follows from the world.
struct Sizes {
    whole: f64,
    /// An even chunk.
    part: f64,
    /// The longest chunk.
    longest: f64,
    /// Bytes of an accumulator for one byte of an element.
    wide: f64,
    pieces: f64,
    /// Of the whole, what is at work at a time where one piece goes after the other.
    piece: u64,
    /// log2 of the largest power of two in the world.
    nodes: usize,
    odd: bool,
    /// ceil(log2 world).
    levels: usize,
}
