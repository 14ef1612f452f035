//! A sum of f64 numbers without rounding, so that it does not matter who adds what, and in which
//! order.
//!
//! A finite, non-negative f64 is a whole multiple of 2^-1074. Written in base 2^32 it has at most
//! three digits that are not zero, of [`DIGITS`]:
//!
//! ```text
//! x = 0 ... 0 d[i+2] d[i+1] d[i] 0 ... 0       each digit a whole number below 2^32, held in an f64
//! ```
//!
//! Digits are added column by column; below 2^21 summands the columns are whole numbers below
//! 2^53, which f64 adds exactly in any order, on one rank or over all of them. The carries and the
//! one rounding come last.

/// Digits of base 2^32 from 2^-1074 to beyond the largest f64 (2^1024).
pub const DIGITS: usize = 67;

const BASE: f64 = 4_294_967_296.0;

/// Adds `x` to `digits`. What is not finite makes the sum so; a negative number is not a sum of
/// squares, and does the same.
pub(crate) fn add(digits: &mut [f64; DIGITS], x: f64) {
    if !(x.is_finite() && x >= 0.0) {
        digits[0] = f64::NAN;
        return;
    }
    let bits = x.to_bits();
    let (exponent, fraction) = ((bits >> 52) as usize, bits & ((1 << 52) - 1));
    // Subnormal numbers have the exponent of the smallest normal ones, and no leading one.
    let (place, whole) = match exponent {
        0 => (0, fraction),
        e => (e - 1, fraction | 1 << 52),
    };
    let mut rest = u128::from(whole) << (place % 32);
    for digit in digits.iter_mut().skip(place / 32).take(3) {
        *digit += (rest & 0xFFFF_FFFF) as f64;
        rest >>= 32;
    }
}

/// The sum, rounded a few units in the last place at most, to the same bits wherever the columns
/// are the same.
pub(crate) fn value(digits: &[f64; DIGITS]) -> f64 {
    let (mut carry, mut whole) = (0u64, [0u32; DIGITS]);
    for (digit, column) in whole.iter_mut().zip(digits) {
        if !column.is_finite() {
            return f64::NAN;
        }
        let sum = *column as u64 + carry;
        (*digit, carry) = (sum as u32, sum >> 32);
    }
    if carry > 0 {
        return f64::INFINITY;
    }
    let Some(top) = whole.iter().rposition(|&digit| digit > 0) else {
        return 0.0;
    };
    // Three digits hold more than the 53 bits that are left.
    let low = top.saturating_sub(2);
    let parts = whole[low..=top].iter().rev();
    let mantissa = parts.fold(0.0, |sum, &digit| sum * BASE + f64::from(digit));
    scale(mantissa, 32 * low)
}

/// `x` times 2^(`place` - 1074), in steps that do not round unless the result is subnormal.
fn scale(mut x: f64, place: usize) -> f64 {
    let mut left = place as i32 - 1074;
    while left != 0 {
        let step = left.clamp(-1000, 900);
        let factor = f64::from_bits(((1023 + step) as u64) << 52);
        x *= factor;
        left -= step;
    }
    x
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::vec::Vec;
    use proptest::prelude::*;

    fn sum(numbers: &[f64]) -> f64 {
        let mut digits = [0.0; DIGITS];
        numbers.iter().for_each(|&x| add(&mut digits, x));
        value(&digits)
    }

    #[test]
    fn one_number_is_itself() {
        for x in [
            0.0,
            1.0,
            0.1,
            1.0 / 3.0,
            f64::from_bits(1),
            f64::MIN_POSITIVE,
            1e-300,
            1e300,
            f64::MAX,
        ] {
            let got = sum(&[x]);
            assert!((got - x).abs() <= 2.0 * f64::EPSILON * x, "{x:e} {got:e}");
        }
        assert_eq!(sum(&[0.5, 0.25, 3.0]), 3.75);
        assert_eq!(sum(&[1e300, 1.0, 1e-300]), 1e300);
        assert!(sum(&[f64::MAX; 2]) == f64::INFINITY);
        for bad in [f64::NAN, f64::INFINITY, -1.0] {
            assert!(sum(&[1.0, bad]).is_nan());
        }
    }

    proptest! {
        #[test]
        fn neither_order_nor_grouping_matters(
            numbers in prop::collection::vec(
                (0.0..1.0f64, -300..300i32).prop_map(|(x, e)| x * 10f64.powi(e)), 0..40),
            cut in 0..40usize,
        ) {
            let whole = sum(&numbers);
            let reversed: Vec<f64> = numbers.iter().rev().copied().collect();
            prop_assert_eq!(whole.to_bits(), sum(&reversed).to_bits());
            let (a, b) = numbers.split_at(cut.min(numbers.len()));
            let mut columns = [0.0; DIGITS];
            for part in [b, a] {
                let mut digits = [0.0; DIGITS];
                part.iter().for_each(|&x| add(&mut digits, x));
                columns.iter_mut().zip(digits).for_each(|(sum, d)| *sum += d);
            }
            prop_assert_eq!(whole.to_bits(), value(&columns).to_bits());
            let plain: f64 = numbers.iter().sum();
            prop_assert!((whole - plain).abs() <= 1e-13 * plain);
        }
    }
}
