//! Bytes that the fullest rank holds in a step, by category.

use alloc::vec::Vec;

use quintet_parallel_layers::Recompute;
use quintet_parallel_layers::pipeline::ScheduleKind;
use quintet_parallel_layers::pipeline::stage::IN_FLIGHT;

use super::parts::{Parts, Places};
use super::pipeline::Stage;
use super::{ByKind, Counts};
use crate::memory::{self, Bytes};
use crate::shape::Shape;
use crate::traffic::WireTypes;
use crate::{Batch, Layout};

/// Bytes by category, each at its highest.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Held {
    /// Parameters, with whole copies under ZeRO-3.
    pub parameters: u64,
    /// Gradients, with whole ones under way under ZeRO-2 and 3.
    pub gradients: u64,
    /// Moments, and master weights where storage is narrower.
    pub optimizer: u64,
    /// What forward saves, of all microbatches that the schedule holds at once.
    pub activations: u64,
    /// What backward and messages take beside that.
    pub buffers: u64,
}

impl Held {
    /// All categories.
    #[must_use]
    pub fn total(&self) -> u64 {
        self.parameters + self.gradients + self.optimizer + self.activations + self.buffers
    }

    /// Parameters, gradients and optimizer.
    #[must_use]
    pub fn states(&self) -> u64 {
        self.parameters + self.gradients + self.optimizer
    }

    /// By name, as the tags of allocations are called.
    #[must_use]
    pub fn named(&self) -> [(&'static str, u64); 5] {
        [
            ("parameters", self.parameters),
            ("gradients", self.gradients),
            ("optimizer", self.optimizer),
            ("activations", self.activations),
            ("buffers", self.buffers),
        ]
    }
}

/// What model states take on a stage.
#[derive(Debug, Clone, Copy)]
pub struct States {
    lens: ByKind<Lens>,
    zero: u8,
    storage: u64,
    gradient: u64,
    optimizer: u64,
}

#[derive(Debug, Clone, Copy, Default)]
struct Lens {
    whole: u64,
    chunk: u64,
    cut: u64,
}

impl States {
    /// Of layers with these parts; `moments` numbers of the accumulation type are kept for each
    /// parameter, and a master weight where storage is narrower.
    #[must_use]
    pub fn new(
        parts: &ByKind<Parts>,
        places: Places,
        zero: u8,
        types: WireTypes,
        moments: usize,
    ) -> Self {
        let acc = types.accumulation.bytes();
        let state = moments + usize::from(types.storage != types.accumulation);
        Self {
            lens: parts.map(|parts| Lens {
                whole: parts.whole(),
                chunk: parts.chunks(places),
                cut: parts.cut(places),
            }),
            zero,
            storage: types.storage.bytes() as u64,
            gradient: acc as u64,
            optimizer: (state * acc) as u64,
        }
    }

    /// Parameters, gradients and optimizer of a stage in which each replica has `microbatches`.
    #[must_use]
    pub fn on(&self, stage: &Stage, layout: &Layout, microbatches: usize) -> Held {
        let whole = stage.layers.sum(&self.lens.map(|l| l.whole));
        let chunk = stage.layers.sum(&self.lens.map(|l| l.chunk));
        let kept = |from: u8| if self.zero >= from { chunk } else { whole };
        let (mut params, mut grads) = (kept(3), kept(2));
        if self.zero >= 3 {
            let pairs = stage.chunks.iter().map(|chunk| self.pair(chunk));
            params += pairs.max().unwrap_or(0);
        }
        if self.zero >= 2 {
            grads += self.under_way(stage, layout, microbatches);
        }
        Held {
            parameters: params * self.storage,
            gradients: grads * self.gradient,
            optimizer: kept(1) * self.optimizer,
            ..Held::default()
        }
    }

    /// Elements of the two neighbouring layers of a chunk that have most, of what is cut.
    fn pair(&self, chunk: &Counts) -> u64 {
        let mut most = 0;
        let mut before = None;
        for (kind, count) in chunk.each().into_iter().enumerate() {
            if *count == 0 {
                continue;
            }
            let len = self.cut(kind);
            most = most.max(len + before.unwrap_or(0));
            if *count > 1 {
                most = most.max(2 * len);
            }
            before = Some(len);
        }
        most
    }

    fn cut(&self, kind: usize) -> u64 {
        self.lens.each()[kind].cut
    }

