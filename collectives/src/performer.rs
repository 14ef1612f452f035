//! The dull half: performs one rank's rounds over a transport, without ever waiting.
//!
//! ```text
//! poll:  next round -> fill the outbox -> push out, take in, as far as it goes -> local work -> next
//!                                              |
//!                                  nothing moves: the caller parks on wait()
//! ```
//!
//! The same code serves threads that park and the simulation, which polls all ranks in turn.

use alloc::{
    collections::VecDeque,
    format,
    string::{String, ToString},
    vec,
    vec::Vec,
};
use core::ops::Range;

use crate::{
    Element, Error, ReduceOp, Result,
    element::{finish, fold, fold_ranks, widen},
    plan::{Action, Local, Plan, Recv, Round, What},
    transport::{Call, Message, Tag, Transport, Wait},
};

/// A transport with what this side keeps beside it: spare storage and counts.
#[derive(Debug)]
pub struct Link<T> {
    /// The endpoint.
    pub transport: T,
    /// Payload bytes handed over so far.
    pub bytes: u64,
    /// Messages handed over so far.
    pub messages: u64,
    spare: Vec<Vec<u64>>,
}

impl<T: Transport> Link<T> {
    /// A link with nothing sent yet.
    pub fn new(transport: T) -> Self {
        Self {
            transport,
            bytes: 0,
            messages: 0,
            spare: Vec::new(),
        }
    }

    /// Hands over `message`, counted, or gives it back.
    ///
    /// # Errors
    /// Those of [`Transport::try_send`].
    pub fn try_send(&mut self, to: usize, message: Message) -> Result<Option<Message>> {
        let bytes = message.bytes() as u64;
        let refused = self.transport.try_send(to, message)?;
        if refused.is_none() {
            self.bytes += bytes;
            self.messages += 1;
        }
        Ok(refused)
    }

    /// Sends `elements` from where they lie, counted, if the transport can.
    ///
    /// # Errors
    /// Those of [`Transport::send_bytes`].
    pub fn send_from<E: Element>(&mut self, to: usize, tag: Tag, elements: &[E]) -> Result<bool> {
        let bytes = bytemuck::cast_slice(elements);
        let sent = self.transport.send_bytes(to, tag, E::DTYPE, bytes)?;
        if sent {
            self.bytes += bytes.len() as u64;
            self.messages += 1;
        }
        Ok(sent)
    }

    /// A message from `from` that must hold `len` elements of `E`.
    ///
    /// # Errors
    /// Those of [`Transport::try_recv`], and [`Error::Message`] for another length or type.
    pub fn try_recv<E: Element>(
        &mut self,
        from: usize,
        tag: Tag,
        len: usize,
        op: &'static str,
    ) -> Result<Option<Message>> {
        let Some(message) = self.transport.try_recv(from, tag)? else {
            return Ok(None);
        };
        if message.dtype == E::DTYPE && message.len() == len {
            return Ok(Some(message));
        }
        Err(Error::Message {
            group: self.transport.name().to_string(),
            rank: self.transport.global(self.transport.rank()),
            peer: self.transport.global(from),
            op,
            expected: format!("{} x {len}", E::DTYPE),
            got: format!("{} x {}", message.dtype, message.len()),
        })
    }

    /// The smallest storage of an earlier message that holds `bytes`, or a new one.
    pub fn storage(&mut self, bytes: usize) -> Vec<u64> {
        let words = bytes.div_ceil(8);
        let fits = self
            .spare
            .iter()
            .enumerate()
            .filter(|(_, spare)| spare.capacity() >= words);
        match fits
            .min_by_key(|(_, spare)| spare.capacity())
            .map(|(at, _)| at)
        {
            Some(at) => self.spare.swap_remove(at),
            // Growing a small one would copy what nobody wants.
            None => Vec::new(),
        }
    }

