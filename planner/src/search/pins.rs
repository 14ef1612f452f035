//! What somebody has already decided.

use quintet_parallel_layers::Recompute;
use quintet_parallel_layers::pipeline::ScheduleKind;

use crate::CpComm;

/// Each that is there is held to; the rest is searched.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Pins {
    /// Tensor parallel ranks.
    pub tp: Option<usize>,
    /// Pipeline stages.
    pub pp: Option<usize>,
    /// Context parallel ranks.
    pub cp: Option<usize>,
    /// Data parallel ranks.
    pub dp: Option<usize>,
    /// Expert parallel ranks.
    pub ep: Option<usize>,
    /// Ranks that share an expert.
    pub etp: Option<usize>,
    /// Activations between blocks cut over tp.
    pub sequence_parallel: Option<bool>,
    /// ZeRO stage.
    pub zero_stage: Option<u8>,
    /// Order of work.
    pub schedule: Option<ScheduleKind>,
    /// Chunks a stage.
    pub virtual_stages: Option<usize>,
    /// How a cut sequence attends.
    pub cp_comm: Option<CpComm>,
    /// Sequences of a microbatch.
    pub micro_batch: Option<usize>,
    /// What backward computes again.
    pub recompute: Option<Recompute>,
}

impl Pins {
    /// Whether a value goes with what was decided.
    pub(super) fn free<T: PartialEq>(pin: Option<T>, value: T) -> bool {
        pin.is_none_or(|pinned| pinned == value)
    }
}
