//! Training kernels with their backward passes over plain slices or a device: gemm, flash attention, norms, RoPE, SwiGLU, cross-entropy, AdamW.
#![no_std]

extern crate alloc;
#[cfg(feature = "std")]
extern crate std;
