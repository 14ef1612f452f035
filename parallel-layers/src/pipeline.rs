//! Pipeline schedules as data, and the stage that performs them.

use alloc::vec::Vec;

/// Which order of work a pipeline follows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum ScheduleKind {
    /// All forwards, then all backwards (Huang et al. 2019).
    GPipe,
    /// One forward, one backward after the warm-up (Narayanan et al. 2019, PipeDream-flush).
    #[default]
    OneFOneB,
}

/// One step of a stage's work. `mb` counts this pipeline's microbatches from 0; `chunk` is the
/// virtual stage on this rank (0 where there is one); a chunk's neighbour is the pipeline rank
/// that the message goes to or comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Action {
    /// Makes the chunk's parameters whole before their use.
    Gather {
        /// Virtual stage.
        chunk: usize,
    },
    /// Lets gathered parameters go.
    Release {
        /// Virtual stage.
        chunk: usize,
    },
    /// Takes the activation of a microbatch from pipeline rank `from`.
    RecvForward {
        /// Microbatch.
        mb: usize,
        /// Virtual stage.
        chunk: usize,
        /// Pipeline rank.
        from: usize,
    },
    /// Runs the chunk's layers.
    Forward {
        /// Microbatch.
        mb: usize,
        /// Virtual stage.
        chunk: usize,
    },
    /// Hands the activation to pipeline rank `to`.
    SendForward {
        /// Microbatch.
        mb: usize,
        /// Virtual stage.
        chunk: usize,
        /// Pipeline rank.
        to: usize,
    },
    /// Takes the gradient of my output from pipeline rank `from`.
    RecvBackward {
        /// Microbatch.
        mb: usize,
        /// Virtual stage.
        chunk: usize,
        /// Pipeline rank.
        from: usize,
    },
    /// Gradient of a segment's input. Segments are runs of a chunk's layers in the order backward
    /// reaches them: segment 0 holds the chunk's last layers. One segment is one gradient bucket.
    BackwardInput {
        /// Microbatch.
        mb: usize,
        /// Virtual stage.
        chunk: usize,
        /// Run of layers.
        segment: usize,
    },
    /// Gradients of a segment's parameters.
    BackwardWeight {
        /// Microbatch.
        mb: usize,
        /// Virtual stage.
        chunk: usize,
        /// Run of layers.
        segment: usize,
    },
    /// Hands the gradient of my input to pipeline rank `to`.
    SendBackward {
        /// Microbatch.
        mb: usize,
        /// Virtual stage.
        chunk: usize,
        /// Pipeline rank.
        to: usize,
    },
    /// The gradients of a bucket are complete: start their reduction.
    ReduceGrads {
        /// Virtual stage.
        chunk: usize,
        /// Bucket of the chunk: the segment whose parameters it holds.
        bucket: usize,
    },
}

/// The actions of one stage, in order.
pub type Actions = Vec<Action>;
