//! Device memory on the wire: a `Communicator` over any transport serves a [`Gpu`], through the host
//! unless the transport reaches the device (`near.rs`), as NCCL does and [`SameDevice`].
//!
//! ```text
//! through the host
//! blocking   download (waits for compute) -> collective on host memory -> upload on compute
//! started    comm waits for `after`, download -> worker -> wait -> upload on comm -> queue waits
//! ```
//!
//! What travels is downloaded and what came is uploaded, no more: the parts of a gathered buffer
//! that others give need not have been written.

mod near;
mod same_device;

use core::mem::replace;
use core::ops::Range;
use std::string::ToString;
use std::sync::{Mutex, PoisonError};
use std::vec;
use std::vec::Vec;

use quintet_collectives::plan::CollectiveShape as Shape;
use quintet_collectives::{Communicator, Error, Pending as Started, ReduceOp, Transport};

pub use near::collective;
pub use same_device::{Board, RANKS, SameDevice, explain};

use super::{Collectives, Pending, Wire};
use crate::backend::slice_mut;
use crate::gpu::{Gpu, GpuBuf, GpuMut, GpuRef};
use crate::launch::Launch;
use crate::{Backend, Data, Queue};

/// A buffer with its elements on the host while they travel.
#[derive(Debug)]
pub struct Staged<L: Launch, T: Data> {
    device: GpuBuf<L, T>,
    host: Vec<T>,
}

impl<L: Launch, T: Data> AsRef<[T]> for Staged<L, T> {
    fn as_ref(&self) -> &[T] {
        &self.host
    }
}

impl<L: Launch, T: Data> AsMut<[T]> for Staged<L, T> {
    fn as_mut(&mut self) -> &mut [T] {
        &mut self.host
    }
}

/// A started collective of a [`Gpu`].
pub struct Staging<L: Launch, T: Data> {
    gpu: Gpu<L>,
    /// What of the buffer comes.
    comes: Range<usize>,
    state: Mutex<State<L, T>>,
}

enum State<L: Launch, T: Data> {
    Travelling(Started<Staged<L, T>>),
    /// On the device.
    Near(Started<near::Kept<L, T>>),
    Arrived(GpuBuf<L, T>, L::Event),
    Failed(Error),
}

impl<L: Launch, T: Wire> Staging<L, T> {
    /// Downloads `goes` of `buf` once `after` has happened, and lets `start` send it off.
    fn start(
        buf: GpuBuf<L, T>,
        [goes, comes]: [Range<usize>; 2],
        after: Option<L::Event>,
        start: impl FnOnce(Staged<L, T>) -> Result<Started<Staged<L, T>>, Error>,
    ) -> Result<Self, Error> {
        let gpu = buf.gpu();
        let mut host = vec![T::zeroed(); Gpu::len(Gpu::whole(&buf))];
        // Without an event what compute has done so far with the buffer comes before.
        gpu.wait(
            Queue::Comm,
            &after.clone().unwrap_or_else(|| gpu.record(Queue::Compute)),
        );
        if after.is_some() {
            let part = Gpu::slice(Gpu::whole(&buf), goes.clone());
            host[goes].copy_from_slice(&part.read(Queue::Comm).map_err(reading)?);
        }
        let started = start(Staged { device: buf, host })?;
        let state = Mutex::new(State::Travelling(started));
        Ok(Self { gpu, comes, state })
    }

    /// A collective that was started on the device.
    fn near(gpu: Gpu<L>, comes: Range<usize>, started: Started<near::Kept<L, T>>) -> Self {
        let state = Mutex::new(State::Near(started));
        Self { gpu, comes, state }
    }

    /// Waits on the host and puts what came on the communication queue.
    fn arrive(&self, state: State<L, T>) -> State<L, T> {
        let started = match state {
            State::Travelling(started) => started,
            State::Near(started) => {
                return match started.wait().and_then(|kept| kept.arrived(&self.comes)) {
                    Ok((buf, event)) => State::Arrived(buf, event),
                    Err(error) => State::Failed(error),
                };
            }
            over => return over,
        };
        let arrived = started.wait().and_then(|mut staged| {
            let part =
                slice_mut::<Gpu<L>, T>(Gpu::whole_mut(&mut staged.device), self.comes.clone());
            part.write(Queue::Comm, &staged.host[self.comes.clone()])
                .map_err(writing)?;
            Ok(staged.device)
        });
        match arrived {
            Ok(buf) => State::Arrived(buf, self.gpu.record(Queue::Comm)),
            Err(error) => State::Failed(error),
        }
    }

