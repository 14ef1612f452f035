//! Tensor, sequence and pipeline parallel layers with hand-written backward passes, declared by
//! placements; pipeline schedules as data.
//!
//! One block, with what lies on each arrow over tp. On the right the gradient on its way back: the
//! dual placement, through the dual move ([`quintet_collectives::placement`] has the law).
//!
//! ```text
//!             value                                      gradient
//!   x         Invariant   or Shard(t)                    Invariant   or Shard(t)
//!   |---+
//!   |  norm   nothing sent                               nothing sent
//!   |   |     Invariant   or Shard(t)                    Invariant   or Shard(t)
//!   |  enter  nothing     or all-gather                  all-reduce  or reduce-scatter
//!   |   |     Replicate                                  Partial
//!   |  q k v  column-parallel, then rope, attention
//!   |   |     Shard(head)                                Shard(head)
//!   |   o     row-parallel
//!   |   |     Partial                                    Replicate
//!   |  leave  all-reduce  or reduce-scatter              nothing     or all-gather
//!   |   |     Invariant   or Shard(t)                    Invariant   or Shard(t)
//!   +--(+)
//!   h         the same once more: norm, enter, gate and up, silu and product, down, leave
//!   |---+     (the MLP's width for the heads)
//!   |  ...
//!   +--(+)
//!   y         Invariant   or Shard(t)                    Invariant   or Shard(t)
//! ```
//!
//! The second column is sequence parallelism: the same bytes on the wire, activations between
//! regions a tp-th. In front stands the embedding (Partial, leave), behind the [`Head`] (norm,
//! enter, logits Shard(v), loss Invariant).
//!
//! A [`Layer`] owns no parameter. It states each as a line of the ledger
//! ([`quintet_collectives::ParamSpec`]), and takes views of weights and gradients in that order.
//! A gradient that a layer adds is this rank's; over which ranks it is summed is
//! [`summed_over`](quintet_collectives::ParamSpec::summed_over) and nobody's memory.
#![no_std]
#![forbid(unsafe_code)]

extern crate alloc;
#[cfg(feature = "std")]
extern crate std;

pub mod architecture;
pub mod attention;
pub mod block;
pub mod context;
pub mod dropout;
pub mod embedding;
pub mod error;
pub mod ffn;
pub mod head;
pub mod init;
pub mod layer;
pub mod linear;
pub mod loss;
pub mod mlp;
pub mod moe;
pub mod norm;
pub mod philox;
pub mod pipeline;
pub mod recompute;
pub mod region;
pub mod saved;
mod spec;

pub use architecture::{Architecture, MlpKind, Positions};
pub use attention::SelfAttention;
pub use block::{Block, BlockSpec};
pub use context::{ContextGroups, ContextPlaces};
pub use dropout::{Drawn, Site};
pub use embedding::VocabParallelEmbedding;
pub use error::Error;
pub use ffn::Ffn;
pub use head::{Head, HeadSpec};
pub use layer::{Ctx, Layer, MicroBatch};
pub use linear::{ColumnParallelLinear, RowParallelLinear};
pub use loss::VocabParallelCrossEntropy;
pub use mlp::{GeluMlp, SwiGluMlp};
pub use moe::{MoeMlp, MoeShape, MoeSpec};
pub use norm::{NormKind, RowNorm};
pub use recompute::Recompute;
pub use saved::Saved;
pub use spec::INIT_STD;

#[cfg(all(doctest, feature = "std"))]
#[doc = include_str!("../README.md")]
struct Readme;
