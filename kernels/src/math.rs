//! The functions of the hot loops, branch-free, so that a loop over a slice vectorises.
//!
//! ```text
//! e^x = 2^n e^r,   n = round(x / ln 2),   |r| <= ln(2) / 2
//! e^r = 1 + r + r^2 q(r)                  q of degree 4, minimax in relative error (3.1e-9)
//! ```
//!
//! `2^n` is multiplied on in two halves, so results fade through the subnormals to 0 and
//! overflow to infinity exactly where the true value does.
//!
//! ```text
//! x = n pi/2 + r,   |r| <= pi/4           sin x = +-sin r or +-cos r by n mod 4
//! ```

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

/// As [`exp_f32`], in f64 and within one unit and a half there.
#[inline(always)]
pub(crate) fn exp_f64(x: f64) -> f64 {
    let x = if x < -746.0 { -746.0 } else { x };
    let x = if x > 710.0 { 710.0 } else { x };
    let shifted = x * core::f64::consts::LOG2_E + ROUND_F64;
    let n = shifted - ROUND_F64;
    let r = (x - n * LN2_F64[0]) - n * LN2_F64[1];
    // Taylor to r^13: what is left out is below 5e-18.
    let (p, z) = (|k: usize| EXP[k] + r * EXP[k + 1], r * r);
    let q = p(0) + z * (p(2) + z * (p(4) + z * (p(6) + z * (p(8) + z * p(10)))));
    let e_r = 1.0 + (r + z * q);
    // n + 2048 is positive, so that its half needs no arithmetic shift, which few units have.
    let n = shifted
        .to_bits()
        .wrapping_sub(ROUND_F64.to_bits())
        .wrapping_add(2048);
    let half = n >> 1;
    let first = f64::from_bits(half.wrapping_sub(1) << 52);
    let second = f64::from_bits(n.wrapping_sub(half + 1) << 52);
    e_r * first * second
}

/// Sine and cosine within 4e-16, for an `x` up to a million; beyond that the reduction is as
/// inexact as an `x` rounded to f64 is.
#[inline(always)]
pub(crate) fn sin_cos_f64(x: f64) -> (f64, f64) {
    let shifted = x * core::f64::consts::FRAC_2_PI + ROUND_F64;
    let n = shifted - ROUND_F64;
    let r = ((x - n * HALF_PI[0]) - n * HALF_PI[1]) - n * HALF_PI[2];
    let z = r * r;
    // Taylor to r^17 and r^16: what is left out is below 3e-18.
    let w = z * z;
    let pair = |c: &[f64; 8], k: usize| c[k] + z * c[k + 1];
    let sum = |c| pair(c, 0) + w * (pair(c, 2) + w * (pair(c, 4) + w * pair(c, 6)));
    let (s, c) = (sum(&SIN), sum(&COS));
    let (s, c) = (r + r * z * s, 1.0 + z * c);
    let quarter = shifted.to_bits();
    let (sin, cos) = if quarter & 1 == 0 { (s, c) } else { (c, s) };
    let sin_sign = (quarter & 2) << 62;
    let cos_sign = (quarter.wrapping_add(1) & 2) << 62;
    (
        f64::from_bits(sin.to_bits() ^ sin_sign),
        f64::from_bits(cos.to_bits() ^ cos_sign),
    )
}

/// 2 to the power of `n` for a normal result; any bits for other `n` (where x was NaN).
#[inline(always)]
fn pow2(n: i32) -> f32 {
    f32::from_bits((n.wrapping_add(127) << 23) as u32)
}

/// 1 / k! from k = 2.
const EXP: [f64; 12] = inverse_factorials(2, 1, 1.0);
/// ln 2 in two parts; the first has 33 bits.
const LN2_F64: [f64; 2] = [6.931_471_803_691_238e-1, 1.908_214_929_270_587_7e-10];
const ROUND_F64: f64 = 6_755_399_441_055_744.0;
/// pi / 2 in three parts; the first two have 33 bits, so that n times each is exact for n < 2^20.
const HALF_PI: [f64; 3] = [
    1.5707963267341256,
    6.077100506303966e-11,
    2.0222662487959506e-21,
];
/// (-1)^k / (2k + 1)! from k = 1, and (-1)^k / (2k)! from k = 1.
const SIN: [f64; 8] = inverse_factorials(3, 2, -1.0);
const COS: [f64; 8] = inverse_factorials(2, 2, -1.0);

/// `sign^(k + 1) / (first + k stride)!` for k = 0, 1, .. (factorials to 18! are exact in f64).
const fn inverse_factorials<const N: usize>(first: usize, stride: usize, sign: f64) -> [f64; N] {
    let (mut out, mut factorial, mut signs, mut n, mut k) = ([0.0; N], 1.0, sign, 1, 0);
    while k < N {
        while n < first + stride * k {
            n += 1;
            factorial *= n as f64;
        }
        out[k] = signs / factorial;
        signs *= sign;
        k += 1;
    }
    out
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
    fn sine_and_cosine() {
        assert_eq!(sin_cos_f64(0.0), (0.0, 1.0));
        for i in -200_000..200_000 {
            let x = f64::from(i) * 4.999_999;
            let (sin, cos) = sin_cos_f64(x);
            let (s, c) = libm::sincos(x);
            assert!((sin - s).abs() < 4e-16 && (cos - c).abs() < 4e-16, "{x}");
            let far = x * 1000.0;
            let (sin, cos) = sin_cos_f64(far);
            let (s, c) = libm::sincos(far);
            let bound = 4e-16 + far.abs() * 2.0 * f64::EPSILON;
            assert!((sin - s).abs() < bound && (cos - c).abs() < bound, "{far}");
        }
    }

    #[test]
    fn exp_in_f64() {
        for i in -74_600..=71_000_i32 {
            let x = f64::from(i) * 0.009_999_7;
            let (got, want) = (exp_f64(x), libm::exp(x));
            let ulp = f64::from_bits(want.to_bits() + 1) - want;
            assert!((got - want).abs() <= 2.0 * ulp || got == want, "{x}");
        }
        assert_eq!(exp_f64(0.0), 1.0);
        assert_eq!(exp_f64(-0.0), 1.0);
        for x in [f64::NEG_INFINITY, f64::MIN, -746.0, -1000.0] {
            assert_eq!(exp_f64(x).to_bits(), 0);
        }
        for x in [f64::INFINITY, f64::MAX, 709.79] {
            assert_eq!(exp_f64(x), f64::INFINITY);
        }
        assert!(exp_f64(f64::NAN).is_nan());
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
