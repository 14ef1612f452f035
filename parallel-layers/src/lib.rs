//! Tensor, sequence and pipeline parallel layers with hand-written backward passes, declared by
//! placements; pipeline schedules as data.
#![no_std]
#![forbid(unsafe_code)]

extern crate alloc;
#[cfg(feature = "std")]
extern crate std;

pub mod attention;
pub mod block;
pub mod embedding;
pub mod error;
pub mod head;
pub mod init;
pub mod layer;
pub mod linear;
pub mod loss;
pub mod mlp;
pub mod norm;
pub mod philox;
pub mod pipeline;
pub mod region;
pub mod saved;
mod spec;

pub use attention::SelfAttention;
pub use block::{Block, BlockSpec};
pub use embedding::VocabParallelEmbedding;
pub use error::Error;
pub use head::{Head, HeadSpec};
pub use layer::{Ctx, Layer, MicroBatch};
pub use linear::{ColumnParallelLinear, RowParallelLinear};
pub use loss::VocabParallelCrossEntropy;
pub use mlp::SwiGluMlp;
pub use norm::RmsNorm;
pub use saved::Saved;
pub use spec::INIT_STD;
