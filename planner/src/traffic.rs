//! What a training step sends: the sum of the plans of its collectives, worked out from config,
//! ledger and schedule before a message moves.
//!
//! Per rank, with T tokens of a microbatch here, h the hidden width, M microbatches of this replica:
//!
//! | group | what | how often |
//! |-------|------|-----------|
//! | tp    | all-reduce of T h; sequence parallel: reduce-scatter and all-gather of it | see [`step`] |
//! | tp    | all-reduce of T maxima and of 2 T sums (vocabulary loss) | M, last stage |
//! | tp    | all-reduce of gradients that are Replicate over (a factor of) tp | once; ZeRO-2, 3: M |
//! | cp    | keys, values, their gradients, or tokens for heads (see `traffic/context.rs`) | M, each block |
//! | pp    | T h (T h / tp under sequence parallel) to each neighbour of each chunk on another stage | M each way |
//! | tie   | all-reduce of the tied table's gradient | once, where first and last chunk are on two stages |
//! | dp    | all-reduce of gradients; ZeRO-1: reduce-scatter, then all-gather of parameters | once |
//! | dp    | ZeRO-2, 3: reduce-scatter of gradients; of a table tied over stages once | M |
//! | dp    | ZeRO-2: all-gather of parameters, once; ZeRO-3: in forward and in backward | 2 M |
//! | dp    | hybrid sharding: the same within its groups, and all-reduce of the chunk across | once |
//! | dp    | all-reduce of the token count, over dp x cp | once |
//! | world | all-reduce of the squared norm (67 columns of an exact sum), of the loss | once each |
//!
//! Experts (`traffic/experts.rs`) add groups of their own: `ep` and `etp` (counts, then rows, there
//! and back, forward and backward), `replica` (statistics of the router), `edp` (gradients). How
//! many rows move is decided by the router, so [`step`] counts all but the rows, and [`rows`] the
//! rows of a given routing.
//!
//! Where backward runs the forward of a block again (`--recompute full`), what that sends is sent
//! twice; what it sends otherwise is not.

use alloc::collections::BTreeMap;
use alloc::string::String;
use alloc::vec::Vec;

use quintet_collectives::chunk::{chunk_len, chunk_lens};
use quintet_collectives::cost;
use quintet_collectives::plan::CollectiveShape;
use quintet_collectives::{Axis, DType, DeviceMesh, Factor, Order};
use quintet_zero::WholeGrads;

use crate::model::{StageLayer, mesh, stage_layers};
use crate::states::{Held, gathers};
use crate::{Batch, Error, Layout, ModelConfig};

mod context;
mod experts;

pub(crate) use experts::arriving;
pub use experts::{Routing, row_copy_bytes, rows, rows_by, tokens_of};

/// Payload bytes by group.
pub type Traffic = BTreeMap<String, u64>;

/// Types on the wire.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WireTypes {
    /// Activations and parameters.
    pub storage: DType,
    /// Gradients and loss statistics.
    pub accumulation: DType,
}

/// What every rank sends in one training step, by group, in rank order; the rows that experts
/// are sent come on top ([`rows`]).
///
/// # Errors
/// Where the layout cannot be.
pub fn step(
    model: &ModelConfig,
    layout: &Layout,
    batch: &Batch,
    types: WireTypes,
) -> Result<Vec<Traffic>, Error> {
    step_by(&cost::Model::default(), model, layout, batch, types)
}

/// The same where the communicators choose their plans by `choice`.
///
/// # Errors
/// As [`step`], and where it admits no plan.
pub fn step_by(
    choice: &cost::Model,
    model: &ModelConfig,
    layout: &Layout,
    batch: &Batch,
    types: WireTypes,
) -> Result<Vec<Traffic>, Error> {
    let mesh = mesh(layout)?;
    (0..mesh.world())
        .map(|rank| {
            let mut sum = Sum::new(choice, &mesh, layout, rank);
            for chunk in 0..layout.chunks() {
                sum.layers(model, batch, types, chunk)?;
                sum.context(model, batch, types, chunk)?;
                sum.gradients(model, batch, types, chunk)?;
            }
            sum.boundaries(model, batch, types)?;
            sum.scalars(model)?;
            Ok(sum.traffic)
        })
        .collect()
}

/// The sum over all ranks.
#[must_use]
pub fn total(ranks: &[Traffic]) -> Traffic {
    let mut sum = Traffic::new();
    for (group, bytes) in ranks.iter().flatten() {
        *sum.entry(group.clone()).or_default() += bytes;
    }
    sum
}

struct Sum<'a> {
    choice: &'a cost::Model,
    mesh: &'a DeviceMesh,
    layout: &'a Layout,
    rank: usize,
    order: Order,
    traffic: Traffic,
}

