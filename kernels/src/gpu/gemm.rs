//! The product: cuda/gemm_mma.cu for bf16, cuda/gemm_tf32.cu for f32 where tf32 is asked for, else
//! cuda/gemm_simt.cu. Which kernel,
//! [`Gpu::explain_gemm`] says.

use alloc::format;
use alloc::string::String;
use alloc::vec::Vec;
use core::any::TypeId;

use half::bf16;

use super::{Gpu, GpuMut, GpuRef, THREADS, len, pointers, ptr_or_null, suffix};
use crate::launch::{Arg, Launch};
use crate::moe::{check_grouped, check_grouped_weight};
use crate::{Epilogue, Error, Float, Gemm, GemmSpec, GroupedGemm, GroupedSpec, Trans};

/// Rows and columns of a block's tile on the ordinary cores.
const SIMT: u64 = 64;
/// Threads of a block in tf32, whose tile is as large.
const TF32_THREADS: u32 = 128;

/// How a product in bf16 is cut.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Tile {
    rows: u64,
    columns: u64,
    threads: u32,
    /// Slices in shared memory, each 32 deep.
    stages: u32,
    /// Rows of the operands are whole chunks of 16 bytes.
    wide: bool,
}

impl Tile {
    const SMALL: Self = Self::new(64, 64, 128, 3);
    const ALL: [Self; 3] = [
        Self::new(128, 256, 256, 4),
        Self::new(128, 128, 256, 4),
        Self::SMALL,
    ];

    const fn new(rows: u64, columns: u64, threads: u32, stages: u32) -> Self {
        Self {
            rows,
            columns,
            threads,
            stages,
            wide: true,
        }
    }

    pub(super) fn count(&self, m: usize, n: usize) -> u64 {
        (m as u64).div_ceil(self.rows) * (n as u64).div_ceil(self.columns)
    }

    /// The largest of which each multiprocessor gets one. Every tile gives the same bits.
    pub(super) fn of(
        wide: bool,
        most: u64,
        multiprocessors: u32,
        count: impl Fn(&Self) -> u64,
    ) -> Self {
        let fits = |t: &&Self| t.columns <= most && count(t) >= u64::from(multiprocessors);
        let found = Self::ALL.iter().filter(|_| wide).find(fits);
        Self {
            wide,
            ..found.copied().unwrap_or(Self::SMALL)
        }
    }

    pub(super) fn name(&self) -> String {
        let narrow = if self.wide { "" } else { "_narrow" };
        format!("{}x{}{narrow}", self.rows, self.columns)
    }

    pub(super) fn block(&self) -> ([u32; 3], u32) {
        let slices = self.stages * (self.rows + self.columns) as u32 * 32 * 2;
        ([self.threads, 1, 1], slices)
    }
}

fn form(a: Trans, b: Trans) -> &'static str {
    match (a, b) {
        (Trans::N, Trans::N) => "nn",
        (Trans::N, Trans::T) => "nt",
        (Trans::T, Trans::N) => "tn",
        (Trans::T, Trans::T) => "tt",
    }
}

/// Whether the tensor cores do it in tf32: asked for, and of f32 alone.
fn in_tf32<I: Float, O: Float>(spec: &GemmSpec) -> bool {
    let f32s = [TypeId::of::<I>(), TypeId::of::<O>()];
    spec.tf32 && f32s == [TypeId::of::<f32>(); 2]
}

fn is_bf16<T: Float>() -> bool {
    TypeId::of::<T>() == TypeId::of::<bf16>()
}

/// Whether rows of so many bf16 are whole chunks, and begin at them.
pub(super) fn chunks(rows: [usize; 2], ptrs: [u64; 2]) -> bool {
    rows.iter().all(|r| r.is_multiple_of(8)) && ptrs.iter().all(|p| p.is_multiple_of(16))
}

/// Whether 4 neighbours of a row of `n` may be moved at once.
pub(super) fn fours(n: usize, ptrs: &[u64]) -> Arg {
    Arg::I32((n.is_multiple_of(4) && ptrs.iter().all(|p| p.is_multiple_of(16))).into())
}

