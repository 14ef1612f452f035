//! From a kind of schedule to the actions of each stage.
//!
//! Two steps, so that a new schedule is one new order:
//!
//! ```text
//! order(stage)    F0 F1 B0 F2 B1 ...      which pass of which chunk, the schedule proper
//!   | expand      gather, receive, work, send, release around each pass
//! actions(stage)  gather, F0 <- 0, F0, F0 -> 2, release, ...
//! ```
//!
//! A forward pass is `gather, receive, forward, send, release`. A backward pass over segments
//! 0 and 1 is
//!
//! ```text
//! gather, receive, B.0, W.0, (reduce 0), B.1, send, W.1, (reduce 1), release
//! ```
//!
//! where the reductions come in the chunk's last backward pass, or in every one where
//! [`Reduction::EachMicrobatch`] asks for that; each as soon as its bucket is complete, so that it
//! runs beside the backward of the segments after it. The gradient is
//! sent before the last segment's weights: the neighbour waits for it and for nothing else.
//! A backward in two passes is
//!
//! ```text
//! gather, receive, B.0, B.1, send, release        ...        W.0, (reduce 0), W.1, (reduce 1)
//! ```
//!
//! with other passes in between. Microbatches keep their order in each chunk, forward, backward and
//! for the weights, so that gradients are summed in the same order under every schedule.
//!
//! Between two chunks on one stage there is no message: the second takes what the first left.
//!
//! Gathers stand before the receive: fetching parameters overlaps waiting for the message.
//! Each pass gathers and releases for itself, which is how ZeRO-3 counts its traffic (twice a
//! microbatch); ZeRO 0 to 2 do nothing there. A weight pass needs no parameters. Ranks that share
//! parameters under ZeRO-3 must therefore run the same number of microbatches. Without
//! microbatches only the reductions are left, so that every rank still joins them.

use alloc::vec::Vec;

use super::order::{self, Part, Pass};
use super::{Action, Actions, Error, Route, ScheduleKind};

/// The work of a pipeline, as data.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Schedule {
    kind: ScheduleKind,
    route: Route,
    microbatches: usize,
    /// One number per chunk, counted along the model.
    segments: Vec<usize>,
    reduction: Reduction,
}

/// How often the gradients of a bucket are reduced.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Reduction {
    /// In the chunk's last backward pass (ZeRO 0 and 1).
    #[default]
    Once,
    /// In each backward pass, so that gradients need not be kept whole (ZeRO 2 and 3).
    EachMicrobatch,
}

impl Schedule {
    /// A schedule over `stages` pipeline ranks. `segments` holds the number of segments, which is
    /// the number of gradient buckets, of each chunk in the order of the model
    /// ([`Route::place`]): with one chunk a stage, `segments[stage]`. Under
    /// [`ScheduleKind::Interleaved`] their number says how many chunks a stage holds.
    ///
    /// # Errors
    /// [`Error::NoStages`], [`Error::Chunks`], [`Error::NoSegments`]; [`Error::Stages`] and
    /// [`Error::Microbatches`] where the kind cannot run so few or so many.
    pub fn new(
        kind: ScheduleKind,
        stages: usize,
        microbatches: usize,
        segments: &[usize],
    ) -> Result<Self, Error> {
        if stages == 0 {
            return Err(Error::NoStages);
        }
        if stages < kind.least_stages() {
            let (least, got) = (kind.least_stages(), stages);
            return Err(Error::Stages { kind, least, got });
        }
        let chunks = kind.chunks().unwrap_or((segments.len() / stages).max(2));
        let expected = stages * chunks;
        if segments.len() != expected {
            let got = segments.len();
            return Err(Error::Chunks { expected, got });
        }
        if let Some(chunk) = segments.iter().position(|&n| n == 0) {
            return Err(Error::NoSegments { chunk });
        }
        let nearest = kind.nearest_microbatches(stages, microbatches);
        if !nearest.contains(&microbatches) {
            let got = microbatches;
            return Err(Error::Microbatches {
                kind,
                stages,
                got,
                nearest,
            });
        }
        Ok(Self {
            kind,
            route: kind.route(stages, chunks),
            microbatches,
            segments: segments.to_vec(),
            reduction: Reduction::Once,
        })
    }

