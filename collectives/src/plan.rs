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
//! n ranks, L = ceil(log2 n), S the whole length, c_r the chunk of rank r, w the bytes of an
//! element, a the bytes of its accumulator (4 for 16-bit floats, else w). `kids(r)` is the number
//! of children of r in the binomial tree. Bytes are payload sent by rank r.
//!
//! | operation      | algorithm | rounds | bytes sent by rank r |
//! |----------------|-----------|--------|----------------------|
//! | all_reduce     | direct    | 1      | (n-1) S w |
//! |                | pairwise  | 2      | (S - c_r) w + (n-1) c_r w |
//! |                | ring      | 2(n-1) | (S - c_r) a + (S - c_(r+1)) w |
//! |                | tree      | 2L     | S a unless r = 0, + kids(r) S w |
//! | reduce_scatter | pairwise  | 1      | (S - c_r) w |
//! |                | ring      | n-1    | (S - c_r) a |
//! | all_gather     | pairwise  | 1      | (n-1) c_r w |
//! |                | ring      | n-1    | (S - c_(r+1)) w |
//! | broadcast      | direct    | 1      | (n-1) S w at the root |
//! |                | tree      | L      | kids(r) S w |
//! | reduce         | direct    | 1      | S w, none at the root |
//! |                | tree      | L      | S a, none at the root |
//! | gather         | direct    | 1      | c_r w, none at the root |
//! | scatter        | direct    | 1      | (S - c_root) w at the root |
//! | all_to_all(_v) | pairwise  | 1      | all but what stays here |
//! | barrier        | direct    | 1      | 0 (n-1 empty messages) |
//! |                | tree      | L      | 0 (L empty messages, a dissemination) |
//!
//! Summed over the ranks, pairwise and ring all_reduce both send 2(n-1) S w: the least there is.

use alloc::{format, string::ToString, vec, vec::Vec};
use core::ops::Range;

use crate::{DType, Error, Result, chunk};

pub mod check;
mod direct;
mod draw;
mod pairwise;
mod ring;
mod shape;
mod tree;

pub use shape::{CollectiveShape, Operation};

pub use crate::order::{Algorithm, Order, choose};

/// Messages and local work of one rank in one round. All messages of a round are posted at once.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Round {
    /// What goes out.
    pub sends: Vec<Send>,
    /// What comes in.
    pub recvs: Vec<Recv>,
    /// What is done once everything of this round has come in.
    pub then: Vec<Local>,
}

/// A message to a peer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Send {
    /// Rank in the group.
    pub to: usize,
    /// What it carries.
    pub what: What,
}

/// What a message carries; ranges count elements.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum What {
    /// Raw elements of the input.
    Input(Range<usize>),
    /// Elements of the output.
    Output(Range<usize>),
    /// The partial, as accumulators, which is thereby given away; where none is held, this
    /// range of the input, widened.
    Partial(Range<usize>),
}

/// A message from a peer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Recv {
    /// Rank in the group.
    pub from: usize,
    /// Elements expected.
    pub len: usize,
    /// What is done with them.
    pub action: Action,
}

/// What is done with a message on receipt.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Action {
    /// Becomes the output from this element on.
    Store(usize),
    /// The partial (where none is held: this range of the input) op the message becomes the partial.
    Fold(Range<usize>),
    /// Is kept in the sender's slot for [`Local::FoldRanks`].
    Keep,
}

/// Local work at the end of a round.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Local {
    /// This range of the input becomes the output from element `at` on.
    Copy {
        /// Elements of the input.
        input: Range<usize>,
        /// First element of the output.
        at: usize,
    },
    /// Own input range and all kept messages, folded from left to right in rank order, rounded
    /// once, become the output from element `at` on.
    FoldRanks {
        /// Own contribution.
        input: Range<usize>,
        /// First element of the output.
        at: usize,
    },
    /// The partial (where none is held: this range of the input), rounded once, becomes the output
    /// from element `at` on.
    Finish {
        /// Own contribution.
        input: Range<usize>,
        /// First element of the output.
        at: usize,
    },
}

/// In which order a plan folds the contributions.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum FoldOrder {
    /// From left to right by rank, as a serial loop would. Plans that fold nothing have it too.
    RankOrder,
    /// Some order fixed by plan, world and length alone, never by timing.
    Fixed,
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
    algorithm: Algorithm,
    world: usize,
}

impl Plan {
    /// The plan of `shape` by `algorithm` over `world` ranks.
    ///
    /// # Errors
    /// [`Error::Plan`] where the algorithm does not offer the operation, counts are not one per
    /// rank, a root is no rank, or the world is empty.
    pub fn new(shape: CollectiveShape, algorithm: Algorithm, world: usize) -> Result<Self> {
        let refuse = |reason: &str| {
            Err(Error::Plan {
                op: shape.operation().name(),
                algorithm: algorithm.name(),
                world,
                reason: reason.to_string(),
            })
        };
        if world == 0 {
            return refuse("a group has at least one rank");
        }
        if let Some(reason) = shape.unfit(world) {
            return refuse(&reason);
        }
        if !offered(shape.operation(), algorithm) {
            return refuse("this algorithm does not offer the operation");
        }
        Ok(Self {
            shape,
            algorithm,
            world,
        })
    }

    /// The plan a communicator performs: [`choose`] picks the algorithm.
    ///
    /// # Errors
    /// [`Error::Plan`] as in [`Plan::new`].
    pub fn chosen(
        shape: CollectiveShape,
        world: usize,
        dtype: DType,
        order: Order,
    ) -> Result<Self> {
        let bytes = shape.len(world).saturating_mul(dtype.bytes());
        let algorithm = choose(shape.operation(), bytes, world, order);
        Self::new(shape, algorithm, world)
    }

