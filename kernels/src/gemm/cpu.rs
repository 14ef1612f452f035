//! The product on the CPU: B is packed, rows of C are shared among the threads.
//!
//! ```text
//!            n: panels of NR                  for each block of B (about a MiB)
//!          +----+----+----+                       pack it into panels           (parallel)
//!        k | B0 | B1 | B2 |                       for each part of rows         (parallel)
//!          +----+----+----+                           for each KC of k
//!   +---+  +----+----+----+                               for each panel        (stays in L1)
//!  m| A |  |tile|    |    | MR rows                           for each MR rows  one tile
//!   +---+  +----+----+----+
//! ```
//!
//! Each element is the sum over blocks of `KC` of k, in order; within a block it is one chain of
//! fused multiply-adds in order of k. Rows and columns may be cut anywhere without changing that.
//! Where the CPU has no AVX-512, `matrixmultiply` does the rows of a part (it too blocks k, and
//! nothing else decides the order).

use alloc::borrow::Cow;
use alloc::vec;
use alloc::vec::Vec;
use core::any::TypeId;
use core::ops::Range;

use super::simd::{self, KC, Operand, Tile};
use super::{Epilogue, Gemm, GemmSpec};
use crate::cpu::{Cpu, Scratch};
use crate::{Error, Float, Real};

/// Elements of a block of packed B: half of a usual L2 in f32.
const BLOCK: usize = 256 * 1024;
/// The most of k in one block.
const BLOCK_K: usize = 4 * KC;
/// The most rows in one part: its rows of A, KC deep, stay in L2.
const PART_ROWS: usize = 224;

impl Gemm for Cpu {
    fn gemm<I: Float, O: Float<Acc = I::Acc>>(
        &self,
        spec: &GemmSpec,
        a: &[I],
        b: &[I],
        bias: Option<&[I]>,
        residual: Option<&[O]>,
        c: &mut [O],
    ) -> Result<(), Error> {
        let lens = (bias.map(<[I]>::len), residual.map(<[O]>::len));
        spec.check(a.len(), b.len(), lens.0, lens.1, c.len())?;
        if c.is_empty() {
            return Ok(());
        }
        let (a, b) = (widen(a), widen(b));
        let finish = Finish {
            spec,
            bias,
            residual,
        };
        if let Some(c) = same_mut::<O, I::Acc>(c) {
            product(self, spec, &a, &b, c);
            if spec.epilogue != Epilogue::None {
                let parts = c.chunks_mut(spec.n);
                self.for_each(parts, |i, row| finish.row(i, row));
            }
            return Ok(());
        }
        let mut sums: Vec<_> = match spec.accumulate {
            true => c.iter().map(|x| x.to_acc()).collect(),
            false => vec![I::Acc::ZERO; c.len()],
        };
        product(self, spec, &a, &b, &mut sums);
        let rows = sums.chunks_mut(spec.n).zip(c.chunks_mut(spec.n));
        self.for_each(rows, |i, (sums, c)| {
            finish.row(i, sums);
            for (c, &sum) in c.iter_mut().zip(sums.iter()) {
                *c = O::from_acc(sum);
            }
        });
        Ok(())
    }
}

/// The epilogue, in Acc.
struct Finish<'a, I, O> {
    spec: &'a GemmSpec,
    bias: Option<&'a [I]>,
    residual: Option<&'a [O]>,
}

impl<I: Float, O: Float<Acc = I::Acc>> Finish<'_, I, O> {
    fn row(&self, i: usize, sums: &mut [I::Acc]) {
        let n = self.spec.n;
        if let Some(bias) = self.bias {
            for (sum, bias) in sums.iter_mut().zip(bias) {
                *sum += bias.to_acc();
            }
        }
        if self.spec.epilogue == Epilogue::BiasGelu {
            for sum in sums.iter_mut() {
                *sum = gelu(*sum);
            }
        }
        if let Some(residual) = self.residual {
            for (sum, residual) in sums.iter_mut().zip(&residual[i * n..]) {
                *sum += residual.to_acc();
            }
        }
    }
}

/// GELU, tanh form.
fn gelu<A: Real>(x: A) -> A {
    let (half, cubic) = (A::from_f64(0.5), A::from_f64(0.044_715));
    let inner = A::from_f64(libm::sqrt(core::f64::consts::FRAC_2_PI)) * (x + cubic * x * x * x);
    half * x * (A::ONE + inner.tanh())
}

