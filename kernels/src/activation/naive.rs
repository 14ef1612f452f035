//! Pointwise ops by the letter, in f64, one element at a time.

/// `silu(g) u`.
#[must_use]
pub fn swiglu(g: f64, u: f64) -> f64 {
    g / (1.0 + libm::exp(-g)) * u
}

/// `(dg, du)` of [`swiglu`]: silu'(g) = s (1 + g (1 - s)) with s = 1 / (1 + e^-g).
#[must_use]
pub fn swiglu_backward(g: f64, u: f64, dy: f64) -> (f64, f64) {
    let s = 1.0 / (1.0 + libm::exp(-g));
    (dy * u * s * (1.0 + g * (1.0 - s)), dy * g * s)
}

/// `x/2 (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3)))`.
#[must_use]
pub fn gelu(x: f64) -> f64 {
    0.5 * x * (1.0 + libm::tanh(inner(x)))
}

/// `gelu'(x) dy`.
#[must_use]
pub fn gelu_backward(x: f64, dy: f64) -> f64 {
    let t = libm::tanh(inner(x));
    let slope = libm::sqrt(2.0 / core::f64::consts::PI) * (1.0 + 3.0 * 0.044715 * x * x);
    dy * (0.5 * (1.0 + t) + 0.5 * x * (1.0 - t * t) * slope)
}

fn inner(x: f64) -> f64 {
    libm::sqrt(2.0 / core::f64::consts::PI) * (x + 0.044715 * x * x * x)
}

/// `db[n] + sum over rows of dy[rows, n]`.
pub fn add_rows(dy: &[f64], db: &mut [f64]) {
    let n = db.len();
    for (i, dy) in dy.iter().enumerate() {
        db[i % n] += dy;
    }
}
