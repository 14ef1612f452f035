//! What a mesh does for long messages that are written from, and read to, the memory of their owners: [`super::along`].

use std::{net::Shutdown, sync::atomic::Ordering};

use super::{
    conn::Claim,
    frame::{Frame, Kind},
    group::Group,
    lock,
    mesh::{From, Mesh},
};

/// How far a lent payload has gone.
pub(super) struct Lent {
    /// Its frame's number.
    pub(super) number: u64,
    /// Bytes of it that are with the kernel; none when all is.
    pub(super) gone: Option<usize>,
}

/// Bytes of a lent payload that are written before its owner looks at what has come in meanwhile.
const TURN: usize = 256 << 10;

impl Mesh {
    /// Whether an owner wants to read the payload of this frame himself.
    pub(super) fn claim(&self, from: usize, frame: &Frame) -> Option<Claim> {
        let mine = frame.generation == self.generation && frame.from as usize == from;
        if !mine || frame.kind != Kind::Data || frame.payload_crc.is_some() {
            return None;
        }
        let group = self.find(frame.group)?;
        let place = group.ranks.iter().position(|&rank| rank == from)?;
        let wanted = group.claims(place, frame)?;
        // Its call is heard now, and not when all of it is there.
        if let Some(call) = frame.call
            && let Err(mismatch) = group.heard(place, call)
        {
            self.poison(&group, mismatch);
            return None;
        }
        Some(Claim {
            group: group.id,
            wanted,
        })
    }

    /// A message of that rank is waited for whole: if it was to be read later it is not.
    pub(super) fn store(&self, group: &Group, rank: usize) {
        if let Some(peer) = self.peer(rank) {
            let mut inn = lock(&peer.inn);
            if inn.claim().is_some_and(|claim| claim.group == group.id) {
                inn.store(&self.pool);
            }
        }
    }

    /// Reads on in what a group claimed of a rank, into `room`; how many bytes of it came.
    pub(super) fn take(&self, group: &Group, rank: usize, room: &mut [u8]) -> usize {
        let Some(peer) = self.peer(rank) else {
            return 0;
        };
        let mut inn = lock(&peer.inn);
        // Poisoned meanwhile, the group has lost its claim.
        let claim = Claim {
            group: group.id,
            wanted: true,
        };
        if inn.over || inn.claim() != Some(claim) {
            return 0;
        }
        let taken = inn.take(&peer.data, room);
        let through = inn.claim().is_none();
        // What came behind it; an end there takes back nothing of what came before.
        let behind = match taken {
            Ok(_) if through => inn.pull(&peer.data, &self.pool, &mut From { mesh: self, rank }),
            _ => Ok(false),
        };
        drop(inn);
        if through {
            self.rouse_others(rank, group);
        }
        let (taken, end) = match taken {
            Ok(n) => (n, behind.err()),
            Err(end) => (0, Some(end)),
        };
        if let Some(end) = end {
            self.end_of(rank, end);
        }
        taken
    }

    /// Whether the group that claimed a payload may still read it.
    pub(super) fn claims_still(&self, group: u64) -> bool {
        self.find(group).is_some_and(|group| !group.is_poisoned())
    }

    /// A group reads nothing on in what it claimed.
    pub(super) fn disclaim(&self, group: &Group) {
        for &rank in &group.ranks {
            let Some(peer) = self.peer(rank) else {
                continue;
            };
            let mut inn = lock(&peer.inn);
            if inn.claim().is_some_and(|claim| claim.group == group.id) {
                inn.disclaim();
                drop(inn);
                self.rouse_others(rank, group);
            }
        }
    }

    /// Groups have failed: what they had claimed or lent keeps nobody else from his connections any more.
    pub(super) fn rouse_all(&self) {
        self.live().iter().for_each(|group| group.poke_parked());
    }

    /// Nobody but one group could go on with the connection to a rank, and now all can again.
    fn rouse_others(&self, rank: usize, group: &Group) {
        let others = self.live().into_iter().filter(|other| other.id != group.id);
        others
            .filter(|other| other.ranks.contains(&rank))
            .for_each(|other| other.poke_parked());
    }

    /// Queues a frame whose payload stays with its owner, or writes on in one; how far that is.
    pub(super) fn lend(
        &self,
        group: &Group,
        rank: usize,
        what: core::result::Result<Frame, u64>,
        payload: &[u8],
    ) -> Lent {
        let Some(peer) = self.peer(rank) else {
            return Lent {
                number: 0,
                gone: None,
            };
        };
        let mut out = lock(&peer.out);
        let number = match what {
            Ok(frame) => {
                self.count(rank, payload.len());
                out.lend(frame, payload, TURN, &peer.data)
            }
            Err(number) => number,
        };
        let to = (&peer.data, &self.pool);
        let gone = match what {
            Ok(_) => out.reached(number),
            Err(number) => out.lend_on(number, payload, TURN, to),
        };
        let behind = !out.is_empty();
        if !behind {
            peer.helped.store(false, Ordering::Release);
        }
        drop(out);
        if gone.is_none() && what.is_err() {
            // Others go on with what could not go before.
            self.rouse_others(rank, group);
            if behind {
                self.plane.help();
            }
        }
        Lent { number, gone }
    }

    /// The owner of a lent payload does not stay: what is left of it is copied, or if that cannot be, nothing more is
    /// sent to that rank.
    pub(super) fn unlend(&self, group: &Group, rank: usize, number: u64, payload: Option<&[u8]>) {
        let Some(peer) = self.peer(rank) else {
            return;
        };
        let mut out = lock(&peer.out);
        match payload {
            Some(payload) => {
                out.keep(number, payload, &self.pool);
                out.flush(&peer.data, &self.pool);
            }
            None if out.done <= number => {
                out.give_up();
                peer.data.shutdown(Shutdown::Write);
            }
            None => {}
        }
        let unsent = !out.is_empty();
        drop(out);
        // Only its owner could write it, and now all can.
        self.rouse_others(rank, group);
        if unsent {
            // Nobody may be waiting for it.
            peer.helped.store(true, Ordering::Release);
            self.plane.help();
        }
    }
}
