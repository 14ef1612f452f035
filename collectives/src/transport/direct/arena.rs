//! The memory that the ranks of one group share, whether threads or processes.
//!
//! ```text
//! head       finished duties, members that closed it
//! rank r     line 0: progress, digests of the last two calls, two tiny inputs
//!            line 1: how it sleeps, its bell
//!            line 2: where its input and output lie, of the last two calls
//! duties     one word each
//! records    the last two calls of each rank, in full (processes)
//! slots      two small inputs of each rank
//! stage      two pieces and two results of each rank (processes)
//! ```
//!
//! Nothing here is a reference to more than an atomic: everything else is read and written by
//! address, between a publication and the wait that follows it.
#![allow(unsafe_code)]

use core::ptr::NonNull;
use std::{
    alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error},
    boxed::Box,
    sync::atomic::{AtomicU32, AtomicU64},
};

use super::claim::ORDERS;

/// Duties of one call.
pub(super) const DUTIES: usize = 1024;

/// Bytes of the longest input that goes through a slot.
pub(super) const SLOT: usize = 4096;

/// Bytes of an input that fits beside its rank's progress.
const TINY: usize = 16;

/// Bytes of a record.
pub(crate) const RECORD: usize = 128;

/// Two lines, since processors fetch them in pairs; what is written in every call and what is seldom written have one
/// each.
const LINE: usize = 128;

/// Slots and stages begin so many bytes after the last one's end, so that no two of them, and no page
/// start, lie at one place modulo 4 KiB.
const STAGGER: usize = 2 * LINE + 64;

/// Where a rank's memory lies: addresses among threads, places in segments among processes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Post {
    pub(super) input: u64,
    pub(super) input_bytes: u64,
    pub(super) output: u64,
    pub(super) output_bytes: u64,
    /// The input's address in its process, where it can read the memory of all others; else 0.
    pub(super) input_at: u64,
}

/// The offsets of everything in an arena.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Plot {
    n: usize,
    /// Bytes of a stage; 0 among threads, who need none.
    stage: usize,
}

impl Plot {
    pub(crate) fn new(n: usize, stage: usize) -> Self {
        Self { n, stage }
    }

    fn ranks(self) -> usize {
        LINE
    }

    fn duties(self) -> usize {
        self.ranks() + self.n * 2 * LINE
    }

    fn records(self) -> usize {
        self.duties() + DUTIES * 8
    }

    fn slots(self) -> usize {
        self.records() + self.n * 2 * RECORD
    }

    fn stages(self) -> usize {
        self.slots() + self.n * 2 * (SLOT + STAGGER)
    }

    /// Bytes of all of it.
    pub(crate) fn bytes(self) -> usize {
        let each = if self.stage == 0 {
            0
        } else {
            self.stage + STAGGER
        };
        self.stages() + self.n * 4 * each
    }

    /// Ranks of the group.
    #[cfg(target_os = "linux")]
    pub(crate) fn ranks_len(self) -> usize {
        self.n
    }

    /// Bytes of a stage.
    pub(super) fn stage(self) -> usize {
        self.stage
    }
}

/// An arena: memory of [`Plot::bytes`] that was all zero at first, and what keeps it.
pub(crate) struct Arena {
    base: NonNull<u8>,
    plot: Plot,
    _keep: Box<dyn Send + Sync>,
}

// SAFETY: the memory is shared by design: atomics, and bytes of which the protocol says whose they are.
unsafe impl Send for Arena {}
// SAFETY: as above.
unsafe impl Sync for Arena {}

impl core::fmt::Debug for Arena {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_struct("Arena")
            .field("plot", &self.plot)
            .finish_non_exhaustive()
    }
}

#[repr(align(4096))]
struct Page {
    _bytes: [u8; 4096],
}

/// Memory of this process.
struct Heap(NonNull<u8>, Layout);

// SAFETY: it is only freed here.
unsafe impl Send for Heap {}
// SAFETY: as above.
unsafe impl Sync for Heap {}

impl Drop for Heap {
    fn drop(&mut self) {
        // SAFETY: it came from the allocator with this layout, and the arena that used it is gone.
        unsafe { dealloc(self.0.as_ptr(), self.1) };
    }
}

impl Arena {
    /// Among threads.
    pub(crate) fn heap(n: usize) -> Self {
        Self::heap_with(n, 0)
    }

    /// The same with stages of so many bytes.
    pub(super) fn heap_with(n: usize, stage: usize) -> Self {
        let plot = Plot::new(n, stage);
        // Lengths beyond all memory do not come from a number of threads.
        let layout =
            Layout::array::<Page>(plot.bytes().div_ceil(4096)).unwrap_or(Layout::new::<Page>());
        // SAFETY: the layout is not empty.
        let Some(base) = NonNull::new(unsafe { alloc_zeroed(layout) }) else {
            handle_alloc_error(layout)
        };
        // SAFETY: that many bytes, zero, freed with the keeper.
        unsafe { Self::over(base, plot, Box::new(Heap(base, layout))) }
    }

    /// Over memory of somebody else's.
    ///
    /// # Safety
    /// `base` is aligned to a page, readable and writable for `plot.bytes()` as long as `keep` lives, was zero when the
    /// first rank came, and is used by nobody but arenas of the same plot.
    pub(crate) unsafe fn over(base: NonNull<u8>, plot: Plot, keep: Box<dyn Send + Sync>) -> Self {
        Self {
            base,
            plot,
            _keep: keep,
        }
    }

    pub(super) fn world(&self) -> usize {
        self.plot.n
    }

    pub(super) fn plot(&self) -> Plot {
        self.plot
    }

