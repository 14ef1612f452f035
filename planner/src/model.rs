//! The model cut into stages, as the trainer builds it: which layers a stage holds, and where
//! their parameters lie.
//!
//! ```text
//! stage 0        embedding | block 0 | block 1
//! stage 1                                      block 2 | block 3 | head (norm, linear, loss)
//! ```
//!
//! Where a stage holds several chunks, each of them is such a run of layers.

use alloc::string::String;
use alloc::vec;
use alloc::vec::Vec;
use core::ops::Range;

use quintet_collectives::{Axis, Degrees, DeviceMesh, ParamSpec};
use quintet_parallel_layers::pipeline::{Reduction, Schedule};
use quintet_parallel_layers::{
    Block, BlockSpec, Head, HeadSpec, MlpKind, NormKind, Positions, VocabParallelEmbedding,
};
use quintet_zero::{FlatLayout, Keep, LayoutSpec, Tied, ZeroStage};

use crate::config::MoeConfig;
use crate::{Batch, Error, Layout, ModelConfig};

/// A layer of a stage.
#[derive(Debug, Clone)]
pub enum StageLayer {
    /// Token ids to activations.
    Embed(VocabParallelEmbedding),
    /// A decoder block.
    Block(Block),
    /// Final norm, linear and loss.
    Head(Head),
}

impl StageLayer {
    /// The parameters, in the order in which views are passed.
    #[must_use]
    pub fn params(&self) -> Vec<ParamSpec> {
        match self {
            StageLayer::Embed(layer) => layer.params(),
            StageLayer::Block(layer) => layer.params(),
            StageLayer::Head(layer) => layer.params(),
        }
    }
}

/// The mesh of a layout.
///
/// # Errors
/// Where the degrees do not make a mesh.
pub fn mesh(layout: &Layout) -> Result<DeviceMesh, Error> {
    let Layout {
        pp,
        dp,
        cp,
        tp,
        ep,
        etp,
        ..
    } = *layout;
    Ok(DeviceMesh::new(Degrees {
        pp,
        dp,
        cp,
        tp,
        ep,
        etp,
    })?)
}

/// The layers of a stage's chunk (virtual stage), in forward order.
///
/// # Errors
/// What a layer refuses.
pub fn stage_layers(
    model: &ModelConfig,
    layout: &Layout,
    mesh: &DeviceMesh,
    stage: usize,
    chunk: usize,
) -> Result<Vec<StageLayer>, Error> {
    let sequence_parallel = layout.sequence_parallel;
    let spec = BlockSpec {
        hidden: model.hidden,
        heads: model.heads,
        kv_heads: model.kv_heads,
        head_dim: model.head_dim,
        ffn: model.ffn,
        theta: model.rope_theta,
        eps: model.norm_eps,
        layers: model.layers,
        sequence_parallel,
        moe: None,
        window: model.window,
        architecture: model.architecture,
    };
    let (place, mut layers) = (layout.route().place(stage, chunk), Vec::new());
    if place == 0 {
        let mut embedding = VocabParallelEmbedding::new(
            mesh,
            model.vocab,
            model.hidden,
            model.tied,
            sequence_parallel,
        )?;
        if let Positions::Learned(rows) = model.architecture.positions {
            embedding = embedding.with_positions(rows);
        }
        layers.push(StageLayer::Embed(embedding.dropping(model.dropout)));
    }
    for index in layout.blocks(model.layers, place) {
        let moe = model.moe_at(index).map(MoeConfig::spec);
        let spec = BlockSpec { moe, ..spec };
        let block = Block::new(mesh, index, &spec)?;
        let block = block.dropping(model.dropout).recomputing(layout.recompute);
        layers.push(StageLayer::Block(block));
    }
    if place + 1 == layout.places() {
        let spec = HeadSpec {
            vocab: model.vocab,
            hidden: model.hidden,
            norm: model.architecture.norm,
            eps: model.norm_eps,
            tied: model.tied,
            sequence_parallel,
        };
        layers.push(StageLayer::Head(Head::new(mesh, &spec)?));
    }
    Ok(layers)
}

/// The parameters that live on several stages: the table of a tied model whose first and last
/// chunk do.
#[must_use]
pub fn tied(model: &ModelConfig, layout: &Layout) -> Vec<Tied> {
    match ends(layout) {
        Some((first, last)) if model.tied && first != last => vec![Tied {
            name: String::from(TABLE),
            stages: vec![first.min(last), first.max(last)],
        }],
        _ => Vec::new(),
    }
}

