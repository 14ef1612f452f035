//! The norms: cuda/rms_norm.cu and cuda/layer_norm.cu.

use alloc::format;

use super::{Gpu, GpuMut, GpuRef, THREADS, acc, len, packed, pointers, ptr_or_null, suffix};
use crate::error::need;
use crate::launch::{Arg, Launch};
use crate::{Error, Float, Norm, NormSpec};

type Residual<'a, L, E> = Option<(GpuRef<'a, L, E>, GpuMut<'a, L, E>)>;

impl<L: Launch> Gpu<L> {
    /// A block a row.
    fn by_row<E: Float>(
        &self,
        (module, op): (&'static str, &'static str),
        spec: &NormSpec,
        ptrs: &[u64],
        args: &[Arg],
    ) -> Result<(), Error> {
        let (function, _) = packed::<E>(op, op, ptrs, spec.dim)?;
        let rows = spec.rows as u64;
        self.launch((module, &function), rows, [THREADS, 1, 1], args)
    }

    /// A block for 32 columns.
    fn by_column<E: Float>(
        &self,
        (module, op): (&'static str, &'static str),
        spec: &NormSpec,
        args: &[Arg],
    ) -> Result<(), Error> {
        let function = format!("{op}_{}", suffix::<E>(op)?);
        let blocks = if spec.rows == 0 {
            0
        } else {
            spec.dim.div_ceil(32)
        };
        self.launch((module, &function), blocks as u64, [32, 32, 1], args)
    }
}

/// The addresses of a residual and of the sum, null where there is none.
fn residual<L: Launch, E>(residual: &Residual<'_, L, E>) -> [u64; 2] {
    match residual {
        Some((r, h)) => [r.ptr, h.ptr],
        None => [0; 2],
    }
}

fn check(op: &'static str, lens: &[(&'static str, usize, usize)]) -> Result<(), Error> {
    let mut lens = lens.iter();
    lens.try_for_each(|&(what, expected, got)| need(op, what, expected, got))
}

impl<L: Launch> Norm for Gpu<L> {
    fn rms_norm<E: Float>(
        &self,
        spec: &NormSpec,
        x_td: GpuRef<'_, L, E>,
        residual_td: Residual<'_, L, E>,
        w_d: GpuRef<'_, L, E>,
        y_td: GpuMut<'_, L, E>,
        rstd_t: GpuMut<'_, L, E::Acc>,
    ) -> Result<(), Error> {
        let (op, n) = ("rms_norm", spec.len());
        check(
            op,
            &[
                ("x", n, x_td.len),
                ("r", n, residual_td.as_ref().map_or(n, |r| r.0.len)),
                ("h", n, residual_td.as_ref().map_or(n, |r| r.1.len)),
                ("w", spec.dim, w_d.len),
                ("y", n, y_td.len),
                ("rstd", spec.rows, rstd_t.len),
            ],
        )?;
        let [r, h] = residual(&residual_td);
        let ptrs = [x_td.ptr, r, h, w_d.ptr, y_td.ptr];
        let mut args = pointers(&ptrs);
        args.extend([Arg::Ptr(rstd_t.ptr), len(spec.dim), acc::<E>(spec.eps)]);
        self.by_row::<E>(("rms_norm", op), spec, &ptrs, &args)
    }

    fn rms_norm_backward_input<E: Float>(
        &self,
        spec: &NormSpec,
        h_td: GpuRef<'_, L, E>,
        w_d: GpuRef<'_, L, E>,
        rstd_t: GpuRef<'_, L, E::Acc>,
        dy_td: GpuRef<'_, L, E>,
        dresidual_td: Option<GpuRef<'_, L, E>>,
        dh_td: GpuMut<'_, L, E>,
    ) -> Result<(), Error> {
        let (op, n) = ("rms_norm_backward_input", spec.len());
        check(
            op,
            &[
                ("h", n, h_td.len),
                ("w", spec.dim, w_d.len),
                ("rstd", spec.rows, rstd_t.len),
                ("dy", n, dy_td.len),
                ("dresidual", n, dresidual_td.map_or(n, |d| d.len)),
                ("dh", n, dh_td.len),
            ],
        )?;
        let dres = dresidual_td.map_or(0, |d| d.ptr);
        let ptrs = [h_td.ptr, w_d.ptr, dy_td.ptr, dres, dh_td.ptr];
        let args = [
            Arg::Ptr(h_td.ptr),
            Arg::Ptr(w_d.ptr),
            Arg::Ptr(rstd_t.ptr),
            Arg::Ptr(dy_td.ptr),
            ptr_or_null(dresidual_td.as_ref()),
            Arg::Ptr(dh_td.ptr),
            len(spec.dim),
        ];
        self.by_row::<E>(("rms_norm", op), spec, &ptrs, &args)
    }