impl<L: Launch> Gpu<L> {
    fn tile(&self, spec: &GemmSpec, ptrs: [u64; 2]) -> Tile {
        let row = |trans, n, t| if trans == Trans::N { n } else { t };
        let rows = [row(spec.a, spec.k, spec.m), row(spec.b, spec.n, spec.k)];
        let count = |tile: &Tile| tile.count(spec.m, spec.n);
        let sms = self.launcher().multiprocessors();
        Tile::of(chunks(rows, ptrs), 256, sms, count)
    }

    /// The kernel that [`Gemm::gemm`] runs for arrays at multiples of 16 bytes.
    ///
    /// # Errors
    /// [`Error::Spec`] where there is none.
    pub fn explain_gemm<I: Float, O: Float>(&self, spec: &GemmSpec) -> Result<String, Error> {
        let (module, function, ..) = self.gemm_kernel::<I, O>(spec, [0; 2])?;
        Ok(format!("{module}: {function}"))
    }

    /// Module, function, blocks, threads and shared bytes.
    #[allow(clippy::type_complexity)]
    fn gemm_kernel<I: Float, O: Float>(
        &self,
        spec: &GemmSpec,
        ptrs: [u64; 2],
    ) -> Result<(&'static str, String, u64, ([u32; 3], u32)), Error> {
        let op = "gemm";
        let form = form(spec.a, spec.b);
        let function = format!("gemm_{form}_{}_{}", suffix::<I>(op)?, suffix::<O>(op)?);
        if is_bf16::<I>() {
            let tile = self.tile(spec, ptrs);
            let (function, blocks) = (
                format!("{function}_{}", tile.name()),
                tile.count(spec.m, spec.n),
            );
            return Ok(("gemm_mma", function, blocks, tile.block()));
        }
        let tiles = |n: usize| (n as u64).div_ceil(SIMT);
        let grid = tiles(spec.m) * tiles(spec.n);
        if in_tf32::<I, O>(spec) {
            let function = format!("gemm_tf32_{form}");
            return Ok(("gemm_tf32", function, grid, ([TF32_THREADS, 1, 1], 0)));
        }
        Ok(("gemm_simt", function, grid, ([THREADS, 1, 1], 0)))
    }
}

impl<L: Launch> Gemm for Gpu<L> {
    fn gemm<I: Float, O: Float<Acc = I::Acc>>(
        &self,
        spec: &GemmSpec,
        a: GpuRef<'_, L, I>,
        b: GpuRef<'_, L, I>,
        bias: Option<GpuRef<'_, L, I>>,
        residual: Option<GpuRef<'_, L, O>>,
        c: GpuMut<'_, L, O>,
    ) -> Result<(), Error> {
        let lens = (bias.map(|b| b.len), residual.map(|r| r.len));
        spec.check(a.len, b.len, lens.0, lens.1, c.len)?;
        // An empty argument and none are the same.
        let bias = bias.filter(|b| b.len > 0);
        let residual = residual.filter(|r| r.len > 0);
        let mut args = alloc::vec![
            Arg::Ptr(a.ptr),
            Arg::Ptr(b.ptr),
            ptr_or_null(bias.as_ref()),
            ptr_or_null(residual.as_ref()),
            Arg::Ptr(c.ptr),
            len(spec.m),
            len(spec.n),
            len(spec.k),
            Arg::I32(spec.accumulate.into()),
            Arg::I32((spec.epilogue == Epilogue::BiasGelu).into()),
        ];
        let (module, function, grid, block) = self.gemm_kernel::<I, O>(spec, [a.ptr, b.ptr])?;
        if is_bf16::<I>() {
            let beside = [bias.map_or(0, |b| b.ptr), residual.map_or(0, |r| r.ptr)];
            args.push(fours(spec.n, &[beside[0], beside[1], c.ptr]));
        }
        if in_tf32::<I, O>(spec) {
            let row = |trans, n, t| if trans == Trans::N { n } else { t };
            args.push(fours(row(spec.a, spec.k, spec.m), &[a.ptr]));
            args.push(fours(row(spec.b, spec.n, spec.k), &[b.ptr]));
        }
        self.launch_with((module, &function), grid, block, &args)
    }
}

