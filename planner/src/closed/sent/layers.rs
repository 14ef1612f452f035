//! What layers send for a microbatch.

use alloc::vec::Vec;

use quintet_collectives::chunk::chunk_len;
use quintet_parallel_layers::Recompute;

use super::{Collective, Flow, Group, Sums, When};
use crate::closed::ByKind;
use crate::config::MoeConfig;
use crate::shape::Shape;
use crate::traffic::WireTypes;
use crate::{Batch, CpComm, Layout};

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
            // What entered is gathered again for the gradients of the weights.
            for (when, gathers, scatters) in [
                (When::Forward, enters, leaves),
                (When::Backward, leaves + enters, enters),
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
