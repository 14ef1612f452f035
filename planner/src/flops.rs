//! Operations of a step, with the formula that counts them: a figure of MFU means nothing without
//! it.
//!
//! Of each token, forward: 2 for every weight of a matrix that it meets (the embedding is a look-up
//! and counts nothing, the head counts; of experts those it goes to), and 4 heads x head_dim for
//! every token it attends to. Backward is twice forward. Under `Causal::Half` a token attends to
//! half of its sequence, which is what a causal kernel computes; under `Causal::Full` to all of it,
//! which is how Megatron, PaLM and torchtitan count. Work done again for recompute is in HFU and not
//! in MFU.

use alloc::format;
use alloc::string::String;

use quintet_parallel_layers::MlpKind;

use crate::shape::Shape;

/// How attention under a causal mask is counted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Causal {
    /// A token attends to half of its sequence on average.
    #[default]
    Half,
    /// As if there were no mask.
    Full,
}

/// Operations of one token, forward and backward.
#[derive(Debug, Clone, PartialEq)]
pub struct Flops {
    /// Of matrices.
    pub matrices: f64,
    /// Of attention proper.
    pub attention: f64,
    /// How they were counted.
    pub formula: String,
}

impl Flops {
    /// Both.
    #[must_use]
    pub fn per_token(&self) -> f64 {
        self.matrices + self.attention
    }
}

/// Weights of matrices that a token meets: all but embedding, norms and biases.
#[must_use]
pub fn met(shape: &Shape) -> f64 {
    let c = &shape.config;
    let (h, dense) = (
        c.hidden as f64,
        match c.architecture.mlp {
            MlpKind::SwiGlu => 3.0,
            MlpKind::Gelu => 2.0,
        },
    );
    let attention = match shape.latent {
        Some(latent) => {
            latent.whole(c.hidden).0 as f64 + c.heads as f64 * latent.per_head(c.hidden) as f64
        }
        None => 2.0 * ((c.heads + c.kv_heads) * c.head_dim) as f64 * h,
    };
    let first = c.moe.map_or(c.layers, |moe| moe.first_dense.min(c.layers));
    let experts = c.moe.map_or(0.0, |moe| {
        h * (3.0 * (moe.topk * moe.ffn + moe.shared_ffn) as f64 + moe.experts as f64)
    });
    c.layers as f64 * attention
        + first as f64 * dense * h * c.ffn as f64
        + (c.layers - first) as f64 * experts
        + h * c.vocab as f64
}

/// Operations of a token in sequences of `seq`.
#[must_use]
pub fn per_token(shape: &Shape, seq: usize, causal: Causal) -> Flops {
    let c = &shape.config;
    let seen = c.window.map_or(seq, |window| window.min(seq)) as f64;
    let (share, word) = match causal {
        Causal::Half => (0.5, "half of"),
        Causal::Full => (1.0, "all of"),
    };
    let met = met(shape);
    let attention = 12.0 * (c.layers * c.heads * c.head_dim) as f64 * seen * share;
    Flops {
        matrices: 6.0 * met,
        attention,
        formula: format!(
            "6 x {met:.4e} weights met + 12 x {} layers x {} x {word} {seen} tokens = {:.4e} a token; recompute not counted",
            c.layers,
            c.heads * c.head_dim,
            6.0 * met + attention
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Megatron's formula (arXiv:2104.04473, without its recompute): 72 B s L h^2 (1 + s / 6h + V /
    /// 12 h L).
    #[test]
    fn full_attention_is_megatrons_count() {
        let gpt3 = Shape::named("gpt3-175b").unwrap();
        let (h, l, v, s) = (12_288.0, 96.0, 51_200.0, 2048.0);
        let theirs = 72.0 * l * h * h * (1.0 + s / (6.0 * h) + v / (12.0 * h * l));
        let ours = per_token(&gpt3, 2048, Causal::Full).per_token();
        assert!((ours / theirs - 1.0).abs() < 1e-12);
        let half = per_token(&gpt3, 2048, Causal::Half);
        let full = per_token(&gpt3, 2048, Causal::Full);
        assert_eq!(half.matrices, full.matrices);
        assert_eq!(half.attention * 2.0, full.attention);
        assert!(half.formula.contains("half of 2048"));
    }

    #[test]
    fn a_token_meets_few_experts() {
        let v3 = Shape::named("deepseek-v3").unwrap();
        let without_tables = v3.active() as f64 - 2.0 * 129_280.0 * 7168.0;
        // But for norms and the bias of the choice.
        let matrices = met(&v3) - 129_280.0 * 7168.0;
        assert!((matrices / without_tables - 1.0).abs() < 1e-3);
    }
}