    /// The same order of passes, reducing gradients as often as `reduction` says;
    /// [`Reduction::Once`] is what [`Schedule::new`] begins with.
    #[must_use]
    pub fn with_reduction(self, reduction: Reduction) -> Self {
        Self { reduction, ..self }
    }

    /// How often gradients are reduced.
    #[must_use]
    pub fn reduction(&self) -> Reduction {
        self.reduction
    }

    /// Which order it follows.
    #[must_use]
    pub fn kind(&self) -> ScheduleKind {
        self.kind
    }

    /// Where the chunks lie.
    #[must_use]
    pub fn route(&self) -> &Route {
        &self.route
    }

    /// Pipeline ranks.
    #[must_use]
    pub fn stages(&self) -> usize {
        self.route.stages()
    }

    /// Microbatches of a step.
    #[must_use]
    pub fn microbatches(&self) -> usize {
        self.microbatches
    }

    /// Chunks that each stage holds.
    #[must_use]
    pub fn chunks(&self) -> usize {
        self.route.chunks()
    }

    /// Segments, and gradient buckets, of a stage's chunk; 0 where there is no such chunk.
    #[must_use]
    pub fn segments(&self, stage: usize, chunk: usize) -> usize {
        if stage >= self.stages() || chunk >= self.chunks() {
            return 0;
        }
        let place = self.route.place(stage, chunk);
        self.segments.get(place).copied().unwrap_or(0)
    }

    /// The actions of a stage, in order; none for a stage that does not exist.
    #[must_use]
    pub fn actions(&self, stage: usize) -> Actions {
        let mut actions = Actions::new();
        if stage >= self.stages() {
            return actions;
        }
        let (stages, chunks, m) = (self.stages(), self.chunks(), self.microbatches);
        let order = order::order(self.kind, stages, chunks, m, stage);
        for (at, pass) in order.iter().enumerate() {
            let weighs =
                |p: &Pass| p.chunk == pass.chunk && matches!(p.part, Part::Backward | Part::Weight);
            let reduces = || {
                self.reduction == Reduction::EachMicrobatch || !order[at + 1..].iter().any(weighs)
            };
            let Pass { part, mb, chunk } = *pass;
            match part {
                Part::Forward => self.forward(&mut actions, stage, mb, chunk),
                Part::Backward => self.backward(&mut actions, stage, mb, chunk, reduces()),
                Part::Input => self.input(&mut actions, stage, mb, chunk),
                Part::Weight => {
                    for segment in 0..self.segments(stage, chunk) {
                        weight(&mut actions, mb, chunk, segment, reduces());
                    }
                }
            }
        }
        if self.microbatches == 0 {
            for chunk in (0..self.chunks()).rev() {
                for bucket in 0..self.segments(stage, chunk) {
                    actions.push(Action::ReduceGrads { chunk, bucket });
                }
            }
        }
        actions
    }

    /// Receives, forwards and sends of an evaluation over any number of microbatches, whatever the
    /// schedule trains.
    #[must_use]
    pub fn forward_only(&self, stage: usize, microbatches: usize) -> Actions {
        let mut actions = Actions::new();
        if stage < self.stages() {
            for pass in order::forward_only(self.stages(), self.chunks(), microbatches) {
                self.forward(&mut actions, stage, pass.mb, pass.chunk);
            }
        }
        actions
    }

    /// The actions of every stage.
    #[must_use]
    pub fn all(&self) -> Vec<Actions> {
        (0..self.stages())
            .map(|stage| self.actions(stage))
            .collect()
    }

