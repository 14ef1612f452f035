//! The norms on slices: row by row forward, column by column for the weight's gradient.
//!
//! The functions do any block of whole rows (or of columns, for the weight's gradient), which is
//! how [`Cpu`] cuts a call. They never panic: of arguments that do not fit, the common part is
//! done.

use super::{Norm, NormSpec};
use crate::error::need;
use crate::lanes::{columns, columns_per_part, rows_per_part, sum};
use crate::{Cpu, Error, Float, Real};

/// RMSNorm of the rows of `x`; see [`Norm::rms_norm`].
#[inline(always)]
pub fn rms_norm<E: Float>(
    spec: &NormSpec,
    x_td: &[E],
    residual: Option<(&[E], &mut [E])>,
    w_d: &[E],
    y_td: &mut [E],
    rstd_t: &mut [E::Acc],
) {
    let dim = spec.dim.max(1);
    let (n, eps) = (E::Acc::from_f64(dim as f64), E::Acc::from_f64(spec.eps));
    let row = |h: &[E], y: &mut [E], rstd: &mut E::Acc| {
        let square = sum([h], |[h]| h * h);
        let r = E::Acc::ONE / (square / n + eps).sqrt();
        for ((y, h), w) in y.iter_mut().zip(h).zip(w_d) {
            *y = E::from_acc(h.to_acc() * r * w.to_acc());
        }
        *rstd = r;
    };
    let outs = y_td.chunks_exact_mut(dim).zip(rstd_t);
    each_row(dim, x_td, residual, outs, |h, (y, rstd)| row(h, y, rstd));
}

/// Gradient of RMSNorm's input; see [`Norm::rms_norm_backward_input`].
#[inline(always)]
pub fn rms_norm_backward_input<E: Float>(
    spec: &NormSpec,
    h_td: &[E],
    w_d: &[E],
    rstd_t: &[E::Acc],
    dy_td: &[E],
    dresidual_td: Option<&[E]>,
    dh_td: &mut [E],
) {
    let dim = spec.dim.max(1);
    let n = E::Acc::from_f64(dim as f64);
    let ins = h_td.chunks_exact(dim).zip(dy_td.chunks_exact(dim));
    let rows = ins.zip(rstd_t).zip(dh_td.chunks_exact_mut(dim));
    for (t, (((h, dy), &r), dh)) in rows.enumerate() {
        let gh = sum([dy, w_d, h], |[dy, w, h]| dy * w * h);
        let mean = gh / n * r * r;
        let dn = |h: E, w: E, dy: E| (dy.to_acc() * w.to_acc() - h.to_acc() * mean) * r;
        let ins = h.iter().zip(w_d).zip(dy);
        let dr = dresidual_td.map(|dr| columns(dr, t * dim, dim));
        put(dh, dr, ins.map(|((&h, &w), &dy)| dn(h, w, dy)));
    }
}

/// Adds columns `first ..` of the gradient of RMSNorm's weight to `dw`, in row order; see
/// [`Norm::rms_norm_backward_weight`].
#[inline(always)]
pub fn rms_norm_backward_weight<E: Float>(
    spec: &NormSpec,
    first: usize,
    h_td: &[E],
    rstd_t: &[E::Acc],
    dy_td: &[E],
    dw: &mut [E::Acc],
) {
    let dim = spec.dim.max(1);
    let ins = h_td.chunks_exact(dim).zip(dy_td.chunks_exact(dim));
    for ((h, dy), &r) in ins.zip(rstd_t) {
        let h = columns(h, first, dw.len());
        let dy = columns(dy, first, dw.len());
        for ((dw, h), dy) in dw.iter_mut().zip(h).zip(dy) {
            *dw += dy.to_acc() * (h.to_acc() * r);
        }
    }
}

