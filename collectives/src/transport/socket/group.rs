//! What one rank knows of one group: messages that came, calls of the others, whether all is well.

use std::{
    boxed::Box,
    collections::VecDeque,
    string::String,
    sync::{
        Mutex, OnceLock,
        atomic::{AtomicBool, Ordering},
    },
    vec,
    vec::Vec,
};

use super::{along::LONG, frame::Frame, lock, waker::Waker};
use crate::{
    DType, Error, Result,
    transport::{Call, Message, Tag, Wait},
};

#[derive(Debug)]
pub(super) struct Group {
    pub(super) id: u64,
    pub(super) name: String,
    /// Global ranks.
    pub(super) ranks: Vec<usize>,
    /// My place.
    pub(super) me: usize,
    pub(super) inbox: Mutex<Inbox>,
    pub(super) waker: Waker,
    /// Members that ended in good order; what they sent may still lie in the inbox.
    pub(super) left: Vec<AtomicBool>,
    poison: OnceLock<Error>,
    /// Wakes an owner who does not sleep on sockets, as long as it has the group.
    pub(super) chime: Mutex<Option<Chime>>,
}

pub(super) struct Chime(pub(super) Box<dyn Fn() + Send + Sync>);

impl core::fmt::Debug for Chime {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.write_str("Chime")
    }
}

#[derive(Debug, Default)]
pub(super) struct Inbox {
    lanes: Vec<VecDeque<Message>>,
    /// Calls announced, by place.
    announced: Vec<u64>,
    /// My calls that are not confirmed.
    mine: VecDeque<Call>,
    /// Calls of others that I have not come to.
    ahead: Vec<(usize, Call)>,
    /// User bytes the receiver has given back, by place.
    pub(super) credit: Vec<u64>,
    /// User bytes taken out and not given back, and whether the sender waits for them, by place.
    pub(super) consumed: Vec<(u64, bool)>,
    /// Long messages that the owner wants to read himself, by place: the next of that tag.
    pub(super) along: Vec<(usize, Tag, DType, usize)>,
    /// The collective that the owner is in.
    pub(super) within: Option<u64>,
    wanted: Vec<(usize, Tag)>,
    needed: usize,
    confirm: Option<u64>,
    /// Members that the owner waits for to take something.
    room: Vec<usize>,
    parked: bool,
    pub(super) poked: bool,
}

impl Group {
    pub(super) fn new(id: u64, name: &str, ranks: Vec<usize>, me: usize) -> Result<Self> {
        let n = ranks.len();
        let inbox = Inbox {
            lanes: (0..n).map(|_| VecDeque::new()).collect(),
            announced: vec![0; n],
            credit: vec![0; n],
            consumed: vec![(0, false); n],
            ..Inbox::default()
        };
        Ok(Self {
            id,
            name: String::from(name),
            me,
            inbox: Mutex::new(inbox),
            waker: Waker::new()?,
            left: (0..n).map(|_| AtomicBool::new(false)).collect(),
            poison: OnceLock::new(),
            chime: Mutex::default(),
            ranks,
        })
    }

    pub(super) fn healthy(&self) -> Result<()> {
        self.poison.get().map_or(Ok(()), |cause| Err(cause.clone()))
    }

    pub(super) fn is_poisoned(&self) -> bool {
        self.poison.get().is_some()
    }

    /// The first cause stays.
    pub(super) fn fail(&self, cause: Error) -> Error {
        let first = self.poison.get_or_init(|| cause).clone();
        self.poke();
        first
    }

    /// Makes a park in progress, or else the next, return.
    pub(super) fn poke(&self) {
        let mut inbox = lock(&self.inbox);
        inbox.poked = true;
        self.rouse(&mut inbox);
        drop(inbox);
        if let Some(Chime(ring)) = &*lock(&self.chime) {
            ring();
        }
    }

    /// Makes a park in progress return, to look at everything anew.
    pub(super) fn poke_parked(&self) {
        let mut inbox = lock(&self.inbox);
        if inbox.parked {
            inbox.poked = true;
            self.rouse(&mut inbox);
        }
    }

    /// Whether the owner wants to read the payload of this frame himself: he waits for it, and is told that it is
    /// there, or else is about to come to it.
    pub(super) fn claims(&self, place: usize, frame: &Frame) -> Option<bool> {
        let mut inbox = lock(&self.inbox);
        if self.is_poisoned() {
            return None;
        }
        let wish = (place, frame.tag, frame.dtype, frame.len as usize);
        if let Some(at) = inbox.along.iter().position(|along| *along == wish) {
            inbox.along.swap_remove(at);
            inbox.poked = true;
            self.rouse(&mut inbox);
            return Some(true);
        }
        let within = inbox.within.map(Tag::Collective) == Some(frame.tag);
        let key = (place, frame.tag);
        // Who sleeps for it without having wished for parts wants it whole; who wished for another is told of this one.
        let other = inbox
            .along
            .iter()
            .any(|(from, tag, ..)| (*from, *tag) == key);
        // Behind it comes what the owner sleeps for.
        let before = inbox.wanted.iter().any(|(from, _)| *from == place);
        let whole = other || before || inbox.room.contains(&place);
        (within && !whole && frame.payload() >= LONG).then_some(false)
    }

    pub(super) fn leave(&self, place: usize) {
        self.left[place].store(true, Ordering::Release);
        self.poke();
    }

