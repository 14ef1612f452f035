//! Collectives where the elements lie: the transport reaches the device.
//!
//! ```text
//! blocking   on the compute stream, which has what comes before it; back on the host once it is over
//! started    on a stream of the communicator's own: waits for `after`, then the collective
//! messages   on a stream of each peer and direction: what sends waits on the device for what receives
//! ```
//!
//! A library (NCCL) works on the memory behind the device's back, and is lent it; ranks that share a
//! device (`same_device.rs`) put copies and kernels on the stream as any op does.

#![allow(unsafe_code)] // promises about device memory

use core::any::Any;
use core::ops::Range;
use core::sync::atomic::{AtomicBool, Ordering};
use std::sync::Arc;

use quintet_collectives::plan::CollectiveShape as Shape;
use quintet_collectives::transport::device::{Lane, Span};
use quintet_collectives::{Communicator, Error, ReduceOp, Transport};

use super::{Staging, Wire, reading, writing};
use crate::backend::slice_mut;
use crate::gpu::{Gpu, GpuBuf, GpuMut, GpuRef};
use crate::launch::{Launch, Libraries, Stream};
use crate::{Backend, Data, Queue};

/// A stream, and what the work that is put there next waits for and reads.
pub(super) struct GpuLane<L: Launch> {
    gpu: Gpu<L>,
    stream: Stream,
    after: Option<L::Event>,
    reads: (u64, usize),
    /// Whether a library was called with it.
    lent: AtomicBool,
}

impl<L: Launch> GpuLane<L> {
    pub(super) fn launcher(&self) -> &L {
        self.gpu.launcher()
    }

    pub(super) fn stream(&self) -> Stream {
        self.stream
    }

    /// Puts on the stream what comes before the work.
    pub(super) fn open(&self) {
        if let Some(after) = &self.after {
            self.launcher().wait(self.stream, after);
        }
    }

    fn libraries(&self) -> Result<&dyn Libraries, Error> {
        libraries(self.gpu.launcher())
    }

    /// What came by the stream is there, in `view`.
    fn filled<T: Data>(&self, view: &GpuMut<'_, L, T>) -> Result<(), Error> {
        if !self.lent.load(Ordering::Relaxed) {
            return Ok(());
        }
        let written = bytes(Gpu::as_ref(view));
        let libraries = self.libraries()?;
        libraries.filled(self.stream, written).map_err(writing)
    }
}

/// A buffer in which something is under way on a lane.
pub(super) struct Kept<L: Launch, T: Data> {
    buf: Option<GpuBuf<L, T>>,
    lane: Arc<GpuLane<L>>,
}

impl<L: Launch, T: Data> Kept<L, T> {
    /// The buffer, once `comes` of it has come, and the point of the lane's stream at which it has.
    pub(super) fn arrived(
        mut self,
        comes: &Range<usize>,
    ) -> Result<(GpuBuf<L, T>, L::Event), Error> {
        let mut buf = self.buf.take().ok_or_else(super::twice)?;
        let part = slice_mut::<Gpu<L>, T>(Gpu::whole_mut(&mut buf), comes.clone());
        self.lane.filled(&part)?;
        Ok((buf, self.lane.launcher().record(self.lane.stream)))
    }
}

impl<L: Launch, T: Data> Drop for Kept<L, T> {
    /// Nobody has waited: the memory is freed on compute, after what is under way.
    fn drop(&mut self) {
        if self.buf.is_some() {
            let event = self.lane.launcher().record(self.lane.stream);
            self.lane.gpu.wait(Queue::Compute, &event);
        }
    }
}

/// What libraries need of the device.
fn libraries<L: Launch>(launcher: &L) -> Result<&dyn Libraries, Error> {
    launcher
        .libraries()
        .ok_or_else(|| Error::Layout("no library reaches this device".into()))
}

/// Whether collectives are performed where the elements lie: both sides can.
pub(super) fn reached<L: Launch, W: Transport + Send + 'static>(
    comm: &Communicator<W>,
    gpu: &Gpu<L>,
) -> bool {
    comm.reaches_device() && gpu.launcher().libraries().is_some()
}

impl<L: Launch> Lane for GpuLane<L> {
    fn handle(&self) -> u64 {
        self.libraries()
            .map_or(0, |libraries| libraries.stream_handle(self.stream))
    }

    fn enter(&self) -> Result<(), Error> {
        self.libraries()?.enter().map_err(reading)
    }

    fn begin(&self) -> Result<(), Error> {
        self.open();
        self.lent.store(true, Ordering::Relaxed);
        let libraries = self.libraries()?;
        libraries.lend(self.stream, self.reads).map_err(reading)
    }

    fn idle(&self) -> Result<bool, Error> {
        self.libraries()?.idle(self.stream).map_err(reading)
    }

    fn as_any(&self) -> Option<&dyn Any> {
        Some(self)
    }
}

/// Address and bytes of a view.
fn bytes<L: Launch, T: Data>(view: GpuRef<'_, L, T>) -> (u64, usize) {
    (view.ptr(), Gpu::len(view) * size_of::<T>())
}

