//! Every layer on tp ranks computes what it computes on one: outputs, input gradients, and every
//! parameter's gradient summed as the ledger says. In f64, to 1e-12.

mod common;

use common::trios::{Column, Model, Row, attention, block, mlp};
use common::*;
use proptest::prelude::*;
use quintet_collectives::{DeviceMesh, Placement};
use quintet_parallel_layers::norm::NormKind;
use quintet_parallel_layers::region::Region;
use quintet_parallel_layers::{
    Architecture, BlockSpec, ColumnParallelLinear, Error, Head, HeadSpec, Positions,
    RowParallelLinear, SelfAttention, VocabParallelEmbedding,
};

const BOUND: f64 = 1e-12;

/// The layer that `make` makes for a mesh, on `tp` ranks against one.
fn equals_single<T: Trio>(what: &str, tp: usize, tokens: Tokens, make: impl Fn(&DeviceMesh) -> T) {
    compare(what, tp, tokens, make, true);
}

fn compare<T: Trio>(
    what: &str,
    tp: usize,
    tokens: Tokens,
    make: impl Fn(&DeviceMesh) -> T,
    tight: bool,
) {
    let of = |tp| {
        let (mesh, layer) = (tp_mesh(tp), make(&tp_mesh(tp)));
        whole(&layer, &mesh, &run(&layer, &mesh, tokens))
    };
    assert_close(&format!("{what}, tp {tp}"), &of(tp), &of(1), BOUND, tight);
}

fn spec(heads: usize, kv_heads: usize, ffn: usize, sequence_parallel: bool) -> BlockSpec {
    BlockSpec {
        hidden: 10,
        heads,
        kv_heads,
        head_dim: 4,
        ffn,
        theta: 100.0,
        eps: 1e-5,
        layers: 3,
        sequence_parallel,
        architecture: Architecture::LLAMA,
    }
}

/// Tokens that tp 2, 3 and 4 do not divide, two sequences, and fewer tokens than ranks.
const TOKENS: [Tokens; 3] = [
    Tokens::new(1, 7, 7),
    Tokens::new(2, 3, 7),
    Tokens::new(1, 2, 3),
];

/// Heads, KV heads and tp that go together.
const HEADS: [(usize, usize, usize); 8] = [
    (4, 4, 2),
    (4, 2, 2),
    (4, 2, 4),
    (4, 1, 4),
    (3, 1, 3),
    (6, 3, 3),
    (8, 2, 4),
    (4, 1, 1),
];

#[test]
fn blocks_and_their_branches() {
    for tokens in TOKENS {
        for (heads, kv, tp) in HEADS {
            for sp in [false, true] {
                let spec = spec(heads, kv, 9, sp);
                let what = |layer| format!("{layer} {spec:?} {tokens:?}");
                equals_single(&what("attention"), tp, tokens, |m| {
                    attention(m, tokens, &spec)
                });
                equals_single(&what("mlp"), tp, tokens, |m| mlp(m, tokens, &spec));
                equals_single(&what("block"), tp, tokens, |m| block(m, tokens, &spec));
            }
        }
    }
}

/// Every way in which a block may differ from Llama's.
fn architectures() -> [Architecture; 4] {
    let llama = Architecture::LLAMA;
    [
        Architecture::gpt2(8),
        Architecture {
            qkv_bias: true,
            ..llama
        },
        Architecture {
            qk_norm: true,
            ..llama
        },
        Architecture {
            positions: Positions::PartRotary(2),
            qkv_bias: true,
            qk_norm: true,
            ..llama
        },
    ]
}

#[test]
fn blocks_of_other_architectures() {
    for architecture in architectures() {
        for (heads, kv, tp) in HEADS {
            for sp in [false, true] {
                let spec = BlockSpec {
                    architecture,
                    ..spec(heads, kv, 9, sp)
                };
                let (what, tokens) = (format!("{spec:?}"), TOKENS[1]);
                // A bias of keys that do not turn has no gradient but rounding.
                compare(&what, tp, tokens, |m| block(m, tokens, &spec), false);
            }
        }
    }
}