    pub(super) fn push(&self, place: usize, message: Message) {
        let mut inbox = lock(&self.inbox);
        let key = (place, message.tag);
        // What is still to come of this tag is not the next.
        inbox.along.retain(|(from, tag, ..)| (*from, *tag) != key);
        inbox.lanes[place].push_back(message);
        if inbox.wanted.contains(&key) {
            inbox.needed = inbox.needed.saturating_sub(1);
            if inbox.needed == 0 {
                self.rouse(&mut inbox);
            }
        }
    }

    pub(super) fn credited(&self, place: usize, bytes: u64) {
        let mut inbox = lock(&self.inbox);
        inbox.credit[place] += bytes;
        if !inbox.room.is_empty() {
            inbox.poked = true;
            self.rouse(&mut inbox);
        }
    }

    /// Notes a member's call; the mismatch with mine, if I have come to it.
    pub(super) fn heard(&self, place: usize, call: Call) -> Result<()> {
        let mut inbox = lock(&self.inbox);
        let known = &mut inbox.announced[place];
        *known = (*known).max(call.sequence + 1);
        match inbox.mine.iter().find(|m| m.sequence == call.sequence) {
            Some(mine) if *mine != call => return Err(self.mismatch(*mine, place, call)),
            Some(_) => {}
            None => inbox.ahead.push((place, call)),
        }
        if inbox.confirm.is_some_and(|s| inbox.all_called(s)) {
            self.rouse(&mut inbox);
        }
        Ok(())
    }

    /// Notes my call; the mismatch with those that came before.
    pub(super) fn announce(&self, call: Call) -> Result<()> {
        let mut inbox = lock(&self.inbox);
        inbox.announced[self.me] = call.sequence + 1;
        inbox.mine.push_back(call);
        let differs = inbox
            .ahead
            .iter()
            .find(|(_, theirs)| theirs.sequence == call.sequence && *theirs != call)
            .copied();
        inbox
            .ahead
            .retain(|(_, theirs)| theirs.sequence != call.sequence);
        match differs {
            Some((place, theirs)) => Err(self.mismatch(call, place, theirs)),
            None => Ok(()),
        }
    }

    /// The same sentence on both ranks: the lower one first.
    pub(super) fn mismatch(&self, mine: Call, place: usize, theirs: Call) -> Error {
        let (me, other) = (self.ranks[self.me], self.ranks[place]);
        let [(first, first_call), (second, second_call)] = if me < other {
            [(me, mine), (other, theirs)]
        } else {
            [(other, theirs), (me, mine)]
        };
        Error::Mismatch {
            group: self.name.clone(),
            sequence: mine.sequence,
            first,
            first_call: Box::new(first_call),
            second,
            second_call: Box::new(second_call),
        }
    }

    fn rouse(&self, inbox: &mut Inbox) {
        if core::mem::take(&mut inbox.parked) {
            self.waker.wake();
        }
    }
}

impl Inbox {
    pub(super) fn take(&mut self, from: usize, tag: Tag) -> Option<Message> {
        let lane = &mut self.lanes[from];
        let at = lane.iter().position(|m| m.tag == tag)?;
        lane.remove(at)
    }

    pub(super) fn holds(&self, from: usize, tag: Tag) -> bool {
        self.lanes[from].iter().any(|message| message.tag == tag)
    }

    pub(super) fn all_called(&self, sequence: u64) -> bool {
        self.announced.iter().all(|&calls| calls > sequence)
    }

    pub(super) fn has_called(&self, place: usize, sequence: u64) -> bool {
        self.announced[place] > sequence
    }

    /// A member that has not made this call.
    pub(super) fn absent(&self, sequence: u64) -> Option<usize> {
        self.absentees(sequence).next()
    }

    pub(super) fn absentees(&self, sequence: u64) -> impl Iterator<Item = usize> {
        let each = self.announced.iter().enumerate();
        each.filter(move |(_, calls)| **calls <= sequence)
            .map(|(place, _)| place)
    }

    pub(super) fn forget(&mut self, sequence: u64) {
        while self.mine.front().is_some_and(|c| c.sequence <= sequence) {
            self.mine.pop_front();
        }
    }

    /// Notes what the owner is about to wait for.
    pub(super) fn want(&mut self, wait: &Wait) {
        self.wanted.clear();
        for &(from, tag) in &wait.recv {
            if !self.holds(from, tag) {
                self.wanted.push((from, tag));
            }
        }
        let here = wait.recv.len() - self.wanted.len();
        self.needed = match (wait.all && wait.send.is_empty(), here) {
            (true, _) => self.wanted.len(),
            (false, 0) => 1,
            (false, _) => 0,
        };
        self.confirm = wait.confirm;
        self.room.clone_from(&wait.send);
    }

    /// Whether the owner need not wait any longer; `flushed`: what it sent is with the kernel.
    pub(super) fn ready(&self, waits_for_messages: bool, flushed: bool) -> bool {
        self.poked
            || (waits_for_messages && self.needed == 0)
            || self.confirm.is_some_and(|s| flushed && self.all_called(s))
    }

    /// Whether nobody has roused the owner since it parked.
    #[cfg(feature = "mpi")]
    pub(super) fn is_parked(&self) -> bool {
        self.parked
    }

    /// From now on whoever brings what is wanted rings the waker.
    pub(super) fn park(&mut self, on: bool) {
        self.parked = on;
    }

    /// The owner runs again.
    pub(super) fn unpark(&mut self) {
        self.parked = false;
        self.poked = false;
        self.wanted.clear();
        self.confirm = None;
        self.room.clear();
    }
}
