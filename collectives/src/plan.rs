//! A plan is pure data: for each rank a list of rounds, each holding what goes out, what comes in,
//! and what is done with it. Nothing here moves a byte.
//!
//! ```text
//!            input (read only)             messages                 output
//! rank r  [ ............... ] --Send--> ~~~~~~~~~~~~~~ --Store--> [ ......... ]
//!                 |                            |                      ^
//!                 |                            +--Keep--> slot of the sender --FoldRanks--+
//!                 +--------------------Fold----+--------> the partial --------Finish------+
//! ```
//!
//! `Keep` holds contributions apart until their owner folds them from left to right in rank order:
//! such a plan has [`FoldOrder::RankOrder`] and its messages carry raw elements. `Fold` sums along
//! the way into one *partial*; its order is fixed by plan and world ([`FoldOrder::Fixed`]) and its
//! messages carry accumulators, so that a 16-bit sum is rounded once all the same.
//!
//! # Rounds and bytes
//!
//! n ranks, L = ceil(log2 n), p = 2^l the largest power of two in n, e = 2 where n is not p (else 0),
//! S the whole length, c_r the chunk of rank r, w the bytes of an element, a the bytes of its
//! accumulator (4 for 16-bit floats, else w). `kids(r)` is the number of children of r in the binomial
//! tree. Bytes are payload sent by rank r; where n is not p, those of a rank that is not paired (the
//! paired ones hand their part in before and get the result after, see `nodes.rs`).
//!
//! | operation      | algorithm          | rounds | bytes sent by rank r |
//! |----------------|--------------------|--------|----------------------|
//! | all_reduce     | direct             | 1      | (n-1) S w |
//! |                | pairwise           | 2      | (S - c_r) w + (n-1) c_r w |
//! |                | ring               | 2(n-1) | (S - c_r) a + (S - c_(r+1)) w |
//! |                | tree               | 2L     | S a unless r = 0, + kids(r) S w |
//! |                | recursive_doubling | l + e  | l S a |
//! |                | halving_doubling   | 2l + e | about (1 - 1/p) S (a + w) |
//! |                | bruck              | L      | (n-1) S w |
//! |                | double_tree        | 2 floor(log2 n) | at most S a + S w |
//! |                | two_level          | 4      | within hosts (S - k_r) w, + (k_r - c_r) a, + (H-1) c_r w + (m-1) k_r w |
//! | reduce_scatter | pairwise           | 1      | (S - c_r) w |
//! |                | ring               | n-1    | (S - c_r) a |
//! |                | halving_doubling   | l + e  | (S - c_r) a |
//! |                | two_level          | 2      | (S - k_r) w + (k_r - c_r) a |
//! | all_gather     | pairwise           | 1      | (n-1) c_r w |
//! |                | ring               | n-1    | (S - c_(r+1)) w |
//! |                | recursive_doubling | l + e  | the chunks gathered before each round, w each |
//! |                | bruck              | L      | the same |
//! |                | two_level          | 2      | (H-1) c_r w + (m-1) k_r w |
//! | broadcast      | direct             | 1      | (n-1) S w at the root |
//! |                | ring (a chain)     | n-1    | S w, none at its end |
//! |                | tree               | L      | kids(r) S w |
//! |                | double_tree        | floor(log2(n-1)) + 1 | at most S w |
//! |                | two_level          | ceil(log2 H) + ceil(log2 m) | kids S w in both trees |
//! | reduce         | direct             | 1      | S w, none at the root |
//! |                | ring (a chain)     | n-1    | S a, none at the root |
//! |                | tree               | L      | S a, none at the root |
//! |                | double_tree        | floor(log2(n-1)) + 1 | S a, none at the root |
//! |                | two_level          | ceil(log2 H) + ceil(log2 m) | S a, none at the root |
//! | gather         | direct             | 1      | c_r w, none at the root |
//! | scatter        | direct             | 1      | (S - c_root) w at the root |
//! | all_to_all     | pairwise           | 1      | all but what stays here |
//! |                | bruck              | L      | block j once for each bit set in j |
//! |                | two_level          | 2      | all but what stays here, + m blocks for each rank carried, but own ones once |
//! | all_to_all_v   | pairwise           | 1      | all but what stays here |
//! | barrier        | direct             | 1      | 0 (n-1 empty messages) |
//! |                | recursive_doubling | l + e  | 0 |
//! |                | bruck              | L      | 0 (L empty messages, a dissemination) |
//! |                | two_level          | ceil(log2 H) + 2 | 0 |
//!
//! Two-level: H hosts, the fullest with m ranks; k_r is c_r and the chunks that r carries for ranks
//! elsewhere (`two_level.rs`). A level without peers is left out. With [`PlanSpec::chunk_len`] ring and
//! trees send K pieces, each one round behind the last: K-1 rounds more, the same bytes. A pairwise
//! all_reduce is through with one piece before it begins with the next: K times the rounds.
//!
//! Summed over the ranks, pairwise and ring all_reduce both send 2(n-1) S w: the least there is.
//!
//! # Fold order
//!
//! direct, pairwise and bruck keep raw contributions apart until their owner folds them from left to
//! right. The others fold on the way; what they compute for ranks 0..4, with brackets, elementwise:
//!
//! | algorithm | all_reduce of ranks 0 1 2 3 |
//! |-----------|-----------------------------|
//! | ring      | ((x1 + x2) + x3) + x0 for chunk 0, the next chunk one rank on |
//! | tree      | (x0 + x1) + (x2 + x3) |
//! | recursive_doubling, halving_doubling | (x0 + x1) + (x2 + x3); reduce_scatter (x0 + x2) + (x1 + x3) |
//! | double_tree | (x0 + x1 + x2) + x3 in the first half; the second as numbered in `double_tree.rs` |
//! | two_level | each host from the carrier on, then the hosts from the owner's on |

