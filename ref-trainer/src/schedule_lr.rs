//! The learning rate of a step.
//!
//! ```text
//! lr      |    /‾‾‾\__
//!         |   /       \__        warm-up: lr * step / warmup
//! min_lr  |  /           \____   decay:   reaches min_lr at the last step
//!         +--+----------------+-> step, from 1
//!          warmup           steps
//! ```

use crate::job::{Decay, OptimizerOptions};

/// Learning rate of step `step` (from 1) in a run of `steps`.
///
/// ```
/// use quintet_ref_trainer::{job::OptimizerOptions, schedule_lr::learning_rate};
/// let options = OptimizerOptions { lr: 1.0, min_lr: 0.1, warmup: 4, ..Default::default() };
/// assert_eq!(learning_rate(1, 100, &options), 0.25);
/// assert_eq!(learning_rate(4, 100, &options), 1.0);
/// assert_eq!(learning_rate(100, 100, &options), 0.1);
/// ```
#[must_use]
pub fn learning_rate(step: u64, steps: u64, options: &OptimizerOptions) -> f64 {
    let OptimizerOptions {
        lr,
        min_lr,
        warmup,
        decay,
        ..
    } = *options;
    if step < warmup {
        return lr * step as f64 / warmup as f64;
    }
    if decay == Decay::Constant {
        return lr;
    }
    if step >= steps {
        return min_lr;
    }
    // warmup <= step < steps, so the divisor is at least 1.
    let done = (step - warmup) as f64 / (steps - warmup) as f64;
    let left = match decay {
        Decay::Constant => 1.0,
        Decay::Linear => 1.0 - done,
        Decay::Cosine => 0.5 * (1.0 + (std::f64::consts::PI * done).cos()),
    };
    min_lr + (lr - min_lr) * left
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn options(decay: Decay, warmup: u64) -> OptimizerOptions {
        OptimizerOptions {
            lr: 2.0,
            min_lr: 0.5,
            decay,
            warmup,
            ..OptimizerOptions::default()
        }
    }

    #[test]
    fn known_points() {
        let at = |decay, step| learning_rate(step, 110, &options(decay, 10));
        for decay in [Decay::Constant, Decay::Linear, Decay::Cosine] {
            assert_eq!(at(decay, 1), 0.2);
            assert_eq!(at(decay, 10), 2.0);
        }
        assert_eq!(at(Decay::Constant, 110), 2.0);
        assert_eq!(at(Decay::Linear, 60), 1.25);
        assert_eq!(at(Decay::Linear, 110), 0.5);
        assert!((at(Decay::Cosine, 60) - 1.25).abs() < 1e-15);
        assert!((at(Decay::Cosine, 35) - (0.5 + 1.5 * 0.853_553_390_593_273_7)).abs() < 1e-15);
        assert_eq!(at(Decay::Cosine, 110), 0.5);
    }

    #[test]
    fn a_run_shorter_than_its_warm_up_only_rises() {
        let o = options(Decay::Cosine, 100);
        let rates: Vec<f64> = (1..=5).map(|s| learning_rate(s, 5, &o)).collect();
        assert!(
            rates.windows(2).all(|w| w[0] < w[1]) && rates[4] == 0.1,
            "{rates:?}"
        );
        // A warm-up as long as the run has nothing left to fall: the last step takes min_lr.
        assert_eq!(learning_rate(5, 5, &options(Decay::Linear, 5)), 0.5);
    }

    proptest! {
        #[test]
        fn rises_then_falls_within_its_bounds(warmup in 0u64..50, steps in 1u64..200, linear in any::<bool>()) {
            let o = options(if linear { Decay::Linear } else { Decay::Cosine }, warmup);
            let rates: Vec<f64> = (1..=steps).map(|s| learning_rate(s, steps, &o)).collect();
            for (i, w) in rates.windows(2).enumerate() {
                let step = i as u64 + 1;
                if step < warmup {
                    prop_assert!(w[1] > w[0] || step + 1 == steps);
                } else {
                    prop_assert!(w[1] <= w[0]);
                }
            }
            prop_assert!(rates.iter().all(|&r| r > 0.0 && r <= 2.0));
        }
    }
}
