//! The order of passes on one stage: what makes one kind of schedule different from another.
//!
//! Each is a short list of runs; how a pass becomes actions is [`Schedule`](super::Schedule)'s
//! matter. `p` stages, `s` this one, `m` microbatches, `v` chunks a stage.

use alloc::collections::VecDeque;
use alloc::vec::Vec;

use super::ScheduleKind;

/// What a pass runs of a chunk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Part {
    Forward,
    /// Both halves of backward, segment by segment.
    Backward,
    /// The half that the stage before waits for.
    Input,
    /// The half that only the optimizer waits for.
    Weight,
}

/// One pass of one microbatch through one chunk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Pass {
    pub(super) part: Part,
    pub(super) mb: usize,
    pub(super) chunk: usize,
}

/// The passes of stage `s`.
pub(super) fn order(
    kind: ScheduleKind,
    stages: usize,
    chunks: usize,
    microbatches: usize,
    stage: usize,
) -> Vec<Pass> {
    let (p, v, m, s) = (stages, chunks, microbatches, stage);
    if m == 0 {
        return Vec::new();
    }
    match kind {
        ScheduleKind::GPipe => alternate(m, m),
        ScheduleKind::OneFOneB => alternate(p - 1 - s, m),
        ScheduleKind::Interleaved => interleaved(p, v, m, s),
        ScheduleKind::ZbH1 => zb_h1(p, m, s),
        ScheduleKind::DualPipeV => dual_pipe_v(p, m, s),
    }
}

/// Forward alone, for an evaluation: groups of up to `p` microbatches go round and round.
pub(super) fn forward_only(stages: usize, chunks: usize, microbatches: usize) -> Vec<Pass> {
    let part = Part::Forward;
    let group = |first: usize| {
        (0..chunks).flat_map(move |chunk| {
            let last = (first + stages).min(microbatches);
            (first..last).map(move |mb| Pass { part, mb, chunk })
        })
    };
    (0..microbatches).step_by(stages).flat_map(group).collect()
}

/// `warm_up` forwards, then a forward and a backward in turn, then the backwards that are left.
fn alternate(warm_up: usize, m: usize) -> Vec<Pass> {
    let pass = |part, mb| Pass { part, mb, chunk: 0 };
    turns(
        warm_up,
        m,
        |k| pass(Part::Forward, k),
        |k| pass(Part::Backward, k),
    )
}

/// The same over `m v` passes each way. Passes go in groups of `p` microbatches: a group through
/// the first chunk, then through the second, and so on; backward the other way. The warm-up is the
/// other chunks of a group, and two passes for each stage behind this one.
fn interleaved(p: usize, v: usize, m: usize, s: usize) -> Vec<Pass> {
    let pass = |part, k: usize, backward: bool| {
        let (group, within) = (k / (p * v), k % (p * v));
        let turn = within / p;
        let chunk = if backward { v - 1 - turn } else { turn };
        let mb = group * p + within % p;
        Pass { part, mb, chunk }
    };
    turns(
        (v - 1) * p + 2 * (p - 1 - s),
        m * v,
        |k| pass(Part::Forward, k, false),
        |k| pass(Part::Backward, k, true),
    )
}

fn turns(
    warm_up: usize,
    count: usize,
    forward: impl Fn(usize) -> Pass,
    backward: impl Fn(usize) -> Pass,
) -> Vec<Pass> {
    let warm_up = warm_up.min(count);
    let mut order: Vec<Pass> = (0..warm_up).map(&forward).collect();
    for k in 0..count {
        if warm_up + k < count {
            order.push(forward(warm_up + k));
        }
        order.push(backward(k));
    }
    order
}

/// 1F1B whose weight halves stay `s` microbatches behind. Stage `s` of 1F1B holds `p - s`
/// microbatches, so that each stage now holds `p`, which the first one did before.
fn zb_h1(p: usize, m: usize, s: usize) -> Vec<Pass> {
    let mut order = Order::default();
    let warm_up = (p - 1 - s).min(m);
    (0..warm_up).for_each(|_| order.forward(0));
    for k in 0..m {
        if warm_up + k < m {
            order.forward(0);
        }
        // Nobody waits for the gradient of stage 0.
        if s == 0 {
            order.backward(0);
            continue;
        }
        order.input(0);
        if k >= s {
            order.weight();
        }
    }
    (0..s).for_each(|_| order.weight());
    order.passes
}

/// Eight runs, of which the fourth is the steady state. Chunk 0 is on the way there, chunk 1 on
/// the way back; at least `2 p` microbatches.
fn dual_pipe_v(p: usize, m: usize, s: usize) -> Vec<Pass> {
    let mut order = Order::default();
    let behind = p - 1 - s;
    (0..2 * behind).for_each(|_| order.forward(0));
    for _ in 0..=s {
        order.forward(0);
        order.forward(1);
    }
    for _ in 0..behind {
        order.input(1);
        order.weight();
        order.forward(1);
    }
    for _ in 0..(m + s + 1).saturating_sub(2 * p) {
        order.forward(0);
        order.backward(1);
        order.forward(1);
        order.backward(0);
    }
    for _ in 0..behind {
        order.backward(1);
        order.forward(1);
        order.backward(0);
    }
    // From the middle on, weights wait: their time is filled in at the end.
    for k in 0..2 * (s + 1) {
        let chunk = 1 - k % 2;
        if k > s {
            order.input(chunk);
        } else {
            order.backward(chunk);
        }
    }
    for _ in 0..behind {
        order.weight();
        order.input(0);
    }
    (0..=s).for_each(|_| order.weight());
    order.passes
}

/// Passes as they are decided on: each chunk's microbatches in order, each way, and the weight
/// halves in the order of the input halves.
#[derive(Default)]
struct Order {
    passes: Vec<Pass>,
    forwards: [usize; 2],
    backwards: [usize; 2],
    waiting: VecDeque<(usize, usize)>,
}

impl Order {
    fn push(&mut self, part: Part, mb: usize, chunk: usize) {
        self.passes.push(Pass { part, mb, chunk });
    }

    fn forward(&mut self, chunk: usize) {
        self.push(Part::Forward, self.forwards[chunk], chunk);
        self.forwards[chunk] += 1;
    }

    fn backward(&mut self, chunk: usize) {
        self.push(Part::Backward, self.backwards[chunk], chunk);
        self.backwards[chunk] += 1;
    }

    fn input(&mut self, chunk: usize) {
        let mb = self.backwards[chunk];
        self.push(Part::Input, mb, chunk);
        self.backwards[chunk] += 1;
        self.waiting.push_back((mb, chunk));
    }

    /// The weight half that has waited longest, where there is one.
    fn weight(&mut self) {
        if let Some((mb, chunk)) = self.waiting.pop_front() {
            self.push(Part::Weight, mb, chunk);
        }
    }
}
