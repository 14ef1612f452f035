//! What a training step keeps in memory for its activations, worked out from config, ledger and
//! schedule before anything runs.
//!
//! Per microbatch and layer, with t tokens, r of them on this rank between layers (r = t, or t / tp
//! under sequence parallelism), d the hidden width, and q, k, f, v this rank's part of the query, KV,
//! MLP and vocabulary widths:
//!
//! | layer | forward saves | backward holds besides, at most |
//! |-------|---------------|---------------------------------|
//! | embedding | nothing | t d |
//! | block | 2 r d + 2 t d + 2 t q + 2 t k + 3 t f, and 2 r + t heads statistics | 4 r d (2 t d under sequence parallelism) to the end of the stage's backward; for a time 2 t d and the larger of 3 t f and 2 t q + 2 t k |
//! | head | r d + t d + t v, and r + 3 t statistics | r d to the end; for a time t v + t d |
//!
//! With experts, how many rows a rank holds is for the router to decide; figured in are those of an
//! even routing without drops, R = t / tp topk etp of width d and 3 f: an estimate, and no bound.
//! Over cp, t are the tokens of a microbatch that are here. All-gather saves the k and v of whole
//! sequences; a ulysses group of U saves o twice, and U k where it shares a KV head.
//!
//! Dropout stores no mask: it adds r d for a time, a gradient of what it left. That is Llama's block: GELU saves 2 t f instead of 3 t f, LayerNorm two statistics a row instead of
//! one, and norms of queries and keys t q + t k more. A stage keeps what forward saves of as many
//! microbatches as its schedule holds at once, and between stages r d for each message under way.
//!
//! Where blocks are computed again ([`Recompute`]), forward saves less of them: selective leaves out
//! 2 t d + t f (the norms' outputs, which stay where sequence parallelism gathered them, and the
//! product of the MLP), full all but r d. What is left out is there again from a segment's
//! backward_input to its backward_weight, and while its forward runs.

use alloc::vec::Vec;
use core::ops::Range;

use quintet_collectives::Axis;
use quintet_collectives::chunk::chunk_len;
use quintet_parallel_layers::pipeline::stage::IN_FLIGHT;
use quintet_parallel_layers::pipeline::{Action, Schedule};
use quintet_parallel_layers::{MlpKind, Recompute};

use crate::closed::ByKind;
use crate::config::MoeConfig;
use crate::model::{StageLayer, mesh, norm_vectors, segment_layers, stage_layers};
use crate::traffic::WireTypes;
use crate::{Batch, CpComm, Error, Layout, ModelConfig};

/// Bytes of activations on a rank. The most that is held at once lies between `saved` and
/// `saved + work`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Activations {
    /// What forward saves, of all microbatches that the schedule holds at once.
    pub saved: u64,
    /// What backward and the messages between stages add to that, at most.
    pub work: u64,
}

/// The activations of every rank in one training step, in rank order.
///
/// # Errors
/// Where the layout cannot be.
pub fn activations(
    model: &ModelConfig,
    layout: &Layout,
    batch: &Batch,
    types: WireTypes,
) -> Result<Vec<Activations>, Error> {
    let mesh = mesh(layout)?;
    let segments = segment_layers(model, layout, &mesh, types.accumulation.bytes())?;
    let mbs = batch.microbatches() / layout.dp;
    let counts: Vec<usize> = segments.iter().map(Vec::len).collect();
    let schedule = Schedule::new(layout.schedule, layout.pp, mbs, &counts)?;
    (0..mesh.world())
        .map(|rank| {
            let stage = mesh.index(rank, Axis::Pp);
            let place = (mesh.index(rank, Axis::Tp), stage);
            let here = Here::new(model, layout, batch, types, place);
            let (mut chunks, mut passing) = (Vec::new(), 0);
            for chunk in 0..layout.chunks() {
                let layers = stage_layers(model, layout, &mesh, stage, chunk)?;
                let bytes: Vec<Bytes> = layers.iter().map(|l| here.layer(model, l)).collect();
                passing = bytes.iter().map(|l| l.passing).fold(passing, u64::max);
                let segments = segments[layout.route().place(stage, chunk)].iter();
                let sum = |run: &Range<usize>| {
                    bytes[run.clone()].iter().fold(Bytes::default(), Bytes::and)
                };
                chunks.push(segments.map(sum).collect());
            }
            let (saved, most) = highest(&schedule.actions(stage), &chunks);
            Ok(Activations {
                saved,
                work: most - saved + passing + here.boundaries(layout),
            })
        })
        .collect()
}

