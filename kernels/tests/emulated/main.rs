//! The emulator is tested by planted faults: each must be found under every seed, and each kernel
//! without its fault must be silent and right under every seed.
//!
//! `QUINTET_EMULATED_SEEDS=50` runs that many seeds instead of 3.
#![cfg(feature = "emulated")]
// The laws that only f64 on a CPU keeps are not stamped here.
#![allow(unsafe_code, dead_code)]

#[path = "../matrix_laws/attention.rs"]
mod attention;
#[path = "../matrix_laws/backend.rs"]
mod backend;
#[path = "../laws/common.rs"]
mod common;
#[path = "../laws/cross_entropy.rs"]
mod cross_entropy;
#[path = "../laws/embedding.rs"]
mod embedding;
mod flash;
#[path = "../laws/folds.rs"]
mod folds;
#[path = "../matrix_laws/gemm.rs"]
mod gemm;
mod golden;
#[path = "../laws/instructions.rs"]
mod instruction_laws;
mod instructions;
mod laws;
#[path = "../laws/linear_loss.rs"]
mod linear_loss;
#[path = "../laws/moe.rs"]
mod moe;
#[path = "../laws/norm.rs"]
mod norm;
#[cfg(feature = "wire")]
#[path = "../laws/one_device.rs"]
mod one_device;
#[path = "../laws/optimizer.rs"]
mod optimizer;
mod own_kernels;
#[path = "../matrix_laws/pieces.rs"]
mod pieces;
mod planted;
#[path = "../laws/pointwise.rs"]
mod pointwise;
mod products;
#[path = "../laws/rope.rs"]
mod rope;
#[cfg(feature = "wire")]
#[path = "../laws/speak.rs"]
mod speak;
mod streams;
#[path = "../matrix_laws/support.rs"]
mod support;
mod traffic;

use quintet_kernels::emulated::{Emulated, HostModule};
use quintet_kernels::launch::Arch;

unsafe extern "C" {
    static quintet_emu_planted: HostModule;
    static quintet_emu_planted_count: u32;
}

/// A device that knows the kernels in `kernels/`.
fn device(seed: u64) -> Emulated {
    // SAFETY: the build script writes that many modules in a row.
    let modules = unsafe {
        std::slice::from_raw_parts(
            &raw const quintet_emu_planted,
            quintet_emu_planted_count as usize,
        )
    };
    Emulated::with_modules(Arch(80), seed, modules)
}

fn seeds() -> std::ops::Range<u64> {
    let asked = std::env::var("QUINTET_EMULATED_SEEDS").ok();
    0..asked.and_then(|s| s.parse().ok()).unwrap_or(3)
}
