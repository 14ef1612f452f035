//! What a collective carries: element types, the operations that fold them, and folding on slices.
//!
//! Every type has an accumulator type. It is the type itself, but for the two 16-bit floats,
//! which are summed in f32 and rounded once, where the sum is stored:
//!
//! ```text
//! f64 -> f64   f32 -> f32   i64, i32, u64, u32, u8, Bool -> themselves
//! bf16 -> f32 \
//! f16  -> f32 /  widened when first touched, narrowed once at the end
//! ```
//!
//! The methods are `#[inline]`: folds are compiled where they are used, in other crates too.
//!
//! Integers wrap. A NaN wins in `Min` and `Max`; of two equal values the left one is kept, so
//! that `-0.0` and `0.0` come out the same wherever the same fold order is used.

use core::fmt;

use half::{bf16, f16};

/// The element types a message may carry.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum DType {
    /// IEEE binary64.
    F64,
    /// IEEE binary32.
    F32,
    /// bfloat16: 8 bits of exponent, 7 of fraction.
    Bf16,
    /// IEEE binary16.
    F16,
    /// Signed 32-bit integer.
    I32,
    /// Signed 64-bit integer.
    I64,
    /// Unsigned byte.
    U8,
    /// Unsigned 32-bit integer.
    U32,
    /// Unsigned 64-bit integer.
    U64,
    /// A truth value, a byte of 0 or 1.
    Bool,
}

impl DType {
    /// All of them.
    pub const ALL: [Self; 10] = [
        Self::F64,
        Self::F32,
        Self::Bf16,
        Self::F16,
        Self::I32,
        Self::I64,
        Self::U8,
        Self::U32,
        Self::U64,
        Self::Bool,
    ];

    /// Bytes of one element.
    #[must_use]
    pub const fn bytes(self) -> usize {
        match self {
            Self::F64 | Self::I64 | Self::U64 => 8,
            Self::F32 | Self::I32 | Self::U32 => 4,
            Self::Bf16 | Self::F16 => 2,
            Self::U8 | Self::Bool => 1,
        }
    }

    /// The type in which elements of this type are summed.
    #[must_use]
    pub const fn accumulator(self) -> Self {
        match self {
            Self::Bf16 | Self::F16 => Self::F32,
            other => other,
        }
    }

    /// The lower-case name: `f32`, `bf16`, ...
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::F64 => "f64",
            Self::F32 => "f32",
            Self::Bf16 => "bf16",
            Self::F16 => "f16",
            Self::I32 => "i32",
            Self::I64 => "i64",
            Self::U8 => "u8",
            Self::U32 => "u32",
            Self::U64 => "u64",
            Self::Bool => "bool",
        }
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// How the contributions of the ranks become one value.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum ReduceOp {
    /// The sum; integers wrap.
    Sum,
    /// The product; integers wrap.
    Prod,
    /// The least; a NaN wins.
    Min,
    /// The greatest; a NaN wins.
    Max,
    /// The sum, divided once by the number of ranks. Integers divide towards zero.
    Avg,
}

impl ReduceOp {
    /// The lower-case name: `sum`, `avg`, ...
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Sum => "sum",
            Self::Prod => "prod",
            Self::Min => "min",
            Self::Max => "max",
            Self::Avg => "avg",
        }
    }
}

impl fmt::Display for ReduceOp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// A type that can travel and be folded.
///
/// Implemented for `f64 f32 bf16 f16 i32 i64 u8 u32 u64` and [`Bool`].
pub trait Element: bytemuck::Pod + Send + Sync + PartialEq + fmt::Debug + 'static {
    /// The type as a value.
    const DTYPE: DType;

    /// What sums of this type are held in.
    type Wide: Element<Wide = Self::Wide>;

    /// This element as an accumulator; exact.
    fn widen(self) -> Self::Wide;
    /// An accumulator rounded to this type, to nearest even.
    fn narrow(acc: Self::Wide) -> Self;
    /// `self + other`; integers wrap.
    fn add(self, other: Self) -> Self;
    /// `self * other`; integers wrap.
    fn mul(self, other: Self) -> Self;
    /// The lesser; a NaN wins, of equals the left.
    fn lesser(self, other: Self) -> Self;
    /// The greater; a NaN wins, of equals the left.
    fn greater(self, other: Self) -> Self;
    /// `self / count`; integers towards zero.
    fn divided(self, count: usize) -> Self;
}

/// `acc[i] = acc[i] op x[i]`, the accumulator on the left.
///
/// The slices are zipped: what is longer in one is left alone.
pub fn fold<E: Element>(op: ReduceOp, acc: &mut [E::Wide], x: &[E]) {
    let pairs = acc.iter_mut().zip(x);
    match op {
        ReduceOp::Sum | ReduceOp::Avg => pairs.for_each(|(a, x)| *a = a.add(x.widen())),
        ReduceOp::Prod => pairs.for_each(|(a, x)| *a = a.mul(x.widen())),
        ReduceOp::Min => pairs.for_each(|(a, x)| *a = a.lesser(x.widen())),
        ReduceOp::Max => pairs.for_each(|(a, x)| *a = a.greater(x.widen())),
    }
}

