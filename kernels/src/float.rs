//! What may lie in a buffer, and how it is computed with.
//!
//! `Data` is anything with plain bytes. A `Float` is stored in its own width and computed in its
//! `Acc`: f64 and f32 in themselves, bf16 in f32 with one rounding on the way back. Losses,
//! statistics and gradients of parameters are kept in `Acc`.

use core::fmt::{Debug, Display};
use core::ops::{Add, AddAssign, Div, Mul, MulAssign, Neg, Sub, SubAssign};

use half::bf16;

/// Plain bytes that a buffer may hold.
pub trait Data: bytemuck::Pod + Send + Sync + PartialEq + Debug + 'static {}
impl<T: bytemuck::Pod + Send + Sync + PartialEq + Debug + 'static> Data for T {}

/// A stored floating point type.
pub trait Float: Data + PartialOrd {
    /// The type sums are taken in.
    type Acc: Real;
    /// The type's name as the command line spells it.
    const NAME: &'static str;
    /// Half the spacing of values just above one: the relative error of one rounding.
    const UNIT_ROUNDOFF: f64;
    /// Widens to the accumulation type, exactly.
    fn to_acc(self) -> Self::Acc;
    /// Rounds to nearest, ties to even.
    fn from_acc(x: Self::Acc) -> Self;
    /// Rounds an f64 to this type.
    fn from_f64(x: f64) -> Self;
    /// Widens to f64, exactly.
    fn to_f64(self) -> f64;
}

/// A type that arithmetic is done in: f32 or f64.
pub trait Real:
    Float<Acc = Self>
    + Display
    + Default
    + Add<Output = Self>
    + Sub<Output = Self>
    + Mul<Output = Self>
    + Div<Output = Self>
    + Neg<Output = Self>
    + AddAssign
    + SubAssign
    + MulAssign
{
    /// Zero.
    const ZERO: Self;
    /// One.
    const ONE: Self;
    /// Minus infinity: the maximum over nothing.
    const NEG_INFINITY: Self;
    /// e to the power of `self`.
    fn exp(self) -> Self;
    /// Natural logarithm.
    fn ln(self) -> Self;
    /// Square root.
    fn sqrt(self) -> Self;
    /// Hyperbolic tangent.
    fn tanh(self) -> Self;
    /// Error function.
    fn erf(self) -> Self;
    /// Sine and cosine.
    fn sin_cos(self) -> (Self, Self);
    /// `self` to the power of `y`.
    fn powf(self, y: Self) -> Self;
    /// The larger of two numbers.
    fn max(self, other: Self) -> Self;
    /// Neither infinite nor NaN.
    fn is_finite(self) -> bool;
}

macro_rules! real {
    ($t:ident, $name:literal, $exp:path, $ln:ident, $sqrt:ident, $tanh:ident, $erf:ident, $sincos:ident, $pow:ident) => {
        impl Float for $t {
            type Acc = $t;
            const NAME: &'static str = $name;
            const UNIT_ROUNDOFF: f64 = $t::EPSILON as f64 / 2.0;
            #[inline(always)]
            fn to_acc(self) -> $t {
                self
            }
            #[inline(always)]
            fn from_acc(x: $t) -> $t {
                x
            }
            #[inline(always)]
            fn from_f64(x: f64) -> $t {
                x as $t
            }
            #[inline(always)]
            fn to_f64(self) -> f64 {
                f64::from(self)
            }
        }
        impl Real for $t {
            const ZERO: $t = 0.0;
            const ONE: $t = 1.0;
            const NEG_INFINITY: $t = $t::NEG_INFINITY;
            #[inline(always)]
            fn exp(self) -> $t {
                $exp(self)
            }
            #[inline(always)]
            fn ln(self) -> $t {
                libm::$ln(self)
            }
            /// Correctly rounded either way; only std's becomes a vector instruction.
            #[inline(always)]
            fn sqrt(self) -> $t {
                #[cfg(feature = "std")]
                return $t::sqrt(self);
                #[cfg(not(feature = "std"))]
                libm::$sqrt(self)
            }
            #[inline(always)]
            fn tanh(self) -> $t {
                libm::$tanh(self)
            }
            #[inline(always)]
            fn erf(self) -> $t {
                libm::$erf(self)
            }
            #[inline(always)]
            fn sin_cos(self) -> ($t, $t) {
                libm::$sincos(self)
            }
            #[inline(always)]
            fn powf(self, y: $t) -> $t {
                libm::$pow(self, y)
            }
            #[inline(always)]
            fn max(self, other: $t) -> $t {
                if self > other { self } else { other }
            }
            #[inline(always)]
            fn is_finite(self) -> bool {
                $t::is_finite(self)
            }
        }
    };
}
real!(
    f64,
    "f64",
    crate::math::exp_f64,
    log,
    sqrt,
    tanh,
    erf,
    sincos,
    pow
);
real!(
    f32,
    "f32",
    crate::math::exp_f32,
    logf,
    sqrtf,
    tanhf,
    erff,
    sincosf,
    powf
);

