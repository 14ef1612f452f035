//! ZeRO 0 and 1 have the same bits: parameters, moments, and the norm.
#![allow(clippy::unwrap_used)]

mod common;

use common::{ADAMW, Model, Rank, degrees};
use quintet_collectives::{Degrees, World};
use quintet_kernels::Scalar;
use quintet_zero::{
    Error, Full, Rule, ZeroStage, clip_factor, gather_params, gather_state, grad_norm,
};

type Trajectory = Vec<(u64, Full, Vec<Full>)>;

fn run<E: Scalar>(model: Model, stage: ZeroStage, rule: Rule, clip: bool) -> Trajectory {
    let world = World::new(model.mesh().world()).unwrap();
    let mut ranks = world.go(|comm| {
        let mut rank = Rank::<E>::new(model, comm, stage, rule)?;
        let mut steps = Vec::new();
        for step in 1..=3 {
            rank.backward(step, 0.37)?;
            let norm = grad_norm(&rank.device, &[&rank.sync], &rank.groups)?;
            rank.step(0.01, if clip { clip_factor(norm, 1.0) } else { 1.0 })?;
            let params = gather_params(&rank.device, &[&rank.params], &rank.groups)?;
            let state = gather_state(&rank.device, &[&rank.optimizer], &rank.groups)?;
            steps.push((norm.to_bits(), params, state.into_values().collect()));
            // What this rank holds is what was gathered, also where it owns nothing.
            for entry in rank.params.layout().entries() {
                let full = &steps[steps.len() - 1].1[&entry.spec.name];
                let mesh = *rank.params.layout().mesh();
                let host = rank.params.read(entry)?;
                for (local, logical, len) in entry.spec.runs(&mesh, rank.rank) {
                    let here = host[local..local + len].iter().map(|x| x.to_f64());
                    assert!(here.eq(full[logical..logical + len].iter().copied()));
                }
            }
        }
        Ok::<_, Error>(steps)
    });
    let ranks = ranks.as_mut().unwrap();
    let first = ranks.swap_remove(0);
    assert!(ranks.iter().all(|r| *r == first));
    first
}

fn agree<E: Scalar>(degrees: Degrees, bucket_bytes: usize) {
    let model = Model {
        bucket_bytes,
        ..Model::new(degrees)
    };
    for (rule, clip) in [
        (ADAMW, false),
        (ADAMW, true),
        (Rule::Sgd { weight_decay: 0.1 }, false),
    ] {
        let ddp = run::<E>(model, ZeroStage::Ddp, rule, clip);
        assert_eq!(
            ddp,
            run::<E>(model, ZeroStage::One, rule, clip),
            "{model:?}"
        );
        assert_ne!(ddp[0].1, ddp[1].1);
    }
}

#[test]
fn over_data_parallel_ranks() {
    for dp in 1..=4 {
        agree::<f32>(degrees(1, dp, 1, 1, 1), [0, 60, 300, 100_000][dp - 1]);
    }
}

#[test]
fn over_a_mesh() {
    agree::<f32>(degrees(2, 2, 1, 2, 2), 100);
    agree::<f64>(degrees(1, 2, 2, 2, 4), 0);
}

#[test]
fn with_master_weights() {
    agree::<half::bf16>(degrees(1, 3, 1, 1, 1), 100);
    agree::<half::bf16>(degrees(2, 2, 1, 2, 1), 0);
}

#[test]
fn bucket_lengths_do_not_matter() {
    let model = |bucket_bytes| Model {
        bucket_bytes,
        ..Model::new(degrees(2, 3, 1, 1, 1))
    };
    let one = run::<f32>(model(0), ZeroStage::One, ADAMW, false);
    let other = run::<f32>(model(200), ZeroStage::One, ADAMW, false);
    for ((_, p, s), (_, q, t)) in one.iter().zip(&other) {
        assert!(p == q && s == t);
    }
}