/// Whether a stage's chunk uses the table of a tied model without storing it: the last chunk of the
/// model, where the first one lies on the same stage (at the ends of a V; on a single stage). The
/// table and its gradient are then those of the stage's chunk 0, once.
#[must_use]
pub fn borrows_table(model: &ModelConfig, layout: &Layout, stage: usize, chunk: usize) -> bool {
    let last = layout.route().place(stage, chunk) + 1 == layout.places();
    let together = ends(layout).is_some_and(|(first, last)| first == last);
    model.tied && chunk > 0 && last && together
}

/// The stages of the first and the last chunk of the model.
fn ends(layout: &Layout) -> Option<(usize, usize)> {
    let route = layout.route();
    let (first, _) = route.home(0)?;
    let (last, _) = route.home(layout.places().checked_sub(1)?)?;
    Some((first, last))
}

/// Where the parameters of a rank's chunk lie; `grad_bytes` is the width of a gradient element.
///
/// # Errors
/// What a layer or the layout refuses.
pub fn flat_layout(
    model: &ModelConfig,
    layout: &Layout,
    mesh: &DeviceMesh,
    rank: usize,
    chunk: usize,
    grad_bytes: usize,
) -> Result<FlatLayout, Error> {
    let stage = mesh.index(rank, Axis::Pp);
    let layers = stage_layers(model, layout, mesh, stage, chunk)?;
    let mut specs: Vec<Vec<ParamSpec>> = layers.iter().map(StageLayer::params).collect();
    if borrows_table(model, layout, stage, chunk) {
        specs
            .iter_mut()
            .for_each(|layer| layer.retain(|s| s.name != TABLE));
    }
    let spec = LayoutSpec {
        bucket_bytes: layout.bucket_bytes,
        element_bytes: grad_bytes,
        tied: &tied(model, layout),
        shard_within: layout.hybrid_shard_size,
    };
    Ok(FlatLayout::build(&specs, mesh, rank, &spec)?)
}

/// Parameters of a model, a tied table counted once: a sum that costs nothing, for models of any
/// size (it stops at `u128::MAX`).
#[must_use]
pub fn parameters(model: &ModelConfig) -> u128 {
    let (m, a) = (model, &model.architecture);
    let of = |rows: usize, columns: usize| (rows as u128).saturating_mul(columns as u128);
    let sum = |parts: &[u128]| parts.iter().copied().fold(0, u128::saturating_add);
    let given = |there: bool, len: u128| if there { len } else { 0 };
    let (q, kv) = (of(m.heads, m.head_dim), of(m.kv_heads, m.head_dim));
    let norm = of(norm_vectors(a.norm), m.hidden);
    let heads = sum(&[q, q, kv, kv]).saturating_mul(m.hidden as u128);
    let matrices = if a.mlp == MlpKind::SwiGlu { 3 } else { 2 };
    let block = sum(&[
        norm,
        norm,
        heads,
        given(a.qkv_bias, sum(&[q, kv, kv])),
        given(a.out_bias, m.hidden as u128),
        given(a.qk_norm, of(2, m.head_dim)),
    ]);
    let dense = sum(&[
        of(m.hidden, m.ffn).saturating_mul(matrices),
        given(
            a.out_bias && matrices == 2,
            sum(&[m.ffn as u128, m.hidden as u128]),
        ),
    ]);
    let experts = m.moe.map_or(0, |moe| {
        let each = sum(&[
            of(m.hidden, moe.ffn).saturating_mul(3),
            m.hidden as u128,
            given(moe.selection_bias, 1),
        ]);
        sum(&[
            each.saturating_mul(moe.experts as u128),
            of(m.hidden, moe.shared_ffn).saturating_mul(3),
            given(moe.shared_gate, m.hidden as u128),
        ])
    });
    let first = m.moe.map_or(m.layers, |moe| moe.first_dense.min(m.layers));
    let rows = match a.positions {
        Positions::Learned(rows) => rows,
        Positions::Rotary | Positions::PartRotary(_) => 0,
    };
    let tables = of(m.vocab, m.hidden).saturating_mul(if m.tied { 1 } else { 2 });
    sum(&[
        block.saturating_mul(m.layers as u128),
        dense.saturating_mul(first as u128),
        experts.saturating_mul((m.layers - first) as u128),
        tables,
        of(rows, m.hidden),
        norm,
    ])
}

/// Parameters of a norm per element of its width, and numbers that it keeps for each row.
pub(crate) fn norm_vectors(norm: NormKind) -> usize {
    match norm {
        NormKind::Rms => 1,
        NormKind::Layer => 2,
    }
}