    /// The operation and its counts.
    #[must_use]
    pub fn shape(&self) -> &CollectiveShape {
        &self.shape
    }

    /// The algorithm.
    #[must_use]
    pub fn algorithm(&self) -> Algorithm {
        self.algorithm
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
        let mut rounds = match self.algorithm {
            Algorithm::Direct => direct::rounds(self, rank),
            Algorithm::Pairwise => pairwise::rounds(self, rank),
            Algorithm::Ring => ring::rounds(self, rank),
            Algorithm::Tree => tree::rounds(self, rank),
        };
        if !self.sends_empty() {
            for round in &mut rounds {
                round.sends.retain(|send| !send.what.range().is_empty());
                round.recvs.retain(|recv| recv.len > 0);
            }
        }
        rounds
    }

    /// The order in which contributions are folded.
    #[must_use]
    pub fn fold_order(&self) -> FoldOrder {
        match self.algorithm {
            Algorithm::Direct | Algorithm::Pairwise => FoldOrder::RankOrder,
            Algorithm::Ring | Algorithm::Tree if self.shape.operation().folds() => FoldOrder::Fixed,
            Algorithm::Ring | Algorithm::Tree => FoldOrder::RankOrder,
        }
    }

    /// Rounds in which messages pass; see the table of this module.
    #[must_use]
    pub fn rounds_len(&self) -> usize {
        let n = self.world;
        if n == 1 {
            return 0;
        }
        let phases = 1 + usize::from(self.shape.operation() == Operation::AllReduce);
        match self.algorithm {
            Algorithm::Direct => 1,
            Algorithm::Pairwise => phases,
            Algorithm::Ring => phases * (n - 1),
            Algorithm::Tree => phases * tree::depth(n),
        }
    }

    /// Payload bytes that `rank` sends, by the closed formula of this module's table.
    #[must_use]
    pub fn bytes_sent(&self, rank: usize, dtype: DType) -> u64 {
        use CollectiveShape as S;
        let n = self.world;
        let (w, a) = (dtype.bytes() as u64, dtype.accumulator().bytes() as u64);
        let total = self.shape.len(n) as u64;
        let chunk = |r: usize| self.chunk(r % n).len() as u64;
        let others = (n - 1) as u64;
        let kids = |root: usize| tree::children(n, (rank + n - root) % n) as u64;
        match (&self.shape, self.algorithm) {
            (S::AllReduce { .. }, Algorithm::Direct) => others * total * w,
            (S::AllReduce { .. }, Algorithm::Pairwise) => {
                (total - chunk(rank)) * w + others * chunk(rank) * w
            }
            (S::AllReduce { .. }, Algorithm::Ring) => {
                (total - chunk(rank)) * a + (total - chunk(rank + 1)) * w
            }
            (S::AllReduce { .. }, Algorithm::Tree) => {
                u64::from(rank != 0) * total * a + kids(0) * total * w
            }
            (S::ReduceScatter { .. }, Algorithm::Ring) => (total - chunk(rank)) * a,
            (S::ReduceScatter { .. }, _) => (total - chunk(rank)) * w,
            (S::AllGather { .. }, Algorithm::Ring) => (total - chunk(rank + 1)) * w,
            (S::AllGather { .. }, _) => others * chunk(rank) * w,
            (S::Broadcast { root, .. }, Algorithm::Tree) => kids(*root) * total * w,
            (S::Broadcast { root, .. }, _) => u64::from(rank == *root) * others * total * w,
            (S::Reduce { root, .. }, Algorithm::Tree) => u64::from(rank != *root) * total * a,
            (S::Reduce { root, .. }, _) => u64::from(rank != *root) * total * w,
            (S::Gather { root, .. }, _) => u64::from(rank != *root) * chunk(rank) * w,
            (S::Scatter { root, .. }, _) => u64::from(rank == *root) * (total - chunk(rank)) * w,
            (S::AllToAll { len }, _) => others * *len as u64 * w,
            (S::AllToAllV { send, .. }, _) => (total - send[rank] as u64) * w,
            (S::Barrier, _) => 0,
        }
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
        use CollectiveShape as S;
        match &self.shape {
            S::ReduceScatter { counts }
            | S::AllGather { counts }
            | S::Gather { counts, .. }
            | S::Scatter { counts, .. } => {
                let start = counts[..rank].iter().sum();
                start..start + counts[rank]
            }
            shape => chunk::chunk(shape.len(self.world), self.world, rank),
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

impl What {
    /// The elements carried.
    #[must_use]
    pub fn range(&self) -> &Range<usize> {
        match self {
            Self::Input(range) | Self::Output(range) | Self::Partial(range) => range,
        }
    }
}

impl Round {
    /// A round of local work only.
    fn local(then: Local) -> Self {
        Self {
            then: vec![then],
            ..Self::default()
        }
    }

    fn send(&mut self, to: usize, what: What) {
        self.sends.push(Send { to, what });
    }

    fn recv(&mut self, from: usize, len: usize, action: Action) {
        self.recvs.push(Recv { from, len, action });
    }
}

/// The table of this module, first two columns.
fn offered(operation: Operation, algorithm: Algorithm) -> bool {
    use Algorithm as A;
    use Operation as O;
    match operation {
        O::AllReduce => true,
        O::ReduceScatter | O::AllGather => matches!(algorithm, A::Pairwise | A::Ring),
        O::Broadcast | O::Reduce | O::Barrier => matches!(algorithm, A::Direct | A::Tree),
        O::Gather | O::Scatter => algorithm == A::Direct,
        O::AllToAll | O::AllToAllV => algorithm == A::Pairwise,
        O::Send | O::Recv => false,
    }
}
