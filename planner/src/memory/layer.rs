//! Bytes of one layer for one microbatch.

use quintet_collectives::chunk::chunk_len;
use quintet_parallel_layers::pipeline::stage::IN_FLIGHT;
use quintet_parallel_layers::{MlpKind, Recompute};

use crate::closed::ByKind;
use crate::config::MoeConfig;
use crate::model::{StageLayer, norm_vectors};
use crate::traffic::WireTypes;
use crate::{Batch, CpComm, Layout, ModelConfig};

/// A layer's bytes of one microbatch.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Bytes {
    pub(crate) saved: u64,
    /// More than that after its backward_input.
    pub(crate) kept: u64,
    /// More than that for a time.
    pub(crate) passing: u64,
    /// Of `saved`, what selective recomputation leaves out.
    cheap: u64,
    /// What forward makes, lets go and backward makes again: of a block, `saved` without it.
    pub(crate) again: u64,
}

impl Bytes {
    /// Both; what backward alone has for a time, and what forward does, is the larger one's.
    pub(super) fn and(self, other: &Self) -> Self {
        Self {
            saved: self.saved + other.saved,
            kept: self.kept + other.kept,
            passing: self.passing.max(other.passing),
            cheap: self.cheap + other.cheap,
            again: self.again.max(other.again),
        }
    }

    /// Of a block whose input takes `input`, as it is computed again.
    fn recomputing(mut self, mode: Recompute, input: u64) -> Self {
        self.again = match mode {
            Recompute::None => 0,
            Recompute::Selective => self.cheap,
            Recompute::Full => self.saved - input,
        };
        self.saved -= self.again;
        self.kept += self.again;
        self
    }
}

/// What the first rank of tp, which has the most, holds of one microbatch in each kind of layer.
pub(crate) fn by_kind(
    model: &ModelConfig,
    layout: &Layout,
    batch: &Batch,
    types: WireTypes,
) -> ByKind<Bytes> {
    let here = Here::new(model, layout, batch, types, (0, 0, 0));
    let stats = here.stats(model);
    let again = |bytes: Bytes| bytes.recomputing(layout.recompute, here.e * here.r * here.d);
    ByKind {
        embed: here.embedding(),
        dense: again(here.block(model, stats)),
        moe: match &model.moe {
            Some(moe) => again(here.mixture(model, moe, stats, here.even(moe))),
            None => Bytes::default(),
        },
        head: here.head(model, stats),
    }
}

/// Bytes of one message between stages, as the first rank of tp sends it.
pub(crate) fn message(
    model: &ModelConfig,
    layout: &Layout,
    batch: &Batch,
    types: WireTypes,
) -> u64 {
    let here = Here::new(model, layout, batch, types, (0, 0, 0));
    here.e * here.r * here.d
}

/// Rows of one microbatch in one layer with experts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Rows {
    /// Pairs (token, choice) of this rank's tokens that were not dropped.
    pub(crate) sent: u64,
    /// Rows that this rank's experts, or its parts of them, are given.
    pub(crate) here: u64,
}

/// What a rank holds of a microbatch.
pub(super) struct Here {
    /// Ranks of tp, and this one's place among them.
    tp: (usize, usize),
    /// The same of those that share an expert.
    etp: (usize, usize),
    stage: usize,
    sequence_parallel: bool,
    recompute: Recompute,
    /// Context parallel ranks, those that exchange heads, and those whose keys are gathered.
    cp: (u64, u64, u64),
    /// Tokens of a microbatch here, those of this rank between layers, hidden width.
    t: u64,
    r: u64,
    d: u64,
    /// Bytes of an element and of a statistic.
    e: u64,
    a: u64,
}

impl Here {
    /// On the rank with these places on tp, etp and pp.
    pub(super) fn new(
        model: &ModelConfig,
        layout: &Layout,
        batch: &Batch,
        types: WireTypes,
        (tp, etp, stage): (usize, usize, usize),
    ) -> Self {
        let (t, tp) = (batch.micro_batch * batch.seq / layout.cp, (layout.tp, tp));
        let r = if layout.sequence_parallel {
            chunk_len(t, tp.0, tp.1)
        } else {
            t
        };
        Self {
            tp,
            etp: (layout.etp, etp),
            stage,
            sequence_parallel: layout.sequence_parallel,
            recompute: layout.recompute,
            cp: (
                layout.cp as u64,
                layout.ulysses() as u64,
                if layout.cp_comm == CpComm::AllGather {
                    layout.cp_outer() as u64
                } else {
                    1
                },
            ),
            t: t as u64,
            r: r as u64,
            d: model.hidden as u64,
            e: types.storage.bytes() as u64,
            a: types.accumulation.bytes() as u64,
        }
    }

    /// This rank's part of a width.
    fn part(&self, width: usize) -> u64 {
        chunk_len(width, self.tp.0, self.tp.1) as u64
    }

    /// A layer's bytes; `rows` are those of a layer with experts, an even routing's where absent.
    pub(super) fn layer(
        &self,
        model: &ModelConfig,
        layer: &StageLayer,
        rows: Option<Rows>,
    ) -> Bytes {
        let stats = self.stats(model);
        match layer {
            StageLayer::Embed(_) => self.embedding(),
            StageLayer::Block(block) => match model.moe_at(block.index()) {
                None => self.block(model, stats),
                Some(moe) => {
                    let rows = rows.unwrap_or_else(|| self.even(moe));
                    self.mixture(model, moe, stats, rows)
                }
            }
            .recomputing(self.recompute, self.e * self.r * self.d),
            StageLayer::Head(_) => self.head(model, stats),
        }
    }

