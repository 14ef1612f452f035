//! Random inputs, the way to a device and back, and comparisons.

use quintet_kernels::{Backend, Data, Float, Tag};

/// A small counter-based generator (splitmix64).
pub struct Draw(u64);

impl Draw {
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    pub fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let x = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        x ^ (x >> 31)
    }

    /// A number in `0..n`.
    pub fn below(&mut self, n: usize) -> usize {
        (self.bits() % n as u64) as usize
    }

    /// A number in [-1, 1).
    pub fn unit(&mut self) -> f64 {
        (self.bits() >> 11) as f64 / (1u64 << 52) as f64 - 1.0
    }

    /// `n` numbers in [-scale, scale) that `E` holds.
    pub fn vec<E: Float>(&mut self, n: usize, scale: f64) -> Vec<f64> {
        let mut draw = || E::from_f64(scale * self.unit()).to_f64();
        (0..n).map(|_| draw()).collect()
    }

    /// `n` whole numbers in `-limit..=limit`.
    pub fn whole(&mut self, n: usize, limit: usize) -> Vec<f64> {
        let mut draw = || self.below(2 * limit + 1) as f64 - limit as f64;
        (0..n).map(|_| draw()).collect()
    }
}

/// Uploads numbers as `E`s.
pub fn up<B: Backend, E: Float>(device: &B, x: &[f64]) -> B::Buf<E> {
    let host: Vec<E> = x.iter().map(|&x| E::from_f64(x)).collect();
    up_raw(device, &host)
}

pub fn up_raw<B: Backend, T: Data>(device: &B, x: &[T]) -> B::Buf<T> {
    device.upload(Tag::Scratch, x).unwrap()
}

/// An output buffer. It starts full of NaN, so that what is not written shows.
pub fn unset<B: Backend, E: Float>(device: &B, len: usize) -> B::Buf<E> {
    up(device, &vec![f64::NAN; len])
}

pub fn down<B: Backend, E: Float>(device: &B, buf: &B::Buf<E>) -> Vec<f64> {
    down_raw::<B, E>(device, buf)
        .into_iter()
        .map(Float::to_f64)
        .collect()
}

pub fn down_raw<B: Backend, T: Data>(device: &B, buf: &B::Buf<T>) -> Vec<T> {
    let view = B::whole(buf);
    let mut host = vec![T::zeroed(); B::len(view)];
    device.download(view, &mut host).unwrap();
    host
}

/// Roundoff of the accumulation type of `E`.
pub fn acc<E: Float>() -> f64 {
    <E::Acc as Float>::UNIT_ROUNDOFF
}

/// Asserts `|got - want| <= bound(i)` for each element.
pub fn close(what: &str, got: &[f64], want: &[f64], bound: impl Fn(usize) -> f64) {
    assert_eq!(got.len(), want.len(), "{what}: lengths");
    for (i, (g, w)) in got.iter().zip(want).enumerate() {
        let (off, bound) = ((g - w).abs(), bound(i));
        assert!(
            off <= bound,
            "{what}[{i}]: {g} for {w}, off by {off:e} > {bound:e}"
        );
    }
}

/// Asserts that `gradient` is the slope of `f` at `x`, by central differences.
pub fn slope(what: &str, x: &[f64], gradient: &[f64], f: impl Fn(&[f64]) -> f64) {
    let step = 1e-5;
    for i in 0..x.len() {
        let at = |offset| {
            let mut x = x.to_vec();
            x[i] += offset;
            f(&x)
        };
        let want = (at(step) - at(-step)) / (2.0 * step);
        let off = (gradient[i] - want).abs();
        let bound = 1e-8 * (1.0 + want.abs());
        assert!(off <= bound, "{what}[{i}]: {} for {want}", gradient[i]);
    }
}

pub fn dot(x: &[f64], y: &[f64]) -> f64 {
    x.iter().zip(y).map(|(x, y)| x * y).sum()
}
