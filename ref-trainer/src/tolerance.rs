//! How far two ways of computing may be apart: every floor and bound of `verify`, of the proof at the
//! end of a run and of the tests, and where each comes from.
//!
//! With u the unit roundoff, 1.1e-16 in f64, 6.0e-8 in f32 and 3.9e-3 in bf16:
//!
//! | what | f64 | f32 | bf16 | where it comes from |
//! |------|-----|-----|------|---------------------|
//! | [`bounds`] on loss, gradients, norm, parameters, losses of balance | 1e-9 | derived | derived | f64: what `verify` promises, 9e6 u. Else [`derived`] |
//! | [`floor`] under a gradient's size, as a share of the largest | 1e-5 | 1e-2 | 1e-1 | what is left of terms that cancel is rounding of its neighbours' size; below this a parameter's gradient is one of them |
//! | [`floor`] under a loss, in nats | 1e-5 | 1e-2 | 1e-1 | a loss is a difference of logits near 1: that of what is known by heart is all rounding |
//! | [`tie`]: scores of experts that rounding may exchange | never | u sqrt(10 L n) | u sqrt(10 L) | roundings on the way through L blocks to a router, n the terms of a sum; there the oracle chooses what the layout chose, and how often is told |
//! | [`ceiling`] of what is derived | 1e-5 | 1e-1 | 0.5 | whatever explains more, the draw decides nothing |
//!
//! **The derived bound** is a standard deviation, so to say, times [`DEVIATIONS`]. Its first part is
//! the *condition*: how far the oracle moves where each value on the way from parameters to gradients
//! is rounded once, at random, by up to u ([`Rounding`](crate::oracle::Rounding)). Terms that cancel
//! leave there what they leave on a machine, so that there is no gradient whose condition this misses;
//! cancellation in the backward of a softmax, depth and the number of steps are all in it. Its second
//! part is the *way*: in how many roundings a value comes about, as a multiple of that one. K
//! roundings, as good as independent, have the effect of sqrt(K), not of K (Higham and Mary 2019,
//! theorem 2.4). In f32 and f64 a value is a sum, and K half the terms of the longest sum, for the
//! squares of the sums on the way to it, which are what is rounded, are half of its own on average; in
//! bf16 sums are taken in f32, and a value is rounded when it is stored, and over tp once more as a
//! part of a sum.

use serde::Serialize;

use crate::job::{Dtype, Job};

/// A number for each quantity that is compared: a distance, or its bound.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize)]
pub struct Each {
    /// Of the loss.
    pub loss: f64,
    /// Of the gradient that is furthest off.
    pub grads: f64,
    /// Of the gradient's norm.
    pub norm: f64,
    /// Of the parameter that is furthest off.
    pub params: f64,
    /// Of the losses of balance.
    pub aux: f64,
}

impl Each {
    /// The same for all.
    #[must_use]
    pub const fn all(x: f64) -> Self {
        Self {
            loss: x,
            grads: x,
            norm: x,
            params: x,
            aux: x,
        }
    }

    /// One by one.
    #[must_use]
    pub fn zip(self, other: Self, f: impl Fn(f64, f64) -> f64) -> Self {
        Self {
            loss: f(self.loss, other.loss),
            grads: f(self.grads, other.grads),
            norm: f(self.norm, other.norm),
            params: f(self.params, other.params),
            aux: f(self.aux, other.aux),
        }
    }

    /// The larger of each; what is not a number stays.
    #[must_use]
    pub fn max(self, other: Self) -> Self {
        self.zip(other, |a, b| if a.is_nan() || a > b { a } else { b })
    }

    /// The largest.
    #[must_use]
    pub fn largest(self) -> f64 {
        let all = [self.loss, self.grads, self.norm, self.params, self.aux];
        all.into_iter().fold(0.0, f64::max)
    }

    /// Whether none exceeds its bound.
    #[must_use]
    pub fn within(self, bounds: &Self) -> bool {
        let beyond = self.zip(*bounds, |x, bound| if x <= bound { 0.0 } else { 1.0 });
        beyond.largest() == 0.0
    }
}

/// The bounds on relative differences from the oracle, where roundings take that as far as
/// `scatter` says.
#[must_use]
pub fn bounds(job: &Job, scatter: Each) -> Each {
    match job.dtype {
        Dtype::F64 => Each::all(PROMISED),
        Dtype::F32 | Dtype::Bf16 => derived(job, scatter),
    }
}

/// What `verify` promises in f64.
pub const PROMISED: f64 = 1e-9;

/// [`DEVIATIONS`] times the way times the condition, up to the [`ceiling`]; and at least what the
/// last sum, which makes what is compared, may be off by.
#[must_use]
pub fn derived(job: &Job, scatter: Each) -> Each {
    let last = in_sums(job) * units(job.dtype).1;
    scatter.zip(Each::all(ceiling(job.dtype)), |x, most| {
        (DEVIATIONS * (way(job) * x).max(last)).min(most)
    })
}

