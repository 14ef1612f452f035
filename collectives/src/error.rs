//! The one error of this crate: who, what, what was expected and what came.

use alloc::string::String;

/// What can go wrong in a collective, a mesh or a transport.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The layout asked for cannot exist; the sentence names the nearest valid choices.
    #[error("{0}")]
    Layout(String),
    /// A placement move that has no meaning or loses information.
    #[error("no move from {from} to {to}: {reason}")]
    Move {
        /// Placement before.
        from: String,
        /// Placement after.
        to: String,
        /// Why it is refused.
        reason: &'static str,
    },
    /// A buffer's length does not fit the operation.
    #[error("{op}: {what} holds {got} elements where {expected} are needed")]
    Len {
        /// The operation called.
        op: &'static str,
        /// Which argument.
        what: &'static str,
        /// Elements needed.
        expected: usize,
        /// Elements given.
        got: usize,
    },
}
