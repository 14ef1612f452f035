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
//! Microbatches keep their order in both directions, so that gradients are summed in the same
//! order under every schedule.
//!
//! Gathers stand before the receive: fetching parameters overlaps waiting for the message.
//! Each pass gathers and releases for itself, which is how ZeRO-3 counts its traffic (twice a
//! microbatch); ZeRO 0 to 2 do nothing there. Ranks that share parameters under ZeRO-3 must
//! therefore run the same number of microbatches. Without microbatches only the reductions are
//! left, so that every rank still joins them.

use alloc::vec::Vec;

use super::{Action, Actions, Error, ScheduleKind};

/// The work of a pipeline, as data.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Schedule {
    kind: ScheduleKind,
    stages: usize,
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

/// One pass of one microbatch through one chunk. Schedules that part the two halves of backward
/// will add them here.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Pass {
    Forward { mb: usize, chunk: usize },
    Backward { mb: usize, chunk: usize },
}

impl Schedule {
    /// A schedule over `stages` pipeline ranks. `segments` holds the number of segments, which is
    /// the number of gradient buckets, of each chunk in the order of the model: with one chunk a
    /// stage, `segments[stage]`.
    ///
    /// # Errors
    /// [`Error::NoStages`], [`Error::Chunks`], [`Error::NoSegments`].
    pub fn new(
        kind: ScheduleKind,
        stages: usize,
        microbatches: usize,
        segments: &[usize],
    ) -> Result<Self, Error> {
        if stages == 0 {
            return Err(Error::NoStages);
        }
        let expected = stages * kind.chunks();
        if segments.len() != expected {
            let got = segments.len();
            return Err(Error::Chunks { expected, got });
        }
        if let Some(chunk) = segments.iter().position(|&n| n == 0) {
            return Err(Error::NoSegments { chunk });
        }
        Ok(Self {
            kind,
            stages,
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

    /// Pipeline ranks.
    #[must_use]
    pub fn stages(&self) -> usize {
        self.stages
    }

    /// Microbatches of a step.
    #[must_use]
    pub fn microbatches(&self) -> usize {
        self.microbatches
    }

    /// Chunks that each stage holds.
    #[must_use]
    pub fn chunks(&self) -> usize {
        self.kind.chunks()
    }

    /// Segments, and gradient buckets, of a stage's chunk; 0 where there is no such chunk.
    #[must_use]
    pub fn segments(&self, stage: usize, chunk: usize) -> usize {
        if stage >= self.stages || chunk >= self.chunks() {
            return 0;
        }
        let place = self.place(stage, chunk);
        self.segments.get(place).copied().unwrap_or(0)
    }

    /// The actions of a stage, in order; none for a stage that does not exist.
    #[must_use]
    pub fn actions(&self, stage: usize) -> Actions {
        let mut actions = Actions::new();
        if stage >= self.stages {
            return actions;
        }
        let order = self.order(stage);
        for (at, pass) in order.iter().enumerate() {
            match *pass {
                Pass::Forward { mb, chunk } => self.forward(&mut actions, stage, mb, chunk),
                Pass::Backward { mb, chunk } => {
                    let later = order[at + 1..]
                        .iter()
                        .any(|p| matches!(p, Pass::Backward { chunk: c, .. } if *c == chunk));
                    let reduces = !later || self.reduction == Reduction::EachMicrobatch;
                    self.backward(&mut actions, stage, mb, chunk, reduces);
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

    /// The actions of every stage.
    #[must_use]
    pub fn all(&self) -> Vec<Actions> {
        (0..self.stages).map(|stage| self.actions(stage)).collect()
    }

    /// The stage before a stage's chunk along the model.
    #[must_use]
    pub fn before(&self, stage: usize, chunk: usize) -> Option<usize> {
        Some(self.home(self.place(stage, chunk).checked_sub(1)?))
    }

    /// The stage after a stage's chunk along the model.
    #[must_use]
    pub fn after(&self, stage: usize, chunk: usize) -> Option<usize> {
        let next = self.place(stage, chunk) + 1;
        (next < self.segments.len()).then(|| self.home(next))
    }

    /// Where a stage's chunk lies along the model: chunks are dealt to the stages in turn.
    pub(crate) fn place(&self, stage: usize, chunk: usize) -> usize {
        chunk * self.stages + stage
    }

    fn home(&self, place: usize) -> usize {
        place % self.stages
    }

    fn order(&self, stage: usize) -> Vec<Pass> {
        let warm_up = match self.kind {
            ScheduleKind::GPipe => self.microbatches,
            ScheduleKind::OneFOneB => self.stages - 1 - stage,
        };
        alternate(warm_up, self.microbatches)
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
        actions.push(Action::Gather { chunk });
        if let Some(from) = self.after(stage, chunk) {
            actions.push(Action::RecvBackward { mb, chunk, from });
        }
        let segments = self.segments(stage, chunk);
        for segment in 0..segments {
            actions.push(Action::BackwardInput { mb, chunk, segment });
            let ends = segment + 1 == segments;
            if let Some(to) = self.before(stage, chunk).filter(|_| ends) {
                actions.push(Action::SendBackward { mb, chunk, to });
            }
            actions.push(Action::BackwardWeight { mb, chunk, segment });
            if reduces {
                let bucket = segment;
                actions.push(Action::ReduceGrads { chunk, bucket });
            }
        }
        actions.push(Action::Release { chunk });
    }
}

/// `warm_up` forwards, then a forward and a backward in turn, then the backwards that are left.
fn alternate(warm_up: usize, microbatches: usize) -> Vec<Pass> {
    let warm_up = warm_up.min(microbatches);
    let chunk = 0;
    let mut order = Vec::with_capacity(2 * microbatches);
    order.extend((0..warm_up).map(|mb| Pass::Forward { mb, chunk }));
    for mb in 0..microbatches {
        if warm_up + mb < microbatches {
            let mb = warm_up + mb;
            order.push(Pass::Forward { mb, chunk });
        }
        order.push(Pass::Backward { mb, chunk });
    }
    order
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
            let schedule = Schedule::new(kind, 1, 4, &[2]).unwrap();
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
    }
}
