//! What is trained (here), how it is cut (`layout.rs`), and which of that can be (`validate.rs`).

use quintet_parallel_layers::Architecture;
use quintet_parallel_layers::moe::{MoeSpec, Score};

mod layout;
mod validate;

pub use layout::{CpComm, Layout};
pub use validate::{Invalid, validate};

/// Shape of a decoder, and which one it is.
#[derive(Debug, Clone, PartialEq)]
pub struct ModelConfig {
    /// Vocabulary entries.
    pub vocab: usize,
    /// Width of the residual stream.
    pub hidden: usize,
    /// Decoder blocks.
    pub layers: usize,
    /// Query heads.
    pub heads: usize,
    /// Key and value heads; divides `heads`.
    pub kv_heads: usize,
    /// Width of a head; even.
    pub head_dim: usize,
    /// Width of the MLP.
    pub ffn: usize,
    /// Base of the rotary frequencies.
    pub rope_theta: f64,
    /// Added to the variance in norms.
    pub norm_eps: f64,
    /// Embedding and head share one table.
    pub tied: bool,
    /// A mixture of experts in place of the MLPs.
    pub moe: Option<MoeConfig>,
    /// A token sees so many tokens of its document, itself the last of them; all before it where
    /// absent.
    pub window: Option<usize>,
    /// Share of activations let go in training, in [0, 1).
    pub dropout: f64,
    /// Norm, MLP, positions, biases.
    pub architecture: Architecture,
}

impl ModelConfig {
    /// The mixture of block `layer`; none where its MLP is dense.
    #[must_use]
    pub fn moe_at(&self, layer: usize) -> Option<&MoeConfig> {
        self.moe.as_ref().filter(|moe| layer >= moe.first_dense)
    }
}

/// A mixture of experts, the same in every block that has one.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct MoeConfig {
    /// Experts; ep divides them.
    pub experts: usize,
    /// Experts a token goes to.
    pub topk: usize,
    /// Width of an expert.
    pub ffn: usize,
    /// From logits to scores.
    pub score: Score,
    /// The weights of a token are divided by their sum.
    pub normalize: bool,
    /// Multiplies the weights last.
    pub scale: f64,
    /// A bias on the choice alone.
    pub selection_bias: bool,
    /// How far that bias moves after a step, up where an expert had less than the mean and down
    /// where it had more (DeepSeek-V3).
    pub bias_update_rate: f64,
    /// Weight of the balance loss.
    pub aux_loss: f64,
    /// Weight of the router's z-loss.
    pub z_loss: f64,
    /// Room of an expert over its fair share; none drops nothing.
    pub capacity_factor: Option<f64>,
    /// Width of the shared experts together; 0 is none.
    pub shared_ffn: usize,
    /// Each token weighs the shared experts by a gate.
    pub shared_gate: bool,
    /// So many blocks at the beginning have a dense MLP.
    pub first_dense: usize,
}

impl MoeConfig {
    /// Softmax over `experts` of width `ffn`, `topk` of them with weights that sum to one, and
    /// nothing else.
    #[must_use]
    pub fn new(experts: usize, topk: usize, ffn: usize) -> Self {
        Self {
            experts,
            topk,
            ffn,
            score: Score::Softmax,
            normalize: true,
            scale: 1.0,
            selection_bias: false,
            bias_update_rate: 1e-3,
            aux_loss: 0.0,
            z_loss: 0.0,
            capacity_factor: None,
            shared_ffn: 0,
            shared_gate: false,
            first_dense: 0,
        }
    }

    /// As the layer takes it.
    #[must_use]
    pub fn spec(&self) -> MoeSpec {
        MoeSpec {
            experts: self.experts,
            topk: self.topk,
            ffn: self.ffn,
            score: self.score,
            normalize: self.normalize,
            scale: self.scale,
            selection_bias: self.selection_bias,
            aux_loss: self.aux_loss,
            z_loss: self.z_loss,
            capacity_factor: self.capacity_factor,
            shared_ffn: self.shared_ffn,
            shared_gate: self.shared_gate,
        }
    }
}

/// How much is learnt from in a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Batch {
    /// Tokens predicted per sample.
    pub seq: usize,
    /// Samples in a microbatch.
    pub micro_batch: usize,
    /// Samples in a step.
    pub global_batch: usize,
}

impl Batch {
    /// Microbatches in a step, over all data parallel ranks.
    #[must_use]
    pub fn microbatches(&self) -> usize {
        self.global_batch / self.micro_batch.max(1)
    }
}
