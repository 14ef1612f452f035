//! Messages in parts, straight from and to the memory of the call; see [`Transport::send_along`].
//!
//! ```text
//! sent      from the input or the output, unless the same round writes there before all has gone
//! stored    into the output, as it comes
//! folded    of two ranks: each part with mine, while it is in the cache
//! ```

use alloc::{collections::VecDeque, vec::Vec};
use core::ops::Range;

use super::{Link, Performer, View};
#[cfg(feature = "std")]
use crate::transport::direct::{fold_two, goes_past};
use crate::{
    Element, Result,
    plan::{Action, Local, Place, Round, What},
    transport::{Message, Tag, Transport},
};

/// A message that has not gone.
#[derive(Debug)]
pub(super) enum Post {
    Made(Message),
    /// One that is being sent from where it lies: elements of the input or the output.
    Lying(What),
}

impl Post {
    pub(super) fn len(&self) -> usize {
        match self {
            Self::Made(message) => message.len(),
            Self::Lying(what) => what.len(),
        }
    }
}

/// A message of which something has come.
#[derive(Debug)]
pub(super) struct Flow {
    from: usize,
    /// Bytes that have come.
    got: usize,
    /// Elements that have come and are not folded, after them perhaps a part of one.
    held: Option<(Message, usize)>,
}

/// What of a message has come now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Flowed {
    Nothing,
    Part,
    /// The rest of it.
    All,
}

/// Bytes taken in before others have their turn: with what they are folded with and into, they fit a cache of a core.
const TURN: usize = 256 << 10;

/// The elements that lie there.
pub(super) fn lying<'v, E: Element>(what: &What, view: &'v View<'_, E>) -> &'v [E] {
    match what {
        What::Input(range) => view.input(range.clone()),
        What::Output(range) => view.output(range.clone()),
        _ => &[],
    }
}

impl Performer {
    /// The operation is over, for whatever reason: what it has begun to send goes on without it.
    pub(crate) fn give_up<E: Element, T: Transport>(
        &mut self,
        link: &mut Link<T>,
        view: &View<'_, E>,
    ) {
        let outbox = core::mem::take(&mut self.outbox);
        let (lies, rest): (VecDeque<_>, _) = outbox
            .into_iter()
            .partition(|(_, post)| matches!(post, Post::Lying(_)));
        self.outbox = rest;
        for (to, post) in lies {
            if let Post::Lying(what) = post {
                link.send_alone(to, lying(&what, view));
            }
        }
    }

    /// Where the output is written while messages of the round may still be going out.
    pub(super) fn written(&self, round: &Round) -> Vec<Range<usize>> {
        let mut written = Vec::new();
        for recv in &round.recvs {
            match &recv.action {
                Action::Store(at) => written.push(*at..*at + recv.len),
                Action::Parts(parts) => {
                    let output = parts.iter().filter(|part| part.place == Place::Output);
                    written.extend(output.map(|part| part.range.clone()));
                }
                _ => {}
            }
        }
        if let Some((input, at)) = &self.through {
            written.push(*at..*at + input.len());
        }
        written
    }

    /// The input and the place in the output of a fold of two ranks that can be done as the other's part comes.
    pub(super) fn folds_through<E: Element>(
        &self,
        round: &Round,
        view: &View<'_, E>,
    ) -> Option<(Range<usize>, usize)> {
        let ([recv], [Local::FoldRanks { input, at }]) = (&round.recvs[..], &round.then[..]) else {
            return None;
        };
        let output = *at..*at + input.len();
        let sends = round.sends.iter();
        let meets = sends.clone().any(|send| view.meets(&send.what, &output));
        let two = self.world == 2 && recv.action == Action::Keep && recv.len == input.len();
        (two && !meets).then(|| (input.clone(), *at))
    }

    /// Whether something of a message from that rank has come, and not all.
    pub(super) fn flows(&self, from: usize) -> bool {
        self.flows.iter().any(|flow| flow.from == from)
    }

