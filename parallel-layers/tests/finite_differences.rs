//! Backward against central differences of forward, in f64 on one rank. (That many ranks equal
//! one is `equals_single`.)

mod common;

use common::trios::{Model, block};
use common::*;
use quintet_parallel_layers::norm::NormKind;
use quintet_parallel_layers::{Architecture, BlockSpec, Head, HeadSpec, Positions};

const TOKENS: Tokens = Tokens::new(2, 3, 7);
const STEP: f64 = 1e-5;
const BOUND: f64 = 1e-7;

/// Every element's derivative of `loss(y)` with respect to the input and each parameter.
fn check(layer: &dyn Trio, loss: impl Fn(&[f64]) -> f64) {
    let mesh = tp_mesh(1);
    let (w, x) = (weights(layer), random("x", layer.input().unwrap().len()));
    let got = whole(layer, &mesh, &run_with(layer, &mesh, TOKENS, &w, &x));
    let at = |w: &[Vec<f64>], x: &[f64]| loss(&run_with(layer, &mesh, TOKENS, w, x).y[0]);
    let slope = |up: f64, down: f64| (up - down) / (2.0 * STEP);
    let near = |name: &str, got: &[f64], want: &[f64]| {
        // A bias of keys that do not turn shifts all scores of a row alike: no derivative.
        let least = |x: &[f64], bound| x.iter().all(|x| x.abs() < bound);
        if least(want, 1e-9) && least(got, 1e-14) {
            return;
        }
        let off = distance(got, want);
        assert!(off < BOUND, "{name} is off by {off:e}");
    };
    let want: Vec<f64> = (0..x.len())
        .map(|i| {
            let moved = |by: f64| {
                let mut x = x.clone();
                x[i] += by;
                at(&w, &x)
            };
            slope(moved(STEP), moved(-STEP))
        })
        .collect();
    near("dx", &got.dx, &want);
    for (p, (name, grad)) in got.grads.iter().enumerate() {
        let want: Vec<f64> = (0..grad.len())
            .map(|i| {
                let moved = |by: f64| {
                    let mut w = w.clone();
                    w[p][i] += by;
                    at(&w, &x)
                };
                slope(moved(STEP), moved(-STEP))
            })
            .collect();
        near(name, grad, &want);
    }
}

#[test]
fn of_a_block() {
    let part = Positions::PartRotary(2);
    for architecture in [
        Architecture::LLAMA,
        Architecture::gpt2(4),
        Architecture {
            positions: part,
            qkv_bias: true,
            qk_norm: true,
            softcap: Some(0.6),
            ..Architecture::LLAMA
        },
    ] {
        of_the_block_of(architecture);
    }
}

fn of_the_block_of(architecture: Architecture) {
    let spec = BlockSpec {
        hidden: 6,
        heads: 4,
        kv_heads: 2,
        head_dim: 4,
        ffn: 5,
        theta: 100.0,
        eps: 1e-3,
        layers: 2,
        sequence_parallel: false,
        moe: None,
        window: None,
        architecture,
    };
    let layer = block(&tp_mesh(1), TOKENS, &spec);
    let dy = random("dy", layer.output().len());
    check(&layer, |y| dot(y, &dy));
}

#[test]
fn of_the_head() {
    let mesh = tp_mesh(1);
    let spec = HeadSpec {
        vocab: TOKENS.vocab,
        hidden: 6,
        norm: NormKind::Rms,
        eps: 1e-3,
        tied: false,
        sequence_parallel: false,
    };
    let layer = Model {
        layer: Head::new(&mesh, &spec).unwrap(),
        tokens: TOKENS,
        hidden: 6,
        sp: false,
        mesh,
    };
    // The loss of a masked token is 0, so all others weigh 1 / tokens.
    let n = TOKENS.len() as f64;
    check(&layer, |loss| loss.iter().sum::<f64>() / n);
}
