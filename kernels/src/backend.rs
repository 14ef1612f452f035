//! A device: where buffers live, how they are cut into views, what runs after what.
//!
//! ```text
//!   Buf<T>   owns memory, counted under a Tag
//!     | whole          | whole_mut
//!   Ref<'a, T>       Mut<'a, T>        on a CPU: &'a [T] and &'a mut [T]
//!     | slice          | split_mut, reborrow
//! ```
//!
//! Work is put on one of two [`Queue`]s. An [`Backend::Event`] marks a point of a queue that the
//! other queue, or the host, can wait for. On a CPU the compute queue is the calling thread
//! itself and the communication queue a thread beside it; on a GPU both are streams. The ops of
//! this crate always run on the compute queue.

use alloc::sync::Arc;
use core::ops::Range;
use core::sync::atomic::{AtomicUsize, Ordering};

use crate::{Data, Error};

/// What an allocation is for: the categories in which memory is planned and counted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Tag {
    /// Parameters as the layers use them.
    Param,
    /// Gradients of parameters.
    Grad,
    /// Master weights and moments.
    Optimizer,
    /// What forward saves for backward, and what flows between layers.
    Activation,
    /// Staging of collectives.
    Comm,
    /// Tokens, positions, labels, scratch that lives within one call.
    Scratch,
}

impl Tag {
    /// All tags, in the order they are printed.
    pub const ALL: [Tag; 6] = [
        Tag::Param,
        Tag::Grad,
        Tag::Optimizer,
        Tag::Activation,
        Tag::Comm,
        Tag::Scratch,
    ];

    /// The tag's name in reports.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Tag::Param => "parameters",
            Tag::Grad => "gradients",
            Tag::Optimizer => "optimizer",
            Tag::Activation => "activations",
            Tag::Comm => "communication",
            Tag::Scratch => "scratch",
        }
    }
}

/// Bytes allocated now and at the highest, by tag. Shared by all clones of a backend.
#[derive(Debug, Clone, Default)]
pub struct Meter(Arc<[Count; 6]>);

#[derive(Debug, Default)]
struct Count {
    now: AtomicUsize,
    peak: AtomicUsize,
}

impl Meter {
    /// Counts `bytes` more under `tag`.
    pub fn add(&self, tag: Tag, bytes: usize) {
        let count = &self.0[tag as usize];
        let now = count.now.fetch_add(bytes, Ordering::Relaxed) + bytes;
        count.peak.fetch_max(now, Ordering::Relaxed);
    }

    /// Counts `bytes` less under `tag`.
    pub fn sub(&self, tag: Tag, bytes: usize) {
        self.0[tag as usize].now.fetch_sub(bytes, Ordering::Relaxed);
    }

    /// Bytes held under `tag` now.
    #[must_use]
    pub fn now(&self, tag: Tag) -> usize {
        self.0[tag as usize].now.load(Ordering::Relaxed)
    }

    /// The most bytes ever held under `tag` since the last [`Meter::reset_peak`].
    #[must_use]
    pub fn peak(&self, tag: Tag) -> usize {
        self.0[tag as usize].peak.load(Ordering::Relaxed)
    }

    /// Lets the peaks start again from what is held now.
    pub fn reset_peak(&self) {
        for count in self.0.iter() {
            count
                .peak
                .store(count.now.load(Ordering::Relaxed), Ordering::Relaxed);
        }
    }
}

/// Where work is put: two lines of work that run side by side.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Queue {
    /// Kernels.
    Compute,
    /// Collectives that were started and not yet waited for.
    Comm,
}

