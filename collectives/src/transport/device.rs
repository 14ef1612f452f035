//! Collectives on memory that this processor may not touch (`std`): what a transport offers that
//! reaches a device's memory by itself.
//!
//! ```text
//! Communicator   announce, all have called alike?   over the transport, as for any collective
//!      |
//!      v
//! Device         begin(job on spans, lane) -> poll ... -> true        once the lane's work is over
//! ```
//!
//! A [`Span`] is an address, a length and a type; a [`Lane`] is where the work is put, such as a
//! CUDA stream. NCCL is one such device (module and feature `nccl`); ranks that share a GPU are another (quintet-kernels).

use std::{fmt, sync::Arc, vec::Vec};

use crate::{DType, Element, Error, ReduceOp, Result, plan::CollectiveShape};

/// Elements of one type in a device's memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Span {
    address: u64,
    len: usize,
    dtype: DType,
}

impl Span {
    /// The `len` elements from `address` on.
    ///
    /// # Safety
    /// They are memory that the device of the communicator, which is given the span, may read and, where the
    /// operation writes it, write; they stay so until the operation is over, and nobody else writes what it
    /// reads, or touches what it writes, meanwhile. An operation is over when its call returns or its
    /// [`crate::Pending`] is complete, well or not.
    #[must_use]
    #[allow(unsafe_code)] // a promise, not an act: nothing is done with the address here
    pub unsafe fn new<E: Element>(address: u64, len: usize) -> Self {
        Self {
            address,
            len,
            dtype: E::DTYPE,
        }
    }

    /// The address of the first element.
    #[must_use]
    pub fn address(self) -> u64 {
        self.address
    }

    /// Elements.
    #[must_use]
    pub fn len(self) -> usize {
        self.len
    }

    /// Whether there are none.
    #[must_use]
    pub fn is_empty(self) -> bool {
        self.len == 0
    }

    /// Their type.
    #[must_use]
    pub fn dtype(self) -> DType {
        self.dtype
    }

    /// The address of the element at `at`, which need not be there.
    #[must_use]
    pub fn at(self, at: usize) -> u64 {
        self.address.wrapping_add((at * self.dtype.bytes()) as u64)
    }

    /// Part of it, clamped to it.
    #[must_use]
    pub fn part(self, range: core::ops::Range<usize>) -> Self {
        let end = range.end.min(self.len);
        let start = range.start.min(end);
        Self {
            address: self.at(start),
            len: end - start,
            ..self
        }
    }
}

/// Where a device's work is put and in what order it is done: a stream.
pub trait Lane: Send + Sync {
    /// The stream's handle as the device's libraries take it; 0 for the default one.
    fn handle(&self) -> u64;

    /// Makes the device the calling thread's.
    ///
    /// # Errors
    /// [`Error::System`] where the device refuses.
    fn enter(&self) -> Result<()>;

    /// An operation is about to put its work there: what that waits for is put before it.
    ///
    /// # Errors
    /// [`Error::System`] where the device refuses.
    fn begin(&self) -> Result<()> {
        Ok(())
    }

    /// Whether all that was put on it so far is over.
    ///
    /// # Errors
    /// [`Error::System`] where some of it failed.
    fn idle(&self) -> Result<bool>;

    /// The lane itself, for a device that knows what it is.
    fn as_any(&self) -> Option<&dyn core::any::Any> {
        None
    }
}

/// A collective of this rank on device memory.
#[derive(Clone)]
pub struct Job {
    /// The operation with its counts.
    pub shape: CollectiveShape,
    /// The fold, where it has one.
    pub redop: ReduceOp,
    /// What is read; as long as the shape says.
    pub input: Span,
    /// What is written; as long as the shape says. Where the input lies in it the operation is in place.
    pub output: Span,
    /// Where its work is put.
    pub lane: Arc<dyn Lane>,
}

/// A message of this rank from or to device memory.
#[derive(Clone)]
pub struct Parcel {
    /// The other end, a place in the group.
    pub peer: usize,
    /// Whether this rank sends it.
    pub out: bool,
    /// The memory.
    pub span: Span,
    /// Where its work is put.
    pub lane: Arc<dyn Lane>,
}

/// What performs collectives on device memory: one rank's end of a group.
pub trait Device {
    /// Begins a collective; every rank of the group has called it alike, and the one before is over.
    ///
    /// # Errors
    /// Where the device refuses.
    fn begin(&mut self, job: Job) -> Result<()>;

    /// Goes on with the collective that was begun; true once it is over.
    ///
    /// # Errors
    /// Where it failed.
    fn poll(&mut self) -> Result<bool>;

    /// Begins a message; its peer begins the other end of it. Of messages from one rank to another both
    /// begin the same one first, and one after the other.
    ///
    /// # Errors
    /// Where the device refuses.
    fn begin_message(&mut self, parcel: Parcel) -> Result<()>;

    /// Goes on with the message to (`out`) or from this peer; true once it is over.
    ///
    /// # Errors
    /// Where it failed.
    fn poll_message(&mut self, peer: usize, out: bool) -> Result<bool>;

    /// Whether a message to (`out`) or from this peer is under way.
    fn has_message(&self, peer: usize, out: bool) -> bool;

    /// Ends all that is under way, for good: once this returns nobody touches its memory any more, and
    /// everything begun later fails with `cause`.
    fn abort(&mut self, cause: &Error);

    /// What the peer has said of its messages to come and nobody has taken up, oldest first.
    fn said(&mut self, peer: usize) -> &mut Vec<Said>;
}

/// A sender's word that it begins a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Said {
    /// Its tag.
    pub tag: u64,
    /// Its type, as [`DType`] counts.
    pub dtype: DType,
    /// Its elements.
    pub len: usize,
}

impl fmt::Debug for Job {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Job")
            .field("shape", &self.shape)
            .field("redop", &self.redop)
            .field("input", &self.input)
            .field("output", &self.output)
            .finish_non_exhaustive()
    }
}

impl fmt::Debug for Parcel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Parcel")
            .field("peer", &self.peer)
            .field("out", &self.out)
            .field("span", &self.span)
            .finish_non_exhaustive()
    }
}
