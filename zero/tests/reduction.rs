//! Sums and the norm against a serial f64 computation, over meshes with every kind of parameter.
#![allow(clippy::unwrap_used)]

mod common;

use common::{ADAMW, ALL, Model, Rank, degrees};
use proptest::prelude::*;
use quintet_collectives::{Degrees, World};
use quintet_zero::{Error, ZeroStage, clip_factor, gather_grads, gather_params, grad_norm};

fn check(model: Model, stage: ZeroStage) {
    let full = model.full_grad(1);
    let norm = full.values().flatten().map(|g| g * g).sum::<f64>().sqrt();
    let world = World::new(model.mesh().world()).unwrap();
    let norms = world.go(|comm| {
        let mut rank = Rank::<f32>::new(model, comm, stage, ADAMW)?;
        rank.backward(1, 1.0)?;
        let grads = gather_grads(&rank.device, &[&rank.sync], &rank.groups)?;
        assert_eq!(grads, full, "{model:?} {stage:?}");
        grad_norm(&rank.device, &[&rank.sync], &rank.groups)
    });
    for got in norms.unwrap() {
        assert!(
            (got - norm).abs() <= 1e-12 * norm,
            "{got} against {norm}: {model:?}"
        );
    }
}

#[test]
fn sums_and_norm_are_those_of_one_device() {
    for stage in ALL {
        check(Model::new(degrees(1, 1, 1, 1, 1)), stage);
        check(Model::new(degrees(1, 2, 1, 4, 2)), stage);
        check(Model::new(degrees(2, 2, 1, 2, 4)), stage);
        check(
            Model {
                vocab: 3,
                ..Model::new(degrees(3, 1, 2, 1, 1))
            },
            stage,
        );
    }
}

/// A number of neighbours that is a block of dp x cp.
fn within_of(degrees: Degrees, pick: usize) -> usize {
    let Degrees { dp, cp, .. } = degrees;
    let fits =
        |h: &usize| (dp * cp).is_multiple_of(*h) && (h.is_multiple_of(cp) || cp.is_multiple_of(*h));
    let all: Vec<usize> = (1..=dp * cp).filter(fits).collect();
    all[pick % all.len()]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, failure_persistence: None, ..Default::default() })]
    #[test]
    fn on_random_meshes(
        (pp, dp, cp, tp) in (1..=3_usize, 1..=3_usize, 1..=2_usize, 1..=4_usize),
        (ep, etp) in (1..=4_usize, 1..=2_usize),
        (hidden, vocab, blocks) in (1..=4_usize, 1..=6_usize, 1..=4_usize),
        (bucket_bytes, tie, zero) in (0..400_usize, any::<bool>(), 0..4_usize),
        (microbatches, within) in (1..=4_u64, (any::<bool>(), 0..8_usize)),
    ) {
        let fits = pp * dp * cp * tp <= 12 && (dp * cp * tp).is_multiple_of(ep * etp);
        let degrees = if fits { Degrees { pp, dp, cp, tp, ep, etp } } else { degrees(pp, dp, 1, 1, 1) };
        let within = within.0.then(|| within_of(degrees, within.1));
        let model = Model { degrees, hidden, vocab, blocks, bucket_bytes, tie, within, microbatches };
        check(model, ALL[zero]);
    }
}

#[test]
fn one_bad_element_is_named_alike_on_all_ranks() {
    let model = Model::new(degrees(2, 2, 1, 2, 1));
    for (scale, want) in [(f64::NAN, true), (1e200, false)] {
        let errors = World::new(8).unwrap().go(|comm| {
            let mut rank = Rank::<f64>::new(model, comm, ZeroStage::One, ADAMW)?;
            let scale = if rank.rank == 5 || !want { scale } else { 1.0 };
            rank.backward(1, scale)?;
            Ok::<_, Error>(grad_norm(&rank.device, &[&rank.sync], &rank.groups).unwrap_err())
        });
        let errors = errors.unwrap();
        assert!(errors.iter().all(|e| *e == errors[0]), "{errors:?}");
        if want {
            // Rank 5 poisons its stage and, through the tie, the embedding on stage 0.
            let first = Error::NonFinite {
                name: "embed".into(),
                index: 9,
                rank: 1,
            };
            assert_eq!(errors[0], first);
        } else {
            assert_eq!(errors[0], Error::NormOverflow);
        }
    }
}

#[test]
fn clipped_steps_of_sgd_are_those_of_one_device() {
    let model = Model::new(degrees(2, 2, 1, 2, 2));
    let full = model.full_grad(1);
    let norm = full.values().flatten().map(|g| g * g).sum::<f64>().sqrt();
    let rule = quintet_zero::Rule::Sgd { weight_decay: 0.0 };
    let all = World::new(8).unwrap().go(|comm| {
        let mut rank = Rank::<f64>::new(model, comm, ZeroStage::Three, rule)?;
        rank.backward(1, 1.0)?;
        let norm = grad_norm(&rank.device, &[&rank.sync], &rank.groups)?;
        rank.step(0.5, clip_factor(norm, 2.0))?;
        gather_params(&rank.device, &[&rank.params], &rank.groups)
    });
    let scale = 2.0 / (norm + 1e-6);
    for params in all.unwrap() {
        for (name, grads) in &full {
            for (i, g) in grads.iter().enumerate() {
                let want = Model::init(name, i) - 0.5 * scale * g;
                assert!((params[name][i] - want).abs() < 1e-12, "{name} {i}");
            }
        }
    }
}
