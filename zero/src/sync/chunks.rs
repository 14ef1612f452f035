//! Gradients kept in chunks: stages 2 and 3.
//!
//! ```text
//! kept        my chunk of every part, until the step
//! filling     whole parts of the bucket that backward is in (tied parts: until the step ends)
//! moving      whole parts of at most IN_FLIGHT buckets
//! ```
//!
//! A part that this rank owns alone is added to where it is kept, and summed over other factors
//! when the step ends.

use alloc::collections::VecDeque;
use alloc::vec;
use alloc::vec::Vec;

use quintet_collectives::ReduceOp;
use quintet_kernels::{Backend, Collectives, Pending, Pointwise, Queue, Scalar, Tag};

use super::{With, unreduced};
use crate::{Error, Groups, WholeGrads, groups};

pub(super) struct Chunks<B: Backend, C: Collectives<B>, E: Scalar> {
    book: WholeGrads,
    /// None while it is on its way over the replicas across, or lost with that.
    kept: Vec<Option<B::Buf<E::Acc>>>,
    filling: Vec<Option<B::Buf<E::Acc>>>,
    moving: VecDeque<Moving<B, C, E>>,
    /// Parts of which a sum has been started in this step.
    begun: Vec<bool>,
    done: bool,
}

/// A bucket on the wire: its parts that are not empty.
struct Moving<B: Backend, C: Collectives<B>, E: Scalar> {
    bucket: usize,
    parts: Vec<(usize, C::Pending<E::Acc>)>,
}

impl<B: Backend, C: Collectives<B>, E: Scalar> Chunks<B, C, E> {
    pub(super) fn reduced(&self, part: usize) -> Option<B::Ref<'_, E::Acc>> {
        let kept = self.kept.get(part).and_then(Option::as_ref);
        kept.filter(|_| self.done).map(B::whole)
    }
}

impl<B: Pointwise, C: Collectives<B>, E: Scalar> Chunks<B, C, E> {
    pub(super) fn new(with: &With<B, E>) -> Result<Self, Error> {
        let count = with.parts().len();
        let zeros = |part| {
            let len = with.partition.grad(part).len();
            Ok(Some(with.device.zeros(Tag::Grad, len)?))
        };
        Ok(Self {
            book: WholeGrads::new(&with.partition),
            kept: (0..count).map(zeros).collect::<Result<_, Error>>()?,
            filling: (0..count).map(|_| None).collect(),
            moving: VecDeque::new(),
            begun: vec![false; count],
            done: false,
        })
    }

    pub(super) fn zero(&mut self, with: &With<B, E>) -> Result<(), Error> {
        self.book = WholeGrads::new(&with.partition);
        self.filling.fill_with(|| None);
        for moving in self.moving.drain(..) {
            for (_, pending) in moving.parts {
                pending.wait_on(&with.device, Queue::Compute)?;
            }
        }
        for (part, kept) in self.kept.iter_mut().enumerate() {
            let len = with.partition.grad(part).len();
            match kept {
                Some(buffer) => with.clear(buffer, len)?,
                None => *kept = Some(with.device.zeros(Tag::Grad, len)?),
            }
        }
        self.begun.fill(false);
        self.done = false;
        Ok(())
    }

    /// Makes what a layer is about to add to.
    pub(super) fn fill(&mut self, with: &With<B, E>, layer: usize) -> Result<(), Error> {
        for part in self.book.fill(layer)? {
            self.make(with, part)?;
        }
        Ok(())
    }

    fn make(&mut self, with: &With<B, E>, part: usize) -> Result<(), Error> {
        let len = with.parts()[part].len;
        let mut buffer = with.device.alloc(Tag::Grad, len)?;
        with.clear(&mut buffer, len)?;
        self.filling[part] = Some(buffer);
        Ok(())
    }

    /// The buffers that may be added to.
    pub(super) fn filling(&mut self) -> impl Iterator<Item = (usize, Option<&mut B::Buf<E::Acc>>)> {
        let (book, done) = (&self.book, self.done);
        let both = self.filling.iter_mut().zip(&mut self.kept).enumerate();
        both.map(move |(part, (filling, kept))| {
            let buffer = if book.in_place(part) { kept } else { filling };
            (part, buffer.as_mut().filter(|_| !done))
        })
    }

