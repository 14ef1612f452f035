//! Collectives and messages on a device's memory, where the transport reaches it.
//!
//! ```text
//! collective   idle? (barrier alone) -> announce -> all alike? -> counts agree? (all_to_all_v) -> device
//! message      receiver --ask(tag, type, len)--> sender --say(tag, type, len)--> receiver
//!                            the sender begins          the receiver begins, in the order said
//! ```
//!
//! Messages on a device have no tags, so the two ends agree on their order first: a sender begins once
//! it was asked, a receiver in the order in which the sender has begun. The words go as messages
//! with tags of their own, and are not counted.

use std::{
    format,
    string::{String, ToString},
    sync::Arc,
    vec::Vec,
};

use super::{
    Communicator,
    act::{Act, Report, Run, Track, Yields},
};
use crate::{
    DType, Error, Pending, ReduceOp, Result,
    performer::Link,
    plan::CollectiveShape as Shape,
    recorder::Subject,
    transport::{
        Call, Message, Site, Tag, Transport, Wait,
        device::{Device, Job, Lane, Parcel, Said, Span},
    },
};

/// Tags from here on are this module's and the devices' own.
pub(crate) const RESERVED: u64 = 1 << 61;

/// What a receiver asks for is tagged so, and with the message's tag.
const ASK: u64 = 1 << 63;

/// What a sender says.
const SAY: u64 = 1 << 62;

impl<T: Transport + Send + 'static> Communicator<T> {
    /// Whether collectives on a device's memory can be performed where it lies:
    /// [`Communicator::on_device`] and its kin.
    #[must_use]
    pub fn reaches_device(&self) -> bool {
        self.device
    }

    /// Performs a collective on device memory; returns once it is over there.
    ///
    /// The input may lie in the output (all_gather: my chunk of it; all_reduce, broadcast, reduce: all of it) or
    /// the output in the input (reduce_scatter: my chunk); else they lie apart.
    ///
    /// # Errors
    /// Those of [`Communicator::all_reduce_into`]; [`Error::Plan`] where the device's fold is not as the
    /// order wants it; [`Error::Layout`] where no device is reached.
    #[track_caller]
    pub fn on_device(
        &self,
        shape: Shape,
        redop: ReduceOp,
        [input, output]: [Span; 2],
        lane: Arc<dyn Lane>,
    ) -> Result<()> {
        let mut far = self.far((), shape, redop, [input, output], lane)?;
        if self.core.idle() {
            return self.core.drive(&mut far, self.deadline);
        }
        self.core.start(far, (), self.deadline)?.wait()
    }

    /// Starts [`Communicator::on_device`]; `keep`, which owns the memory, comes back at the end.
    ///
    /// # Errors
    /// Those of [`Communicator::on_device`] that are known at once; the rest comes from [`Pending::wait`].
    #[track_caller]
    pub fn start_on_device<K: Send + 'static>(
        &self,
        keep: K,
        shape: Shape,
        redop: ReduceOp,
        [input, output]: [Span; 2],
        lane: Arc<dyn Lane>,
    ) -> Result<Pending<K>> {
        let far = self.far(keep, shape, redop, [input, output], lane)?;
        self.core.start(far, (), self.deadline)
    }

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

    #[track_caller]
    fn far<K>(
        &self,
        keep: K,
        shape: Shape,
        redop: ReduceOp,
        [input, output]: [Span; 2],
        lane: Arc<dyn Lane>,
    ) -> Result<Far<K>> {
        self.reached()?;
        let (dtype, op) = (output.dtype(), shape.operation());
        let run = self.run(shape.clone(), dtype, op.folds().then_some(redop))?;
        let refused = |link: &Link<T>| {
            link.transport
                .device_refuses(&shape, dtype, redop, self.order)
        };
        if let Some(reason) = self.core.visit(refused) {
            return Err(Error::Plan {
                op: op.name(),
                algorithm: "the device's library",
                world: self.world(),
                reason,
            });
        }
        let (plan, me) = (&run.known.plan, self.rank());
        let wanted = [plan.input_len(me), plan.output_len(me)];
        // Where a root alone reads or writes, the others' memory may be absent.
        let rooted = |want: usize| want == 0 && shape.root().is_some();
        for (what, want, got) in [
            ("the input", wanted[0], input),
            ("the output", wanted[1], output),
        ] {
            if got.dtype() != dtype && !rooted(want) {
                let got = got.dtype();
                return Err(Error::Layout(format!(
                    "{op}: {what} is of {got}, not {dtype}"
                )));
            }
            if got.len() != want && !rooted(want) {
                return Err(Error::Len {
                    op: op.name(),
                    what,
                    expected: want,
                    got: got.len(),
                });
            }
        }
        let [input, output] = [input.part(0..wanted[0]), output.part(0..wanted[1])];
        lie_well(&shape, me, input, output)?;
        Ok(Far {
            keep,
            run,
            job: Job {
                shape,
                redop,
                input,
                output,
                lane,
            },
            stage: Stage::Open,
        })
    }

    fn reached(&self) -> Result<()> {
        if self.device {
            return Ok(());
        }
        Err(Error::Layout(format!(
            "the transport of group {} reaches no device",
            self.name
        )))
    }
}