/// The number of segments (gradient buckets) of each chunk, in the order of the model: what a
/// schedule is made from.
///
/// # Errors
/// As [`flat_layout`].
pub fn segments(
    model: &ModelConfig,
    layout: &Layout,
    mesh: &DeviceMesh,
    grad_bytes: usize,
) -> Result<Vec<usize>, Error> {
    let layers = segment_layers(model, layout, mesh, grad_bytes)?;
    Ok(layers.iter().map(Vec::len).collect())
}

/// Which layers of each chunk are a segment, in the order backward reaches them; chunks in the order
/// of the model.
pub(crate) fn segment_layers(
    model: &ModelConfig,
    layout: &Layout,
    mesh: &DeviceMesh,
    grad_bytes: usize,
) -> Result<Vec<Vec<Range<usize>>>, Error> {
    let per_stage = mesh.world() / layout.pp.max(1);
    let mut segments = vec![Vec::new(); layout.places()];
    for stage in 0..layout.pp {
        for chunk in 0..layout.chunks() {
            // All ranks of a stage agree on its buckets.
            let flat = flat_layout(model, layout, mesh, stage * per_stage, chunk, grad_bytes)?;
            segments[layout.route().place(stage, chunk)] = flat.segments();
        }
    }
    Ok(segments)
}

/// The order of work of all stages, reducing gradients as often as the layout's ZeRO stage does.
///
/// # Errors
/// As [`flat_layout`], and what the schedule refuses.
pub fn schedule(
    model: &ModelConfig,
    layout: &Layout,
    batch: &Batch,
    mesh: &DeviceMesh,
    grad_bytes: usize,
) -> Result<Schedule, Error> {
    let segments = segments(model, layout, mesh, grad_bytes)?;
    let microbatches = batch.microbatches() / layout.dp.max(1);
    let schedule = Schedule::new(layout.schedule, layout.pp, microbatches, &segments)?;
    let kept = ZeroStage::from_number(layout.zero_stage)?.kept();
    Ok(schedule.with_reduction(match kept.grad {
        Keep::Whole => Reduction::Once,
        Keep::Chunk => Reduction::EachMicrobatch,
    }))
}

/// The name under which a tied model's table stands in the ledger.
pub const TABLE: &str = "model.embed_tokens.weight";

#[cfg(test)]
mod tests {
    use super::*;
    use quintet_parallel_layers::Architecture;

    #[test]
    fn parameters_are_those_of_the_ledger() -> Result<(), Error> {
        let odd = Architecture {
            qkv_bias: true,
            qk_norm: true,
            ..Architecture::LLAMA
        };
        let moe = MoeConfig {
            selection_bias: true,
            shared_ffn: 5,
            shared_gate: true,
            first_dense: 1,
            ..MoeConfig::new(4, 2, 3)
        };
        for (tied, kv_heads, degrees, architecture, moe) in [
            (true, 2, (1, 1, 1), Architecture::LLAMA, None),
            (false, 4, (2, 2, 3), odd, None),
            (true, 1, (1, 4, 2), Architecture::gpt2(7), None),
            (true, 2, (2, 2, 1), Architecture::LLAMA, Some(moe)),
        ] {
            let model = ModelConfig {
                vocab: 51,
                hidden: 24,
                layers: 3,
                heads: 4,
                kv_heads,
                head_dim: 10,
                ffn: 14,
                rope_theta: 1e4,
                norm_eps: 1e-5,
                tied,
                moe,
                window: None,
                dropout: 0.0,
                architecture,
            };
            let (dp, tp, pp) = degrees;
            let layout = Layout {
                ep: if moe.is_some() { 2 } else { 1 },
                dp,
                tp,
                pp,
                ..Layout::single()
            };
            let mesh = mesh(&layout)?;
            let mut counted = 0;
            for rank in 0..mesh.world() {
                let flat = flat_layout(&model, &layout, &mesh, rank, 0, 4)?;
                counted += flat
                    .counted()
                    .iter()
                    .map(|p| p.range.len() as u128)
                    .sum::<u128>();
            }
            assert_eq!(parameters(&model), counted);
        }
        Ok(())
    }

    #[test]
    fn no_size_overflows() {
        let most = usize::MAX;
        let model = ModelConfig {
            vocab: most,
            hidden: most,
            layers: most,
            heads: most,
            kv_heads: most,
            head_dim: most,
            ffn: most,
            rope_theta: 1e4,
            norm_eps: 1e-5,
            tied: false,
            moe: None,
            window: None,
            dropout: 0.0,
            architecture: Architecture::gpt2(most),
        };
        assert_eq!(parameters(&model), u128::MAX);
    }
}
