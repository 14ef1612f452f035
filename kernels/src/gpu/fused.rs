//! A linear layer of bf16 and its activation in one pass: the epilogues of cuda/gemm_mma.cu.
//!
//! ```text
//! forward    kept = x w^T [+ bias], y = act(kept)          x: m x k, w: n x k
//! backward   dkept = (dy w) act'(kept)                     dy: m x k, w: k x n, of the layer above
//! ```
//!
//! GELU keeps m x n. SwiGLU keeps gates in columns 2i and what they let through in 2i + 1, so that
//! the rows of its weight lie by turns; its y has n / 2 columns.

use alloc::format;

use half::bf16;

use super::gemm::{Tile, chunks, fours};
use super::{Gpu, GpuMut, GpuRef, len, pointers};
use crate::Error;
use crate::error::need;
use crate::launch::{Arg, Launch};

/// An activation that a product may be fused with.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Activation {
    /// GELU, tanh form.
    Gelu,
    /// SwiGLU, gates in even columns.
    Swiglu,
}

/// Rows, columns and depth of a fused product.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FusedSpec {
    /// Rows.
    pub m: usize,
    /// Columns of the product.
    pub n: usize,
    /// Length of each sum.
    pub k: usize,
    /// What is done with it.
    pub activation: Activation,
}

impl<L: Launch> Gpu<L> {
    /// `kept = x w^T [+ bias], y = act(kept)`; SwiGLU takes no bias and an even n.
    ///
    /// # Errors
    /// [`Error::Len`] or [`Error::Spec`] where arguments do not fit.
    pub fn gemm_activation(
        &self,
        spec: &FusedSpec,
        x: GpuRef<'_, L, bf16>,
        w: GpuRef<'_, L, bf16>,
        bias: Option<GpuRef<'_, L, bf16>>,
        kept: GpuMut<'_, L, bf16>,
        y: GpuMut<'_, L, bf16>,
    ) -> Result<(), Error> {
        let (op, n) = ("gemm_activation", spec.n);
        let (name, narrower) = match spec.activation {
            Activation::Gelu => ("gelu", 1),
            Activation::Swiglu => ("swiglu", 2),
        };
        if !n.is_multiple_of(narrower) || (narrower == 2 && bias.is_some()) {
            let why = "swiglu takes an even number of columns and no bias";
            return Err(Error::Spec { op, why });
        }
        need(op, "bias", n, bias.map_or(n, |b| b.len))?;
        need(op, "kept", spec.m * n, kept.len)?;
        need(op, "y", spec.m * n / narrower, y.len)?;
        let ptrs = [x.ptr, w.ptr, bias.map_or(0, |b| b.ptr), kept.ptr, y.ptr];
        self.fused(op, (spec, name), [x.len, w.len], ptrs, [spec.k, spec.k])
    }

    /// `dkept = (dy w) act'(kept)`. Of SwiGLU kept and dkept have 2n columns.
    ///
    /// # Errors
    /// [`Error::Len`] where arguments do not fit.
    pub fn gemm_activation_backward(
        &self,
        spec: &FusedSpec,
        dy: GpuRef<'_, L, bf16>,
        w: GpuRef<'_, L, bf16>,
        kept: GpuRef<'_, L, bf16>,
        dkept: GpuMut<'_, L, bf16>,
    ) -> Result<(), Error> {
        let op = "gemm_activation_backward";
        let (name, wider) = match spec.activation {
            Activation::Gelu => ("gelu_backward", 1),
            Activation::Swiglu => ("swiglu_backward", 2),
        };
        need(op, "kept", spec.m * spec.n * wider, kept.len)?;
        need(op, "dkept", spec.m * spec.n * wider, dkept.len)?;
        let ptrs = [dy.ptr, w.ptr, 0, kept.ptr, dkept.ptr];
        self.fused(op, (spec, name), [dy.len, w.len], ptrs, [spec.k, spec.n])
    }

    /// `rows` are the elements of a row of each operand.
    fn fused(
        &self,
        op: &'static str,
        (spec, name): (&FusedSpec, &str),
        lens: [usize; 2],
        ptrs: [u64; 5],
        rows: [usize; 2],
    ) -> Result<(), Error> {
        need(op, "the left operand", spec.m * spec.k, lens[0])?;
        need(op, "the weight", spec.k * spec.n, lens[1])?;
        let wide = chunks(rows, [ptrs[0], ptrs[1]]);
        let sms = self.launcher().multiprocessors();
        let tile = Tile::of(wide, 128, sms, |t| t.count(spec.m, spec.n));
        let mut args = pointers(&ptrs);
        args.extend([spec.m, spec.n, spec.k].map(len));
        args.push(fours(spec.n, &ptrs[2..]));
        let function = format!("fused_{name}_{}", tile.name());
        let blocks = tile.count(spec.m, spec.n);
        let kernel: (&str, &str) = ("gemm_mma", &function);
        self.launch_with(kernel, blocks, tile.block(), &args as &[Arg])
    }
}