    fn rms_norm_backward_weight<E: Float>(
        &self,
        spec: &NormSpec,
        h_td: GpuRef<'_, L, E>,
        rstd_t: GpuRef<'_, L, E::Acc>,
        dy_td: GpuRef<'_, L, E>,
        dw_d: GpuMut<'_, L, E::Acc>,
    ) -> Result<(), Error> {
        let (op, n) = ("rms_norm_backward_weight", spec.len());
        check(
            op,
            &[
                ("h", n, h_td.len),
                ("rstd", spec.rows, rstd_t.len),
                ("dy", n, dy_td.len),
                ("dw", spec.dim, dw_d.len),
            ],
        )?;
        let mut args = pointers(&[h_td.ptr, rstd_t.ptr, dy_td.ptr, dw_d.ptr]);
        args.extend([len(spec.rows), len(spec.dim)]);
        self.by_column::<E>(("rms_norm", op), spec, &args)
    }

    fn layer_norm<E: Float>(
        &self,
        spec: &NormSpec,
        x_td: GpuRef<'_, L, E>,
        residual_td: Residual<'_, L, E>,
        (w_d, b_d): (GpuRef<'_, L, E>, GpuRef<'_, L, E>),
        y_td: GpuMut<'_, L, E>,
        (mean_t, rstd_t): (GpuMut<'_, L, E::Acc>, GpuMut<'_, L, E::Acc>),
    ) -> Result<(), Error> {
        let (op, n) = ("layer_norm", spec.len());
        check(
            op,
            &[
                ("x", n, x_td.len),
                ("r", n, residual_td.as_ref().map_or(n, |r| r.0.len)),
                ("h", n, residual_td.as_ref().map_or(n, |r| r.1.len)),
                ("w", spec.dim, w_d.len),
                ("b", spec.dim, b_d.len),
                ("y", n, y_td.len),
                ("mean", spec.rows, mean_t.len),
                ("rstd", spec.rows, rstd_t.len),
            ],
        )?;
        let [r, h] = residual(&residual_td);
        let ptrs = [x_td.ptr, r, h, w_d.ptr, b_d.ptr, y_td.ptr];
        let mut args = pointers(&ptrs);
        args.extend([Arg::Ptr(mean_t.ptr), Arg::Ptr(rstd_t.ptr)]);
        args.extend([len(spec.dim), acc::<E>(spec.eps)]);
        self.by_row::<E>(("layer_norm", op), spec, &ptrs, &args)
    }

    fn layer_norm_backward_input<E: Float>(
        &self,
        spec: &NormSpec,
        h_td: GpuRef<'_, L, E>,
        w_d: GpuRef<'_, L, E>,
        (mean_t, rstd_t): (GpuRef<'_, L, E::Acc>, GpuRef<'_, L, E::Acc>),
        dy_td: GpuRef<'_, L, E>,
        dresidual_td: Option<GpuRef<'_, L, E>>,
        dh_td: GpuMut<'_, L, E>,
    ) -> Result<(), Error> {
        let (op, n) = ("layer_norm_backward_input", spec.len());
        check(
            op,
            &[
                ("h", n, h_td.len),
                ("w", spec.dim, w_d.len),
                ("mean", spec.rows, mean_t.len),
                ("rstd", spec.rows, rstd_t.len),
                ("dy", n, dy_td.len),
                ("dresidual", n, dresidual_td.map_or(n, |d| d.len)),
                ("dh", n, dh_td.len),
            ],
        )?;
        let dres = dresidual_td.map_or(0, |d| d.ptr);
        let ptrs = [h_td.ptr, w_d.ptr, dy_td.ptr, dres, dh_td.ptr];
        let args = [
            Arg::Ptr(h_td.ptr),
            Arg::Ptr(w_d.ptr),
            Arg::Ptr(mean_t.ptr),
            Arg::Ptr(rstd_t.ptr),
            Arg::Ptr(dy_td.ptr),
            ptr_or_null(dresidual_td.as_ref()),
            Arg::Ptr(dh_td.ptr),
            len(spec.dim),
        ];
        self.by_row::<E>(("layer_norm", op), spec, &ptrs, &args)
    }

    fn layer_norm_backward_weight<E: Float>(
        &self,
        spec: &NormSpec,
        h_td: GpuRef<'_, L, E>,
        (mean_t, rstd_t): (GpuRef<'_, L, E::Acc>, GpuRef<'_, L, E::Acc>),
        dy_td: GpuRef<'_, L, E>,
        (dw_d, db_d): (GpuMut<'_, L, E::Acc>, GpuMut<'_, L, E::Acc>),
    ) -> Result<(), Error> {
        let (op, n) = ("layer_norm_backward_weight", spec.len());
        check(
            op,
            &[
                ("h", n, h_td.len),
                ("mean", spec.rows, mean_t.len),
                ("rstd", spec.rows, rstd_t.len),
                ("dy", n, dy_td.len),
                ("dw", spec.dim, dw_d.len),
                ("db", spec.dim, db_d.len),
            ],
        )?;
        let mut args = pointers(&[h_td.ptr, mean_t.ptr, rstd_t.ptr, dy_td.ptr]);
        args.extend([Arg::Ptr(dw_d.ptr), Arg::Ptr(db_d.ptr)]);
        args.extend([len(spec.rows), len(spec.dim)]);
        self.by_column::<E>(("layer_norm", op), spec, &args)
    }
}
