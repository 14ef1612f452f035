//! What narrower arithmetic would do to the oracle: a running error analysis by random roundings
//! (Parker 1997, "Monte Carlo arithmetic").
//!
//! ```text
//! value x  ->  x (1 + unit r),  r uniform between -1 and 1, another for each value
//! ```
//!
//! A machine rounds each value that it stores. How far that takes a gradient cannot be read from the
//! gradient, for of terms that cancel only their roundings are left. Here each value of the way is
//! moved by as much as a rounding may, forward and backward, so that terms which cancel leave what
//! they leave on a machine too, and how far the result moves is measured. The arithmetic itself
//! stays f64.

use std::cell::Cell;

/// How each value is rounded.
#[derive(Debug, Clone)]
pub struct Rounding {
    /// Of values that are kept in storage between two operations.
    unit: f64,
    /// Of values that never leave the type that sums are taken in: scores of a router.
    wide: f64,
    state: Cell<u64>,
}

impl Rounding {
    /// Not at all: the oracle as it is compared with.
    #[must_use]
    pub fn none() -> Self {
        Self::of(0.0, 0.0, 0)
    }

    /// At random by up to `unit` in storage and `wide` in sums, as parts of the value.
    #[must_use]
    pub fn of(unit: f64, wide: f64, seed: u64) -> Self {
        let state = Cell::new(seed);
        Self { unit, wide, state }
    }

    /// Values go into storage.
    pub(super) fn stored(&self, values: &mut [f64]) {
        self.each(self.unit, values);
    }

    /// Values are results that stay in the type that sums are taken in.
    pub fn kept(&self, values: &mut [f64]) {
        self.each(self.wide, values);
    }

    fn each(&self, unit: f64, values: &mut [f64]) {
        if unit > 0.0 {
            values
                .iter_mut()
                .for_each(|x| *x *= 1.0 + unit * self.next());
        }
    }

    /// Steele, Lea and Flood 2014 (SplitMix64), between -1 and 1.
    fn next(&self) -> f64 {
        let state = self.state.get().wrapping_add(0x9e37_79b9_7f4a_7c15);
        self.state.set(state);
        let mut z = state;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ (z >> 31)) >> 11) as f64 / (1_u64 << 52) as f64 - 1.0
    }
}

/// The nearest number that bf16 has, to even where two are as near, through f32 as a master weight
/// goes.
#[must_use]
pub fn to_bf16(x: f64) -> f64 {
    let bits = (x as f32).to_bits();
    let (high, low) = (bits >> 16, bits & 0xffff);
    let up = low > 0x8000 || (low == 0x8000 && high & 1 == 1);
    f64::from(f32::from_bits((high + u32::from(up)) << 16))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn roundings_are_even_and_within_their_unit() {
        let rounding = Rounding::of(1e-3, 0.0, 7);
        let mut values = vec![2.0; 100_000];
        rounding.stored(&mut values);
        let off: Vec<f64> = values.iter().map(|x| x / 2.0 - 1.0).collect();
        let mean = off.iter().sum::<f64>() / off.len() as f64;
        let square = off.iter().map(|x| x * x).sum::<f64>() / off.len() as f64;
        assert!(off.iter().all(|x| x.abs() <= 1e-3) && mean.abs() < 1e-5);
        assert!((square / 1e-6 - 1.0 / 3.0).abs() < 1e-2, "{square}");
        let mut kept = [3.0];
        rounding.kept(&mut kept);
        Rounding::none().stored(&mut kept);
        assert_eq!(kept, [3.0]);
    }

    #[test]
    fn bf16_has_eight_bits_and_ties_go_to_even() {
        let all = [
            (1.0, 1.0),
            (1.0 + 1.0 / 256.0, 1.0),
            (1.0 + 1.1 / 256.0, 1.0078125),
            (1.0 + 3.0 / 256.0, 1.015625),
            (-0.3, -0.30078125),
            (0.0, 0.0),
        ];
        for (x, want) in all {
            assert_eq!(to_bf16(x), want, "{x}");
        }
    }
}
