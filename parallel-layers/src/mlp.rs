//! The MLPs of a block: each is one tensor parallel region.
//!
//! ```text
//! SwiGLU (Shazeer 2020)
//!                            +- gate -> Shard(f) -+
//! x outside --enter--> Replicate                  silu(g) * u --down--> Partial --leave--> y outside
//!                            +-- up --> Shard(f) -+
//!
//! GELU (GPT-2)
//! x outside --enter--> Replicate --up + b--> Shard(f) -- gelu --down--> Partial --leave--> + b, y outside
//!
//! outside: Invariant, or Shard(t) under sequence parallelism
//! ```
//!
//! The width f need not be a multiple of tp; a rank may hold none of it.

mod gelu;
mod swiglu;

pub use gelu::{GeluForward, GeluMlp, GeluWeight};
pub(crate) use swiglu::gated;
pub use swiglu::{SwiGluForward, SwiGluMlp, SwiGluWeight};

const NAME: &str = "mlp";
