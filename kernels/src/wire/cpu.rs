//! Host memory on the wire: a `Communicator` over any transport serves the [`Cpu`].
//!
//! Blocking calls run where they are called. Started ones hand their [`CpuBuf`] to the
//! communicator's worker, which begins once the event `after` has happened. The compute queue is
//! the calling thread, so letting it wait for a collective means waiting here.

use quintet_collectives::{Communicator, Error, Pending as Started, ReduceOp, Transport};

use super::{Collectives, Pending, Wire};
use crate::{Cpu, CpuBuf, CpuEvent, Data, Queue};

impl<T: Data> Pending<Cpu, T> for Started<CpuBuf<T>> {
    fn event(&self) -> CpuEvent {
        self.done().into()
    }

    fn wait_on(self, _: &Cpu, _: Queue) -> Result<CpuBuf<T>, Error> {
        self.wait()
    }

    fn wait_host(self) -> Result<CpuBuf<T>, Error> {
        self.wait()
    }
}

// Each method has an inherent namesake or a neighbour with its counts spelled out; inherent
// methods come first, so the calls below are not to themselves.
impl<L: Transport + Send + 'static> Collectives<Cpu> for Communicator<L> {
    type Pending<T: Wire> = Started<CpuBuf<T>>;

    fn rank(&self) -> usize {
        self.rank()
    }

    fn world(&self) -> usize {
        self.world()
    }

    fn all_reduce<T: Wire>(&self, buf: &mut [T], op: ReduceOp) -> Result<(), Error> {
        self.all_reduce(buf, op)
    }

    fn all_gather<T: Wire>(
        &self,
        mine: &[T],
        counts: &[usize],
        all: &mut [T],
    ) -> Result<(), Error> {
        self.all_gather_v(mine, all, counts)
    }

    fn reduce_scatter<T: Wire>(
        &self,
        all: &[T],
        counts: &[usize],
        mine: &mut [T],
        op: ReduceOp,
    ) -> Result<(), Error> {
        self.reduce_scatter_v(all, mine, counts, op)
    }

    fn all_to_all<T: Wire>(
        &self,
        send: &[T],
        send_counts: &[usize],
        recv: &mut [T],
        recv_counts: &[usize],
    ) -> Result<(), Error> {
        self.all_to_all_v(send, send_counts, recv, recv_counts)
    }

    fn broadcast<T: Wire>(&self, buf: &mut [T], root: usize) -> Result<(), Error> {
        self.broadcast(buf, root)
    }

    fn start_all_reduce<T: Wire>(
        &self,
        buf: CpuBuf<T>,
        op: ReduceOp,
        after: CpuEvent,
    ) -> Result<Started<CpuBuf<T>>, Error> {
        self.start_all_reduce(buf, op, after)
    }

    fn start_reduce_scatter<T: Wire>(
        &self,
        buf: CpuBuf<T>,
        counts: &[usize],
        op: ReduceOp,
        after: CpuEvent,
    ) -> Result<Started<CpuBuf<T>>, Error> {
        self.start_reduce_scatter_v(buf, counts, op, after)
    }

    fn start_all_gather<T: Wire>(
        &self,
        buf: CpuBuf<T>,
        counts: &[usize],
        after: CpuEvent,
    ) -> Result<Started<CpuBuf<T>>, Error> {
        self.start_all_gather_v(buf, counts, after)
    }

    fn start_send<T: Wire>(
        &self,
        to: usize,
        tag: u64,
        buf: CpuBuf<T>,
        after: CpuEvent,
    ) -> Result<Started<CpuBuf<T>>, Error> {
        self.start_send(buf, to, tag, after)
    }

    fn start_recv<T: Wire>(
        &self,
        from: usize,
        tag: u64,
        buf: CpuBuf<T>,
    ) -> Result<Started<CpuBuf<T>>, Error> {
        self.start_recv(buf, from, tag, ())
    }
}
