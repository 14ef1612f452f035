//! The reference trainer: every layout computes what one device computes, and proves it.
pub mod cli;
pub mod compare;
pub mod data;
pub mod failure;
pub mod job;
pub mod model_config;
pub mod oracle;
pub mod report;
pub mod schedule_lr;
