//! The operations and their counts: what a caller asks for, before an algorithm is chosen.
//!
//! ```text
//! counts [3, 0, 2]:   0 1 2 |  | 3 4      chunk r belongs to rank r; empty chunks are legal
//! ```

use alloc::{format, string::String, vec::Vec};
use core::fmt;

/// What is done, without counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Operation {
    /// Every rank ends with the fold of all inputs.
    AllReduce,
    /// Rank r ends with chunk r of the fold.
    ReduceScatter,
    /// Every rank ends with all chunks.
    AllGather,
    /// Every rank ends with the root's buffer.
    Broadcast,
    /// The root ends with the fold.
    Reduce,
    /// The root ends with all chunks.
    Gather,
    /// Rank r ends with chunk r of the root's buffer.
    Scatter,
    /// Rank r ends with part r of every rank, in rank order; all parts of one length.
    AllToAll,
    /// The same with any lengths.
    AllToAllV,
    /// No rank leaves before all have come.
    Barrier,
    /// A message to one peer.
    Send,
    /// A message from one peer.
    Recv,
}

impl Operation {
    /// All of them.
    pub const ALL: [Self; 12] = [
        Self::AllReduce,
        Self::ReduceScatter,
        Self::AllGather,
        Self::Broadcast,
        Self::Reduce,
        Self::Gather,
        Self::Scatter,
        Self::AllToAll,
        Self::AllToAllV,
        Self::Barrier,
        Self::Send,
        Self::Recv,
    ];

    /// The name as the methods of a communicator have it.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::AllReduce => "all_reduce",
            Self::ReduceScatter => "reduce_scatter",
            Self::AllGather => "all_gather",
            Self::Broadcast => "broadcast",
            Self::Reduce => "reduce",
            Self::Gather => "gather",
            Self::Scatter => "scatter",
            Self::AllToAll => "all_to_all",
            Self::AllToAllV => "all_to_all_v",
            Self::Barrier => "barrier",
            Self::Send => "send",
            Self::Recv => "recv",
        }
    }

    /// Whether contributions are folded.
    #[must_use]
    pub const fn folds(self) -> bool {
        matches!(self, Self::AllReduce | Self::ReduceScatter | Self::Reduce)
    }
}

impl fmt::Display for Operation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// An operation with its counts, in elements. But for all_to_all_v equal on all ranks.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum CollectiveShape {
    /// Input and output of `len` on every rank.
    AllReduce {
        /// Elements.
        len: usize,
    },
    /// Input of `sum(counts)`, output of `counts[rank]`.
    ReduceScatter {
        /// One count per rank.
        counts: Vec<usize>,
    },
    /// Input of `counts[rank]`, output of `sum(counts)`.
    AllGather {
        /// One count per rank.
        counts: Vec<usize>,
    },
    /// A buffer of `len` on every rank; the root's is read.
    Broadcast {
        /// Elements.
        len: usize,
        /// Rank in the group.
        root: usize,
    },
    /// Input of `len` on every rank, output of `len` at the root.
    Reduce {
        /// Elements.
        len: usize,
        /// Rank in the group.
        root: usize,
    },
    /// Input of `counts[rank]`, output of `sum(counts)` at the root.
    Gather {
        /// One count per rank.
        counts: Vec<usize>,
        /// Rank in the group.
        root: usize,
    },
    /// Input of `sum(counts)` at the root, output of `counts[rank]`.
    Scatter {
        /// One count per rank.
        counts: Vec<usize>,
        /// Rank in the group.
        root: usize,
    },
    /// Input and output of `world * len`.
    AllToAll {
        /// Elements for each rank.
        len: usize,
    },
    /// Input of `sum(send)`, output of `sum(recv)`; both differ from rank to rank.
    AllToAllV {
        /// Elements for each rank.
        send: Vec<usize>,
        /// Elements from each rank.
        recv: Vec<usize>,
    },
    /// No elements.
    Barrier,
}

impl CollectiveShape {
    /// The operation.
    #[must_use]
    pub const fn operation(&self) -> Operation {
        match self {
            Self::AllReduce { .. } => Operation::AllReduce,
            Self::ReduceScatter { .. } => Operation::ReduceScatter,
            Self::AllGather { .. } => Operation::AllGather,
            Self::Broadcast { .. } => Operation::Broadcast,
            Self::Reduce { .. } => Operation::Reduce,
            Self::Gather { .. } => Operation::Gather,
            Self::Scatter { .. } => Operation::Scatter,
            Self::AllToAll { .. } => Operation::AllToAll,
            Self::AllToAllV { .. } => Operation::AllToAllV,
            Self::Barrier => Operation::Barrier,
        }
    }

    /// Elements of the whole: the longest buffer a rank holds, for all_to_all_v what it sends.
    #[must_use]
    pub fn len(&self, world: usize) -> usize {
        match self {
            Self::AllReduce { len } | Self::Broadcast { len, .. } | Self::Reduce { len, .. } => {
                *len
            }
            Self::ReduceScatter { counts }
            | Self::AllGather { counts }
            | Self::Gather { counts, .. }
            | Self::Scatter { counts, .. }
            | Self::AllToAllV { send: counts, .. } => counts.iter().sum(),
            Self::AllToAll { len } => world * len,
            Self::Barrier => 0,
        }
    }

    /// The root, where the operation has one.
    #[must_use]
    pub const fn root(&self) -> Option<usize> {
        match self {
            Self::Broadcast { root, .. }
            | Self::Reduce { root, .. }
            | Self::Gather { root, .. }
            | Self::Scatter { root, .. } => Some(*root),
            _ => None,
        }
    }

    /// The counts that must be equal on all ranks, where there are any.
    #[must_use]
    pub fn counts(&self) -> &[usize] {
        match self {
            Self::ReduceScatter { counts }
            | Self::AllGather { counts }
            | Self::Gather { counts, .. }
            | Self::Scatter { counts, .. } => counts,
            _ => &[],
        }
    }

    /// Why this shape does not fit a world, if so.
    pub(crate) fn unfit(&self, world: usize) -> Option<String> {
        let lens: [&[usize]; 2] = match self {
            Self::AllToAllV { send, recv } => [send, recv],
            Self::ReduceScatter { counts }
            | Self::AllGather { counts }
            | Self::Gather { counts, .. }
            | Self::Scatter { counts, .. } => [counts, counts],
            _ => return self.unfit_root(world),
        };
        for counts in lens {
            if counts.len() != world {
                return Some(format!(
                    "{} counts were given where there is one per rank",
                    counts.len()
                ));
            }
            if counts
                .iter()
                .try_fold(0usize, |sum, &c| sum.checked_add(c))
                .is_none()
            {
                return Some(String::from(
                    "the counts add up to more than an address can say",
                ));
            }
        }
        self.unfit_root(world)
    }

    fn unfit_root(&self, world: usize) -> Option<String> {
        let root = self.root().filter(|&root| root >= world)?;
        Some(format!("the root {root} is no rank of the group"))
    }
}
