//! What the first rank of a stage sends, flow by flow.
//!
//! A flow is one collective of one group, as often as it happens: of a layer for each microbatch,
//! or of a step. Bytes are those of the plans that move least: of `S` bytes over `n` ranks a
//! reduce-scatter or an all-gather sends `S (n - 1) / n`, an all-reduce both, an all-to-all all but
//! what stays, a ring of keys and values its hops. How many rows experts are sent is for the router
//! to decide; here are those of an even routing.

use alloc::vec::Vec;

use quintet_collectives::chunk::chunk_len;
use quintet_collectives::plan::{CollectiveShape, bytes_sent};
use quintet_collectives::{DType, Order};
use quintet_parallel_layers::Recompute;

use super::ByKind;
use super::parts::{self, Parts, Places};
use super::pipeline::Stage;
use crate::config::MoeConfig;
use crate::memory::message;
use crate::shape::Shape;
use crate::traffic::WireTypes;
use crate::{Batch, CpComm, Layout};

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

/// What a layer of each kind sends for one microbatch.
#[must_use]
pub fn by_kind(
    shape: &Shape,
    layout: &Layout,
    batch: &Batch,
    types: WireTypes,
    sums: Sums,
) -> ByKind<Vec<Flow>> {
    let layer = Layer {
        shape,
        layout,
        types,
        sums,
        tokens: (batch.micro_batch * batch.seq / layout.cp) as u64,
    };
    let (mut embed, mut dense, mut moe, mut head) = Default::default();
    layer.regions(0, 1, &mut embed);
    layer.regions(2, 2, &mut dense);
    layer.context(&mut dense);
    if let Some(config) = &shape.config.moe {
        let regions = if config.shared_ffn > 0 { 2 } else { 1 };
        layer.regions(regions, regions, &mut moe);
        layer.context(&mut moe);
        layer.experts(config, &mut moe);
    }
    layer.regions(1, 0, &mut head);
    layer.loss(&mut head);
    if layout.recompute == Recompute::Full {
        again(&mut dense);
        again(&mut moe);
    }
    ByKind {
        embed,
        dense,
        moe,
        head,
    }
}

/// What forward sends is sent again by the forward that backward runs.
fn again(flows: &mut Vec<Flow>) {
    let forward: Vec<Flow> = flows
        .iter()
        .filter(|f| f.when == When::Forward)
        .copied()
        .collect();
    flows.extend(forward.into_iter().map(|flow| Flow {
        when: When::Backward,
        ..flow
    }));
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

struct Layer<'a> {
    shape: &'a Shape,
    layout: &'a Layout,
    types: WireTypes,
    sums: Sums,
    /// Tokens of a microbatch that are here.
    tokens: u64,
}

