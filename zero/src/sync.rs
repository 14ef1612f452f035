//! Gradients: filled by layers, reduced bucket by bucket while backward goes on.
//!
//! ```text
//! stages 0, 1: once, after the last microbatch; gradients stay whole until the step
//! zero()   views_mut(layer) ...  reduce(0)  ...  reduce(1)  ...      finish()
//!          backward 3, 2            |  backward 1, 0   |
//!                                   +== bucket 0 =======#            tied bucket, wait for all
//!                                                      +== bucket 1 ===#
//!
//! stages 2, 3: after each microbatch; what is whole goes as soon as its sum is in the chunk
//! views_mut  make | whole | reduce == on the wire == # chunk += my part of the sum; let go
//! ```
//!
//! Sums, never averages: losses are divided by the global Count before backward begins. For each
//! part: copies on other stages first, then factors beyond dp and cp, both blocking and both small
//! (tied embeddings; norms under sequence parallelism; replicated KV heads); then the replicas,
//! started; under hybrid sharding the replicas across come last, once a step.
//!
//! Which collectives are issued, and in which order, depends on the calls alone: a rank that has
//! nothing to add calls the same and gives zeros.

mod chunks;
mod whole;

use alloc::sync::Arc;
use alloc::vec::Vec;
use core::ops::Range;

use quintet_collectives::ReduceOp;
use quintet_kernels::{Backend, Collectives, Pointwise, Scalar, Tag};

use crate::{Error, FlatLayout, Groups, Held, Part, Partition, groups, views};
use chunks::Chunks;
use whole::Whole;

/// Gradients of one chunk on one rank, in the accumulation type.
pub struct GradSync<B: Backend, C: Collectives<B>, E: Scalar> {
    with: With<B, E>,
    kept: Kept<B, C, E>,
}

enum Kept<B: Backend, C: Collectives<B>, E: Scalar> {
    Whole(Whole<B, C, E>),
    Chunks(Chunks<B, C, E>),
}

/// What both ways of keeping gradients work with.
struct With<B: Backend, E: Scalar> {
    device: B,
    partition: Partition,
    zeros: B::Buf<E::Acc>,
}

/// Elements zeroed by one copy.
const BLOCK: usize = 1 << 18;

impl<B: Backend, C: Collectives<B>, E: Scalar> GradSync<B, C, E> {
    /// The layout.
    #[must_use]
    pub fn layout(&self) -> &Arc<FlatLayout> {
        self.with.partition.layout()
    }

    /// The partition.
    #[must_use]
    pub fn partition(&self) -> &Partition {
        &self.with.partition
    }

    /// What is held here of the reduced gradient of a part.
    ///
    /// # Errors
    /// [`Error::Order`] before [`GradSync::finish`].
    pub fn part(&self, part: usize) -> Result<Held<'_, B, E::Acc>, Error> {
        let view = match &self.kept {
            Kept::Whole(kept) => kept.reduced(part),
            Kept::Chunks(kept) => kept.reduced(part),
        };
        let range = self.with.partition.grad(part);
        Ok(Held::new(part, range, view.ok_or(unreduced(part))?))
    }
}

impl<B: Pointwise, C: Collectives<B>, E: Scalar> GradSync<B, C, E> {
    /// All zeros, ready to be filled.
    ///
    /// # Errors
    /// Where the device has not that much memory, and [`Error::Group`] where a group is missing or
    /// spans other ranks.
    pub fn new(device: &B, partition: &Partition, groups: &impl Groups<C>) -> Result<Self, Error> {
        let layout = partition.layout();
        for part in layout.parts() {
            for factors in [&part.shard, &part.across, &part.extra] {
                if !factors.is_empty() {
                    groups::over(groups, layout, factors)?;
                }
            }
            if !part.stages.is_empty() {
                groups::tie(groups, layout, part)?;
            }
        }
        groups::world(groups, layout)?;
        let longest = layout.parts().iter().map(|p| p.len).max().unwrap_or(0);
        let with = With {
            device: device.clone(),
            partition: partition.clone(),
            zeros: device.zeros(Tag::Scratch, longest.min(BLOCK))?,
        };
        let kept = if partition.cuts_grads() {
            Kept::Chunks(Chunks::new(&with)?)
        } else {
            Kept::Whole(Whole::new(&with)?)
        };
        Ok(Self { with, kept })
    }

    /// Begins a step: all gradients become zero.
    ///
    /// # Errors
    /// What a reduction of the last step that was never waited for failed with.
    pub fn zero(&mut self) -> Result<(), Error> {
        match &mut self.kept {
            Kept::Whole(kept) => kept.zero(&self.with),
            Kept::Chunks(kept) => kept.zero(&self.with),
        }
    }

