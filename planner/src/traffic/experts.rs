//! What experts send.
//!
//! ```text
//! per microbatch and layer          forward                 backward
//! tp       without sp: parts joined after, and before       all-gather x 2
//! replica  balance loss             all-reduce of 2 E f64
//!          capacity                 all-gather of choices
//! ep       counts                   all-to-all of E i32
//!          rows                     all-to-all there, back  all-to-all there, back
//! etp      counts                   all-gather of E i32
//!          rows                     all-gather, reduce-scatter, and the same
//! ```
//!
//! Forward is sent twice where blocks are computed again.

use alloc::vec;
use alloc::vec::Vec;

use quintet_collectives::chunk::{chunk, chunk_len, chunk_lens};
use quintet_collectives::cost;
use quintet_collectives::plan::CollectiveShape;
use quintet_collectives::{Axis, DType, DeviceMesh, IndexMap};

use super::{Sum, Traffic, WireTypes, mesh};
use crate::config::MoeConfig;
use crate::{Batch, Error, Layout, ModelConfig};

/// Where the tokens of a step went: for each microbatch of the step and each layer the expert of
/// each pair (token, choice), -1 where it was dropped; nothing for a layer without experts.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Routing {
    /// `[microbatch][layer][token * topk + choice]`.
    pub kept: Vec<Vec<Vec<i32>>>,
}

/// Payload bytes of one row on its way to another rank's expert and back, each time forward runs
/// and backward.
#[must_use]
pub fn row_copy_bytes(model: &ModelConfig, layout: &Layout, types: WireTypes) -> u64 {
    (2 * (layout.forwards() + 1) * model.hidden * types.storage.bytes()) as u64
}

/// What every rank sends in a step to move the rows of this routing, by group, in rank order.
///
/// # Errors
/// Where the layout cannot be.
pub fn rows(
    model: &ModelConfig,
    layout: &Layout,
    batch: &Batch,
    types: WireTypes,
    routing: &Routing,
) -> Result<Vec<Traffic>, Error> {
    rows_by(
        &cost::Model::default(),
        model,
        layout,
        batch,
        types,
        routing,
    )
}

/// The same where the communicators choose their plans by `choice`.
///
/// # Errors
/// As [`rows`], and where it admits no plan.
pub fn rows_by(
    choice: &cost::Model,
    model: &ModelConfig,
    layout: &Layout,
    batch: &Batch,
    types: WireTypes,
    routing: &Routing,
) -> Result<Vec<Traffic>, Error> {
    let mesh = mesh(layout)?;
    let mut sums: Vec<Sum<'_>> = (0..mesh.world())
        .map(|rank| Sum::new(choice, &mesh, layout, rank))
        .collect();
    let Some(moe) = model.moe.filter(|_| layout.ep * layout.etp > 1) else {
        return Ok(sums.into_iter().map(|sum| sum.traffic).collect());
    };
    let each = batch.microbatches() / layout.dp;
    for sum in &mut sums {
        let places = (0..layout.chunks()).map(|chunk| layout.route().place(sum.stage(), chunk));
        let layers = places.flat_map(|place| layout.blocks(model.layers, place));
        let layers = layers.filter(|&layer| model.moe_at(layer).is_some());
        for layer in layers.collect::<Vec<usize>>() {
            for turn in 0..each {
                let chosen = |rank: usize| {
                    let microbatch = mesh.index(rank, Axis::Dp) * each + turn;
                    let all = routing
                        .kept
                        .get(microbatch)
                        .and_then(|layers| layers.get(layer));
                    counts(&moe, &mesh, rank, batch, all.map_or(&[], Vec::as_slice))
                };
                sum.rows(&moe, (model.hidden, types.storage), &chosen)?;
            }
        }
    }
    Ok(sums.into_iter().map(|sum| sum.traffic).collect())
}

/// How many pairs of a rank's tokens chose each expert.
fn counts(
    moe: &MoeConfig,
    mesh: &DeviceMesh,
    rank: usize,
    batch: &Batch,
    all: &[i32],
) -> Vec<usize> {
    let mut counts = vec![0; moe.experts];
    let pairs = tokens_of(mesh, rank, batch).into_iter().flat_map(|token| {
        let first = token * moe.topk;
        all.get(first..first + moe.topk).unwrap_or_default()
    });
    for e in pairs.filter_map(|e| usize::try_from(*e).ok()) {
        if let Some(n) = counts.get_mut(e) {
            *n += 1;
        }
    }
    counts
}

/// Rows of one microbatch in one layer: those that a rank sends, and those that its experts (or its
/// parts of them) are given, where `all` gives the experts of all pairs of a rank's microbatch.
pub(crate) fn arriving<'a>(
    moe: &MoeConfig,
    mesh: &DeviceMesh,
    rank: usize,
    batch: &Batch,
    all: &impl Fn(usize) -> &'a [i32],
) -> (usize, usize) {
    let of = |rank: usize| counts(moe, mesh, rank, batch, all(rank));
    let here = moe.experts / mesh.degree(Axis::Ep).max(1);
    let arrived = |rank: usize| -> usize {
        let first = mesh.index(rank, Axis::Ep) * here;
        let sources = mesh.group(rank, &[mesh.factor(Axis::Ep)]).into_iter();
        let each = sources.map(|r| of(r).iter().skip(first).take(here).sum::<usize>());
        each.sum()
    };
    let parts = mesh.group(rank, &[mesh.factor(Axis::Etp)]).into_iter();
    (of(rank).iter().sum(), parts.map(arrived).sum())
}

