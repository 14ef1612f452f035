//! How long a step takes, by a model whose every constant is stated.
//!
//! ```text
//! layer     products / (peak x gemm(width)) + attention / (peak x attention) + bytes / (memory x memory)
//!           + what tp, cp and ep send and nothing hides
//! stage     m (F + Bi + Bw) of the slowest one + what the pipeline idles
//! step      + what of gradients and parameters does not fit beside the work, + the optimizer
//! ```
//!
//! It is an estimate for comparing layouts. Against published runs it is held to
//! [`Efficiency::ERROR`] in this crate's tests.

use quintet_parallel_layers::pipeline::ScheduleKind;

use crate::closed::parts::Parts;
use crate::closed::pipeline::{Stage, StageSeconds, idle};
use crate::closed::sent::{Collective, Flow, Group, When};
use crate::closed::{ByKind, Counts};
use crate::cluster::Cluster;
use crate::links::{Lies, seconds};
use crate::shape::Shape;
use crate::{CpComm, Layout};

mod measured;
mod practice;
mod work;

pub use measured::Measured;
pub use practice::Practice;
pub use work::{Work, work};

/// What share of its peak each resource reaches. Replace them by measured ones.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Efficiency {
    /// Of the peak, by large products.
    pub gemm: f64,
    /// A product whose narrowest side is so wide runs at half of that.
    pub half_width: f64,
    /// Of the peak, by attention forward; backward does 2.5 times the work at the same rate.
    pub attention: f64,
    /// Of the memory's bandwidth, by norms, residuals and activations.
    pub memory: f64,
    /// Of a link's bandwidth.
    pub link: f64,
    /// Of what experts are sent, the share that the dual-pipe schedule hides behind other work.
    pub hidden: f64,
}

impl Efficiency {
    /// The relative error of MFU to which these hold against the published runs in the tests.
    pub const ERROR: f64 = 0.25;

    /// The share of the best that a product of this width reaches.
    #[must_use]
    pub fn at(&self, width: f64) -> f64 {
        width / (width + self.half_width)
    }
}

impl Default for Efficiency {
    fn default() -> Self {
        Self {
            gemm: 0.62,
            half_width: 128.0,
            attention: 0.35,
            memory: 0.6,
            link: 0.75,
            hidden: 0.8,
        }
    }
}

/// Where one step's seconds go, on the slowest stage.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct StepTime {
    /// Products, attention and the rest, of all microbatches.
    pub compute: f64,
    /// Computed again for recompute.
    pub recompute: f64,
    /// Tensor parallel traffic.
    pub tp: f64,
    /// Context parallel traffic that attention does not hide.
    pub cp: f64,
    /// Expert parallel traffic that nothing hides.
    pub ep: f64,
    /// Messages between stages that nothing hides.
    pub pp: f64,
    /// Gradients and parameters that do not travel beside the work.
    pub dp: f64,
    /// Idle, for the pipeline fills and drains.
    pub bubble: f64,
    /// The update.
    pub optimizer: f64,
}

impl StepTime {
    /// The step.
    #[must_use]
    pub fn total(&self) -> f64 {
        self.compute
            + self.recompute
            + self.tp
            + self.cp
            + self.ep
            + self.pp
            + self.dp
            + self.bubble
            + self.optimizer
    }

    /// By name.
    #[must_use]
    pub fn named(&self) -> [(&'static str, f64); 9] {
        [
            ("compute", self.compute),
            ("recompute", self.recompute),
            ("tp", self.tp),
            ("cp", self.cp),
            ("ep", self.ep),
            ("pp", self.pp),
            ("dp", self.dp),
            ("bubble", self.bubble),
            ("optimizer", self.optimizer),
        ]
    }
}

/// Seconds of one microbatch in one layer.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct LayerSeconds {
    /// Forward.
    pub forward: f64,
    /// Gradients of inputs.
    pub input: f64,
    /// Gradients of parameters.
    pub weight: f64,
    /// Computed again before backward.
    pub again: f64,
    /// Traffic that stands in the way: forward, backward.
    pub tp: [f64; 2],
    /// Of cp.
    pub cp: [f64; 2],
    /// Of ep and etp.
    pub ep: [f64; 2],
}

