//! How far two ways of computing may be apart: every floor and bound of `verify` and of the proof
//! at the end of a run, and where each comes from.
//!
//! With u the unit roundoff, 1.1e-16 in f64 and 6.0e-8 in f32://!
//! | what | f64 | f32 | where it comes from |
//! |------|-----|-----|---------------------|
//! | [`bound`] on loss, gradients, norm, parameters | 1e-9 | 1e-4 | what `verify` promises: 9e6 u and 1700 u |
//! | [`floor`] under a gradient's size, as a share of the largest | 1e-5 | 1e-2 | what is left of terms that cancel is rounding of its neighbours' size: 90 u and 17 u of the largest then stay below `bound` |
//! | [`floor`] under a loss, in nats | 1e-5 | 1e-2 | a loss is a difference of logits near 1: that of what is known by heart is all rounding |
//! | [`least`]: loss of a step | 1e-9 | 1e-6 | a mean of many token losses, each a few u off: 16 u |
//! | [`least`]: gradients, parameters | 1e-9 | 1e-4 | [`bound`]; a parameter moves by lr times a quotient of two gradients |
//! | [`least`]: norm | 1e-9 | 1e-5 | a root over all elements, in which their errors cancel |
//! | [`ROUNDING`] | 4 | 4 | a layout rounds as often as one device, but elsewhere (the criterion of FlashAttention's tests) |
//! | [`CEILING`] | 100 | 100 | what layout and twin both get wrong must not pass for rounding |

use crate::job::Dtype;

/// The bound on relative differences from the oracle, by type.
#[must_use]
pub fn bound(dtype: Dtype) -> f64 {
    match dtype {
        Dtype::F64 => 1e-9,
        Dtype::F32 => 1e-4,
    }
}

/// Share of the largest gradient below which a parameter's is judged as if it had that size (see
/// [`compare_above`](crate::compare::compare_above)). Also the loss, in nats, below which one is
/// judged as if it were that.
#[must_use]
pub fn floor(dtype: Dtype) -> f64 {
    match dtype {
        Dtype::F64 => 1e-5,
        Dtype::F32 => 1e-2,
    }
}

/// How far a layout may be from the oracle, as a multiple of how far the same arithmetic on one
/// device is: where a gradient all but cancels, one device is off by more than the bound on the
/// type, and a layout that rounds as often but elsewhere is off by as much again. In f64 this
/// never matters.
pub const ROUNDING: f64 = 4.0;

/// And never by more than this multiple of what is allowed anyway.
pub const CEILING: f64 = 100.0;

/// What is always allowed in loss, gradients, norm and parameters of one step of a run.
#[must_use]
pub fn least(dtype: Dtype) -> [f64; 4] {
    match dtype {
        Dtype::F64 => [bound(dtype); 4],
        Dtype::F32 => [1e-6, bound(dtype), 1e-5, bound(dtype)],
    }
}

/// The bounds on one step of a run, where one device is `own` from the oracle: [`ROUNDING`] times
/// that, but at least [`least`] and at most [`CEILING`] times it.
#[must_use]
pub fn bounds(dtype: Dtype, own: [f64; 4]) -> [f64; 4] {
    let mut bounds = least(dtype);
    for (bound, own) in bounds.iter_mut().zip(own) {
        *bound = bound.max((ROUNDING * own).min(CEILING * *bound));
    }
    bounds
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn own_rounding_widens_a_bound_up_to_its_ceiling() {
        let least = least(Dtype::F32);
        let [small, more, far, lost] = bounds(Dtype::F32, [1e-9, 1e-4, 1.0, f64::INFINITY]);
        assert_eq!([small, more], [least[0], 4e-4]);
        assert_eq!([far, lost], [least[2], least[3]].map(|b| CEILING * b));
        assert_eq!(bounds(Dtype::F64, [f64::NAN; 4]), [CEILING * 1e-9; 4]);
    }
}
