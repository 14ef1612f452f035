//! Short calls: each rank copies its input into its slot before it publishes the call; once all have, each makes
//! its output from the slots.
//!
//! Nobody reaches into anybody's memory, so there is nothing to take back from a call that ends early. The least
//! inputs lie in the cache line that says how far their rank has got, and come with it.
#![allow(unsafe_code)]

use std::{boxed::Box, sync::Arc, vec::Vec};

use super::{
    End, arena,
    arena::SLOT,
    claim::RANKS,
    duty::{self, Duties, Duty},
    raw,
    shared::Shared,
    work::{Beyond, Hands, Memory},
};
use crate::{
    DType, Element, ReduceOp,
    plan::{FoldOrder, Operation, Plan},
};

/// A plan as the ranks of one group perform it in shared memory, at this rank.
#[derive(Debug)]
pub(crate) struct Outline {
    plan: Arc<Plan>,
    direct: bool,
    /// Bytes of the longest input, and what this rank does, where the call is short.
    brief: Option<(usize, Vec<Duty>)>,
}

/// A call under way in shared memory.
#[derive(Debug)]
pub(crate) enum Task {
    /// By slots.
    Brief(Brief),
    /// In the callers' memory, or by stages.
    Long(Box<Shared>),
}

/// A short call, whose input is in its slot.
#[derive(Debug)]
pub(crate) struct Brief {
    memory: Memory,
    sequence: u64,
}

impl Outline {
    pub(crate) fn new(plan: Arc<Plan>, dtype: DType, me: usize) -> Self {
        let n = plan.world();
        let pairs = match plan.shape().operation() {
            Operation::AllGather | Operation::AllToAll => n * n,
            _ => n,
        };
        let operation = plan.shape().operation();
        let has_form = !matches!(
            operation,
            Operation::AllToAllV | Operation::Send | Operation::Recv
        );
        let fits = n > 1 && n <= RANKS && pairs <= arena::DUTIES;
        let direct = has_form && fits && plan.fold_order() == FoldOrder::RankOrder;
        let longest = duty::longest_input(&plan) * dtype.bytes();
        let short = longest <= SLOT && (longest <= 512 || longest * n <= 8 * SLOT);
        let brief = Duties::of(&plan, dtype.bytes(), usize::MAX, usize::MAX)
            .filter(|_| direct && short)
            .map(|duties| {
                let mine = duties.mine(me).map(|index| duties.get(index));
                (longest, mine.collect())
            });
        Self {
            direct,
            brief,
            plan,
        }
    }

    /// Whether calls of this plan are performed in shared memory where there is some.
    pub(crate) fn direct(&self) -> bool {
        self.direct
    }

    pub(crate) fn plan(&self) -> &Arc<Plan> {
        &self.plan
    }
}

impl End {
    /// Prepares a call, which is then to be announced. `input` and `output` are those of the plan at
    /// my rank, and stay where they are until the result is dropped.
    pub(crate) fn prepare(
        &mut self,
        outline: &Outline,
        op: ReduceOp,
        mut memory: Memory,
        sequence: u64,
    ) -> Task {
        let (plan, me) = (&outline.plan, self.me);
        // A root's buffers are longer elsewhere than they need be.
        memory.input_bytes = plan.input_len(me) * memory.width();
        memory.output_bytes = plan.output_len(me) * memory.width();
        self.brief = outline.brief.is_some();
        let Some((longest, _)) = &outline.brief else {
            let shared = Shared::begin(self, (plan.clone(), op), memory, sequence);
            return Task::Long(Box::new(shared));
        };
        let slot = self.arena.slot(me, sequence, *longest);
        // SAFETY: my own input, and my own slot, which nobody reads before I publish and nobody
        // still reads from two calls ago: all have come to the call between.
        unsafe { raw::copy(memory.input, slot, memory.input_bytes) };
        Task::Brief(Brief { memory, sequence })
    }

    /// Goes on with a call that all ranks have made; true once done. The error is a rank whose memory is
    /// shorter than the call needs.
    pub(crate) fn perform<E: Element>(
        &mut self,
        outline: &Outline,
        op: ReduceOp,
        task: &mut Task,
    ) -> Result<bool, usize> {
        match (task, &outline.brief) {
            (Task::Brief(brief), Some((longest, duties))) => {
                let outcome = self.read_slots::<E>(&outline.plan, op, brief, (*longest, duties));
                // Only now: what wakes others costs a look at each, which my own result need not wait for.
                self.settle();
                outcome.map(|()| true).map_err(|Beyond(rank)| rank)
            }
            (Task::Brief(_), None) => Ok(true),
            (Task::Long(shared), _) => shared.poll::<E>(self),
        }
    }

    /// Makes my output from what lies in the slots.
    fn read_slots<E: Element>(
        &self,
        plan: &Plan,
        op: ReduceOp,
        brief: &Brief,
        (longest, duties): (usize, &[Duty]),
    ) -> Result<(), Beyond> {
        let n = plan.world();
        let mut hands = Hands::<E>::new(n);
        for rank in 0..n {
            let memory = &brief.memory;
            if rank == self.me {
                let input = (memory.input, memory.input_bytes);
                hands.add(input, (memory.output, memory.output_bytes));
            } else {
                let slot = self.arena.slot(rank, brief.sequence, longest);
                let bytes = plan.input_len(rank) * size_of::<E>();
                hands.add((slot, bytes), (core::ptr::null_mut(), 0));
            }
        }
        for &duty in duties {
            // SAFETY: my own memory, and slots that their owners leave alone until all have come to
            // the call after the next, and so are through with this one.
            unsafe { hands.perform(op, duty) }?;
        }
        Ok(())
    }
}