    fn take(&self, instead: State<L, T>) -> State<L, T> {
        replace(
            &mut *self.state.lock().unwrap_or_else(PoisonError::into_inner),
            instead,
        )
    }

    fn finish(self) -> Result<(Gpu<L>, GpuBuf<L, T>, L::Event), Error> {
        match self.arrive(self.take(State::Failed(twice()))) {
            State::Arrived(buf, event) => Ok((self.gpu, buf, event)),
            State::Failed(error) => Err(error),
            State::Travelling(_) | State::Near(_) => Err(twice()),
        }
    }
}

impl<L: Launch, T: Wire> Pending<Gpu<L>, T> for Staging<L, T> {
    /// Waits on the host for the collective: what travels is host memory.
    fn event(&self) -> L::Event {
        let state = self.arrive(self.take(State::Failed(twice())));
        let event = match &state {
            State::Arrived(_, event) => event.clone(),
            // The wait tells the failure; there is nothing else to wait for.
            _ => self.gpu.record(Queue::Comm),
        };
        self.take(state);
        event
    }

    fn wait_on(self, backend: &Gpu<L>, queue: Queue) -> Result<GpuBuf<L, T>, Error> {
        let (_, buf, event) = self.finish()?;
        backend.wait(queue, &event);
        Ok(buf)
    }

    fn wait_host(self) -> Result<GpuBuf<L, T>, Error> {
        let (gpu, buf, event) = self.finish()?;
        // What is put on compute later comes after it too.
        gpu.wait(Queue::Compute, &event);
        Ok(buf)
    }
}

fn twice() -> Error {
    Error::Gate("a started collective is waited for by two threads".into())
}

fn reading(error: crate::Error) -> Error {
    let reason = error.to_string();
    Error::System {
        what: "read device memory",
        reason,
    }
}

fn writing(error: crate::Error) -> Error {
    let reason = error.to_string();
    Error::System {
        what: "write device memory",
        reason,
    }
}

fn down<L: Launch, T: Data>(view: GpuRef<'_, L, T>) -> Result<Vec<T>, Error> {
    view.read(Queue::Compute).map_err(reading)
}

fn up<L: Launch, T: Data>(host: &[T], view: &GpuMut<'_, L, T>) -> Result<(), Error> {
    view.write(Queue::Compute, host).map_err(writing)
}

/// Where rank `rank`'s part lies in a buffer of all.
fn part(counts: &[usize], rank: usize) -> Range<usize> {
    let first = counts.iter().take(rank).sum();
    first..first + counts.get(rank).copied().unwrap_or(0)
}