/// `acc[i] = x[i]`, widened.
pub fn widen<E: Element>(acc: &mut [E::Wide], x: &[E]) {
    for (a, x) in acc.iter_mut().zip(x) {
        *a = x.widen();
    }
}

/// `out[i] = acc[i]`, divided by `world` where `op` is [`ReduceOp::Avg`], then rounded once.
pub fn finish<E: Element>(op: ReduceOp, world: usize, out: &mut [E], acc: &[E::Wide]) {
    let pairs = out.iter_mut().zip(acc);
    if op == ReduceOp::Avg {
        pairs.for_each(|(o, a)| *o = E::narrow(a.divided(world)));
    } else {
        pairs.for_each(|(o, a)| *o = E::narrow(*a));
    }
}

/// Elements folded at a time: the accumulator then stays in the first-level cache.
const BLOCK: usize = 512;

/// The left fold in rank order: `part(k, at, len)` shows elements `at..at + len` of rank k.
///
/// `out` is called once per block, when every contribution to it has been read, so it may
/// overwrite what `part` showed of that block. Accumulates in [`Element::Wide`]; rounds once.
pub fn fold_ranks<E: Element, C>(
    op: ReduceOp,
    world: usize,
    len: usize,
    ctx: &mut C,
    part: impl for<'a> Fn(&'a C, usize, usize, usize) -> &'a [E],
    out: impl for<'a> Fn(&'a mut C, usize, usize) -> &'a mut [E],
) {
    let mut acc = [<E::Wide as bytemuck::Zeroable>::zeroed(); BLOCK];
    let mut at = 0;
    while at < len {
        let n = BLOCK.min(len - at);
        let acc = &mut acc[..n];
        widen(acc, part(ctx, 0, at, n));
        for rank in 1..world {
            fold(op, acc, part(ctx, rank, at, n));
        }
        finish(op, world, out(ctx, at, n), acc);
        at += n;
    }
}

macro_rules! float {
    ($t:ty, $dtype:ident) => {
        impl Element for $t {
            const DTYPE: DType = DType::$dtype;
            type Wide = $t;
            #[inline]
            fn widen(self) -> $t {
                self
            }
            #[inline]
            fn narrow(acc: $t) -> $t {
                acc
            }
            #[inline]
            fn add(self, other: $t) -> $t {
                self + other
            }
            #[inline]
            fn mul(self, other: $t) -> $t {
                self * other
            }
            #[inline]
            fn lesser(self, other: $t) -> $t {
                // A NaN on the left fails both tests and stays.
                if other < self || other.is_nan() && !self.is_nan() {
                    other
                } else {
                    self
                }
            }
            #[inline]
            fn greater(self, other: $t) -> $t {
                if other > self || other.is_nan() && !self.is_nan() {
                    other
                } else {
                    self
                }
            }
            #[inline]
            fn divided(self, count: usize) -> $t {
                self / count as $t
            }
        }
    };
}

macro_rules! half {
    ($t:ty, $dtype:ident) => {
        impl Element for $t {
            const DTYPE: DType = DType::$dtype;
            type Wide = f32;
            #[inline]
            fn widen(self) -> f32 {
                self.to_f32()
            }
            #[inline]
            fn narrow(acc: f32) -> $t {
                <$t>::from_f32(acc)
            }
            #[inline]
            fn add(self, other: $t) -> $t {
                Self::narrow(self.widen() + other.widen())
            }
            #[inline]
            fn mul(self, other: $t) -> $t {
                Self::narrow(self.widen() * other.widen())
            }
            #[inline]
            fn lesser(self, other: $t) -> $t {
                Self::narrow(self.widen().lesser(other.widen()))
            }
            #[inline]
            fn greater(self, other: $t) -> $t {
                Self::narrow(self.widen().greater(other.widen()))
            }
            #[inline]
            fn divided(self, count: usize) -> $t {
                Self::narrow(self.widen() / count as f32)
            }
        }
    };
}

macro_rules! integer {
    ($t:ty, $dtype:ident) => {
        impl Element for $t {
            const DTYPE: DType = DType::$dtype;
            type Wide = $t;
            #[inline]
            fn widen(self) -> $t {
                self
            }
            #[inline]
            fn narrow(acc: $t) -> $t {
                acc
            }
            #[inline]
            fn add(self, other: $t) -> $t {
                self.wrapping_add(other)
            }
            #[inline]
            fn mul(self, other: $t) -> $t {
                self.wrapping_mul(other)
            }
            #[inline]
            fn lesser(self, other: $t) -> $t {
                self.min(other)
            }
            #[inline]
            fn greater(self, other: $t) -> $t {
                self.max(other)
            }
            #[inline]
            fn divided(self, count: usize) -> $t {
                // Through i128: a world may be larger than the element's type can say.
                (i128::from(self) / (count as i128).max(1)) as $t
            }
        }
    };
}

