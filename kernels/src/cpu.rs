//! The host as a device: buffers are vectors, views are slices.
//!
//! ```text
//!   Cpu --Arc--> meter      bytes by tag
//!           +--> pool       threads - 1 workers (feature `std`), parked while idle
//! ```
//!
//! The compute queue is the calling thread: an op has happened when its call returns, so an event
//! recorded there is done at once. What runs beside it (a collective's own thread) sets a
//! [`CpuEvent`] made by [`CpuEvent::pending`], and `wait` blocks the caller on it.
//!
//! Ops split their work into parts whose bits do not depend on the split, and hand the parts to
//! [`Cpu::run`] or [`Cpu::for_each`]: any number of threads gives the same result.

#[cfg(feature = "std")]
mod event;
#[cfg(feature = "std")]
mod pool;
#[cfg(feature = "std")]
mod recycle;
mod scratch;
mod wide;

use alloc::sync::Arc;
use alloc::vec::Vec;
use core::ops::Range;

use crate::error::need;
use crate::{Backend, Data, Error, Meter, Queue, Rows, Tag};

#[cfg(feature = "std")]
pub use event::CpuEvent;
pub(crate) use scratch::Scratch;
pub(crate) use wide::wide;

/// The CPU with a fixed number of threads. Clones share the meter and the threads.
#[derive(Debug, Clone)]
pub struct Cpu(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    memory: Arc<Memory>,
    #[cfg(feature = "std")]
    pool: pool::Pool,
}

/// What buffers share with their device, and may outlive it with.
#[derive(Debug, Default)]
struct Memory {
    meter: Meter,
    #[cfg(feature = "std")]
    recycler: recycle::Recycler,
}

impl Cpu {
    /// A device whose ops use up to `threads` threads: the calling one and `threads - 1` workers
    /// (0 counts as 1). Where the system refuses a thread the device does with fewer; without
    /// feature `std` there is the calling thread alone. The results are the same bits.
    #[must_use]
    pub fn new(threads: usize) -> Self {
        #[cfg(not(feature = "std"))]
        let _ = threads;
        Self(Arc::new(Inner {
            memory: Arc::default(),
            #[cfg(feature = "std")]
            pool: pool::Pool::new(threads.saturating_sub(1)),
        }))
    }

    /// Threads that ops may use, the calling one included.
    #[must_use]
    pub fn threads(&self) -> usize {
        #[cfg(feature = "std")]
        return self.0.pool.workers() + 1;
        #[cfg(not(feature = "std"))]
        1
    }

    /// Calls `part(i)` once for each `i < parts`, on all threads, and returns when all have
    /// returned. Parts are handed out in order of `i`; a call from inside a part runs inline.
    /// A part that panics makes this call panic, after the others have ended.
    pub fn run(&self, parts: usize, part: impl Fn(usize) + Sync) {
        #[cfg(feature = "std")]
        self.0.pool.run(parts, &part);
        #[cfg(not(feature = "std"))]
        (0..parts).for_each(part);
    }

    /// Calls `work(i, item)` for the i-th of `items`, as [`Cpu::run`] does. Each item is moved
    /// into its call, so items may be disjoint mutable slices. Loops in `work` use the CPU's
    /// widest vectors where `work` and what it calls are marked `#[inline(always)]`.
    ///
    /// ```
    /// let cpu = quintet_kernels::Cpu::new(2);
    /// let mut y = vec![0.0; 100];
    /// cpu.for_each(y.chunks_mut(32), |i, rows| rows.fill(i as f32));
    /// assert_eq!(y[31..34], [0.0, 1.0, 1.0]);
    /// ```
    pub fn for_each<I: Send>(
        &self,
        items: impl IntoIterator<Item = I>,
        work: impl Fn(usize, I) + Sync,
    ) {
        #[cfg(feature = "std")]
        if self.threads() > 1 {
            use std::sync::{Mutex, PoisonError};
            let slots: Vec<_> = items.into_iter().map(|i| Mutex::new(Some(i))).collect();
            return self.run(slots.len(), |i| {
                let mut slot = slots[i].lock().unwrap_or_else(PoisonError::into_inner);
                if let Some(item) = slot.take() {
                    wide(
                        #[inline(always)]
                        || work(i, item),
                    );
                }
            });
        }
        for (i, item) in items.into_iter().enumerate() {
            wide(
                #[inline(always)]
                || work(i, item),
            );
        }
    }
}

impl Default for Cpu {
    /// One thread.
    fn default() -> Self {
        Self::new(1)
    }
}

/// Host memory, counted under its tag until dropped; the device may then use it again.
#[derive(Debug)]
pub struct CpuBuf<T: Data> {
    data: Vec<T>,
    tag: Tag,
    memory: Arc<Memory>,
}

impl<T: Data> CpuBuf<T> {
    fn new(data: Vec<T>, tag: Tag, memory: &Arc<Memory>) -> Self {
        let bytes = size_of_val(data.as_slice());
        memory.meter.add(tag, bytes);
        #[cfg(feature = "std")]
        memory.recycler.used(bytes);
        Self {
            data,
            tag,
            memory: memory.clone(),
        }
    }

    /// What the memory was allocated for.
    #[must_use]
    pub fn tag(&self) -> Tag {
        self.tag
    }
}

