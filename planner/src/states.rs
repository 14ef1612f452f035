//! What a training step holds in memory: parameters, gradients and optimizer state of each rank,
//! worked out from the ledger, the schedule and the ZeRO stage before anything is allocated.
//!
//! ```text
//!               at rest                                  at the highest, beside that
//! parameters    whole; ZeRO-3: chunks                    ZeRO-3: the bucket in use and the next
//! gradients     whole; ZeRO-2, 3: chunks                 ZeRO-2, 3: the bucket being filled, those
//!                                                        under way, and tables tied over stages
//! optimizer     whole; ZeRO-1 to 3: chunks               nothing
//! ```
//!
//! The figures equal what a device's meter counts under the tags of the same names, to the byte:
//! `quintet verify` compares them in every run.

use alloc::collections::BTreeMap;
use alloc::string::String;
use alloc::sync::Arc;
use alloc::vec::Vec;

use quintet_collectives::{Axis, DeviceMesh};
use quintet_parallel_layers::pipeline::Action;
use quintet_zero::{Partition, WholeGrads, WholeParams, ZeroStage};

use crate::model::{borrows_table, flat_layout, mesh, schedule};
use crate::traffic::WireTypes;
use crate::{Batch, Error, Layout, ModelConfig};

/// Bytes of one category on one rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Bytes {
    /// Between steps.
    pub at_rest: u64,
    /// The most during a step.
    pub peak: u64,
}

/// Bytes by category, named as the tags of allocations are.
pub type Memory = BTreeMap<String, Bytes>;

/// What every rank holds in a training step, in rank order; `moments` numbers of the accumulation
/// type are kept for each parameter by the optimizer (two by AdamW), and a master weight where
/// storage is narrower than that type.
///
/// # Errors
/// Where the layout cannot be.
pub fn step(
    model: &ModelConfig,
    layout: &Layout,
    batch: &Batch,
    types: WireTypes,
    moments: usize,
) -> Result<Vec<Memory>, Error> {
    let mesh = mesh(layout)?;
    let acc = types.accumulation.bytes();
    let schedule = schedule(model, layout, batch, &mesh, acc)?;
    let state = moments + usize::from(types.storage != types.accumulation);
    let rank = |rank| {
        let held = Held::new(model, layout, &mesh, rank, acc)?;
        let actions = schedule.actions(mesh.index(rank, Axis::Pp));
        let of = |(at_rest, peak): (usize, usize), bytes: usize| Bytes {
            at_rest: (at_rest * bytes) as u64,
            peak: (peak * bytes) as u64,
        };
        let state_len: usize = held.chunks.iter().map(state_len).sum();
        let memory = [
            ("parameters", of(params(&held)?, types.storage.bytes())),
            ("gradients", of(gradients(&held, &actions)?, acc)),
            ("optimizer", of((state_len, state_len), state * acc)),
        ];
        let named = |(name, bytes): (&str, Bytes)| (String::from(name), bytes);
        Ok(memory.into_iter().map(named).collect())
    };
    (0..mesh.world()).map(rank).collect()
}

/// The fullest rank of each category.
#[must_use]
pub fn fullest(ranks: &[Memory]) -> Memory {
    let mut most = Memory::new();
    for (category, bytes) in ranks.iter().flatten() {
        let most = most.entry(category.clone()).or_default();
        most.at_rest = most.at_rest.max(bytes.at_rest);
        most.peak = most.peak.max(bytes.peak);
    }
    most
}

/// The chunks of a rank as their states are kept.
pub(crate) struct Held {
    /// In the order of the model.
    pub(crate) chunks: Vec<Partition>,
    /// Which of them use the table of chunk 0 ([`borrows_table`]).
    borrows: Vec<bool>,
}