/// The most that is saved at once, and that together with what backward keeps, by chunk and segment:
/// saved from a forward to the gradients of the segment's parameters, kept from the gradient of its
/// input.
fn highest(actions: &[Action], chunks: &[Vec<Bytes>]) -> (u64, u64) {
    let (mut saved, mut kept, mut peak, mut most) = (0, 0, 0, 0);
    for action in actions {
        let mut passing = 0;
        match *action {
            Action::Forward { chunk, .. } => {
                saved += chunks[chunk]
                    .iter()
                    .map(|segment| segment.saved)
                    .sum::<u64>();
                passing = chunks[chunk].iter().map(|s| s.again).max().unwrap_or(0);
            }
            Action::BackwardInput { chunk, segment, .. } => kept += chunks[chunk][segment].kept,
            Action::BackwardWeight { chunk, segment, .. } => {
                saved -= chunks[chunk][segment].saved;
                kept -= chunks[chunk][segment].kept;
            }
            _ => {}
        }
        (peak, most) = (peak.max(saved), most.max(saved + kept + passing));
    }
    (peak, most)
}

/// Elements that forward saves of one microbatch of `tokens`, over all the ranks of a replica:
/// exact on one rank that computes nothing again, else a lower bound: several hold some of it
/// several times, and backward makes at least one block again. Costs nothing for models of any size.
#[must_use]
pub fn microbatch(model: &ModelConfig, tokens: usize, recompute: Recompute) -> u128 {
    let m = model;
    let sum = |parts: &[(usize, usize)]| {
        parts.iter().fold(0_u128, |sum, &(times, width)| {
            sum.saturating_add((times as u128).saturating_mul(width as u128))
        })
    };
    let (times, stats) = (mlp_widths(m), norm_vectors(m.architecture.norm));
    let heads = sum(&[(2, m.heads), (2, m.kv_heads)]).saturating_mul(m.head_dim as u128);
    // Experts may drop all.
    let times = if m.moe.is_some() { 0 } else { times };
    let block = sum(&[(4, m.hidden), (times, m.ffn), (1, m.heads), (2, stats)]);
    let block = block.saturating_add(heads);
    let (blocks, cheap) = (
        m.layers as u128,
        sum(&[(2, m.hidden), (times.min(1), m.ffn)]),
    );
    let blocks = match recompute {
        Recompute::None => block.saturating_mul(blocks),
        Recompute::Selective => block.saturating_sub(cheap).saturating_mul(blocks),
        Recompute::Full => blocks
            .saturating_mul(m.hidden as u128)
            .saturating_add(block),
    };
    let head = sum(&[(2, m.hidden), (1, m.vocab), (3, 1), (1, stats)]);
    blocks.saturating_add(head).saturating_mul(tokens as u128)
}