    /// Bytes of one norm's statistics.
    fn stats(&self, model: &ModelConfig) -> u64 {
        self.a * self.r * norm_vectors(model.architecture.norm) as u64
    }

    fn embedding(&self) -> Bytes {
        let Self { t, d, e, .. } = *self;
        Bytes {
            kept: e * t * d,
            passing: e * t * d,
            ..Bytes::default()
        }
    }

    fn head(&self, model: &ModelConfig, stats: u64) -> Bytes {
        let Self { t, r, d, e, a, .. } = *self;
        let v = self.part(model.vocab);
        Bytes {
            saved: e * (2 * r * d + t * v) + stats + a * 3 * t,
            kept: e * r * d,
            passing: e * t * (v + d) + a * t,
            ..Bytes::default()
        }
    }

    /// `stats` are the bytes of one norm's statistics.
    fn block(&self, model: &ModelConfig, stats: u64) -> Bytes {
        let Self { t, r, d, e, a, .. } = *self;
        let whole = if self.sequence_parallel { 2 * t * d } else { 0 };
        let heads = self.part(model.heads);
        // With fewer KV heads than ranks, neighbours hold the same one.
        let kv_heads = (model.kv_heads / self.tp.0).max(1) as u64;
        let (width, f) = (model.head_dim as u64, self.part(model.ffn));
        let (q, k) = (heads * width, kv_heads * width);
        let (cp, ulysses, gathered) = self.cp;
        // Of a ulysses group's tokens, what one rank has of k.
        let shared = ulysses * (kv_heads / ulysses).max(1) * width;
        let twice = if ulysses > 1 { q } else { 0 };
        let mlp = e * 3 * t * f;
        // Of a gradient, what dropout leaves.
        let dropped = if model.dropout > 0.0 { r * d } else { 0 };
        let attention = if cp == 1 {
            e * 2 * t * (q + k) + a * t * heads
        } else {
            // Gradients in Acc, in storage, and on their way from heads to tokens.
            e * t * (5 * q + 4 * k) + a * t * (q + 2 * shared + 2 * k + heads)
        };
        let mut bytes = Bytes {
            saved: e * (4 * r * d + mlp_widths(model) as u64 * t * f)
                + e * t * (2 * q + twice + 2 * shared * gathered)
                + 2 * stats
                + a * t * heads,
            kept: e * (4 * r * d + whole),
            passing: e * (2 * t * d + dropped) + mlp.max(attention),
            cheap: e * (2 * r * d + t * f),
            again: 0,
        };
        if model.architecture.qk_norm {
            bytes.saved += e * t * (q + k) + a * t * (heads + kv_heads);
            bytes.kept += e * t * (q + k);
        }
        bytes
    }

    /// Tokens of this rank that go to experts.
    fn mine(&self) -> u64 {
        chunk_len(self.t as usize, self.tp.0, self.tp.1) as u64
    }

    /// The rows of an even routing.
    fn even(&self, moe: &MoeConfig) -> Rows {
        let sent = self.mine() * moe.topk as u64;
        Rows {
            sent,
            here: sent * self.etp.0 as u64,
        }
    }

    /// A block with experts.
    fn mixture(&self, model: &ModelConfig, moe: &MoeConfig, stats: u64, rows: Rows) -> Bytes {
        let Self { t, r, d, e, a, .. } = *self;
        let without = ModelConfig {
            ffn: 0,
            ..model.clone()
        };
        let mut bytes = self.block(&without, stats);
        let (mine, experts) = (self.mine(), moe.experts as u64);
        let Rows { sent, here } = rows;
        let f = chunk_len(moe.ffn, self.etp.0, self.etp.1) as u64;
        // The MLP's input is this rank's tokens alone.
        bytes.saved -= e * (r - mine) * d;
        bytes.cheap = e * ((r + mine) * d + here * f);
        bytes.saved += a * mine * (experts + moe.topk as u64) + e * (sent * d + here * (d + 3 * f));
        bytes.kept += a * mine * experts + e * here * d;
        bytes.passing += e * (2 * sent * d + 2 * here * (d + f));
        if moe.shared_ffn > 0 {
            let shared = self.part(moe.shared_ffn);
            bytes.saved += e * (r * d + 3 * t * shared);
            bytes.cheap += e * (r * d + t * shared);
            bytes.kept += e * t * d;
            bytes.passing += e * t * (d + 3 * shared);
        }
        if moe.shared_gate {
            bytes.saved += e * 2 * self.r * d + 2 * a * self.r;
            bytes.cheap += e * self.r * d;
        }
        bytes
    }

    /// Messages under way, and the buffers that some come in: of all chunks that have a neighbour.
    pub(super) fn boundaries(&self, layout: &Layout) -> u64 {
        let places = (0..layout.chunks()).map(|chunk| layout.route().place(self.stage, chunk));
        let neighbours = places.map(|p| u64::from(p > 0) + u64::from(p + 1 < layout.places()));
        neighbours.sum::<u64>() * (IN_FLIGHT as u64 + 1) * self.e * self.r * self.d
    }
}

/// Values of the MLP's width that its forward saves.
pub(super) fn mlp_widths(model: &ModelConfig) -> usize {
    match model.architecture.mlp {
        MlpKind::SwiGlu => 3,
        MlpKind::Gelu => 2,
    }
}
