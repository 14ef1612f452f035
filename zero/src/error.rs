//! The one error of this crate: who, what, what was expected and what came.

use alloc::string::String;

/// What can go wrong in laying out, reducing, stepping, saving and loading.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A ZeRO stage that there is not.
    #[error("there is no ZeRO stage {stage}; there are 0 to 3")]
    Stage {
        /// The stage asked for.
        stage: u8,
    },
    /// A parameter that cannot be laid out.
    #[error("parameter {name}: {why}")]
    Param {
        /// Its name.
        name: String,
        /// What is wrong and what would be right.
        why: String,
    },
    /// Something was asked for that the layout does not hold.
    #[error("there is no {what} {index}; the layout has {count}")]
    Index {
        /// Layer, bucket or part.
        what: &'static str,
        /// The index asked for.
        index: usize,
        /// How many there are.
        count: usize,
    },
    /// The trainer gave no communicator, or one of other ranks, for a group that is needed.
    #[error("the group for {what} must have this rank at place {place} of {world}, but {got}")]
    Group {
        /// Which group.
        what: String,
        /// This rank's place among the ranks, ascending.
        place: usize,
        /// Ranks in the group.
        world: usize,
        /// What was given.
        got: String,
    },
    /// A call out of order.
    #[error("{what} {index}: {why}")]
    Order {
        /// Bucket or part.
        what: &'static str,
        /// Its index.
        index: usize,
        /// What came too early, twice or not at all.
        why: &'static str,
    },
    /// A gradient is infinite or not a number; the same on all ranks.
    #[error("the gradient of {name} at element {index} is not finite on rank {rank}")]
    NonFinite {
        /// The parameter.
        name: String,
        /// Its logical index.
        index: usize,
        /// The lowest rank that holds such an element.
        rank: usize,
    },
    /// Every gradient is finite, but the sum of their squares is not.
    #[error("the global gradient norm overflows although every gradient is finite")]
    NormOverflow,
    /// A message between ranks that this crate cannot read.
    #[error("rank {rank} sent a description that cannot be read")]
    Message {
        /// The sender.
        rank: usize,
    },
    /// A checkpoint cannot be written or read; nothing was changed by reading it.
    #[error("{0}")]
    Checkpoint(String),
    /// A kernel or the device failed.
    #[error(transparent)]
    Kernel(#[from] quintet_kernels::Error),
    /// A collective failed.
    #[error(transparent)]
    Wire(#[from] quintet_collectives::Error),
}