/// LayerNorm of the rows of `x`; see [`Norm::layer_norm`].
#[inline(always)]
pub fn layer_norm<E: Float>(
    spec: &NormSpec,
    x_td: &[E],
    residual: Option<(&[E], &mut [E])>,
    (w_d, b_d): (&[E], &[E]),
    y_td: &mut [E],
    (mean_t, rstd_t): (&mut [E::Acc], &mut [E::Acc]),
) {
    let dim = spec.dim.max(1);
    let (n, eps) = (E::Acc::from_f64(dim as f64), E::Acc::from_f64(spec.eps));
    let row = |h: &[E], y: &mut [E], mean: &mut E::Acc, rstd: &mut E::Acc| {
        let m = sum([h], |[h]| h) / n;
        let square = sum([h], |[h]| (h - m) * (h - m));
        let r = E::Acc::ONE / (square / n + eps).sqrt();
        for (((y, h), w), b) in y.iter_mut().zip(h).zip(w_d).zip(b_d) {
            *y = E::from_acc((h.to_acc() - m) * r * w.to_acc() + b.to_acc());
        }
        (*mean, *rstd) = (m, r);
    };
    let stats = mean_t.iter_mut().zip(rstd_t);
    let outs = y_td.chunks_exact_mut(dim).zip(stats);
    each_row(dim, x_td, residual, outs, |h, (y, (mean, rstd))| {
        row(h, y, mean, rstd);
    });
}

/// Gradient of LayerNorm's input; see [`Norm::layer_norm_backward_input`].
#[inline(always)]
pub fn layer_norm_backward_input<E: Float>(
    spec: &NormSpec,
    h_td: &[E],
    w_d: &[E],
    (mean_t, rstd_t): (&[E::Acc], &[E::Acc]),
    dy_td: &[E],
    dresidual_td: Option<&[E]>,
    dh_td: &mut [E],
) {
    let dim = spec.dim.max(1);
    let n = E::Acc::from_f64(dim as f64);
    let ins = h_td.chunks_exact(dim).zip(dy_td.chunks_exact(dim));
    let stats = mean_t.iter().zip(rstd_t);
    let rows = ins.zip(stats).zip(dh_td.chunks_exact_mut(dim));
    for (t, (((h, dy), (&m, &r)), dh)) in rows.enumerate() {
        let mean_g = sum([dy, w_d], |[dy, w]| dy * w) / n;
        let mean_gn = sum([dy, w_d, h], |[dy, w, h]| dy * w * ((h - m) * r)) / n;
        let dn = |h: E, w: E, dy: E| {
            let normed = (h.to_acc() - m) * r;
            (dy.to_acc() * w.to_acc() - mean_g - normed * mean_gn) * r
        };
        let ins = h.iter().zip(w_d).zip(dy);
        let dr = dresidual_td.map(|dr| columns(dr, t * dim, dim));
        put(dh, dr, ins.map(|((&h, &w), &dy)| dn(h, w, dy)));
    }
}

/// Adds columns `first ..` of the gradients of LayerNorm's weight and bias, in row order; see
/// [`Norm::layer_norm_backward_weight`].
#[inline(always)]
pub fn layer_norm_backward_weight<E: Float>(
    spec: &NormSpec,
    first: usize,
    h_td: &[E],
    (mean_t, rstd_t): (&[E::Acc], &[E::Acc]),
    dy_td: &[E],
    (dw, db): (&mut [E::Acc], &mut [E::Acc]),
) {
    let dim = spec.dim.max(1);
    let ins = h_td.chunks_exact(dim).zip(dy_td.chunks_exact(dim));
    for ((h, dy), (&m, &r)) in ins.zip(mean_t.iter().zip(rstd_t)) {
        let h = columns(h, first, dw.len());
        let dy = columns(dy, first, dw.len());
        for (((dw, db), h), dy) in dw.iter_mut().zip(db.iter_mut()).zip(h).zip(dy) {
            *dw += dy.to_acc() * ((h.to_acc() - m) * r);
            *db += dy.to_acc();
        }
    }
}

/// Calls `norm` with each row to normalise: that of x, or of h <- x + r. The sum is normalised as
/// it is stored, since backward will find it so.
#[inline(always)]
fn each_row<E: Float, O>(
    dim: usize,
    x_td: &[E],
    residual: Option<(&[E], &mut [E])>,
    outs: impl Iterator<Item = O>,
    norm: impl Fn(&[E], O),
) {
    let x_rows = x_td.chunks_exact(dim);
    let Some((r_td, h_td)) = residual else {
        return x_rows.zip(outs).for_each(|(x, out)| norm(x, out));
    };
    let sums = r_td.chunks_exact(dim).zip(h_td.chunks_exact_mut(dim));
    for ((x, (r, h)), out) in x_rows.zip(sums).zip(outs) {
        for ((h, x), r) in h.iter_mut().zip(x).zip(r) {
            *h = E::from_acc(x.to_acc() + r.to_acc());
        }
        norm(h, out);
    }
}

