//! The model cut into stages, as the trainer builds it: which layers a stage holds, and where
//! their parameters lie.
//!
//! ```text
//! stage 0        embedding | block 0 | block 1
//! stage 1                                      block 2 | block 3 | head (norm, linear, loss)
//! ```

use alloc::string::String;
use alloc::vec;
use alloc::vec::Vec;

use quintet_collectives::{Axis, Degrees, DeviceMesh, ParamSpec};
use quintet_parallel_layers::{
    Block, BlockSpec, Head, HeadSpec, Positions, VocabParallelEmbedding,
};
use quintet_zero::{FlatLayout, LayoutSpec, Tied};

use crate::{Error, Layout, ModelConfig};

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
        architecture: model.architecture,
    };
    let (place, mut layers) = (layout.place(stage, chunk), Vec::new());
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
        layers.push(StageLayer::Embed(embedding));
    }
    for index in layout.blocks(model.layers, place) {
        layers.push(StageLayer::Block(Block::new(mesh, index, &spec)?));
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

/// The parameters that live on several stages: the table of a tied model.
#[must_use]
pub fn tied(model: &ModelConfig, layout: &Layout) -> Vec<Tied> {
    if !model.tied || layout.pp < 2 {
        return Vec::new();
    }
    vec![Tied {
        name: String::from(TABLE),
        stages: vec![0, layout.pp - 1],
    }]
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
    let specs: Vec<Vec<ParamSpec>> = layers.iter().map(StageLayer::params).collect();
    let spec = LayoutSpec {
        bucket_bytes: layout.bucket_bytes,
        element_bytes: grad_bytes,
        tied: &tied(model, layout),
    };
    Ok(FlatLayout::build(&specs, mesh, rank, &spec)?)
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
    let per_stage = mesh.world() / layout.pp.max(1);
    let mut segments = vec![1; layout.places()];
    for stage in 0..layout.pp {
        for chunk in 0..layout.chunks() {
            // All ranks of a stage agree on its buckets.
            let flat = flat_layout(model, layout, mesh, stage * per_stage, chunk, grad_bytes)?;
            segments[layout.place(stage, chunk)] = flat.buckets().len();
        }
    }
    Ok(segments)
}

/// The name under which a tied model's table stands in the ledger.
const TABLE: &str = "model.embed_tokens.weight";
