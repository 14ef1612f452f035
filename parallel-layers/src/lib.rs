//! Tensor, sequence and pipeline parallel layers with hand-written backward passes, declared by
//! placements; pipeline schedules as data.
#![no_std]
#![forbid(unsafe_code)]

extern crate alloc;
#[cfg(feature = "std")]
extern crate std;

pub mod error;
pub mod layer;
pub mod philox;
pub mod pipeline;

pub use error::Error;
pub use layer::{Ctx, Layer, MicroBatch};
