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
//! # Kinds
//!
//! With `p` stages, `m` microbatches and `v` chunks a stage; `F`, `B`, `W` are the times of forward
//! and of backward's two halves in one chunk, messages are free. *Held* is the high-water mark of
//! saved activations on stage `s`, in microbatches of one chunk, from a forward to the last of its
//! weight gradients; *idle* is what the makespan exceeds a stage's work by, so that the bubble is
//! idle / makespan. Both are tested against the actions for every small pipeline.
//!
//! | kind | held | idle |
//! |------|------|------|
//! | gpipe | `m` | `(p - 1)(F + B + W)` |
//! | 1f1b | `min(m, p - s)` | `(p - 1)(F + B + W)` |
//! | interleaved | `min(m v, (v - 1) p + 2 (p - 1 - s) + 1)` | `(p - 1)(F + B + W)` |
//! | zb-h1 | `min(m, p)` | `(p - 1)(F + B) - (min(m, p) - 1) min(F, B, W)` |
//! | dualpipe-v | `2 p + 1` | `(p - 1) max(F, F + B - W)` where `B <= F <= B + W` |
//!
//! In the first three, where backward is one pass over `S` segments, the gradient leaves before
//! the last segment's weights: `W` counts there as `W (S - 1) / S` ([`timeline`]); interleaved
//! holds to that as long as the early gradients do not overtake the forwards they alternate with
//! (`W = 0`, or about equal times). zb-h1's idle time for `m >= p` is `(p - 1)(F + B - W)` in the
//! paper, which assumes `W <= F` and `W <= B`. For dualpipe-v DeepSeek gives
//! `(p - 1)(F&B + B + W - 3 W)` with `F&B` a forward and a backward that overlap and end together
//! (their `B` is `B + W` here); here a stage does one thing at a time and hands over as soon as it
//! has it. It needs `m >= 2 p` (or no microbatch at all) and two stages; interleaved needs `m` to
//! be a multiple of `p`.
//!
//! Sources: Huang et al. 2019, "GPipe" (arXiv:1811.06965); Narayanan et al. 2021,
//! "Memory-Efficient Pipeline-Parallel DNN Training" (arXiv:2006.09503), whose PipeDream-Flush is
//! what is called 1F1B here; Narayanan et al. 2021, Megatron-LM (arXiv:2104.04473), for the
//! warm-up of `p - s - 1` forwards and for interleaving; Qi et al. 2023, "Zero Bubble Pipeline
//! Parallelism" (arXiv:2401.10241), for the two halves of backward and ZB-H1; DeepSeek-AI,
//! DualPipe, and its cut to a V by Sea AI Lab ("DualPipe could be better without the Dual").

use alloc::vec::Vec;
use core::fmt;

pub mod error;
pub mod grid;
pub mod laws;
mod order;
pub mod route;
pub mod schedule;
pub mod stage;
pub mod timeline;

pub use error::Error;
pub use route::Route;
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
    /// 1F1B over several chunks a stage, for a bubble as many times smaller (Narayanan et al.
    /// 2021, Megatron-LM).
    Interleaved,
    /// 1F1B whose weight gradients wait, within the memory of the first stage (Qi et al. 2023).
    ZbH1,
    /// Two chunks a stage, there and back, with weight gradients that wait at the ends
    /// (DeepSeek-AI's DualPipe, cut to a V by Sea AI Lab).
    DualPipeV,
}

impl ScheduleKind {
    /// Every kind.
    pub const ALL: [ScheduleKind; 5] = [
        ScheduleKind::GPipe,
        ScheduleKind::OneFOneB,
        ScheduleKind::Interleaved,
        ScheduleKind::ZbH1,
        ScheduleKind::DualPipeV,
    ];

