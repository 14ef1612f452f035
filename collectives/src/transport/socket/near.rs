//! A group whose members share memory, as [`super::Sockets`] sees it.
//!
//! Calls are then announced in the group's arena and not by frames. Whoever waits for the arena alone
//! sleeps on a futex there (a shared one: it is found by its page, not by its address); who waits for
//! messages too sleeps on its sockets, and is knocked at.

use std::{
    format,
    sync::{Arc, Weak, atomic::Ordering},
    time::{Duration, Instant},
    vec::Vec,
};

use rustix::{
    event::Timespec,
    thread::futex::{self, Flags},
};

use super::{
    codec::{Reader, Writer, get_call, put_call},
    frame::Kind,
    group::{Chime, Group},
    lock,
    mesh::Mesh,
};
use crate::{
    Error, Result,
    transport::{
        Call,
        direct::{Arena, Bell, End, Heard, Reach, Sharing},
        shm::{Members, Shm},
    },
};

#[derive(Debug)]
pub(super) struct Near {
    shm: Arc<Shm>,
    end: Option<End>,
    /// My call, where the arena was not there yet to announce it in.
    pending: Option<Call>,
    /// My last call's number.
    last: u64,
    /// My last two calls, as they stand in the arena.
    told: [Option<Call>; 2],
}

/// What waiting on a futex is interrupted for, to see to the sockets.
const FIRST_SLICE: Duration = Duration::from_millis(5);
const LAST_SLICE: Duration = Duration::from_millis(80);

/// How a rank sleeps.
const ON_FUTEX: u64 = 1;
pub(super) const ON_SOCKETS: u64 = 2;

impl Near {
    /// None where the members do not all share memory. The first member makes the arena.
    pub(super) fn new(mesh: &Arc<Mesh>, group: &Arc<Group>) -> Result<Option<Self>> {
        let Some(shm) = mesh.shm.clone().filter(|shm| shm.near(&group.ranks)) else {
            return Ok(None);
        };
        let mut near = Self {
            shm,
            end: None,
            pending: None,
            last: 0,
            told: [None; 2],
        };
        if group.me == 0 {
            let arena = near.shm.offer(group.id, group.ranks.len())?;
            near.enter(arena, mesh, group);
        }
        Ok(Some(near))
    }

    fn enter(&mut self, arena: Arena, mesh: &Arc<Mesh>, group: &Arc<Group>) {
        let arena = Arc::new(arena);
        let (mine, me) = (arena.clone(), group.me);
        let chime = Chime(std::boxed::Box::new(move || ring(&mine, me)));
        *lock(&group.chime) = Some(chime);
        let members = Members::new(self.shm.clone(), group.ranks.clone());
        let bells = Bells {
            arena: arena.clone(),
            mesh: Arc::downgrade(mesh),
            group: Arc::downgrade(group),
        };
        let reach = Reach::Segments(Arc::new(members));
        let end = End::new((arena, group.me), mesh.world, reach, Arc::new(bells));
        self.end = Some(end.counting(self.shm.moved.clone()));
    }

    /// My end of the arena, once its maker has come.
    pub(super) fn end(&mut self, mesh: &Arc<Mesh>, group: &Arc<Group>) -> Option<&mut End> {
        if self.end.is_none() {
            let arena = self.shm.find(group.ranks[0], group.id, group.ranks.len())?;
            self.enter(arena, mesh, group);
        }
        self.end.as_mut()
    }

