//! The one error of this crate.

/// Why something could not be planned.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A layout that cannot be.
    #[error(transparent)]
    Invalid(#[from] crate::Invalid),
    /// A mesh or a plan was refused.
    #[error(transparent)]
    Collective(#[from] quintet_collectives::Error),
    /// A layer was refused.
    #[error(transparent)]
    Layer(#[from] quintet_parallel_layers::Error),
    /// A flat layout was refused.
    #[error(transparent)]
    Zero(#[from] quintet_zero::Error),
    /// The pipeline's schedule refuses.
    #[error(transparent)]
    Schedule(#[from] quintet_parallel_layers::pipeline::Error),
}
