//! How a step is cut over ranks.

use alloc::vec::Vec;

use quintet_parallel_layers::Recompute;
use quintet_parallel_layers::pipeline::{Route, ScheduleKind};

/// How a rank comes to see keys and values of tokens that others hold.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum CpComm {
    /// They go round a ring, a place a step.
    #[default]
    Ring,
    /// They are gathered.
    AllGather,
    /// Tokens are exchanged for heads.
    Ulysses,
}

impl CpComm {
    /// Every way.
    pub const ALL: [Self; 3] = [Self::Ring, Self::AllGather, Self::Ulysses];

    /// As the command line spells it.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Ring => "ring",
            Self::AllGather => "all-gather",
            Self::Ulysses => "ulysses",
        }
    }
}

/// How a step is cut over ranks.
#[derive(Debug, Clone, PartialEq)]
pub struct Layout {
    /// Data parallel ranks.
    pub dp: usize,
    /// Tensor parallel ranks.
    pub tp: usize,
    /// Pipeline stages.
    pub pp: usize,
    /// Context parallel ranks.
    pub cp: usize,
    /// How a cut sequence attends.
    pub cp_comm: CpComm,
    /// The inner factor of cp, which exchanges tokens for heads; where absent, all of cp under
    /// [`CpComm::Ulysses`], else 1. The rest is a ring, or gathers.
    pub ulysses_degree: Option<usize>,
    /// Expert parallel ranks (folded into dp x cp x tp).
    pub ep: usize,
    /// Expert tensor parallel ranks.
    pub etp: usize,
    /// Keep activations between blocks as Shard(token) over tp.
    pub sequence_parallel: bool,
    /// 0 to 3.
    pub zero_stage: u8,
    /// Neighbouring replicas that shard among themselves, the others holding copies; all of them
    /// where absent.
    pub hybrid_shard_size: Option<usize>,
    /// Order of work of the pipeline.
    pub schedule: ScheduleKind,
    /// Chunks that a stage holds under the interleaved schedule; 1 under the others.
    pub virtual_stages: usize,
    /// Decoder blocks of each chunk in the order of the model ([`Layout::route`]), which with one
    /// chunk a stage is the order of the stages; even (earlier ones take the remainder) where
    /// absent.
    pub stage_layers: Option<Vec<usize>>,
    /// A gradient bucket is closed once it holds this many bytes.
    pub bucket_bytes: usize,
    /// Fold contributions in any order a plan finds fast, instead of rank order.
    pub any_order: bool,
    /// What backward computes again instead of keeping it.
    pub recompute: Recompute,
}

impl Layout {
    /// One rank.
    #[must_use]
    pub fn single() -> Self {
        Self {
            dp: 1,
            tp: 1,
            pp: 1,
            cp: 1,
            cp_comm: CpComm::Ring,
            ulysses_degree: None,
            ep: 1,
            etp: 1,
            sequence_parallel: false,
            zero_stage: 0,
            hybrid_shard_size: None,
            schedule: ScheduleKind::OneFOneB,
            virtual_stages: 1,
            stage_layers: None,
            bucket_bytes: 1 << 20,
            any_order: false,
            recompute: Recompute::None,
        }
    }

    /// Ranks in all.
    #[must_use]
    pub fn world(&self) -> usize {
        self.dp * self.tp * self.pp * self.cp
    }

    /// The inner factor of cp.
    #[must_use]
    pub fn ulysses(&self) -> usize {
        let all = if self.cp_comm == CpComm::Ulysses {
            self.cp
        } else {
            1
        };
        self.ulysses_degree.unwrap_or(all)
    }

    /// The outer factor of cp.
    #[must_use]
    pub fn cp_outer(&self) -> usize {
        self.cp / self.ulysses().max(1)
    }

    /// Chunks (virtual stages) that each pipeline rank holds.
    #[must_use]
    pub fn chunks(&self) -> usize {
        self.schedule.chunks().unwrap_or(self.virtual_stages)
    }

    /// Which chunk of the model lies on which stage.
    #[must_use]
    pub fn route(&self) -> Route {
        self.schedule.route(self.pp, self.chunks())
    }

    /// How often the forward of a block runs for a microbatch.
    #[must_use]
    pub fn forwards(&self) -> usize {
        1 + usize::from(self.recompute == Recompute::Full)
    }

    /// Chunks of all stages.
    #[must_use]
    pub fn places(&self) -> usize {
        self.pp.saturating_mul(self.chunks())
    }

    /// Decoder blocks `first..end` of the chunk that lies at `place` along the model.
    #[must_use]
    pub fn blocks(&self, layers: usize, place: usize) -> core::ops::Range<usize> {
        match &self.stage_layers {
            None => quintet_collectives::chunk::chunk(layers, self.places(), place),
            Some(counts) => {
                let first = counts.iter().take(place).sum();
                first..first + counts.get(place).copied().unwrap_or(0)
            }
        }
    }
}
