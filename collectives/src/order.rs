//! Which algorithm performs an operation: a pure function of values that are equal on all ranks.
//!
//! ```text
//!                   world x bytes <= 32 KiB       above
//! Order::Rank        direct                        pairwise
//! Order::Any         direct (tree above 16 ranks)  ring
//! ```

use core::fmt;

use crate::plan::Operation;

/// How a sum may be folded.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Default)]
pub enum Order {
    /// A left fold in rank order: what a serial loop over the ranks computes, to the bit, whatever
    /// the algorithm, transport and length.
    #[default]
    Rank,
    /// Any plan. Its bits are fixed by plan, world and length, never by timing, and equal on all
    /// ranks; they need not equal the serial loop's.
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
    /// Chunks travel round a ring.
    Ring,
    /// A binomial tree.
    Tree,
}

impl Algorithm {
    /// All of them.
    pub const ALL: [Self; 4] = [Self::Direct, Self::Pairwise, Self::Ring, Self::Tree];

    /// The lower-case name.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Direct => "direct",
            Self::Pairwise => "pairwise",
            Self::Ring => "ring",
            Self::Tree => "tree",
        }
    }
}

impl fmt::Display for Algorithm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// The algorithm for `op` on `bytes` (of the whole, see [`crate::plan::CollectiveShape::len`])
/// over `world` ranks.
///
/// All ranks must choose alike, so the arguments are only what is equal on all of them by
/// contract. Under [`Order::Rank`] every plan chosen folds in rank order.
///
/// ```
/// use quintet_collectives::{Algorithm, Order, choose, plan::Operation};
/// assert_eq!(choose(Operation::AllReduce, 64, 8, Order::Rank), Algorithm::Direct);
/// assert_eq!(choose(Operation::AllReduce, 1 << 20, 8, Order::Rank), Algorithm::Pairwise);
/// assert_eq!(choose(Operation::AllReduce, 1 << 20, 8, Order::Any), Algorithm::Ring);
/// ```
#[must_use]
pub const fn choose(op: Operation, bytes: usize, world: usize, order: Order) -> Algorithm {
    let small = bytes.saturating_mul(world) <= DIRECT_BYTES;
    let few = world <= DIRECT_WORLD;
    match (op, order) {
        (Operation::AllReduce, Order::Rank) if small => Algorithm::Direct,
        (Operation::AllReduce, Order::Rank) => Algorithm::Pairwise,
        (Operation::AllReduce, Order::Any) if small && few => Algorithm::Direct,
        (Operation::AllReduce, Order::Any) if small => Algorithm::Tree,
        (Operation::ReduceScatter | Operation::AllGather, Order::Any) if !small => Algorithm::Ring,
        (Operation::AllReduce, Order::Any) => Algorithm::Ring,
        (Operation::ReduceScatter | Operation::AllGather, _) => Algorithm::Pairwise,
        (Operation::Reduce, Order::Any) if !few => Algorithm::Tree,
        (Operation::Broadcast | Operation::Barrier, _) if !few => Algorithm::Tree,
        (Operation::AllToAll | Operation::AllToAllV, _) => Algorithm::Pairwise,
        _ => Algorithm::Direct,
    }
}

/// Up to here (bytes received by one rank when everybody sends everything) one more round costs
/// more than the bytes it saves.
const DIRECT_BYTES: usize = 32 << 10;

/// Up to here one rank may post a message to everybody at once.
const DIRECT_WORLD: usize = 16;
