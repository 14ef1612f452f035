//! Working memory of one call, kept by its thread for the next.
//!
//! Products of a training step want the same few hundred KiB again and again; fresh memory would
//! cost a page fault every 4 KiB.

use alloc::vec::Vec;
#[cfg(feature = "std")]
use core::cell::Cell;

use crate::Float;

/// Elements of 64 bytes: a cache line, and the widest vector.
const LINE: usize = 8;

#[cfg(feature = "std")]
std::thread_local! {
    static KEPT: Cell<Vec<f64>> = const { Cell::new(Vec::new()) };
}

/// Memory whose contents are whatever was left there. A second one taken on the same thread
/// before the first is dropped starts empty.
pub(crate) struct Scratch(Vec<f64>);

impl Scratch {
    pub(crate) fn take() -> Self {
        #[cfg(feature = "std")]
        return Self(KEPT.take());
        #[cfg(not(feature = "std"))]
        Self(Vec::new())
    }

    /// `len` elements that begin on a cache line. `T` is f32 or f64.
    pub(crate) fn of<T: Float>(&mut self, len: usize) -> &mut [T] {
        let words = (len * size_of::<T>()).div_ceil(size_of::<f64>());
        if self.0.len() < words + LINE {
            // Not `resize`: what was there need not be copied.
            self.0 = alloc::vec![0.0; words + LINE];
        }
        let first = self.0.as_ptr().align_offset(64).min(LINE);
        &mut bytemuck::cast_slice_mut(&mut self.0[first..first + words])[..len]
    }
}

#[cfg(feature = "std")]
impl Drop for Scratch {
    fn drop(&mut self) {
        let mine = core::mem::take(&mut self.0);
        // A thread that is ending has nowhere to keep it.
        let _ = KEPT.try_with(|kept| kept.set(mine));
    }
}
