//! The norms by the letter, in f64.

use alloc::vec::Vec;

use super::NormSpec;

/// `(y_td, rstd_t)` of RMSNorm over `h_td`.
#[must_use]
pub fn rms_norm(spec: &NormSpec, h: &[f64], w: &[f64]) -> (Vec<f64>, Vec<f64>) {
    let (mut y, mut rstd) = (Vec::new(), Vec::new());
    for t in 0..spec.rows {
        let h = &h[t * spec.dim..(t + 1) * spec.dim];
        let square: f64 = h.iter().map(|h| h * h).sum();
        let r = 1.0 / libm::sqrt(square / spec.dim as f64 + spec.eps);
        y.extend((0..spec.dim).map(|d| w[d] * h[d] * r));
        rstd.push(r);
    }
    (y, rstd)
}

/// `(dh_td, dw_d)` of RMSNorm: with g = w dy,
/// `dh = rstd (g - h rstd^2 mean(g h))` and `dw = sum_t dy h rstd`.
#[must_use]
pub fn rms_norm_backward(
    spec: &NormSpec,
    h: &[f64],
    w: &[f64],
    dy: &[f64],
) -> (Vec<f64>, Vec<f64>) {
    let rstd = rms_norm(spec, h, w).1;
    let mut dh = Vec::new();
    let mut dw = alloc::vec![0.0; spec.dim];
    for t in 0..spec.rows {
        let h = &h[t * spec.dim..(t + 1) * spec.dim];
        let dy = &dy[t * spec.dim..(t + 1) * spec.dim];
        let r = rstd[t];
        let gh: f64 = (0..spec.dim).map(|d| w[d] * dy[d] * h[d]).sum();
        let mean = gh / spec.dim as f64;
        dh.extend((0..spec.dim).map(|d| r * (w[d] * dy[d] - h[d] * r * r * mean)));
        for d in 0..spec.dim {
            dw[d] += dy[d] * h[d] * r;
        }
    }
    (dh, dw)
}

/// `(y_td, mean_t, rstd_t)` of LayerNorm over `h_td`.
#[must_use]
pub fn layer_norm(
    spec: &NormSpec,
    h: &[f64],
    w: &[f64],
    b: &[f64],
) -> (Vec<f64>, Vec<f64>, Vec<f64>) {
    let n = spec.dim as f64;
    let (mut y, mut means, mut rstds) = (Vec::new(), Vec::new(), Vec::new());
    for t in 0..spec.rows {
        let h = &h[t * spec.dim..(t + 1) * spec.dim];
        let mean = h.iter().sum::<f64>() / n;
        let var = h.iter().map(|h| (h - mean) * (h - mean)).sum::<f64>() / n;
        let rstd = 1.0 / libm::sqrt(var + spec.eps);
        y.extend((0..spec.dim).map(|d| w[d] * (h[d] - mean) * rstd + b[d]));
        means.push(mean);
        rstds.push(rstd);
    }
    (y, means, rstds)
}

/// `(dh_td, dw_d, db_d)` of LayerNorm: with g = w dy and n = (h - mean) rstd,
/// `dh = rstd (g - mean(g) - n mean(g n))`, `dw = sum_t dy n`, `db = sum_t dy`.
#[must_use]
pub fn layer_norm_backward(
    spec: &NormSpec,
    h: &[f64],
    w: &[f64],
    dy: &[f64],
) -> (Vec<f64>, Vec<f64>, Vec<f64>) {
    let zeros = alloc::vec![0.0; spec.dim];
    let (_, mean, rstd) = layer_norm(spec, h, w, &zeros);
    let mut dh = Vec::new();
    let (mut dw, mut db) = (zeros.clone(), zeros);
    for t in 0..spec.rows {
        let dy = &dy[t * spec.dim..(t + 1) * spec.dim];
        let n: Vec<f64> = (0..spec.dim)
            .map(|d| (h[t * spec.dim + d] - mean[t]) * rstd[t])
            .collect();
        let g: Vec<f64> = (0..spec.dim).map(|d| w[d] * dy[d]).collect();
        let mean_g = g.iter().sum::<f64>() / spec.dim as f64;
        let mean_gn = (0..spec.dim).map(|d| g[d] * n[d]).sum::<f64>() / spec.dim as f64;
        dh.extend((0..spec.dim).map(|d| rstd[t] * (g[d] - mean_g - n[d] * mean_gn)));
        for d in 0..spec.dim {
            dw[d] += dy[d] * n[d];
            db[d] += dy[d];
        }
    }
    (dh, dw, db)
}