impl Float for bf16 {
    type Acc = f32;
    const NAME: &'static str = "bf16";
    const UNIT_ROUNDOFF: f64 = 1.0 / 256.0;
    #[inline(always)]
    fn to_acc(self) -> f32 {
        f32::from_bits(u32::from(self.to_bits()) << 16)
    }
    #[inline(always)]
    fn from_acc(x: f32) -> bf16 {
        // Selects instead of branches, so that loops vectorise; half's own conversions branch.
        let bits = x.to_bits();
        let rounded = bits.wrapping_add(0x7fff + ((bits >> 16) & 1)) >> 16;
        let quiet = (bits >> 16) | 0x40;
        bf16::from_bits(if x.is_nan() { quiet } else { rounded } as u16)
    }
    #[inline(always)]
    fn from_f64(x: f64) -> bf16 {
        // First rounded to odd in f32, which keeps a trace of what was cut off; half's own
        // conversion drops the low half of the mantissa and so breaks some ties wrongly.
        let near = x as f32;
        let even = near.to_bits() & 1 == 0;
        let odd = if f64::from(near) == x || x.is_nan() || near.is_infinite() || !even {
            near
        } else if f64::from(near.abs()) < x.abs() {
            f32::from_bits(near.to_bits() + 1)
        } else {
            f32::from_bits(near.to_bits() - 1)
        };
        Self::from_acc(odd)
    }
    #[inline(always)]
    fn to_f64(self) -> f64 {
        f64::from(self.to_acc())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bf16_widens_and_rounds_as_half_does() {
        for bits in 0..=u16::MAX {
            let x = bf16::from_bits(bits);
            let wide = Float::to_acc(x);
            assert_eq!(wide.to_bits() | 0x40_0000, x.to_f32().to_bits() | 0x40_0000);
            if !x.is_nan() {
                assert_eq!(bf16::from_acc(wide).to_bits(), bits);
            }
            for low in [1, 0x7fff, 0x8000, 0x8001, 0xffff] {
                let y = f32::from_bits((u32::from(bits) << 16) | low);
                assert_eq!(bf16::from_acc(y).to_bits(), bf16::from_f32(y).to_bits());
                if !y.is_nan() {
                    let z = <bf16 as Float>::from_f64(f64::from(y));
                    assert_eq!(z.to_bits(), bf16::from_f32(y).to_bits());
                }
            }
        }
    }

    #[test]
    fn bf16_from_f64_rounds_once() {
        let tie = 1.0 + 1.0 / 256.0;
        let bit = f64::EPSILON;
        let round = |x| <bf16 as Float>::from_f64(x).to_acc();
        assert_eq!(round(tie), 1.0);
        assert_eq!(round(tie + bit), 1.0078125);
        assert_eq!(round(tie - bit), 1.0);
        assert_eq!(round(-(tie + bit)), -1.0078125);
        let upper_tie = 1.0 + 3.0 / 256.0;
        assert_eq!(round(upper_tie), 1.015625);
        assert_eq!(round(upper_tie - bit), 1.0078125);
        assert_eq!(round(f64::MAX), f32::INFINITY);
        assert_eq!(round(1e-300), 0.0);
        assert!(round(f64::NAN).is_nan());
    }
}
