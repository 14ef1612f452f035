//! An operation under way, whoever drives it: this thread or the worker.
//!
//! ```text
//! Act      poll -> false -> wait -> park -> poll ... -> true
//!  |- Borrowed    a collective on the caller's slices
//!  |- Owned       a collective on a buffer it owns
//!  |- Sending, Receiving, Both
//!  |- Far (`far.rs`), FarMessage (`parcel.rs`)   on a device's memory
//! ```

use std::{
    boxed::Box,
    string::{String, ToString},
    sync::Arc,
    vec::Vec,
};

use super::{known::Known, observer::Subject};
use crate::{
    Element, Error, Result,
    performer::{Link, Performer, View},
    transport::{
        Message, Site, Tag, Transport, Wait,
        direct::{Memory as Addresses, Pinned, Sharing, Task},
    },
};

/// An operation that goes as far as it can and then says what it waits for.
pub(super) trait Act<T> {
    /// True once done.
    fn poll(&mut self, link: &mut Link<T>, sequence: &mut u64) -> Result<bool>;
    /// Adds what it waits for.
    fn wait(&self, wait: &mut Wait);
    /// Name, number, peer waited for (place in the group) and what for.
    fn report(&self) -> Report;
    /// What it may not overtake.
    fn track(&self) -> Track;
    /// What observers are told of it; its peer is a place in the group.
    fn subject(&self) -> Subject;
    /// It has begun and ends with `cause` without being polled again.
    fn give_up(&mut self, _link: &mut Link<T>, _cause: &Error) {}
}

#[derive(Debug)]
pub(super) struct Report {
    pub(super) op: &'static str,
    pub(super) sequence: u64,
    pub(super) peer: Option<usize>,
    pub(super) what: String,
    /// Whether it is a collective that this rank has announced.
    pub(super) called: bool,
    /// Whether every rank is known to have made the call: who is late now is late with its part.
    pub(super) all: bool,
}

/// Acts of one track go one after another; those of different tracks go side by side.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Track {
    Collective,
    Send(usize, u64),
    Recv(usize, u64),
    Alone,
}

/// A collective without its memory.
#[derive(Debug)]
pub(super) struct Run {
    pub(super) known: Arc<Known>,
    pub(super) site: Site,
    /// Its number in the group, once it has one.
    pub(super) sequence: Option<u64>,
    pub(super) way: Way,
}

/// How a collective is performed.
#[derive(Debug, Default)]
pub(super) enum Way {
    /// It has not begun.
    #[default]
    Open,
    /// By the plan's messages.
    Messages(Box<Performer>),
    /// In shared memory; and whether every rank is known to have made the call.
    Shared(Task, bool),
}

impl Run {
    pub(super) fn new(known: Arc<Known>, site: Site) -> Self {
        Self {
            known,
            site,
            sequence: None,
            way: Way::Open,
        }
    }

    /// Goes on with what holds the addresses of its memory already; none where it has not begun or
    /// needs a view.
    fn resume<E: Element, T: Transport>(&mut self, link: &mut Link<T>) -> Result<Option<bool>> {
        let Way::Shared(task, called) = &mut self.way else {
            return Ok(None);
        };
        let (transport, known) = (&mut link.transport, &self.known);
        // The others are mostly about to come.
        if !*called && let Sharing::Ready(end) = transport.direct() {
            end.glance();
        }
        if !transport.confirmed(self.sequence.unwrap_or(0))? {
            if let Sharing::Ready(end) = transport.direct() {
                end.settle();
            }
            return Ok(Some(false));
        }
        *called = true;
        let Sharing::Ready(end) = transport.direct() else {
            return Ok(Some(false));
        };
        match end.perform::<E>(&known.outline, known.redop(), task) {
            Ok(false) => return Ok(Some(false)),
            Ok(true) => end.count(known.bytes()),
            Err(rank) => {
                return Err(Error::Message {
                    group: transport.name().to_string(),
                    rank: transport.global(transport.rank()),
                    peer: transport.global(rank),
                    op: known.operation().name(),
                    expected: "a buffer as long as the call needs".to_string(),
                    got: "a shorter one".to_string(),
                });
            }
        }
        self.count(link);
        Ok(Some(true))
    }

