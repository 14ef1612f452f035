//! NCCL: collectives on the memory of NVIDIA GPUs (feature `nccl`).
//!
//! ```text
//! Communicator<Nccl<T>>   on_device(shape, redop, [input, output], lane)      spans of device memory
//!        |  announce, compare, losses, deadlines, abort: over T, as always
//!        v
//! Nccl<T>                 an ncclComm_t of the group, one for each pair and direction of messages;
//!        |                made when first used, by an id that goes over T or lies in a Store
//!        v
//! libnccl.so.2            found at run time (`library.rs`); nothing of it is needed to build
//! ```
//!
//! A call is compared by all ranks before NCCL hears of it, since ranks that call NCCL differently hang or
//! overwrite memory. It returns, or its [`crate::Pending`] is complete, once its work on the lane is over. A
//! wait that ends otherwise aborts the communicator first, so that nobody touches the memory any more.
//! [`OPERATIONS`] says which NCCL call an operation is; [`explain`] what is promised of its bits.

use core::fmt;
use std::{format, string::String};

use crate::{DType, Order, ReduceOp, plan::Operation};

mod calls;
mod end;
mod folds;
mod host;
mod library;
mod line;

pub use end::Nccl;
pub use host::HostLane;
pub use library::{Library, OLDEST, SHARED_GPUS, VARIABLE, Version};

/// How an operation is done: a row of the README's table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Means {
    /// What it is here.
    pub operation: &'static str,
    /// The calls of nccl.h.
    pub calls: &'static str,
    /// The version that has them.
    pub since: &'static str,
    /// What is done with an older one.
    pub older: &'static str,
}

/// Which NCCL call each operation is, since which version, and what happens on an older one. Nothing older than
/// 2.14 is taken, so what says "refused" there is refused when the library is opened.
pub const OPERATIONS: &[Means] = &[
    means("all_reduce", "ncclAllReduce", "2.0", "refused"),
    means("reduce_scatter", "ncclReduceScatter", "2.0", "refused"),
    means(
        "reduce_scatter_v",
        "a group of ncclReduce, one a rank",
        "2.0",
        "refused",
    ),
    means("all_gather", "ncclAllGather", "2.0", "refused"),
    means(
        "all_gather_v",
        "a group of ncclBroadcast, one a rank",
        "2.2",
        "refused",
    ),
    means("broadcast", "ncclBroadcast", "2.2", "refused"),
    means("reduce", "ncclReduce", "2.0", "refused"),
    means(
        "gather, gather_v",
        "a group of ncclSend and ncclRecv (ncclGather, 2.28, is not used)",
        "2.7",
        "refused",
    ),
    means(
        "scatter, scatter_v",
        "a group of ncclSend and ncclRecv (ncclScatter, 2.28, is not used)",
        "2.7",
        "refused",
    ),
    means(
        "all_to_all",
        "a group of ncclSend and ncclRecv (ncclAlltoAll, 2.28, is not used)",
        "2.7",
        "refused",
    ),
    means(
        "all_to_all_v",
        "the same, once the ranks have compared their counts",
        "2.7",
        "refused",
    ),
    means(
        "send, recv",
        "ncclSend, ncclRecv on a communicator of the two ranks and the direction",
        "2.7",
        "refused",
    ),
    means(
        "barrier",
        "none: the ranks wait for their lanes, then for each other",
        "any",
        "the same",
    ),
    means(
        "split, subgroup",
        "ncclCommInitRankConfig with an id of its own, at the first call (ncclCommSplit, 2.18, needs every rank of the parent)",
        "2.14",
        "refused",
    ),
    means("avg", "ncclAvg", "2.10", "refused"),
    means("bf16", "ncclBfloat16", "2.10", "refused"),
    means(
        "waits that end",
        "blocking = 0, ncclCommGetAsyncError, ncclCommAbort, ncclCommFinalize",
        "2.14",
        "refused",
    ),
    means(
        "what went wrong",
        "ncclGetErrorString, ncclGetLastError",
        "2.13",
        "refused",
    ),
    means(
        "two ranks on one GPU",
        "NCCL_MULTI_RANK_GPU_ENABLE=1, set by whoever starts the run",
        "2.30",
        "refused",
    ),
];

const fn means(
    operation: &'static str,
    calls: &'static str,
    since: &'static str,
    older: &'static str,
) -> Means {
    Means {
        operation,
        calls,
        since,
        older,
    }
}

