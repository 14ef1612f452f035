//! Gradients: filled by layers, reduced bucket by bucket while backward goes on.
//!
//! ```text
//! zero()   views_mut(layer) ...  reduce(0)  ...  reduce(1)  ...      finish()
//!          backward 3, 2            |  backward 1, 0   |
//!                                   +== bucket 0 =======#            tied bucket, wait for all
//!                                                      +== bucket 1 ===#
//! ```
//!
//! Sums, never averages: losses are divided by the global Count before backward begins. For each
//! part: copies on other stages first, then factors beyond dp and cp, both blocking and both small
//! (tied embeddings; norms under sequence parallelism; replicated KV heads); then the replicas,
//! started.

use alloc::sync::Arc;
use alloc::vec::Vec;
use core::mem;
use core::ops::Range;

use quintet_collectives::ReduceOp;
use quintet_kernels::{Backend, Collectives, Pending, Queue, Scalar, Tag};

use crate::{Error, FlatLayout, Groups, Partition, groups, views};

/// Gradients of one chunk on one rank, in the accumulation type.
pub struct GradSync<B: Backend, C: Collectives<B>, E: Scalar> {
    device: B,
    partition: Partition,
    slots: Vec<Slot<B, C, E>>,
    zeros: B::Buf<E::Acc>,
}

enum Slot<B: Backend, C: Collectives<B>, E: Scalar> {
    Filling(B::Buf<E::Acc>),
    Moving(C::Pending<E::Acc>),
    Reduced(B::Buf<E::Acc>),
    Lost,
}

/// Elements zeroed by one copy.
const BLOCK: usize = 1 << 18;

impl<B: Backend, C: Collectives<B>, E: Scalar> GradSync<B, C, E> {
    /// All zeros, ready to be filled.
    ///
    /// # Errors
    /// Where the device has not that much memory, and [`Error::Group`] where a group is missing or
    /// spans other ranks.
    pub fn new(device: &B, partition: &Partition, groups: &impl Groups<C>) -> Result<Self, Error> {
        let layout = partition.layout();
        let mut slots = Vec::new();
        for part in layout.parts() {
            for factors in [&part.shard, &part.extra] {
                if !factors.is_empty() {
                    groups::over(groups, layout, factors)?;
                }
            }
            if !part.stages.is_empty() {
                groups::tie(groups, layout, part)?;
            }
            slots.push(Slot::Filling(device.zeros(Tag::Grad, part.len)?));
        }
        groups::world(groups, layout)?;
        let longest = layout.parts().iter().map(|p| p.len).max().unwrap_or(0);
        let zeros = device.zeros(Tag::Scratch, longest.min(BLOCK))?;
        Ok(Self {
            device: device.clone(),
            partition: partition.clone(),
            slots,
            zeros,
        })
    }

    /// The layout.
    #[must_use]
    pub fn layout(&self) -> &Arc<FlatLayout> {
        self.partition.layout()
    }

    /// The partition.
    #[must_use]
    pub fn partition(&self) -> &Partition {
        &self.partition
    }

    /// Begins a step: all gradients become zero.
    ///
    /// # Errors
    /// What a reduction of the last step that was never waited for failed with.
    pub fn zero(&mut self) -> Result<(), Error> {
        for part in 0..self.slots.len() {
            let len = self.layout().parts()[part].len;
            let mut buffer = match mem::replace(&mut self.slots[part], Slot::Lost) {
                Slot::Filling(buffer) | Slot::Reduced(buffer) => buffer,
                Slot::Moving(pending) => pending.wait_on(&self.device, Queue::Compute)?,
                Slot::Lost => self.device.zeros(Tag::Grad, len)?,
            };
            self.clear(B::whole_mut(&mut buffer), len)?;
            self.slots[part] = Slot::Filling(buffer);
        }
        Ok(())
    }