    /// The name the command line uses.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            ScheduleKind::GPipe => "gpipe",
            ScheduleKind::OneFOneB => "1f1b",
            ScheduleKind::Interleaved => "interleaved",
            ScheduleKind::ZbH1 => "zb-h1",
            ScheduleKind::DualPipeV => "dualpipe-v",
        }
    }

    /// Chunks (virtual stages) that each pipeline rank holds; none where that is free, from 2 on.
    #[must_use]
    pub const fn chunks(self) -> Option<usize> {
        match self {
            ScheduleKind::GPipe | ScheduleKind::OneFOneB | ScheduleKind::ZbH1 => Some(1),
            ScheduleKind::DualPipeV => Some(2),
            ScheduleKind::Interleaved => None,
        }
    }

    /// Where the chunks lie.
    #[must_use]
    pub const fn route(self, stages: usize, chunks: usize) -> Route {
        match self {
            ScheduleKind::DualPipeV => Route::v(stages),
            _ => Route::looped(stages, chunks),
        }
    }

    /// Pipeline ranks that it needs.
    #[must_use]
    pub const fn least_stages(self) -> usize {
        match self {
            ScheduleKind::DualPipeV => 2,
            _ => 1,
        }
    }

    /// Whether some weight gradients are taken later than their inputs' gradients.
    #[must_use]
    pub const fn splits_backward(self) -> bool {
        matches!(self, ScheduleKind::ZbH1 | ScheduleKind::DualPipeV)
    }

    /// The numbers of microbatches that can be run, nearest to `wanted`: that one alone where it
    /// can, else those below and above.
    ///
    /// ```
    /// use quintet_parallel_layers::pipeline::ScheduleKind;
    /// assert_eq!(ScheduleKind::Interleaved.nearest_microbatches(4, 10), [8, 12]);
    /// assert_eq!(ScheduleKind::DualPipeV.nearest_microbatches(4, 10), [10]);
    /// ```
    #[must_use]
    pub fn nearest_microbatches(self, stages: usize, wanted: usize) -> Vec<usize> {
        match self {
            ScheduleKind::Interleaved if !wanted.is_multiple_of(stages.max(1)) => {
                let below = wanted / stages * stages;
                let both = [below, below.saturating_add(stages)];
                both.into_iter().filter(|&m| m > 0).collect()
            }
            ScheduleKind::DualPipeV if wanted > 0 && wanted < stages.saturating_mul(2) => {
                alloc::vec![stages.saturating_mul(2)]
            }
            _ => alloc::vec![wanted],
        }
    }
}

impl fmt::Display for ScheduleKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
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
    pub(crate) chunk: usize,
    pub(crate) peer: usize,
}

impl Action {
    /// The message end this action is, if it is one.
    pub(crate) fn message(&self) -> Option<Message> {
        let (direction, sends, mb, chunk, peer) = match *self {
            Action::SendForward { mb, chunk, to } => (Direction::Forward, true, mb, chunk, to),
            Action::RecvForward { mb, chunk, from } => (Direction::Forward, false, mb, chunk, from),
            Action::SendBackward { mb, chunk, to } => (Direction::Backward, true, mb, chunk, to),
            Action::RecvBackward { mb, chunk, from } => {
                (Direction::Backward, false, mb, chunk, from)
            }
            _ => return None,
        };
        Some(Message {
            direction,
            sends,
            mb,
            chunk,
            peer,
        })
    }
}

/// Short: `F3`, `B3.0` and `W3.0` (microbatch, segment), `F3 <- 1`, `B3 -> 0`, `gather`,
/// `release`, `reduce 0`; a chunk that is not 0 is named: `F3/1 <- 1`, `B3.0/1`, `gather/1`.
impl fmt::Display for Action {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Action::Gather { chunk } => write!(f, "gather{}", Of(chunk)),
            Action::Release { chunk } => write!(f, "release{}", Of(chunk)),
            Action::RecvForward { mb, chunk, from } => write!(f, "F{mb}{} <- {from}", Of(chunk)),
            Action::Forward { mb, chunk } => write!(f, "F{mb}{}", Of(chunk)),
            Action::SendForward { mb, chunk, to } => write!(f, "F{mb}{} -> {to}", Of(chunk)),
            Action::RecvBackward { mb, chunk, from } => write!(f, "B{mb}{} <- {from}", Of(chunk)),
            Action::BackwardInput { mb, chunk, segment } => {
                write!(f, "B{mb}.{segment}{}", Of(chunk))
            }
            Action::BackwardWeight { mb, chunk, segment } => {
                write!(f, "W{mb}.{segment}{}", Of(chunk))
            }
            Action::SendBackward { mb, chunk, to } => write!(f, "B{mb}{} -> {to}", Of(chunk)),
            Action::ReduceGrads { chunk, bucket } => write!(f, "reduce {bucket}{}", Of(chunk)),
        }
    }
}

/// A chunk where there are several.
struct Of(usize);

impl fmt::Display for Of {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            0 => Ok(()),
            chunk => write!(f, "/{chunk}"),
        }
    }
}
