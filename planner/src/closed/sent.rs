//! What the first rank of a stage sends, flow by flow.
//!
//! A flow is one collective of one group, as often as it happens: of a layer for each microbatch,
//! or of a step. Bytes are those of the plans that move least: of `S` bytes over `n` ranks a
//! reduce-scatter or an all-gather sends `S (n - 1) / n`, an all-reduce both, an all-to-all all but
//! what stays, a ring of keys and values its hops. How many rows experts are sent is for the router
//! to decide; here are those of an even routing.

use alloc::vec::Vec;

use quintet_collectives::plan::{CollectiveShape, bytes_sent};
use quintet_collectives::{DType, Order};

use super::parts;
use super::pipeline::Stage;
use crate::memory::message;
use crate::shape::Shape;
use crate::traffic::WireTypes;
use crate::{Batch, Layout};

mod layers;
mod states;

pub use layers::by_kind;
pub use states::states;

/// Who exchanges.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Group {
    /// Tensor parallel ranks.
    Tp,
    /// Those of them that share a KV head.
    Rep,
    /// Context parallel ranks that exchange heads: the inner factor.
    Ulysses,
    /// Context parallel ranks, the outer factor.
    Cp,
    /// Neighbouring stages.
    Pp,
    /// Replicas of dense parameters, dp x cp.
    Dp,
    /// Expert parallel ranks.
    Ep,
    /// Ranks that share an expert.
    Etp,
    /// Replicas of experts.
    Edp,
}

impl Group {
    /// The name under which bytes of the group are counted.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Tp | Self::Rep => "tp",
            Self::Ulysses | Self::Cp => "cp",
            Self::Pp => "pp",
            Self::Dp => "dp",
            Self::Ep => "ep",
            Self::Etp => "etp",
            Self::Edp => "edp",
        }
    }

    /// Ranks from one member to the next, and members, in the order of the mesh.
    #[must_use]
    pub fn place(self, shape: &Shape, layout: &Layout) -> (usize, usize) {
        let l = layout;
        let rep = l.tp / shape.config.kv_heads.min(l.tp).max(1);
        match self {
            Self::Tp => (1, l.tp),
            Self::Rep => (1, rep),
            Self::Ulysses => (l.tp, l.ulysses()),
            Self::Cp => (l.tp * l.ulysses(), l.cp_outer()),
            Self::Dp => (l.tp, l.dp * l.cp),
            Self::Pp => (l.tp * l.cp * l.dp, l.pp),
            Self::Ep => (l.etp, l.ep),
            Self::Etp => (1, l.etp),
            Self::Edp => (l.etp * l.ep, l.dp * l.cp * l.tp / (l.etp * l.ep).max(1)),
        }
    }
}

/// What they do together.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Collective {
    /// Sum, everywhere.
    AllReduce,
    /// Sum, to each its part.
    ReduceScatter,
    /// All parts, everywhere.
    AllGather,
    /// From each to each.
    AllToAll,
    /// To the next round a ring, so many times as there are others.
    Ring,
    /// To a neighbour.
    Send,
}

impl Collective {
    /// As it is usually called.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::AllReduce => "all-reduce",
            Self::ReduceScatter => "reduce-scatter",
            Self::AllGather => "all-gather",
            Self::AllToAll => "all-to-all",
            Self::Ring => "ring",
            Self::Send => "send",
        }
    }
}

/// When.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum When {
    /// In the forward pass of a microbatch.
    Forward,
    /// In its backward pass.
    Backward,
    /// In its backward pass, of parameters or gradients, beside what is computed.
    BackwardBeside,
    /// In its forward pass, of parameters, beside what is computed.
    ForwardBeside,
    /// Once, when the last microbatch is through.
    After,
}

/// One collective, `times` of it.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Flow {
    /// Who.
    pub group: Group,
    /// What.
    pub collective: Collective,
    /// When.
    pub when: When,
    /// Bytes that this rank sends, each time.
    pub bytes: u64,
    /// How often.
    pub times: u64,
}

/// How bytes of a sum of few elements are counted: it moves more than it must, to come round sooner.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Sums {
    /// As its plan says.
    Planned,
    /// The least that would do: for a search, which asks a million times.
    Least,
}

impl Sums {
    /// Bytes that the first of `n` ranks sends to gather, scatter or sum `len` elements.
    fn moved(self, collective: Collective, len: u64, n: u64, dtype: DType) -> u64 {
        if n < 2 || len == 0 {
            return 0;
        }
        let first = len.div_ceil(n);
        let elements = match collective {
            Collective::AllGather => (n - 1) * first,
            Collective::ReduceScatter => len - first,
            _ => (n - 1) * first + len - first,
        };
        let least = elements * dtype.bytes() as u64;
        if self == Self::Least || collective != Collective::AllReduce {
            return least;
        }
        let shape = CollectiveShape::AllReduce { len: len as usize };
        bytes_sent(&shape, 0, n as usize, dtype, Order::Rank).unwrap_or(least)
    }
}

/// Everything that the first rank of a stage sends in a step, but for the few numbers that all ranks
/// sum: the token count, the norm, the loss, and what experts say of their load.
#[must_use]
pub fn step(
    shape: &Shape,
    layout: &Layout,
    batch: &Batch,
    types: WireTypes,
    stage: &Stage,
) -> Vec<Flow> {
    let microbatches = (batch.microbatches() / layout.dp.max(1)) as u64;
    let (flows, parts) = (
        by_kind(shape, layout, batch, types, Sums::Planned),
        parts::by_kind(shape, layout),
    );
    let mut all = Vec::new();
    let counts = stage.layers.each().into_iter();
    for ((&count, flows), parts) in counts.zip(flows.each()).zip(parts.each()) {
        let layers = flows.iter().map(|flow| Flow {
            times: flow.times * count * microbatches,
            ..*flow
        });
        all.extend(layers.filter(|flow| flow.times > 0));
        let types = (types, Sums::Planned);
        let states = states(parts, layout, shape, types, microbatches);
        let states = states.into_iter().map(|flow| Flow {
            times: flow.times * count,
            ..flow
        });
        all.extend(states.filter(|flow| flow.times > 0));
    }
    let bytes = message(&shape.config, layout, batch, types);
    let half = stage.elsewhere * microbatches;
    if half > 0 && bytes > 0 {
        all.push(Flow {
            group: Group::Pp,
            collective: Collective::Send,
            when: When::Forward,
            bytes,
            times: half,
        });
    }
    all
}