#[test]
fn norms_of_queries_and_keys_are_summed_over_tp() {
    let architecture = Architecture {
        qk_norm: true,
        ..Architecture::LLAMA
    };
    let spec = BlockSpec {
        architecture,
        ..spec(4, 2, 9, false)
    };
    let block = block(&tp_mesh(4), TOKENS[0], &spec);
    let norms: Vec<_> = block
        .params()
        .into_iter()
        .filter(|p| p.name.contains("q_norm") || p.name.contains("k_norm"))
        .collect();
    assert_eq!(norms.len(), 2);
    for norm in norms {
        assert_eq!(
            norm.summed_over(),
            [tp_mesh(4).factor(quintet_collectives::Axis::Tp)]
        );
    }
}

#[test]
fn an_mlp_narrower_than_tp() {
    for sp in [false, true] {
        let spec = spec(4, 4, 3, sp);
        equals_single("mlp", 4, TOKENS[0], |m| mlp(m, TOKENS[0], &spec));
    }
}

fn embedding(mesh: &DeviceMesh, tokens: Tokens, sp: bool) -> Model<VocabParallelEmbedding> {
    Model {
        layer: VocabParallelEmbedding::new(mesh, tokens.vocab, 6, true, sp)
            .unwrap()
            .with_positions(7),
        tokens,
        hidden: 6,
        sp,
        mesh: *mesh,
    }
}

fn head(mesh: &DeviceMesh, tokens: Tokens, sp: bool, tied: bool) -> Model<Head> {
    normed_head(mesh, tokens, sp, tied, NormKind::Rms)
}

fn normed_head(
    mesh: &DeviceMesh,
    tokens: Tokens,
    sp: bool,
    tied: bool,
    norm: NormKind,
) -> Model<Head> {
    let spec = HeadSpec {
        vocab: tokens.vocab,
        hidden: 6,
        norm,
        eps: 1e-5,
        tied,
        sequence_parallel: sp,
    };
    Model {
        layer: Head::new(mesh, &spec).unwrap(),
        tokens,
        hidden: 6,
        sp,
        mesh: *mesh,
    }
}

#[test]
fn embedding_and_head() {
    for tokens in TOKENS {
        for tp in 1..=4 {
            for sp in [false, true] {
                let what = format!("{tokens:?} sp {sp}");
                equals_single(&what, tp, tokens, |m| embedding(m, tokens, sp));
                equals_single(&what, tp, tokens, |m| head(m, tokens, sp, sp));
                equals_single(&what, tp, tokens, |m| {
                    normed_head(m, tokens, sp, sp, NormKind::Layer)
                });
            }
        }
    }
}

fn column(mesh: &DeviceMesh, tokens: Tokens, shape: [usize; 2]) -> Column {
    let layer = ColumnParallelLinear::new(mesh, "c", shape[0], shape[1]).with_bias();
    Column {
        layer,
        tokens,
        shape,
        mesh: *mesh,
    }
}