    /// The gradients of a layer, in the order of its specs, to be added to.
    ///
    /// # Errors
    /// [`Error::Index`] where there is no such layer, [`Error::Order`] where its reduction has
    /// begun.
    pub fn views_mut(&mut self, layer: usize) -> Result<Vec<B::Mut<'_, E::Acc>>, Error> {
        let layout = self.partition.layout();
        let entries = layout.layer(layer)?.iter().map(|&e| &layout.entries()[e]);
        let ranges: Vec<(usize, Range<usize>)> = entries.map(|e| (e.part, e.range())).collect();
        let filling = self.slots.iter_mut().map(|slot| match slot {
            Slot::Filling(buffer) => Some(buffer),
            _ => None,
        });
        let views = views::views_mut::<B, E::Acc>(filling.enumerate(), &ranges).into_iter();
        let why = "its gradients are asked for after their reduction has begun";
        let late = Error::Order {
            what: "layer",
            index: layer,
            why,
        };
        views.map(|view| view.ok_or(late.clone())).collect()
    }

    /// Starts the reduction of a bucket whose last microbatch is through.
    ///
    /// # Errors
    /// [`Error::Order`] where it is called twice in a step, [`Error::Index`], and what a
    /// collective fails with.
    pub fn reduce(&mut self, groups: &impl Groups<C>, bucket: usize) -> Result<(), Error> {
        for part in self.bucket(bucket)? {
            self.start(groups, part, "bucket", bucket)?;
        }
        Ok(())
    }

    /// Waits for one bucket; [`GradSync::finish`] does so for all.
    ///
    /// # Errors
    /// [`Error::Order`] where its reduction has not begun, and what a collective fails with.
    pub fn wait(&mut self, bucket: usize) -> Result<(), Error> {
        for part in self.bucket(bucket)? {
            self.wait_part(part)?;
        }
        Ok(())
    }

    /// Reduces the tied bucket and waits for all: every gradient is now summed, under stage 0 on
    /// every rank, under stage 1 in the rank's own chunk of each part (the rest is undefined).
    ///
    /// # Errors
    /// [`Error::Order`] where a bucket has not been reduced, and what a collective fails with.
    pub fn finish(&mut self, groups: &impl Groups<C>) -> Result<(), Error> {
        for part in self.layout().tied() {
            self.start(groups, part, "part", part)?;
        }
        (0..self.slots.len()).try_for_each(|part| self.wait_part(part))
    }

    /// The reduced gradient of a part.
    ///
    /// # Errors
    /// [`Error::Order`] before [`GradSync::finish`].
    pub fn part(&self, part: usize) -> Result<B::Ref<'_, E::Acc>, Error> {
        match self.slots.get(part) {
            Some(Slot::Reduced(buffer)) => Ok(B::whole(buffer)),
            _ => Err(unreduced(part)),
        }
    }

    fn clear(&self, mut view: B::Mut<'_, E::Acc>, mut len: usize) -> Result<(), Error> {
        while len > 0 {
            let block = len.min(BLOCK);
            let (head, tail) = B::split_mut(view, block);
            self.device
                .copy(B::slice(B::whole(&self.zeros), 0..block), head)?;
            (view, len) = (tail, len - block);
        }
        Ok(())
    }

    fn bucket(&self, bucket: usize) -> Result<Range<usize>, Error> {
        let buckets = self.layout().buckets();
        let found = buckets.get(bucket).map(|b| b.parts.clone());
        found.ok_or(Error::Index {
            what: "bucket",
            index: bucket,
            count: buckets.len(),
        })
    }

    fn start(
        &mut self,
        groups: &impl Groups<C>,
        index: usize,
        what: &'static str,
        asked: usize,
    ) -> Result<(), Error> {
        let layout = self.partition.layout();
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
        if part.len > 0 && !part.stages.is_empty() {
            let group = groups::tie(groups, layout, part)?;
            group.all_reduce(B::whole_mut(&mut buffer), ReduceOp::Sum)?;
        }
        if part.len > 0 && !part.extra.is_empty() {
            let group = groups::over(groups, layout, &part.extra)?;
            group.all_reduce(B::whole_mut(&mut buffer), ReduceOp::Sum)?;
        }
        if part.len == 0 || part.places == 1 {
            *slot = Slot::Reduced(buffer);
            return Ok(());
        }
        let group = groups::over(groups, layout, &part.shard)?;
        let after = self.device.record(Queue::Compute);
        *slot = Slot::Moving(if self.partition.scatters() {
            group.start_reduce_scatter(buffer, &part.counts(), ReduceOp::Sum, after)?
        } else {
            group.start_all_reduce(buffer, ReduceOp::Sum, after)?
        });
        Ok(())
    }

    fn wait_part(&mut self, part: usize) -> Result<(), Error> {
        let slot = &mut self.slots[part];
        *slot = match mem::replace(slot, Slot::Lost) {
            Slot::Moving(pending) => Slot::Reduced(pending.wait_on(&self.device, Queue::Compute)?),
            Slot::Reduced(buffer) => Slot::Reduced(buffer),
            other => {
                *slot = other;
                return Err(unreduced(part));
            }
        };
        Ok(())
    }
}

fn unreduced(part: usize) -> Error {
    Error::Order {
        what: "part",
        index: part,
        why: "its gradients have not been reduced",
    }
}
