//! What stands on a device's streams: copies, events, waits.

use alloc::sync::Arc;
use std::format;
use std::string::ToString;

use cudarc::driver::sys::{CUevent, CUstream};

use super::super::driver::{Code, Driver};
use super::Device;
use crate::Error;
use crate::launch::Stream;

const NON_BLOCKING: u32 = 1;
const DISABLE_TIMING: u32 = 2;
const NOT_READY: Code = 600;

/// A point of a stream of a CUDA device.
#[derive(Debug, Clone)]
pub struct CudaEvent(Option<Arc<Point>>);

#[derive(Debug)]
struct Point {
    event: CUevent,
    device: Arc<Driver>,
}

// SAFETY: as for Device.
unsafe impl Send for Point {}
unsafe impl Sync for Point {}

impl CudaEvent {
    /// Milliseconds from `earlier` on, by the device's clock; both are of [`Cuda::timed`](crate::cuda::Cuda::timed) and
    /// have happened, else there is none.
    #[must_use]
    pub fn ms_since(&self, earlier: &CudaEvent) -> Option<f32> {
        let (to, from) = (self.0.as_ref()?, earlier.0.as_ref()?);
        let mut ms = 0.0;
        // SAFETY: both live; a number is written.
        let code = unsafe { (to.device.event_elapsed)(&raw mut ms, from.event, to.event) };
        (code == 0).then_some(ms)
    }
}

impl Drop for Point {
    fn drop(&mut self) {
        // SAFETY: made by this driver, destroyed once; what waits for it still does.
        unsafe { (self.device.event_destroy)(self.event) };
    }
}

impl Device {
    pub(super) fn stream(&self, stream: Stream) -> Result<CUstream, Error> {
        if let Some(found) = self.state().streams.get(&stream.0) {
            return Ok(*found);
        }
        let mut new = core::ptr::null_mut();
        // SAFETY: a handle is written.
        let code = self.with(|d| unsafe { (d.stream_create)(&raw mut new, NON_BLOCKING) });
        self.outcome(code, || "a stream".into())?;
        let mut state = self.state();
        // Another thread may have made it meanwhile.
        let kept = *state.streams.entry(stream.0).or_insert(new);
        drop(state);
        if kept != new {
            // SAFETY: nobody has it.
            self.with(|d| unsafe { (d.stream_destroy)(new) });
        }
        Ok(kept)
    }

    pub(in super::super) fn fill(
        &self,
        stream: Stream,
        ptr: u64,
        value: u8,
        bytes: usize,
    ) -> Result<(), Error> {
        self.queue(stream, bytes, |d, queue| {
            // SAFETY: device memory of the caller; the driver refuses what is not.
            unsafe { (d.fill)(ptr, value, bytes, queue) }
        })
    }

    pub(in super::super) fn copy(
        &self,
        stream: Stream,
        src: u64,
        dst: u64,
        bytes: usize,
    ) -> Result<(), Error> {
        self.queue(stream, bytes, |d, queue| {
            // SAFETY: as in fill.
            unsafe { (d.copy)(dst, src, bytes, queue) }
        })
    }

    pub(in super::super) fn upload(
        &self,
        stream: Stream,
        host: &[u8],
        dst: u64,
    ) -> Result<(), Error> {
        self.queue(stream, host.len(), |d, queue| {
            // The driver copies pageable memory to a staging buffer before it returns (CUDA driver
            // API, "API synchronization behavior").
            // SAFETY: as in fill; `host` is read.
            unsafe { (d.upload)(dst, host.as_ptr().cast(), host.len(), queue) }
        })
    }

    pub(in super::super) fn download(
        &self,
        stream: Stream,
        src: u64,
        host: &mut [u8],
    ) -> Result<(), Error> {
        let (at, bytes) = (host.as_mut_ptr(), host.len());
        self.queue(stream, bytes, |d, queue| {
            // SAFETY: as in fill; `host` is written until the stream has been waited for.
            unsafe {
                match (d.download)(at.cast(), src, bytes, queue) {
                    0 => (d.stream_synchronize)(queue),
                    code => code,
                }
            }
        })
    }

    /// Puts a copy on a stream; of nothing, there is nothing to do.
    fn queue(
        &self,
        stream: Stream,
        bytes: usize,
        put: impl FnOnce(&Driver, CUstream) -> Code,
    ) -> Result<(), Error> {
        self.healthy()?;
        let queue = self.stream(stream)?;
        if bytes == 0 {
            return Ok(());
        }
        let code = self.with(|d| put(d, queue));
        self.outcome(code, || {
            format!("a copy of {bytes} bytes, or a kernel before it")
        })
    }

    pub(in super::super) fn record(&self, stream: Stream) -> CudaEvent {
        self.mark(stream, DISABLE_TIMING)
    }

    /// A point of a stream whose time is taken.
    pub(in super::super) fn timed(&self, stream: Stream) -> CudaEvent {
        self.mark(stream, 0)
    }

    fn mark(&self, stream: Stream, flags: u32) -> CudaEvent {
        let Ok(queue) = self.stream(stream) else {
            return CudaEvent(None);
        };
        let mut event = core::ptr::null_mut();
        // SAFETY: a handle is written, and recorded on a stream of the same device.
        let code = self.with(|d| unsafe {
            match (d.event_create)(&raw mut event, flags) {
                0 => (d.event_record)(event, queue),
                code => code,
            }
        });
        let device = self.driver.clone();
        let point = (!event.is_null()).then(|| Arc::new(Point { event, device }));
        match self.outcome(code, || "an event".into()) {
            Ok(()) => CudaEvent(point),
            Err(_) => CudaEvent(None),
        }
    }

    pub(in super::super) fn wait(&self, stream: Stream, event: &CudaEvent) {
        let (Ok(queue), Some(point)) = (self.stream(stream), &event.0) else {
            return;
        };
        // SAFETY: both live.
        let code = self.with(|d| unsafe { (d.stream_wait)(queue, point.event, 0) });
        let _ = self.outcome(code, || "a wait for an event".into());
    }

    pub(in super::super) fn fresh_stream(&self) -> Stream {
        let mut state = self.state();
        state.fresh += 1;
        Stream(state.fresh - 1)
    }

    /// The driver's own stream; 0 where it can not be had, of which the next call tells.
    pub(in super::super) fn stream_handle(&self, stream: Stream) -> u64 {
        self.stream(stream)
            .map_or(0, |handle| handle as usize as u64)
    }

    pub(in super::super) fn enter(&self) -> Result<(), Error> {
        // SAFETY: the context lives as long as this.
        let code = unsafe { (self.driver.context_set)(self.context) };
        self.outcome(code, || "the thread's device".into())
    }

    pub(in super::super) fn idle(&self, stream: Stream) -> Result<bool, Error> {
        self.healthy()?;
        let queue = self.stream(stream)?;
        // SAFETY: a stream of this device.
        match self.with(|d| unsafe { (d.stream_query)(queue) }) {
            NOT_READY => Ok(false),
            code => self
                .outcome(code, || "a kernel that was asked after".into())
                .map(|()| true),
        }
    }

    pub(in super::super) fn synchronize(&self, stream: Stream) -> Result<(), Error> {
        self.healthy()?;
        let queue = self.stream(stream)?;
        // SAFETY: a stream of this device.
        let code = self.with(|d| unsafe { (d.stream_synchronize)(queue) });
        self.outcome(code, || "a kernel that was waited for".to_string())
    }
}