use alloc::{format, vec::Vec};
use core::ops::Range;

use crate::{DType, Error, Result, chunk, cost::Model};

mod bruck;
mod bytes;
pub mod check;
mod direct;
mod double_tree;
mod doubling;
mod draw;
mod halving;
mod hosts;
mod nodes;
mod offers;
mod pairwise;
mod ring;
mod shape;
mod steps;
mod tree;
mod two_level;

use offers::refused;
pub(crate) use offers::{offered, pipelines};

pub use double_tree::{Seat, seats};
pub use hosts::Hosts;
pub use shape::{CollectiveShape, Operation};
pub use steps::{Action, Local, Part, Place, Recv, Round, Send, What};

pub use crate::order::{Algorithm, Order, choose};

/// In which order a plan folds the contributions.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum FoldOrder {
    /// From left to right by rank, as a serial loop would. Plans that fold nothing have it too.
    RankOrder,
    /// Some order fixed by plan, world and length alone, never by timing; the table of this module
    /// has it.
    Fixed,
}

/// What a plan is made from, beside its operation: the algorithm and its parameters.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PlanSpec {
    /// The algorithm.
    pub algorithm: Algorithm,
    /// Ring, trees and a pairwise all_reduce: messages of at most so many elements follow each other through
    /// the plan. `None`: each message goes in one piece.
    pub chunk_len: Option<usize>,
    /// Two-level: which ranks share a host.
    pub hosts: Option<Hosts>,
}

impl From<Algorithm> for PlanSpec {
    fn from(algorithm: Algorithm) -> Self {
        Self {
            algorithm,
            chunk_len: None,
            hosts: None,
        }
    }
}

