//! The reference trainer: every layout computes what one device computes, and proves it.
pub mod compare;
pub mod data;
pub mod model_config;
pub mod oracle;
