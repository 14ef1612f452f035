//! How a sum may be folded, and the families of plans.

use core::fmt;

use crate::{cost::Model, plan::Operation};

/// How a sum may be folded.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Default)]
pub enum Order {
    /// A left fold in rank order: what a serial loop over the ranks computes, to the bit, whatever
    /// the algorithm, transport and length.
    #[default]
    Rank,
    /// Any plan. Its bits are fixed by plan, world and chunk length, never by timing, and equal on
    /// all ranks; they need not equal the serial loop's.
    Any,
}

impl Order {
    /// The lower-case name.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Rank => "rank",
            Self::Any => "any",
        }
    }
}

impl fmt::Display for Order {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// A family of plans; [`crate::plan`] has the table of rounds and bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Algorithm {
    /// Straight from whoever has to whoever needs, in one round.
    Direct,
    /// Each pair exchanges what the one has and the other needs.
    Pairwise,
    /// Chunks travel round a ring, or down a chain.
    Ring,
    /// A binomial tree.
    Tree,
    /// In round k each rank exchanges all it has with the rank 2^k away.
    RecursiveDoubling,
    /// Halves of what is left are exchanged and folded, then gathered the way back (Rabenseifner).
    HalvingDoubling,
    /// In round k each rank sends to the one 2^k to its left or right; any world takes
    /// ceil(log2 n) rounds (Bruck; for a barrier: dissemination).
    Bruck,
    /// Two binary trees, each for one half of the buffer; no rank is inner in both (Sanders, Speck
    /// and Traeff).
    DoubleTree,
    /// First among the ranks of a host, then among hosts, or the other way round.
    TwoLevel,
}

impl Algorithm {
    /// All of them, in the order in which ties are broken.
    pub const ALL: [Self; 9] = [
        Self::Direct,
        Self::Pairwise,
        Self::Ring,
        Self::Tree,
        Self::RecursiveDoubling,
        Self::HalvingDoubling,
        Self::Bruck,
        Self::DoubleTree,
        Self::TwoLevel,
    ];

    /// The lower-case name, as override strings have it.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Direct => "direct",
            Self::Pairwise => "pairwise",
            Self::Ring => "ring",
            Self::Tree => "tree",
            Self::RecursiveDoubling => "recursive_doubling",
            Self::HalvingDoubling => "halving_doubling",
            Self::Bruck => "bruck",
            Self::DoubleTree => "double_tree",
            Self::TwoLevel => "two_level",
        }
    }
}

impl fmt::Display for Algorithm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// The algorithm for `op` on `bytes` of f32 (of the whole, see
/// [`crate::plan::CollectiveShape::len`]) over `world` ranks: the choice of [`Model::default`].
///
/// All ranks must choose alike, so the arguments are only what is equal on all of them by
/// contract. Under [`Order::Rank`] every plan chosen folds in rank order.
///
/// ```
/// use quintet_collectives::{Algorithm, Order, choose, plan::Operation};
/// assert_eq!(choose(Operation::AllReduce, 64, 8, Order::Rank), Algorithm::Direct);
/// assert_eq!(choose(Operation::AllReduce, 1 << 20, 8, Order::Rank), Algorithm::Pairwise);
/// assert_eq!(choose(Operation::AllReduce, 1 << 20, 64, Order::Any), Algorithm::HalvingDoubling);
/// ```
#[must_use]
pub fn choose(op: Operation, bytes: usize, world: usize, order: Order) -> Algorithm {
    Model::default().choose_even(op, bytes, world, order)
}
