//! The launcher of CUDA, whole, over the driver shim: NVRTC compiles the kernels, the cache keeps
//! them, the shim reads their cubins and runs them on the host.
//!
//! NVRTC is that of `QUINTET_NVRTC`, else of target/nvrtc, which .ci/run makes.
#![allow(unsafe_code, dead_code)]

#[path = "../../../matrix_laws/attention.rs"]
mod attention;
#[path = "../../../matrix_laws/backend.rs"]
mod backend;
mod cases;
#[path = "../../../laws/common.rs"]
mod common;
#[path = "../../../laws/cross_entropy.rs"]
mod cross_entropy;
#[path = "../../../laws/embedding.rs"]
mod embedding;
#[path = "../../../laws/folds.rs"]
mod folds;
#[path = "../../../matrix_laws/gemm.rs"]
mod gemm;
#[path = "../../../laws/instructions.rs"]
mod instructions;
mod intrinsics;
mod laws;
#[path = "../../../laws/linear_loss.rs"]
mod linear_loss;
#[path = "../../../laws/moe.rs"]
mod moe;
#[path = "../../../laws/norm.rs"]
mod norm;
#[path = "../../../laws/one_device.rs"]
mod one_device;
#[path = "../../../laws/optimizer.rs"]
mod optimizer;
#[path = "../../../matrix_laws/pieces.rs"]
mod pieces;
#[path = "../../../laws/pointwise.rs"]
mod pointwise;
mod precompiled;
#[path = "../../../laws/rope.rs"]
mod rope;
#[path = "../../../laws/speak.rs"]
mod speak;
#[path = "../../../matrix_laws/support.rs"]
mod support;
#[path = "../common/mod.rs"]
mod whole;

use std::env;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use quintet_kernels::Gpu;
use quintet_kernels::cuda::{Cuda, CudaModule};

use whole::{driver, on_a_gpu};

fn nvrtc() -> PathBuf {
    if let Some(path) = env::var_os("QUINTET_NVRTC") {
        return path.into();
    }
    let target = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../target/nvrtc/lib");
    let entries = |dir: PathBuf| -> Vec<PathBuf> {
        let found = std::fs::read_dir(dir).into_iter().flatten().flatten();
        found.map(|e| e.path()).collect()
    };
    let pythons = entries(target);
    let sites = pythons.iter().map(|p| p.join("site-packages/nvidia"));
    let found = sites
        .flat_map(entries)
        .flat_map(|cuda| entries(cuda.join("lib")));
    let named = |p: &PathBuf| {
        p.file_name()
            .is_some_and(|n| n.to_string_lossy().starts_with("libnvrtc.so"))
    };
    found
        .into_iter()
        .find(named)
        .expect("no NVRTC: .ci/run makes target/nvrtc, or name a library in QUINTET_NVRTC")
}

/// A folder of this process, for one purpose.
fn folder(name: &str) -> PathBuf {
    let path = env::temp_dir().join(format!("quintet-{name}-{}", std::process::id()));
    let _ = std::fs::remove_dir_all(&path);
    std::fs::create_dir_all(&path).unwrap();
    path
}

/// The one device of this process: kernels are compiled once, and kept nowhere unless asked.
fn cuda() -> Cuda {
    static CUDA: OnceLock<Cuda> = OnceLock::new();
    const MODULES: &[CudaModule] = &[(
        "instructions",
        include_str!("../../../emulated/kernels/instructions.cu"),
    )];
    let first = || {
        if on_a_gpu() {
            return Cuda::with_modules(0, MODULES).unwrap();
        }
        // SAFETY: nothing else of this program reads the environment by C's functions.
        unsafe {
            env::set_var("QUINTET_CUDA_DRIVER", driver());
            env::set_var("QUINTET_NVRTC", nvrtc());
            if env::var_os("QUINTET_CUBIN_CACHE").is_none() {
                env::set_var("QUINTET_CUBIN_CACHE", "off");
            }
        }
        Cuda::with_modules(0, MODULES).unwrap()
    };
    CUDA.get_or_init(first).clone()
}

fn gpu() -> Gpu<Cuda> {
    Gpu::new(cuda()).unwrap()
}