    /// The gradients of a layer, in the order of its specs, to be added to.
    ///
    /// # Errors
    /// [`Error::Index`] where there is no such layer, [`Error::Order`] where its reduction has
    /// begun, or a collective has failed with them.
    pub fn views_mut(&mut self, layer: usize) -> Result<Vec<B::Mut<'_, E::Acc>>, Error> {
        let layout = self.with.partition.layout();
        let entries = layout.layer(layer)?.iter().map(|&e| &layout.entries()[e]);
        let ranges: Vec<(usize, Range<usize>)> = entries.map(|e| (e.part, e.range())).collect();
        let views = match &mut self.kept {
            Kept::Whole(kept) => views::views_mut::<B, E::Acc>(kept.filling(), &ranges),
            Kept::Chunks(kept) => {
                kept.fill(&self.with, layer)?;
                views::views_mut::<B, E::Acc>(kept.filling(), &ranges)
            }
        };
        let why = "its gradients are asked for after their reduction has begun";
        let late = Error::Order {
            what: "layer",
            index: layer,
            why,
        };
        let views = views.into_iter();
        views.map(|view| view.ok_or(late.clone())).collect()
    }

    /// Starts the reduction of a bucket: below stage 2 when its last microbatch is through, else
    /// after each microbatch, on ranks without one as well.
    ///
    /// # Errors
    /// [`Error::Order`] where it is called twice in a step below stage 2, [`Error::Index`], and
    /// what a collective fails with.
    pub fn reduce(&mut self, groups: &impl Groups<C>, bucket: usize) -> Result<(), Error> {
        match &mut self.kept {
            Kept::Whole(kept) => kept.reduce(&self.with, groups, bucket),
            Kept::Chunks(kept) => kept.reduce(&self.with, groups, bucket),
        }
    }

    /// Waits for what has been started of one bucket; [`GradSync::finish`] does so for all.
    ///
    /// # Errors
    /// [`Error::Order`] where its reduction has not begun, and what a collective fails with.
    pub fn wait(&mut self, groups: &impl Groups<C>, bucket: usize) -> Result<(), Error> {
        match &mut self.kept {
            Kept::Whole(kept) => kept.wait(&self.with, groups, bucket),
            Kept::Chunks(kept) => kept.wait(&self.with, bucket),
        }
    }

    /// Reduces the tied bucket and waits for all: every gradient is now summed, under stage 0 on
    /// every rank, under the others in the rank's own chunk of each part (where a part is kept
    /// whole, the rest of it is undefined).
    ///
    /// # Errors
    /// [`Error::Order`] where a bucket has not been reduced, and what a collective fails with.
    pub fn finish(&mut self, groups: &impl Groups<C>) -> Result<(), Error> {
        match &mut self.kept {
            Kept::Whole(kept) => kept.finish(&self.with, groups),
            Kept::Chunks(kept) => kept.finish(&self.with, groups),
        }
    }
}

impl<B: Pointwise, E: Scalar> With<B, E> {
    fn parts(&self) -> &[Part] {
        self.partition.layout().parts()
    }

    fn bucket(&self, bucket: usize) -> Result<Range<usize>, Error> {
        let buckets = self.partition.layout().buckets();
        let found = buckets.get(bucket).map(|b| b.parts.clone());
        found.ok_or(Error::Index {
            what: "bucket",
            index: bucket,
            count: buckets.len(),
        })
    }

    fn clear(&self, buffer: &mut B::Buf<E::Acc>, mut len: usize) -> Result<(), Error> {
        let mut view = B::whole_mut(buffer);
        while len > 0 {
            let block = len.min(BLOCK);
            let (head, tail) = B::split_mut(view, block);
            self.device
                .copy(B::slice(B::whole(&self.zeros), 0..block), head)?;
            (view, len) = (tail, len - block);
        }
        Ok(())
    }

    /// The sums that come before that over replicas: over the stages of a tie, then over the other
    /// factors.
    fn sum_before<C: Collectives<B>>(
        &self,
        groups: &impl Groups<C>,
        part: &Part,
        buffer: &mut B::Buf<E::Acc>,
    ) -> Result<(), Error> {
        let layout = self.partition.layout();
        if part.len > 0 && !part.stages.is_empty() {
            let group = groups::tie(groups, layout, part)?;
            group.all_reduce(B::whole_mut(buffer), ReduceOp::Sum)?;
        }
        if part.len > 0 && !part.extra.is_empty() {
            let group = groups::over(groups, layout, &part.extra)?;
            group.all_reduce(B::whole_mut(buffer), ReduceOp::Sum)?;
        }
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