/// Refuses input and output that overlap otherwise than in place.
fn lie_well(shape: &Shape, me: usize, input: Span, output: Span) -> Result<()> {
    let end = |span: Span| span.at(span.len());
    let apart = end(input) <= output.address() || end(output) <= input.address();
    let own = || super::own(shape.counts(), me);
    let in_place = match shape {
        Shape::AllReduce { .. } | Shape::Broadcast { .. } | Shape::Reduce { .. } => input == output,
        Shape::ReduceScatter { .. } => output == input.part(own()),
        Shape::AllGather { .. } => input == output.part(own()),
        _ => false,
    };
    if apart || in_place || input.is_empty() || output.is_empty() {
        return Ok(());
    }
    Err(Error::Layout(format!(
        "{}: input and output overlap and are not in place",
        shape.operation()
    )))
}

/// A collective on device memory; `K` owns the memory.
#[derive(Debug)]
struct Far<K> {
    keep: K,
    run: Run,
    job: Job,
    stage: Stage,
}

#[derive(Debug)]
enum Stage {
    Open,
    Called(Call),
    /// The counts of all_to_all_v: whom they are still to be told, and from whom they are to come.
    Counting(u64, Vec<usize>, Vec<usize>),
    Begun,
}

impl<K> Far<K> {
    fn step<T: Transport>(&mut self, link: &mut Link<T>, sequence: &mut u64) -> Result<bool> {
        loop {
            match &mut self.stage {
                Stage::Open => {
                    let shape = &self.job.shape;
                    if matches!(shape, Shape::Barrier) && !self.job.lane.idle()? {
                        return link.transport.healthy().map(|()| false);
                    }
                    let (world, run) = (link.transport.world(), &mut self.run);
                    let call = Call::new(*sequence, shape, world, run.dtype, run.redop, run.order);
                    let call = call.at(run.site);
                    run.sequence = Some(*sequence);
                    *sequence += 1;
                    link.transport.announce(&call)?;
                    self.stage = Stage::Called(call);
                }
                Stage::Called(call) => {
                    if !link.transport.confirmed(call.sequence)? {
                        return Ok(false);
                    }
                    let me = link.transport.rank();
                    let others = || (0..link.transport.world()).filter(|&r| r != me).collect();
                    self.stage = match &self.job.shape {
                        Shape::Barrier => return Ok(true),
                        Shape::AllToAllV { .. } => {
                            Stage::Counting(call.sequence, others(), others())
                        }
                        _ => self.begin(link)?,
                    };
                }
                Stage::Counting(..) => {
                    if !self.counts_agree(link)? {
                        return Ok(false);
                    }
                    self.stage = self.begin(link)?;
                }
                Stage::Begun => {
                    link.transport.healthy()?;
                    if !device(link)?.poll()? {
                        return Ok(false);
                    }
                    self.run.count(link);
                    return Ok(true);
                }
            }
        }
    }