/// What the model of time is asked with.
#[derive(Debug, Clone, Copy)]
pub struct Clock<'a> {
    /// The machine.
    pub cluster: &'a Cluster,
    /// Operations a second at the job's type.
    pub peak: f64,
    /// Bytes of an element of that type.
    pub element: usize,
    /// Shares of the peaks.
    pub efficiency: Efficiency,
    /// Whose trainer is timed.
    pub practice: Practice,
}

impl Clock<'_> {
    fn flow(&self, lies: &mut Lies, shape: &Shape, layout: &Layout, flow: &Flow) -> f64 {
        let place = flow.group.place(shape, layout);
        let lie = lies.of(place, self.cluster);
        if flow.group == Group::Ep {
            let (on, to) = ((shape, layout), (self.cluster, lie));
            let link = self.efficiency.link;
            return self.practice.experts(on, to, flow, self.element, link);
        }
        seconds(
            self.cluster,
            lie,
            flow.collective,
            flow.bytes as f64,
            place.1,
            self.efficiency.link,
        ) * flow.times as f64
    }

    /// Seconds of the products, attention and memory of a work.
    fn computed(&self, work: &Work) -> [f64; 3] {
        let e = &self.efficiency;
        let computing = 1.0 - self.practice.communication_share;
        let share = e.gemm * e.at(work.width) * computing;
        let products = if work.products == 0.0 {
            0.0
        } else if self.practice.fp8 {
            let rest = (work.products - work.blocks) / self.peak;
            (work.blocks / self.cluster.peak.fp8 + rest) / share
        } else {
            work.products / (self.peak * share)
        };
        [
            products,
            work.attention / (self.peak * e.attention * computing),
            work.bytes / (self.cluster.memory_bandwidth * e.memory),
        ]
    }

    /// A layer's seconds for one microbatch, with what it sends. `again` are the shares of
    /// products, attention and memory that backward computes again.
    pub fn layer(
        &self,
        lies: &mut Lies,
        (shape, layout): (&Shape, &Layout),
        work: &Work,
        flows: &[Flow],
        again: [f64; 3],
    ) -> LayerSeconds {
        let [products, attention, memory] = self.computed(work);
        let mut layer = LayerSeconds {
            forward: products + attention + memory,
            input: products + 2.5 * attention + 1.5 * memory,
            weight: products + 0.5 * memory,
            again: again[0] * products + again[1] * attention + again[2] * memory,
            ..LayerSeconds::default()
        };
        let mut rings = [0.0; 2];
        for flow in flows {
            let seconds = self.flow(lies, shape, layout, flow);
            let way = usize::from(flow.when != When::Forward);
            match (flow.group, flow.collective) {
                (Group::Cp, Collective::Ring) => rings[way] += seconds,
                (Group::Cp | Group::Ulysses, _) => layer.cp[way] += seconds,
                (Group::Ep | Group::Etp, _) => layer.ep[way] += seconds,
                _ => layer.tp[way] += seconds,
            }
        }
        if layout.cp_comm == CpComm::Ring {
            // A hop travels while the block before it is attended to.
            layer.cp[0] += (rings[0] - attention).max(0.0);
            layer.cp[1] += (rings[1] - (2.5 + again[1]) * attention).max(0.0);
        }
        layer
    }

    /// What gradients and parameters of a layer take once, or for each microbatch.
    pub fn states(
        &self,
        lies: &mut Lies,
        (shape, layout): (&Shape, &Layout),
        flows: &[Flow],
    ) -> StateSeconds {
        let mut sum = StateSeconds::default();
        for flow in flows {
            let seconds = self.flow(lies, shape, layout, flow);
            match (flow.when, flow.collective) {
                (When::ForwardBeside, _) => sum.forward += seconds,
                (When::BackwardBeside, _) => sum.backward += seconds,
                (_, Collective::AllGather) => sum.gathered += seconds,
                _ => sum.summed += seconds,
            }
        }
        sum
    }

    /// Seconds of the update of so many elements: moments, master and gradient in, all but the last
    /// out, and the parameter.
    #[must_use]
    pub fn update(&self, elements: f64) -> f64 {
        30.0 * elements / (self.cluster.memory_bandwidth * self.efficiency.memory)
    }
}