    /// Counts as sent what the plan sends.
    pub(super) fn count<T: Transport>(&self, link: &mut Link<T>) {
        for sent in self.known.sent() {
            link.count(sent.to, sent.bytes, sent.messages);
        }
    }

    fn poll<E: Element, T: Transport>(
        &mut self,
        link: &mut Link<T>,
        sequence: &mut u64,
        view: &mut View<'_, E>,
    ) -> Result<bool> {
        if let Way::Messages(performer) = &mut self.way {
            return performer.poll(link, view);
        }
        let known = &self.known;
        let task = match link.transport.direct() {
            Sharing::NotYet => return link.transport.healthy().map(|()| false),
            Sharing::Ready(end) if known.outline.direct() => {
                let (input, output) = view.parts();
                let memory = Addresses::new(input, output);
                Some(end.prepare(&known.outline, known.redop(), memory, *sequence))
            }
            _ => None,
        };
        let call = known.call(*sequence, self.site);
        self.sequence = Some(*sequence);
        *sequence += 1;
        match task {
            Some(task) => {
                link.transport.announce(&call)?;
                self.way = Way::Shared(task, false);
                self.resume::<E, T>(link).map(|over| over == Some(true))
            }
            None => {
                self.way = Way::Messages(Box::new(Performer::begin(known.plan(), call, link)?));
                self.poll(link, sequence, view)
            }
        }
    }

    /// What it has begun to send goes on without it.
    fn give_up<E: Element, T: Transport>(&mut self, link: &mut Link<T>, view: &View<'_, E>) {
        if let Way::Messages(performer) = &mut self.way {
            performer.give_up(link, view);
        }
    }

    fn wait(&self, wait: &mut Wait) {
        match &self.way {
            Way::Open => {}
            Way::Messages(performer) => performer.wait(wait),
            Way::Shared(..) => wait.confirm = self.sequence,
        }
    }

    pub(super) fn subject(&self) -> Subject {
        Subject {
            op: self.known.operation().name(),
            dtype: self.known.dtype(),
            len: self.known.plan().shape().len(self.known.plan().world()),
            peer: None,
            site: Some(self.site),
        }
    }

    fn report(&self) -> Report {
        let (peer, what) = match &self.way {
            Way::Messages(performer) => performer.blocked_on(),
            Way::Shared(..) => (None, String::from("every rank of the group to do its part")),
            Way::Open => (None, String::from("its start")),
        };
        Report {
            op: self.known.operation().name(),
            sequence: self.sequence.unwrap_or(0),
            peer,
            what,
            called: self.sequence.is_some(),
            all: matches!(self.way, Way::Shared(_, true)),
        }
    }
}

/// A collective on the caller's memory.
#[derive(Debug)]
pub(super) struct Borrowed<'a, E> {
    /// Dropped first: it sees to it that nobody uses the view's memory any more.
    pub(super) run: Run,
    pub(super) view: View<'a, E>,
}

impl<E: Element, T: Transport> Act<T> for Borrowed<'_, E> {
    fn poll(&mut self, link: &mut Link<T>, sequence: &mut u64) -> Result<bool> {
        match self.run.resume::<E, T>(link)? {
            Some(over) => Ok(over),
            None => self.run.poll(link, sequence, &mut self.view),
        }
    }
    fn wait(&self, wait: &mut Wait) {
        self.run.wait(wait);
    }
    fn report(&self) -> Report {
        self.run.report()
    }
    fn track(&self) -> Track {
        Track::Collective
    }
    fn subject(&self) -> Subject {
        self.run.subject()
    }
    fn give_up(&mut self, link: &mut Link<T>, _: &Error) {
        self.run.give_up(link, &self.view);
    }
}

/// Memory that a started collective owns.
pub(super) trait Memory<E>: Send + 'static {
    /// What the caller gets back.
    type Back: Send + 'static;
    fn view(&mut self) -> View<'_, E>;
    fn back(self) -> Self::Back;
}

/// A buffer of the caller's, of which input and output are parts.
#[derive(Debug)]
pub(super) struct Framed<B> {
    pub(super) buffer: B,
    pub(super) input: core::ops::Range<usize>,
    pub(super) output: core::ops::Range<usize>,
}

