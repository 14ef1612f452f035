//! Collectives where the elements lie: the transport reaches the device.
//!
//! ```text
//! blocking   on the compute stream, which has what comes before it; back on the host once it is over
//! started    on a stream of the communicator's own: waits for `after`, then the collective
//! messages   on a stream of each peer and direction: what sends waits on the device for what receives
//! ```

#![allow(unsafe_code)] // promises about device memory

use core::ops::Range;
use std::sync::Arc;

use quintet_collectives::plan::CollectiveShape as Shape;
use quintet_collectives::transport::device::{Lane, Span};
use quintet_collectives::{Communicator, Error, ReduceOp, Transport};

use super::{Staging, Wire, reading, writing};
use crate::gpu::{Gpu, GpuBuf, GpuMut, GpuRef};
use crate::launch::{Launch, Libraries, Stream};
use crate::{Backend, Data, Queue};

/// A stream, and what the work that is put there next waits for and reads.
struct GpuLane<L: Launch> {
    gpu: Gpu<L>,
    stream: Stream,
    after: Option<L::Event>,
    reads: (u64, usize),
}

impl<L: Launch> GpuLane<L> {
    fn libraries(&self) -> Result<&dyn Libraries, Error> {
        libraries(self.gpu.launcher())
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
        if let Some(after) = &self.after {
            self.gpu.launcher().wait(self.stream, after);
        }
        let libraries = self.libraries()?;
        libraries.lend(self.stream, self.reads).map_err(reading)
    }

    fn idle(&self) -> Result<bool, Error> {
        self.libraries()?.idle(self.stream).map_err(reading)
    }
}

/// Address and bytes of a view.
fn bytes<L: Launch, T: Data>(view: GpuRef<'_, L, T>) -> (u64, usize) {
    (view.ptr(), Gpu::len(view) * size_of::<T>())
}

/// What came by `stream` is there.
pub(super) fn filled<L: Launch, T: Data>(
    view: &GpuMut<'_, L, T>,
    stream: Stream,
) -> Result<(), Error> {
    let view = Gpu::as_ref(view);
    let gpu = view.gpu();
    let libraries = libraries(gpu.launcher())?;
    libraries.filled(stream, bytes(view)).map_err(writing)
}

/// Performs a collective; the input is a view of its own or a part of the output.
pub(super) fn perform<L: Launch, W: Transport + Send + 'static, T: Wire>(
    comm: &Communicator<W>,
    shape: Shape,
    op: ReduceOp,
    input: GpuRef<'_, L, T>,
    output: &GpuMut<'_, L, T>,
) -> Result<(), Error> {
    let gpu = input.gpu();
    let stream = gpu.stream_of(Queue::Compute);
    // SAFETY: the views are borrowed until the call returns, and then it is over.
    let spans = [input, Gpu::as_ref(output)]
        .map(|view| unsafe { Span::new::<T>(view.ptr(), Gpu::len(view)) });
    let lane = GpuLane {
        gpu,
        stream,
        after: None,
        reads: bytes(input),
    };
    comm.on_device(shape, op, spans, Arc::new(lane))?;
    filled(output, stream)
}

/// Starts a collective of which `goes` and `comes` are the input and the output in `buf`.
pub(super) fn start<L: Launch, W: Transport + Send + 'static, T: Wire>(
    comm: &Communicator<W>,
    buf: GpuBuf<L, T>,
    (shape, op): (Shape, ReduceOp),
    [goes, comes]: [Range<usize>; 2],
    after: L::Event,
) -> Result<Staging<L, T>, Error> {
    let (lane, stream) = lane(&buf, (comm.number(), 0), &goes, after)?;
    let spans = [part(&buf, &goes), part(&buf, &comes)];
    let gpu = buf.gpu();
    let started = comm.start_on_device(buf, shape, op, spans, Arc::new(lane))?;
    Ok(Staging::near(gpu, comes, started, stream))
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
    let (lane, stream) = lane(&buf, key, &goes, after)?;
    let (span, lane, to) = (part(&buf, &all), Arc::new(lane), (peer, tag));
    let started = match out {
        true => comm.start_send_on_device(buf, span, to, lane)?,
        false => comm.start_recv_on_device(buf, span, to, lane)?,
    };
    Ok(Staging::near(gpu, comes, started, stream))
}

fn lane<L: Launch, T: Data>(
    buf: &GpuBuf<L, T>,
    key: (u64, u64),
    goes: &Range<usize>,
    after: L::Event,
) -> Result<(GpuLane<L>, Stream), Error> {
    let gpu = buf.gpu();
    let stream = gpu.lane(key, libraries(gpu.launcher())?);
    let lane = GpuLane {
        gpu,
        stream,
        after: Some(after),
        reads: bytes(Gpu::slice(Gpu::whole(buf), goes.clone())),
    };
    Ok((lane, stream))
}

/// Part of a buffer that the operation will own.
fn part<L: Launch, T: Wire>(buf: &GpuBuf<L, T>, range: &Range<usize>) -> Span {
    let view = Gpu::slice(Gpu::whole(buf), range.clone());
    // SAFETY: the operation owns the buffer until it is over, so nobody else has a view of it.
    unsafe { Span::new::<T>(view.ptr(), Gpu::len(view)) }
}
