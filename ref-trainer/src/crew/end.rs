//! A rank's end of a group, whether the rank is a thread or a process: one type, so that the trainer is compiled once for both.

use std::sync::Arc;
use std::time::Duration;

use quintet_collectives::transport::buffer::Buffer;
use quintet_collectives::transport::direct::Sharing;
use quintet_collectives::transport::{Call, Control, Message, Sent, Tag, Transport, Wait};
use quintet_collectives::{DType, Element, Local, Result, Sockets};

/// What carries the messages of a rank.
#[derive(Debug)]
pub enum End {
    /// Of one that is a thread.
    Thread(Local),
    /// Of one that is a process.
    Process(Sockets),
}

macro_rules! each {
    ($this:ident, $end:ident => $call:expr) => {
        match $this {
            End::Thread($end) => $call,
            End::Process($end) => $call,
        }
    };
}

impl Transport for End {
    fn rank(&self) -> usize {
        each!(self, end => end.rank())
    }

    fn world(&self) -> usize {
        each!(self, end => end.world())
    }

    fn global(&self, rank: usize) -> usize {
        each!(self, end => end.global(rank))
    }

    fn name(&self) -> &str {
        each!(self, end => end.name())
    }

    fn try_send(&mut self, to: usize, message: Message) -> Result<Option<Message>> {
        each!(self, end => end.try_send(to, message))
    }

    fn send_bytes(&mut self, to: usize, tag: Tag, dtype: DType, bytes: &[u8]) -> Result<bool> {
        each!(self, end => end.send_bytes(to, tag, dtype, bytes))
    }

    fn send_along(&mut self, to: usize, tag: Tag, dtype: DType, bytes: &[u8]) -> Result<Sent> {
        each!(self, end => end.send_along(to, tag, dtype, bytes))
    }

    fn send_alone(&mut self, to: usize, bytes: &[u8]) {
        each!(self, end => end.send_alone(to, bytes));
    }

    fn recv_along(
        &mut self,
        from: usize,
        tag: Tag,
        of: (DType, usize),
        room: &mut [u8],
    ) -> Result<Option<usize>> {
        each!(self, end => end.recv_along(from, tag, of, room))
    }

    fn recycle(&mut self, storage: Vec<u64>) -> Option<Vec<u64>> {
        each!(self, end => end.recycle(storage))
    }

    fn try_recv(&mut self, from: usize, tag: Tag) -> Result<Option<Message>> {
        each!(self, end => end.try_recv(from, tag))
    }

    fn announce(&mut self, call: &Call) -> Result<()> {
        each!(self, end => end.announce(call))
    }

    fn confirmed(&mut self, sequence: u64) -> Result<bool> {
        each!(self, end => end.confirmed(sequence))
    }

    fn healthy(&mut self) -> Result<()> {
        each!(self, end => end.healthy())
    }

    fn absent(&self, sequence: u64) -> Option<usize> {
        each!(self, end => end.absent(sequence))
    }

    fn direct(&mut self) -> Sharing<'_> {
        each!(self, end => end.direct())
    }

    fn allocate<E: Element>(&self, len: usize) -> Result<Buffer<E>> {
        each!(self, end => end.allocate(len))
    }

    fn park(&mut self, wait: &Wait, timeout: Duration) {
        each!(self, end => end.park(wait, timeout));
    }

    fn subgroup(&self, members: &[usize], name: &str) -> Result<Self> {
        Ok(match self {
            Self::Thread(end) => Self::Thread(end.subgroup(members, name)?),
            Self::Process(end) => Self::Process(end.subgroup(members, name)?),
        })
    }

    fn control(&self) -> Arc<dyn Control> {
        each!(self, end => end.control())
    }
}
