//! RoPE by the letter, in f64.

use alloc::vec::Vec;

use super::RopeSpec;

/// `x_thd` turned by `pos_t`: `(a, b) -> (a cos - b sin, a sin + b cos)` for element i of the
/// first half of what turns of each head and element i of the second.
#[must_use]
pub fn rope(spec: &RopeSpec, pos: &[i32], x: &[f64]) -> Vec<f64> {
    let (d, half) = (spec.head_dim, spec.rotary / 2);
    let mut y = x.to_vec();
    for t in 0..spec.rows {
        for h in 0..spec.heads {
            for i in 0..half {
                let exponent = -2.0 * i as f64 / spec.rotary as f64;
                let mut angle = f64::from(pos[t]) * libm::pow(spec.theta, exponent);
                if spec.inverse {
                    angle = -angle;
                }
                let (sin, cos) = libm::sincos(angle);
                let at = (t * spec.heads + h) * d + i;
                (y[at], y[at + half]) = (
                    x[at] * cos - x[at + half] * sin,
                    x[at] * sin + x[at + half] * cos,
                );
            }
        }
    }
    y
}