impl<'a> Sum<'a> {
    fn new(choice: &'a cost::Model, mesh: &'a DeviceMesh, layout: &'a Layout, rank: usize) -> Self {
        let order = if layout.any_order {
            Order::Any
        } else {
            Order::Rank
        };
        Self {
            choice,
            mesh,
            layout,
            rank,
            order,
            traffic: Traffic::new(),
        }
    }

    /// Adds `times` of one collective over `world` ranks in which this rank has `place`.
    fn add(
        &mut self,
        group: &str,
        (place, world): (usize, usize),
        shape: &CollectiveShape,
        dtype: DType,
        times: usize,
    ) -> Result<(), Error> {
        if world > 1 && times > 0 {
            let plan = self.choice.plan(shape.clone(), world, dtype, self.order)?;
            let once = plan.bytes_sent(place, dtype);
            *self.traffic.entry(String::from(group)).or_default() += once * times as u64;
        }
        Ok(())
    }

    fn tp(&self) -> (usize, usize) {
        (self.mesh.index(self.rank, Axis::Tp), self.layout.tp)
    }

    /// Tokens of a microbatch that are here.
    fn tokens(&self, batch: &Batch) -> usize {
        batch.micro_batch * batch.seq / self.layout.cp
    }

    fn stage(&self) -> usize {
        self.mesh.index(self.rank, Axis::Pp)
    }

    /// The moves of tensor parallel regions and the vocabulary-parallel loss.
    fn layers(
        &mut self,
        model: &ModelConfig,
        batch: &Batch,
        types: WireTypes,
        chunk: usize,
    ) -> Result<(), Error> {
        let (tokens, mbs) = (self.tokens(batch), batch.microbatches() / self.layout.dp);
        let len = tokens * model.hidden;
        let counts: Vec<usize> = chunk_lens(tokens, self.layout.tp)
            .map(|n| n * model.hidden)
            .collect();
        for layer in stage_layers(model, self.layout, self.mesh, self.stage(), chunk)? {
            let moe = match &layer {
                StageLayer::Block(block) => model.moe_at(block.index()),
                _ => None,
            };
            // Entries and exits of tensor parallel regions in this layer; a table is only left, a
            // head only entered.
            let (enters, leaves) = match &layer {
                StageLayer::Embed(_) => (0, 1),
                StageLayer::Block(_) => match moe {
                    Some(moe) if moe.shared_ffn == 0 => (1, 1),
                    _ => (2, 2),
                },
                StageLayer::Head(_) => (1, 0),
            };
            if let Some(moe) = moe {
                self.experts(moe, tokens, (mbs, model.hidden), types)?;
            }
            let tp = self.tp();
            let forwards = match layer {
                StageLayer::Block(_) => self.layout.forwards(),
                StageLayer::Embed(_) | StageLayer::Head(_) => 1,
            };
            if self.layout.sequence_parallel {
                // Enter: all-gather, its backward reduce-scatter; for the gradients of the weights what
                // came in is gathered once more. Leave: the same the other way.
                let gathers = CollectiveShape::AllGather {
                    counts: counts.clone(),
                };
                let scatters = CollectiveShape::ReduceScatter {
                    counts: counts.clone(),
                };
                let gather = forwards * enters + leaves + enters;
                let scatter = enters + forwards * leaves;
                self.add("tp", tp, &gathers, types.storage, mbs * gather)?;
                self.add("tp", tp, &scatters, types.storage, mbs * scatter)?;
            } else {
                // Leave: all-reduce forward. Enter: all-reduce backward.
                let shape = CollectiveShape::AllReduce { len };
                let times = mbs * (enters + forwards * leaves);
                self.add("tp", tp, &shape, types.storage, times)?;
            }
            if matches!(layer, StageLayer::Head(_)) {
                for per_token in [1, 2] {
                    let shape = CollectiveShape::AllReduce {
                        len: per_token * tokens,
                    };
                    self.add("tp", tp, &shape, types.accumulation, mbs)?;
                }
            }
        }
        Ok(())
    }

