//! Laws of the norms.
//!
//! Bounds: a statistic is a sum in lanes, off by at most `dim / 16 + 4` roundings; what follows
//! makes a dozen more, all relative to the magnitudes that are added.

use quintet_kernels::norm::naive;
use quintet_kernels::{Float, Norm, NormSpec};

use crate::common::*;

const SHAPES: [(usize, usize); 6] = [(1, 1), (3, 7), (5, 64), (2, 133), (0, 8), (70, 515)];

struct Case {
    spec: NormSpec,
    h: Vec<f64>,
    w: Vec<f64>,
    b: Vec<f64>,
    dy: Vec<f64>,
    dr: Vec<f64>,
    /// Relative error that roundings in Acc may add up to.
    tol: f64,
}

fn cases<E: Float>() -> impl Iterator<Item = Case> {
    SHAPES.into_iter().map(|(rows, dim)| {
        let mut draw = Draw::new((rows * 1000 + dim) as u64);
        let spec = NormSpec {
            rows,
            dim,
            eps: 1e-5,
        };
        Case {
            spec,
            h: draw.vec::<E>(rows * dim, 2.0),
            w: draw.vec::<E>(dim, 1.5),
            b: draw.vec::<E>(dim, 1.0),
            dy: draw.vec::<E>(rows * dim, 1.0),
            dr: draw.vec::<E>(rows * dim, 1.0),
            tol: (dim as f64 / 16.0 + 16.0) * acc::<E>(),
        }
    })
}

impl Case {
    fn max_h(&self, i: usize) -> f64 {
        let t = i / self.spec.dim;
        let row = &self.h[t * self.spec.dim..(t + 1) * self.spec.dim];
        row.iter().fold(0.0, |m, h| h.abs().max(m))
    }

    /// Sum over the row's d of |w dy x|, over dim.
    fn mean_abs(&self, t: usize, x: impl Fn(usize) -> f64) -> f64 {
        let dim = self.spec.dim;
        let at = t * dim;
        let sum: f64 = (0..dim)
            .map(|d| (self.w[d] * self.dy[at + d] * x(at + d)).abs())
            .sum();
        sum / dim as f64
    }
}

pub fn rms_norm<B: Norm, E: Float>(device: &B) {
    for case in cases::<E>() {
        let spec = &case.spec;
        let n = spec.rows * spec.dim;
        let (want, want_rstd) = naive::rms_norm(spec, &case.h, &case.w);
        let (h, w) = (up::<B, E>(device, &case.h), up::<B, E>(device, &case.w));
        let mut y = unset::<B, E>(device, n);
        let mut rstd = unset::<B, E::Acc>(device, spec.rows);
        device
            .rms_norm::<E>(
                spec,
                B::whole(&h),
                None,
                B::whole(&w),
                B::whole_mut(&mut y),
                B::whole_mut(&mut rstd),
            )
            .unwrap();
        let y = down::<B, E>(device, &y);
        let u = E::UNIT_ROUNDOFF;
        close("y", &y, &want, |i| (u + case.tol) * want[i].abs());
        let rstd = down::<B, E::Acc>(device, &rstd);
        close("rstd", &rstd, &want_rstd, |t| case.tol * want_rstd[t]);

        // With a residual: the stored sum is normalised, to the same bits as without.
        let r = up::<B, E>(device, &case.dr);
        let mut sum = unset::<B, E>(device, n);
        let (mut y1, mut y2) = (unset::<B, E>(device, n), unset::<B, E>(device, n));
        let mut s1 = unset::<B, E::Acc>(device, spec.rows);
        let mut s2 = unset::<B, E::Acc>(device, spec.rows);
        device
            .rms_norm::<E>(
                spec,
                B::whole(&h),
                Some((B::whole(&r), B::whole_mut(&mut sum))),
                B::whole(&w),
                B::whole_mut(&mut y1),
                B::whole_mut(&mut s1),
            )
            .unwrap();
        device
            .rms_norm::<E>(
                spec,
                B::whole(&sum),
                None,
                B::whole(&w),
                B::whole_mut(&mut y2),
                B::whole_mut(&mut s2),
            )
            .unwrap();
        let want: Vec<f64> = case.h.iter().zip(&case.dr).map(|(h, r)| h + r).collect();
        close("h", &down::<B, E>(device, &sum), &want, |i| {
            u * want[i].abs()
        });
        assert_eq!(down::<B, E>(device, &y1), down::<B, E>(device, &y2));
        assert_eq!(down_raw(device, &s1), down_raw(device, &s2));
    }
}