    fn begin<T: Transport>(&self, link: &mut Link<T>) -> Result<Stage> {
        device(link)?.begin(self.job.clone())?;
        Ok(Stage::Begun)
    }

    /// Tells every rank what it gets and compares what this one gets; true once all have been heard.
    fn counts_agree<T: Transport>(&mut self, link: &mut Link<T>) -> Result<bool> {
        let Shape::AllToAllV { send, recv } = &self.job.shape else {
            return Ok(true);
        };
        let Stage::Counting(sequence, untold, unheard) = &mut self.stage else {
            return Ok(true);
        };
        let tag = Tag::Collective(*sequence);
        while let Some(&to) = untold.last() {
            let count = Message::new(tag, &[send[to] as i64], Vec::new());
            if link.transport.try_send(to, count)?.is_some() {
                break;
            }
            untold.pop();
        }
        while let Some(&from) = unheard.last() {
            let Some(count) = link.try_recv::<i64>(from, tag, 1, "all_to_all_v")? else {
                break;
            };
            let dtype = self.run.dtype;
            let got = count.elements::<i64>().first().map_or(0, |&n| n as usize);
            if got != recv[from] {
                let [expected, got] = [recv[from], got].map(|n| format!("{dtype} x {n}"));
                return Err(other(link, from, "all_to_all_v", expected, got));
            }
            unheard.pop();
        }
        Ok(untold.is_empty() && unheard.is_empty())
    }
}

impl<K, T: Transport> Act<T> for Far<K> {
    fn poll(&mut self, link: &mut Link<T>, sequence: &mut u64) -> Result<bool> {
        let outcome = self.step(link, sequence);
        if let Err(cause) = &outcome {
            self.give_up(link, cause);
        }
        outcome
    }

    fn give_up(&mut self, link: &mut Link<T>, cause: &Error) {
        if let Some(device) = link.transport.device() {
            device.abort(cause);
        }
    }

    fn wait(&self, wait: &mut Wait) {
        match &self.stage {
            Stage::Called(call) => wait.confirm = Some(call.sequence),
            Stage::Counting(sequence, untold, unheard) => {
                wait.send.extend(untold.last());
                let tag = Tag::Collective(*sequence);
                wait.recv.extend(unheard.last().map(|&from| (from, tag)));
            }
            Stage::Open | Stage::Begun => {}
        }
    }

    fn report(&self) -> Report {
        let (peer, what) = match &self.stage {
            Stage::Open => (None, "the work on its lane"),
            Stage::Called(_) => (None, "every rank of the group to do its part"),
            Stage::Counting(_, _, unheard) => (unheard.last().copied(), "its counts"),
            Stage::Begun => (None, "the device"),
        };
        Report {
            op: self.job.shape.operation().name(),
            sequence: self.run.sequence.unwrap_or(0),
            peer,
            what: String::from(what),
            called: self.run.sequence.is_some(),
        }
    }

    fn track(&self) -> Track {
        Track::Collective
    }

    fn subject(&self) -> Subject {
        self.run.subject()
    }
}

impl<K: Send + 'static> Yields for Far<K> {
    type Output = K;
    fn output(self) -> K {
        self.keep
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

fn device<T: Transport>(link: &mut Link<T>) -> Result<&mut dyn Device> {
    let device = link.transport.device();
    device.ok_or_else(|| Error::Layout(String::from("the transport reaches no device")))
}

fn other<T: Transport>(
    link: &Link<T>,
    from: usize,
    op: &'static str,
    expected: String,
    got: String,
) -> Error {
    Error::Message {
        group: link.transport.name().to_string(),
        rank: link.transport.global(link.transport.rank()),
        peer: link.transport.global(from),
        op,
        expected,
        got,
    }
}
