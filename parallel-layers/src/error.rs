//! The one error of this crate.

use alloc::string::String;

/// What can go wrong in a layer.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A kernel or the device refused.
    #[error(transparent)]
    Kernel(#[from] quintet_kernels::Error),
    /// A collective failed.
    #[error(transparent)]
    Collective(#[from] quintet_collectives::Error),
    /// The layer cannot be cut this way; the sentence names what would be right.
    #[error("{0}")]
    Layout(String),
    /// A layer was given another number of parameter views than it has parameters.
    #[error("{layer}: {got} parameter views where {expected} are needed")]
    Params {
        /// The layer.
        layer: &'static str,
        /// Views needed.
        expected: usize,
        /// Views given.
        got: usize,
    },
    /// Backward was called without what forward or backward_input leaves for it.
    #[error("{layer}: {what} is missing; call {first} first")]
    Order {
        /// The layer.
        layer: &'static str,
        /// What is missing.
        what: &'static str,
        /// The method that leaves it.
        first: &'static str,
    },
}