impl Held {
    pub(crate) fn new(
        model: &ModelConfig,
        layout: &Layout,
        mesh: &DeviceMesh,
        rank: usize,
        grad_bytes: usize,
    ) -> Result<Self, Error> {
        let zero = ZeroStage::from_number(layout.zero_stage)?;
        let of = |chunk| {
            let flat = flat_layout(model, layout, mesh, rank, chunk, grad_bytes)?;
            Ok(Partition::new(Arc::new(flat), zero))
        };
        let stage = mesh.index(rank, Axis::Pp);
        let chunks = 0..layout.chunks();
        let borrows = |chunk| borrows_table(model, layout, stage, chunk);
        Ok(Self {
            borrows: chunks.clone().map(borrows).collect(),
            chunks: chunks.map(of).collect::<Result<_, Error>>()?,
        })
    }

    /// The chunk whose table another uses, with that use: the head's, in segment 0.
    fn lender(&self, chunk: usize) -> Option<&Partition> {
        self.chunks.first().filter(|_| self.borrows[chunk])
    }
}

fn state_len(chunk: &Partition) -> usize {
    let parts = 0..chunk.layout().parts().len();
    parts.map(|part| chunk.state(part).len()).sum()
}

/// Elements of parameters at rest and at the highest. Passes do not overlap, so that whole copies
/// are those of one pass of one chunk.
fn params(held: &Held) -> Result<(usize, usize), Error> {
    let (mut at_rest, mut most) = (0, 0);
    for (chunk, partition) in held.chunks.iter().enumerate() {
        at_rest += WholeParams::new(partition).at_rest();
        for forward in [true, false] {
            most = most.max(walk(held, chunk, forward, |_, _| ())?);
        }
    }
    Ok((at_rest, at_rest + most))
}

/// How often each part of a chunk is gathered in a step: by its own passes, and by those of a chunk
/// that borrows its table.
pub(crate) fn gathers(held: &Held, of: usize, microbatches: usize) -> Result<Vec<usize>, Error> {
    let partition = &held.chunks[of];
    let parts = 0..partition.layout().parts().len();
    let after_step = |part| usize::from(partition.scatters() && !partition.gathers(part));
    let mut times: Vec<usize> = parts.map(after_step).collect();
    for chunk in 0..held.chunks.len() {
        for forward in [true, false] {
            walk(held, chunk, forward, |owner, part| {
                if owner == of {
                    times[part] += microbatches;
                }
            })?;
        }
    }
    Ok(times)
}

/// One pass through a chunk under ZeRO-3: each bucket is gathered while the one before is in use,
/// and released after its use; with the head's, bucket 0, goes the bucket of a table that lies in
/// chunk 0. Tells each part as it is gathered, with the chunk that owns it, and comes to the most
/// elements that whole copies have.
fn walk(
    held: &Held,
    chunk: usize,
    forward: bool,
    mut gathered: impl FnMut(usize, usize),
) -> Result<usize, Error> {
    let own = &held.chunks[chunk];
    let mut buckets: Vec<usize> = (0..own.layout().buckets().len()).collect();
    if forward {
        buckets.reverse();
    }
    let (mut whole, mut most) = (WholeParams::new(own), 0);
    let lender = held.lender(chunk);
    let mut table = lender.map(|lender| {
        let last = lender.layout().buckets().len().saturating_sub(1);
        (WholeParams::new(lender), last)
    });
    for (at, &bucket) in buckets.iter().enumerate() {
        let ahead = buckets.get(at + 1).copied();
        for wanted in (at == 0).then_some(bucket).into_iter().chain(ahead) {
            let parts = whole.want(wanted)?;
            parts.into_iter().for_each(|part| gathered(chunk, part));
            if let Some((table, last)) = table.as_mut().filter(|_| wanted == 0) {
                let parts = table.want(*last)?;
                parts.into_iter().for_each(|part| gathered(0, part));
            }
        }
        let borrowed = table.as_ref().map_or(0, |(table, _)| table.len());
        most = most.max(whole.len() + borrowed);
        whole.done(bucket)?;
        if let Some((table, last)) = table.as_mut().filter(|_| bucket == 0) {
            table.done(*last)?;
        }
    }
    Ok(most)
}

