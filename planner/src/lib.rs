//! What a parallel layout costs: bytes per group, memory and bubble, worked out from the same
//! plans the trainer performs.
#![no_std]
#![forbid(unsafe_code)]

extern crate alloc;
#[cfg(feature = "std")]
extern crate std;

pub mod advice;
pub mod closed;
pub mod cluster;
pub mod config;
pub mod error;
pub mod flops;
pub mod links;
pub mod literature;
pub mod memory;
pub mod model;
pub mod search;
pub mod shape;
pub mod states;
pub mod steps;
pub mod time;
pub mod traffic;

pub use config::{Batch, CpComm, Invalid, Layout, ModelConfig, validate};
pub use error::Error;

#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