    /// Keeps the storage of a finished message; of too many the smallest goes.
    pub fn recycle(&mut self, message: Message) {
        let Some(storage) = self.transport.recycle(message.into_storage()) else {
            return;
        };
        self.spare.push(storage);
        if self.spare.len() > SPARE {
            let sizes = self.spare.iter().enumerate();
            let smallest = sizes
                .min_by_key(|(_, spare)| spare.capacity())
                .map(|(at, _)| at);
            smallest.map(|at| self.spare.swap_remove(at));
        }
    }
}

/// Storages kept for reuse; more than the messages of one round of a world of this size.
const SPARE: usize = 32;

/// The memory of one operation on one rank.
#[derive(Debug)]
pub enum View<'a, E> {
    /// Input and output lie apart.
    Apart {
        /// Read only.
        input: &'a [E],
        /// Written.
        output: &'a mut [E],
    },
    /// Input and output are parts of one buffer, which may overlap.
    Whole {
        /// The buffer.
        buffer: &'a mut [E],
        /// Where the input lies in it.
        input: Range<usize>,
        /// Where the output lies in it.
        output: Range<usize>,
    },
}

impl<E: Element> View<'_, E> {
    fn input(&self, range: Range<usize>) -> &[E] {
        match self {
            Self::Apart { input, .. } => &input[range],
            Self::Whole { buffer, input, .. } => &buffer[input.clone()][range],
        }
    }

    fn output(&self, range: Range<usize>) -> &[E] {
        match self {
            Self::Apart { output, .. } => &output[range],
            Self::Whole { buffer, output, .. } => &buffer[output.clone()][range],
        }
    }

    fn output_mut(&mut self, range: Range<usize>) -> &mut [E] {
        match self {
            Self::Apart { output, .. } => &mut output[range],
            Self::Whole { buffer, output, .. } => &mut buffer[output.clone()][range],
        }
    }

    fn copy(&mut self, from: Range<usize>, at: usize) {
        match self {
            Self::Apart { input, output } => {
                output[at..at + from.len()].copy_from_slice(&input[from]);
            }
            Self::Whole {
                buffer,
                input,
                output,
            } => {
                let from = input.start + from.start..input.start + from.end;
                let to = output.start + at;
                if from.start != to {
                    buffer.copy_within(from, to);
                }
            }
        }
    }

    /// All of the input and all of the output.
    #[must_use]
    pub fn slices(&self) -> (&[E], &[E]) {
        let (input, output) = self.lens();
        (self.input(0..input), self.output(0..output))
    }

    /// All of the output.
    #[must_use]
    pub fn output_all(&mut self) -> &mut [E] {
        let (_, output) = self.lens();
        self.output_mut(0..output)
    }

    /// Elements of input and output.
    fn lens(&self) -> (usize, usize) {
        match self {
            Self::Apart { input, output } => (input.len(), output.len()),
            Self::Whole { input, output, .. } => (input.len(), output.len()),
        }
    }
}

/// One rank's part of one collective, as far as it has got.
#[derive(Debug)]
pub struct Performer {
    call: Call,
    redop: ReduceOp,
    world: usize,
    rank: usize,
    rounds: vec::IntoIter<Round>,
    outbox: VecDeque<(usize, Message)>,
    missing: Vec<Recv>,
    then: Option<Vec<Local>>,
    kept: Vec<Option<Message>>,
    partial: Option<Message>,
}

impl Performer {
    /// Announces the call and stands before its first round.
    ///
    /// # Errors
    /// Those of [`Transport::announce`].
    pub fn begin<T: Transport>(plan: &Plan, call: Call, link: &mut Link<T>) -> Result<Self> {
        Self::with_rounds(plan.rounds(link.transport.rank()), plan.world(), call, link)
    }

    /// The same with rounds that may be no plan's; ranges beyond the view panic when performed.
    ///
    /// # Errors
    /// Those of [`Transport::announce`].
    pub fn with_rounds<T: Transport>(
        rounds: Vec<Round>,
        world: usize,
        call: Call,
        link: &mut Link<T>,
    ) -> Result<Self> {
        link.transport.announce(&call)?;
        let rank = link.transport.rank();
        Ok(Self {
            call,
            redop: call.redop.unwrap_or(ReduceOp::Sum),
            world,
            rank,
            rounds: rounds.into_iter(),
            outbox: VecDeque::new(),
            missing: Vec::new(),
            then: None,
            kept: Vec::new(),
            partial: None,
        })
    }

