//! Pipeline schedules as data, and the stage that performs them.
//!
//! A [`Schedule`] is worked out before anything runs: for each stage a list of [`Action`]s. It is
//! judged by [`laws`], timed by [`simulate`], drawn as text, and performed by [`Stage`], which
//! asks a [`Work`] for everything that is not a message between stages.
//!
//! One forward, one backward, over 4 stages and 6 microbatches (`F` one slot, `B` one slot):
//!
//! ```text
//! stage 0 | F0 F1 F2 F3 .  .  .  B0 F4 B1 F5 B2 .  B3 .  B4 .  B5
//! stage 1 | .  F0 F1 F2 .  .  B0 F3 B1 F4 B2 F5 B3 .  B4 .  B5
//! stage 2 | .  .  F0 F1 .  B0 F2 B1 F3 B2 F4 B3 F5 B4 .  B5
//! stage 3 | .  .  .  F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5
//! ```
//!
//! Stage `s` of `p` holds the activations of at most `p - s` microbatches; the stages idle for
//! `(p - 1) / (m + p - 1)` of the time, as in GPipe, which holds all `m`.
//!
//! ```
//! use quintet_parallel_layers::pipeline::{Schedule, ScheduleKind, laws};
//! let schedule = Schedule::new(ScheduleKind::OneFOneB, 2, 3, &[1, 1])?;
//! laws::check(&schedule)?;
//! assert_eq!(laws::held(&schedule.actions(0)), 2);
//! let grid = schedule.to_string();
//! assert!(grid.starts_with("stage 0 | F0 F1 .  B0 F2 B1 .  B2"));
//! # Ok::<(), quintet_parallel_layers::pipeline::Error>(())
//! ```
//!
//! Sources: Huang et al. 2019, "GPipe" (arXiv:1811.06965); Narayanan et al. 2021,
//! "Memory-Efficient Pipeline-Parallel DNN Training" (arXiv:2006.09503), whose PipeDream-Flush is
//! what is called 1F1B here; Narayanan et al. 2021, Megatron-LM (arXiv:2104.04473), for the
//! warm-up of `p - s - 1` forwards. That the gradient leaves before the weights' gradients are
//! taken is from Qi et al. 2023, "Zero Bubble Pipeline Parallelism" (arXiv:2401.10241).

use alloc::vec::Vec;
use core::fmt;

pub mod error;
pub mod grid;
pub mod laws;
pub mod schedule;
pub mod stage;
pub mod timeline;

pub use error::Error;
pub use schedule::{Reduction, Schedule};
pub use stage::{Moment, Stage, Work};
pub use timeline::{Durations, Span, StageTime, Timeline, simulate};

/// Which order of work a pipeline follows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum ScheduleKind {
    /// All forwards, then all backwards (Huang et al. 2019).
    GPipe,
    /// One forward, one backward after the warm-up (Narayanan et al. 2021, PipeDream-Flush).
    #[default]
    OneFOneB,
}

impl ScheduleKind {
    /// Every kind that is built.
    pub const ALL: [ScheduleKind; 2] = [ScheduleKind::GPipe, ScheduleKind::OneFOneB];

    /// The name the command line uses.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            ScheduleKind::GPipe => "gpipe",
            ScheduleKind::OneFOneB => "1f1b",
        }
    }

    /// Chunks (virtual stages) that each pipeline rank holds.
    #[must_use]
    pub const fn chunks(self) -> usize {
        match self {
            ScheduleKind::GPipe | ScheduleKind::OneFOneB => 1,
        }
    }
}

/// Which way a message goes: activations forward, their gradients backward.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Direction {
    /// Activations, towards the loss.
    Forward,
    /// Gradients, away from the loss.
    Backward,
}

impl fmt::Display for Direction {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Direction::Forward => "activation",
            Direction::Backward => "gradient",
        })
    }
}

/// One step of a stage's work. `mb` counts this pipeline's microbatches from 0; `chunk` is the
/// virtual stage on this rank (0 where there is one); a chunk's neighbour is the pipeline rank
/// that the message goes to or comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
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

/// One end of a message, as an action tells it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Message {
    pub(crate) direction: Direction,
    pub(crate) sends: bool,
    pub(crate) mb: usize,
    pub(crate) peer: usize,
}

impl Action {
    /// The message end this action is, if it is one.
    pub(crate) fn message(&self) -> Option<Message> {
        let (direction, sends, mb, peer) = match *self {
            Action::SendForward { mb, to, .. } => (Direction::Forward, true, mb, to),
            Action::RecvForward { mb, from, .. } => (Direction::Forward, false, mb, from),
            Action::SendBackward { mb, to, .. } => (Direction::Backward, true, mb, to),
            Action::RecvBackward { mb, from, .. } => (Direction::Backward, false, mb, from),
            _ => return None,
        };
        Some(Message {
            direction,
            sends,
            mb,
            peer,
        })
    }
}

/// Short: `F3`, `B3.0` and `W3.0` (microbatch, segment), `F3 <- 1`, `B3 -> 0`, `gather`,
/// `release`, `reduce 0`; the chunk follows as `/1` where it is not 0.
impl fmt::Display for Action {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let chunk = match *self {
            Action::Gather { chunk } => f.write_str("gather").map(|()| chunk),
            Action::Release { chunk } => f.write_str("release").map(|()| chunk),
            Action::RecvForward { mb, chunk, from } => write!(f, "F{mb} <- {from}").map(|()| chunk),
            Action::Forward { mb, chunk } => write!(f, "F{mb}").map(|()| chunk),
            Action::SendForward { mb, chunk, to } => write!(f, "F{mb} -> {to}").map(|()| chunk),
            Action::RecvBackward { mb, chunk, from } => {
                write!(f, "B{mb} <- {from}").map(|()| chunk)
            }
            Action::BackwardInput { mb, chunk, segment } => {
                write!(f, "B{mb}.{segment}").map(|()| chunk)
            }
            Action::BackwardWeight { mb, chunk, segment } => {
                write!(f, "W{mb}.{segment}").map(|()| chunk)
            }
            Action::SendBackward { mb, chunk, to } => write!(f, "B{mb} -> {to}").map(|()| chunk),
            Action::ReduceGrads { chunk, bucket } => write!(f, "reduce {bucket}").map(|()| chunk),
        }?;
        if chunk > 0 {
            write!(f, "/{chunk}")?;
        }
        Ok(())
    }
}