/// Values of the MLP's width that its forward saves.
fn mlp_widths(model: &ModelConfig) -> usize {
    match model.architecture.mlp {
        MlpKind::SwiGlu => 3,
        MlpKind::Gelu => 2,
    }
}

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
    fn and(self, other: &Self) -> Self {
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
    let here = Here::new(model, layout, batch, types, (0, 0));
    let stats = here.stats(model);
    let again = |bytes: Bytes| bytes.recomputing(layout.recompute, here.e * here.r * here.d);
    ByKind {
        embed: here.embedding(),
        dense: again(here.block(model, stats)),
        moe: match &model.moe {
            Some(moe) => again(here.mixture(model, moe, stats)),
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
    let here = Here::new(model, layout, batch, types, (0, 0));
    here.e * here.r * here.d
}

/// What a rank holds of a microbatch.
struct Here {
    /// Ranks of tp, and this one's place among them.
    tp: (usize, usize),
    /// Ranks that share an expert.
    etp: usize,
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
    fn new(
        model: &ModelConfig,
        layout: &Layout,
        batch: &Batch,
        types: WireTypes,
        (tp, stage): (usize, usize),
    ) -> Self {
        let (t, tp) = (batch.micro_batch * batch.seq / layout.cp, (layout.tp, tp));
        let r = if layout.sequence_parallel {
            chunk_len(t, tp.0, tp.1)
        } else {
            t
        };
        Self {
            tp,
            etp: layout.etp,
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

    fn layer(&self, model: &ModelConfig, layer: &StageLayer) -> Bytes {
        let stats = self.stats(model);
        match layer {
            StageLayer::Embed(_) => self.embedding(),
            StageLayer::Block(block) => match model.moe_at(block.index()) {
                None => self.block(model, stats),
                Some(moe) => self.mixture(model, moe, stats),
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
            saved: e * (r * d + t * (d + v)) + stats + a * 3 * t,
            kept: e * r * d,
            passing: e * t * (v + d) + a * t,
            ..Bytes::default()
        }
    }

    /// What a region's input takes, where it can be made again without a message.
    fn input(&self) -> u64 {
        if self.sequence_parallel && self.tp.0 > 1 {
            0
        } else {
            self.e * self.t * self.d
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
            saved: e * (2 * r * d + 2 * t * d + mlp_widths(model) as u64 * t * f)
                + e * t * (2 * q + twice + 2 * shared * gathered)
                + 2 * stats
                + a * t * heads,
            kept: e * (4 * r * d + whole),
            passing: e * (2 * t * d + dropped) + mlp.max(attention),
            cheap: 2 * self.input() + e * t * f,
            again: 0,
        };
        if model.architecture.qk_norm {
            bytes.saved += e * t * (q + k) + a * t * (heads + kv_heads);
            bytes.kept += e * t * (q + k);
        }
        bytes
    }

    /// A block with experts, routed evenly.
    fn mixture(&self, model: &ModelConfig, moe: &MoeConfig, stats: u64) -> Bytes {
        let Self { t, d, e, a, .. } = *self;
        let without = ModelConfig {
            ffn: 0,
            ..model.clone()
        };
        let mut bytes = self.block(&without, stats);
        let mine = chunk_len(t as usize, self.tp.0, self.tp.1) as u64;
        let (experts, topk) = (moe.experts as u64, moe.topk as u64);
        let rows = mine * topk;
        let (here, f) = (
            rows * self.etp as u64,
            moe.ffn.div_ceil(self.etp.max(1)) as u64,
        );
        // The MLP's input is this rank's tokens alone.
        bytes.saved -= e * (t - mine) * d;
        bytes.cheap = self.input() + e * (mine * d + here * f);
        bytes.saved += a * (mine * experts + rows) + e * (rows * d + here * (d + 3 * f));
        bytes.kept += a * mine * experts + e * here * d;
        bytes.passing += e * (2 * rows * d + 2 * here * (d + f));
        if moe.shared_ffn > 0 {
            let shared = self.part(moe.shared_ffn);
            bytes.saved += e * t * (d + 3 * shared);
            bytes.cheap += self.input() + e * t * shared;
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
    fn boundaries(&self, layout: &Layout) -> u64 {
        let places = (0..layout.chunks()).map(|chunk| layout.route().place(self.stage, chunk));
        let neighbours = places.map(|p| u64::from(p > 0) + u64::from(p + 1 < layout.places()));
        neighbours.sum::<u64>() * (IN_FLIGHT as u64 + 1) * self.e * self.r * self.d
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use quintet_collectives::DType;
    use quintet_parallel_layers::Architecture;
    use quintet_parallel_layers::pipeline::ScheduleKind;

    fn model() -> ModelConfig {
        ModelConfig {
            vocab: 51,
            hidden: 24,
            layers: 4,
            heads: 4,
            kv_heads: 2,
            head_dim: 10,
            ffn: 14,
            rope_theta: 1e4,
            norm_eps: 1e-5,
            tied: true,
            moe: None,
            window: None,
            dropout: 0.0,
            architecture: Architecture::LLAMA,
        }
    }

    fn saved(layout: &Layout) -> Result<Vec<u64>, Error> {
        let batch = Batch {
            seq: 8,
            micro_batch: 1,
            global_batch: 8,
        };
        let types = WireTypes {
            storage: DType::F32,
            accumulation: DType::F32,
        };
        let ranks = activations(&model(), layout, &batch, types)?;
        Ok(ranks.iter().map(|rank| rank.saved).collect())
    }

    #[test]
    fn one_rank_is_the_closed_form() -> Result<(), Error> {
        let of = |recompute| {
            saved(&Layout {
                recompute,
                ..Layout::single()
            })
        };
        let worked_out = |mode| 4 * microbatch(&model(), 8, mode);
        for mode in [Recompute::None, Recompute::Selective] {
            assert_eq!(
                of(mode)?.iter().map(|b| u128::from(*b)).sum::<u128>(),
                worked_out(mode)
            );
        }
        // There is room for one block that is made again.
        let full = u128::from(of(Recompute::Full)?[0]);
        assert!(
            full < worked_out(Recompute::Full)
                && worked_out(Recompute::Full) < worked_out(Recompute::Selective)
        );
        assert_eq!(
            microbatch(
                &ModelConfig {
                    vocab: usize::MAX,
                    ..model()
                },
                usize::MAX,
                Recompute::None
            ),
            u128::MAX
        );
        Ok(())
    }

    #[test]
    fn a_stage_holds_what_its_schedule_lets_it() -> Result<(), Error> {
        let layout = |schedule| Layout {
            pp: 4,
            schedule,
            ..Layout::single()
        };
        let (all, few) = (
            saved(&layout(ScheduleKind::GPipe))?,
            saved(&layout(ScheduleKind::OneFOneB))?,
        );
        // GPipe all 8, 1F1B p - s of them; the stages in the middle have one block each.
        assert_eq!(all[1], all[2]);
        assert_eq!(
            [few[0], few[1], few[2], few[3]],
            [all[0] / 2, all[1] / 8 * 3, all[2] / 4, all[3] / 8]
        );
        Ok(())
    }

    #[test]
    fn sequence_parallelism_keeps_less_and_tp_never_more() -> Result<(), Error> {
        let tp = Layout {
            tp: 4,
            ..Layout::single()
        };
        let (one, cut) = (saved(&Layout::single())?, saved(&tp)?);
        let less = saved(&Layout {
            sequence_parallel: true,
            ..tp
        })?;
        assert!(
            cut.iter()
                .zip(&less)
                .all(|(cut, less)| less < cut && *cut < one[0])
        );
        assert!(less.iter().sum::<u64>() >= one[0]);
        Ok(())
    }
}