/// `c = op(a) op(b) [+ c]`, all in one type.
fn product<A: Real>(cpu: &Cpu, spec: &GemmSpec, a: &[A], b: &[A], c: &mut [A]) {
    if spec.k == 0 {
        if !spec.accumulate {
            c.fill(A::ZERO);
        }
    } else if let (Some(a), Some(b), Some(c)) = (same(a), same(b), same_mut(c)) {
        typed::<f32>(cpu, spec, a, b, c);
    } else if let (Some(a), Some(b), Some(c)) = (same(a), same(b), same_mut(c)) {
        typed::<f64>(cpu, spec, a, b, c);
    } else {
        plain(spec, a, b, c);
    }
}

fn typed<T: Tile>(cpu: &Cpu, spec: &GemmSpec, a: &[T], b: &[T], c: &mut [T]) {
    let a = Operand::new(a, spec.a, spec.m, spec.k);
    let b = Operand::new(b, spec.b, spec.k, spec.n);
    let rows = part_rows(spec.m, cpu.threads(), T::MR);
    if !T::detected() {
        let parts = c.chunks_mut(rows * spec.n);
        return cpu.for_each(parts, |i, c| {
            simd::portable(
                &a.from(i * rows, 0),
                &b,
                (spec.k, spec.n),
                c,
                spec.accumulate,
            );
        });
    }
    let mut pack = Scratch::take();
    let depth = spec.k.min(BLOCK_K);
    let width = (BLOCK / depth).next_multiple_of(T::NR);
    for cols in chunks(spec.n, width) {
        for ks in chunks(spec.k, depth) {
            let panel = T::NR * ks.len();
            let packed = pack.of(cols.len().div_ceil(T::NR) * panel);
            cpu.for_each(packed.chunks_mut(panel), |i, panel| {
                let first = cols.start + i * T::NR;
                simd::pack(&b, ks.clone(), first..cols.end.min(first + T::NR), panel);
            });
            let packed = &*packed;
            let add = spec.accumulate || ks.start > 0;
            cpu.for_each(c.chunks_mut(rows * spec.n), |i, c| {
                let a = a.from(i * rows, 0);
                simd::rows(&a, packed, ks.clone(), cols.clone(), c, spec.n, add);
            });
        }
    }
}

/// For types of other crates.
fn plain<A: Real>(spec: &GemmSpec, a: &[A], b: &[A], c: &mut [A]) {
    let a = Operand::new(a, spec.a, spec.m, spec.k);
    let b = Operand::new(b, spec.b, spec.k, spec.n);
    for (i, row) in c.chunks_mut(spec.n).enumerate() {
        for (j, c) in row.iter_mut().enumerate() {
            let old = if spec.accumulate { *c } else { A::ZERO };
            *c = (0..spec.k).fold(old, |sum, p| sum + a.at(i, p) * b.at(p, j));
        }
    }
}

/// Rows of a part: the number of tiles at which the last thread ends first, when each takes
/// parts in turn. A part reads all of packed B, about an eighth of the work of one row of tiles.
fn part_rows(m: usize, threads: usize, mr: usize) -> usize {
    let cost = |tiles: usize| {
        let rows = tiles * mr;
        let (whole, rest) = (m / rows, m % rows);
        let last = if whole.is_multiple_of(threads) {
            rest
        } else {
            0
        };
        (whole.div_ceil(threads) * rows + last) * (8 * tiles + 1) / tiles
    };
    let tiles = (1..=PART_ROWS / mr).rev().min_by_key(|&tiles| cost(tiles));
    tiles.unwrap_or(1) * mr
}

/// `0..len` in pieces of `step`, the last one shorter.
fn chunks(len: usize, step: usize) -> impl Iterator<Item = Range<usize>> {
    (0..len)
        .step_by(step)
        .map(move |start| start..len.min(start + step))
}

/// The elements as Acc, copied only where they are stored narrower.
pub(crate) fn widen<T: Float>(x: &[T]) -> Cow<'_, [T::Acc]> {
    match same(x) {
        Some(x) => Cow::Borrowed(x),
        None => Cow::Owned(x.iter().map(|x| x.to_acc()).collect()),
    }
}

/// `x` as a slice of `U`, where `T` is `U`.
pub(crate) fn same<T: Float, U: Float>(x: &[T]) -> Option<&[U]> {
    (TypeId::of::<T>() == TypeId::of::<U>()).then(|| bytemuck::cast_slice(x))
}

/// `x` as a slice of `U`, where `T` is `U`.
pub(crate) fn same_mut<T: Float, U: Float>(x: &mut [T]) -> Option<&mut [U]> {
    (TypeId::of::<T>() == TypeId::of::<U>()).then(|| bytemuck::cast_slice_mut(x))
}
