//! The parameters of a layer on the first rank of tp, ep and etp, by who sums their gradients.

use quintet_collectives::chunk::chunk_len;
use quintet_parallel_layers::{MlpKind, Positions};

use super::ByKind;
use crate::model::norm_vectors;
use crate::shape::Shape;
use crate::{Layout, ModelConfig};

/// Elements of one layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Parts {
    /// Summed over dp x cp.
    pub replicas: u64,
    /// Summed over tp before that: used by each rank on tokens of its own.
    pub over_tp: u64,
    /// Summed over the ranks of tp that share a KV head before that.
    pub over_rep: u64,
    /// Experts, summed over edp.
    pub experts: u64,
    /// Without a gradient.
    pub alone: u64,
}

/// How many ranks cut what under ZeRO.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Places {
    /// dp x cp.
    pub dense: u64,
    /// edp.
    pub experts: u64,
}

impl Places {
    /// Those of a layout.
    #[must_use]
    pub fn of(layout: &Layout) -> Self {
        let folded = layout.dp * layout.cp * layout.tp;
        Self {
            dense: (layout.dp * layout.cp) as u64,
            experts: (folded / (layout.ep * layout.etp).max(1)) as u64,
        }
    }
}

impl Parts {
    /// Length and places of each.
    #[must_use]
    pub fn each(&self, places: Places) -> [(u64, u64); 5] {
        [
            (self.replicas, places.dense),
            (self.over_tp, places.dense),
            (self.over_rep, places.dense),
            (self.experts, places.experts),
            (self.alone, 1),
        ]
    }

    /// Elements.
    #[must_use]
    pub fn whole(&self) -> u64 {
        self.replicas + self.over_tp + self.over_rep + self.experts + self.alone
    }

    /// Elements of the first rank's chunks.
    #[must_use]
    pub fn chunks(&self, places: Places) -> u64 {
        let each = self.each(places).into_iter();
        each.map(|(len, places)| len.div_ceil(places.max(1))).sum()
    }

    /// Elements of the parts that several ranks have chunks of.
    #[must_use]
    pub fn cut(&self, places: Places) -> u64 {
        let each = self.each(places).into_iter();
        each.map(|(len, places)| if places > 1 { len } else { 0 })
            .sum()
    }
}

/// The parts of each kind of layer.
#[must_use]
pub fn by_kind(shape: &Shape, layout: &Layout) -> ByKind<Parts> {
    let m = &shape.config;
    let cut = Cut { layout, m };
    let attention = cut.attention(shape);
    let vocab = (cut.tp(m.vocab) * m.hidden) as u64;
    let norm = (norm_vectors(m.architecture.norm) * m.hidden) as u64;
    let positions = match m.architecture.positions {
        Positions::Learned(rows) => (rows * m.hidden) as u64,
        Positions::Rotary | Positions::PartRotary(_) => 0,
    };
    let (mut embed, mut head) = (Parts::default(), Parts::default());
    embed.replicas = vocab;
    cut.outside(&mut embed, positions);
    head.replicas = vocab;
    cut.outside(&mut head, norm);
    ByKind {
        embed,
        dense: cut.mlp(attention),
        moe: cut.experts(attention),
        head,
    }
}

struct Cut<'a> {
    layout: &'a Layout,
    m: &'a ModelConfig,
}

impl Cut<'_> {
    /// The first rank's part of a width.
    fn tp(&self, width: usize) -> usize {
        chunk_len(width, self.layout.tp, 0)
    }

    /// What is used between the regions of tp: alike by all ranks, or by each on its tokens.
    fn outside(&self, parts: &mut Parts, len: u64) {
        if self.layout.sequence_parallel && self.layout.tp > 1 {
            parts.over_tp += len;
        } else {
            parts.replicas += len;
        }
    }

    /// What each rank of tp has whole and uses on heads or tokens of its own.
    fn replicate(&self, parts: &mut Parts, len: u64) {
        if self.layout.tp > 1 {
            parts.over_tp += len;
        } else {
            parts.replicas += len;
        }
    }

    /// Two norms and the attention.
    fn attention(&self, shape: &Shape) -> Parts {
        let (m, tp, mut parts) = (self.m, self.layout.tp, Parts::default());
        let a = &m.architecture;
        self.outside(&mut parts, (2 * norm_vectors(a.norm) * m.hidden) as u64);
        let heads = m.heads / tp;
        if let Some(latent) = shape.latent {
            let (narrow, norms) = latent.whole(m.hidden);
            self.outside(&mut parts, narrow + norms);
            parts.replicas += heads as u64 * latent.per_head(m.hidden);
            return parts;
        }
        let bias = usize::from(a.qkv_bias);
        let q = heads * m.head_dim * (2 * m.hidden + bias);
        let kv = 2 * (m.kv_heads / tp).max(1) * m.head_dim * (m.hidden + bias);
        parts.replicas += q as u64;
        // Of tp = KV heads x rep, those of one KV head hold copies.
        if tp <= m.kv_heads {
            parts.replicas += kv as u64;
        } else if m.kv_heads == 1 {
            parts.over_tp += kv as u64;
        } else {
            parts.over_rep += kv as u64;
        }
        if a.out_bias {
            self.outside(&mut parts, m.hidden as u64);
        }
        if a.qk_norm {
            self.replicate(&mut parts, 2 * m.head_dim as u64);
        }
        parts
    }

    fn mlp(&self, mut parts: Parts) -> Parts {
        let (m, f) = (self.m, self.tp(self.m.ffn));
        match m.architecture.mlp {
            MlpKind::SwiGlu => parts.replicas += (3 * f * m.hidden) as u64,
            MlpKind::Gelu => {
                let bias = usize::from(m.architecture.out_bias);
                parts.replicas += (2 * f * m.hidden + bias * f) as u64;
                self.outside(&mut parts, (bias * m.hidden) as u64);
            }
        }
        parts
    }

    fn experts(&self, mut parts: Parts) -> Parts {
        let m = self.m;
        let Some(moe) = &m.moe else {
            return parts;
        };
        self.replicate(&mut parts, (moe.experts * m.hidden) as u64);
        if moe.selection_bias {
            parts.alone += moe.experts as u64;
        }
        let f = chunk_len(moe.ffn, self.layout.etp, 0);
        parts.experts += (moe.experts / self.layout.ep * 3 * f * m.hidden) as u64;
        parts.replicas += (3 * self.tp(moe.shared_ffn) * m.hidden) as u64;
        if moe.shared_gate {
            self.outside(&mut parts, m.hidden as u64);
        }
        parts
    }
}
