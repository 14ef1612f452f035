//! ZeRO sharding of parameters, gradients and optimizer state: flat layouts, partitions, overlapped
//! buckets, exact global-norm clipping, and checkpoints that load under any other layout.
//!
//! ```text
//! ParamSpecs of a chunk --FlatLayout::build--> entries, parts, buckets      pure data
//!                                    |
//!            Partition: who keeps what under a ZeroStage                    pure data
//!             |               |                  |
//!        ParamStore        GradSync       ShardedOptimizer                  buffers
//!        views(layer)      views_mut(layer)      |
//!                          reduce(bucket)        |
//!                          finish() --> grad_norm --> step --> all-gather
//! ```
//!
//! # Stages
//!
//! | stage     | parameters | gradients | optimizer state | traffic per element of a part of N ranks    |
//! |-----------|------------|-----------|-----------------|---------------------------------------------|
//! | 0 `Ddp`   | whole      | whole     | whole           | all-reduce of the gradient                  |
//! | 1 `One`   | whole      | whole     | 1/N             | reduce-scatter, all-gather of the parameter |
//! | 2 `Two`   | whole      | 1/N       | 1/N             | M reduce-scatters, all-gather               |
//! | 3 `Three` | 1/N        | 1/N       | 1/N             | M reduce-scatters, 2 M all-gathers          |
//!
//! N is dp x cp for dense parameters and edp for those of experts, M the microbatches of a step.
//! Stages 0 and 1 have the same bits, the norm included ([`exact`]), and so have 2 and 3; with one microbatch
//! all four have. Under *hybrid sharding* ([`LayoutSpec::shard_within`]) N neighbours shard among
//! themselves, parameters are gathered among them alone, and once a step the chunks of gradients
//! are summed over the groups that hold copies.
//!
//! What is whole only for a while is bounded: [`live`] keeps the books, for the performers here and
//! for planners. A part of one rank is never gathered, and its gradient is added to where it is
//! kept. A table tied over stages is summed over its stages before any sum over replicas, so that
//! its gradient stays whole until the step ends, under every stage.
//!
//! # A flat layout
//!
//! Two pipeline stages, dp 2, tp 2 with sequence parallelism; stage 0 holds the embedding, tied to
//! the head of stage 1, and one block. Rank 1 prints it as
//!
//! ```text
//! rank 1, stage 0 of 2: 48 elements
//! bucket 0: layers 1..2
//!   part 0: 27 elements, summed over dp 2, mine 0..14
//!          0 +9      0.q [6, 3] in part
//!          9 +6      0.k [4, 3] in part
//!         15 +9      0.o [3, 6] in part
//!         24 +3      0.bias [3], no decay
//!   part 1: 3 elements, summed over tp 2, then dp 2, mine 0..2
//!          0 +3      0.norm [3], no decay
//!   part 2: 12 elements, summed over edp 2, mine 0..6
//!          0 +12     0.experts [4, 3, 2] in part
//! bucket 1: layers 0..1
//! tied bucket
//!   part 3: 6 elements, summed over stages [0, 1], then dp 2, mine 0..3
//!          0 +6      embed [5, 3] in part
//! ```
//!
//! Over which ranks a gradient is summed, where it counts in the norm, and which rank writes it
//! into a checkpoint all follow from [`ParamSpec`](quintet_collectives::ParamSpec): there is no
//! list to forget a parameter in.
//!
//! # A step
//!
//! ```text
//! sync.zero()?;
//! for each microbatch: for each bucket, segment of layout.segments(): for each layer, reversed:
//!     layer.backward(.., params.views(layer)?, .., sync.views_mut(layer)?)
//!     after the last microbatch of the segment (stages 2, 3: after each): sync.reduce(&groups, bucket)?
//! sync.finish(&groups)?;
//! let norm = grad_norm(&device, &[&sync], &groups)?;
//! optimizer.step(&mut params, &sync, &groups, lr, clip_factor(norm, 1.0))?;
//! ```
//!
//! [`ShardedOptimizer::start_step`] leaves the all-gathers of stages 1 and 2 under way, to be ended
//! bucket by bucket before the next forward. Under stage 3 a segment's parameters are gathered
//! before they are viewed, best one segment ahead, in forward and in backward:
//!
//! ```text
//! gathering.ahead(&mut params, &groups, first)?;
//! for each bucket: gathering.end_bucket(&mut params, bucket)?;
//!                  gathering.ahead(&mut params, &groups, next)?;    // on the wire beside its layers
//!                  .. params.views(layer)? ..
//!                  params.release(bucket)?;
//! ```
//!
//! `examples/01_zero1.rs` and `examples/02_zero3.rs` are whole programs.
#![no_std]
#![forbid(unsafe_code)]

extern crate alloc;
#[cfg(feature = "std")]
extern crate std;

mod bytes;
#[cfg(feature = "checkpoint")]
pub mod checkpoint;
pub mod clip;
pub mod error;
pub mod exact;
pub mod full;
pub mod gather;
pub mod groups;
pub mod held;
pub mod layout;
pub mod live;
pub mod optimizer;
pub mod partition;
pub mod store;
pub mod sync;
mod views;

pub use clip::{clip_factor, grad_norm};
pub use error::Error;
pub use full::{Full, gather_grads, gather_master, gather_params, gather_state};
pub use gather::Gathering;
pub use groups::{GroupSet, Groups, tie_ranks};
pub use held::Held;
pub use layout::{Bucket, Entry, FlatLayout, LayoutSpec, Part, Piece, Tied};
pub use live::{WholeGrads, WholeParams};
pub use optimizer::{Rule, ShardedOptimizer};
pub use partition::{Keep, Kept, Partition, ZeroStage};
pub use store::ParamStore;
pub use sync::GradSync;
