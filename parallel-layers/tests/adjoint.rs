//! `<A x, y> = <x, A' y>`, with the pairing of placements: every move, every linear layer.

mod common;

use common::trios::{Column, Model, Row};
use common::*;
use proptest::prelude::*;
use quintet_collectives::{Move, ParamSpec, Placement};
use quintet_kernels::{Backend, Tag};
use quintet_parallel_layers::region::{Region, apply, apply_to};
use quintet_parallel_layers::{ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding};

const PLACEMENTS: [Placement; 4] = [
    Placement::shard(0),
    Placement::Partial,
    Placement::Replicate,
    Placement::Invariant,
];

fn assert_pair(what: &str, one: f64, other: f64) {
    let scale = one.abs().max(other.abs()).max(1.0);
    assert!(
        (one - other).abs() <= 1e-12 * scale,
        "{what}: {one} {other}"
    );
}

/// A value moved on all ranks, and whether both forms of the move agree.
fn moved(mv: Move, tp: usize, shape: [usize; 2], x: &[Vec<f64>]) -> Vec<Vec<f64>> {
    ranks(tp, |ctx| {
        let mine = || {
            ctx.device
                .upload(Tag::Activation, &x[ctx.tp.rank()])
                .unwrap()
        };
        let borrowed = apply_to(ctx, mv, mine().as_ref(), shape[0], shape[1]).unwrap();
        let owned = apply(ctx, mv, mine(), shape[0], shape[1]).unwrap();
        let borrowed = borrowed.unwrap_or_else(mine);
        assert_eq!(borrowed.as_ref(), owned.as_ref());
        owned.as_ref().to_vec()
    })
}

fn check_move(from: Placement, to: Placement, tp: usize, shape: [usize; 2]) {
    let (mesh, mv) = (tp_mesh(tp), Move::new(from, to).unwrap());
    let what = format!("{from} -> {to} tp {tp} {shape:?}");
    let line = |p| value("x", shape, &on_tp(&mesh, p));
    let (x, g) = (random("x", line(from).len()), random("g", line(to).len()));
    let spread = |spec: &ParamSpec, v: &[f64]| -> Vec<Vec<f64>> {
        (0..tp).map(|r| cut(spec, &mesh, r, v)).collect()
    };
    let x_ranks = spread(&line(from), &x);
    let g_ranks = spread(&dual(&line(to)), &g);
    let y_ranks = moved(mv, tp, shape, &x_ranks);
    let dx_ranks = moved(mv.backward().unwrap(), tp, shape, &g_ranks);
    assert!(
        distance(&join(&line(to), &mesh, &y_ranks), &x) < 1e-12,
        "{what}"
    );
    let dx = join(&dual(&line(from)), &mesh, &dx_ranks);
    assert!(distance(&dx, &g) < 1e-12, "{what}");
    let forward = pair(&line(to), &mesh, &y_ranks, &g_ranks);
    let backward = pair(&line(from), &mesh, &x_ranks, &dx_ranks);
    assert_pair(&what, forward, backward);
}

#[test]
fn every_move() {
    for tp in 1..=4 {
        for from in PLACEMENTS {
            for to in PLACEMENTS {
                check_move(from, to, tp, [5, 3]);
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]
    #[test]
    fn any_move(
        from in 0..4usize, to in 0..4usize, tp in 1..=4usize, rows in 1..10usize, width in 1..5usize,
    ) {
        check_move(PLACEMENTS[from], PLACEMENTS[to], tp, [rows, width]);
    }
}

#[test]
fn what_a_region_cannot_move_is_refused() {
    let columns = Move::new(Placement::shard(1), Placement::Replicate).unwrap();
    let turn = Move::new(Placement::shard(0), Placement::shard(1)).unwrap();
    let gather = Move::new(Placement::shard(0), Placement::Replicate).unwrap();
    ranks(2, |ctx| {
        let x = [0.0; 4];
        for mv in [columns, turn] {
            assert!(apply_to(ctx, mv, &x[..], 4, 2).is_err());
        }
        assert!(apply_to(ctx, gather, &x[..3], 4, 2).is_err());
    });
}

/// A layer that is linear in x (and in its one weight) is adjoint to its backward.
fn check_linear(what: &str, layer: &dyn Trio, tp: usize, tokens: Tokens) {
    let mesh = tp_mesh(tp);
    let parts = run(layer, &mesh, tokens);
    let out = pair(&layer.output(), &mesh, &parts.y, &parts.dy);
    if let Some(input) = layer.input() {
        assert_pair(what, out, pair(&input, &mesh, &parts.x, &parts.dx));
    }
    let weight = &layer.params()[0];
    let by_weight = pair(weight, &mesh, &parts.weights[0], &parts.grads[0]);
    assert_pair(what, out, by_weight);
}

#[test]
fn linear_layers() {
    for tp in 1..=4 {
        let mesh = tp_mesh(tp);
        for tokens in [Tokens::new(1, 5, 7), Tokens::new(1, 2, 3)] {
            let (d, t) = (6, tokens.len());
            for shape in [[7, d], [3, d]] {
                let layer = ColumnParallelLinear::new(&mesh, "c", shape[0], shape[1]);
                let column = Column {
                    layer,
                    tokens,
                    shape,
                    mesh,
                };
                check_linear(
                    &format!("column {shape:?} tp {tp} t {t}"),
                    &column,
                    tp,
                    tokens,
                );
            }
            for (sp, shape) in [(false, [d, 7]), (true, [d, 7]), (true, [d, 3])] {
                let region = Region::new(sp).unwrap();
                let layer = RowParallelLinear::new(&mesh, "r", shape[0], shape[1], region);
                let row = Row {
                    layer,
                    tokens,
                    shape,
                    sp,
                    mesh,
                };
                check_linear(&format!("row {shape:?} tp {tp} sp {sp}"), &row, tp, tokens);
                let vocab = tokens.vocab;
                let layer = VocabParallelEmbedding::new(&mesh, vocab, d, false, sp).unwrap();
                let embed = Model {
                    layer,
                    tokens,
                    hidden: d,
                    sp,
                    mesh,
                };
                check_linear(&format!("embedding tp {tp} sp {sp}"), &embed, tp, tokens);
            }
        }
    }
}

#[test]
fn fewer_parts_than_ranks() {
    let (mesh, tokens, shape) = (tp_mesh(4), Tokens::new(1, 3, 7), [8, 6]);
    for parts in [1, 2, 4] {
        let layer = ColumnParallelLinear::new(&mesh, "kv", 8, 6).units(2);
        let layer = layer.parts(parts).unwrap();
        let column = Column {
            layer,
            tokens,
            shape,
            mesh,
        };
        check_linear(&format!("{parts} parts"), &column, 4, tokens);
    }
    assert!(
        ColumnParallelLinear::new(&mesh, "kv", 8, 6)
            .parts(3)
            .is_err()
    );
}