/// The tokens of a microbatch, by their number in it, that a rank sends to experts, in its order:
/// sequences are cut over cp in zigzag, what is left over tp in runs.
#[must_use]
pub fn tokens_of(mesh: &DeviceMesh, rank: usize, batch: &Batch) -> Vec<usize> {
    let cut = IndexMap::Zigzag.ranges(batch.seq, mesh.degree(Axis::Cp), mesh.index(rank, Axis::Cp));
    let places: Vec<usize> = cut.into_iter().flatten().flatten().collect();
    let tokens = batch.micro_batch * places.len();
    let mine = chunk(tokens, mesh.degree(Axis::Tp), mesh.index(rank, Axis::Tp));
    mine.map(|i| i / places.len() * batch.seq + places[i % places.len()])
        .collect()
}

impl Sum<'_> {
    fn on(&self, axis: Axis, rank: usize) -> (Vec<usize>, (usize, usize)) {
        let ranks = self.mesh.group(rank, &[self.mesh.factor(axis)]);
        let place = ranks.iter().position(|&r| r == rank).unwrap_or(0);
        let world = ranks.len();
        (ranks, (place, world))
    }

    /// The rows of one microbatch in one layer, there and back, forward and backward; `chosen`
    /// gives the pairs of a rank by expert.
    fn rows(
        &mut self,
        moe: &MoeConfig,
        (hidden, dtype): (usize, DType),
        chosen: &impl Fn(usize) -> Vec<usize>,
    ) -> Result<(), Error> {
        let (here, passes) = (moe.experts / self.layout.ep, self.layout.forwards() + 1);
        let of = |counts: &[usize], place: usize| -> usize {
            counts.iter().skip(place * here).take(here).sum::<usize>() * hidden
        };
        let (sources, ep) = self.on(Axis::Ep, self.rank);
        let mine = chosen(self.rank);
        let send: Vec<usize> = (0..ep.1).map(|place| of(&mine, place)).collect();
        let recv: Vec<usize> = sources.iter().map(|&r| of(&chosen(r), ep.0)).collect();
        for (send, recv) in [(&send, &recv), (&recv, &send)] {
            let (send, recv) = (send.clone(), recv.clone());
            self.add(
                "ep",
                ep,
                &CollectiveShape::AllToAllV { send, recv },
                dtype,
                passes,
            )?;
        }
        let (parts, etp) = self.on(Axis::Etp, self.rank);
        let arrived = |&rank: &usize| {
            let (sources, ep) = self.on(Axis::Ep, rank);
            sources.iter().map(|&r| of(&chosen(r), ep.0)).sum()
        };
        let counts: Vec<usize> = parts.iter().map(arrived).collect();
        let gather = CollectiveShape::AllGather {
            counts: counts.clone(),
        };
        self.add("etp", etp, &gather, dtype, passes)?;
        self.add(
            "etp",
            etp,
            &CollectiveShape::ReduceScatter { counts },
            dtype,
            passes,
        )
    }

    /// All but the rows, of `times` microbatches in one layer, of which so many tokens are on this
    /// rank's place of cp.
    pub(super) fn experts(
        &mut self,
        moe: &MoeConfig,
        tokens: usize,
        (times, hidden): (usize, usize),
        types: WireTypes,
    ) -> Result<(), Error> {
        let (tp, backwards) = (self.tp(), times);
        let times = times * self.layout.forwards();
        if !self.layout.sequence_parallel {
            let counts = chunk_lens(tokens, tp.1).map(|n| n * hidden).collect();
            let gather = CollectiveShape::AllGather { counts };
            self.add("tp", tp, &gather, types.storage, times + backwards)?;
        }
        let factors = [Axis::Cp, Axis::Tp].map(|axis| self.mesh.factor(axis));
        let sharing = self.mesh.group(self.rank, &factors);
        let place = sharing.iter().position(|&r| r == self.rank).unwrap_or(0);
        let replica = (place, sharing.len());
        if moe.aux_loss > 0.0 {
            let shape = CollectiveShape::AllReduce {
                len: 2 * moe.experts,
            };
            self.add("replica", replica, &shape, DType::F64, times)?;
        }
        if moe.capacity_factor.is_some() {
            let of = |r: usize| chunk_len(tokens, tp.1, r % tp.1) * moe.topk;
            let counts = (0..replica.1).map(of).collect();
            let shape = CollectiveShape::AllGather { counts };
            self.add("replica", replica, &shape, DType::I32, times)?;
        }
        let (_, ep) = self.on(Axis::Ep, self.rank);
        let each = vec![moe.experts / ep.1; ep.1];
        let shape = CollectiveShape::AllToAllV {
            send: each.clone(),
            recv: each,
        };
        self.add("ep", ep, &shape, DType::I32, times)?;
        let (_, etp) = self.on(Axis::Etp, self.rank);
        let counts = vec![moe.experts; etp.1];
        self.add(
            "etp",
            etp,
            &CollectiveShape::AllGather { counts },
            DType::I32,
            times,
        )
    }
}
