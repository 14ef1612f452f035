//! A mixture of experts on many ranks computes what it computes on one, and its backward is the
//! slope of its forward and of the losses of balance. In f64.

mod common;

use common::trios::{Model, moe};
use common::*;
use proptest::prelude::*;
use quintet_collectives::{Degrees, DeviceMesh};
use quintet_kernels::moe::Score;
use quintet_kernels::{Backend, Tag};
use quintet_parallel_layers::moe::Routing;
use quintet_parallel_layers::{MoeMlp, MoeShape, MoeSpec};

const BOUND: f64 = 1e-12;

const PLAIN: MoeSpec = MoeSpec {
    experts: 12,
    topk: 2,
    ffn: 5,
    score: Score::Softmax,
    normalize: true,
    scale: 1.0,
    selection_bias: false,
    aux_loss: 0.0,
    z_loss: 0.0,
    capacity_factor: None,
    shared_ffn: 0,
    shared_gate: false,
};

/// Every rule at least once.
fn specs() -> [MoeSpec; 7] {
    let balanced = MoeSpec {
        aux_loss: 0.7,
        z_loss: 0.3,
        ..PLAIN
    };
    let sigmoid = MoeSpec {
        score: Score::Sigmoid,
        scale: 2.5,
        ..balanced
    };
    [
        PLAIN,
        MoeSpec {
            topk: 1,
            normalize: false,
            ..balanced
        },
        MoeSpec {
            topk: 12,
            ..balanced
        },
        MoeSpec {
            selection_bias: true,
            shared_ffn: 3,
            ..sigmoid
        },
        MoeSpec {
            capacity_factor: Some(0.6),
            topk: 3,
            ..sigmoid
        },
        MoeSpec {
            normalize: false,
            shared_ffn: 7,
            shared_gate: true,
            ..sigmoid
        },
        MoeSpec {
            capacity_factor: Some(1.0),
            shared_ffn: 4,
            shared_gate: true,
            ..balanced
        },
    ]
}

const MESHES: [(usize, usize, usize); 9] = [
    (1, 1, 1),
    (2, 2, 1),
    (2, 1, 2),
    (2, 1, 1),
    (3, 3, 1),
    (4, 2, 2),
    (4, 4, 1),
    (4, 2, 1),
    (4, 1, 2),
];

fn mesh((tp, ep, etp): (usize, usize, usize)) -> DeviceMesh {
    DeviceMesh::new(Degrees {
        tp,
        ep,
        etp,
        ..Default::default()
    })
    .unwrap()
}

fn shape(sequence_parallel: bool) -> MoeShape {
    MoeShape {
        hidden: 6,
        layers: 2,
        sequence_parallel,
    }
}

fn layer(on: (usize, usize, usize), tokens: Tokens, sp: bool, spec: &MoeSpec) -> Model<MoeMlp> {
    moe(&mesh(on), tokens, &shape(sp), spec).unwrap()
}

fn whole_on(on: (usize, usize, usize), tokens: Tokens, sp: bool, spec: &MoeSpec) -> Whole {
    let layer = layer(on, tokens, sp, spec);
    whole(&layer, &mesh(on), &run(&layer, &mesh(on), tokens))
}

fn equals_single(on: (usize, usize, usize), tokens: Tokens, sp: bool, spec: &MoeSpec) {
    let what = format!("{on:?} {tokens:?} sp {sp} {spec:?}");
    let (got, want) = (
        whole_on(on, tokens, sp, spec),
        whole_on((1, 1, 1), tokens, sp, spec),
    );
    assert_close(&what, &got, &want, BOUND, false);
}