impl<E: Element, B: AsMut<[E]> + Send + 'static> Memory<E> for Framed<B> {
    type Back = B;
    fn back(self) -> B {
        self.buffer
    }
    fn view(&mut self) -> View<'_, E> {
        let (input, output) = (self.input.clone(), self.output.clone());
        View::Whole {
            buffer: self.buffer.as_mut(),
            input,
            output,
        }
    }
}

/// A copy of a blocking call's input and output.
#[derive(Debug)]
pub(super) struct Pair<E> {
    pub(super) input: Vec<E>,
    pub(super) output: Vec<E>,
}

impl<E: Element> Memory<E> for Pair<E> {
    type Back = Vec<E>;
    fn back(self) -> Vec<E> {
        self.output
    }
    fn view(&mut self) -> View<'_, E> {
        View::Apart {
            input: &self.input,
            output: &mut self.output,
        }
    }
}

/// A collective on memory it owns.
#[derive(Debug)]
pub(super) struct Owned<E, M> {
    run: Run,
    /// Dropped after the run, which sees to it that nobody uses it any more.
    memory: Pinned<M>,
    element: core::marker::PhantomData<fn() -> E>,
}

impl<E: Element, M: Memory<E>> Owned<E, M> {
    pub(super) fn new(run: Run, memory: M) -> Self {
        Self {
            run,
            memory: Pinned::new(memory),
            element: core::marker::PhantomData,
        }
    }
}

/// An act that gives something back when it is over.
pub(super) trait Yields {
    type Output: Send + 'static;
    fn output(self) -> Self::Output;
}

impl<E: Element, M: Memory<E>> Yields for Owned<E, M> {
    type Output = M::Back;
    fn output(self) -> M::Back {
        self.memory.into_inner().back()
    }
}

impl<E: Element, M: Memory<E>, T: Transport> Act<T> for Owned<E, M> {
    fn poll(&mut self, link: &mut Link<T>, sequence: &mut u64) -> Result<bool> {
        match self.run.resume::<E, T>(link)? {
            Some(over) => Ok(over),
            None => self.run.poll(link, sequence, &mut self.memory.get().view()),
        }
    }
    fn wait(&self, wait: &mut Wait) {
        self.run.wait(wait);
    }
    fn report(&self) -> Report {
        self.run.report()
    }
    fn track(&self) -> Track {
        Track::Collective
    }
    fn subject(&self) -> Subject {
        self.run.subject()
    }
    fn give_up(&mut self, link: &mut Link<T>, _: &Error) {
        self.run.give_up(link, &self.memory.get().view());
    }
}

/// A message on its way out. `B` is given back; its elements are copied when the send begins, since
/// it may be another operation that writes them before its gate opens.
#[derive(Debug)]
pub(super) struct Sending<E, B> {
    pub(super) to: usize,
    pub(super) tag: u64,
    pub(super) buffer: B,
    site: Site,
    state: SendState,
    element: core::marker::PhantomData<fn() -> E>,
}

#[derive(Debug)]
enum SendState {
    Before,
    Held(Message),
    Gone,
}

impl<E, B> Sending<E, B> {
    #[track_caller]
    pub(super) fn new(to: usize, tag: u64, buffer: B) -> Self {
        Self {
            to,
            tag,
            buffer,
            site: Site::here(),
            state: SendState::Before,
            element: core::marker::PhantomData,
        }
    }
}

impl<E: Element, B: AsRef<[E]>, T: Transport> Act<T> for Sending<E, B> {
    fn poll(&mut self, link: &mut Link<T>, _: &mut u64) -> Result<bool> {
        let message = match core::mem::replace(&mut self.state, SendState::Gone) {
            SendState::Before => {
                let elements = self.buffer.as_ref();
                let storage = link.storage(size_of_val(elements));
                Message::new(Tag::User(self.tag), elements, storage)
            }
            SendState::Held(message) => message,
            SendState::Gone => return Ok(true),
        };
        match link.try_send(self.to, message)? {
            None => Ok(true),
            Some(refused) => {
                self.state = SendState::Held(refused);
                Ok(false)
            }
        }
    }
    fn wait(&self, wait: &mut Wait) {
        if matches!(self.state, SendState::Held(_)) {
            wait.send.push(self.to);
        }
    }
    fn report(&self) -> Report {
        let what = String::from("room for a message to it");
        Report {
            op: "send",
            sequence: self.tag,
            peer: Some(self.to),
            what,
            called: false,
            all: false,
        }
    }
    fn track(&self) -> Track {
        Track::Send(self.to, self.tag)
    }
    fn subject(&self) -> Subject {
        let len = self.buffer.as_ref().len();
        message::<E>("send", len, (self.to, self.tag), self.site)
    }
}

