//! Draws of whole jobs, and what every file of this suite does with them.
//!
//! ```text
//! genes   small independent integers; all zero is the simplest job, so shrinking ends there
//!   |     make: each constraint of `validate` holds by construction, nothing is rejected
//!   v
//! draw    a job with its text                  deal     draws by number; the smallest that fails
//!   |                                          replay   how to run one again from a shell
//!   v
//! suite   what must hold of it                 coverage what a run of draws has met
//! ```
// Every test file is a crate of its own and uses a part of this one.
#![allow(dead_code, unused_imports)]

pub mod coverage;
pub mod deal;
pub mod draw;
pub mod genes;
pub mod jobs;
mod make;
pub mod plant;
mod replay;
pub mod suite;
pub mod watched;

pub use deal::Deal;
pub use draw::{Draw, blank_lines, text};
pub use genes::draws;
pub use jobs::{cut, first_difference, samples_of, small_job, with};
