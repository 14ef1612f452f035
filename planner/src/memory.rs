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
//! A stage keeps what forward saves of as many microbatches as its schedule holds at once
//! ([`laws::held`]), and between stages r d for each message under way.

use alloc::vec::Vec;

use quintet_collectives::chunk::chunk_len;
use quintet_collectives::{Axis, DeviceMesh, ParamSpec};
use quintet_parallel_layers::pipeline::stage::IN_FLIGHT;
use quintet_parallel_layers::pipeline::{Schedule, laws};

use crate::model::{StageLayer, flat_layout, mesh, stage_layers};
use crate::traffic::WireTypes;
use crate::{Batch, Error, Layout, ModelConfig};

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
    let per_stage = mesh.world() / layout.pp;
    let width = types.accumulation.bytes();
    let buckets = |stage: usize| -> Result<usize, Error> {
        let flat = flat_layout(model, layout, &mesh, stage * per_stage, width)?;
        Ok(flat.buckets().len())
    };
    let segments: Vec<usize> = (0..layout.pp).map(buckets).collect::<Result<_, _>>()?;
    let mbs = batch.microbatches() / layout.dp;
    let schedule = Schedule::new(layout.schedule, layout.pp, mbs, &segments)?;
    let held: Vec<u64> = (0..layout.pp)
        .map(|stage| laws::held(&schedule.actions(stage)) as u64)
        .collect();
    (0..mesh.world())
        .map(|rank| {
            let here = Here::new(model, layout, batch, types, &mesh, rank);
            let stage = mesh.index(rank, Axis::Pp);
            let (mut saved, mut kept, mut passing) = (0, here.boundaries(stage, layout.pp), 0);
            for layer in stage_layers(model, layout, &mesh, stage)? {
                let bytes = here.layer(&layer);
                saved += bytes.saved;
                kept += bytes.kept;
                passing = passing.max(bytes.passing);
            }
            Ok(Activations {
                saved: held[stage] * saved,
                work: kept + passing,
            })
        })
        .collect()
}

/// Elements that forward saves of one microbatch of `tokens`, over all the ranks of a replica:
/// exact on one rank, a lower bound on several, which hold some of it several times. Costs nothing
/// for models of any size.
#[must_use]
pub fn microbatch(model: &ModelConfig, tokens: usize) -> u128 {
    let m = model;
    let sum = |parts: &[(usize, usize)]| {
        parts.iter().fold(0_u128, |sum, &(times, width)| {
            sum.saturating_add((times as u128).saturating_mul(width as u128))
        })
    };
    let heads = sum(&[(2, m.heads), (2, m.kv_heads)]).saturating_mul(m.head_dim as u128);
    let block = sum(&[(4, m.hidden), (3, m.ffn), (1, m.heads), (2, 1)]).saturating_add(heads);
    let head = sum(&[(2, m.hidden), (1, m.vocab), (4, 1)]);
    block
        .saturating_mul(m.layers as u128)
        .saturating_add(head)
        .saturating_mul(tokens as u128)
}

/// A layer's bytes of one microbatch.
struct Bytes {
    saved: u64,
    /// More than that after its backward_input.
    kept: u64,
    /// More than that for a time.
    passing: u64,
}

/// What the widths of a rank are.
struct Here<'a> {
    mesh: &'a DeviceMesh,
    rank: usize,
    sequence_parallel: bool,
    /// Tokens of a microbatch, those of this rank between layers, hidden width, width of a head.
    t: u64,
    r: u64,
    d: u64,
    head_dim: u64,
    /// Bytes of an element and of a statistic.
    e: u64,
    a: u64,
}

impl<'a> Here<'a> {
    fn new(
        model: &ModelConfig,
        layout: &Layout,
        batch: &Batch,
        types: WireTypes,
        mesh: &'a DeviceMesh,
        rank: usize,
    ) -> Self {
        let t = batch.micro_batch * batch.seq;
        let r = if layout.sequence_parallel {
            chunk_len(t, layout.tp, mesh.index(rank, Axis::Tp))
        } else {
            t
        };
        Self {
            mesh,
            rank,
            sequence_parallel: layout.sequence_parallel,
            t: t as u64,
            r: r as u64,
            d: model.hidden as u64,
            head_dim: model.head_dim as u64,
            e: types.storage.bytes() as u64,
            a: types.accumulation.bytes() as u64,
        }
    }

    /// This rank's rows of a weight, as the ledger has them.
    fn rows(&self, spec: Option<&ParamSpec>) -> u64 {
        let local = spec.map(|spec| spec.local_box(self.mesh, self.rank));
        local
            .and_then(|b| b.first().map(|r| r.len() as u64))
            .unwrap_or(0)
    }

    fn layer(&self, layer: &StageLayer) -> Bytes {
        let params = layer.params();
        let Self { t, r, d, e, a, .. } = *self;
        let whole = if self.sequence_parallel { 2 * t * d } else { 0 };
        match layer {
            StageLayer::Embed(_) => Bytes {
                saved: 0,
                kept: e * t * d,
                passing: e * t * d,
            },
            // norm, q, k, v, o, norm, gate, up, down
            StageLayer::Block(_) => {
                let [q, k, f] = [1, 2, 6].map(|i| self.rows(params.get(i)));
                let heads = q / self.head_dim.max(1);
                let (mlp, attention) = (e * 3 * t * f, e * 2 * t * (q + k) + a * t * heads);
                Bytes {
                    saved: e * (2 * r * d + 2 * t * (d + q + k) + 3 * t * f)
                        + a * (2 * r + t * heads),
                    kept: e * (4 * r * d + whole),
                    passing: e * 2 * t * d + mlp.max(attention),
                }
            }
            // norm, linear
            StageLayer::Head(_) => {
                let v = self.rows(params.get(1));
                Bytes {
                    saved: e * (r * d + t * (d + v)) + a * (r + 3 * t),
                    kept: e * r * d,
                    passing: e * t * (v + d) + a * t,
                }
            }
        }
    }

    /// Messages under way, and the buffer that one comes in.
    fn boundaries(&self, stage: usize, stages: usize) -> u64 {
        let neighbours = u64::from(stage > 0) + u64::from(stage + 1 < stages);
        neighbours * (IN_FLIGHT as u64 + 1) * self.e * self.r * self.d
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use quintet_collectives::DType;
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
        let one = saved(&Layout::single())?;
        assert_eq!(
            one.iter().map(|b| u128::from(*b)).collect::<Vec<_>>(),
            [4 * microbatch(&model(), 8)]
        );
        assert_eq!(
            microbatch(
                &ModelConfig {
                    vocab: usize::MAX,
                    ..model()
                },
                usize::MAX
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
