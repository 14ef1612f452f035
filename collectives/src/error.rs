//! The one error of this crate: who, what, what was expected and what came.

use alloc::{boxed::Box, string::String};
use core::time::Duration;

use crate::transport::Call;

/// What can go wrong in a collective, a mesh or a transport.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The layout asked for cannot exist; the sentence names the nearest valid choices.
    #[error("{0}")]
    Layout(String),
    /// A placement move that has no meaning or loses information.
    #[error("no move from {from} to {to}: {reason}")]
    Move {
        /// Placement before.
        from: String,
        /// Placement after.
        to: String,
        /// Why it is refused.
        reason: &'static str,
    },
    /// A buffer's length does not fit the operation.
    #[error("{op}: {what} holds {got} elements where {expected} are needed")]
    Len {
        /// The operation called.
        op: &'static str,
        /// Which argument.
        what: &'static str,
        /// Elements needed.
        expected: usize,
        /// Elements given.
        got: usize,
    },
    /// A plan that this algorithm does not offer, or counts that do not fit the world.
    #[error("{op} by {algorithm} over {world} ranks: {reason}")]
    Plan {
        /// The operation asked for.
        op: &'static str,
        /// The algorithm asked for.
        algorithm: &'static str,
        /// Ranks in the group.
        world: usize,
        /// Why it is refused.
        reason: String,
    },
    /// An override string that says nothing possible.
    #[error("override {text:?}: {reason}")]
    Override {
        /// The string.
        text: String,
        /// What is wrong with it.
        reason: String,
    },
    /// A text of constants that cannot be read.
    #[error("constants, line {line}: {reason}")]
    Constants {
        /// The line, from 1.
        line: usize,
        /// What is wrong with it.
        reason: String,
    },
    /// Two ranks of a group called different collectives at the same place in their order of
    /// calls. Every rank of the group gets this error, those that exchange nothing included.
    #[error(
        "group {group}, call {sequence}: rank {first} called {first_call}, rank {second} called {second_call}"
    )]
    Mismatch {
        /// Name of the group.
        group: String,
        /// The number of the call on this group, from 0.
        sequence: u64,
        /// Global rank whose call was known first.
        first: usize,
        /// What it called.
        first_call: Box<Call>,
        /// Global rank whose call differs.
        second: usize,
        /// What it called.
        second_call: Box<Call>,
    },
    /// A message came that is not what this rank expects from that peer.
    #[error(
        "group {group}: rank {rank} expects {expected} from rank {peer} in {op}, which sent {got}"
    )]
    Message {
        /// Name of the group.
        group: String,
        /// Global rank that received.
        rank: usize,
        /// Global rank that sent.
        peer: usize,
        /// The operation.
        op: &'static str,
        /// Length and type expected.
        expected: String,
        /// Length and type received.
        got: String,
    },
    /// A rank returned, failed or died while others still needed it.
    #[error("rank {rank} was lost: {reason}")]
    PeerLost {
        /// Global rank that was lost.
        rank: usize,
        /// What is known of it.
        reason: String,
    },
    /// A rank's thread panicked.
    #[error("rank {rank} panicked: {message}")]
    Panicked {
        /// Global rank.
        rank: usize,
        /// What the panic said.
        message: String,
    },
    /// A wait passed its deadline.
    #[error(
        "group {group}, rank {rank}: {op} (call {sequence}) gave up after {waited:?} waiting for {what}"
    )]
    Timeout {
        /// Name of the group.
        group: String,
        /// Global rank that waited.
        rank: usize,
        /// The operation.
        op: &'static str,
        /// The number of the call on this group, from 0; of a message, its tag.
        sequence: u64,
        /// Global rank it waited for; none where it waited for its own gate.
        peer: Option<usize>,
        /// What it waited for, in words.
        what: String,
        /// How long it waited.
        waited: Duration,
    },
    /// Somebody called `abort`.
    #[error("aborted by rank {rank}")]
    Aborted {
        /// Global rank that called it.
        rank: usize,
    },
    /// This process is a fork of the one that made the group, and has none of its threads.
    #[error(
        "group {group} belongs to the process that this one was forked from, which alone may use it"
    )]
    Forked {
        /// Name of the group.
        group: String,
    },
    /// No rank can move: each waits for another.
    #[error("deadlock: {cycle}")]
    Deadlock {
        /// The cycle of ranks and what each waits for.
        cycle: String,
    },
    /// A plan does not do what it says.
    #[error("plan {plan}: {fault}")]
    Unsound {
        /// Which plan.
        plan: String,
        /// The first fault found.
        fault: String,
    },
    /// The operating system refused something this crate needs, such as a thread.
    #[error("cannot {what}: {reason}")]
    System {
        /// What was tried.
        what: &'static str,
        /// What the system said.
        reason: String,
    },
    /// The ranks of a run could not find each other.
    #[error("{0}")]
    Rendezvous(String),
    /// The environment says nothing, too little or two things about this rank's place.
    #[error("{0}")]
    Environment(String),
    /// A library that devices are reached by is missing, too old, incomplete or at odds with the driver.
    #[error("{0}")]
    Library(String),
    /// NCCL answered with an error.
    #[error("group {group}, rank {rank}: {call} says {said} ({code}){last}")]
    Nccl {
        /// Name of the group.
        group: String,
        /// Global rank that was told.
        rank: usize,
        /// The call that said so.
        call: &'static str,
        /// The number of the error in nccl.h.
        code: i32,
        /// What `ncclGetErrorString` has for it.
        said: String,
        /// What `ncclGetLastError` adds: nothing, or a colon and its text.
        last: String,
    },
    /// What an operation was to wait for failed, or a handle was used against its contract.
    #[error("{0}")]
    Gate(String),
}

#[cfg(feature = "std")]
impl Error {
    /// What a group is told that fails of this, after what went wrong `first` in its world, which it may be itself: a rank
    /// that is lost may be lost because of what went wrong before.
    pub(crate) fn after(self, first: &mut Option<Self>) -> Self {
        match self {
            Self::PeerLost { .. } => first.get_or_insert(self).clone(),
            other => {
                first.get_or_insert_with(|| other.clone());
                other
            }
        }
    }
}

/// `Result` with this crate's [`Error`].
pub type Result<T, E = Error> = core::result::Result<T, E>;
