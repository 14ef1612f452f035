//! ZeRO 0 and 1 have the same bits, and 2 and 3, and all four with one microbatch: parameters,
//! moments, and the norm.
#![allow(clippy::unwrap_used)]

mod common;

use common::{ADAMW, ALL, Model, Rank, degrees};
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
                let (host, runs) = rank.params.read(entry)?;
                for (at, logical, len) in runs {
                    let here = host[at..at + len].iter().map(|x| x.to_f64());
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

const RULES: [(Rule, bool); 3] = [
    (ADAMW, false),
    (ADAMW, true),
    (Rule::Sgd { weight_decay: 0.1 }, false),
];

/// Each pair, and all four with one microbatch.
fn agree<E: Scalar>(model: Model) {
    for (rule, clip) in RULES {
        let of = |stage, microbatches| {
            let model = Model {
                microbatches,
                ..model
            };
            run::<E>(model, stage, rule, clip)
        };
        for microbatches in [1, 3] {
            let [ddp, one, two, three] = ALL.map(|stage| of(stage, microbatches));
            assert!(
                ddp == one,
                "0 and 1, {microbatches} microbatches: {model:?}"
            );
            assert!(
                two == three,
                "2 and 3, {microbatches} microbatches: {model:?}"
            );
            assert!(microbatches > 1 || one == two, "1 and 2: {model:?}");
            assert_ne!(ddp[0].1, ddp[1].1);
        }
    }
}

fn on<E: Scalar>(degrees: Degrees, bucket_bytes: usize, within: Option<usize>) {
    agree::<E>(Model {
        bucket_bytes,
        within,
        ..Model::new(degrees)
    });
}

#[test]
fn over_data_parallel_ranks() {
    for dp in 1..=4 {
        let bucket_bytes = [0, 60, 300, 100_000][dp - 1];
        on::<f32>(degrees(1, dp, 1, 1, 1), bucket_bytes, None);
    }
}

#[test]
fn over_a_mesh() {
    on::<f32>(degrees(2, 2, 1, 2, 2), 100, None);
    on::<f64>(degrees(1, 2, 2, 2, 4), 0, None);
}

#[test]
fn with_master_weights() {
    on::<half::bf16>(degrees(1, 3, 1, 1, 1), 100, None);
    on::<half::bf16>(degrees(2, 2, 1, 2, 1), 0, None);
}

/// Stage 0 has no shards to copy: the three others agree among themselves.
#[test]
fn under_hybrid_sharding() {
    let agree = |degrees, within| {
        let model = Model {
            within: Some(within),
            ..Model::new(degrees)
        };
        let of = |stage, microbatches| {
            let model = Model {
                microbatches,
                ..model
            };
            run::<f32>(model, stage, ADAMW, true)
        };
        assert!(
            of(ZeroStage::Two, 3) == of(ZeroStage::Three, 3),
            "{model:?}"
        );
        let one = of(ZeroStage::One, 1);
        assert!(one == of(ZeroStage::Two, 1) && one == of(ZeroStage::Three, 1));
        assert!(one == of(ZeroStage::Ddp, 1), "{model:?}");
    };
    agree(degrees(1, 4, 1, 1, 1), 2);
    agree(degrees(1, 6, 1, 1, 1), 3);
    agree(degrees(2, 2, 2, 1, 2), 2);
    agree(degrees(1, 2, 2, 2, 1), 4);
    agree(degrees(1, 3, 1, 2, 1), 1);
}

/// More ranks than some parts have elements: some own nothing.
#[test]
fn with_nothing_to_own() {
    agree::<f32>(Model {
        hidden: 1,
        vocab: 2,
        blocks: 1,
        bucket_bytes: 0,
        ..Model::new(degrees(1, 5, 1, 1, 1))
    });
}

#[test]
fn bucket_lengths_do_not_matter() {
    let model = |bucket_bytes| Model {
        bucket_bytes,
        microbatches: 2,
        ..Model::new(degrees(2, 3, 1, 1, 1))
    };
    for stage in [ZeroStage::One, ZeroStage::Three] {
        let one = run::<f32>(model(0), stage, ADAMW, false);
        let other = run::<f32>(model(200), stage, ADAMW, false);
        for ((_, p, s), (_, q, t)) in one.iter().zip(&other) {
            assert!(p == q && s == t);
        }
    }
}