/// Seconds of a layer's gradients and parameters in one step.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct StateSeconds {
    /// Beside the forward passes of all microbatches.
    pub forward: f64,
    /// Beside their backward passes.
    pub backward: f64,
    /// Sums beside the last backward pass.
    pub summed: f64,
    /// Parameters beside the first forward pass of the next step.
    pub gathered: f64,
}

impl StateSeconds {
    /// The sum over a stage's layers.
    #[must_use]
    pub fn on(layers: &Counts, each: &ByKind<Self>) -> Self {
        let of = |pick: fn(&Self) -> f64| layers.time(&each.map(|s| pick(&s)));
        Self {
            forward: of(|s| s.forward),
            backward: of(|s| s.backward),
            summed: of(|s| s.summed),
            gathered: of(|s| s.gathered),
        }
    }
}

/// What a step is timed from.
pub struct Timed<'a> {
    /// The stage.
    pub stage: &'a Stage,
    /// Microbatches of a replica.
    pub microbatches: u64,
    /// Of one microbatch.
    pub layers: &'a ByKind<LayerSeconds>,
    /// Of one step.
    pub states: &'a ByKind<StateSeconds>,
    /// Of one message to a neighbour.
    pub message: f64,
    /// Elements that this rank updates.
    pub updated: f64,
}

/// The seconds of a step, were all stages like this one.
#[must_use]
pub fn step(clock: &Clock<'_>, layout: &Layout, timed: &Timed<'_>) -> StepTime {
    let (count, m) = (&timed.stage.layers, timed.microbatches as f64);
    let of = |pick: &dyn Fn(&LayerSeconds) -> f64| count.time(&timed.layers.map(|l| pick(&l)));
    let (forward, input, weight, again) = (
        of(&|l| l.forward),
        of(&|l| l.input),
        of(&|l| l.weight),
        of(&|l| l.again),
    );
    let (tp, cp) = (of(&|l| l.tp[0]), of(&|l| l.cp[0]));
    let (tp_back, cp_back) = (of(&|l| l.tp[1]), of(&|l| l.cp[1]));
    let (mut ep, mut ep_back) = (of(&|l| l.ep[0]), of(&|l| l.ep[1]));
    if layout.schedule == ScheduleKind::DualPipeV {
        // Forward of one microbatch runs beside backward of another.
        let cover = clock.efficiency.hidden * (forward + input + weight);
        let hidden = cover.min(ep + ep_back) / (ep + ep_back).max(1e-30);
        ep *= 1.0 - hidden;
        ep_back *= 1.0 - hidden;
    }
    let one = StageSeconds {
        forward: forward + tp + cp + ep,
        input: input + again + tp_back + cp_back + ep_back,
        weight,
    };
    let states = StateSeconds::on(count, timed.states);
    let over = |seconds: f64, beside: f64| (seconds - beside).max(0.0);
    let back = one.input + one.weight;
    // The last sum and the first gather have nothing beside them.
    let ends = (states.summed + states.gathered) / count.all().max(1) as f64;
    let dp = over(states.forward, m * one.forward)
        + over(states.backward, m * back)
        + (over(states.summed, back) + over(states.gathered, one.forward)).max(ends);
    let chunks = layout.chunks() as f64;
    // In the steady state messages travel beside the other chunks' work; filling and draining they
    // stand in the way.
    let ramp = 2.0 * layout.pp.saturating_sub(1) as f64 * timed.message;
    let steady = timed.stage.elsewhere as f64 * m * over(timed.message, one.all() / (2.0 * chunks));
    StepTime {
        compute: m * (forward + input + weight),
        recompute: m * again,
        tp: m * (tp + tp_back),
        cp: m * (cp + cp_back),
        ep: m * (ep + ep_back),
        pp: ramp + steady,
        dp,
        bubble: idle(layout, one, count.all() / layout.chunks().max(1) as u64),
        optimizer: clock.update(timed.updated),
    }
}

/// Elements of a layer that the first rank updates under this ZeRO stage.
#[must_use]
pub fn updated(parts: &Parts, places: crate::closed::parts::Places, zero: u8) -> u64 {
    if zero == 0 {
        parts.whole()
    } else {
        parts.chunks(places)
    }
}
