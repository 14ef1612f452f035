//! The closed forms of the search against the exact figures of every rank, on layouts drawn at
//! random: what a step sends by group, what a rank holds by category.

use proptest::prelude::*;
use quintet_collectives::{Axis, DType};
use quintet_parallel_layers::pipeline::ScheduleKind;
use quintet_parallel_layers::{Architecture, Recompute};
use quintet_planner::closed::held::{Held, on_stages};
use quintet_planner::closed::pipeline::{fullest, stages};
use quintet_planner::closed::sent::{self, Group};
use quintet_planner::config::MoeConfig;
use quintet_planner::memory::activations;
use quintet_planner::shape::Shape;
use quintet_planner::traffic::{self, WireTypes};
use quintet_planner::{Batch, CpComm, Layout, ModelConfig, model, states, validate};

#[derive(Debug, Clone)]
struct Case {
    shape: Shape,
    layout: Layout,
    batch: Batch,
    types: WireTypes,
}

/// Degrees that are powers of two and others; widths that tp does not divide; long messages, so
/// that the plans which move least are chosen.
fn case() -> impl Strategy<Value = Case> {
    let mesh = (1..=4_usize, 1..=4_usize, 1..=4_usize, 1..=3_usize);
    let cut = (0..5_usize, 2..=3_usize, 0..3_usize, 0..4_u8, any::<bool>());
    let model = (
        0..4_usize,
        0..3_usize,
        1..=3_usize,
        any::<bool>(),
        0..3_usize,
    );
    let batch = (1..=2_usize, 1..=4_usize, 0..3_usize, any::<bool>());
    (mesh, cut, model, batch).prop_filter_map("no such layout", build)
}

type Drawn = (
    (usize, usize, usize, usize),
    (usize, usize, usize, u8, bool),
    (usize, usize, usize, bool, usize),
    (usize, usize, usize, bool),
);

fn build((mesh, cut, model, batch): Drawn) -> Option<Case> {
    let ((tp, pp, dp, cp), (kind, v, way, zero_stage, sequence_parallel)) = (mesh, cut);
    let ((kv, experts, ep, odd, more), (micro_batch, each, again, bf16)) = (model, batch);
    let schedule = ScheduleKind::ALL[kind];
    let virtual_stages = if schedule == ScheduleKind::Interleaved {
        v
    } else {
        1
    };
    let heads = 24;
    let architecture = Architecture {
        qkv_bias: odd,
        qk_norm: more == 1,
        ..Architecture::LLAMA
    };
    let moe = (experts > 0).then(|| MoeConfig {
        first_dense: experts - 1,
        selection_bias: odd,
        shared_ffn: if more == 0 { 0 } else { 1030 },
        shared_gate: more == 2,
        ..MoeConfig::new(6, 2, 1030)
    });
    let config = ModelConfig {
        vocab: 50_001,
        hidden: 3072,
        layers: pp * virtual_stages.max(2) + more,
        heads,
        kv_heads: [24, 12, 2, 1][kv],
        head_dim: 128,
        ffn: 8002,
        rope_theta: 1e4,
        norm_eps: 1e-5,
        dropout: 0.0,
        tied: false,
        moe,
        window: None,
        architecture: if odd && experts == 0 && more == 2 {
            Architecture::gpt2(60_000)
        } else {
            architecture
        },
    };
    let layout = Layout {
        tp,
        pp,
        dp,
        cp,
        ep: if moe.is_some() { ep } else { 1 },
        cp_comm: CpComm::ALL[way],
        sequence_parallel,
        zero_stage,
        schedule,
        virtual_stages,
        bucket_bytes: 1,
        recompute: Recompute::ALL[again],
        ..Layout::single()
    };
    let microbatches = each * if kind < 2 { 1 } else { 2 * pp };
    let batch = Batch {
        // Long, and now and then no multiple of tp.
        seq: 2 * cp * (if odd { 4099 } else { 4096 }),
        micro_batch,
        global_batch: micro_batch * dp * microbatches,
    };
    let types = WireTypes {
        storage: if bf16 { DType::Bf16 } else { DType::F32 },
        accumulation: DType::F32,
    };
    validate(&config, &layout, &batch).ok()?;
    Some(Case {
        shape: Shape::new("drawn", config, 1 << 20),
        layout,
        batch,
        types,
    })
}

/// What every rank holds, exactly.
fn exact(case: &Case) -> Vec<Held> {
    let (m, l, b) = (&case.shape.config, &case.layout, &case.batch);
    let memory = states::step(m, l, b, case.types, 2).unwrap();
    let kept = activations(m, l, b, case.types).unwrap();
    let ranks = memory.iter().zip(kept);
    ranks
        .map(|(memory, kept)| Held {
            parameters: memory["parameters"].peak,
            gradients: memory["gradients"].peak,
            optimizer: memory["optimizer"].peak,
            activations: kept.saved,
            buffers: kept.work,
        })
        .collect()
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: 160,
        failure_persistence: None,
        ..ProptestConfig::default()
    })]

    /// The first rank of every stage, category by category; and the fullest rank of all is the first
    /// of one of the stages that the search looks at.
    #[test]
    fn memory_is_that_of_the_fullest_rank(case in case()) {
        let (m, l) = (&case.shape.config, &case.layout);
        let ranks = exact(&case);
        let each = ranks.len() / l.pp;
        let all = stages(m, l, case.batch.microbatches() / l.dp).unwrap();
        let held = |stages: &[_]| on_stages(&case.shape, l, &case.batch, (case.types, 2), stages);
        for (stage, held) in held(&all).into_iter().enumerate() {
            prop_assert_eq!(held, ranks[stage * each], "stage {}", stage);
        }
        let most = ranks.iter().map(Held::total).max();
        let few = fullest(all);
        prop_assert_eq!(held(&few).iter().map(Held::total).max(), most);
    }

    /// By group, but for what all ranks sum of a few numbers, and for rows that a router sends.
    #[test]
    fn traffic_is_that_of_the_first_rank_of_a_stage(case in case()) {
        let (m, l, b) = (&case.shape.config, &case.layout, &case.batch);
        let ranks = traffic::step(m, l, b, case.types).unwrap();
        let mesh = model::mesh(l).unwrap();
        for stage in stages(m, l, b.microbatches() / l.dp).unwrap() {
            let first = stage.stage * ranks.len() / l.pp;
            prop_assert_eq!(mesh.index(first, Axis::Pp), stage.stage);
            let mut sent = std::collections::BTreeMap::new();
            for flow in sent::step(&case.shape, l, b, case.types, &stage) {
                let rows = matches!(flow.group, Group::Ep | Group::Etp);
                if !rows {
                    *sent.entry(flow.group.name()).or_insert(0) += flow.bytes * flow.times;
                }
            }
            for (group, bytes) in &ranks[first] {
                match group.as_str() {
                    "world" | "ep" | "etp" | "replica" => {}
                    // The count of tokens: one f64 to each other replica at most.
                    "dp" => {
                        let sent = sent.remove("dp").unwrap_or(0);
                        let count = 8 * (l.dp * l.cp) as u64;
                        prop_assert!(sent <= *bytes && *bytes <= sent + count, "dp {} {}", sent, bytes);
                    }
                    group => prop_assert_eq!(sent.remove(group), Some(*bytes), "{}", group),
                }
            }
            sent.retain(|_, bytes| *bytes > 0);
            prop_assert!(sent.is_empty(), "{:?}", sent);
        }
    }
}
