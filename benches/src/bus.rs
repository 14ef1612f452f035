//! Bandwidth as nccl-tests has it: `algbw = bytes / time`, `busbw = algbw * factor`, where the
//! factor makes the figure comparable with what one link carries, whatever the number of ranks.

/// A collective operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Op {
    /// Bytes are those of the buffer.
    AllReduce,
    /// Bytes are those of all ranks' parts together.
    ReduceScatter,
    /// Bytes are those of all ranks' parts together.
    AllGather,
    /// Bytes are those that one rank holds.
    AllToAll,
    /// Bytes are those of the buffer.
    Broadcast,
    /// Bytes are those of the buffer.
    Reduce,
}

/// busbw / algbw. 0 for one rank where the operation then moves nothing.
///
/// ```
/// use quintet_benches::bus::{Op, factor};
/// assert_eq!(factor(Op::AllReduce, 4), 1.5);
/// assert_eq!(factor(Op::AllGather, 4), 0.75);
/// assert_eq!(factor(Op::AllReduce, 1), 0.0);
/// ```
#[must_use]
pub fn factor(op: Op, ranks: usize) -> f64 {
    let n = ranks.max(1) as f64;
    match op {
        Op::AllReduce => 2.0 * (n - 1.0) / n,
        Op::ReduceScatter | Op::AllGather | Op::AllToAll => (n - 1.0) / n,
        Op::Broadcast | Op::Reduce => 1.0,
    }
}
