//! The parameters of a chunk: one buffer per part, lent to layers as views.
//!
//! ```text
//! stages 0 to 2   part  | whole                   |                 views(layer) at any time
//! stage 3         part  | mine |  at rest
//!                 gather(bucket)  -> | whole      |  beside it      views(layer) of that bucket
//!                 release(bucket) -> gone
//! ```
//!
//! What is gathered is a copy: it never outlives a step of the optimizer, which refuses to run
//! while there is one.

use alloc::sync::Arc;
use alloc::vec::Vec;
use core::ops::Range;

use quintet_kernels::backend::slice_mut;
use quintet_kernels::{Backend, Collectives, Pending, Queue, Scalar, Tag};

use crate::{Entry, Error, FlatLayout, Gathering, Groups, Held, Partition, WholeParams, groups};

/// The parameters of one chunk on one rank.
pub struct ParamStore<B: Backend, E: Scalar> {
    device: B,
    partition: Partition,
    parts: Vec<Slot<B, E>>,
    whole: WholeParams,
}

struct Slot<B: Backend, E: Scalar> {
    /// What is at rest here; none while an all-gather has it.
    rest: Option<B::Buf<E>>,
    /// The whole part, where that is more.
    copy: Option<B::Buf<E>>,
}

impl<B: Backend, E: Scalar> Slot<B, E> {
    fn new(rest: B::Buf<E>) -> Self {
        Self {
            rest: Some(rest),
            copy: None,
        }
    }
}

impl<B: Backend, E: Scalar> ParamStore<B, E> {
    /// All zeros.
    ///
    /// # Errors
    /// Where the device has not that much memory.
    pub fn zeros(device: &B, partition: &Partition) -> Result<Self, Error> {
        let parts = 0..partition.layout().parts().len();
        let zeros = |part| device.zeros(Tag::Param, partition.param(part).len());
        let parts = parts.map(|part| Ok(Slot::new(zeros(part)?)));
        Ok(Self {
            device: device.clone(),
            parts: parts.collect::<Result<_, Error>>()?,
            whole: WholeParams::new(partition),
            partition: partition.clone(),
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

    /// The parameters of a layer, in the order of its specs.
    ///
    /// # Errors
    /// [`Error::Index`] where there is no such layer, [`Error::Order`] where they are not gathered
    /// and after a step that failed.
    pub fn views(&self, layer: usize) -> Result<Vec<B::Ref<'_, E>>, Error> {
        let layout = self.layout();
        let entries = layout.layer(layer)?.iter().map(|&e| &layout.entries()[e]);
        entries
            .map(|e| Ok(B::slice(self.whole(e.part)?, e.range())))
            .collect()
    }

    /// What is at rest here of a part: all of it below stage 3, this rank's chunk under stage 3.
    ///
    /// # Errors
    /// [`Error::Order`] after a step that failed.
    pub fn part(&self, part: usize) -> Result<Held<'_, B, E>, Error> {
        let rest = self.parts.get(part).and_then(|slot| slot.rest.as_ref());
        let view = rest.map(B::whole).ok_or(lost(part))?;
        Ok(Held::new(part, self.partition.param(part), view))
    }

    fn whole(&self, part: usize) -> Result<B::Ref<'_, E>, Error> {
        if !self.partition.gathers(part) {
            return Ok(self.part(part)?.view());
        }
        let copy = self.parts.get(part).and_then(|slot| slot.copy.as_ref());
        copy.map(B::whole).ok_or(Error::Order {
            what: "part",
            index: part,
            why: "its parameters are used without having been gathered",
        })
    }

    /// Makes the parameters of a bucket's layers whole before they are used, and waits for them;
    /// [`Gathering::ahead`] does not wait. Below stage 3 they always are.
    ///
    /// # Errors
    /// [`Error::Index`] where there is no such bucket, and what a collective fails with.
    pub fn gather<C: Collectives<B>>(
        &mut self,
        groups: &impl Groups<C>,
        bucket: usize,
    ) -> Result<(), Error> {
        let mut gathering = Gathering::<B, C, E>::new();
        gathering.ahead(self, groups, bucket)?;
        gathering.end(self)
    }

    /// Lets the gathered parameters of a bucket's layers go, but for those that another bucket
    /// still wants. Below stage 3 there is nothing to let go.
    ///
    /// # Errors
    /// [`Error::Index`] where there is no such bucket, [`Error::Order`] where it is not gathered.
    pub fn release(&mut self, bucket: usize) -> Result<(), Error> {
        for part in self.whole.done(bucket)? {
            self.parts[part].copy = None;
        }
        Ok(())
    }

    /// Whether nothing is gathered.
    #[must_use]
    pub fn at_rest(&self) -> bool {
        self.whole.is_empty()
    }

    /// Sets every parameter: `value(entry, runs, host)` writes the local elements into `host`,
    /// where `runs` are `(local index, logical index, length)`. Nothing changes where it fails.
    ///
    /// # Errors
    /// What `value` and the device fail with.
    pub fn fill<X: From<Error>>(
        &mut self,
        mut value: impl FnMut(&Entry, &[(usize, usize, usize)], &mut [E]) -> Result<(), X>,
    ) -> Result<(), X> {
        let layout = self.layout().clone();
        let mut filled = Vec::new();
        for (index, part) in layout.parts().iter().enumerate() {
            let mut host = Vec::new();
            host.try_reserve_exact(part.len).map_err(|_| {
                let bytes = part.len.saturating_mul(size_of::<E>());
                let tag = Tag::Scratch.name();
                Error::from(quintet_kernels::Error::Memory { bytes, tag })
            })?;
            host.resize(part.len, E::from_f64(0.0));
            for &entry in &part.entries {
                let e = &layout.entries()[entry];
                let runs = e.spec.runs(layout.mesh(), layout.rank());
                value(e, &runs, &mut host[e.range()])?;
            }
            let rest = &host[self.partition.param(index)];
            filled.push(self.device.upload(Tag::Param, rest).map_err(Error::from)?);
        }
        self.replace(filled);
        Ok(())
    }

