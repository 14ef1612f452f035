//! What sets decoders of one shape apart: which norm, which MLP, how positions enter, where
//! biases are, and whether scores are capped (Gemma 2, 2024).
//!
//! | | norm | MLP | positions | biases | q and k norms |
//! |---|---|---|---|---|---|
//! | Llama (Touvron et al. 2023) | RMS | SwiGLU | rotary | none | no |
//! | Qwen2 (2024) | RMS | SwiGLU | rotary | q, k, v | no |
//! | GPT-2 (Radford et al. 2019) | Layer | GELU | learned | all | no |
//! | Qwen3-MoE (2025) | RMS | SwiGLU | rotary | none | yes |
//! | GLM-4-MoE (2025) | RMS | SwiGLU | rotary, part of a head | q, k, v | yes |

use crate::norm::NormKind;

/// How a token's position enters the model.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Positions {
    /// Queries and keys turn, all of a head.
    Rotary,
    /// The first so many elements of a head turn; even.
    PartRotary(usize),
    /// A table of so many rows is added to the embedding.
    Learned(usize),
}

/// Which MLP stands in a block.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum MlpKind {
    /// `(silu(x Wg) * x Wu) Wd` (Shazeer 2020).
    SwiGlu,
    /// `gelu(x Wu + b) Wd + b`, tanh form.
    Gelu,
}

/// The ways in which decoders differ.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Architecture {
    /// Between regions and before the head.
    pub norm: NormKind,
    /// In every block.
    pub mlp: MlpKind,
    /// How positions enter.
    pub positions: Positions,
    /// Queries, keys and values have a bias.
    pub qkv_bias: bool,
    /// So has what attention and the MLP write, and the MLP's first matrix.
    pub out_bias: bool,
    /// Queries and keys are normalised per head before they turn, by weights of their own.
    pub qk_norm: bool,
    /// Scores of attention are `cap tanh(score / cap)`; plain where absent.
    pub softcap: Option<f64>,
}

impl Architecture {
    /// Llama's.
    pub const LLAMA: Self = Self {
        norm: NormKind::Rms,
        mlp: MlpKind::SwiGlu,
        positions: Positions::Rotary,
        qkv_bias: false,
        out_bias: false,
        qk_norm: false,
        softcap: None,
    };

    /// GPT-2's, with a table of `positions` rows.
    #[must_use]
    pub const fn gpt2(positions: usize) -> Self {
        Self {
            norm: NormKind::Layer,
            mlp: MlpKind::Gelu,
            positions: Positions::Learned(positions),
            qkv_bias: true,
            out_bias: true,
            qk_norm: false,
            softcap: None,
        }
    }

    /// Elements of a head of `head_dim` that turn; none with learned positions.
    #[must_use]
    pub const fn rotary(&self, head_dim: usize) -> usize {
        match self.positions {
            Positions::Rotary => head_dim,
            Positions::PartRotary(dims) => dims,
            Positions::Learned(_) => 0,
        }
    }
}