    pub(super) fn share(&mut self, mesh: &Arc<Mesh>, group: &Arc<Group>) -> Sharing<'_> {
        match self.end(mesh, group) {
            Some(end) => Sharing::Ready(end),
            None => Sharing::NotYet,
        }
    }

    /// The end, as far as it is known.
    pub(super) fn known(&self) -> Option<&End> {
        self.end.as_ref()
    }

    pub(super) fn announce(&mut self, call: &Call, mesh: &Arc<Mesh>, group: &Arc<Group>) {
        self.last = call.sequence;
        match self.end(mesh, group) {
            Some(_) => self.tell(group.me, call),
            None => self.pending = Some(*call),
        }
    }

    /// What is known of my last call; none where the arena is not there yet.
    pub(super) fn heard(&mut self, mesh: &Arc<Mesh>, group: &Arc<Group>) -> Option<Heard> {
        self.end(mesh, group)?;
        if let Some(call) = self.pending {
            self.pending = None;
            self.tell(group.me, &call);
        }
        self.end.as_mut().map(End::heard)
    }

    fn tell(&mut self, me: usize, call: &Call) {
        let Some(end) = &mut self.end else { return };
        let told = &mut self.told[(call.sequence % 2) as usize];
        // What stands there already need not be written again.
        if !told.is_some_and(|told| call.repeats(&told)) {
            let mut record = Writer(Vec::with_capacity(128));
            put_call(&mut record, call);
            end.arena().set_record(me, call.sequence, &record.0);
            *told = Some(*call);
        }
        end.announce(call);
    }

    /// The difference between my last call and a member's.
    pub(super) fn mismatch(&self, place: usize, group: &Group) -> Error {
        let sequence = self.last;
        let mine = self.told[(sequence % 2) as usize];
        let theirs = mine.zip(self.end.as_ref()).and_then(|(mine, end)| {
            let record = end.arena().get_record(place, sequence);
            let theirs = get_call(&mut Reader(&record), sequence)?;
            Some((Call { sequence, ..mine }, theirs))
        });
        match theirs {
            Some((mine, theirs)) => group.mismatch(mine, place, theirs),
            None => Error::PeerLost {
                rank: group.ranks[place],
                reason: format!("its call in group {} cannot be read", group.name),
            },
        }
    }

    /// Sleeps until what is waited for in the arena has come, the group is poked, or `timeout` is over.
    pub(super) fn park(
        &self,
        group: &Group,
        (eager, timeout): (bool, Duration),
        serve: impl Fn(Duration),
    ) {
        let until = Instant::now() + timeout;
        let Some(end) = &self.end else {
            // There is nothing to sleep on before its maker has come.
            return serve(timeout.min(Duration::from_micros(300)));
        };
        let mut slice = FIRST_SLICE;
        if end.linger(eager, timeout, || end.arrived() || group.is_poisoned()) {
            return;
        }
        let bell = end.arena().bell(group.me);
        loop {
            let seen = bell.load(Ordering::Acquire);
            let left = until.saturating_duration_since(Instant::now());
            let poked = lock(&group.inbox).poked || group.is_poisoned();
            if poked || left.is_zero() || !end.may_sleep(ON_FUTEX) {
                break;
            }
            let time = left.min(slice);
            let time = Timespec {
                tv_sec: time.as_secs() as i64,
                tv_nsec: i64::from(time.subsec_nanos()),
            };
            // Whatever ends it, the reason is looked at above.
            let _ = futex::wait(bell, Flags::empty(), seen, Some(&time));
            end.awake();
            serve(Duration::ZERO);
            slice = (slice * 2).min(LAST_SLICE);
        }
        end.awake();
    }

    /// I am through with the group.
    pub(super) fn leave(&self, group: &Group) {
        // Its memory may be somebody else's from now on.
        *lock(&group.chime) = None;
        let arena = self.end.as_ref().map(End::arena);
        let n = group.ranks.len();
        self.shm.leave(arena, group.ranks[0], group.id, n);
    }
}

fn ring(arena: &Arena, rank: usize) {
    let bell = arena.bell(rank);
    bell.fetch_add(1, Ordering::AcqRel);
    // It fails where nobody sleeps there.
    let _ = futex::wake(bell, Flags::empty(), u32::MAX);
}

struct Bells {
    arena: Arc<Arena>,
    mesh: Weak<Mesh>,
    group: Weak<Group>,
}

impl Bell for Bells {
    fn ring(&self, rank: usize, how: u64) {
        if how == ON_FUTEX {
            return ring(&self.arena, rank);
        }
        if let (Some(mesh), Some(group)) = (self.mesh.upgrade(), self.group.upgrade()) {
            let knock = mesh.frame(&group, Kind::Knock, 0);
            mesh.push(group.ranks[rank], knock, Vec::new());
        }
    }
}
