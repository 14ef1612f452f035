//! Views of device memory: an address, a length, and the device that they lie on.

use alloc::sync::Arc;
use core::marker::PhantomData;

#[cfg(feature = "wire")]
use super::GpuBuf;
use super::Inner;
use crate::launch::Launch;
#[cfg(feature = "wire")]
use crate::{Data, Error, Queue};

/// A view of device memory, to read.
pub struct GpuRef<'a, L: Launch, T> {
    pub(super) ptr: u64,
    pub(super) len: usize,
    pub(super) device: &'a Arc<Inner<L>>,
    pub(super) data: PhantomData<&'a T>,
}

impl<L: Launch, T> Clone for GpuRef<'_, L, T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<L: Launch, T> Copy for GpuRef<'_, L, T> {}

/// A view of device memory, to read and write.
pub struct GpuMut<'a, L: Launch, T> {
    pub(super) ptr: u64,
    pub(super) len: usize,
    pub(super) device: &'a Arc<Inner<L>>,
    pub(super) data: PhantomData<&'a mut T>,
}

impl<L: Launch, T> GpuRef<'_, L, T> {
    /// The address of the first element.
    #[must_use]
    pub fn ptr(&self) -> u64 {
        self.ptr
    }
}

impl<L: Launch, T> GpuMut<'_, L, T> {
    /// The address of the first element.
    #[must_use]
    pub fn ptr(&self) -> u64 {
        self.ptr
    }
}

impl<L: Launch, T> core::fmt::Debug for GpuRef<'_, L, T> {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(f, "{} elements at {:#x}", self.len, self.ptr)
    }
}

impl<L: Launch, T> core::fmt::Debug for GpuMut<'_, L, T> {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(f, "{} elements at {:#x}", self.len, self.ptr)
    }
}

#[cfg(feature = "wire")]
impl<L: Launch, T: Data> GpuRef<'_, L, T> {
    /// The device that the elements lie on.
    pub(crate) fn gpu(&self) -> super::Gpu<L> {
        super::Gpu(self.device.clone())
    }

    /// The elements, once what is on `queue` is done.
    pub(crate) fn read(&self, queue: Queue) -> Result<alloc::vec::Vec<T>, Error> {
        let mut host = alloc::vec![T::zeroed(); self.len];
        let (stream, bytes) = (
            self.device.stream(queue),
            bytemuck::cast_slice_mut(&mut host),
        );
        self.device.launcher.download(stream, self.ptr, bytes)?;
        Ok(host)
    }
}

#[cfg(feature = "wire")]
impl<L: Launch, T: Data> GpuMut<'_, L, T> {
    /// Puts a copy of `host` to the view's first elements on `queue`.
    pub(crate) fn write(&self, queue: Queue, host: &[T]) -> Result<(), Error> {
        crate::error::need("write", "host", self.len, host.len())?;
        let stream = self.device.stream(queue);
        self.device
            .launcher
            .upload(stream, bytemuck::cast_slice(host), self.ptr)
    }
}

#[cfg(feature = "wire")]
impl<L: Launch, T: Data> GpuBuf<L, T> {
    /// The device that the buffer lies on.
    pub(crate) fn gpu(&self) -> super::Gpu<L> {
        super::Gpu(self.device.clone())
    }
}