    /// Sets every parameter element by element: `value(entry, logical index)`.
    ///
    /// # Errors
    /// What the device fails with.
    pub fn fill_with(&mut self, mut value: impl FnMut(&Entry, usize) -> E) -> Result<(), Error> {
        self.fill(|entry, runs, host| {
            for &(local, logical, len) in runs {
                for i in 0..len {
                    host[local + i] = value(entry, logical + i);
                }
            }
            Ok(())
        })
    }

    /// What is at rest here of an entry, read back: the values, and which they are as runs
    /// `(index in the values, logical index, length)`.
    ///
    /// # Errors
    /// As [`ParamStore::part`], and what the device fails with.
    pub fn read(&self, entry: &Entry) -> Result<(Vec<E>, Runs), Error> {
        let held = self.part(entry.part)?;
        let (mine, own) = (held.range(), entry.range());
        let start = own.start.max(mine.start);
        let range = start..own.end.min(mine.end).max(start);
        let mut host = alloc::vec![E::from_f64(0.0); range.len()];
        self.device.download(held.cut(range.clone())?, &mut host)?;
        let runs = self.layout().runs(entry, &range).into_iter();
        Ok((host, runs.map(|(at, i, n)| (at - start, i, n)).collect()))
    }

    /// `range` of a part, which lies within what is at rest here, to write.
    pub(crate) fn rest_mut(
        &mut self,
        part: usize,
    ) -> Result<(Range<usize>, &mut B::Buf<E>), Error> {
        let range = self.partition.param(part);
        let rest = self.parts.get_mut(part).and_then(|slot| slot.rest.as_mut());
        Ok((range, rest.ok_or(lost(part))?))
    }

    /// Sets what is at rest here of an entry to `values`, in the order in which
    /// [`ParamStore::read`] gives them.
    ///
    /// # Errors
    /// As [`ParamStore::part`], and where there are more or fewer values than that.
    pub fn write(&mut self, entry: &Entry, values: &[E]) -> Result<(), Error> {
        let device = self.device.clone();
        let (range, rest) = self.rest_mut(entry.part)?;
        let own = entry.range();
        let start = own.start.max(range.start);
        let mine = start..own.end.min(range.end).max(start);
        if mine.is_empty() {
            return Ok(());
        }
        let values = device.upload(Tag::Scratch, values)?;
        let here = mine.start - range.start..mine.end - range.start;
        let to = slice_mut::<B, E>(B::whole_mut(rest), here);
        Ok(device.copy(B::whole(&values), to)?)
    }

    /// Replaces what is at rest, by buffers of the lengths that the partition says.
    pub(crate) fn replace(&mut self, parts: Vec<B::Buf<E>>) {
        self.parts = parts.into_iter().map(Slot::new).collect();
        self.whole = WholeParams::new(&self.partition);
    }

    /// The parts to be gathered for the layers of a bucket; see [`WholeParams::want`].
    pub(crate) fn want(&mut self, bucket: usize) -> Result<Vec<usize>, Error> {
        self.whole.want(bucket)
    }

    /// Starts filling a part from its owners' chunks; none where there is nothing to fill.
    pub(crate) fn start_gather<C: Collectives<B>>(
        &mut self,
        groups: &impl Groups<C>,
        index: usize,
    ) -> Result<Option<C::Pending<E>>, Error> {
        let layout = self.layout().clone();
        let part = match layout.parts().get(index) {
            Some(part) if part.places > 1 => part,
            _ => return Ok(None),
        };
        let group = groups::gathering(groups, &layout, &part.shard)?;
        let buffer = if self.partition.gathers(index) {
            let mut whole = self.device.alloc(Tag::Param, part.len)?;
            let mine = slice_mut::<B, E>(B::whole_mut(&mut whole), part.chunk(part.place));
            self.device.copy(self.part(index)?.view(), mine)?;
            whole
        } else {
            let slot = self.parts.get_mut(index);
            slot.and_then(|slot| slot.rest.take()).ok_or(lost(index))?
        };
        if part.len == 0 {
            self.place(index, buffer);
            return Ok(None);
        }
        let after = self.device.record(Queue::Compute);
        Ok(Some(group.start_all_gather(
            buffer,
            &part.counts(),
            after,
        )?))
    }

    /// Takes a part back that has been filled.
    pub(crate) fn end_gather<P: Pending<B, E>>(
        &mut self,
        index: usize,
        pending: P,
    ) -> Result<(), Error> {
        let buffer = pending.wait_on(&self.device, Queue::Compute)?;
        self.place(index, buffer);
        Ok(())
    }

    fn place(&mut self, index: usize, buffer: B::Buf<E>) {
        let slot = &mut self.parts[index];
        if self.partition.gathers(index) {
            // What was let go while it was on its way is not wanted any more.
            slot.copy = Some(buffer).filter(|_| self.whole.wants(index));
        } else {
            slot.rest = Some(buffer);
        }
    }
}

/// `(index in what was read, logical index, length)`.
pub type Runs = Vec<(usize, usize, usize)>;

fn lost(part: usize) -> Error {
    Error::Order {
        what: "part",
        index: part,
        why: "its all-gather has not been ended, or a collective failed with it",
    }
}