impl<L: Launch> Gpu<L> {
    /// Runs `body` with the device address of where each group begins and all end.
    fn with_starts(
        &self,
        counts: &[usize],
        body: impl FnOnce(u64) -> Result<(), Error>,
    ) -> Result<(), Error> {
        let mut starts: Vec<i64> = alloc::vec![0];
        for &count in counts {
            starts.push(starts[starts.len() - 1] + count as i64);
        }
        let (launcher, compute) = (self.launcher(), self.0.compute());
        let bytes: &[u8] = bytemuck::cast_slice(&starts);
        let ptr = launcher.alloc("groups", bytes.len())?;
        let done = launcher
            .upload(compute, bytes, ptr)
            .and_then(|()| body(ptr));
        launcher.free(compute, ptr);
        done
    }
}

impl<L: Launch> GroupedGemm for Gpu<L> {
    fn grouped_gemm<E: Float>(
        &self,
        spec: &GroupedSpec<'_>,
        (b_form, accumulate): (Trans, bool),
        a: GpuRef<'_, L, E>,
        b: GpuRef<'_, L, E>,
        c: GpuMut<'_, L, E>,
    ) -> Result<(), Error> {
        check_grouped(spec, a.len, b.len, c.len)?;
        let (n, k) = (spec.n, spec.k);
        let form = form(Trans::N, b_form);
        let count = |rows: u64, columns: u64| -> u64 {
            let down = |&m: &usize| (m as u64).div_ceil(rows);
            spec.counts.iter().map(down).sum::<u64>() * (n as u64).div_ceil(columns)
        };
        let mut args = pointers(&[a.ptr, b.ptr, c.ptr]);
        let rest = [len(n), len(k), Arg::I32(accumulate.into())];
        let b_row = if b_form == Trans::N { n } else { k };
        self.with_starts(spec.counts, |starts| {
            args.push(Arg::Ptr(starts));
            args.extend(rest);
            if !is_bf16::<E>() {
                let function = format!("grouped_{form}_{}", suffix::<E>("grouped_gemm")?);
                let (blocks, block) = (count(SIMT, SIMT), [THREADS, 1, 1]);
                return self.launch(("gemm_simt", &function), blocks, block, &args);
            }
            args.push(fours(n, &[c.ptr]));
            let sms = self.launcher().multiprocessors();
            let wide = chunks([k, b_row], [a.ptr, b.ptr]);
            let tile = Tile::of(wide, 128, sms, |t| count(t.rows, t.columns));
            let function = format!("grouped_{form}_bf16_{}", tile.name());
            let blocks = count(tile.rows, tile.columns);
            self.launch_with(("gemm_mma", &function), blocks, tile.block(), &args)
        })
    }

    fn grouped_gemm_weight<E: Float>(
        &self,
        spec: &GroupedSpec<'_>,
        dy: GpuRef<'_, L, E>,
        x: GpuRef<'_, L, E>,
        dw: GpuMut<'_, L, E::Acc>,
    ) -> Result<(), Error> {
        check_grouped_weight(spec, dy.len, x.len, dw.len)?;
        let (m, n, groups) = (spec.n, spec.k, spec.counts.len() as u64);
        let mut args = pointers(&[dy.ptr, x.ptr, dw.ptr]);
        self.with_starts(spec.counts, |starts| {
            args.push(Arg::Ptr(starts));
            args.extend([len(m), len(n)]);
            if !is_bf16::<E>() {
                let function = format!("grouped_weight_{}", suffix::<E>("grouped_gemm")?);
                let tiles = (m as u64).div_ceil(SIMT) * (n as u64).div_ceil(SIMT);
                let block = [THREADS, 1, 1];
                return self.launch(("gemm_simt", &function), groups * tiles, block, &args);
            }
            args.push(fours(n, &[dw.ptr]));
            let sms = self.launcher().multiprocessors();
            let wide = chunks([m, n], [dy.ptr, x.ptr]);
            let tile = Tile::of(wide, 128, sms, |t| groups * t.count(m, n));
            let function = format!("grouped_weight_bf16_{}", tile.name());
            let blocks = groups * tile.count(m, n);
            self.launch_with(("gemm_mma", &function), blocks, tile.block(), &args)
        })
    }
}
