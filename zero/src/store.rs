//! The parameters of a chunk: one buffer per part, lent to layers as views.

use alloc::sync::Arc;
use alloc::vec::Vec;

use quintet_kernels::backend::slice_mut;
use quintet_kernels::{Backend, Collectives, Pending, Queue, Scalar, Tag};

use crate::{Entry, Error, FlatLayout, Groups, groups};

/// The parameters of one chunk on one rank.
pub struct ParamStore<B: Backend, E: Scalar> {
    device: B,
    layout: Arc<FlatLayout>,
    parts: Vec<Option<B::Buf<E>>>,
}

impl<B: Backend, E: Scalar> ParamStore<B, E> {
    /// All zeros.
    ///
    /// # Errors
    /// Where the device has not that much memory.
    pub fn zeros(device: &B, layout: &Arc<FlatLayout>) -> Result<Self, Error> {
        let parts = layout
            .parts()
            .iter()
            .map(|p| Ok(Some(device.zeros(Tag::Param, p.len)?)));
        let parts = parts.collect::<Result<_, Error>>()?;
        Ok(Self {
            device: device.clone(),
            layout: layout.clone(),
            parts,
        })
    }

    /// The layout.
    #[must_use]
    pub fn layout(&self) -> &Arc<FlatLayout> {
        &self.layout
    }

    /// The parameters of a layer, in the order of its specs.
    ///
    /// # Errors
    /// [`Error::Index`] where there is no such layer, [`Error::Order`] after a step that failed.
    pub fn views(&self, layer: usize) -> Result<Vec<B::Ref<'_, E>>, Error> {
        let entries = self
            .layout
            .layer(layer)?
            .iter()
            .map(|&e| &self.layout.entries()[e]);
        entries
            .map(|e| Ok(B::slice(self.part(e.part)?, e.range())))
            .collect()
    }

    /// A whole part.
    ///
    /// # Errors
    /// As [`ParamStore::views`].
    pub fn part(&self, part: usize) -> Result<B::Ref<'_, E>, Error> {
        self.parts
            .get(part)
            .and_then(Option::as_ref)
            .map(B::whole)
            .ok_or(lost(part))
    }

    /// Makes the parameters of a run of layers whole before they are used. Below stage 3 they
    /// always are.
    ///
    /// # Errors
    /// What a collective fails with; none below stage 3.
    pub fn gather<C: Collectives<B>>(
        &mut self,
        _groups: &impl Groups<C>,
        _bucket: usize,
    ) -> Result<(), Error> {
        Ok(())
    }

    /// Lets gathered parameters go. Below stage 3 there is nothing to let go.
    ///
    /// # Errors
    /// None below stage 3.
    pub fn release(&mut self, _bucket: usize) -> Result<(), Error> {
        Ok(())
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
        let layout = self.layout.clone();
        let mut filled = Vec::new();
        for part in layout.parts() {
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
            filled.push(self.device.upload(Tag::Param, &host).map_err(Error::from)?);
        }
        self.parts = filled.into_iter().map(Some).collect();
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

    /// The local elements of an entry, read back.
    ///
    /// # Errors
    /// As [`ParamStore::views`], and what the device fails with.
    pub fn read(&self, entry: &Entry) -> Result<Vec<E>, Error> {
        let mut host = alloc::vec![E::from_f64(0.0); entry.len];
        let view = B::slice(self.part(entry.part)?, entry.range());
        self.device.download(view, &mut host)?;
        Ok(host)
    }

    /// Sets the local elements of an entry.
    ///
    /// # Errors
    /// As [`ParamStore::views`], and where `host` has another length.
    pub fn write(&mut self, entry: &Entry, host: &[E]) -> Result<(), Error> {
        let values = self.device.upload(Tag::Scratch, host)?;
        let device = self.device.clone();
        let part = B::whole_mut(self.part_mut(entry.part)?);
        let to = slice_mut::<B, E>(part, entry.range());
        Ok(device.copy(B::whole(&values), to)?)
    }

    /// A whole part, to write.
    pub(crate) fn part_mut(&mut self, part: usize) -> Result<&mut B::Buf<E>, Error> {
        self.parts
            .get_mut(part)
            .and_then(Option::as_mut)
            .ok_or(lost(part))
    }

    /// Replaces the buffers of all parts, which have the layout's lengths.
    #[cfg_attr(not(feature = "checkpoint"), allow(dead_code))]
    pub(crate) fn replace(&mut self, parts: Vec<B::Buf<E>>) {
        self.parts = parts.into_iter().map(Some).collect();
    }

    /// Starts filling a part from its owners' chunks; none where there is nothing to fill.
    pub(crate) fn start_gather<C: Collectives<B>>(
        &mut self,
        groups: &impl Groups<C>,
        index: usize,
    ) -> Result<Option<C::Pending<E>>, Error> {
        let layout = self.layout.clone();
        let part = match layout.parts().get(index) {
            Some(part) if part.places > 1 && part.len > 0 => part,
            _ => return Ok(None),
        };
        let group = groups::over(groups, &layout, &part.shard)?;
        let buffer = self
            .parts
            .get_mut(index)
            .and_then(Option::take)
            .ok_or(lost(index))?;
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
        self.parts[index] = Some(pending.wait_on(&self.device, Queue::Compute)?);
        Ok(())
    }
}

fn lost(part: usize) -> Error {
    Error::Order {
        what: "part",
        index: part,
        why: "its all-gather has not been ended, or a collective failed with it",
    }
}