    /// Takes what has come of missing message `i`, if it is one that comes in parts.
    pub(super) fn take_along<E: Element, T: Transport>(
        &mut self,
        i: usize,
        link: &mut Link<T>,
        view: &mut View<'_, E>,
    ) -> Result<Flowed> {
        let recv = &self.missing[i];
        let (from, len) = (recv.from, recv.len);
        // Those of one rank come one after another; one without elements comes whole, or not yet.
        if len == 0 || !self.due(i) || self.missing[..i].iter().any(|earlier| earlier.from == from)
        {
            return Ok(Flowed::Nothing);
        }
        let store = match (&recv.action, &self.through) {
            (Action::Store(at), _) => Some(*at),
            (Action::Keep, Some(_)) => None,
            _ => return Ok(Flowed::Nothing),
        };
        let (tag, of) = (Tag::Collective(self.call.sequence), (E::DTYPE, len));
        let found = self.flows.iter().position(|flow| flow.from == from);
        let mut flow = found.map_or(
            Flow {
                from,
                got: 0,
                held: None,
            },
            |at| self.flows.swap_remove(at),
        );
        let bytes = len * E::DTYPE.bytes();
        let came = match store {
            Some(at) => {
                let output = bytemuck::cast_slice_mut::<E, u8>(view.output_mut(at..at + len));
                let until = bytes.min(flow.got + TURN);
                let room = &mut output[flow.got..until];
                link.transport.recv_along(from, tag, of, room)?
            }
            None => {
                let (part, held) = flow.held.get_or_insert_with(|| {
                    let storage = link.storage(TURN);
                    (Message::zeroed::<E>(tag, TURN / size_of::<E>(), storage), 0)
                });
                let room = bytemuck::cast_slice_mut::<E, u8>(part.elements_mut::<E>());
                let until = TURN.min(bytes - flow.got + *held);
                let came = link
                    .transport
                    .recv_along(from, tag, of, &mut room[*held..until])?;
                *held += came.unwrap_or(0);
                came
            }
        };
        let came = came.unwrap_or(0);
        flow.got += came;
        if came > 0
            && let (None, Some((part, held))) = (store, &mut flow.held)
        {
            let whole = *held / size_of::<E>();
            let first = (flow.got - *held) / size_of::<E>();
            self.fold_part(first, &part.elements::<E>()[..whole], view);
            let room = bytemuck::cast_slice_mut::<E, u8>(part.elements_mut::<E>());
            room.copy_within(whole * size_of::<E>()..*held, 0);
            *held -= whole * size_of::<E>();
        }
        if flow.got == bytes {
            if store.is_none() {
                self.through = None;
                self.then = None;
            }
            flow.held
                .into_iter()
                .for_each(|(part, _)| link.recycle(part));
            return Ok(Flowed::All);
        }
        match (flow.got, flow.held) {
            (0, held) => held.into_iter().for_each(|(part, _)| link.recycle(part)),
            (_, held) => self.flows.push(Flow { held, ..flow }),
        }
        Ok(if came > 0 {
            Flowed::Part
        } else {
            Flowed::Nothing
        })
    }

    /// Folds a part of the other rank's contribution with mine.
    fn fold_part<E: Element>(&self, first: usize, part: &[E], view: &mut View<'_, E>) {
        let Some((input, at)) = &self.through else {
            return;
        };
        let (n, at) = (part.len(), at + first);
        let mine = input.start + first..input.start + first + n;
        #[cfg(feature = "std")]
        if let View::Apart { input, output } = view
            && goes_past(size_of_val(*output), self.world)
        {
            let mine = &input[mine];
            let ins = if self.rank == 0 {
                [mine, part]
            } else {
                [part, mine]
            };
            return fold_two(self.redop, ins, &mut output[at..at + n]);
        }
        self.fold_apart(mine, at, view, |_, from, n| Some(&part[from..from + n]));
    }
}