pub fn rms_norm_backward<B: Norm, E: Float>(device: &B) {
    for case in cases::<E>() {
        let spec = &case.spec;
        let n = spec.rows * spec.dim;
        let (want_dh, want_dw) = naive::rms_norm_backward(spec, &case.h, &case.w, &case.dy);
        let rstd = naive::rms_norm(spec, &case.h, &case.w).1;
        let (h, w) = (up::<B, E>(device, &case.h), up::<B, E>(device, &case.w));
        let (dy, dr) = (up::<B, E>(device, &case.dy), up::<B, E>(device, &case.dr));
        let r = up::<B, E::Acc>(device, &rstd);
        for residual in [false, true] {
            let mut dh = unset::<B, E>(device, n);
            device
                .rms_norm_backward_input::<E>(
                    spec,
                    B::whole(&h),
                    B::whole(&w),
                    B::whole(&r),
                    B::whole(&dy),
                    residual.then(|| B::whole(&dr)),
                    B::whole_mut(&mut dh),
                )
                .unwrap();
            let dr = |i: usize| if residual { case.dr[i] } else { 0.0 };
            let want: Vec<f64> = (0..n).map(|i| dr(i) + want_dh[i]).collect();
            close("dh", &down::<B, E>(device, &dh), &want, |i| {
                let (t, d) = (i / spec.dim, i % spec.dim);
                let gh = case.mean_abs(t, |i| case.h[i]);
                let g = (case.w[d] * case.dy[i]).abs();
                let size = rstd[t] * (g + case.h[i].abs() * rstd[t] * rstd[t] * gh);
                E::UNIT_ROUNDOFF * want[i].abs() + 2.0 * case.tol * (dr(i).abs() + size)
            });
        }
        // Added to what is there.
        let mut dw = up::<B, E::Acc>(device, &case.b);
        device
            .rms_norm_backward_weight::<E>(
                spec,
                B::whole(&h),
                B::whole(&r),
                B::whole(&dy),
                B::whole_mut(&mut dw),
            )
            .unwrap();
        let want: Vec<f64> = (0..spec.dim).map(|d| case.b[d] + want_dw[d]).collect();
        close("dw", &down::<B, E::Acc>(device, &dw), &want, |d| {
            let size: f64 = (0..spec.rows)
                .map(|t| (case.dy[t * spec.dim + d] * case.h[t * spec.dim + d] * rstd[t]).abs())
                .sum();
            (spec.rows as f64 + 4.0) * acc::<E>() * (case.b[d].abs() + size)
        });
    }
}

pub fn layer_norm<B: Norm, E: Float>(device: &B) {
    for case in cases::<E>() {
        let spec = &case.spec;
        let n = spec.rows * spec.dim;
        let (want, want_mean, want_rstd) = naive::layer_norm(spec, &case.h, &case.w, &case.b);
        let (h, w) = (up::<B, E>(device, &case.h), up::<B, E>(device, &case.w));
        let (b, r) = (up::<B, E>(device, &case.b), up::<B, E>(device, &case.dr));
        let mut y = unset::<B, E>(device, n);
        let mut mean = unset::<B, E::Acc>(device, spec.rows);
        let mut rstd = unset::<B, E::Acc>(device, spec.rows);
        device
            .layer_norm::<E>(
                spec,
                B::whole(&h),
                None,
                (B::whole(&w), B::whole(&b)),
                B::whole_mut(&mut y),
                (B::whole_mut(&mut mean), B::whole_mut(&mut rstd)),
            )
            .unwrap();
        close("y", &down::<B, E>(device, &y), &want, |i| {
            let (t, d) = (i / spec.dim, i % spec.dim);
            let size = 2.0 * case.max_h(i) * case.w[d].abs() * want_rstd[t];
            E::UNIT_ROUNDOFF * want[i].abs() + case.tol * (size + case.b[d].abs())
        });
        let mean = down::<B, E::Acc>(device, &mean);
        close("mean", &mean, &want_mean, |t| {
            case.tol * case.max_h(t * spec.dim)
        });
        // The variance is of the order of the squares, or eps where a row is one element.
        let rstd = down::<B, E::Acc>(device, &rstd);
        close("rstd", &rstd, &want_rstd, |t| {
            let h = case.max_h(t * spec.dim);
            case.tol * want_rstd[t] * (1.0 + 2.0 * acc::<E>() * (h * want_rstd[t]).powi(2))
        });

        let mut sum = unset::<B, E>(device, n);
        let (mut y1, mut y2) = (unset::<B, E>(device, n), unset::<B, E>(device, n));
        let [mut m1, mut m2, mut s1, mut s2] =
            [(); 4].map(|()| unset::<B, E::Acc>(device, spec.rows));
        device
            .layer_norm::<E>(
                spec,
                B::whole(&h),
                Some((B::whole(&r), B::whole_mut(&mut sum))),
                (B::whole(&w), B::whole(&b)),
                B::whole_mut(&mut y1),
                (B::whole_mut(&mut m1), B::whole_mut(&mut s1)),
            )
            .unwrap();
        device
            .layer_norm::<E>(
                spec,
                B::whole(&sum),
                None,
                (B::whole(&w), B::whole(&b)),
                B::whole_mut(&mut y2),
                (B::whole_mut(&mut m2), B::whole_mut(&mut s2)),
            )
            .unwrap();
        let want: Vec<f64> = case.h.iter().zip(&case.dr).map(|(h, r)| h + r).collect();
        close("h", &down::<B, E>(device, &sum), &want, |i| {
            E::UNIT_ROUNDOFF * want[i].abs()
        });
        assert_eq!(down::<B, E>(device, &y1), down::<B, E>(device, &y2));
        assert_eq!(down_raw(device, &m1), down_raw(device, &m2));
        assert_eq!(down_raw(device, &s1), down_raw(device, &s2));
    }
}

