//! Messages from and to a device's memory, where the transport reaches it.
//!
//! ```text
//! receiver --ask(tag, type, len)--> sender --say(tag, type, len)--> receiver
//!               the sender begins              the receiver begins, in the order said
//! ```
//!
//! Messages on a device have no tags, so the two ends agree on their order first: a sender begins once
//! it was asked, a receiver in the order in which the sender has begun. The words go as messages
//! with tags of their own, and are not counted.

use std::{format, string::String, sync::Arc, vec::Vec};

use super::{
    Communicator,
    act::{Act, Report, Track, Yields},
    far::{RESERVED, device, other},
    observer::Subject,
};
use crate::{
    DType, Error, Pending, Result,
    performer::Link,
    transport::{
        Message, Site, Tag, Transport, Wait,
        device::{Lane, Parcel, Said, Span},
    },
};

/// What a receiver asks for is tagged so, and with the message's tag.
const ASK: u64 = 1 << 63;

/// What a sender says.
const SAY: u64 = 1 << 62;

impl<T: Transport + Send + 'static> Communicator<T> {
    /// Starts to send device memory to rank `to`; `keep`, which owns it, comes back at the end.
    ///
    /// # Errors
    /// Those of [`Communicator::start_send`]; [`Error::Layout`] for a tag of 2^61 and above, or where no
    /// device is reached.
    #[track_caller]
    pub fn start_send_on_device<K: Send + 'static>(
        &self,
        keep: K,
        span: Span,
        (to, tag): (usize, u64),
        lane: Arc<dyn Lane>,
    ) -> Result<Pending<K>> {
        self.start_message(keep, span, (to, tag), true, lane)
    }

    /// Starts to receive into device memory from rank `from`.
    ///
    /// # Errors
    /// Those of [`Communicator::start_send_on_device`].
    #[track_caller]
    pub fn start_recv_on_device<K: Send + 'static>(
        &self,
        keep: K,
        span: Span,
        (from, tag): (usize, u64),
        lane: Arc<dyn Lane>,
    ) -> Result<Pending<K>> {
        self.start_message(keep, span, (from, tag), false, lane)
    }

    #[track_caller]
    fn start_message<K: Send + 'static>(
        &self,
        keep: K,
        span: Span,
        (peer, tag): (usize, u64),
        out: bool,
        lane: Arc<dyn Lane>,
    ) -> Result<Pending<K>> {
        self.reached()?;
        self.peer(peer)?;
        if tag >= RESERVED {
            return Err(Error::Layout(format!(
                "tag {tag} is none of device memory, whose tags are below 2^61"
            )));
        }
        let parcel = Parcel {
            peer,
            out,
            span,
            lane,
        };
        let act = FarMessage {
            keep,
            parcel,
            tag,
            site: Site::here(),
            state: Trip::Before,
        };
        self.core.start(act, (), self.deadline)
    }
}

/// A message from or to device memory; `K` owns the memory.
#[derive(Debug)]
struct FarMessage<K> {
    keep: K,
    parcel: Parcel,
    tag: u64,
    site: Site,
    state: Trip,
}

#[derive(Debug)]
enum Trip {
    Before,
    /// There is no room yet for this word of mine; whether a message follows it.
    Held(Message, bool),
    /// My word is out (a receiver's) or awaited (a sender's).
    Waiting,
    Begun,
    Over,
}

impl<K> FarMessage<K> {
    fn step<T: Transport>(&mut self, link: &mut Link<T>) -> Result<bool> {
        loop {
            self.state = match core::mem::replace(&mut self.state, Trip::Over) {
                Trip::Before if self.parcel.out => Trip::Waiting,
                Trip::Before => Trip::Held(self.word(ASK | self.tag), true),
                Trip::Held(word, follows) => {
                    match link.transport.try_send(self.parcel.peer, word)? {
                        Some(refused) => {
                            self.state = Trip::Held(refused, follows);
                            return Ok(false);
                        }
                        None if !follows => Trip::Over,
                        None if self.parcel.out => self.begin(link)?,
                        None => Trip::Waiting,
                    }
                }
                Trip::Waiting => match self.heard(link)? {
                    Some(next) => next,
                    None => {
                        self.state = Trip::Waiting;
                        return Ok(false);
                    }
                },
                Trip::Begun => {
                    let Parcel { peer, out, .. } = self.parcel;
                    link.transport.healthy()?;
                    if !device(link)?.poll_message(peer, out)? {
                        self.state = Trip::Begun;
                        return Ok(false);
                    }
                    Trip::Over
                }
                Trip::Over => return Ok(true),
            };
        }
    }

