//! The reference trainer: every layout computes what one device computes, and proves it.
#![forbid(unsafe_code)]

pub mod bench;
pub mod checkpoint;
pub mod choice;
pub mod cli;
pub mod compare;
pub mod convert;
pub mod crew;
pub mod data;
pub mod devices;
pub mod eval;
pub mod failure;
pub mod flight;
pub mod forecast;
#[cfg(feature = "cuda")]
mod gpus;
pub mod groups;
pub mod job;
pub mod launch;
pub mod lending;
pub mod load;
pub mod lock;
pub mod microbatch;
pub mod model;
pub mod model_config;
pub mod oracle;
pub mod plan;
pub mod precompile;
pub mod proof;
pub mod rank;
pub mod reach;
pub mod record;
pub mod report;
pub mod room;
pub mod schedule_lr;
pub mod seat;
#[cfg(any(feature = "cuda", feature = "emulated"))]
mod shared_device;
pub mod spans;
pub mod step;
pub mod tolerance;
pub mod train;
pub mod verify;
pub mod weights;