    /// Activations to the next stage and their gradients to the one before.
    fn boundaries(
        &mut self,
        model: &ModelConfig,
        batch: &Batch,
        types: WireTypes,
    ) -> Result<(), Error> {
        // Between two chunks of one stage nothing is sent.
        let (stage, route) = (self.stage(), self.layout.route());
        let elsewhere = |to: Option<(usize, usize)>| to.is_some_and(|(peer, _)| peer != stage);
        let neighbours: usize = (0..self.layout.chunks())
            .flat_map(|chunk| [route.before(stage, chunk), route.after(stage, chunk)])
            .filter(|to| elsewhere(*to))
            .count();
        let mut tokens = self.tokens(batch);
        if self.layout.sequence_parallel {
            tokens = chunk_len(tokens, self.layout.tp, self.tp().0);
        }
        let bytes = tokens * model.hidden * types.storage.bytes();
        let mbs = batch.microbatches() / self.layout.dp;
        if neighbours > 0 {
            *self.traffic.entry(String::from("pp")).or_default() +=
                (bytes * mbs * neighbours) as u64;
        }
        Ok(())
    }

    /// Gradients down to their owners, parameters back.
    fn gradients(
        &mut self,
        model: &ModelConfig,
        batch: &Batch,
        types: WireTypes,
        chunk: usize,
    ) -> Result<(), Error> {
        let (acc, storage) = (types.accumulation, types.storage);
        let mbs = batch.microbatches() / self.layout.dp;
        let held = Held::new(model, self.layout, self.mesh, self.rank, acc.bytes())?;
        let partition = &held.chunks[chunk];
        let (sums, gathers) = (WholeGrads::new(partition), gathers(&held, chunk, mbs)?);
        for (index, part) in partition.layout().parts().iter().enumerate() {
            if part.len == 0 {
                continue;
            }
            let all_reduce = CollectiveShape::AllReduce { len: part.len };
            if let Some(place) = part.stages.iter().position(|&s| s == self.stage()) {
                self.add("tie", (place, part.stages.len()), &all_reduce, acc, 1)?;
            }
            // What is added to in place, and what is tied over stages, is complete at the end.
            let tied = partition.layout().tied().contains(&index);
            let times = if sums.in_place(index) || tied { 1 } else { mbs };
            let extra = self.among(&part.extra);
            self.add("tp", extra, &all_reduce, acc, times)?;
            let (place, group) = ((part.place, part.places), replicas(&part.shard));
            let counts = part.counts();
            if partition.scatters() {
                let counts = counts.clone();
                let scatter = CollectiveShape::ReduceScatter { counts };
                self.add(group, place, &scatter, acc, times)?;
            } else {
                self.add(group, place, &all_reduce, acc, 1)?;
            }
            let gather = CollectiveShape::AllGather { counts };
            self.add(group, place, &gather, storage, gathers[index])?;
            let len = partition.state(index).len();
            let across = self.among(&part.across);
            if len > 0 {
                self.add(
                    replicas(&part.across),
                    across,
                    &CollectiveShape::AllReduce { len },
                    acc,
                    1,
                )?;
            }
        }
        Ok(())
    }

    /// This rank's place among those that differ on these factors, and their number.
    fn among(&self, factors: &[Factor]) -> (usize, usize) {
        let ranks = self.mesh.group(self.rank, factors);
        let place = ranks.iter().position(|&r| r == self.rank).unwrap_or(0);
        (place, ranks.len())
    }

    /// The token count, the squared norm with its alarm, and the loss.
    fn scalars(&mut self, model: &ModelConfig) -> Result<(), Error> {
        let dp = [Axis::Dp, Axis::Cp].map(|axis| self.mesh.factor(axis));
        let dp = self.among(&dp);
        let world = (self.rank, self.mesh.world());
        self.add(
            "dp",
            dp,
            &CollectiveShape::AllReduce { len: 1 },
            DType::F64,
            1,
        )?;
        for len in [quintet_zero::exact::DIGITS, report_len(model)] {
            self.add(
                "world",
                world,
                &CollectiveShape::AllReduce { len },
                DType::F64,
                1,
            )?;
        }
        Ok(())
    }
}

/// Numbers that all ranks sum at the end of a step, after the squared norm: loss and stop, and of a
/// model with experts the two losses of balance and, for each layer, how many tokens chose each
/// expert and how many were dropped.
#[must_use]
pub fn report_len(model: &ModelConfig) -> usize {
    let moe = |moe: &crate::config::MoeConfig| 2 + model.layers * (moe.experts + 1);
    2 + model.moe.as_ref().map_or(0, moe)
}

