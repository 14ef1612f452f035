//! What is known of a call once its plan has been chosen, for the next of its kind.

use std::{
    sync::{Arc, OnceLock},
    vec::Vec,
};

use crate::{
    DType, Order, ReduceOp,
    plan::{CollectiveShape, Operation, Plan},
    transport::{Call, Site, direct::Outline},
};

/// A plan, the call it belongs to, and what it sends from this rank.
#[derive(Debug)]
pub(super) struct Known {
    /// The plan, as shared memory sees it.
    pub(super) outline: Outline,
    /// Without its number and place.
    call: Call,
    rank: usize,
    sent: OnceLock<(u64, Vec<Sent>)>,
}

/// What goes to one receiver.
#[derive(Debug, Clone, Copy)]
pub(super) struct Sent {
    pub(super) to: usize,
    pub(super) bytes: u64,
    pub(super) messages: u64,
}

impl Known {
    pub(super) fn new(
        plan: Plan,
        dtype: DType,
        (redop, order): (Option<ReduceOp>, Order),
        rank: usize,
    ) -> Self {
        Self {
            call: Call::new(0, plan.shape(), plan.world(), dtype, redop, order),
            outline: Outline::new(Arc::new(plan), dtype, rank),
            rank,
            sent: OnceLock::new(),
        }
    }

    /// Whether this is the call.
    pub(super) fn is(
        &self,
        shape: &CollectiveShape,
        dtype: DType,
        redop: Option<ReduceOp>,
    ) -> bool {
        self.call.dtype == dtype && self.call.redop == redop && self.plan().shape() == shape
    }

    /// The call as number `sequence`, made at `site`.
    pub(super) fn call(&self, sequence: u64, site: Site) -> Call {
        Call {
            sequence,
            site: Some(site),
            ..self.call
        }
    }

    pub(super) fn plan(&self) -> &Arc<Plan> {
        self.outline.plan()
    }

    pub(super) fn operation(&self) -> Operation {
        self.call.operation
    }

    pub(super) fn dtype(&self) -> DType {
        self.call.dtype
    }

    pub(super) fn redop(&self) -> ReduceOp {
        self.call.redop.unwrap_or(ReduceOp::Sum)
    }

    /// What the plan's messages from this rank come to, by receiver.
    pub(super) fn sent(&self) -> &[Sent] {
        &self.sums().1
    }

    /// The bytes of all of them.
    pub(super) fn bytes(&self) -> u64 {
        self.sums().0
    }

    fn sums(&self) -> &(u64, Vec<Sent>) {
        self.sent.get_or_init(|| {
            let mut all: Vec<Sent> = Vec::new();
            for send in self.plan().iter(self.rank).flat_map(|round| round.sends) {
                let width = if send.what.wide() {
                    self.dtype().accumulator()
                } else {
                    self.dtype()
                };
                let bytes = (send.what.len() * width.bytes()) as u64;
                match all.iter_mut().find(|sent| sent.to == send.to) {
                    Some(sent) => {
                        sent.bytes += bytes;
                        sent.messages += 1;
                    }
                    None => all.push(Sent {
                        to: send.to,
                        bytes,
                        messages: 1,
                    }),
                }
            }
            (all.iter().map(|sent| sent.bytes).sum(), all)
        })
    }
}