pub fn layer_norm_backward<B: Norm, E: Float>(device: &B) {
    // A row of one element has no variance: its gradient is rounding alone.
    for case in cases::<E>().filter(|case| case.spec.dim > 1) {
        let spec = &case.spec;
        let n = spec.rows * spec.dim;
        let (want_dh, want_dw, want_db) =
            naive::layer_norm_backward(spec, &case.h, &case.w, &case.dy);
        let (_, mean, rstd) = naive::layer_norm(spec, &case.h, &case.w, &case.b);
        let (h, w) = (up::<B, E>(device, &case.h), up::<B, E>(device, &case.w));
        let (dy, dr) = (up::<B, E>(device, &case.dy), up::<B, E>(device, &case.dr));
        let m = up::<B, E::Acc>(device, &mean);
        let r = up::<B, E::Acc>(device, &rstd);
        // |h - mean| rstd, each term by its magnitude.
        let normed = |i: usize| {
            let t = i / spec.dim;
            (case.h[i].abs() + mean[t].abs()) * rstd[t]
        };
        for residual in [false, true] {
            let mut dh = unset::<B, E>(device, n);
            device
                .layer_norm_backward_input::<E>(
                    spec,
                    B::whole(&h),
                    B::whole(&w),
                    (B::whole(&m), B::whole(&r)),
                    B::whole(&dy),
                    residual.then(|| B::whole(&dr)),
                    B::whole_mut(&mut dh),
                )
                .unwrap();
            let dr = |i: usize| if residual { case.dr[i] } else { 0.0 };
            let want: Vec<f64> = (0..n).map(|i| dr(i) + want_dh[i]).collect();
            close("dh", &down::<B, E>(device, &dh), &want, |i| {
                let (t, d) = (i / spec.dim, i % spec.dim);
                let g = (case.w[d] * case.dy[i]).abs();
                let mean_g = case.mean_abs(t, |_| 1.0);
                let size = rstd[t] * (g + mean_g + normed(i) * case.mean_abs(t, normed));
                E::UNIT_ROUNDOFF * want[i].abs() + case.tol * (dr(i).abs() + size)
            });
        }
        let mut dw = up::<B, E::Acc>(device, &case.b);
        let mut db = up::<B, E::Acc>(device, &case.w);
        device
            .layer_norm_backward_weight::<E>(
                spec,
                B::whole(&h),
                (B::whole(&m), B::whole(&r)),
                B::whole(&dy),
                (B::whole_mut(&mut dw), B::whole_mut(&mut db)),
            )
            .unwrap();
        let over = |d: usize, x: &dyn Fn(usize) -> f64| -> f64 {
            let at = |t| t * spec.dim + d;
            (0..spec.rows)
                .map(|t| (case.dy[at(t)] * x(at(t))).abs())
                .sum()
        };
        let tol = (spec.rows as f64 + 6.0) * acc::<E>();
        let want: Vec<f64> = (0..spec.dim).map(|d| case.b[d] + want_dw[d]).collect();
        close("dw", &down::<B, E::Acc>(device, &dw), &want, |d| {
            tol * (case.b[d].abs() + over(d, &normed))
        });
        let want: Vec<f64> = (0..spec.dim).map(|d| case.w[d] + want_db[d]).collect();
        close("db", &down::<B, E::Acc>(device, &db), &want, |d| {
            tol * (case.w[d].abs() + over(d, &|_| 1.0))
        });
    }
}

/// The backward of the naive twin is the slope of its forward; the device is held to the twin.
pub fn rms_norm_gradient<B: Norm, E: Float>(_: &B) {
    for case in cases::<E>().filter(|case| case.spec.rows < 10) {
        let Case { spec, h, w, dy, .. } = &case;
        let (dh, dw) = naive::rms_norm_backward(spec, h, w, dy);
        slope("dh", h, &dh, |h| dot(&naive::rms_norm(spec, h, w).0, dy));
        slope("dw", w, &dw, |w| dot(&naive::rms_norm(spec, h, w).0, dy));
    }
}

pub fn layer_norm_gradient<B: Norm, E: Float>(_: &B) {
    for case in cases::<E>().filter(|case| case.spec.rows < 10 && case.spec.dim > 1) {
        let Case {
            spec, h, w, b, dy, ..
        } = &case;
        let (dh, dw, db) = naive::layer_norm_backward(spec, h, w, dy);
        let loss = |h: &[f64], w: &[f64], b: &[f64]| dot(&naive::layer_norm(spec, h, w, b).0, dy);
        slope("dh", h, &dh, |h| loss(h, w, b));
        slope("dw", w, &dw, |w| loss(h, w, b));
        slope("db", b, &db, |b| loss(h, w, b));
    }
}