    /// Goes as far as it can without waiting; true once this rank is done and every rank of the
    /// group has called.
    ///
    /// # Errors
    /// Those of the transport; the operation is then over and its output is not to be used.
    pub fn poll<E: Element, T: Transport>(
        &mut self,
        link: &mut Link<T>,
        view: &mut View<'_, E>,
    ) -> Result<bool> {
        loop {
            self.push_out(link)?;
            self.take_in(link, view)?;
            if !self.outbox.is_empty() || !self.missing.is_empty() {
                return Ok(false);
            }
            for local in self.then.take().unwrap_or_default() {
                self.work(local, link, view);
            }
            match self.rounds.next() {
                Some(round) => self.enter(round, link, view)?,
                None => return link.transport.confirmed(self.call.sequence),
            }
        }
    }

    /// What the rank waits for, after a poll that was not the last.
    pub fn wait(&self, wait: &mut Wait) {
        let tag = Tag::Collective(self.call.sequence);
        wait.recv
            .extend(self.missing.iter().map(|recv| (recv.from, tag)));
        wait.send.extend(self.outbox.iter().map(|(to, _)| *to));
        if self.missing.is_empty() && self.outbox.is_empty() {
            wait.confirm = Some(self.call.sequence);
        }
    }

    /// The peer waited for, if it is one, and what for, in words.
    #[must_use]
    pub fn blocked_on(&self) -> (Option<usize>, String) {
        if let Some(recv) = self.missing.first() {
            (Some(recv.from), format!("{} elements from it", recv.len))
        } else if let Some((to, message)) = self.outbox.front() {
            (
                Some(*to),
                format!("room for {} elements to it", message.len()),
            )
        } else {
            (None, String::from("every rank of the group to call"))
        }
    }

    /// The call performed.
    #[must_use]
    pub fn call(&self) -> &Call {
        &self.call
    }

    fn enter<E: Element, T: Transport>(
        &mut self,
        round: Round,
        link: &mut Link<T>,
        view: &View<'_, E>,
    ) -> Result<()> {
        let tag = Tag::Collective(self.call.sequence);
        for send in round.sends {
            let elements = match send.what {
                What::Input(range) => view.input(range),
                What::Output(range) => view.output(range),
                What::Partial(range) => {
                    let message = match self.partial.take() {
                        Some(partial) => partial,
                        None => widened(tag, view.input(range), link),
                    };
                    self.outbox.push_back((send.to, message));
                    continue;
                }
            };
            // What waits for room keeps its place before what comes after it.
            let waits = self.outbox.iter().any(|(to, _)| *to == send.to);
            if waits || !link.send_from(send.to, tag, elements)? {
                let message = copied(tag, elements, link);
                self.outbox.push_back((send.to, message));
            }
        }
        self.missing = round.recvs;
        self.then = Some(round.then);
        Ok(())
    }

    fn push_out<T: Transport>(&mut self, link: &mut Link<T>) -> Result<()> {
        // One that finds no room does not hold up the others.
        for _ in 0..self.outbox.len() {
            let Some((to, message)) = self.outbox.pop_front() else {
                break;
            };
            if let Some(refused) = link.try_send(to, message)? {
                self.outbox.push_back((to, refused));
            }
        }
        Ok(())
    }