    /// What follows from the other end's word, once it is there and it is my turn.
    fn heard<T: Transport>(&mut self, link: &mut Link<T>) -> Result<Option<Trip>> {
        let Parcel {
            peer, out, span, ..
        } = self.parcel;
        if device(link)?.has_message(peer, out) {
            return Ok(None);
        }
        let mine = (span.dtype() as i64, span.len() as i64);
        if out {
            let tag = Tag::User(ASK | self.tag);
            let Some(ask) = link.try_recv::<i64>(peer, tag, 3, "send")? else {
                return Ok(None);
            };
            // Of another type or length nothing follows: the receiver, told of mine, says so.
            let [_, dtype, len] = *ask.elements::<i64>() else {
                return Ok(None);
            };
            return Ok(Some(Trip::Held(self.word(SAY), (dtype, len) == mine)));
        }
        while let Some(say) = link.try_recv::<i64>(peer, Tag::User(SAY), 3, "recv")? {
            if let [tag, dtype, len] = *say.elements::<i64>() {
                let (tag, len) = (tag as u64, len as usize);
                let dtype = DType::ALL.into_iter().find(|d| *d as i64 == dtype);
                let dtype = dtype.unwrap_or(DType::U8);
                device(link)?.said(peer).push(Said { tag, dtype, len });
            }
        }
        let said = device(link)?.said(peer);
        let Some(first) = said.first().copied().filter(|first| first.tag == self.tag) else {
            return Ok(None);
        };
        said.remove(0);
        if (first.dtype, first.len) != (span.dtype(), span.len()) {
            let expected = format!("{} x {}", span.dtype(), span.len());
            let got = format!("{} x {}", first.dtype, first.len);
            return Err(other(link, peer, "recv", expected, got));
        }
        self.begin(link).map(Some)
    }

    fn begin<T: Transport>(&self, link: &mut Link<T>) -> Result<Trip> {
        let Parcel {
            peer, out, span, ..
        } = self.parcel;
        if out {
            link.count(peer, (span.len() * span.dtype().bytes()) as u64, 1);
        }
        if span.is_empty() {
            return Ok(Trip::Over);
        }
        device(link)?.begin_message(self.parcel.clone())?;
        Ok(Trip::Begun)
    }

    fn word(&self, tag: u64) -> Message {
        let span = self.parcel.span;
        let word = [self.tag as i64, span.dtype() as i64, span.len() as i64];
        Message::new(Tag::User(tag), &word, Vec::new())
    }
}

impl<K, T: Transport> Act<T> for FarMessage<K> {
    fn poll(&mut self, link: &mut Link<T>, _: &mut u64) -> Result<bool> {
        let outcome = self.step(link);
        if let Err(cause) = &outcome
            && !matches!(cause, Error::Message { .. })
        {
            self.give_up(link, cause);
        }
        outcome
    }

    /// The other end may have begun and would wait for ever; nor may the device touch the memory again.
    fn give_up(&mut self, link: &mut Link<T>, cause: &Error) {
        if let Some(device) = link.transport.device() {
            device.abort(cause);
        }
        link.transport.control().poison(cause.clone());
    }

    fn wait(&self, wait: &mut Wait) {
        let Parcel { peer, out, .. } = self.parcel;
        match &self.state {
            Trip::Held(..) => wait.send.push(peer),
            Trip::Waiting => {
                let tag = if out { ASK | self.tag } else { SAY };
                wait.recv.push((peer, Tag::User(tag)));
            }
            Trip::Before | Trip::Begun | Trip::Over => {}
        }
    }

    fn report(&self) -> Report {
        let what = match (&self.state, self.parcel.out) {
            (Trip::Begun, _) => "the device",
            (Trip::Held(..), _) => "room for a word to it",
            (_, true) => "it to receive",
            (_, false) => "a message from it",
        };
        Report {
            op: if self.parcel.out { "send" } else { "recv" },
            sequence: self.tag,
            peer: Some(self.parcel.peer),
            what: String::from(what),
            called: false,
            all: false,
        }
    }

    fn track(&self) -> Track {
        match self.parcel.out {
            true => Track::Send(self.parcel.peer, self.tag),
            false => Track::Recv(self.parcel.peer, self.tag),
        }
    }

    fn subject(&self) -> Subject {
        let Parcel {
            peer, out, span, ..
        } = self.parcel;
        Subject {
            op: if out { "send" } else { "recv" },
            dtype: span.dtype(),
            len: span.len(),
            peer: Some((peer, self.tag)),
            site: Some(self.site),
        }
    }
}

impl<K: Send + 'static> Yields for FarMessage<K> {
    type Output = K;
    fn output(self) -> K {
        self.keep
    }
}
