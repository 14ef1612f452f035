//! Random data, calls over host slices, and comparison.

use quintet_kernels::{Backend, Data, Float, Gemm, GemmSpec, Tag, Trans};

/// Numbers from a seed (splitmix64): the same on every machine.
pub struct Random(pub u64);

impl Random {
    pub fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    pub fn below(&mut self, n: usize) -> usize {
        (self.bits() % n as u64) as usize
    }

    /// In [-1, 1).
    pub fn unit(&mut self) -> f64 {
        (self.bits() >> 11) as f64 / (1_u64 << 52) as f64 - 1.0
    }

    /// Elements in [-1, 1), as `E` rounds them.
    pub fn vec<E: Float>(&mut self, len: usize) -> Vec<E> {
        (0..len).map(|_| E::from_f64(self.unit())).collect()
    }

    /// Whole numbers from -r to r.
    pub fn integers<E: Float>(&mut self, len: usize, r: usize) -> Vec<E> {
        let one = |rng: &mut Self| rng.below(2 * r + 1) as f64 - r as f64;
        (0..len).map(|_| E::from_f64(one(self))).collect()
    }
}

pub fn wide<E: Float>(x: &[E]) -> Vec<f64> {
    x.iter().map(|x| x.to_f64()).collect()
}

pub fn upload<B: Backend, T: Data>(b: &B, x: &[T]) -> B::Buf<T> {
    b.upload(Tag::Scratch, x).unwrap()
}

pub fn download<B: Backend, T: Data>(b: &B, buf: &B::Buf<T>) -> Vec<T> {
    let view = B::whole(buf);
    let mut host = vec![T::zeroed(); B::len(view)];
    b.download(view, &mut host).unwrap();
    host
}

/// One product from host to host; `c` is what was there before.
pub fn gemm<B: Gemm, I: Float, O: Float<Acc = I::Acc>>(
    dev: &B,
    spec: &GemmSpec,
    a: &[I],
    b: &[I],
    c: &[O],
) -> Vec<O> {
    let (a, b, mut c) = (upload(dev, a), upload(dev, b), upload(dev, c));
    let (a, b) = (B::whole(&a), B::whole(&b));
    dev.gemm(spec, a, b, None, None, B::whole_mut(&mut c))
        .unwrap();
    download(dev, &c)
}

pub const FORMS: [(Trans, Trans); 4] = [
    (Trans::N, Trans::N),
    (Trans::N, Trans::T),
    (Trans::T, Trans::N),
    (Trans::T, Trans::T),
];

/// Fails unless `|got - want| <= bound(i)` everywhere.
pub fn close<E: Float>(what: &str, got: &[E], want: &[f64], bound: impl Fn(usize) -> f64) {
    assert_eq!(got.len(), want.len(), "{what}");
    for (i, (got, want)) in got.iter().zip(want).enumerate() {
        let (got, bound) = (got.to_f64(), bound(i));
        let near = got == *want || (got - want).abs() <= bound;
        assert!(near, "{what}[{i}]: {got} against {want}, bound {bound:e}");
    }
}
