//! The dull half: performs one rank's rounds over a transport, without ever waiting.
//!
//! ```text
//! poll:  next round -> fill the outbox -> push out, take in, as far as it goes -> local work -> next
//!                                              |
//!                                  nothing moves: the caller parks on wait()
//! ```
//!
//! The same code serves threads that park and the simulation, which polls all ranks in turn.

mod along;
mod link;
mod view;

pub use link::Link;
pub use view::View;

use alloc::{collections::VecDeque, format, string::String, vec, vec::Vec};
use core::ops::Range;

use crate::{
    Element, Error, ReduceOp, Result,
    element::{finish, fold, fold_ranks, widen},
    plan::{Action, Local, Part, Place, Plan, Recv, Round, What},
    transport::{Call, Message, Sent, Tag, Transport, Wait},
};

use along::{Flow, Flowed, Post, lying};

/// One rank's part of one collective, as far as it has got.
#[derive(Debug)]
pub struct Performer {
    call: Call,
    redop: ReduceOp,
    world: usize,
    rank: usize,
    rounds: vec::IntoIter<Round>,
    outbox: VecDeque<(usize, Post)>,
    /// Messages that come in parts.
    flows: Vec<Flow>,
    /// Where the parts of the only other contribution are folded as they come.
    through: Option<(Range<usize>, usize)>,
    missing: Vec<Recv>,
    /// Whether `missing` must be taken in some order.
    ordered: bool,
    then: Option<Vec<Local>>,
    kept: Vec<Option<Message>>,
    partials: Vec<(Range<usize>, Message)>,
    /// Elements on their way to other ranks.
    stash: Option<Message>,
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
            flows: Vec::new(),
            through: None,
            missing: Vec::new(),
            ordered: false,
            then: None,
            kept: Vec::new(),
            partials: Vec::new(),
            stash: None,
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
        let outcome = self.go_on(link, view);
        if outcome.is_err() {
            self.give_up(link, view);
        }
        outcome
    }

    fn go_on<E: Element, T: Transport>(
        &mut self,
        link: &mut Link<T>,
        view: &mut View<'_, E>,
    ) -> Result<bool> {
        let mut turns = TURNS;
        loop {
            let moved = self.push_out(link, view)? | self.take_in(link, view)?;
            if !self.outbox.is_empty() || !self.missing.is_empty() {
                turns -= 1;
                if moved && turns > 0 {
                    continue;
                }
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
        let due = (0..self.missing.len()).filter(|&i| self.due(i));
        wait.recv.extend(due.map(|i| (self.missing[i].from, tag)));
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
        } else if let Some((to, post)) = self.outbox.front() {
            (Some(*to), format!("room for {} elements to it", post.len()))
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
        self.ordered = round.recvs.len() > 1 && round.ordered();
        self.through = self.folds_through(&round, view);
        let written = self.written(&round);
        for send in round.sends {
            let lying = match &send.what {
                What::Input(range) => Some(view.input(range.clone())),
                What::Output(range) => Some(view.output(range.clone())),
                _ => None,
            };
            // What waits for room keeps its place before what comes after it.
            if let Some(elements) = lying
                && !self.outbox.iter().any(|(to, _)| *to == send.to)
            {
                // What this round writes must have gone, or be a copy.
                if !written.iter().any(|range| view.meets(&send.what, range)) {
                    match link.send_along(send.to, tag, elements)? {
                        Sent::All => continue,
                        Sent::Part { .. } => {
                            self.outbox.push_back((send.to, Post::Lying(send.what)));
                            continue;
                        }
                        Sent::Never => {}
                    }
                }
                if link.send_from(send.to, tag, elements)? {
                    continue;
                }
            }
            let message = match send.what {
                What::Input(range) => copied(tag, view.input(range), link),
                What::Output(range) => copied(tag, view.output(range), link),
                What::Partial(range) => self.give(&range, tag, link, view),
                What::Shared(range) => match self.holding(&range) {
                    Some((at, part)) => {
                        copied(tag, &self.partials[at].1.elements::<E::Wide>()[part], link)
                    }
                    None => widened(tag, view.input(range), link),
                },
                What::Finished(range) => {
                    let partial = self.give(&range, tag, link, view);
                    let storage = link.storage(range.len() * E::DTYPE.bytes());
                    let mut message = Message::zeroed::<E>(tag, range.len(), storage);
                    finish(
                        self.redop,
                        self.world,
                        message.elements_mut::<E>(),
                        partial.elements(),
                    );
                    link.recycle(partial);
                    message
                }
                What::Parts(parts) => self.collected(&parts, tag, link, view),
            };
            self.outbox.push_back((send.to, Post::Made(message)));
        }
        self.missing = round.recvs;
        self.then = Some(round.then);
        Ok(())
    }

    /// The partial of `range` (where none is held: this range of the input), no longer held.
    fn give<E: Element, T: Transport>(
        &mut self,
        range: &Range<usize>,
        tag: Tag,
        link: &mut Link<T>,
        view: &View<'_, E>,
    ) -> Message {
        match self.holding(range) {
            Some((at, _)) if self.partials[at].0 == *range => {
                let (_, mut partial) = self.partials.swap_remove(at);
                partial.tag = tag;
                partial
            }
            Some((at, part)) => copied(tag, &self.partials[at].1.elements::<E::Wide>()[part], link),
            None => widened(tag, view.input(range.clone()), link),
        }
    }

    /// The partial that holds all of `range`, and where in it.
    fn holding(&self, range: &Range<usize>) -> Option<(usize, Range<usize>)> {
        let holds = |(held, _): &(Range<usize>, Message)| {
            held.start <= range.start && range.end <= held.end
        };
        let at = self.partials.iter().position(holds)?;
        let start = self.partials[at].0.start;
        Some((at, range.start - start..range.end - start))
    }

    fn collected<E: Element, T: Transport>(
        &self,
        parts: &[Part],
        tag: Tag,
        link: &mut Link<T>,
        view: &View<'_, E>,
    ) -> Message {
        let len = parts.iter().map(|part| part.range.len()).sum();
        let mut message = Message::zeroed::<E>(tag, len, link.storage(len * E::DTYPE.bytes()));
        let mut rest = message.elements_mut::<E>();
        for Part { place, range } in parts {
            let (head, tail) = rest.split_at_mut(range.len());
            rest = tail;
            let range = range.clone();
            match (place, &self.stash) {
                (Place::Input, _) => head.copy_from_slice(view.input(range)),
                (Place::Output, _) => head.copy_from_slice(view.output(range)),
                (Place::Stash, Some(stash)) => head.copy_from_slice(&stash.elements::<E>()[range]),
                (Place::Stash, None) => {}
            }
        }
        message
    }

    /// Whether any of a message that goes in parts has gone.
    fn push_out<E: Element, T: Transport>(
        &mut self,
        link: &mut Link<T>,
        view: &View<'_, E>,
    ) -> Result<bool> {
        let (tag, mut moved) = (Tag::Collective(self.call.sequence), false);
        // One that finds no room does not hold up the others, but those to the same peer.
        let mut full: Vec<usize> = Vec::new();
        for _ in 0..self.outbox.len() {
            let Some((to, post)) = self.outbox.pop_front() else {
                break;
            };
            let left = match post {
                post if full.contains(&to) => Some(post),
                Post::Made(message) => link.try_send(to, message)?.map(Post::Made),
                Post::Lying(what) => match link.send_along(to, tag, lying(&what, view)) {
                    Ok(Sent::Part { moved: more }) => {
                        moved |= more;
                        Some(Post::Lying(what))
                    }
                    Ok(_) => None,
                    Err(error) => {
                        self.outbox.push_front((to, Post::Lying(what)));
                        return Err(error);
                    }
                },
            };
            if let Some(left) = left {
                full.push(to);
                self.outbox.push_back((to, left));
            }
        }
        Ok(moved)
    }

    /// Whether nothing that must come before missing receipt `i` is missing.
    fn due(&self, i: usize) -> bool {
        let recv = &self.missing[i];
        !self.ordered || !self.missing[..i].iter().any(|earlier| recv.after(earlier))
    }

    /// Whether any of a message that comes in parts has come.
    fn take_in<E: Element, T: Transport>(
        &mut self,
        link: &mut Link<T>,
        view: &mut View<'_, E>,
    ) -> Result<bool> {
        let (tag, op) = (
            Tag::Collective(self.call.sequence),
            self.call.operation.name(),
        );
        let (mut i, mut moved) = (0, false);
        while i < self.missing.len() {
            let recv = &self.missing[i];
            let message = if !self.due(i) || self.flows(recv.from) {
                None
            } else if recv.action.wide() {
                link.try_recv::<E::Wide>(recv.from, tag, recv.len, op)?
            } else {
                link.try_recv::<E>(recv.from, tag, recv.len, op)?
            };
            match message {
                Some(message) => {
                    let recv = self.missing.remove(i);
                    self.receive(recv, message, link, view);
                }
                None => match self.take_along(i, link, view)? {
                    Flowed::All => {
                        self.missing.remove(i);
                        moved = true;
                    }
                    Flowed::Part => {
                        moved = true;
                        i += 1;
                    }
                    Flowed::Nothing => i += 1,
                },
            }
        }
        Ok(moved)
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
            Action::Fold(range) => {
                let op = self.redop;
                let partial = self.partial(range, message.tag, link, view);
                fold::<E::Wide>(op, partial, message.elements());
                link.recycle(message);
            }
            Action::FoldLeft(range) => self.fold_left(range, message, link, view),
            Action::FoldRaw(ranges) => {
                let (op, mut rest) = (self.redop, message.elements::<E>());
                for range in ranges {
                    let (head, tail) = rest.split_at(range.len());
                    rest = tail;
                    let partial = self.partial(range, message.tag, link, view);
                    fold::<E>(op, partial, head);
                }
                link.recycle(message);
            }
            Action::Parts(parts) => {
                let mut rest = message.elements::<E>();
                for Part { place, range } in parts {
                    let (head, tail) = rest.split_at(range.len());
                    rest = tail;
                    match place {
                        Place::Output => view.output_mut(range).copy_from_slice(head),
                        _ => self.stashed(range).copy_from_slice(head),
                    }
                }
                link.recycle(message);
            }
        }
    }

    /// The accumulators of `range`, made from the input where none are held.
    fn partial<E: Element, T: Transport>(
        &mut self,
        range: Range<usize>,
        tag: Tag,
        link: &mut Link<T>,
        view: &View<'_, E>,
    ) -> &mut [E::Wide] {
        let (at, part) = match self.holding(&range) {
            Some(held) => held,
            None => {
                let message = widened(tag, view.input(range.clone()), link);
                let part = 0..range.len();
                self.partials.push((range, message));
                (self.partials.len() - 1, part)
            }
        };
        &mut self.partials[at].1.elements_mut::<E::Wide>()[part]
    }

    /// The message op the partial; the message becomes the partial where it can.
    fn fold_left<E: Element, T: Transport>(
        &mut self,
        range: Range<usize>,
        mut message: Message,
        link: &mut Link<T>,
        view: &View<'_, E>,
    ) {
        let sum = message.elements_mut::<E::Wide>();
        match self.holding(&range) {
            None => {
                fold::<E>(self.redop, sum, view.input(range.clone()));
                self.partials.push((range, message));
            }
            Some((at, part)) => {
                let (held, partial) = &mut self.partials[at];
                let own = &mut partial.elements_mut::<E::Wide>()[part];
                fold::<E::Wide>(self.redop, sum, own);
                if *held == range {
                    core::mem::swap(partial, &mut message);
                } else {
                    own.copy_from_slice(sum);
                }
                link.recycle(message);
            }
        }
    }

    /// A range of the stash, which grows to hold it.
    fn stashed<E: Element>(&mut self, range: Range<usize>) -> &mut [E] {
        let tag = Tag::Collective(self.call.sequence);
        let stash = match self.stash.take() {
            Some(stash) if stash.len() >= range.end => stash,
            stash => {
                let len = stash.as_ref().map_or(0, Message::len).max(range.end);
                let storage = stash.map_or_else(Vec::new, Message::into_storage);
                Message::zeroed::<E>(tag, len, storage)
            }
        };
        &mut self.stash.insert(stash).elements_mut::<E>()[range]
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
                let kept = core::mem::take(&mut self.kept);
                self.fold_apart(input, at, view, |rank, from, n| {
                    let message = kept.get(rank).and_then(Option::as_ref)?;
                    Some(&message.elements::<E>()[from..from + n])
                });
                for message in kept.into_iter().flatten() {
                    link.recycle(message);
                }
            }
            Local::FoldStash { input, at } => {
                let (len, stash) = (input.len(), self.stash.take());
                self.fold_apart(input, at, view, |rank, from, n| {
                    let at = rank * len + from;
                    stash.as_ref()?.elements::<E>().get(at..at + n)
                });
                stash.into_iter().for_each(|stash| link.recycle(stash));
            }
            Local::Finish { input, at } => {
                let len = input.len();
                let partial = self.give(&input, Tag::User(0), link, view);
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

    /// The left fold in rank order of own input and of what `part(rank, at, len)` shows.
    fn fold_apart<'m, E: Element>(
        &self,
        input: Range<usize>,
        at: usize,
        view: &mut View<'_, E>,
        part: impl Fn(usize, usize, usize) -> Option<&'m [E]>,
    ) {
        let (me, len) = (self.rank, input.len());
        fold_ranks::<E, _>(
            self.redop,
            self.world,
            len,
            &mut (view, part),
            |(view, part), rank, from, n| {
                let other = if rank == me {
                    None
                } else {
                    part(rank, from, n)
                };
                other.unwrap_or_else(|| view.input(input.start + from..input.start + from + n))
            },
            |(view, _), from, n| view.output_mut(at + from..at + from + n),
        );
    }
}

/// Parts moved before others who use the link have their turn.
const TURNS: usize = 64;

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