fn row(mesh: &DeviceMesh, tokens: Tokens, shape: [usize; 2], sp: bool) -> Row {
    let region = Region::new(sp).unwrap();
    Row {
        layer: RowParallelLinear::new(mesh, "r", shape[0], shape[1], region).with_bias(),
        tokens,
        shape,
        sp,
        mesh: *mesh,
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(32))]

    /// Also bit-equal: no sum of a column-parallel forward is cut.
    #[test]
    fn column_parallel(tp in 1..=4usize, t in 1..8usize, out in 1..40usize, d in 1..70usize) {
        let (tokens, shape) = (Tokens::new(1, t, 7), [out, d]);
        compare("column", tp, tokens, |m| column(m, tokens, shape), false);
        let y = |tp| {
            let (mesh, layer) = (tp_mesh(tp), column(&tp_mesh(tp), tokens, shape));
            join(&layer.output(), &mesh, &run(&layer, &mesh, tokens).y)
        };
        prop_assert_eq!(y(tp), y(1));
    }

    /// Heads, groups, widths and tokens as they come.
    #[test]
    fn any_block(
        tp in 1..=4usize, each in 1..3usize, group in 1..4usize, few in 1..3usize,
        ffn in 1..9usize, sequences in 1..3usize, positions in 1..5usize, sp: bool,
    ) {
        // KV heads: a multiple of tp, or (where tp allows) half of it or one.
        let kv = match few {
            2 if tp == 4 => 2,
            2 => 1,
            _ => tp * each,
        };
        let heads = kv * group * if kv < tp { tp } else { 1 };
        let (spec, tokens) = (spec(heads, kv, ffn, sp), Tokens::new(sequences, positions, 7));
        let what = format!("{spec:?} {tokens:?}");
        // With one position the softmax is constant: gradients are zero but for rounding.
        compare(&what, tp, tokens, |m| block(m, tokens, &spec), false);
    }

    /// With bias, whose gradient the ledger sums under sequence parallelism alone.
    #[test]
    fn row_parallel(
        tp in 1..=4usize, t in 1..8usize, out in 1..12usize, d in 1..20usize, sp: bool,
    ) {
        let tokens = Tokens::new(1, t, 7);
        compare("row", tp, tokens, |m| row(m, tokens, [out, d], sp), false);
    }
}

#[test]
fn the_bias_of_a_row_layer_is_added_once() {
    let tokens = Tokens::new(1, 5, 7);
    for sp in [false, true] {
        for tp in 1..=4 {
            let (mesh, layer) = (tp_mesh(tp), row(&tp_mesh(tp), tokens, [3, 8], sp));
            let weights = [vec![0.0; 24], vec![1.0, -2.0, 3.0]];
            let parts = run_with(&layer, &mesh, tokens, &weights, &[1.0; 40]);
            let y = join(&layer.output(), &mesh, &parts.y);
            assert_eq!(y, [1.0, -2.0, 3.0].repeat(5));
        }
    }
}

#[test]
fn placements_follow_sequence_parallelism() {
    let mesh = tp_mesh(4);
    let summed = |sp: bool| -> Vec<String> {
        let block = block(&mesh, TOKENS[0], &spec(4, 2, 9, sp));
        let params = block.params();
        let summed = params.iter().filter(|p| !p.summed_over().is_empty());
        summed
            .map(|p| p.name.replace("model.layers.1.", ""))
            .collect()
    };
    let kv = ["self_attn.k_proj.weight", "self_attn.v_proj.weight"];
    assert_eq!(summed(false), kv);
    let norms = ["input_layernorm.weight", "post_attention_layernorm.weight"];
    assert_eq!(summed(true), [norms[0], kv[0], kv[1], norms[1]]);
    let decay = |p: &quintet_collectives::ParamSpec| p.decay != p.name.contains("norm");
    assert!(
        block(&mesh, TOKENS[0], &spec(4, 2, 9, true))
            .params()
            .iter()
            .all(decay)
    );
}

#[test]
fn the_tied_table_is_one_parameter() {
    let mesh = tp_mesh(2);
    let table = embedding(&mesh, TOKENS[0], true).params().remove(0);
    let weight = head(&mesh, TOKENS[0], true, true).params().remove(1);
    assert_eq!(table, weight);
    assert!(table.tie.is_some());
    let own = head(&mesh, TOKENS[0], true, false).params().remove(1);
    assert_eq!((own.name.as_str(), own.tie), ("lm_head.weight", None));
    assert!(table.at_use.iter().any(|(_, p)| *p == Placement::shard(0)));
}

#[test]
fn heads_that_cannot_be_cut_are_refused() {
    for (heads, kv, tp) in [(4, 4, 3), (4, 3, 2), (6, 2, 3), (4, 0, 1)] {
        let made = SelfAttention::new(&tp_mesh(tp), "a", &spec(heads, kv, 9, false));
        assert!(matches!(made, Err(Error::Layout(_))), "{heads} {kv} {tp}");
    }
}