impl<L: Launch, W: Transport + Send + 'static> Collectives<Gpu<L>> for Communicator<W> {
    type Pending<T: Wire> = Staging<L, T>;

    fn rank(&self) -> usize {
        self.rank()
    }

    fn world(&self) -> usize {
        self.world()
    }

    fn all_reduce<T: Wire>(&self, buf: GpuMut<'_, L, T>, op: ReduceOp) -> Result<(), Error> {
        if near::reached(self, &Gpu::as_ref(&buf).gpu()) {
            let x = Gpu::as_ref(&buf);
            let shape = Shape::AllReduce { len: Gpu::len(x) };
            return near::perform(self, shape, op, x, &buf);
        }
        let mut host = down(Gpu::as_ref(&buf))?;
        self.all_reduce(&mut host, op)?;
        up(&host, &buf)
    }

    fn all_gather<T: Wire>(
        &self,
        mine: GpuRef<'_, L, T>,
        counts: &[usize],
        all: GpuMut<'_, L, T>,
    ) -> Result<(), Error> {
        if near::reached(self, &mine.gpu()) {
            let counts = counts.to_vec();
            return near::perform(self, Shape::AllGather { counts }, ReduceOp::Sum, mine, &all);
        }
        let mut host = vec![T::zeroed(); Gpu::len(Gpu::as_ref(&all))];
        self.all_gather_v(&down(mine)?, &mut host, counts)?;
        up(&host, &all)
    }

    fn reduce_scatter<T: Wire>(
        &self,
        all: GpuRef<'_, L, T>,
        counts: &[usize],
        mine: GpuMut<'_, L, T>,
        op: ReduceOp,
    ) -> Result<(), Error> {
        if near::reached(self, &all.gpu()) {
            let counts = counts.to_vec();
            return near::perform(self, Shape::ReduceScatter { counts }, op, all, &mine);
        }
        let mut host = vec![T::zeroed(); Gpu::len(Gpu::as_ref(&mine))];
        self.reduce_scatter_v(&down(all)?, &mut host, counts, op)?;
        up(&host, &mine)
    }

    fn all_to_all<T: Wire>(
        &self,
        send: GpuRef<'_, L, T>,
        send_counts: &[usize],
        recv: GpuMut<'_, L, T>,
        recv_counts: &[usize],
    ) -> Result<(), Error> {
        if near::reached(self, &send.gpu()) {
            let (there, back) = (send_counts.to_vec(), recv_counts.to_vec());
            let shape = Shape::AllToAllV {
                send: there,
                recv: back,
            };
            return near::perform(self, shape, ReduceOp::Sum, send, &recv);
        }
        let mut host = vec![T::zeroed(); Gpu::len(Gpu::as_ref(&recv))];
        self.all_to_all_v(&down(send)?, send_counts, &mut host, recv_counts)?;
        up(&host, &recv)
    }

    fn broadcast<T: Wire>(&self, buf: GpuMut<'_, L, T>, root: usize) -> Result<(), Error> {
        if near::reached(self, &Gpu::as_ref(&buf).gpu()) {
            let x = Gpu::as_ref(&buf);
            let len = Gpu::len(x);
            // The others' need not have been written.
            let x = Gpu::slice(x, 0..if self.rank() == root { len } else { 0 });
            let shape = Shape::Broadcast { len, root };
            return near::perform(self, shape, ReduceOp::Sum, x, &buf);
        }
        let mut host = match self.rank() == root {
            true => down(Gpu::as_ref(&buf))?,
            false => vec![T::zeroed(); Gpu::len(Gpu::as_ref(&buf))],
        };
        self.broadcast(&mut host, root)?;
        up(&host, &buf)
    }

    fn start_all_reduce<T: Wire>(
        &self,
        buf: GpuBuf<L, T>,
        op: ReduceOp,
        after: L::Event,
    ) -> Result<Staging<L, T>, Error> {
        let all = 0..Gpu::len(Gpu::whole(&buf));
        if near::reached(self, &buf.gpu()) {
            let shape = Shape::AllReduce { len: all.end };
            return near::start(self, buf, (shape, op), [all.clone(), all], after);
        }
        Staging::start(buf, [all.clone(), all], Some(after), |buf| {
            self.start_all_reduce(buf, op, ())
        })
    }

    fn start_reduce_scatter<T: Wire>(
        &self,
        buf: GpuBuf<L, T>,
        counts: &[usize],
        op: ReduceOp,
        after: L::Event,
    ) -> Result<Staging<L, T>, Error> {
        let all = 0..Gpu::len(Gpu::whole(&buf));
        let mine = part(counts, self.rank());
        if near::reached(self, &buf.gpu()) {
            let counts = counts.to_vec();
            let shape = Shape::ReduceScatter { counts };
            return near::start(self, buf, (shape, op), [all, mine], after);
        }
        Staging::start(buf, [all, mine], Some(after), |buf| {
            self.start_reduce_scatter_v(buf, counts, op, ())
        })
    }

    fn start_all_gather<T: Wire>(
        &self,
        buf: GpuBuf<L, T>,
        counts: &[usize],
        after: L::Event,
    ) -> Result<Staging<L, T>, Error> {
        let all = 0..Gpu::len(Gpu::whole(&buf));
        let mine = part(counts, self.rank());
        if near::reached(self, &buf.gpu()) {
            let counts = counts.to_vec();
            let shape = Shape::AllGather { counts };
            return near::start(self, buf, (shape, ReduceOp::Sum), [mine, all], after);
        }
        Staging::start(buf, [mine, all], Some(after), |buf| {
            self.start_all_gather_v(buf, counts, ())
        })
    }

    fn start_send<T: Wire>(
        &self,
        to: usize,
        tag: u64,
        buf: GpuBuf<L, T>,
        after: L::Event,
    ) -> Result<Staging<L, T>, Error> {
        if near::reached(self, &buf.gpu()) {
            return near::message(self, buf, (to, tag), true, Some(after));
        }
        let all = 0..Gpu::len(Gpu::whole(&buf));
        Staging::start(buf, [all, 0..0], Some(after), |buf| {
            self.start_send(buf, to, tag, ())
        })
    }

    fn start_recv<T: Wire>(
        &self,
        from: usize,
        tag: u64,
        buf: GpuBuf<L, T>,
    ) -> Result<Staging<L, T>, Error> {
        if near::reached(self, &buf.gpu()) {
            return near::message(self, buf, (from, tag), false, None);
        }
        let all = 0..Gpu::len(Gpu::whole(&buf));
        Staging::start(buf, [0..0, all], None, |buf| {
            self.start_recv(buf, from, tag, ())
        })
    }
}
