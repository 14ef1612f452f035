//! What backward computes again instead of keeping it.

/// What backward computes again instead of keeping it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Recompute {
    /// Nothing.
    #[default]
    None,
    /// What is cheap.
    Selective,
    /// A block from its input.
    Full,
}
