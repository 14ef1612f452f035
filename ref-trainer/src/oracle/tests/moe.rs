//! The mixture of experts of the oracle: differences, and closed forms.

use quintet_parallel_layers::moe::Score;
use quintet_planner::config::MoeConfig;

use super::super::*;
use super::{batch, small};

/// Every rule at least once.
fn configs() -> Vec<ModelConfig> {
    let plain = MoeConfig {
        aux_loss: 0.3,
        z_loss: 0.2,
        ..MoeConfig::new(4, 2, 5)
    };
    let sigmoid = MoeConfig {
        score: Score::Sigmoid,
        scale: 2.5,
        selection_bias: true,
        first_dense: 1,
        ..plain
    };
    [
        plain,
        MoeConfig {
            capacity_factor: Some(0.7),
            shared_ffn: 7,
            ..sigmoid
        },
        MoeConfig {
            normalize: false,
            shared_ffn: 4,
            shared_gate: true,
            ..sigmoid
        },
        MoeConfig {
            normalize: false,
            topk: 1,
            capacity_factor: Some(1.0),
            ..plain
        },
    ]
    .map(|moe| ModelConfig {
        moe: Some(moe),
        ..small(false)
    })
    .to_vec()
}

/// What is descended: the loss and the weighted losses of balance.
fn objective(config: &ModelConfig, params: &Params) -> f64 {
    let done = step_in(config, params, &batch(13), 2).unwrap();
    let moe = config.moe.unwrap();
    done.loss + moe.aux_loss * done.routed.aux + moe.z_loss * done.routed.z
}

#[test]
fn gradients_are_central_differences() {
    for config in configs() {
        let params = init_random(&config, 5);
        let result = step_in(&config, &params, &batch(13), 2).unwrap();
        for (name, shape) in param_shapes(&config) {
            let len = shape.iter().product::<usize>() as u64;
            let picks = quintet_parallel_layers::philox::Stream::new(11, &name);
            for pick in 0..8 {
                let (i, h) = (picks.below(pick, len) as usize, 1e-5);
                let at = |by: f64| {
                    let mut moved = params.clone();
                    moved.get_mut(&name).unwrap()[i] += by;
                    objective(&config, &moved)
                };
                let difference = (at(h) - at(-h)) / (2.0 * h);
                let gradient = result.grads[&name][i];
                assert!(
                    (difference - gradient).abs() <= 1e-8 + 1e-7 * gradient.abs(),
                    "{name}[{i}]: {gradient} by hand, {difference} by difference, {config:?}"
                );
            }
        }
    }
}

/// Experts that are equal, weights that sum to one: who is chosen does not matter.
#[test]
fn equal_experts_are_one_mlp() {
    let dense = small(false);
    let moe = MoeConfig::new(3, 2, dense.ffn);
    let mixed = ModelConfig {
        moe: Some(moe),
        ..dense.clone()
    };
    let params = init_random(&dense, 2);
    let mut same = init_random(&mixed, 2);
    for (name, values) in &params {
        let stacked = name.replace("mlp.", "mlp.experts.");
        let values = if stacked == *name {
            values.clone()
        } else {
            values.repeat(3)
        };
        same.insert(stacked, values);
    }
    let (a, b) = (
        step_in(&dense, &params, &batch(13), 2).unwrap(),
        step_in(&mixed, &same, &batch(13), 2).unwrap(),
    );
    assert!((a.loss - b.loss).abs() < 1e-12);
    for (name, grad) in &a.grads {
        let stacked = name.replace("mlp.", "mlp.experts.");
        let len = grad.len();
        for (i, g) in grad.iter().enumerate() {
            let parts = if stacked == *name { 1 } else { 3 };
            let sum: f64 = (0..parts).map(|e| b.grads[&stacked][e * len + i]).sum();
            assert!((g - sum).abs() < 1e-12, "{name}[{i}]");
        }
    }
}

#[test]
fn statistics_are_those_of_the_whole_microbatch() {
    let config = configs()[1].clone();
    let params = init_random(&config, 5);
    let done = step_in(&config, &params, &batch(13), 2).unwrap();
    let (tokens, moe) = (7 + 5 + 7 + 4, config.moe.unwrap());
    assert_eq!(done.routed.counts[0], [0; 4], "the first layer is dense");
    assert_eq!(done.routed.counts[1].iter().sum::<u64>(), tokens * 2);
    // Room for ceil(12 * 2 * 0.7 / 4) = 5 and ceil(11 * 2 * 0.7 / 4) = 4.
    for (kept, room) in done.routed.kept.iter().zip([5, 4]) {
        for e in 0..4 {
            assert!(kept[1].iter().filter(|k| **k == e).count() <= room);
        }
    }
    let kept = done
        .routed
        .kept
        .iter()
        .flat_map(|m| &m[1])
        .filter(|k| **k >= 0);
    assert_eq!(kept.count() as u64 + done.routed.dropped[1], tokens * 2);
    assert!(done.routed.dropped[1] > 0 && done.routed.margin > 0.0);

    let mut moved = params.clone();
    move_bias(&config, &mut moved, &done.routed).unwrap();
    let name = "model.layers.1.mlp.gate.e_score_correction_bias";
    let mean = tokens as f64 * 2.0 / 4.0;
    for (e, count) in done.routed.counts[1].iter().enumerate() {
        let by = (mean - *count as f64).signum() * moe.bias_update_rate;
        let by = if *count as f64 == mean { 0.0 } else { by };
        assert_eq!(moved[name][e], params[name][e] + by);
    }
}