    /// The other stage whose message a stage's chunk takes forward, if it is another.
    #[must_use]
    pub fn before(&self, stage: usize, chunk: usize) -> Option<usize> {
        let (peer, _) = self.route.before(stage, chunk)?;
        (peer != stage).then_some(peer)
    }

    /// The other stage that takes the message of a stage's chunk forward, if it is another.
    #[must_use]
    pub fn after(&self, stage: usize, chunk: usize) -> Option<usize> {
        let (peer, _) = self.route.after(stage, chunk)?;
        (peer != stage).then_some(peer)
    }

    fn forward(&self, actions: &mut Actions, stage: usize, mb: usize, chunk: usize) {
        actions.push(Action::Gather { chunk });
        if let Some(from) = self.before(stage, chunk) {
            actions.push(Action::RecvForward { mb, chunk, from });
        }
        actions.push(Action::Forward { mb, chunk });
        if let Some(to) = self.after(stage, chunk) {
            actions.push(Action::SendForward { mb, chunk, to });
        }
        actions.push(Action::Release { chunk });
    }

    fn backward(
        &self,
        actions: &mut Actions,
        stage: usize,
        mb: usize,
        chunk: usize,
        reduces: bool,
    ) {
        self.begin_backward(actions, stage, mb, chunk);
        let segments = self.segments(stage, chunk);
        for segment in 0..segments {
            actions.push(Action::BackwardInput { mb, chunk, segment });
            if segment + 1 == segments {
                self.send_backward(actions, stage, mb, chunk);
            }
            weight(actions, mb, chunk, segment, reduces);
        }
        actions.push(Action::Release { chunk });
    }

    fn input(&self, actions: &mut Actions, stage: usize, mb: usize, chunk: usize) {
        self.begin_backward(actions, stage, mb, chunk);
        for segment in 0..self.segments(stage, chunk) {
            actions.push(Action::BackwardInput { mb, chunk, segment });
        }
        self.send_backward(actions, stage, mb, chunk);
        actions.push(Action::Release { chunk });
    }

    fn begin_backward(&self, actions: &mut Actions, stage: usize, mb: usize, chunk: usize) {
        actions.push(Action::Gather { chunk });
        if let Some(from) = self.after(stage, chunk) {
            actions.push(Action::RecvBackward { mb, chunk, from });
        }
    }

    fn send_backward(&self, actions: &mut Actions, stage: usize, mb: usize, chunk: usize) {
        if let Some(to) = self.before(stage, chunk) {
            actions.push(Action::SendBackward { mb, chunk, to });
        }
    }
}

