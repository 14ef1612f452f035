//! Who hears of operations.
//!
//! ```text
//! all_reduce --- on this thread: made -> begun -> over
//! start_send --- made;  on the worker:   begun -> over      then the Pending is complete
//! ```
//!
//! Traces hear of what is over; the flight recorder ([`crate::Recorder`]) of everything.

use std::{boxed::Box, sync::Arc, sync::OnceLock, time::Instant, vec::Vec};

use super::act::Report;
use crate::{
    DType, Error, ProcessGroup, Result,
    transport::{Site, Transport},
};

/// Hears of each operation of a communicator, and of the groups made from it. Without one, an operation costs one
/// look at whether there is one.
///
/// `begun` and `over` are called on the thread that performs the operation, with the group locked: they must be
/// quick and must not call the communicator.
pub trait Observer: Send + Sync {
    /// An operation is asked for, on the caller's thread. What this returns comes back with what becomes of it.
    fn made(&self, _call: &Made<'_>) -> u64 {
        0
    }

    /// It has begun, a collective as this number of its group. `ticket` is what `made` returned.
    fn begun(&self, _ticket: u64, _number: Option<u64>) {}

    /// It is over, well or not.
    fn over(&self, operation: &Observed<'_>);
}

/// An operation that one rank asks for.
#[derive(Debug, Clone, Copy)]
pub struct Made<'a> {
    /// Name of the group.
    pub group: &'a str,
    /// Its members, global, in group order.
    pub ranks: &'a [usize],
    /// The operation's name, as in `all_reduce`, `send`, `recv`.
    pub op: &'static str,
    /// Type of the elements.
    pub dtype: DType,
    /// Elements.
    pub len: usize,
    /// Of a message, the other end (global rank) and the tag.
    pub peer: Option<(usize, u64)>,
    /// Where in the program it was called, if that is known.
    pub site: Option<Site>,
}

/// An operation that is over, as one rank saw it.
#[derive(Debug, Clone, Copy)]
pub struct Observed<'a> {
    /// What [`Observer::made`] returned.
    pub ticket: u64,
    /// Name of the group.
    pub group: &'a str,
    /// Ranks in it.
    pub world: usize,
    /// Global rank of who tells.
    pub rank: usize,
    /// Its name, as in `all_reduce`, `send`, `recv`.
    pub op: &'static str,
    /// Of a collective its number in the group, of a message its tag.
    pub number: u64,
    /// Of a message the other end, as a global rank.
    pub peer: Option<usize>,
    /// Payload bytes that this rank sent in it.
    pub bytes: u64,
    /// When it began: for a started one, once its gate was open.
    pub began: Instant,
    /// When it was over.
    pub ended: Instant,
    /// Whether it was started, and so ran beside the caller.
    pub started: bool,
    /// What it ended with, if not well.
    pub error: Option<&'a Error>,
}

/// What is told of a call when it is made; its peer is a place in the group.
#[derive(Debug, Clone, Copy)]
pub(super) struct Subject {
    pub(super) op: &'static str,
    pub(super) dtype: DType,
    pub(super) len: usize,
    pub(super) peer: Option<(usize, u64)>,
    pub(super) site: Option<Site>,
}

/// The observers of a communicator, in the order in which they came.
#[derive(Default)]
pub(super) struct Observers(OnceLock<Box<Node>>);

struct Node {
    observer: Arc<dyn Observer>,
    next: Observers,
}

impl Observers {
    /// One more.
    pub(super) fn add(&self, observer: Arc<dyn Observer>) {
        let mut node = Box::new(Node {
            observer,
            next: Self::default(),
        });
        let mut end = self;
        loop {
            match end.0.set(node) {
                Ok(()) => return,
                Err(back) => node = back,
            }
            if let Some(taken) = end.0.get() {
                end = &taken.next;
            }
        }
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &Arc<dyn Observer>> {
        core::iter::successors(self.0.get(), |node| node.next.0.get()).map(|node| &node.observer)
    }

    /// A call is made; nothing where nobody hears.
    pub(super) fn made(
        &self,
        group: &str,
        ranks: &ProcessGroup,
        subject: impl FnOnce() -> Subject,
    ) -> Hearing {
        let Some(_) = self.0.get() else {
            return Hearing(None);
        };
        let (subject, ranks) = (subject(), ranks.ranks());
        let call = Made {
            group,
            ranks,
            op: subject.op,
            dtype: subject.dtype,
            len: subject.len,
            peer: subject.peer.map(|(place, tag)| (ranks[place], tag)),
            site: subject.site,
        };
        let heard: Vec<_> = self
            .iter()
            .map(|observer| (observer.clone(), observer.made(&call)))
            .collect();
        Hearing(Some(Box::new(Heard {
            heard,
            began: None,
            begun: false,
            sent: 0,
        })))
    }
}

/// A call that somebody hears of, or nothing.
pub(super) struct Hearing(Option<Box<Heard>>);

struct Heard {
    heard: Vec<(Arc<dyn Observer>, u64)>,
    began: Option<Instant>,
    begun: bool,
    /// Payload bytes sent so far.
    sent: u64,
}

impl Hearing {
    /// It is about to be polled.
    pub(super) fn polling(&mut self) {
        if let Some(heard) = &mut self.0 {
            heard.began.get_or_insert_with(Instant::now);
        }
    }

    /// It was polled, and sent so many bytes in it.
    pub(super) fn polled(&mut self, sent: u64, report: impl FnOnce() -> Report) {
        let Some(heard) = &mut self.0 else { return };
        heard.sent += sent;
        if !core::mem::replace(&mut heard.begun, true) {
            let report = report();
            let number = report.called.then_some(report.sequence);
            for (observer, ticket) in &heard.heard {
                observer.begun(*ticket, number);
            }
        }
    }

    /// It is over; `message`: it was no collective.
    pub(super) fn over<T: Transport>(
        &mut self,
        outcome: &Result<()>,
        (started, message): (bool, bool),
        report: impl FnOnce() -> Report,
        transport: &T,
    ) {
        let Some(heard) = self.0.take() else { return };
        let (report, ended) = (report(), Instant::now());
        for (observer, ticket) in &heard.heard {
            observer.over(&Observed {
                ticket: *ticket,
                group: transport.name(),
                world: transport.world(),
                rank: transport.global(transport.rank()),
                op: report.op,
                number: report.sequence,
                peer: report
                    .peer
                    .filter(|_| message)
                    .map(|peer| transport.global(peer)),
                bytes: heard.sent,
                began: heard.began.unwrap_or(ended),
                ended,
                started,
                error: outcome.as_ref().err(),
            });
        }
    }
}
