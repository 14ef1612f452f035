//! Which folds come out as in rank order whatever order they are done in.

use crate::{DType, ReduceOp};

/// Whether every order of folding gives the bits of the left fold in rank order.
///
/// Integers wrap, so they may be summed in any order; the extremes of floats are one of them. Two floats
/// can be added or multiplied in two orders only, which are the same. NCCL's mean of floats scales before it sums.
pub(super) fn in_rank_order(dtype: DType, redop: ReduceOp, world: usize) -> bool {
    let float = matches!(dtype, DType::F64 | DType::F32 | DType::Bf16 | DType::F16);
    match redop {
        _ if world <= 1 || !float => true,
        ReduceOp::Min | ReduceOp::Max => true,
        ReduceOp::Sum | ReduceOp::Prod => world == 2,
        ReduceOp::Avg => false,
    }
}
