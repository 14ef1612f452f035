//! Benchmarks: every figure is a ratio taken in one run.
//!
//! ```text
//! batch 1   ours n times, theirs n times        a Sheet keeps seconds per call of both
//! batch 2   theirs n times, ours n times        and reports the median of the ratios
//! ..
//! ```
//!
//! Two figures that were taken an hour apart on a shared machine may differ by a third; two that
//! alternate within a second share whatever disturbs them. So criterion times the batches, and
//! beside each batch of ours runs one of what it is measured against.

pub mod bus;
pub mod peak;
pub mod peer;
pub mod profile;
pub mod sheet;
pub mod team;
pub mod timed;
pub mod train;

pub use sheet::{Sheet, Summary, median};
pub use team::{Orders, Team};