/// `dh = dresidual + dn`, rounded once.
#[inline(always)]
fn put<E: Float>(dh: &mut [E], dresidual: Option<&[E]>, dn: impl Iterator<Item = E::Acc>) {
    let outs = dh.iter_mut().zip(dn);
    if let Some(dr) = dresidual {
        outs.zip(dr)
            .for_each(|((dh, dn), dr)| *dh = E::from_acc(dr.to_acc() + dn));
    } else {
        outs.for_each(|(dh, dn)| *dh = E::from_acc(dn));
    }
}

impl Norm for Cpu {
    fn rms_norm<E: Float>(
        &self,
        spec: &NormSpec,
        x_td: &[E],
        residual: Option<(&[E], &mut [E])>,
        w_d: &[E],
        y_td: &mut [E],
        rstd_t: &mut [E::Acc],
    ) -> Result<(), Error> {
        let op = "rms_norm";
        let fits = |what, got| need(op, what, spec.len(), got);
        fits("x", x_td.len())?;
        fits("y", y_td.len())?;
        need(op, "w", spec.dim, w_d.len())?;
        need(op, "rstd", spec.rows, rstd_t.len())?;
        let (rows, cut) = parts(spec);
        let outs = y_td.chunks_mut(cut).zip(rstd_t.chunks_mut(rows));
        let ins = x_td.chunks(cut);
        if let Some((r, h)) = residual {
            fits("residual", r.len())?;
            fits("h", h.len())?;
            let sums = r.chunks(cut).zip(h.chunks_mut(cut));
            self.for_each(
                ins.zip(sums).zip(outs),
                #[inline(always)]
                |_, ((x, sum), (y, rstd))| {
                    rms_norm(spec, x, Some(sum), w_d, y, rstd);
                },
            );
        } else {
            self.for_each(
                ins.zip(outs),
                #[inline(always)]
                |_, (x, (y, rstd))| {
                    rms_norm(spec, x, None, w_d, y, rstd);
                },
            );
        }
        Ok(())
    }

    fn rms_norm_backward_input<E: Float>(
        &self,
        spec: &NormSpec,
        h_td: &[E],
        w_d: &[E],
        rstd_t: &[E::Acc],
        dy_td: &[E],
        dresidual_td: Option<&[E]>,
        dh_td: &mut [E],
    ) -> Result<(), Error> {
        let op = "rms_norm_backward_input";
        let fits = |what, got| need(op, what, spec.len(), got);
        fits("h", h_td.len())?;
        fits("dy", dy_td.len())?;
        fits("dh", dh_td.len())?;
        dresidual_td.map_or(Ok(()), |dr| fits("dresidual", dr.len()))?;
        need(op, "w", spec.dim, w_d.len())?;
        need(op, "rstd", spec.rows, rstd_t.len())?;
        let (rows, cut) = parts(spec);
        let ins = h_td.chunks(cut).zip(dy_td.chunks(cut));
        let items = ins.zip(rstd_t.chunks(rows)).zip(dh_td.chunks_mut(cut));
        self.for_each(
            items,
            #[inline(always)]
            |i, (((h, dy), rstd), dh)| {
                let dr = dresidual_td.map(|dr| columns(dr, i * cut, cut));
                rms_norm_backward_input(spec, h, w_d, rstd, dy, dr, dh);
            },
        );
        Ok(())
    }

    fn rms_norm_backward_weight<E: Float>(
        &self,
        spec: &NormSpec,
        h_td: &[E],
        rstd_t: &[E::Acc],
        dy_td: &[E],
        dw_d: &mut [E::Acc],
    ) -> Result<(), Error> {
        let op = "rms_norm_backward_weight";
        need(op, "h", spec.len(), h_td.len())?;
        need(op, "dy", spec.len(), dy_td.len())?;
        need(op, "rstd", spec.rows, rstd_t.len())?;
        need(op, "dw", spec.dim, dw_d.len())?;
        let cut = columns_per_part(spec.rows);
        self.for_each(
            dw_d.chunks_mut(cut),
            #[inline(always)]
            |i, dw| {
                rms_norm_backward_weight(spec, i * cut, h_td, rstd_t, dy_td, dw);
            },
        );
        Ok(())
    }