/// A device with counted memory, views, two queues and events. Cloning gives another handle to
/// the same device; each rank has a device handle of its own.
pub trait Backend: Clone + Send + Sync + 'static {
    /// Owned memory for `T`s; counted until dropped.
    type Buf<T: Data>: Send + 'static;
    /// A view to read.
    type Ref<'a, T: Data>: Copy + Send;
    /// A view to read and write.
    type Mut<'a, T: Data>: Send;
    /// A point of a queue; cheap to clone, may travel to other threads.
    type Event: Clone + Send + Sync + 'static;

    /// Allocates `len` zeros, counted under `tag`.
    ///
    /// # Errors
    /// [`Error::Memory`] where the device has not that much left.
    fn zeros<T: Data>(&self, tag: Tag, len: usize) -> Result<Self::Buf<T>, Error>;

    /// Allocates `len` elements whose values are anything, for an output that is overwritten from
    /// end to end before it is read.
    ///
    /// # Errors
    /// As [`Backend::zeros`].
    fn alloc<T: Data>(&self, tag: Tag, len: usize) -> Result<Self::Buf<T>, Error> {
        self.zeros(tag, len)
    }

    /// Allocates and fills from the host.
    ///
    /// # Errors
    /// As [`Backend::zeros`].
    fn upload<T: Data>(&self, tag: Tag, host: &[T]) -> Result<Self::Buf<T>, Error>;

    /// Waits for the compute queue and copies to the host: the only way to read a result.
    ///
    /// # Errors
    /// [`Error::Len`] where the lengths differ.
    fn download<T: Data>(&self, src: Self::Ref<'_, T>, host: &mut [T]) -> Result<(), Error>;

    /// Copies on the compute queue.
    ///
    /// # Errors
    /// [`Error::Len`] where the lengths differ.
    fn copy<T: Data>(&self, src: Self::Ref<'_, T>, dst: Self::Mut<'_, T>) -> Result<(), Error>;

    /// Copies runs of elements between two arrays on the compute queue.
    ///
    /// # Errors
    /// [`Error::Len`] where a run does not lie inside its view.
    fn copy_rows<T: Data>(
        &self,
        rows: &Rows,
        src: Self::Ref<'_, T>,
        mut dst: Self::Mut<'_, T>,
    ) -> Result<(), Error> {
        rows.check(Self::len(src), Self::len(Self::as_ref(&dst)))?;
        for row in 0..rows.rows {
            let (from, to) = (row * rows.src_step, row * rows.dst_step);
            let (head, tail) = (from..from + rows.width, to..to + rows.width);
            let dst = slice_mut::<Self, T>(Self::reborrow(&mut dst), tail);
            self.copy(Self::slice(src, head), dst)?;
        }
        Ok(())
    }

    /// The number of elements in a view.
    fn len<T: Data>(view: Self::Ref<'_, T>) -> usize;

    /// A view of a whole buffer.
    fn whole<T: Data>(buf: &Self::Buf<T>) -> Self::Ref<'_, T>;

    /// A mutable view of a whole buffer.
    fn whole_mut<T: Data>(buf: &mut Self::Buf<T>) -> Self::Mut<'_, T>;

    /// Part of a view. The range is clamped to the view.
    fn slice<'a, T: Data>(view: Self::Ref<'a, T>, range: Range<usize>) -> Self::Ref<'a, T>;

    /// Cuts a mutable view in two at `at`, clamped to the view.
    fn split_mut<'a, T: Data>(
        view: Self::Mut<'a, T>,
        at: usize,
    ) -> (Self::Mut<'a, T>, Self::Mut<'a, T>);

    /// A shorter-lived mutable view of the same elements.
    fn reborrow<'a, T: Data>(view: &'a mut Self::Mut<'_, T>) -> Self::Mut<'a, T>;

    /// A read view of what a mutable view shows.
    fn as_ref<'a, T: Data>(view: &'a Self::Mut<'_, T>) -> Self::Ref<'a, T>;

    /// Marks the work put on `queue` so far.
    fn record(&self, queue: Queue) -> Self::Event;

    /// Lets `queue` go on only after `event`.
    fn wait(&self, queue: Queue, event: &Self::Event);

    /// The counter of this device's memory.
    fn meter(&self) -> &Meter;
}

/// `rows` runs of `width` elements, so many apart in what is read and in what is written: part of
/// a matrix, or of one dim of a longer array.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Rows {
    /// Runs.
    pub rows: usize,
    /// Elements of a run.
    pub width: usize,
    /// From the start of a run to the start of the next, where they are read.
    pub src_step: usize,
    /// The same where they are written.
    pub dst_step: usize,
}

impl Rows {
    /// Refuses views of `src` and `dst` elements in which not all runs lie.
    pub(crate) fn check(&self, src: usize, dst: usize) -> Result<(), Error> {
        for (what, step, len) in [("src", self.src_step, src), ("dst", self.dst_step, dst)] {
            let last = self.rows.saturating_sub(1).saturating_mul(step);
            let end = last.saturating_add(self.width);
            if self.rows > 0 && end > len {
                return Err(Error::Len {
                    op: "copy_rows",
                    what,
                    expected: end,
                    got: len,
                });
            }
        }
        Ok(())
    }
}

/// Part of a mutable view: `range` of `view`, clamped.
pub fn slice_mut<'a, B: Backend, T: Data>(
    view: B::Mut<'a, T>,
    range: Range<usize>,
) -> B::Mut<'a, T> {
    let (_, tail) = B::split_mut(view, range.start);
    B::split_mut(tail, range.end.saturating_sub(range.start)).0
}
