//! The product in f64 as its definition reads.

use super::{Epilogue, GemmSpec, Trans};

/// `c = epilogue(op(a) op(b) [+ c])`, three loops; arguments as [`super::Gemm::gemm`].
///
/// # Panics
/// Where a slice is shorter than the spec says: this is a reference for tests.
pub fn gemm(
    spec: &GemmSpec,
    a: &[f64],
    b: &[f64],
    bias: Option<&[f64]>,
    residual: Option<&[f64]>,
    c: &mut [f64],
) {
    let GemmSpec { m, n, k, .. } = *spec;
    let a_mk = |i: usize, p: usize| match spec.a {
        Trans::N => a[i * k + p],
        Trans::T => a[p * m + i],
    };
    let b_kn = |p: usize, j: usize| match spec.b {
        Trans::N => b[p * n + j],
        Trans::T => b[j * k + p],
    };
    for i in 0..m {
        for j in 0..n {
            let old = if spec.accumulate { c[i * n + j] } else { 0.0 };
            let sum = (0..k).fold(old, |sum, p| sum + a_mk(i, p) * b_kn(p, j));
            let bias = bias.map_or(0.0, |bias| bias[j]);
            let residual = residual.map_or(0.0, |residual| residual[i * n + j]);
            c[i * n + j] = match spec.epilogue {
                Epilogue::BiasGelu => gelu(sum + bias),
                _ => sum + bias + residual,
            };
        }
    }
}

/// GELU in its tanh form.
#[must_use]
pub fn gelu(x: f64) -> f64 {
    let inner = libm::sqrt(2.0 / core::f64::consts::PI) * (x + 0.044_715 * x * x * x);
    0.5 * x * (1.0 + libm::tanh(inner))
}