    fn layer_norm<E: Float>(
        &self,
        spec: &NormSpec,
        x_td: &[E],
        residual: Option<(&[E], &mut [E])>,
        wb: (&[E], &[E]),
        y_td: &mut [E],
        (mean_t, rstd_t): (&mut [E::Acc], &mut [E::Acc]),
    ) -> Result<(), Error> {
        let op = "layer_norm";
        let fits = |what, got| need(op, what, spec.len(), got);
        fits("x", x_td.len())?;
        fits("y", y_td.len())?;
        need(op, "w", spec.dim, wb.0.len())?;
        need(op, "b", spec.dim, wb.1.len())?;
        need(op, "mean", spec.rows, mean_t.len())?;
        need(op, "rstd", spec.rows, rstd_t.len())?;
        let (rows, cut) = parts(spec);
        let stats = mean_t.chunks_mut(rows).zip(rstd_t.chunks_mut(rows));
        let outs = y_td.chunks_mut(cut).zip(stats);
        let ins = x_td.chunks(cut);
        if let Some((r, h)) = residual {
            fits("residual", r.len())?;
            fits("h", h.len())?;
            let sums = r.chunks(cut).zip(h.chunks_mut(cut));
            self.for_each(
                ins.zip(sums).zip(outs),
                #[inline(always)]
                |_, ((x, sum), (y, stats))| {
                    layer_norm(spec, x, Some(sum), wb, y, stats);
                },
            );
        } else {
            self.for_each(
                ins.zip(outs),
                #[inline(always)]
                |_, (x, (y, stats))| {
                    layer_norm(spec, x, None, wb, y, stats);
                },
            );
        }
        Ok(())
    }

    fn layer_norm_backward_input<E: Float>(
        &self,
        spec: &NormSpec,
        h_td: &[E],
        w_d: &[E],
        (mean_t, rstd_t): (&[E::Acc], &[E::Acc]),
        dy_td: &[E],
        dresidual_td: Option<&[E]>,
        dh_td: &mut [E],
    ) -> Result<(), Error> {
        let op = "layer_norm_backward_input";
        let fits = |what, got| need(op, what, spec.len(), got);
        fits("h", h_td.len())?;
        fits("dy", dy_td.len())?;
        fits("dh", dh_td.len())?;
        dresidual_td.map_or(Ok(()), |dr| fits("dresidual", dr.len()))?;
        need(op, "w", spec.dim, w_d.len())?;
        need(op, "mean", spec.rows, mean_t.len())?;
        need(op, "rstd", spec.rows, rstd_t.len())?;
        let (rows, cut) = parts(spec);
        let ins = h_td.chunks(cut).zip(dy_td.chunks(cut));
        let stats = mean_t.chunks(rows).zip(rstd_t.chunks(rows));
        let items = ins.zip(stats).zip(dh_td.chunks_mut(cut));
        self.for_each(
            items,
            #[inline(always)]
            |i, (((h, dy), stats), dh)| {
                let dr = dresidual_td.map(|dr| columns(dr, i * cut, cut));
                layer_norm_backward_input(spec, h, w_d, stats, dy, dr, dh);
            },
        );
        Ok(())
    }

    fn layer_norm_backward_weight<E: Float>(
        &self,
        spec: &NormSpec,
        h_td: &[E],
        stats: (&[E::Acc], &[E::Acc]),
        dy_td: &[E],
        (dw_d, db_d): (&mut [E::Acc], &mut [E::Acc]),
    ) -> Result<(), Error> {
        let op = "layer_norm_backward_weight";
        need(op, "h", spec.len(), h_td.len())?;
        need(op, "dy", spec.len(), dy_td.len())?;
        need(op, "mean", spec.rows, stats.0.len())?;
        need(op, "rstd", spec.rows, stats.1.len())?;
        need(op, "dw", spec.dim, dw_d.len())?;
        need(op, "db", spec.dim, db_d.len())?;
        let cut = columns_per_part(spec.rows);
        let items = dw_d.chunks_mut(cut).zip(db_d.chunks_mut(cut));
        self.for_each(
            items,
            #[inline(always)]
            |i, dwb| {
                layer_norm_backward_weight(spec, i * cut, h_td, stats, dy_td, dwb);
            },
        );
        Ok(())
    }
}

/// Rows and elements of one part of a call.
#[inline(always)]
fn parts(spec: &NormSpec) -> (usize, usize) {
    let rows = rows_per_part(spec.dim);
    (rows, rows * spec.dim.max(1))
}
