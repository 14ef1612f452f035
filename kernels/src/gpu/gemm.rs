//! The product on the ordinary cores: cuda/gemm_simt.cu.

use alloc::format;

use super::{Gpu, GpuMut, GpuRef, THREADS, len, ptr_or_null, suffix};
use crate::launch::{Arg, Launch};
use crate::{Epilogue, Error, Float, Gemm, GemmSpec, Trans};

/// Rows and columns of a block's tile.
const TILE: u64 = 64;

impl<L: Launch> Gemm for Gpu<L> {
    fn gemm<I: Float, O: Float<Acc = I::Acc>>(
        &self,
        spec: &GemmSpec,
        a: GpuRef<'_, I>,
        b: GpuRef<'_, I>,
        bias: Option<GpuRef<'_, I>>,
        residual: Option<GpuRef<'_, O>>,
        c: GpuMut<'_, O>,
    ) -> Result<(), Error> {
        let op = "gemm";
        let lens = (bias.map(|b| b.len), residual.map(|r| r.len));
        spec.check(a.len, b.len, lens.0, lens.1, c.len)?;
        let form = match (spec.a, spec.b) {
            (Trans::N, Trans::N) => "nn",
            (Trans::N, Trans::T) => "nt",
            (Trans::T, Trans::N) => "tn",
            (Trans::T, Trans::T) => "tt",
        };
        let function = format!("gemm_{form}_{}_{}", suffix::<I>(op)?, suffix::<O>(op)?);
        let args = [
            Arg::Ptr(a.ptr),
            Arg::Ptr(b.ptr),
            // An empty argument and none are the same.
            ptr_or_null(bias.filter(|b| b.len > 0).as_ref()),
            ptr_or_null(residual.filter(|r| r.len > 0).as_ref()),
            Arg::Ptr(c.ptr),
            len(spec.m),
            len(spec.n),
            len(spec.k),
            Arg::I32(spec.accumulate.into()),
            Arg::I32((spec.epilogue == Epilogue::BiasGelu).into()),
        ];
        let tiles = |n: usize| (n as u64).div_ceil(TILE);
        let grid = tiles(spec.m) * tiles(spec.n);
        self.launch(("gemm_simt", &function), grid, [THREADS, 1, 1], &args)
    }
}
