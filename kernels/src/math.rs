//! The exponential of the hot loops: branch-free, so that a loop over a slice vectorises.
//!
//! ```text
//! e^x = 2^n e^r,   n = round(x / ln 2),   |r| <= ln(2) / 2
//! e^r = 1 + r + r^2 q(r)                  q of degree 4, minimax in relative error (3.1e-9)
//! ```
//!
//! `2^n` is multiplied on in two halves, so results fade through the subnormals to 0 and
//! overflow to infinity exactly where the true value does.

/// e to the power of `x` within 1.5 units in the last place over the whole range; minus infinity
/// gives 0, infinity gives infinity, NaN stays NaN.
#[inline(always)]
pub(crate) fn exp_f32(x: f32) -> f32 {
    // Beyond these bounds the result is 0 or infinity; written so that a NaN passes through.
    let x = if x < -104.0 { -104.0 } else { x };
    let x = if x > 89.0 { 89.0 } else { x };
    // Adding 1.5 * 2^23 leaves the nearest integer in the low mantissa bits.
    let shifted = x * core::f32::consts::LOG2_E + ROUND;
    let n = shifted - ROUND;
    let r = (x - n * LN2_HI) - n * LN2_LO;
    let q = Q[0] + r * (Q[1] + r * (Q[2] + r * (Q[3] + r * Q[4])));
    let e_r = 1.0 + (r + r * r * q);
    let n = (shifted.to_bits() as i32).wrapping_sub(ROUND.to_bits() as i32);
    let half = n >> 1;
    e_r * pow2(half) * pow2(n.wrapping_sub(half))
}

/// 2 to the power of `n` for a normal result; any bits for other `n` (where x was NaN).
#[inline(always)]
fn pow2(n: i32) -> f32 {
    f32::from_bits((n.wrapping_add(127) << 23) as u32)
}

const ROUND: f32 = 12_582_912.0;
// ln 2 in two parts, the first short enough that n * LN2_HI is exact.
const LN2_HI: f32 = 0.693_359_4;
const LN2_LO: f32 = -2.121_944_4e-4;
const Q: [f32; 5] = [
    0.499_999_94,
    0.166_665_21,
    0.041_668_39,
    0.008_368_745,
    0.001_381_454,
];

#[cfg(test)]
mod tests {
    use super::*;

    /// Error of the approximation in units in the last place of the true value.
    fn ulps(x: f32) -> f64 {
        let exact = libm::exp(f64::from(x));
        let exponent = libm::floor(libm::log2(exact)).max(-126.0);
        (f64::from(exp_f32(x)) - exact).abs() / libm::exp2(exponent - 23.0)
    }

    #[test]
    fn exp_is_within_1_5_ulp() {
        let mut worst = 0.0_f64;
        let steps = 400_000;
        for i in 0..=steps {
            let x = -103.9 + (88.72 + 103.9) * (i as f32 / steps as f32);
            worst = worst.max(ulps(x));
            worst = worst.max(ulps(x / 1024.0));
        }
        assert!(worst <= 1.5, "{worst} ulp");
    }

    #[test]
    fn exp_at_the_edges() {
        assert_eq!(exp_f32(0.0).to_bits(), 1.0_f32.to_bits());
        assert_eq!(exp_f32(-0.0).to_bits(), 1.0_f32.to_bits());
        assert_eq!(exp_f32(f32::NEG_INFINITY).to_bits(), 0);
        assert_eq!(exp_f32(f32::MIN).to_bits(), 0);
        assert_eq!(exp_f32(-104.5).to_bits(), 0);
        assert_eq!(exp_f32(f32::INFINITY), f32::INFINITY);
        assert_eq!(exp_f32(f32::MAX), f32::INFINITY);
        assert_eq!(exp_f32(88.73), f32::INFINITY);
        assert!(exp_f32(88.72).is_finite());
        assert!(exp_f32(-100.0) > 0.0);
        assert!(exp_f32(f32::NAN).is_nan());
    }
}
