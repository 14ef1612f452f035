//! What may travel, and how it is reduced. (Minimal seam; the rest is being written.)

/// Types a collective carries.
pub trait Element: bytemuck::Pod + Send + Sync + PartialEq + core::fmt::Debug + 'static {}
impl Element for f64 {}
impl Element for f32 {}
impl Element for i32 {}
impl Element for half::bf16 {}

/// How contributions are combined.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ReduceOp {
    /// The sum.
    Sum,
    /// The product.
    Prod,
    /// The minimum.
    Min,
    /// The maximum.
    Max,
    /// The sum divided by the number of ranks.
    Avg,
}