float!(f64, F64);
float!(f32, F32);
half!(bf16, Bf16);
half!(f16, F16);
integer!(i32, I32);
integer!(i64, I64);
integer!(u8, U8);
integer!(u32, U32);
integer!(u64, U64);

/// A truth value that may travel: a `bool` may not, for bytes that came from elsewhere need not be one.
///
/// Sum and Max are "any", Prod and Min "all"; Avg is as Sum, for truths are not counted.
///
/// ```
/// use quintet_collectives::{ReduceOp, World, element::Bool};
/// let found = World::run(3, |comm| {
///     let mut found = [Bool::from(comm.rank() == 1)];
///     comm.all_reduce(&mut found, ReduceOp::Max)?;
///     Ok(bool::from(found[0]))
/// })?;
/// assert_eq!(found, [true; 3]);
/// # Ok::<(), quintet_collectives::Error>(())
/// ```
#[derive(Clone, Copy, Default, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(transparent)]
pub struct Bool(u8);

impl From<bool> for Bool {
    #[inline]
    fn from(value: bool) -> Self {
        Self(u8::from(value))
    }
}

impl From<Bool> for bool {
    #[inline]
    fn from(value: Bool) -> Self {
        value.0 != 0
    }
}

impl PartialEq for Bool {
    fn eq(&self, other: &Self) -> bool {
        bool::from(*self) == bool::from(*other)
    }
}

impl fmt::Debug for Bool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        bool::from(*self).fmt(f)
    }
}

impl Element for Bool {
    const DTYPE: DType = DType::Bool;
    type Wide = Self;
    #[inline]
    fn widen(self) -> Self {
        Self::from(bool::from(self))
    }
    #[inline]
    fn narrow(acc: Self) -> Self {
        acc
    }
    #[inline]
    fn add(self, other: Self) -> Self {
        Self::from(self.0 | other.0 != 0)
    }
    #[inline]
    fn mul(self, other: Self) -> Self {
        Self::from(self.0 != 0 && other.0 != 0)
    }
    #[inline]
    fn lesser(self, other: Self) -> Self {
        self.mul(other)
    }
    #[inline]
    fn greater(self, other: Self) -> Self {
        self.add(other)
    }
    #[inline]
    fn divided(self, _: usize) -> Self {
        self
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nan_wins_on_either_side() {
        assert!(1.0f32.lesser(f32::NAN).is_nan() && f32::NAN.lesser(1.0).is_nan());
        assert!(1.0f64.greater(f64::NAN).is_nan() && f64::NAN.greater(1.0).is_nan());
        assert!(bf16::ONE.greater(bf16::NAN).is_nan());
        assert_eq!(0.0f32.lesser(-0.0).to_bits(), 0);
    }

    #[test]
    fn integers_wrap_and_average_towards_zero() {
        let mut acc = [250u8, i8::MAX as u8];
        fold(ReduceOp::Sum, &mut acc, &[10u8, 1]);
        assert_eq!(acc, [4, 128]);
        assert_eq!((-7i32).divided(2), -3);
        assert_eq!(200u8.divided(300), 0);
    }

    #[test]
    fn truths_are_folded_as_truths_whatever_their_byte() {
        let odd: Bool = bytemuck::cast(4u8);
        let (yes, no) = (Bool::from(true), Bool::from(false));
        assert_eq!(odd, yes);
        assert_eq!(bytemuck::cast::<Bool, u8>(odd.widen()), 1);
        for (op, both, one) in [
            (ReduceOp::Sum, true, true),
            (ReduceOp::Max, true, true),
            (ReduceOp::Avg, true, true),
            (ReduceOp::Prod, true, false),
            (ReduceOp::Min, true, false),
        ] {
            let mut acc = [yes, yes, no, no];
            fold(op, &mut acc, &[odd, no, odd, no]);
            let acc = acc.map(bool::from);
            assert_eq!(acc, [both, one, one, false], "{op}");
        }
    }

    #[test]
    fn unsigned_integers_compare_as_such() {
        assert_eq!(u64::MAX.greater(1), u64::MAX);
        assert_eq!(u32::MAX.add(2), 1);
        assert_eq!(u64::MAX.divided(2), u64::MAX / 2);
    }

    #[test]
    fn sixteen_bits_round_once() {
        // In bf16 256 + 1 is 256 again; in f32 the ones add up first.
        let parts = [
            [bf16::from_f32(256.0)],
            [bf16::ONE],
            [bf16::ONE],
            [bf16::ONE],
        ];
        let mut out = [bf16::ZERO];
        let mut ctx = (&parts, &mut out);
        fold_ranks(
            ReduceOp::Sum,
            4,
            1,
            &mut ctx,
            |c, k, at, n| &c.0[k][at..at + n],
            |c, at, n| &mut c.1[at..at + n],
        );
        assert_eq!(out[0].to_f32(), 260.0);
    }
}
