//! Buffers in memory that the ranks of a communicator share, where there is such memory.
//!
//! A collective on a slice of such a buffer touches every byte once: each rank reads the inputs and
//! writes the outputs of all in place. Between threads any slice is treated so.
#![allow(unsafe_code)]

use core::ops::{Deref, DerefMut};
use std::{vec, vec::Vec};

use crate::Element;

#[cfg(target_os = "linux")]
use super::shm::Region;

/// A buffer from [`crate::Communicator::alloc`]; a slice in all other respects.
///
/// After a collective on it failed its contents are undefined, as those of any output.
#[derive(Debug)]
pub struct Buffer<E> {
    memory: Memory<E>,
}

#[derive(Debug)]
enum Memory<E> {
    Private(Vec<E>),
    #[cfg(target_os = "linux")]
    Shared(Region, usize),
}

impl<E: Element> Buffer<E> {
    /// Zeros in memory of this process.
    pub(crate) fn private(len: usize) -> Self {
        Self {
            memory: Memory::Private(vec![E::zeroed(); len]),
        }
    }

    /// Zeros in a region of at least as many bytes.
    #[cfg(target_os = "linux")]
    pub(crate) fn shared(region: Region, len: usize) -> Self {
        Self {
            memory: Memory::Shared(region, len),
        }
    }

    /// Whether other processes reach it.
    #[must_use]
    pub fn is_shared(&self) -> bool {
        !matches!(self.memory, Memory::Private(_))
    }
}

impl<E: Element> Deref for Buffer<E> {
    type Target = [E];

    fn deref(&self) -> &[E] {
        match &self.memory {
            Memory::Private(elements) => elements,
            // SAFETY: the region holds `len` elements, was zero, is aligned to a page, and others touch it
            // only within a collective that has this buffer's slice, and so not while this borrow lives; one
            // that fails has taken the memory away from them before it returns.
            #[cfg(target_os = "linux")]
            Memory::Shared(region, len) => unsafe {
                core::slice::from_raw_parts(region.start().as_ptr().cast(), *len)
            },
        }
    }
}

impl<E: Element> DerefMut for Buffer<E> {
    fn deref_mut(&mut self) -> &mut [E] {
        match &mut self.memory {
            Memory::Private(elements) => elements,
            // SAFETY: as above, and this borrow is the only one.
            #[cfg(target_os = "linux")]
            Memory::Shared(region, len) => unsafe {
                core::slice::from_raw_parts_mut(region.start().as_ptr().cast(), *len)
            },
        }
    }
}

impl<E: Element> AsRef<[E]> for Buffer<E> {
    fn as_ref(&self) -> &[E] {
        self
    }
}

impl<E: Element> AsMut<[E]> for Buffer<E> {
    fn as_mut(&mut self) -> &mut [E] {
        self
    }
}
