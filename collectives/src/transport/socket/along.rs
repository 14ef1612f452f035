//! Long messages from where their sender has them to where their receiver wants them, in parts, as both go along.
//!
//! ```text
//! poll    send_along  a part of mine goes out           recv_along  a part of theirs comes in
//!         again and again, while either moves           (folded or stored while it is in the cache)
//! park    until the kernel takes more, or has more
//! ```
//!
//! Neither end touches memory of its own for them. Whoever has begun with one stays with it: a connection carries one
//! frame after the other, so that all others wait for it.

use std::{time::Instant, vec, vec::Vec};

use super::{LINGER, Sockets, lock, through::Lent};
use crate::{
    DType, Result,
    transport::{Sent, Tag, Wait},
};

/// The shortest message that goes this way.
pub(super) const LONG: usize = 64 << 10;

/// The messages of one endpoint that are on their way, by place.
#[derive(Debug)]
pub(super) struct Along {
    /// The frame of mine whose payload is lent, and how many bytes of it have gone.
    lent: Vec<Option<(u64, usize)>>,
    /// Bytes left of the payload that I am reading.
    taking: Vec<Option<usize>>,
    /// Whether any was wanted since the last call.
    asked: bool,
    /// Since when nothing has moved, while I keep looking.
    still: Option<Instant>,
}

impl Along {
    pub(super) fn new(n: usize) -> Self {
        Self {
            lent: vec![None; n],
            taking: vec![None; n],
            asked: false,
            still: None,
        }
    }

    /// Whether it is for me to read what comes from that member.
    pub(super) fn takes(&self, place: usize) -> bool {
        self.taking[place].is_some()
    }

    /// Whether it is for me to write what goes to that member, once its turn has come.
    pub(super) fn lends(&self, place: usize) -> Option<u64> {
        self.lent[place].map(|(number, _)| number)
    }

    fn moves(&self) -> bool {
        self.taking.iter().any(Option::is_some) || self.lent.iter().any(Option::is_some)
    }
}

impl Sockets {
    pub(super) fn lend(
        &mut self,
        to: usize,
        (tag, dtype): (Tag, DType),
        bytes: &[u8],
    ) -> Result<Sent> {
        let rank = self.group.ranks[to];
        let lent = self.along.lent[to];
        if lent.is_none() && !self.goes_along(rank, tag, bytes.len()) {
            return Ok(Sent::Never);
        }
        self.group.healthy()?;
        if self.left(to) {
            return Err(self.lost(to));
        }
        let what = match lent {
            Some((number, _)) => Err(number),
            None => Ok(self.message(to, tag, dtype, bytes.len() / dtype.bytes())),
        };
        let Lent { number, gone } = self.mesh.lend(&self.group, rank, what, bytes);
        self.note(to, tag, number);
        let Some(gone) = gone else {
            self.along.lent[to] = None;
            self.along.still = None;
            return Ok(Sent::All);
        };
        let moved = lent.is_none_or(|(_, before)| gone > before);
        if moved {
            self.along.still = None;
        }
        self.along.lent[to] = Some((number, gone));
        Ok(Sent::Part { moved })
    }

    /// Whether messages of so many bytes go this way.
    fn goes_along(&self, rank: usize, tag: Tag, bytes: usize) -> bool {
        #[cfg(target_os = "linux")]
        if self.mesh.shm.as_ref().is_some_and(|shm| shm.sees(rank)) {
            return false;
        }
        let plain = matches!(tag, Tag::Collective(_)) && !self.mesh.payload_crc;
        plain && bytes >= LONG && self.mesh.peer(rank).is_some()
    }

    pub(super) fn take(
        &mut self,
        from: usize,
        (tag, dtype, len): (Tag, DType, usize),
        room: &mut [u8],
    ) -> Result<Option<usize>> {
        let (rank, bytes) = (self.group.ranks[from], len * dtype.bytes());
        let left = match self.along.taking[from] {
            Some(left) => left,
            None if !self.goes_along(rank, tag, bytes) => return Ok(None),
            None => bytes,
        };
        self.group.healthy()?;
        self.along.asked = true;
        if self.along.taking[from].is_none() {
            let wish = (from, tag, dtype, len);
            let mut inbox = lock(&self.group.inbox);
            // One that has come whole is the next of its tag, and this is one after it.
            if inbox.holds(from, tag) {
                return Ok(Some(0));
            }
            if !inbox.along.contains(&wish) {
                inbox.along.push(wish);
            }
            drop(inbox);
            // After the wish: whoever read the header before it was seen has left the payload to me.
            if !self.begins(from, (tag, dtype, len)) {
                return Ok(Some(0));
            }
            lock(&self.group.inbox).along.retain(|own| *own != wish);
        }
        let n = self.mesh.take(&self.group, rank, room);
        if n > 0 {
            self.along.still = None;
        }
        self.along.taking[from] = Some(left - n).filter(|left| *left > 0);
        Ok(Some(n))
    }

    /// Whether the payload that I want has begun to come, and none of its tag came whole before it.
    fn begins(&self, from: usize, what: (Tag, DType, usize)) -> bool {
        let Some(peer) = self.mesh.peer(self.group.ranks[from]) else {
            return false;
        };
        // As long as this is locked nothing more of that rank is delivered.
        let mut inn = lock(&peer.inn);
        let before = lock(&self.group.inbox).holds(from, what.0);
        !before && inn.want(self.group.id, what, &self.mesh.pool)
    }

    /// What is waited for in one piece, or what comes before it, is not to be read later.
    pub(super) fn store_whole(&self, wait: &Wait) {
        for &(from, tag) in &wait.recv {
            if self.along.taking[from].is_none() && !self.wishes(from, tag) {
                self.mesh.store(&self.group, self.group.ranks[from]);
            }
        }
        for &to in &wait.send {
            if self.along.taking[to].is_none() {
                self.mesh.store(&self.group, self.group.ranks[to]);
            }
        }
    }

    /// Whether parts of that message are waited for.
    fn wishes(&self, from: usize, tag: Tag) -> bool {
        // A connection is never locked while the inbox is.
        let inbox = lock(&self.group.inbox);
        inbox
            .along
            .iter()
            .any(|wish| (wish.0, wish.1) == (from, tag))
    }

    /// What is left of a message to that member goes without me.
    pub(super) fn unlend(&mut self, to: usize, bytes: Option<&[u8]>) {
        if let Some((number, _)) = self.along.lent[to].take() {
            let rank = self.group.ranks[to];
            self.mesh.unlend(&self.group, rank, number, bytes);
        }
    }

    /// Nothing of an earlier call is on its way any more; what is left of it nobody will take care of.
    pub(super) fn forget_along(&mut self) {
        (0..self.along.lent.len()).for_each(|to| self.unlend(to, None));
        if core::mem::take(&mut self.along.asked) {
            self.along.taking.fill(None);
            lock(&self.group.inbox).along.clear();
            self.mesh.disclaim(&self.group);
        }
    }

    /// Where something is on its way: whether to look again at once, instead of sleeping.
    pub(super) fn hurries(&mut self) -> Option<bool> {
        if !self.along.moves() {
            return None;
        }
        let now = Instant::now();
        Some(self.mesh.brisk && now - *self.along.still.get_or_insert(now) < LINGER)
    }
}
