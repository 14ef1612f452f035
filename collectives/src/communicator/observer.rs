//! Who hears of operations.
//!
//! ```text
//! all_reduce ----- on this thread -----> over(&Observed)
//! start_send ----- on the worker ------> over(&Observed)      then the Pending is complete
//! ```

use std::time::Instant;

/// Hears of each operation of a communicator, and of the groups made from it, once it is over: the
/// place for traces. Without one, an operation costs one look at whether there is one.
///
/// It is called on the thread that performed the operation, with the group locked: it must be quick
/// and must not call the communicator.
pub trait Observer: Send + Sync {
    /// An operation is over, well or not. One that timed out is not told of.
    fn over(&self, operation: &Observed<'_>);
}

/// An operation that is over, as one rank saw it.
#[derive(Debug, Clone, Copy)]
pub struct Observed<'a> {
    /// Name of the group.
    pub group: &'a str,
    /// Ranks in it.
    pub world: usize,
    /// Global rank of who tells.
    pub rank: usize,
    /// Its name, as in `all_reduce`, `send`, `recv`.
    pub op: &'static str,
    /// Of a collective its number in the group, of a message its tag.
    pub number: u64,
    /// Of a message the other end, as a global rank.
    pub peer: Option<usize>,
    /// Payload bytes that this rank sent in it.
    pub bytes: u64,
    /// When it began: for a started one, once its gate was open.
    pub began: Instant,
    /// When it was over.
    pub ended: Instant,
    /// Whether it was started, and so ran beside the caller.
    pub started: bool,
    /// Whether it went well.
    pub ok: bool,
}