    fn at(&self, offset: usize) -> *mut u8 {
        debug_assert!(offset < self.plot.bytes());
        // SAFETY: every caller's offset lies in the plot.
        unsafe { self.base.as_ptr().add(offset) }
    }

    fn word(&self, offset: usize) -> &AtomicU64 {
        // SAFETY: in the plot, aligned to 8, alive as long as the arena, and only ever an atomic.
        unsafe { AtomicU64::from_ptr(self.at(offset).cast()) }
    }

    fn half(&self, offset: usize) -> &AtomicU32 {
        // SAFETY: as above, aligned to 4.
        unsafe { AtomicU32::from_ptr(self.at(offset).cast()) }
    }

    /// Duties performed, over all turns.
    pub(super) fn finished(&self) -> &AtomicU64 {
        self.word(0)
    }

    /// Members that are through with the group.
    pub(crate) fn closed(&self) -> &AtomicU64 {
        self.word(64)
    }

    fn rank(&self, rank: usize) -> usize {
        self.plot.ranks() + rank * 2 * LINE
    }

    /// Steps that a rank has published.
    pub(super) fn progress(&self, rank: usize) -> &AtomicU64 {
        self.word(self.rank(rank))
    }

    /// The digest of a rank's call.
    pub(super) fn digest(&self, rank: usize, sequence: u64) -> &AtomicU64 {
        self.word(self.rank(rank) + 8 + 8 * (sequence % 2) as usize)
    }

    /// How a rank sleeps.
    pub(super) fn sleeping(&self, rank: usize) -> &AtomicU64 {
        self.word(self.rank(rank) + LINE / 2)
    }

    /// What a rank sleeps on.
    pub(crate) fn bell(&self, rank: usize) -> &AtomicU32 {
        self.half(self.rank(rank) + LINE / 2 + 8)
    }

    fn post_word(&self, rank: usize, sequence: u64, field: usize) -> &AtomicU64 {
        let half = LINE / 2 * (sequence % 2) as usize;
        self.word(self.rank(rank) + LINE + half + 8 * field)
    }

    /// Says where my memory lies, before the step is published. Who was late may still look at the last call's
    /// when I come to the next: others may have done its duties.
    pub(super) fn set_post(&self, rank: usize, sequence: u64, post: Post) {
        use std::sync::atomic::Ordering::Relaxed;
        let open = sequence + 1;
        let words = [
            post.input,
            post.input_bytes,
            post.output,
            post.output_bytes,
            post.input_at,
            open,
        ];
        for (field, value) in words.into_iter().enumerate() {
            self.post_word(rank, sequence, field).store(value, Relaxed);
        }
    }

    /// The number after a rank's call, if it could read all that it needed for it.
    pub(super) fn read_all(&self, rank: usize, sequence: u64) -> &AtomicU64 {
        self.post_word(rank, sequence, 6)
    }

    /// The number after a rank's call, as long as others may read its memory for it.
    pub(super) fn open(&self, rank: usize, sequence: u64) -> &AtomicU64 {
        self.post_word(rank, sequence, 5)
    }

    /// Where a rank's memory lies, once it has published the step.
    pub(super) fn post(&self, rank: usize, sequence: u64) -> Post {
        let get = |field| {
            self.post_word(rank, sequence, field)
                .load(std::sync::atomic::Ordering::Relaxed)
        };
        Post {
            input: get(0),
            input_bytes: get(1),
            output: get(2),
            output_bytes: get(3),
            input_at: get(4),
        }
    }

    /// The word of a duty.
    pub(super) fn duty(&self, index: usize) -> &AtomicU64 {
        debug_assert!(index < DUTIES);
        self.word(self.plot.duties() + 8 * index)
    }

    fn record(&self, rank: usize, sequence: u64) -> *mut u8 {
        let index = 2 * rank + (sequence % 2) as usize;
        self.at(self.plot.records() + index * RECORD)
    }

    /// Writes my call in full, before it is published.
    #[cfg(target_os = "linux")]
    pub(crate) fn set_record(&self, rank: usize, sequence: u64, call: &[u8]) {
        let len = call.len().min(RECORD);
        // SAFETY: a record of my own, which others read after its publication and before the next but one.
        unsafe {
            self.record(rank, sequence)
                .copy_from_nonoverlapping(call.as_ptr(), len)
        };
    }

    /// A rank's call in full, once it is published.
    #[cfg(target_os = "linux")]
    pub(crate) fn get_record(&self, rank: usize, sequence: u64) -> [u8; RECORD] {
        let mut call = [0; RECORD];
        // SAFETY: a record, whose owner leaves it alone until all have come to the call after.
        unsafe {
            call.as_mut_ptr()
                .copy_from_nonoverlapping(self.record(rank, sequence), RECORD)
        };
        call
    }

    /// A rank's slot for inputs of at most `bytes`: what fits lies beside the rank's progress, and comes with it.
    pub(super) fn slot(&self, rank: usize, sequence: u64, bytes: usize) -> *mut u8 {
        if bytes <= TINY {
            return self.at(self.rank(rank) + LINE / 2 - TINY * (1 + sequence % 2) as usize);
        }
        let index = 2 * rank + (sequence % 2) as usize;
        self.at(self.plot.slots() + index * (SLOT + STAGGER))
    }

    /// A rank's stage: 0 and 1 for pieces, 2 and 3 for results.
    pub(super) fn stage(&self, rank: usize, index: usize) -> *mut u8 {
        let each = self.plot.stage + STAGGER;
        self.at(self.plot.stages() + (4 * rank + index) * each)
    }

    /// Whether every rank has published `step`.
    pub(super) fn all_reached(&self, step: u64) -> bool {
        (0..self.plot.n).all(|rank| ORDERS.reached(self.progress(rank), step))
    }
}
