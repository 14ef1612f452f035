//! What can go wrong with a schedule, its laws, or its performance.

use alloc::string::{String, ToString};
use alloc::vec::Vec;

use super::{Action, Direction, ScheduleKind};

fn either(numbers: &[usize]) -> String {
    let words: Vec<String> = numbers.iter().map(ToString::to_string).collect();
    words.join(" or ")
}

/// The one error of pipelines.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A pipeline without stages.
    #[error("a pipeline has at least 1 stage, 0 were asked for")]
    NoStages,
    /// Segments were not given for every chunk of the pipeline.
    #[error("{got} numbers of segments were given where the pipeline has {expected} chunks")]
    Chunks {
        /// Chunks of the pipeline.
        expected: usize,
        /// Numbers given.
        got: usize,
    },
    /// A kind that needs more stages.
    #[error("{kind} needs at least {least} stages, got {got}")]
    Stages {
        /// The kind.
        kind: ScheduleKind,
        /// Stages it needs.
        least: usize,
        /// Stages asked for.
        got: usize,
    },
    /// A number of microbatches that the kind cannot run.
    #[error(
        "{kind} over {stages} stages cannot run {got} microbatches; nearest: {}",
        either(nearest)
    )]
    Microbatches {
        /// The kind.
        kind: ScheduleKind,
        /// Stages of the pipeline.
        stages: usize,
        /// Microbatches asked for.
        got: usize,
        /// What can be run.
        nearest: Vec<usize>,
    },
    /// A chunk without segments has no backward.
    #[error("chunk {chunk} of the pipeline has 0 segments where at least 1 is needed")]
    NoSegments {
        /// Chunk, counted along the model.
        chunk: usize,
    },
    /// Times were not given for every chunk of the pipeline.
    #[error("times were given for {got} chunks where the pipeline has {expected}")]
    Times {
        /// Chunks of the pipeline.
        expected: usize,
        /// Times given.
        got: usize,
    },
    /// A time that is negative or not finite.
    #[error("{what} takes {got}, which is no length of time")]
    Time {
        /// Which time.
        what: &'static str,
        /// What was given.
        got: String,
    },
    /// Law: an action comes before what it needs.
    #[error("stage {stage}: {action} comes before {needs}")]
    Early {
        /// Pipeline rank.
        stage: usize,
        /// The action.
        action: Action,
        /// What must be done first.
        needs: Action,
    },
    /// Law: parameters are used without being gathered, gathered twice or never released.
    #[error("stage {stage}: {action} where the parameters of chunk {chunk} are {found}")]
    Parameters {
        /// Pipeline rank.
        stage: usize,
        /// The action.
        action: Action,
        /// Virtual stage.
        chunk: usize,
        /// The state they are in.
        found: &'static str,
    },
    /// Law: gradients are summed with those of more microbatches, or of fewer, than is asked for.
    #[error("stage {stage}: {action} takes the gradients of {got} microbatches, not {expected}")]
    Reduction {
        /// Pipeline rank.
        stage: usize,
        /// The reduction.
        action: Action,
        /// Microbatches that it is to take.
        expected: usize,
        /// Microbatches since the reduction before.
        got: usize,
    },
    /// Law: an action that the stage owes is not there.
    #[error("stage {stage}: {action} is missing")]
    Absent {
        /// Pipeline rank.
        stage: usize,
        /// The action.
        action: Action,
    },
    /// Law: an action comes twice, or does not belong to the stage.
    #[error("stage {stage}: {action} comes twice or does not belong there")]
    Foreign {
        /// Pipeline rank.
        stage: usize,
        /// The action.
        action: Action,
    },
    /// Law: an earlier chunk's gradients are reduced while a later chunk of the stage, which may
    /// share a parameter with it, still adds to its own.
    #[error("stage {stage}: {action} comes before {needs}, which may add to the same parameter")]
    Shared {
        /// Pipeline rank.
        stage: usize,
        /// The reduction.
        action: Action,
        /// What must be done first.
        needs: Action,
    },
    /// Law: the messages that one stage sends another are not those which that one takes.
    #[error(
        "{direction} number {place} from stage {from} to {to}: sent is (microbatch, boundary) \
         {sent:?}, taken is {taken:?}"
    )]
    Unmatched {
        /// Sending pipeline rank.
        from: usize,
        /// Receiving pipeline rank.
        to: usize,
        /// Which way.
        direction: Direction,
        /// Place in the order of these messages.
        place: usize,
        /// Microbatch sent, and the place along the model that it comes to (forward) or from
        /// (backward); none where the sender has no more.
        sent: Option<(usize, usize)>,
        /// The same of what is taken, none where the receiver takes no more.
        taken: Option<(usize, usize)>,
    },
    /// Law: no stage can go on.
    #[error("deadlock: stage {stage} cannot get past {action}")]
    Deadlock {
        /// The first pipeline rank that is stuck.
        stage: usize,
        /// Where it is stuck.
        action: Action,
    },
    /// Performance: an action needs a buffer that nothing before it has brought.
    #[error("{action} needs {what} that is not there")]
    Missing {
        /// The action.
        action: Action,
        /// What it needs.
        what: &'static str,
    },
    /// Performance: a buffer came that nobody took.
    #[error("{what} of microbatch {mb}, chunk {chunk}, was left over")]
    Left {
        /// What it is.
        what: &'static str,
        /// Microbatch.
        mb: usize,
        /// Virtual stage.
        chunk: usize,
    },
}