impl<E, B: Send + 'static> Yields for Sending<E, B> {
    type Output = B;
    fn output(self) -> B {
        self.buffer
    }
}

/// A message on its way in.
#[derive(Debug)]
pub(super) struct Receiving<E, B> {
    pub(super) from: usize,
    pub(super) tag: u64,
    pub(super) buffer: B,
    len: usize,
    site: Site,
    over: bool,
    element: core::marker::PhantomData<fn() -> E>,
}

impl<E: Element, B: AsMut<[E]>> Receiving<E, B> {
    #[track_caller]
    pub(super) fn new(from: usize, tag: u64, mut buffer: B) -> Self {
        Self {
            from,
            tag,
            len: buffer.as_mut().len(),
            buffer,
            site: Site::here(),
            over: false,
            element: core::marker::PhantomData,
        }
    }
}

impl<E: Element, B: AsMut<[E]>, T: Transport> Act<T> for Receiving<E, B> {
    fn poll(&mut self, link: &mut Link<T>, _: &mut u64) -> Result<bool> {
        if self.over {
            return Ok(true);
        }
        let buffer = self.buffer.as_mut();
        if let Some(message) =
            link.try_recv::<E>(self.from, Tag::User(self.tag), buffer.len(), "recv")?
        {
            buffer.copy_from_slice(message.elements());
            link.recycle(message);
            self.over = true;
        }
        Ok(self.over)
    }
    fn wait(&self, wait: &mut Wait) {
        if !self.over {
            wait.recv.push((self.from, Tag::User(self.tag)));
        }
    }
    fn report(&self) -> Report {
        let what = "a message from it".to_string();
        Report {
            op: "recv",
            sequence: self.tag,
            peer: Some(self.from),
            what,
            called: false,
            all: false,
        }
    }
    fn track(&self) -> Track {
        Track::Recv(self.from, self.tag)
    }
    fn subject(&self) -> Subject {
        message::<E>("recv", self.len, (self.from, self.tag), self.site)
    }
}

impl<E, B: Send + 'static> Yields for Receiving<E, B> {
    type Output = B;
    fn output(self) -> B {
        self.buffer
    }
}

fn message<E: Element>(op: &'static str, len: usize, peer: (usize, u64), site: Site) -> Subject {
    Subject {
        op,
        dtype: E::DTYPE,
        len,
        peer: Some(peer),
        site: Some(site),
    }
}

/// Two acts side by side: neither waits for the other.
#[derive(Debug)]
pub(super) struct Both<A, B> {
    pub(super) one: A,
    pub(super) two: B,
}

impl<T: Transport, A: Act<T>, B: Act<T>> Act<T> for Both<A, B> {
    fn poll(&mut self, link: &mut Link<T>, sequence: &mut u64) -> Result<bool> {
        let one = self.one.poll(link, sequence)?;
        Ok(self.two.poll(link, sequence)? && one)
    }
    fn wait(&self, wait: &mut Wait) {
        self.one.wait(wait);
        self.two.wait(wait);
    }
    fn report(&self) -> Report {
        let mut wait = Wait::default();
        self.two.wait(&mut wait);
        let mut report = if wait == Wait::default() {
            self.one.report()
        } else {
            self.two.report()
        };
        report.op = "sendrecv";
        report
    }
    fn track(&self) -> Track {
        Track::Alone
    }
    fn subject(&self) -> Subject {
        // The half that can wait for ever.
        Subject {
            op: "sendrecv",
            ..self.two.subject()
        }
    }
}
