//! Optimizer steps by the letter, in f64, on one element.

use super::{AdamWSpec, SgdSpec};

/// One AdamW step of weight `w` with moments `m` and `v`.
pub fn adamw(spec: &AdamWSpec, grad: f64, w: &mut f64, m: &mut f64, v: &mut f64) {
    let g = spec.grad_scale * grad;
    *m = spec.beta1 * *m + (1.0 - spec.beta1) * g;
    *v = spec.beta2 * *v + (1.0 - spec.beta2) * g * g;
    let m_hat = *m / (1.0 - libm::pow(spec.beta1, spec.step as f64));
    let v_hat = *v / (1.0 - libm::pow(spec.beta2, spec.step as f64));
    *w *= 1.0 - spec.lr * spec.weight_decay;
    *w -= spec.lr * m_hat / (libm::sqrt(v_hat) + spec.eps);
}

/// One SGD step of weight `w`.
pub fn sgd(spec: &SgdSpec, grad: f64, w: &mut f64) {
    *w -= spec.lr * (spec.grad_scale * grad + spec.weight_decay * *w);
}

/// The sum of squares.
#[must_use]
pub fn squares(x: &[f64]) -> f64 {
    x.iter().map(|x| x * x).sum()
}
