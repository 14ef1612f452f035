//! ZeRO sharding of gradients and optimizer state: flat layouts, partitions, overlapped buckets,
//! exact global-norm clipping.
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
pub mod full;
pub mod groups;
pub mod layout;
pub mod optimizer;
pub mod partition;
pub mod store;
pub mod sync;
mod views;

pub use clip::{clip_factor, grad_norm};
pub use error::Error;
pub use full::{Full, gather_grads, gather_params, gather_state};
pub use groups::{tie_ranks, GroupSet, Groups};
pub use layout::{Bucket, Entry, FlatLayout, LayoutSpec, Part, Piece, Tied};
pub use optimizer::{Rule, ShardedOptimizer};
pub use partition::{Keep, Kept, Partition, ZeroStage};
pub use store::ParamStore;
pub use sync::GradSync;
