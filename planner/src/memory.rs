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
//! | block | 4 r d + 2 t q + 2 t k + 3 t f, and 2 r + t heads statistics | 4 r d (and 2 t d under sequence parallelism) to the end of the stage's backward; for a time 2 t d and the larger of 3 t f and 2 t q + 2 t k |
//! | head | 2 r d + t v, and r + 3 t statistics | r d to the end; for a time t v + t d |
//!
//! What a layer gathers under sequence parallelism, t d, is there while it is multiplied, in forward
//! and again in backward.
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
//! 2 r d + t f (the norms' outputs and the product of the MLP), full all but r d. What is left out is there again from a segment's
//! backward_input to its backward_weight, and while its forward runs.

use alloc::vec::Vec;
use core::ops::Range;

use quintet_collectives::{Axis, DeviceMesh};
use quintet_parallel_layers::Recompute;
use quintet_parallel_layers::pipeline::{Action, Schedule};

use crate::model::{StageLayer, mesh, norm_vectors, segment_layers, stage_layers};
use crate::traffic::{Routing, WireTypes, arriving};
use crate::{Batch, Error, Layout, ModelConfig};

mod layer;

pub(crate) use layer::{Bytes, by_kind, message};
use layer::{Here, Rows, mlp_widths};

/// Bytes of activations on a rank. What forward saves is, at its most, `saved` to the byte; the most that is
/// held at once lies between that and `saved + work`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Activations {
    /// What forward saves, of all microbatches that the schedule holds at once.
    pub saved: u64,
    /// What backward and the messages between stages add to that, at most.
    pub work: u64,
}

/// The activations of every rank in one training step, in rank order; of experts those of an even
/// routing, an estimate ([`routed`] takes a routing that is known).
///
/// # Errors
/// Where the layout cannot be.
pub fn activations(
    model: &ModelConfig,
    layout: &Layout,
    batch: &Batch,
    types: WireTypes,
) -> Result<Vec<Activations>, Error> {
    worked_out(model, layout, batch, types, None)
}

/// The same where tokens go as `routing` says: `saved` is exact with experts too.
///
/// # Errors
/// Where the layout cannot be.
pub fn routed(
    model: &ModelConfig,
    layout: &Layout,
    batch: &Batch,
    types: WireTypes,
    routing: &Routing,
) -> Result<Vec<Activations>, Error> {
    worked_out(model, layout, batch, types, Some(routing))
}

fn worked_out(
    model: &ModelConfig,
    layout: &Layout,
    batch: &Batch,
    types: WireTypes,
    routing: Option<&Routing>,
) -> Result<Vec<Activations>, Error> {
    let mesh = mesh(layout)?;
    let segments = segment_layers(model, layout, &mesh, types.accumulation.bytes())?;
    let each = batch.microbatches() / layout.dp;
    let counts: Vec<usize> = segments.iter().map(Vec::len).collect();
    let schedule = Schedule::new(layout.schedule, layout.pp, each, &counts)?;
    let rank = |rank| {
        let stage = mesh.index(rank, Axis::Pp);
        let place = (
            mesh.index(rank, Axis::Tp),
            mesh.index(rank, Axis::Etp),
            stage,
        );
        let here = Here::new(model, layout, batch, types, place);
        // Without a routing all microbatches are alike.
        let different = if routing.is_some() { each } else { each.min(1) };
        let (mut chunks, mut passing) = (Vec::new(), 0);
        for chunk in 0..layout.chunks() {
            let layers = stage_layers(model, layout, &mesh, stage, chunk)?;
            let segments = &segments[layout.route().place(stage, chunk)];
            let mut microbatches = Vec::new();
            for turn in 0..different {
                let rows = |layer: &StageLayer| {
                    let routing = routing?;
                    rows(model, (&mesh, rank), batch, layer, routing, turn)
                };
                let of = |layer| here.layer(model, layer, rows(layer));
                let bytes: Vec<Bytes> = layers.iter().map(of).collect();
                passing = bytes.iter().map(|l| l.passing).fold(passing, u64::max);
                let sum = |run: &Range<usize>| {
                    bytes[run.clone()].iter().fold(Bytes::default(), Bytes::and)
                };
                microbatches.push(segments.iter().map(sum).collect());
            }
            chunks.push(microbatches);
        }
        let (saved, most) = highest(&schedule.actions(stage), &chunks);
        Ok(Activations {
            saved,
            work: most - saved + passing + here.boundaries(layout),
        })
    };
    (0..mesh.world()).map(rank).collect()
}

/// The rows of a layer with experts, for a rank's microbatch number `turn`.
fn rows(
    model: &ModelConfig,
    (mesh, rank): (&DeviceMesh, usize),
    batch: &Batch,
    layer: &StageLayer,
    routing: &Routing,
    turn: usize,
) -> Option<Rows> {
    let StageLayer::Block(block) = layer else {
        return None;
    };
    let moe = model.moe_at(block.index())?;
    let each = batch.microbatches() / mesh.degree(Axis::Dp);
    let chosen = |rank: usize| {
        let microbatch = routing.kept.get(mesh.index(rank, Axis::Dp) * each + turn);
        let chosen = microbatch.and_then(|layers| layers.get(block.index()));
        chosen.map_or(&[][..], Vec::as_slice)
    };
    let (sent, here) = arriving(moe, mesh, rank, batch, &chosen);
    Some(Rows {
        sent: sent as u64,
        here: here as u64,
    })
}

/// The most that is saved at once, and that together with what backward keeps, by chunk, microbatch
/// (or one for all) and segment: saved from a forward to the gradients of the segment's parameters, kept
/// from the gradient of its input.
fn highest(actions: &[Action], chunks: &[Vec<Vec<Bytes>>]) -> (u64, u64) {
    let of = |chunk: usize, mb: usize| &chunks[chunk][mb % chunks[chunk].len()];
    let (mut saved, mut kept, mut peak, mut most) = (0, 0, 0, 0);
    for action in actions {
        let mut passing = 0;
        match *action {
            Action::Forward { mb, chunk } => {
                saved += of(chunk, mb)
                    .iter()
                    .map(|segment| segment.saved)
                    .sum::<u64>();
                passing = of(chunk, mb).iter().map(|s| s.again).max().unwrap_or(0);
            }
            Action::BackwardInput { mb, chunk, segment } => kept += of(chunk, mb)[segment].kept,
            Action::BackwardWeight { mb, chunk, segment } => {
                saved -= of(chunk, mb)[segment].saved;
                kept -= of(chunk, mb)[segment].kept;
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
