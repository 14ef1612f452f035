//! Tensor, sequence and pipeline parallel layers with hand-written backward passes, declared by
//! placements; pipeline schedules as data.
#![no_std]
#![forbid(unsafe_code)]

extern crate alloc;
#[cfg(feature = "std")]
extern crate std;

pub mod philox;
pub mod pipeline;
