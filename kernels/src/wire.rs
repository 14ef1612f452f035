//! The seam between devices and collectives (feature `wire`): what a layer may ask of the ranks
//! around it, on any device.
//!
//! A `Communicator` over any transport implements [`Collectives`] for the CPU and, under feature `gpu`, for GPUs:
//! through the host, or where the transport reaches the device on it (NCCL, `SameDevice`).
//! Blocking calls borrow views. Started calls own their buffer: nothing borrowed is ever in
//! flight, and the buffer comes back from [`Pending::wait_on`] or [`Pending::wait_host`].

#[cfg(feature = "std")]
mod cpu;
#[cfg(feature = "gpu")]
mod gpu;

#[cfg(feature = "gpu")]
pub use gpu::{Board, RANKS, SameDevice, collective, explain};
use quintet_collectives::{Element, Error as WireError, ReduceOp};

use crate::{Backend, Data, Float, Queue};

/// Data that may travel: plain bytes with a collective dtype.
pub trait Wire: Data + Element {}
impl<T: Data + Element> Wire for T {}

/// A float that layers compute with and that may travel, as may its accumulation type.
pub trait Scalar: Float<Acc: Wire> + Wire {}
impl<T: Float<Acc: Wire> + Wire> Scalar for T {}

/// A started collective.
pub trait Pending<B: Backend, T: Data>: Send {
    /// The point at which the buffer may be read.
    fn event(&self) -> B::Event;

    /// Lets `queue` wait for the collective and gives the buffer back at once (a CPU, whose
    /// compute queue is the calling thread, waits here).
    ///
    /// # Errors
    /// What the collective failed with.
    fn wait_on(self, backend: &B, queue: Queue) -> Result<B::Buf<T>, WireError>;

    /// Waits on the host.
    ///
    /// # Errors
    /// What the collective failed with.
    fn wait_host(self) -> Result<B::Buf<T>, WireError>;
}

/// The ranks of one group, as layers and sharding see them.
///
/// `counts` are elements per rank, in rank order. The forms on one buffer (`start_*`) hold the
/// whole length, and rank r's part lies at the sum of the counts before r.
pub trait Collectives<B: Backend>: Send + Sync {
    /// What a started call returns.
    type Pending<T: Wire>: Pending<B, T>;

    /// My place in the group.
    fn rank(&self) -> usize;
    /// Ranks in the group.
    fn world(&self) -> usize;

    /// Reduces in place; every rank ends with the same bits.
    ///
    /// # Errors
    /// What the transport or a mismatching peer reports.
    fn all_reduce<T: Wire>(&self, buf: B::Mut<'_, T>, op: ReduceOp) -> Result<(), WireError>;

    /// `all` <- every rank's `mine`, in rank order.
    ///
    /// # Errors
    /// As [`Collectives::all_reduce`].
    fn all_gather<T: Wire>(
        &self,
        mine: B::Ref<'_, T>,
        counts: &[usize],
        all: B::Mut<'_, T>,
    ) -> Result<(), WireError>;

    /// `mine` <- my part of the reduction of every rank's `all`.
    ///
    /// # Errors
    /// As [`Collectives::all_reduce`].
    fn reduce_scatter<T: Wire>(
        &self,
        all: B::Ref<'_, T>,
        counts: &[usize],
        mine: B::Mut<'_, T>,
        op: ReduceOp,
    ) -> Result<(), WireError>;

    /// Part i of `send` goes to rank i; part i of `recv` comes from rank i.
    ///
    /// # Errors
    /// As [`Collectives::all_reduce`].
    fn all_to_all<T: Wire>(
        &self,
        send: B::Ref<'_, T>,
        send_counts: &[usize],
        recv: B::Mut<'_, T>,
        recv_counts: &[usize],
    ) -> Result<(), WireError>;

    /// Everyone's `buf` <- the root's.
    ///
    /// # Errors
    /// As [`Collectives::all_reduce`].
    fn broadcast<T: Wire>(&self, buf: B::Mut<'_, T>, root: usize) -> Result<(), WireError>;

    /// Starts an all-reduce once `after` has happened.
    ///
    /// # Errors
    /// Where the call itself is refused.
    fn start_all_reduce<T: Wire>(
        &self,
        buf: B::Buf<T>,
        op: ReduceOp,
        after: B::Event,
    ) -> Result<Self::Pending<T>, WireError>;

    /// Starts a reduce-scatter in place: my part of the buffer is reduced, the rest undefined.
    ///
    /// # Errors
    /// Where the call itself is refused.
    fn start_reduce_scatter<T: Wire>(
        &self,
        buf: B::Buf<T>,
        counts: &[usize],
        op: ReduceOp,
        after: B::Event,
    ) -> Result<Self::Pending<T>, WireError>;

    /// Starts an all-gather in place: my part is given, the rest is filled.
    ///
    /// # Errors
    /// Where the call itself is refused.
    fn start_all_gather<T: Wire>(
        &self,
        buf: B::Buf<T>,
        counts: &[usize],
        after: B::Event,
    ) -> Result<Self::Pending<T>, WireError>;

    /// Starts sending the buffer to `to`; the buffer comes back once it may be written again.
    ///
    /// # Errors
    /// Where the call itself is refused.
    fn start_send<T: Wire>(
        &self,
        to: usize,
        tag: u64,
        buf: B::Buf<T>,
        after: B::Event,
    ) -> Result<Self::Pending<T>, WireError>;

    /// Starts receiving into the buffer from `from`.
    ///
    /// # Errors
    /// Where the call itself is refused.
    fn start_recv<T: Wire>(
        &self,
        from: usize,
        tag: u64,
        buf: B::Buf<T>,
    ) -> Result<Self::Pending<T>, WireError>;
}