impl<T: Data> Drop for CpuBuf<T> {
    fn drop(&mut self) {
        let bytes = size_of_val(self.data.as_slice());
        self.memory.meter.sub(self.tag, bytes);
        #[cfg(feature = "std")]
        self.memory.recycler.give(core::mem::take(&mut self.data));
    }
}

impl<T: Data> AsRef<[T]> for CpuBuf<T> {
    fn as_ref(&self) -> &[T] {
        &self.data
    }
}

impl<T: Data> AsMut<[T]> for CpuBuf<T> {
    fn as_mut(&mut self) -> &mut [T] {
        &mut self.data
    }
}

/// A point of a queue that has always been reached: without threads nothing runs beside the
/// caller.
#[cfg(not(feature = "std"))]
#[derive(Debug, Clone)]
pub struct CpuEvent(());

#[cfg(not(feature = "std"))]
impl CpuEvent {
    /// An event that has happened.
    #[must_use]
    pub fn done() -> Self {
        Self(())
    }

    /// Whether the event has happened: always.
    #[must_use]
    pub fn is_set(&self) -> bool {
        true
    }

    /// Returns at once.
    pub fn wait(&self) {}
}

fn no_memory<T>(tag: Tag, len: usize) -> Error {
    Error::Memory {
        bytes: len.saturating_mul(size_of::<T>()),
        tag: tag.name(),
    }
}

impl Backend for Cpu {
    type Buf<T: Data> = CpuBuf<T>;
    type Ref<'a, T: Data> = &'a [T];
    type Mut<'a, T: Data> = &'a mut [T];
    type Event = CpuEvent;

    fn zeros<T: Data>(&self, tag: Tag, len: usize) -> Result<CpuBuf<T>, Error> {
        let mut data = Vec::new();
        data.try_reserve_exact(len)
            .map_err(|_| no_memory::<T>(tag, len))?;
        data.resize(len, T::zeroed());
        Ok(CpuBuf::new(data, tag, &self.0.memory))
    }

    fn alloc<T: Data>(&self, tag: Tag, len: usize) -> Result<CpuBuf<T>, Error> {
        #[cfg(feature = "std")]
        if let Some(mut data) = self.0.memory.recycler.take::<T>(len) {
            if cfg!(debug_assertions) {
                // NaN in every float: whoever reads what nobody wrote shall see it.
                bytemuck::cast_slice_mut::<T, u8>(&mut data).fill(0xFF);
            }
            return Ok(CpuBuf::new(data, tag, &self.0.memory));
        }
        self.zeros(tag, len)
    }

    fn upload<T: Data>(&self, tag: Tag, host: &[T]) -> Result<CpuBuf<T>, Error> {
        let mut data = Vec::new();
        data.try_reserve_exact(host.len())
            .map_err(|_| no_memory::<T>(tag, host.len()))?;
        data.extend_from_slice(host);
        Ok(CpuBuf::new(data, tag, &self.0.memory))
    }

    fn download<T: Data>(&self, src: &[T], host: &mut [T]) -> Result<(), Error> {
        need("download", "host", src.len(), host.len())?;
        host.copy_from_slice(src);
        Ok(())
    }

    fn copy<T: Data>(&self, src: &[T], dst: &mut [T]) -> Result<(), Error> {
        need("copy", "dst", src.len(), dst.len())?;
        dst.copy_from_slice(src);
        Ok(())
    }

    fn copy_rows<T: Data>(&self, rows: &Rows, src: &[T], dst: &mut [T]) -> Result<(), Error> {
        rows.check(src.len(), dst.len())?;
        for row in 0..rows.rows {
            let src = &src[row * rows.src_step..][..rows.width];
            dst[row * rows.dst_step..][..rows.width].copy_from_slice(src);
        }
        Ok(())
    }

    fn len<T: Data>(view: &[T]) -> usize {
        view.len()
    }

    fn whole<T: Data>(buf: &CpuBuf<T>) -> &[T] {
        &buf.data
    }

    fn whole_mut<T: Data>(buf: &mut CpuBuf<T>) -> &mut [T] {
        &mut buf.data
    }

    fn slice<'a, T: Data>(view: Self::Ref<'a, T>, range: Range<usize>) -> Self::Ref<'a, T> {
        let end = range.end.min(view.len());
        &view[range.start.min(end)..end]
    }

    fn split_mut<'a, T: Data>(
        view: Self::Mut<'a, T>,
        at: usize,
    ) -> (Self::Mut<'a, T>, Self::Mut<'a, T>) {
        let at = at.min(view.len());
        view.split_at_mut(at)
    }

    fn reborrow<'a, T: Data>(view: &'a mut &mut [T]) -> &'a mut [T] {
        view
    }

    fn as_ref<'a, T: Data>(view: &'a &mut [T]) -> &'a [T] {
        view
    }

    /// Done at once: ops have happened when their calls return, and what a collective does
    /// beside them has an event of its own.
    fn record(&self, _: Queue) -> CpuEvent {
        CpuEvent::done()
    }

    /// Blocks the caller for either queue: what it puts there next comes after the event.
    fn wait(&self, _: Queue, event: &CpuEvent) {
        event.wait();
    }

    fn meter(&self) -> &Meter {
        &self.0.memory.meter
    }
}