impl Layer<'_> {
    fn push(
        &self,
        flows: &mut Vec<Flow>,
        (group, collective, when): (Group, Collective, When),
        bytes: u64,
        times: u64,
    ) {
        if bytes > 0 && times > 0 {
            flows.push(Flow {
                group,
                collective,
                when,
                bytes,
                times,
            });
        }
    }

    /// Entries and exits of tensor parallel regions.
    fn regions(&self, enters: u64, leaves: u64, flows: &mut Vec<Flow>) {
        use Collective::{AllGather, AllReduce, ReduceScatter};
        let (n, h) = (self.layout.tp as u64, self.shape.config.hidden as u64);
        let width = self.types.storage.bytes() as u64;
        if n == 1 {
            return;
        }
        if self.layout.sequence_parallel {
            let first = self.tokens.div_ceil(n) * h;
            let (gather, scatter) = ((n - 1) * first * width, (self.tokens * h - first) * width);
            for (when, gathers, scatters) in [
                (When::Forward, enters, leaves),
                (When::Backward, leaves, enters),
            ] {
                self.push(flows, (Group::Tp, AllGather, when), gather, gathers);
                self.push(flows, (Group::Tp, ReduceScatter, when), scatter, scatters);
            }
        } else {
            let storage = self.types.storage;
            let bytes = self.sums.moved(AllReduce, self.tokens * h, n, storage);
            self.push(flows, (Group::Tp, AllReduce, When::Forward), bytes, leaves);
            self.push(flows, (Group::Tp, AllReduce, When::Backward), bytes, enters);
        }
    }

    /// Maxima and sums of the vocabulary-parallel loss.
    fn loss(&self, flows: &mut Vec<Flow>) {
        let n = self.layout.tp as u64;
        if n == 1 {
            return;
        }
        let width = self.types.accumulation;
        for per_token in [1, 2] {
            let len = per_token * self.tokens;
            let bytes = self.sums.moved(Collective::AllReduce, len, n, width);
            let which = (Group::Tp, Collective::AllReduce, When::Forward);
            self.push(flows, which, bytes, 1);
        }
    }

    /// Keys, values and their gradients over cp, and tokens for heads.
    fn context(&self, flows: &mut Vec<Flow>) {
        use When::{Backward, Forward};
        let (l, c) = (self.layout, &self.shape.config);
        if l.cp == 1 {
            return;
        }
        let (storage, acc) = (self.types.storage.bytes(), self.types.accumulation.bytes());
        let u = l.ulysses();
        let q = c.heads / l.tp / u * c.head_dim;
        let kv = ((c.kv_heads / l.tp).max(1) / u).max(1) * c.head_dim;
        if u > 1 {
            let exchange =
                |width: usize, bytes: usize| self.tokens * (width * bytes * (u - 1)) as u64;
            let to_all = |when| (Group::Ulysses, Collective::AllToAll, when);
            self.push(flows, to_all(Forward), exchange(q, storage), 2);
            self.push(flows, to_all(Forward), exchange(kv, storage), 2);
            self.push(flows, to_all(Backward), exchange(q, storage), 2);
            self.push(flows, to_all(Backward), exchange(kv, acc), 2);
        }
        let outer = l.cp_outer() as u64;
        let n = self.tokens * (u * kv) as u64;
        if outer == 1 {
            return;
        }
        let (storage, acc) = (storage as u64, acc as u64);
        if l.cp_comm == CpComm::AllGather {
            let gather = (outer - 1) * n;
            let which = (Group::Cp, Collective::AllGather, Forward);
            self.push(flows, which, gather * storage, 2);
            let which = (Group::Cp, Collective::ReduceScatter, Backward);
            self.push(flows, which, gather * acc, 2);
        } else {
            let ring = |when| (Group::Cp, Collective::Ring, when);
            let there = 2 * n * (outer - 1) * storage;
            self.push(flows, ring(Forward), there, 1);
            self.push(flows, ring(Backward), there + 2 * n * outer * acc, 1);
        }
    }

    /// Rows to their experts and back, and what is said ahead of them.
    fn experts(&self, moe: &MoeConfig, flows: &mut Vec<Flow>) {
        use When::{Backward, Forward};
        let (l, h) = (self.layout, self.shape.config.hidden as u64);
        let width = self.types.storage.bytes() as u64;
        let (ep, etp) = (l.ep as u64, l.etp as u64);
        let mine = chunk_len(self.tokens as usize, l.tp, 0) as u64;
        if !l.sequence_parallel && l.tp > 1 {
            let bytes = (l.tp as u64 - 1) * mine * h * width;
            for when in [Forward, Backward] {
                self.push(flows, (Group::Tp, Collective::AllGather, when), bytes, 1);
            }
        }
        let rows = mine * moe.topk as u64 * h * width;
        if ep > 1 {
            let counts = (moe.experts / l.ep) as u64 * (ep - 1) * 4;
            let exchange = |when| (Group::Ep, Collective::AllToAll, when);
            self.push(flows, exchange(Forward), counts, 1);
            for when in [Forward, Backward] {
                self.push(flows, exchange(when), rows / ep * (ep - 1), 2);
            }
        }
        if etp > 1 {
            let counts = moe.experts as u64 * (etp - 1) * 4;
            let which = (Group::Etp, Collective::AllGather, Forward);
            self.push(flows, which, counts, 1);
            for when in [Forward, Backward] {
                let gather = (Group::Etp, Collective::AllGather, when);
                self.push(flows, gather, (etp - 1) * rows, 1);
                let scatter = (Group::Etp, Collective::ReduceScatter, when);
                self.push(flows, scatter, (etp - 1) * rows, 1);
            }
        }
    }
}

/// What gradients and parameters of a layer with these parts send in a step in which each replica
/// has `microbatches`.
#[must_use]
pub fn states(
    parts: &Parts,
    layout: &Layout,
    shape: &Shape,
    (types, sums): (WireTypes, Sums),
    microbatches: u64,
) -> Vec<Flow> {
    let moved = |what, len, n, dtype| sums.moved(what, len, n, dtype);
    use Collective::{AllGather, AllReduce, ReduceScatter};
    let (places, zero) = (Places::of(layout), layout.zero_stage);
    let (acc, storage) = (types.accumulation, types.storage);
    let mut flows = Vec::new();
    let mut push = |group, collective, when, bytes: u64, times: u64| {
        if bytes > 0 && times > 0 {
            flows.push(Flow {
                group,
                collective,
                when,
                bytes,
                times,
            });
        }
    };
    for (part, (len, n)) in parts.each(places).into_iter().enumerate() {
        let group = if part == 3 { Group::Edp } else { Group::Dp };
        // Under ZeRO-2 and 3 what others own is summed after each microbatch.
        let (when, times) = if zero >= 2 && n > 1 {
            (When::BackwardBeside, microbatches)
        } else {
            (When::After, 1)
        };
        let extra = match part {
            1 => Some((Group::Tp, layout.tp)),
            2 => Some((Group::Rep, Group::Rep.place(shape, layout).1)),
            _ => None,
        };
        if let Some((group, ranks)) = extra {
            let bytes = moved(AllReduce, len, ranks as u64, acc);
            push(group, AllReduce, when, bytes, times);
        }
        if zero == 0 {
            push(
                group,
                AllReduce,
                When::After,
                moved(AllReduce, len, n, acc),
                1,
            );
            continue;
        }
        push(
            group,
            ReduceScatter,
            when,
            moved(ReduceScatter, len, n, acc),
            times,
        );
        let gather = moved(AllGather, len, n, storage);
        if zero < 3 {
            push(group, AllGather, When::After, gather, 1);
        } else {
            push(group, AllGather, When::ForwardBeside, gather, microbatches);
            push(group, AllGather, When::BackwardBeside, gather, microbatches);
        }
    }
    flows
}
