//! Random numbers by counter: Philox4x32-10 (Salmon et al., SC'11).
//!
//! A number is a function of (seed, name, index) and of nothing else, so any rank can draw any
//! element of any tensor, and a weight is the same under every layout.

use libm::{cos, log, sqrt};
pub use quintet_kernels::philox::philox;

/// The numbers of one named thing under one seed, by index.
///
/// ```
/// use quintet_parallel_layers::philox::Stream;
/// let w = Stream::new(1, "model.norm.weight");
/// assert_eq!(w.normal(7), Stream::new(1, "model.norm.weight").normal(7));
/// assert!((0.0..1.0).contains(&w.uniform(3)));
/// ```
#[derive(Debug, Clone, Copy)]
pub struct Stream {
    key: [u32; 2],
    name: [u32; 2],
}

impl Stream {
    /// The stream of `name` under `seed`.
    #[must_use]
    pub fn new(seed: u64, name: &str) -> Self {
        Self {
            key: halves(seed),
            name: halves(fnv1a(name)),
        }
    }

    /// Four random words.
    #[must_use]
    pub fn words(&self, index: u64) -> [u32; 4] {
        let [low, high] = halves(index);
        philox([low, high, self.name[0], self.name[1]], self.key)
    }

    /// Uniform in [0, 1), with 53 random bits.
    #[must_use]
    pub fn uniform(&self, index: u64) -> f64 {
        let [a, b, ..] = self.words(index);
        unit(a, b)
    }

    /// Normal with mean 0 and variance 1 (Box and Muller).
    #[must_use]
    pub fn normal(&self, index: u64) -> f64 {
        let [a, b, c, d] = self.words(index);
        let radius = sqrt(-2.0 * log(1.0 - unit(a, b)));
        radius * cos(2.0 * core::f64::consts::PI * unit(c, d))
    }

    /// Uniform among `0..bound` (0 where `bound` is 0); the bias is below 2^-64 times `bound`.
    #[must_use]
    pub fn below(&self, index: u64, bound: u64) -> u64 {
        let [a, b, ..] = self.words(index);
        let word = u64::from(a) << 32 | u64::from(b);
        ((u128::from(word) * u128::from(bound)) >> 64) as u64
    }
}

fn halves(x: u64) -> [u32; 2] {
    [x as u32, (x >> 32) as u32]
}

fn unit(a: u32, b: u32) -> f64 {
    ((u64::from(a) << 32 | u64::from(b)) >> 11) as f64 / (1u64 << 53) as f64
}

/// FNV-1a, 64 bits.
fn fnv1a(name: &str) -> u64 {
    name.bytes().fold(0xCBF2_9CE4_8422_2325, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01B3)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn normal_has_mean_zero_and_variance_one() {
        let stream = Stream::new(7, "x");
        let n = 20_000;
        let draws = || (0..n).map(|i| stream.normal(i));
        let mean = draws().sum::<f64>() / n as f64;
        let variance = draws().map(|x| x * x).sum::<f64>() / n as f64;
        assert!(
            mean.abs() < 0.03 && (variance - 1.0).abs() < 0.05,
            "{mean} {variance}"
        );
    }
}