/// An operation, its counts, an algorithm and a world: what every rank does is now determined.
///
/// ```
/// use quintet_collectives::{DType, plan::{Algorithm, CollectiveShape, FoldOrder, Plan}};
/// let plan = Plan::new(CollectiveShape::AllReduce { len: 10 }, Algorithm::Ring, 4)?;
/// assert_eq!(plan.rounds_len(), 6);
/// assert_eq!(plan.fold_order(), FoldOrder::Fixed);
/// assert_eq!(plan.bytes_sent(0, DType::F32), ((10 - 3) + (10 - 3)) * 4);
/// # Ok::<(), quintet_collectives::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Plan {
    shape: CollectiveShape,
    spec: PlanSpec,
    world: usize,
    /// Where each rank's chunk starts, and the end, where the shape has counts.
    starts: Vec<usize>,
    /// Of even chunks: the length of the shorter ones, and how many hold one element more.
    even: (usize, usize),
    /// How many pieces follow each other.
    pieces: usize,
}

impl Plan {
    /// The plan of `shape` by `algorithm` over `world` ranks.
    ///
    /// # Errors
    /// [`Error::Plan`] where the algorithm does not offer the operation, counts are not one per
    /// rank, a root is no rank, or the world is empty.
    pub fn new(shape: CollectiveShape, algorithm: Algorithm, world: usize) -> Result<Self> {
        Self::from_spec(shape, algorithm.into(), world)
    }

    /// The same with parameters.
    ///
    /// # Errors
    /// As [`Plan::new`], and where a parameter is missing, or is not one of this algorithm.
    ///
    /// ```
    /// use quintet_collectives::plan::{Algorithm, CollectiveShape, Hosts, Plan, PlanSpec, check};
    /// let shape = CollectiveShape::AllReduce { len: 1000 };
    /// let ring = PlanSpec { chunk_len: Some(64), ..Algorithm::Ring.into() };
    /// check::check(&Plan::from_spec(shape.clone(), ring, 3)?)?;
    /// let levels = PlanSpec { hosts: Some(Hosts::new(&[0, 0, 1])), ..Algorithm::TwoLevel.into() };
    /// check::check(&Plan::from_spec(shape, levels, 3)?)?;
    /// # Ok::<(), quintet_collectives::Error>(())
    /// ```
    pub fn from_spec(shape: CollectiveShape, spec: PlanSpec, world: usize) -> Result<Self> {
        if let Some(reason) = refused(&shape, &spec, world) {
            return Err(Error::Plan {
                op: shape.operation().name(),
                algorithm: spec.algorithm.name(),
                world,
                reason,
            });
        }
        let mut starts = Vec::new();
        if !shape.counts().is_empty() {
            starts.push(0);
            starts.extend(shape.counts().iter().scan(0, |at, count| {
                *at += count;
                Some(*at)
            }));
        }
        let len = shape.len(world);
        let mut plan = Self {
            shape,
            spec,
            world,
            starts,
            even: (len / world, len % world),
            pieces: 1,
        };
        if let Some(chunk_len) = plan.spec.chunk_len.filter(|_| world > 1) {
            plan.pieces = plan.cut_len().div_ceil(chunk_len).max(1);
        }
        Ok(plan)
    }

    /// The plan a communicator performs: [`Model::default`] chooses.
    ///
    /// # Errors
    /// [`Error::Plan`] as in [`Plan::new`].
    pub fn chosen(
        shape: CollectiveShape,
        world: usize,
        dtype: DType,
        order: Order,
    ) -> Result<Self> {
        Model::default().plan(shape, world, dtype, order)
    }

    /// The operation and its counts.
    #[must_use]
    pub fn shape(&self) -> &CollectiveShape {
        &self.shape
    }

    /// The algorithm.
    #[must_use]
    pub fn algorithm(&self) -> Algorithm {
        self.spec.algorithm
    }

    /// The algorithm with its parameters.
    #[must_use]
    pub fn spec(&self) -> &PlanSpec {
        &self.spec
    }

    /// Ranks in the group.
    #[must_use]
    pub fn world(&self) -> usize {
        self.world
    }

    /// What `rank` does, round by round. Messages of length zero are left out, but for the barrier
    /// and all_to_all_v, where each pair exchanges one always.
    ///
    /// For all_to_all_v these are the rounds of the one rank whose counts the shape holds.
    #[must_use]
    pub fn rounds(&self, rank: usize) -> Vec<Round> {
        self.iter(rank).collect()
    }