/// What NCCL does for an operation, and what of its result is promised.
///
/// ```
/// use quintet_collectives::{DType, Order, ReduceOp, nccl::explain, plan::Operation};
/// let said = explain(Operation::AllReduce, DType::F32, ReduceOp::Sum, 8, Order::Rank);
/// assert!(said.refused);
/// assert!(said.to_string().contains("fold order: not promised"));
/// ```
#[must_use]
pub fn explain(
    operation: Operation,
    dtype: DType,
    redop: ReduceOp,
    world: usize,
    order: Order,
) -> Explanation {
    let fold = operation.folds().then_some((dtype, redop));
    let exact = folds::in_rank_order(dtype, redop, world);
    Explanation {
        operation,
        fold,
        world,
        order,
        refused: fold.is_some() && !exact && order == Order::Rank,
        exact: fold.is_none() || exact,
    }
}

/// What [`explain`] found; `Display` has the sentences.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Explanation {
    /// The operation.
    pub operation: Operation,
    /// Type and fold, where it folds.
    pub fold: Option<(DType, ReduceOp)>,
    /// Ranks.
    pub world: usize,
    /// The order asked for.
    pub order: Order,
    /// Whether it is refused under that order.
    pub refused: bool,
    /// Whether its result is that of a fold in rank order, whatever NCCL does.
    pub exact: bool,
}

impl fmt::Display for Explanation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = self.operation.name();
        let rows = || {
            OPERATIONS.iter().filter(|row| {
                row.operation
                    .split(", ")
                    .any(|word| word == name || word.strip_suffix("_v") == Some(name))
            })
        };
        for row in rows() {
            writeln!(f, "{}: {} (since {})", row.operation, row.calls, row.since)?;
        }
        let Some((dtype, redop)) = self.fold else {
            return writeln!(f, "nothing is folded: the result is the inputs' bits");
        };
        if self.exact {
            let ranks = self.world;
            writeln!(
                f,
                "fold order: any gives the bits of rank order for {redop} of {dtype} over {ranks} ranks"
            )?;
        } else {
            writeln!(
                f,
                "fold order: not promised; it depends on the algorithm (ring, tree, NVLS), the channels and the version, all of which NCCL chooses"
            )?;
        }
        if matches!(dtype, DType::Bf16 | DType::F16) {
            writeln!(f, "rounding: {dtype} may be rounded at each hop, not once")?;
        }
        if matches!(redop, ReduceOp::Min | ReduceOp::Max) {
            writeln!(f, "a NaN may lose")?;
        }
        match self.refused {
            true => writeln!(
                f,
                "order rank: refused; ask for order any, or fold on the host"
            ),
            false => writeln!(f, "order {}: done", self.order),
        }
    }
}

/// The table of [`OPERATIONS`] as the README has it.
#[must_use]
pub fn table() -> String {
    let mut text =
        String::from("| Operation | NCCL | Since | On an older one |\n|---|---|---|---|\n");
    for Means {
        operation,
        calls,
        since,
        older,
    } in OPERATIONS
    {
        text += &format!("| {operation} | {calls} | {since} | {older} |\n");
    }
    text
}

#[cfg(test)]
mod tests {
    use std::string::ToString;

    use super::*;

    #[test]
    fn the_readme_has_the_table() {
        assert!(
            include_str!("../README.md").contains(&table()),
            "the README's table should be\n{}",
            table()
        );
    }

    #[test]
    fn what_is_refused_is_said_so() {
        let said = |op, dtype, redop, world, order| explain(op, dtype, redop, world, order);
        let all_reduce = Operation::AllReduce;
        for (dtype, redop, world, exact) in [
            (DType::F32, ReduceOp::Sum, 2, true),
            (DType::F32, ReduceOp::Sum, 3, false),
            (DType::F64, ReduceOp::Avg, 2, false),
            (DType::F64, ReduceOp::Avg, 1, true),
            (DType::I32, ReduceOp::Sum, 8, true),
            (DType::Bf16, ReduceOp::Max, 8, true),
        ] {
            let rank = said(all_reduce, dtype, redop, world, Order::Rank);
            assert_eq!(
                (rank.exact, rank.refused),
                (exact, !exact),
                "{dtype} {redop} {world}"
            );
            assert!(!said(all_reduce, dtype, redop, world, Order::Any).refused);
        }
        for operation in Operation::ALL {
            let text = said(operation, DType::F16, ReduceOp::Sum, 8, Order::Any).to_string();
            let row = OPERATIONS.iter().any(|row| text.starts_with(row.operation));
            assert!(row, "{operation}: {text}");
        }
    }
}