    pub(super) fn reduce(
        &mut self,
        with: &With<B, E>,
        groups: &impl Groups<C>,
        bucket: usize,
    ) -> Result<(), Error> {
        let parts = with.bucket(bucket)?;
        if self.done {
            return Err(Error::Order {
                what: "bucket",
                index: bucket,
                why: "its reduction is begun after the step has ended",
            });
        }
        for part in parts.clone() {
            if self.book.make(part) {
                self.make(with, part)?;
            }
        }
        for over in self.book.reduce(bucket)? {
            self.wait(with, over)?;
        }
        let mut started = Vec::new();
        for part in parts {
            self.begun[part] = true;
            if !self.book.in_place(part) {
                started.extend(self.start(with, groups, part)?.map(|p| (part, p)));
            }
        }
        self.moving.push_back(Moving {
            bucket,
            parts: started,
        });
        Ok(())
    }

    /// Starts the sum of a part; none where it has no element.
    fn start(
        &mut self,
        with: &With<B, E>,
        groups: &impl Groups<C>,
        index: usize,
    ) -> Result<Option<C::Pending<E::Acc>>, Error> {
        let layout = with.partition.layout();
        let part = &layout.parts()[index];
        let mut buffer = self.filling[index].take().ok_or(unreduced(index))?;
        if part.len == 0 {
            return Ok(None);
        }
        with.sum_before(groups, part, &mut buffer)?;
        let group = groups::over(groups, layout, &part.shard)?;
        let after = with.device.record(Queue::Compute);
        let pending = group.start_reduce_scatter(buffer, &part.counts(), ReduceOp::Sum, after)?;
        Ok(Some(pending))
    }

    /// Waits until nothing of a bucket is on the wire.
    pub(super) fn wait(&mut self, with: &With<B, E>, bucket: usize) -> Result<(), Error> {
        while self.moving.iter().any(|m| m.bucket == bucket) {
            let oldest = self.moving.pop_front();
            for (part, pending) in oldest.into_iter().flat_map(|m| m.parts) {
                self.add(with, part, pending)?;
            }
        }
        Ok(())
    }

    /// Adds my part of a sum into what is kept; the rest goes.
    fn add(
        &mut self,
        with: &With<B, E>,
        part: usize,
        pending: C::Pending<E::Acc>,
    ) -> Result<(), Error> {
        let sum = pending.wait_on(&with.device, Queue::Compute)?;
        let mine = B::slice(B::whole(&sum), with.partition.grad(part));
        let kept = self.kept[part].as_mut().ok_or(unreduced(part))?;
        Ok(with.device.add::<E::Acc>(B::whole_mut(kept), mine)?)
    }

    pub(super) fn finish(
        &mut self,
        with: &With<B, E>,
        groups: &impl Groups<C>,
    ) -> Result<(), Error> {
        let layout = with.partition.layout().clone();
        let tied = layout.tied();
        for bucket in self.book.finish() {
            self.wait(with, bucket)?;
        }
        let mut started = Vec::new();
        for (index, part) in layout.parts().iter().enumerate() {
            if !tied.contains(&index) && (!self.begun[index] || self.filling[index].is_some()) {
                return Err(unreduced(index));
            }
            if self.book.in_place(index) {
                let kept = self.kept[index].as_mut().ok_or(unreduced(index))?;
                with.sum_before(groups, part, kept)?;
            } else if tied.contains(&index) {
                if self.filling[index].is_none() {
                    self.make(with, index)?;
                }
                started.extend(self.start(with, groups, index)?.map(|p| (index, p)));
            }
        }
        for (part, pending) in started {
            self.add(with, part, pending)?;
        }
        self.sum_across(with, groups)?;
        self.done = true;
        Ok(())
    }

    /// Sums what is kept over the replicas that keep the same.
    fn sum_across(&mut self, with: &With<B, E>, groups: &impl Groups<C>) -> Result<(), Error> {
        let layout = with.partition.layout();
        let mut started = Vec::new();
        for (index, part) in layout.parts().iter().enumerate() {
            if part.across.is_empty() || with.partition.grad(index).is_empty() {
                continue;
            }
            let group = groups::over(groups, layout, &part.across)?;
            let kept = self.kept[index].take().ok_or(unreduced(index))?;
            let after = with.device.record(Queue::Compute);
            started.push((index, group.start_all_reduce(kept, ReduceOp::Sum, after)?));
        }
        for (index, pending) in started {
            self.kept[index] = Some(pending.wait_on(&with.device, Queue::Compute)?);
        }
        Ok(())
    }
}