/// The weights of a segment, and its reduction where that is due.
fn weight(actions: &mut Actions, mb: usize, chunk: usize, segment: usize, reduces: bool) {
    actions.push(Action::BackwardWeight { mb, chunk, segment });
    if reduces {
        let bucket = segment;
        actions.push(Action::ReduceGrads { chunk, bucket });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::string::{String, ToString};

    fn text(schedule: &Schedule, stage: usize) -> String {
        let words: Vec<String> = schedule
            .actions(stage)
            .iter()
            .map(ToString::to_string)
            .collect();
        words.join(", ")
    }

    #[test]
    fn a_middle_stage_by_hand() {
        let schedule = Schedule::new(ScheduleKind::OneFOneB, 3, 2, &[1, 2, 1]).unwrap();
        assert_eq!(
            text(&schedule, 1),
            "gather, F0 <- 0, F0, F0 -> 2, release, \
             gather, F1 <- 0, F1, F1 -> 2, release, \
             gather, B0 <- 2, B0.0, W0.0, B0.1, B0 -> 0, W0.1, release, \
             gather, B1 <- 2, B1.0, W1.0, reduce 0, B1.1, B1 -> 0, W1.1, reduce 1, release"
        );
    }

    #[test]
    fn each_microbatch_is_reduced_where_that_is_asked_for() {
        let schedule = Schedule::new(ScheduleKind::OneFOneB, 2, 2, &[2, 1]).unwrap();
        assert_eq!(
            text(&schedule.with_reduction(Reduction::EachMicrobatch), 0),
            "gather, F0, F0 -> 1, release, gather, F1, F1 -> 1, release, \
             gather, B0 <- 1, B0.0, W0.0, reduce 0, B0.1, W0.1, reduce 1, release, \
             gather, B1 <- 1, B1.0, W1.0, reduce 0, B1.1, W1.1, reduce 1, release"
        );
    }

    #[test]
    fn a_single_stage_sends_nothing() {
        for kind in ScheduleKind::ALL {
            if kind.least_stages() > 1 {
                continue;
            }
            let segments = alloc::vec![2; kind.chunks().unwrap_or(3)];
            let schedule = Schedule::new(kind, 1, 4, &segments).unwrap();
            assert!(schedule.actions(0).iter().all(|a| a.message().is_none()));
        }
    }

    #[test]
    fn without_microbatches_reductions_are_left() {
        let schedule = Schedule::new(ScheduleKind::GPipe, 2, 0, &[2, 1]).unwrap();
        assert_eq!(text(&schedule, 0), "reduce 0, reduce 1");
        assert_eq!(text(&schedule, 1), "reduce 0");
    }

    #[test]
    fn what_cannot_be_is_refused() {
        let new =
            |stages, segments: &[usize]| Schedule::new(ScheduleKind::GPipe, stages, 1, segments);
        assert_eq!(new(0, &[]), Err(Error::NoStages));
        let (expected, got) = (2, 1);
        assert_eq!(new(2, &[1]), Err(Error::Chunks { expected, got }));
        assert_eq!(new(2, &[1, 0]), Err(Error::NoSegments { chunk: 1 }));
        let new = |kind, stages, microbatches, chunks: usize| {
            Schedule::new(kind, stages, microbatches, &alloc::vec![1; chunks])
                .map(|s| s.chunks())
                .map_err(|e| e.to_string())
        };
        let refused = |text: &str| Err(String::from(text));
        assert_eq!(new(ScheduleKind::Interleaved, 3, 6, 9), Ok(3));
        assert_eq!(
            new(ScheduleKind::Interleaved, 3, 7, 6),
            refused("interleaved over 3 stages cannot run 7 microbatches; nearest: 6 or 9")
        );
        assert_eq!(
            new(ScheduleKind::Interleaved, 3, 6, 3),
            refused("3 numbers of segments were given where the pipeline has 6 chunks")
        );
        assert_eq!(
            new(ScheduleKind::DualPipeV, 3, 5, 6),
            refused("dualpipe-v over 3 stages cannot run 5 microbatches; nearest: 6")
        );
        assert_eq!(
            new(ScheduleKind::DualPipeV, 1, 2, 2),
            refused("dualpipe-v needs at least 2 stages, got 1")
        );
    }

    /// Two halves of backward: the gradient leaves first, and weights wait in their order.
    #[test]
    fn a_split_stage_by_hand() {
        let schedule = Schedule::new(ScheduleKind::ZbH1, 2, 2, &[1, 2]).unwrap();
        assert_eq!(
            text(&schedule, 1),
            "gather, F0 <- 0, F0, release, gather, B0.0, B0.1, B0 -> 0, release, \
             gather, F1 <- 0, F1, release, gather, B1.0, B1.1, B1 -> 0, release, W0.0, W0.1, \
             W1.0, reduce 0, W1.1, reduce 1"
        );
    }

    /// The turning point of a V hands over without a message.
    #[test]
    fn a_v_by_hand() {
        let schedule = Schedule::new(ScheduleKind::DualPipeV, 2, 4, &[1; 4]).unwrap();
        let begins = "gather, F0 <- 0, F0, release, gather/1, F0/1, F0/1 -> 0, release/1, ";
        assert!(
            text(&schedule, 1).starts_with(begins),
            "{}",
            text(&schedule, 1)
        );
    }
}