#[test]
fn every_rule_on_every_mesh() {
    // Tokens that tp does not divide, and fewer of them than ranks.
    for tokens in [
        Tokens::new(1, 7, 7),
        Tokens::new(2, 8, 7),
        Tokens::new(1, 2, 3),
    ] {
        for on in MESHES {
            for spec in specs() {
                for sp in [false, true] {
                    equals_single(on, tokens, sp, &spec);
                }
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn any_mixture(
        on in 0..MESHES.len(), rule in 0..7usize, each in 1..3usize, topk in 1..4usize,
        ffn in 1..6usize, factor in prop_oneof![Just(None), (0.1..2.0).prop_map(Some)],
        tokens in 1..12usize, sp: bool,
    ) {
        let spec = MoeSpec {
            experts: MESHES[on].1 * each,
            topk: topk.min(MESHES[on].1 * each),
            ffn,
            capacity_factor: factor,
            ..specs()[rule]
        };
        equals_single(MESHES[on], Tokens::new(1, tokens, 7), sp, &spec);
    }
}

/// Forward alone: y and where tokens went, rank by rank.
fn forward(
    layer: &Model<MoeMlp>,
    on: &DeviceMesh,
    weights: &[Vec<f64>],
    x: &[f64],
) -> Vec<(Vec<f64>, Routing)> {
    let specs = layer.params();
    ranks_of(on, |ctx| {
        let rank = ctx.tp.rank();
        let mine: Vec<Vec<f64>> = specs
            .iter()
            .zip(weights)
            .map(|(s, w)| cut(s, on, rank, w))
            .collect();
        let params: Vec<&[f64]> = mine.iter().map(Vec::as_slice).collect();
        let x = cut(&layer.input().unwrap(), on, rank, x);
        let x = ctx.device.upload(Tag::Activation, &x).unwrap();
        let batch = layer.tokens.batch(ctx.device);
        let (y, saved) = layer.layer.forward(ctx, &batch, &params, x).unwrap();
        (y.as_ref().to_vec(), saved.routing().clone())
    })
}

fn joined(parts: &[(Vec<f64>, Routing)]) -> Routing {
    let mut sum = Routing {
        counts: vec![0; parts[0].1.counts.len()],
        ..Routing::default()
    };
    for (_, part) in parts {
        for (sum, n) in sum.counts.iter_mut().zip(&part.counts) {
            *sum += n;
        }
        sum.dropped += part.dropped;
        sum.aux += part.aux;
        sum.z += part.z;
    }
    sum
}

#[test]
fn ranks_sum_to_the_routing_of_one() {
    let tokens = Tokens::new(1, 9, 7);
    for spec in specs() {
        let one = layer((1, 1, 1), tokens, false, &spec);
        let (w, x) = (weights(&one), random("x", 54));
        let want = joined(&forward(&one, &mesh((1, 1, 1)), &w, &x));
        assert_eq!(want.counts.iter().sum::<u64>() as usize, 9 * spec.topk);
        assert_eq!(want.dropped > 0, spec.capacity_factor.is_some());
        for on in MESHES {
            let got = joined(&forward(&layer(on, tokens, true, &spec), &mesh(on), &w, &x));
            assert_eq!((&got.counts, got.dropped), (&want.counts, want.dropped));
            for (got, want) in [(got.aux, want.aux), (got.z, want.z)] {
                assert!(
                    (got - want).abs() <= 1e-12 * want.abs(),
                    "{on:?} {got} {want}"
                );
            }
        }
    }
}

/// Even routing has a balance loss of 1, and all on one expert one of about `experts`.
#[test]
fn the_balance_loss_is_one_where_all_is_even() {
    let spec = MoeSpec {
        experts: 4,
        topk: 4,
        aux_loss: 1.0,
        ..PLAIN
    };
    let one = layer((1, 1, 1), Tokens::new(1, 5, 7), false, &spec);
    let mut w = weights(&one);
    let aux = |w: &[Vec<f64>]| {
        forward(&one, &mesh((1, 1, 1)), w, &random("x", 30))[0]
            .1
            .aux
    };
    assert!(
        (aux(&w) - 1.0).abs() < 1e-12,
        "each expert is chosen as often"
    );
    w[0] = vec![0.0; w[0].len()];
    assert!((aux(&w) - 1.0).abs() < 1e-12);
}

/// An expert that gets every token, and experts (and ranks of experts) that get none.
#[test]
fn one_expert_takes_everything() {
    let tokens = Tokens::new(1, 6, 7);
    let spec = MoeSpec {
        topk: 1,
        selection_bias: true,
        normalize: false,
        ..PLAIN
    };
    let run_on = |on| {
        let layer = layer(on, tokens, false, &spec);
        let mut w = weights(&layer);
        w[1] = (0..12).map(|e| if e == 5 { 1e3 } else { 0.0 }).collect();
        let parts = run_with(&layer, &mesh(on), tokens, &w, &random("x", 36));
        whole(&layer, &mesh(on), &parts)
    };
    let want = run_on((1, 1, 1));
    let of_expert = |g: &[f64], e: usize| g[e * 30..(e + 1) * 30].iter().any(|x| *x != 0.0);
    let (_, dgate) = &want.grads[2];
    assert_eq!(
        (0..12).filter(|e| of_expert(dgate, *e)).collect::<Vec<_>>(),
        [5]
    );
    for on in MESHES {
        assert_close(&format!("{on:?}"), &run_on(on), &want, BOUND, false);
    }
}

/// Without room nothing passes: y is that of the shared experts alone, here none.
#[test]
fn what_is_dropped_adds_nothing() {
    let spec = MoeSpec {
        capacity_factor: Some(0.0),
        ..PLAIN
    };
    let got = whole_on((4, 2, 2), Tokens::new(1, 7, 7), false, &spec);
    assert!(got.y.iter().chain(&got.dx).all(|y| *y == 0.0));
    // Room for one pair each: the rest of the weights stays what it was.
    let spec = MoeSpec {
        experts: 2,
        topk: 2,
        capacity_factor: Some(0.4),
        ..PLAIN
    };
    let (tight, wide) = (
        spec,
        MoeSpec {
            capacity_factor: None,
            ..spec
        },
    );
    let y = |spec: &MoeSpec| whole_on((1, 1, 1), Tokens::new(1, 2, 7), false, spec).y;
    assert_eq!(
        y(&tight)[..6],
        y(&wide)[..6],
        "the first token has room on both"
    );
    assert!(
        y(&tight)[6..].iter().all(|y| *y == 0.0),
        "the second on neither"
    );
}

/// Every element's derivative of `<y, dy>` and of the weighted losses of balance.
#[test]
fn backward_is_the_slope_of_forward_and_balance() {
    let tokens = Tokens::new(2, 3, 7);
    for spec in specs() {
        let spec = MoeSpec {
            experts: 4,
            topk: spec.topk.min(4),
            ..spec
        };
        let layer = layer((1, 1, 1), tokens, false, &spec);
        let (one, w, x) = (mesh((1, 1, 1)), weights(&layer), random("x", 36));
        let got = whole(&layer, &one, &run_with(&layer, &one, tokens, &w, &x));
        let dy = random("dy", 36);
        let loss = |w: &[Vec<f64>], x: &[f64]| {
            let (y, routing) = &forward(&layer, &one, w, x)[0];
            dot(y, &dy) + 0.25 * (spec.aux_loss * routing.aux + spec.z_loss * routing.z)
        };
        let slope = |at: &dyn Fn(f64) -> f64| (at(1e-5) - at(-1e-5)) / 2e-5;
        let want: Vec<f64> = (0..x.len())
            .map(|i| {
                slope(&|by| {
                    let mut x = x.clone();
                    x[i] += by;
                    loss(&w, &x)
                })
            })
            .collect();
        assert!(distance(&got.dx, &want) < 1e-7, "dx of {spec:?}");
        for (p, (name, grad)) in got.grads.iter().enumerate() {
            let want: Vec<f64> = (0..grad.len())
                .map(|i| {
                    slope(&|by| {
                        let mut w = w.to_vec();
                        w[p][i] += by;
                        loss(&w, &x)
                    })
                })
                .collect();
            // Nothing passes to the bias of the choice.
            let off = if want.iter().all(|x| x.abs() < 1e-9) {
                grad.iter().fold(0.0, |m: f64, g| m.max(g.abs()))
            } else {
                distance(grad, &want)
            };
            assert!(off < 1e-7, "{name} of {spec:?} is off by {off:e}");
        }
    }
}

#[test]
fn what_cannot_be_is_refused() {
    let of = |ep, spec: MoeSpec| {
        let refused = MoeMlp::new(&mesh((ep, ep, 1)), "mlp", &shape(false), &spec);
        refused.map(|_| ()).unwrap_err().to_string()
    };
    assert!(of(5, PLAIN).contains("ep=5 does not divide 12 experts"));
    assert!(of(1, MoeSpec { topk: 13, ..PLAIN }).contains("13 of 12"));
    assert!(of(1, MoeSpec { topk: 0, ..PLAIN }).contains("0 of 12"));
}