    /// The first and the last layer of a chunk.
    fn ends(&self, chunk: &Counts) -> (u64, u64) {
        let each = chunk.each();
        let present = |kind: &usize| *each[*kind] > 0;
        let first = (0..4).find(present).map_or(0, |kind| self.cut(kind));
        let last = (0..4).rev().find(present).map_or(0, |kind| self.cut(kind));
        (first, last)
    }

    /// Elements of whole gradients at the highest: the layer that is being filled, the one before it
    /// that is being summed, and of each other chunk that was passed the first layer, whose sum was
    /// the last that was started.
    fn under_way(&self, stage: &Stage, layout: &Layout, microbatches: usize) -> u64 {
        if microbatches == 0 {
            return 0;
        }
        let looped = layout.schedule == ScheduleKind::Interleaved;
        // Whether each chunk meets all others: not where one group of microbatches is all there is.
        let again = !looped || microbatches > layout.pp;
        let lasting: Vec<u64> = stage.chunks.iter().map(|c| self.ends(c).0).collect();
        let of = |(at, chunk): (usize, &Counts)| {
            let wrap = if microbatches > 1 {
                let (first, last) = self.ends(chunk);
                first + last
            } else {
                0
            };
            let others = |&(other, _): &(usize, &u64)| other > at || (again && other != at);
            let others = lasting.iter().enumerate().filter(others);
            self.pair(chunk).max(wrap) + others.map(|(_, len)| len).sum::<u64>()
        };
        stage.chunks.iter().enumerate().map(of).max().unwrap_or(0)
    }
}

/// Activations and buffers of a stage: `message` bytes go to each neighbour for each microbatch.
#[must_use]
pub(crate) fn activations(stage: &Stage, units: &ByKind<Bytes>, message: u64) -> (u64, u64) {
    let (saved, kept) = (units.map(|u| u.saved), units.map(|u| u.kept));
    let again = units.map(|u| u.again);
    let (mut most_saved, mut most) = (0, 0);
    for peak in &stage.peaks {
        let held = peak.saved.sum(&saved);
        most_saved = most_saved.max(held);
        most = most.max(held + peak.kept.sum(&kept) + peak.running.sum(&again));
    }
    let present = stage.layers.each().into_iter().zip(units.each());
    let passing = present.filter(|(count, _)| **count > 0);
    let passing = passing.map(|(_, unit)| unit.passing).max().unwrap_or(0);
    let messages = stage.neighbours * (IN_FLIGHT as u64 + 1) * message;
    (most_saved, most - most_saved + passing + messages)
}

/// What the first rank of each of these stages holds.
#[must_use]
pub fn on_stages(
    shape: &Shape,
    layout: &Layout,
    batch: &Batch,
    (types, moments): (WireTypes, usize),
    stages: &[Stage],
) -> Vec<Held> {
    let microbatches = batch.microbatches() / layout.dp.max(1);
    let parts = super::parts::by_kind(shape, layout);
    let zero = layout.zero_stage;
    let states = States::new(&parts, Places::of(layout), zero, types, moments);
    let units = units(shape, layout, batch, types);
    let message = memory::message(&shape.config, layout, batch, types);
    let of = |stage: &Stage| {
        let (activations, buffers) = activations(stage, &units, message);
        Held {
            activations,
            buffers,
            ..states.on(stage, layout, microbatches)
        }
    };
    stages.iter().map(of).collect()
}

/// A microbatch's bytes in each kind of layer. Latent attention saves, beside attention of as many
/// full heads, the narrow forms before and after their norms, and the statistics of these.
#[must_use]
pub(crate) fn units(
    shape: &Shape,
    layout: &Layout,
    batch: &Batch,
    types: WireTypes,
) -> ByKind<Bytes> {
    let mut units = memory::by_kind(&shape.config, layout, batch, types);
    let Some(latent) = shape.latent else {
        return units;
    };
    let t = (batch.micro_batch * batch.seq / layout.cp) as u64;
    let (e, a) = (
        types.storage.bytes() as u64,
        types.accumulation.bytes() as u64,
    );
    let ranks = (latent.q_rank.unwrap_or(0) + latent.kv_rank) as u64;
    let more = e * t * (2 * ranks + latent.rope_dim as u64) + 2 * a * t;
    for block in [&mut units.dense, &mut units.moe] {
        match layout.recompute {
            Recompute::Full => (block.kept, block.again) = (block.kept + more, block.again + more),
            Recompute::None | Recompute::Selective => block.saved += more,
        }
    }
    units
}
