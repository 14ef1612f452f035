//! Gradients that stay whole until the step: stages 0 and 1.

use alloc::vec::Vec;
use core::mem;

use quintet_collectives::ReduceOp;
use quintet_kernels::backend::slice_mut;
use quintet_kernels::{Backend, Collectives, Pending, Pointwise, Queue, Scalar, Tag};

use super::{With, unreduced};
use crate::{Error, Groups, groups};

pub(super) struct Whole<B: Backend, C: Collectives<B>, E: Scalar> {
    slots: Vec<Slot<B, C, E>>,
}

enum Slot<B: Backend, C: Collectives<B>, E: Scalar> {
    Filling(B::Buf<E::Acc>),
    Moving(C::Pending<E::Acc>),
    Reduced(B::Buf<E::Acc>),
    Lost,
}

impl<B: Backend, C: Collectives<B>, E: Scalar> Whole<B, C, E> {
    pub(super) fn reduced(&self, part: usize) -> Option<B::Ref<'_, E::Acc>> {
        match self.slots.get(part) {
            Some(Slot::Reduced(buffer)) => Some(B::whole(buffer)),
            _ => None,
        }
    }
}

impl<B: Pointwise, C: Collectives<B>, E: Scalar> Whole<B, C, E> {
    pub(super) fn new(with: &With<B, E>) -> Result<Self, Error> {
        let parts = with.parts().iter();
        let slots = parts.map(|p| Ok(Slot::Filling(with.device.zeros(Tag::Grad, p.len)?)));
        let slots = slots.collect::<Result<_, Error>>()?;
        Ok(Self { slots })
    }

    pub(super) fn zero(&mut self, with: &With<B, E>) -> Result<(), Error> {
        for (slot, part) in self.slots.iter_mut().zip(with.parts()) {
            let mut buffer = match mem::replace(slot, Slot::Lost) {
                Slot::Filling(buffer) | Slot::Reduced(buffer) => buffer,
                Slot::Moving(pending) => pending.wait_on(&with.device, Queue::Compute)?,
                Slot::Lost => with.device.zeros(Tag::Grad, part.len)?,
            };
            with.clear(&mut buffer, part.len)?;
            *slot = Slot::Filling(buffer);
        }
        Ok(())
    }

    /// The buffers that may be added to.
    pub(super) fn filling(&mut self) -> impl Iterator<Item = (usize, Option<&mut B::Buf<E::Acc>>)> {
        let filling = self.slots.iter_mut().map(|slot| match slot {
            Slot::Filling(buffer) => Some(buffer),
            _ => None,
        });
        filling.enumerate()
    }

    pub(super) fn reduce(
        &mut self,
        with: &With<B, E>,
        groups: &impl Groups<C>,
        bucket: usize,
    ) -> Result<(), Error> {
        with.bucket(bucket)?
            .try_for_each(|part| self.start(with, groups, part, ("bucket", bucket)))
    }

    pub(super) fn wait(
        &mut self,
        with: &With<B, E>,
        groups: &impl Groups<C>,
        bucket: usize,
    ) -> Result<(), Error> {
        with.bucket(bucket)?
            .try_for_each(|part| self.wait_part(with, groups, part))
    }

    pub(super) fn finish(
        &mut self,
        with: &With<B, E>,
        groups: &impl Groups<C>,
    ) -> Result<(), Error> {
        for part in with.partition.layout().tied() {
            self.start(with, groups, part, ("part", part))?;
        }
        (0..self.slots.len()).try_for_each(|part| self.wait_part(with, groups, part))
    }

    fn start(
        &mut self,
        with: &With<B, E>,
        groups: &impl Groups<C>,
        index: usize,
        (what, asked): (&'static str, usize),
    ) -> Result<(), Error> {
        let layout = with.partition.layout();
        let part = &layout.parts()[index];
        let slot = &mut self.slots[index];
        let mut buffer = match mem::replace(slot, Slot::Lost) {
            Slot::Filling(buffer) => buffer,
            other => {
                *slot = other;
                let why = "its reduction is begun twice in one step";
                return Err(Error::Order {
                    what,
                    index: asked,
                    why,
                });
            }
        };
        with.sum_before(groups, part, &mut buffer)?;
        if part.len == 0 || part.places == 1 {
            *slot = Slot::Filling(buffer);
            return self.end(with, groups, index);
        }
        let group = groups::over(groups, layout, &part.shard)?;
        let after = with.device.record(Queue::Compute);
        *slot = Slot::Moving(if with.partition.scatters() {
            group.start_reduce_scatter(buffer, &part.counts(), ReduceOp::Sum, after)?
        } else {
            group.start_all_reduce(buffer, ReduceOp::Sum, after)?
        });
        Ok(())
    }

    fn wait_part(
        &mut self,
        with: &With<B, E>,
        groups: &impl Groups<C>,
        part: usize,
    ) -> Result<(), Error> {
        match &self.slots[part] {
            Slot::Moving(_) => self.end(with, groups, part),
            Slot::Reduced(_) => Ok(()),
            Slot::Filling(_) | Slot::Lost => Err(unreduced(part)),
        }
    }

    /// Waits for the sum over neighbours and adds the replicas across.
    fn end(
        &mut self,
        with: &With<B, E>,
        groups: &impl Groups<C>,
        index: usize,
    ) -> Result<(), Error> {
        let slot = &mut self.slots[index];
        let mut buffer = match mem::replace(slot, Slot::Lost) {
            Slot::Moving(pending) => pending.wait_on(&with.device, Queue::Compute)?,
            Slot::Filling(buffer) | Slot::Reduced(buffer) => buffer,
            Slot::Lost => return Err(unreduced(index)),
        };
        let layout = with.partition.layout();
        let part = &layout.parts()[index];
        let valid = with.partition.state(index);
        if !part.across.is_empty() && !valid.is_empty() {
            let group = groups::over(groups, layout, &part.across)?;
            let view = slice_mut::<B, _>(B::whole_mut(&mut buffer), valid);
            group.all_reduce(view, ReduceOp::Sum)?;
        }
        *slot = Slot::Reduced(buffer);
        Ok(())
    }
}