/// The name of a group of replicas: those of experts are fewer.
#[must_use]
pub fn replicas(shard: &[Factor]) -> &'static str {
    if shard.iter().any(|f| f.axis == Axis::Edp) {
        "edp"
    } else {
        "dp"
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use quintet_parallel_layers::pipeline::ScheduleKind;

    use super::*;
    use quintet_parallel_layers::Architecture;

    pub(crate) fn model(tied: bool) -> ModelConfig {
        ModelConfig {
            vocab: 50,
            hidden: 8,
            layers: 3,
            heads: 4,
            kv_heads: 2,
            head_dim: 2,
            ffn: 12,
            rope_theta: 1e4,
            norm_eps: 1e-5,
            tied,
            moe: None,
            window: None,
            dropout: 0.0,
            architecture: Architecture::LLAMA,
        }
    }

    fn sent(layout: &Layout, tied: bool) -> Traffic {
        let batch = Batch {
            seq: 6,
            micro_batch: 1,
            global_batch: 4,
        };
        let types = WireTypes {
            storage: DType::F32,
            accumulation: DType::F32,
        };
        step(&model(tied), layout, &batch, types)
            .map(|ranks| total(&ranks))
            .unwrap_or_default()
    }

    #[test]
    fn one_rank_sends_nothing() {
        assert!(
            sent(&Layout::single(), true)
                .values()
                .all(|&bytes| bytes == 0)
        );
    }

    /// ZeRO-1 moves what DP moves: an all-reduce is a reduce-scatter and an all-gather.
    #[test]
    fn zero_one_moves_what_dp_moves() {
        let dp = Layout {
            dp: 2,
            bucket_bytes: 1 << 20,
            ..Layout::single()
        };
        let zero = Layout {
            zero_stage: 1,
            ..dp.clone()
        };
        assert_eq!(sent(&dp, false), sent(&zero, false));
    }

    /// In units of the parameters' bytes times N - 1, with M microbatches: DP 2, ZeRO-2 M + 1, ZeRO-3
    /// 3 M; hybrid sharding within one replica is DP.
    #[test]
    fn zero_two_and_three_move_gradients_and_parameters_each_time() {
        let layout = |zero_stage, hybrid_shard_size| Layout {
            dp: 2,
            bucket_bytes: 1,
            zero_stage,
            hybrid_shard_size,
            ..Layout::single()
        };
        let count = 2 * size_of::<f64>() as u64;
        let dp = |stage, within| sent(&layout(stage, within), false)["dp"] - count;
        let unit = dp(0, None) / 2;
        // 4 samples over 2 replicas.
        let microbatches = 2;
        assert_eq!(dp(2, None), (microbatches + 1) * unit);
        assert_eq!(dp(3, None), 3 * microbatches * unit);
        for stage in 1..=3 {
            assert_eq!(dp(stage, Some(1)), dp(0, None));
        }
    }

    /// Sequence parallelism moves what tensor parallelism moves, for an all-reduce is a
    /// reduce-scatter and an all-gather; on top come the gradients of the norms, and what enters a region
    /// once more, for the gradients of the weights: T h of each of 4 microbatches.
    #[test]
    fn sequence_parallelism_adds_the_norms() {
        let tp = Layout {
            tp: 2,
            ..Layout::single()
        };
        let sp = Layout {
            sequence_parallel: true,
            ..tp.clone()
        };
        let norms = (2 * 3 + 1) * 8 * 4;
        let again = (2 * 3 + 1) * 4 * (6 * 8) * 4;
        let tp = sent(&tp, false)["tp"];
        assert_eq!(sent(&sp, false)["tp"], tp + 2 * norms + again);
    }

    #[test]
    fn boundaries_carry_activations_and_ties_their_table() {
        let pp = sent(
            &Layout {
                pp: 3,
                ..Layout::single()
            },
            true,
        );
        assert_eq!(pp["pp"], 2 * 2 * 4 * (6 * 8) * 4);
        assert_eq!(pp["tie"], 2 * 50 * 8 * 4);
    }

    /// Interleaved: each boundary between chunks is a message, the way back from the last stage to
    /// the first included. A V: all but the one at its turning point, and no tie.
    #[test]
    fn chunks_have_boundaries_of_their_own() {
        let of = |schedule, pp, virtual_stages, stage_layers| {
            let layout = Layout {
                pp,
                schedule,
                virtual_stages,
                stage_layers,
                ..Layout::single()
            };
            sent(&layout, true)
        };
        let one = (2 * 4 * (6 * 8) * 4) as u64;
        let looped = of(
            ScheduleKind::Interleaved,
            2,
            2,
            Some(alloc::vec![1, 1, 1, 0]),
        );
        assert_eq!(looped["pp"], 3 * one);
        assert_eq!(looped["tie"], 2 * 50 * 8 * 4);
        let v = of(ScheduleKind::DualPipeV, 2, 1, Some(alloc::vec![1, 1, 1, 0]));
        assert_eq!(v["pp"], 2 * one);
        assert!(!v.contains_key("tie"));
        let alone = of(ScheduleKind::Interleaved, 1, 3, None);
        assert!(alone.values().all(|&bytes| bytes == 0));
    }
}
