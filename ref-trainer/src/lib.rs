//! The reference trainer: every layout computes what one device computes, and proves it.
pub mod compare;
pub mod failure;
pub mod job;
pub mod report;
pub mod schedule_lr;
