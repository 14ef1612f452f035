//! What one way through one mesh costs.

use alloc::vec::Vec;

use quintet_parallel_layers::Recompute;

use super::{Job, Pins, Request};
use crate::closed::ByKind;
use crate::closed::held::{States, units};
use crate::closed::parts::{Parts, Places};
use crate::closed::pipeline::Stage;
use crate::closed::sent::{self, Collective, Group, Sums};
use crate::cluster::Cluster;
use crate::links::{Lies, seconds};
use crate::memory::{self, Bytes};
use crate::time::{
    Clock, Efficiency, LayerSeconds, StateSeconds, StepTime, Timed, step, updated, work,
};
use crate::{Batch, Layout};

/// One ZeRO stage of one mesh.
pub(super) struct Sharded {
    pub(super) zero: u8,
    pub(super) states: States,
    /// Of one microbatch, where they are summed or gathered for each.
    pub(super) seconds: ByKind<StateSeconds>,
    pub(super) updated: ByKind<u64>,
}

/// One microbatch of one way through one mesh.
pub(super) struct Micro {
    pub(super) units: ByKind<Bytes>,
    pub(super) layers: ByKind<LayerSeconds>,
    /// Bytes of a message to a neighbour, and its seconds.
    pub(super) message: (u64, f64),
}

/// What figures are worked out from.
pub(super) struct Costs<'a> {
    request: &'a Request,
    clock: Clock<'a>,
    /// The same without latencies, and with every product at the best rate: a microbatch of any
    /// length takes at least its tokens' share of that.
    floor: Clock<'a>,
    lies: Lies,
}

impl<'a> Costs<'a> {
    /// `swift` is the request's cluster without latencies.
    pub(super) fn new(request: &'a Request, swift: &'a Cluster) -> Self {
        let clock = Clock {
            cluster: &request.cluster,
            peak: request.job.peak(&request.cluster),
            element: request.job.types.storage.bytes(),
            efficiency: request.efficiency,
            practice: request.practice,
        };
        Self {
            floor: Clock {
                cluster: swift,
                efficiency: Efficiency {
                    half_width: 0.0,
                    ..request.efficiency
                },
                ..clock
            },
            clock,
            lies: Lies::default(),
            request,
        }
    }

    /// Seconds that a step takes at least, however long microbatches are and whatever the schedule.
    pub(super) fn floor(&mut self, mesh: &Layout, batch: &Batch) -> f64 {
        let (shape, types) = (&self.request.shape, self.request.job.types);
        let flows = sent::by_kind(shape, mesh, batch, types, Sums::Least);
        let works = work(shape, mesh, batch, types.storage.bytes());
        let (floor, lies) = (&self.floor, &mut self.lies);
        let mut layer = |work, flows: &[_]| floor.layer(lies, (shape, mesh), work, flows, [0.0; 3]);
        let (dense, moe) = (
            layer(&works.dense, &flows.dense),
            layer(&works.moe, &flows.moe),
        );
        // Longer microbatches may fall into rows a little more evenly.
        0.99 * self.at_least(&dense, &moe, mesh, batch)
    }

    /// Seconds of a stage with the mean number of blocks, which the slowest one needs at least.
    pub(super) fn at_least(
        &self,
        dense: &LayerSeconds,
        moe: &LayerSeconds,
        mesh: &Layout,
        batch: &Batch,
    ) -> f64 {
        let m = &self.request.shape.config;
        let first = m.moe.map_or(m.layers, |moe| moe.first_dense.min(m.layers));
        let shown = 1.0 - self.request.efficiency.hidden;
        let of = |l: &LayerSeconds| {
            l.forward
                + l.input
                + l.weight
                + l.again
                + l.tp[0]
                + l.tp[1]
                + l.cp[0]
                + l.cp[1]
                + shown * (l.ep[0] + l.ep[1])
        };
        let blocks = first as f64 * of(dense) + (m.layers - first) as f64 * of(moe);
        (batch.microbatches() / mesh.dp) as f64 * blocks / mesh.pp as f64
    }

    /// Model states under every ZeRO stage that makes a difference.
    pub(super) fn sharded(&mut self, mesh: &Layout, parts: &ByKind<Parts>) -> Vec<Sharded> {
        let (request, places) = (self.request, Places::of(mesh));
        let Job { types, moments, .. } = request.job;
        let alone = places.dense == 1 && places.experts == 1;
        let mut all = Vec::new();
        for zero in 0..=(if alone { 0 } else { 3 }) {
            if !Pins::free(request.pins.zero_stage, zero) {
                continue;
            }
            let layout = Layout {
                zero_stage: zero,
                ..mesh.clone()
            };
            let seconds = |costs: &mut Self, parts: &Parts| {
                let flows = sent::states(parts, &layout, &request.shape, (types, Sums::Least), 1);
                costs
                    .clock
                    .states(&mut costs.lies, (&request.shape, &layout), &flows)
            };
            all.push(Sharded {
                zero,
                states: States::new(parts, places, zero, types, moments),
                seconds: ByKind {
                    embed: seconds(self, &parts.embed),
                    dense: seconds(self, &parts.dense),
                    moe: seconds(self, &parts.moe),
                    head: seconds(self, &parts.head),
                },
                updated: parts.map(|parts| updated(&parts, places, zero)),
            });
        }
        all
    }

    /// What one microbatch of this way takes.
    pub(super) fn micro(&mut self, layout: &Layout, batch: &Batch) -> Micro {
        let (shape, types) = (&self.request.shape, self.request.job.types);
        let width = types.storage.bytes();
        let units = units(shape, layout, batch, types);
        let flows = sent::by_kind(shape, layout, batch, types, Sums::Least);
        let works = work(shape, layout, batch, width);
        let again = match layout.recompute {
            Recompute::None => [0.0; 3],
            // What is cheap passes through memory once.
            Recompute::Selective => [0.0, 0.0, 0.5],
            Recompute::Full => [1.0; 3],
        };
        let place = Group::Pp.place(shape, layout);
        let message = memory::message(&shape.config, layout, batch, types);
        let lie = self.lies.of(place, self.clock.cluster);
        let mut layer = |work, flows: &[_], block: bool| {
            let again = if block { again } else { [0.0; 3] };
            self.clock
                .layer(&mut self.lies, (shape, layout), work, flows, again)
        };
        Micro {
            layers: ByKind {
                embed: layer(&works.embed, &flows.embed, false),
                dense: layer(&works.dense, &flows.dense, true),
                moe: layer(&works.moe, &flows.moe, true),
                head: layer(&works.head, &flows.head, false),
            },
            units,
            message: (
                message,
                seconds(
                    self.clock.cluster,
                    lie,
                    Collective::Send,
                    message as f64,
                    layout.pp,
                    self.clock.efficiency.link,
                ),
            ),
        }
    }

    /// The step of the slowest of these stages.
    pub(super) fn time(
        &self,
        layout: &Layout,
        stages: &[Stage],
        zero: &Sharded,
        micro: &Micro,
        microbatches: usize,
    ) -> StepTime {
        let m = microbatches as f64;
        let states = zero.seconds.map(|s| StateSeconds {
            forward: s.forward * m,
            backward: s.backward * m,
            ..s
        });
        let mut slowest = StepTime::default();
        for stage in stages {
            let timed = Timed {
                stage,
                microbatches: microbatches as u64,
                layers: &micro.layers,
                states: &states,
                message: micro.message.1,
                updated: stage.layers.sum(&zero.updated) as f64,
            };
            let time = step(&self.clock, layout, &timed);
            if time.total() > slowest.total() {
                slowest = time;
            }
        }
        slowest
    }
}