/// Elements of gradients at rest and at the highest, as the stage's actions fill and reduce them.
fn gradients(held: &Held, actions: &[Action]) -> Result<(usize, usize), Error> {
    let chunks = &held.chunks;
    let mut whole: Vec<WholeGrads> = chunks.iter().map(WholeGrads::new).collect();
    let at_rest: usize = whole.iter().map(WholeGrads::at_rest).sum();
    let mut most = 0;
    for action in actions {
        match *action {
            Action::BackwardWeight { chunk, segment, .. } => {
                if segment == 0 && held.lender(chunk).is_some() {
                    whole[0].fill(0)?;
                }
                let layers = chunks[chunk].layout().buckets()[segment].layers.clone();
                for layer in layers.rev() {
                    whole[chunk].fill(layer)?;
                }
                most = most.max(whole.iter().map(WholeGrads::len).sum());
            }
            Action::ReduceGrads { chunk, bucket } => {
                whole[chunk].reduce(bucket)?;
            }
            _ => {}
        }
    }
    Ok((at_rest, at_rest + most))
}

#[cfg(test)]
mod tests {
    use super::*;
    use quintet_collectives::DType;
    use quintet_parallel_layers::Architecture;

    fn held(layout: &Layout) -> Vec<Memory> {
        let model = ModelConfig {
            vocab: 11,
            hidden: 6,
            layers: 5,
            heads: 2,
            kv_heads: 1,
            head_dim: 4,
            ffn: 7,
            rope_theta: 1e4,
            norm_eps: 1e-5,
            tied: false,
            window: None,
            dropout: 0.0,
            architecture: Architecture::LLAMA,
            moe: None,
        };
        let batch = Batch {
            seq: 4,
            micro_batch: 1,
            global_batch: 24,
        };
        let types = WireTypes {
            storage: DType::Bf16,
            accumulation: DType::F32,
        };
        step(&model, layout, &batch, types, 2).unwrap()
    }

    fn at_rest(ranks: &[Memory], category: &str) -> u64 {
        ranks.iter().map(|rank| rank[category].at_rest).sum()
    }

    /// Over all ranks, what is cut is there once for each group that shards it, the rest on each.
    #[test]
    fn what_is_cut_is_there_once() {
        let one = held(&Layout::single());
        let all = ["parameters", "gradients", "optimizer"];
        let whole = all.map(|category| at_rest(&one, category));
        // Storage of 2 bytes; gradients of 4; two moments and master weights of 4.
        assert_eq!([whole[0] * 2, whole[0] * 6], [whole[1], whole[2]]);
        for (hybrid_shard_size, groups) in [(None, 1), (Some(3), 2), (Some(2), 3), (Some(1), 6)] {
            for zero_stage in 1..=3 {
                let ranks = held(&Layout {
                    dp: 6,
                    bucket_bytes: 1,
                    zero_stage,
                    hybrid_shard_size,
                    ..Layout::single()
                });
                let kept = ZeroStage::from_number(zero_stage).unwrap().kept();
                let cut =
                    [kept.param, kept.grad, kept.state].map(|k| k == quintet_zero::Keep::Chunk);
                for (i, category) in all.iter().enumerate() {
                    let times = if cut[i] { groups } else { 6 };
                    assert_eq!(at_rest(&ranks, category), times * whole[i], "{category}");
                    let beyond = |rank: &Memory| rank[*category].peak > rank[*category].at_rest;
                    let gathered = cut[i] && i < 2 && hybrid_shard_size != Some(1);
                    assert_eq!(
                        ranks.iter().all(beyond),
                        gathered,
                        "{category} {zero_stage}"
                    );
                }
            }
        }
    }
}