/// Performs a collective; the input is a view of its own or a part of the output.
pub(super) fn perform<L: Launch, W: Transport + Send + 'static, T: Wire>(
    comm: &Communicator<W>,
    shape: Shape,
    op: ReduceOp,
    input: GpuRef<'_, L, T>,
    output: &GpuMut<'_, L, T>,
) -> Result<(), Error> {
    // SAFETY: the views are borrowed until the call returns, and then it is over.
    let spans = [input, Gpu::as_ref(output)]
        .map(|view| unsafe { Span::new::<T>(view.ptr(), Gpu::len(view)) });
    on_compute(comm, (shape, op), spans, input)?.filled(output)
}

/// Performs any collective where the elements lie: of `buf` the ranges `goes` and `comes` are the input and the output,
/// apart or in place as in [`Communicator::on_device`]. A root's alone count where only it reads or writes.
///
/// # Errors
/// Those of [`Communicator::on_device`]; [`Error::Layout`] where the transport reaches no device.
pub fn collective<L: Launch, W: Transport + Send + 'static, T: Wire>(
    comm: &Communicator<W>,
    (shape, op): (Shape, ReduceOp),
    buf: &mut GpuBuf<L, T>,
    [goes, comes]: [Range<usize>; 2],
) -> Result<(), Error> {
    let spans = [part(buf, &goes), part(buf, &comes)];
    let input = Gpu::slice(Gpu::whole(buf), goes);
    let lane = on_compute(comm, (shape, op), spans, input)?;
    lane.filled(&slice_mut::<Gpu<L>, T>(Gpu::whole_mut(buf), comes))
}

/// Performs a collective after what compute has had put on its stream so far.
fn on_compute<L: Launch, W: Transport + Send + 'static, T: Wire>(
    comm: &Communicator<W>,
    (shape, op): (Shape, ReduceOp),
    spans: [Span; 2],
    input: GpuRef<'_, L, T>,
) -> Result<Arc<GpuLane<L>>, Error> {
    let gpu = input.gpu();
    let stream = gpu.stream_of(Queue::Compute);
    let lane = GpuLane {
        gpu,
        stream,
        after: None,
        reads: bytes(input),
        lent: AtomicBool::new(false),
    };
    let lane = Arc::new(lane);
    comm.on_device(shape, op, spans, lane.clone())?;
    Ok(lane)
}

/// Starts a collective of which `goes` and `comes` are the input and the output in `buf`.
pub(super) fn start<L: Launch, W: Transport + Send + 'static, T: Wire>(
    comm: &Communicator<W>,
    buf: GpuBuf<L, T>,
    (shape, op): (Shape, ReduceOp),
    [goes, comes]: [Range<usize>; 2],
    after: L::Event,
) -> Result<Staging<L, T>, Error> {
    let lane = lane(&buf, (comm.number(), 0), &goes, after)?;
    let spans = [part(&buf, &goes), part(&buf, &comes)];
    let gpu = buf.gpu();
    let started = comm.start_on_device(kept(buf, &lane), shape, op, spans, lane)?;
    Ok(Staging::near(gpu, comes, started))
}

/// Starts to send all of `buf`, or to receive into it.
pub(super) fn message<L: Launch, W: Transport + Send + 'static, T: Wire>(
    comm: &Communicator<W>,
    buf: GpuBuf<L, T>,
    (peer, tag): (usize, u64),
    out: bool,
    after: Option<L::Event>,
) -> Result<Staging<L, T>, Error> {
    let (all, gpu) = (0..Gpu::len(Gpu::whole(&buf)), buf.gpu());
    let (goes, comes) = if out {
        (all.clone(), 0..0)
    } else {
        (0..0, all.clone())
    };
    // Without an event what compute has done so far with the buffer comes before.
    let after = after.unwrap_or_else(|| gpu.record(Queue::Compute));
    let key = (comm.number(), 1 + 2 * peer as u64 + u64::from(out));
    let lane = lane(&buf, key, &goes, after)?;
    let (span, to) = (part(&buf, &all), (peer, tag));
    let kept = kept(buf, &lane);
    let started = match out {
        true => comm.start_send_on_device(kept, span, to, lane)?,
        false => comm.start_recv_on_device(kept, span, to, lane)?,
    };
    Ok(Staging::near(gpu, comes, started))
}

pub(super) fn lane<L: Launch, T: Data>(
    buf: &GpuBuf<L, T>,
    key: (u64, u64),
    goes: &Range<usize>,
    after: L::Event,
) -> Result<Arc<GpuLane<L>>, Error> {
    let gpu = buf.gpu();
    let stream = gpu.lane(key, libraries(gpu.launcher())?);
    Ok(Arc::new(GpuLane {
        gpu,
        stream,
        after: Some(after),
        reads: bytes(Gpu::slice(Gpu::whole(buf), goes.clone())),
        lent: AtomicBool::new(false),
    }))
}

fn kept<L: Launch, T: Data>(buf: GpuBuf<L, T>, lane: &Arc<GpuLane<L>>) -> Kept<L, T> {
    let (buf, lane) = (Some(buf), lane.clone());
    Kept { buf, lane }
}

/// Part of a buffer that the operation owns, or has to itself.
pub(super) fn part<L: Launch, T: Wire>(buf: &GpuBuf<L, T>, range: &Range<usize>) -> Span {
    let view = Gpu::slice(Gpu::whole(buf), range.clone());
    // SAFETY: the operation owns the buffer, or borrows it to be written, until it is over: nobody else has a view of it.
    unsafe { Span::new::<T>(view.ptr(), Gpu::len(view)) }
}