    fn take_in<E: Element, T: Transport>(
        &mut self,
        link: &mut Link<T>,
        view: &mut View<'_, E>,
    ) -> Result<()> {
        let (tag, op) = (
            Tag::Collective(self.call.sequence),
            self.call.operation.name(),
        );
        let mut i = 0;
        while i < self.missing.len() {
            let recv = &self.missing[i];
            let message = match recv.action {
                Action::Fold(_) => link.try_recv::<E::Wide>(recv.from, tag, recv.len, op)?,
                _ => link.try_recv::<E>(recv.from, tag, recv.len, op)?,
            };
            match message {
                Some(message) => {
                    let recv = self.missing.remove(i);
                    self.receive(recv, message, link, view);
                }
                None => i += 1,
            }
        }
        Ok(())
    }

    fn receive<E: Element, T: Transport>(
        &mut self,
        recv: Recv,
        message: Message,
        link: &mut Link<T>,
        view: &mut View<'_, E>,
    ) {
        match recv.action {
            Action::Store(at) => {
                view.output_mut(at..at + recv.len)
                    .copy_from_slice(message.elements());
                link.recycle(message);
            }
            Action::Keep => {
                self.kept.resize_with(self.world, || None);
                self.kept[recv.from] = Some(message);
            }
            Action::Fold(own) => match &mut self.partial {
                Some(partial) => {
                    fold::<E::Wide>(self.redop, partial.elements_mut(), message.elements());
                    link.recycle(message);
                }
                None => {
                    // Own input is the left operand.
                    let mut partial = widened(message.tag, view.input(own), link);
                    fold::<E::Wide>(self.redop, partial.elements_mut(), message.elements());
                    link.recycle(message);
                    self.partial = Some(partial);
                }
            },
        }
    }

    fn work<E: Element, T: Transport>(
        &mut self,
        local: Local,
        link: &mut Link<T>,
        view: &mut View<'_, E>,
    ) {
        match local {
            Local::Copy { input, at } => view.copy(input, at),
            Local::FoldRanks { input, at } => {
                let (me, len) = (self.rank, input.len());
                let mut ctx = (view, &self.kept);
                fold_ranks::<E, _>(
                    self.redop,
                    self.world,
                    len,
                    &mut ctx,
                    |(view, kept), rank, from, n| match kept.get(rank).and_then(Option::as_ref) {
                        Some(message) if rank != me => &message.elements()[from..from + n],
                        _ => view.input(input.start + from..input.start + from + n),
                    },
                    |(view, _), from, n| view.output_mut(at + from..at + from + n),
                );
                for message in self.kept.drain(..).flatten() {
                    link.recycle(message);
                }
            }
            Local::Finish { input, at } => {
                let len = input.len();
                let partial = match self.partial.take() {
                    Some(partial) => partial,
                    None => widened(Tag::User(0), view.input(input), link),
                };
                finish(
                    self.redop,
                    self.world,
                    view.output_mut(at..at + len),
                    partial.elements(),
                );
                link.recycle(partial);
            }
        }
    }
}

/// Checks that a view is as long as the plan needs, so that performing cannot fail by length. Where
/// the plan needs nothing, as of a root's output elsewhere, any length will do.
///
/// # Errors
/// [`Error::Len`].
pub fn fits<E: Element>(plan: &Plan, rank: usize, view: &View<'_, E>) -> Result<()> {
    let (input, output) = view.lens();
    let op = plan.shape().operation().name();
    for (what, expected, got) in [
        ("the input", plan.input_len(rank), input),
        ("the output", plan.output_len(rank), output),
    ] {
        if got != expected && (expected > 0 || plan.shape().root().is_none()) {
            return Err(Error::Len {
                op,
                what,
                expected,
                got,
            });
        }
    }
    Ok(())
}

fn copied<E: Element, T: Transport>(tag: Tag, elements: &[E], link: &mut Link<T>) -> Message {
    Message::new(tag, elements, link.storage(size_of_val(elements)))
}

fn widened<E: Element, T: Transport>(tag: Tag, elements: &[E], link: &mut Link<T>) -> Message {
    let storage = link.storage(elements.len() * E::DTYPE.accumulator().bytes());
    let mut message = Message::zeroed::<E::Wide>(tag, elements.len(), storage);
    widen(message.elements_mut(), elements);
    message
}
