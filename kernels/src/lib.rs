//! Training kernels with their backward passes: gemm, flash attention, norms, RoPE, SwiGLU,
//! embedding, cross-entropy, experts and optimizer steps.
//!
//! Each op is one module: its spec, its trait, and the algebra in the module's head; below it
//! `naive` (an f64 twin to check in a minute) and `cpu` (free functions on slices). Under feature
//! `emulated` the module `gpu` has them as CUDA kernels, run and checked on the host; under `cuda` on
//! NVIDIA GPUs.
#![no_std]

extern crate alloc;
#[cfg(feature = "std")]
extern crate std;

pub mod activation;
pub mod attention;
pub mod backend;
pub mod cpu;
pub mod cross_entropy;
#[cfg(feature = "cuda")]
#[allow(unsafe_code)]
pub mod cuda;
pub mod dropout;
pub mod embedding;
#[cfg(feature = "emulated")]
#[allow(unsafe_code)]
pub mod emulated;
pub mod error;
pub mod float;
pub mod gemm;
#[cfg(feature = "gpu")]
pub mod gpu;
mod lanes;
#[cfg(feature = "gpu")]
pub mod launch;
mod math;
pub mod moe;
pub mod norm;
pub mod optimizer;
pub mod philox;
pub mod rope;
#[cfg(feature = "wire")]
pub mod wire;

pub use activation::Pointwise;
pub use attention::{Attention, AttentionSpec, Carry, HeadDropout, Places};
pub use backend::{Backend, Meter, Queue, Rows, Tag};
pub use cpu::{Cpu, CpuBuf, CpuEvent};
pub use cross_entropy::{CrossEntropy, CrossEntropySpec};
pub use dropout::{Dropout, DropoutSpec};
pub use embedding::{Embedding, EmbeddingSpec};
pub use error::Error;
pub use float::{Data, Float, Real};
pub use gemm::{Epilogue, Gemm, GemmSpec, Trans};
#[cfg(feature = "gpu")]
pub use gpu::Gpu;
pub use half::bf16;
pub use moe::{GroupedGemm, GroupedSpec, Permute, Router, RouterSpec, Score};
pub use norm::{Norm, NormSpec};
pub use optimizer::{AdamWSpec, Optimizer, SgdSpec};
pub use rope::{Rope, RopeSpec};
#[cfg(feature = "wire")]
pub use wire::{Collectives, Pending, Scalar, Wire};