/// Standard deviations that a draw may be off.
pub const DEVIATIONS: f64 = 4.0;

/// Draws of the roundings from which the condition of a single number, a loss, is taken. The largest
/// of n is small by luck: that one more is beyond [`DEVIATIONS`] times the largest of n others has a
/// chance of 1.1e-2 for n = 3 and of 1.3e-6 for n = 16, where all are normally distributed.
pub const SEEDS: u64 = 16;

/// The same of tensors, which have values enough for the largest of them not to be a matter of luck.
pub const SEEDS_OF_TENSORS: u64 = 3;

/// What no draw may be off by, whatever explains it.
#[must_use]
pub fn ceiling(dtype: Dtype) -> f64 {
    match dtype {
        Dtype::F64 => 1e-5,
        Dtype::F32 => 1e-1,
        Dtype::Bf16 => 0.5,
    }
}

/// The unit roundoff of what is stored, and that of what sums are taken in.
#[must_use]
pub fn units(dtype: Dtype) -> (f64, f64) {
    let (f64s, f32s) = (f64::EPSILON / 2.0, f64::from(f32::EPSILON) / 2.0);
    match dtype {
        Dtype::F64 => (f64s, f64s),
        Dtype::F32 => (f32s, f32s),
        Dtype::Bf16 => (1.0 / 256.0, f32s),
    }
}

/// The root of the number of roundings in which a value comes about.
#[must_use]
pub fn way(job: &Job) -> f64 {
    match job.dtype {
        Dtype::Bf16 => f64::sqrt(if job.layout.tp > 1 { 2.0 } else { 1.0 }),
        Dtype::F32 | Dtype::F64 => in_sums(job),
    }
}

/// The root of the number of roundings of the longest sum, as a multiple of its own.
#[must_use]
pub fn in_sums(job: &Job) -> f64 {
    (longest_sum(job) as f64 / 2.0).sqrt()
}

/// Terms of the longest sum of a step: over a width, over keys, or over the tokens of the batch in
/// the gradient of a weight.
#[must_use]
pub fn longest_sum(job: &Job) -> usize {
    let (m, b) = (&job.model, &job.batch);
    let (heads, tokens) = (m.heads * m.head_dim, b.seq * b.global_batch);
    let moe = m.moe.map_or(0, |moe| moe.ffn.max(moe.shared_ffn));
    [m.hidden, m.ffn, heads, m.vocab, tokens, moe]
        .into_iter()
        .fold(1, usize::max)
}

/// How far apart the scores of two experts may be that rounding may exchange: as many roundings as a
/// value has on the way to the last router, ten in a block and those of the sums in them, each of a
/// score of order 1.
#[must_use]
pub fn tie(job: &Job) -> f64 {
    let blocks = (10 * job.model.layers) as f64;
    // A score moves by at most a quarter of what its logit does.
    0.25 * DEVIATIONS * units(job.dtype).0 * blocks.sqrt() * way(job)
}

/// Share of the largest gradient below which a parameter's is judged as if it had that size (see
/// [`compare_above`](crate::compare::compare_above)). Also the loss, in nats, below which one is
/// judged as if it were that.
#[must_use]
pub fn floor(dtype: Dtype) -> f64 {
    match dtype {
        Dtype::F64 => 1e-5,
        Dtype::F32 => 1e-2,
        Dtype::Bf16 => 1e-1,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_derived_lies_between_the_last_sum_and_the_ceiling() {
        let mut job = Job::verify();
        assert_eq!(bounds(&job, Each::all(1.0)), Each::all(PROMISED));
        job.dtype = Dtype::F32;
        let way = (longest_sum(&job) as f64 / 2.0).sqrt();
        assert_eq!(bounds(&job, Each::all(1e-7)).loss, 4.0 * way * 1e-7);
        assert_eq!(bounds(&job, Each::all(1.0)), Each::all(1e-1));
        assert_eq!(
            bounds(&job, Each::default()).norm,
            4.0 * way * units(Dtype::F32).1
        );
        job.dtype = Dtype::Bf16;
        assert_eq!(bounds(&job, Each::all(f64::INFINITY)), Each::all(0.5));
    }

    #[test]
    fn nothing_that_is_no_number_is_within() {
        let bounds = Each::all(1e-3);
        assert!(Each::all(1e-3).within(&bounds) && !Each::all(2e-3).within(&bounds));
        for x in [f64::NAN, f64::INFINITY] {
            let one = Each {
                norm: x,
                ..Each::default()
            };
            assert!(!one.within(&bounds), "{x}");
            assert!(!Each::all(1.0).max(one).within(&bounds));
        }
    }
}