    /// The same, one round at a time.
    pub fn iter(&self, rank: usize) -> impl ExactSizeIterator<Item = Round> + '_ {
        (0..self.rounds_len().max(1)).map(move |index| {
            let mut round = Round::default();
            self.round_into(rank, index, &mut round);
            round
        })
    }

    /// Makes `round` what `rank` does in round `index`; beyond the last one, nothing.
    pub fn round_into(&self, rank: usize, index: usize, round: &mut Round) {
        round.clear();
        if self.world == 1 {
            round.then.extend(self.alone().filter(|_| index == 0));
            return;
        }
        if index >= self.rounds_len() {
            return;
        }
        let (base, last) = (self.base_rounds(), self.pieces - 1);
        if self.one_by_one() {
            self.add(rank, index % base, index / base, round);
        } else {
            // Piece c goes through the plan c rounds after the first one.
            for piece in (index + 1).saturating_sub(base)..=index.min(last) {
                self.add(rank, index - piece, piece, round);
            }
        }
        if !self.sends_empty() {
            round.sends.retain(|send| !send.what.is_empty());
            round.recvs.retain(|recv| recv.len > 0);
        }
    }

    fn add(&self, rank: usize, index: usize, piece: usize, round: &mut Round) {
        match self.spec.algorithm {
            Algorithm::Direct => direct::round(self, rank, round),
            Algorithm::Pairwise => pairwise::round(self, rank, index, piece, round),
            Algorithm::Ring => ring::round(self, rank, index, piece, round),
            Algorithm::Tree => tree::round(self, rank, index, piece, round),
            Algorithm::RecursiveDoubling => doubling::round(self, rank, index, round),
            Algorithm::HalvingDoubling => halving::round(self, rank, index, round),
            Algorithm::Bruck => bruck::round(self, rank, index, round),
            Algorithm::DoubleTree => double_tree::round(self, rank, index, piece, round),
            Algorithm::TwoLevel => two_level::round(self, rank, index, round),
        }
    }

    /// The order in which contributions are folded.
    #[must_use]
    pub fn fold_order(&self) -> FoldOrder {
        match self.spec.algorithm {
            _ if !self.shape.operation().folds() => FoldOrder::RankOrder,
            Algorithm::Direct | Algorithm::Pairwise | Algorithm::Bruck => FoldOrder::RankOrder,
            _ => FoldOrder::Fixed,
        }
    }

    /// Rounds in which messages pass; see the table of this module.
    #[must_use]
    pub fn rounds_len(&self) -> usize {
        if self.world == 1 {
            return 0;
        }
        if self.one_by_one() {
            self.base_rounds() * self.pieces
        } else {
            self.base_rounds() + self.pieces - 1
        }
    }

    /// Whether a piece goes through all its rounds before the next begins.
    fn one_by_one(&self) -> bool {
        self.spec.algorithm == Algorithm::Pairwise
    }

    /// Elements of the whole that are at work at a time.
    pub(crate) fn recent_len(&self) -> usize {
        let len = self.shape.len(self.world);
        if self.one_by_one() {
            len.div_ceil(self.pieces)
        } else {
            len
        }
    }

    /// Rounds of one piece.
    fn base_rounds(&self) -> usize {
        let n = self.world;
        let phases = 1 + usize::from(self.shape.operation() == Operation::AllReduce);
        match self.spec.algorithm {
            Algorithm::Direct => 1,
            Algorithm::Pairwise => phases,
            Algorithm::Ring => phases * (n - 1),
            Algorithm::Tree => phases * tree::depth(n),
            Algorithm::RecursiveDoubling => doubling::rounds_len(n),
            Algorithm::HalvingDoubling => halving::rounds_len(self),
            Algorithm::Bruck => tree::depth(n),
            Algorithm::DoubleTree => double_tree::rounds_len(self),
            Algorithm::TwoLevel => two_level::rounds_len(self),
        }
    }

    /// Payload bytes that `rank` sends, by the closed formula of this module's table.
    #[must_use]
    pub fn bytes_sent(&self, rank: usize, dtype: DType) -> u64 {
        bytes::sent(self, rank, dtype)
    }

    /// Elements of `rank`'s input.
    #[must_use]
    pub fn input_len(&self, rank: usize) -> usize {
        use CollectiveShape as S;
        match &self.shape {
            S::AllGather { counts } | S::Gather { counts, .. } => counts[rank],
            S::Scatter { root, .. } | S::Broadcast { root, .. } if rank != *root => 0,
            shape => shape.len(self.world),
        }
    }

    /// Elements of `rank`'s output.
    #[must_use]
    pub fn output_len(&self, rank: usize) -> usize {
        use CollectiveShape as S;
        match &self.shape {
            S::ReduceScatter { counts } | S::Scatter { counts, .. } => counts[rank],
            S::Gather { root, .. } | S::Reduce { root, .. } if rank != *root => 0,
            S::AllToAllV { recv, .. } => recv.iter().sum(),
            shape => shape.len(self.world),
        }
    }

    /// The elements of the whole that belong to `rank`.
    #[must_use]
    pub fn chunk(&self, rank: usize) -> Range<usize> {
        if self.starts.is_empty() {
            let (base, longer) = self.even;
            let start = rank * base + rank.min(longer);
            start..start + base + usize::from(rank < longer)
        } else {
            self.starts[rank]..self.starts[rank + 1]
        }
    }

    /// The chunks of consecutive ranks, as one range.
    fn chunks(&self, ranks: Range<usize>) -> Range<usize> {
        if ranks.is_empty() {
            return 0..0;
        }
        self.chunk(ranks.start).start..self.chunk(ranks.end - 1).end
    }

    /// The part of `range` that belongs to a piece.
    fn piece(&self, range: Range<usize>, piece: usize) -> Range<usize> {
        if self.pieces == 1 {
            return range;
        }
        let part = chunk::chunk(range.len(), self.pieces, piece);
        range.start + part.start..range.start + part.end
    }

    /// Elements of the longest range that is cut into pieces.
    fn cut_len(&self) -> usize {
        let len = self.shape.len(self.world);
        match (self.spec.algorithm, &self.shape) {
            (Algorithm::DoubleTree, _) => len.div_ceil(2),
            (Algorithm::Ring | Algorithm::Pairwise, CollectiveShape::AllReduce { .. }) => {
                len.div_ceil(self.world)
            }
            (Algorithm::Ring, shape) => shape.counts().iter().copied().max().unwrap_or(len),
            _ => len,
        }
    }

    /// What a world of one does.
    fn alone(&self) -> Option<Local> {
        let input = 0..self.input_len(0);
        match self.shape.operation() {
            Operation::Barrier | Operation::Send | Operation::Recv => None,
            op if op.folds() => Some(Local::Finish { input, at: 0 }),
            _ => Some(Local::Copy { input, at: 0 }),
        }
    }

    /// Whether messages of length zero are sent all the same: the barrier is made of them, and in
    /// all_to_all_v nobody else knows that a count is zero.
    fn sends_empty(&self) -> bool {
        matches!(
            self.shape.operation(),
            Operation::Barrier | Operation::AllToAllV
        )
    }
}

/// Payload bytes `rank` sends when a communicator performs `op`: the same choice and the same
/// formula as the performer's.
///
/// # Errors
/// [`Error::Plan`] as in [`Plan::new`].
pub fn bytes_sent(
    op: &CollectiveShape,
    rank: usize,
    world: usize,
    dtype: DType,
    order: Order,
) -> Result<u64> {
    if rank >= world {
        return Err(Error::Layout(format!(
            "rank {rank} is not below the world {world}"
        )));
    }
    Ok(Plan::chosen(op.clone(), world, dtype, order)?.bytes_sent(rank, dtype))
}
