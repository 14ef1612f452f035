//! What goes wrong, who is gone, and who is told: the first cause in the world is the one that all groups fail with.
//!
//! ```text
//! a group fails here      poison   -> its members on other ranks (Note::Poison), then the group
//! a rank is gone          ended    -> all ranks (Note::Cause), then each group that it is in
//! somebody gives up       abort    -> all ranks (Note::Abort), then every group
//! a rank leaves in order  bye + Note::Leave(None): its groups know that nothing more comes of it
//! ```

use std::{
    string::String,
    sync::{PoisonError, atomic::Ordering},
    time::{Duration, Instant},
    vec::Vec,
};

use super::{Mesh, Registry};
use crate::{
    Error,
    transport::socket::{control::Note, group::Group, lock},
};

impl Mesh {
    /// Poisons one group on all its members; what went wrong first in the world is what it is told.
    pub(in super::super) fn poison(&self, group: &Group, cause: Error) -> Error {
        let mut registry = lock(&self.registry);
        let cause = cause.after(&mut registry.cause);
        drop(registry);
        if !group.is_poisoned() {
            let note = Note::Poison {
                group: group.id,
                cause: cause.clone(),
            };
            let others = group.ranks.iter().filter(|&&rank| rank != self.rank);
            others.for_each(|&rank| self.plane.tell(rank, &note));
        }
        let first = group.fail(cause);
        self.rouse_all();
        first
    }

    /// Makes every operation of every group on every rank fail.
    pub(in super::super) fn abort(&self) {
        self.plane.tell_all(&Note::Abort { rank: self.rank });
        self.aborted(self.rank);
    }

    fn aborted(&self, rank: usize) {
        let cause = Error::Aborted { rank };
        let mut registry = lock(&self.registry);
        registry.cause.get_or_insert_with(|| cause.clone());
        let cause = registry.aborted.get_or_insert(cause).clone();
        drop(registry);
        for group in self.live() {
            group.fail(cause.clone());
        }
    }

    /// A note of another rank.
    pub(in super::super) fn told(&self, from: usize, note: Note) {
        match note {
            Note::Beat => {}
            Note::Abort { rank } => self.aborted(rank),
            Note::Cause(cause) => {
                lock(&self.registry).cause.get_or_insert(cause);
            }
            Note::Poison { group, cause } => {
                let mut registry = lock(&self.registry);
                registry.cause.get_or_insert_with(|| cause.clone());
                match self.find(group) {
                    Some(group) => {
                        drop(registry);
                        group.fail(cause);
                        self.rouse_all();
                    }
                    None if registry.closed.contains(&group) => {}
                    None => {
                        registry.early_poison.entry(group).or_insert(cause);
                    }
                }
            }
            Note::Leave(None) => {
                lock(&self.registry).gone.entry(from).or_insert(None);
                self.see_off(from);
            }
            Note::Leave(Some(cause)) => self.failed(from, cause),
            Note::Meet {
                generation,
                host,
                port,
                members,
            } => {
                *lock(&self.meeting.0) = Some((generation, host, port, members));
                self.meeting.1.notify_all();
            }
        }
    }

    /// Nothing more comes from a rank, and it did not say why.
    pub(in super::super) fn ended(&self, rank: usize, reason: String) {
        if !lock(&self.registry).gone.contains_key(&rank) {
            self.failed(rank, Error::PeerLost { rank, reason });
        }
    }

    /// A rank is gone for a cause: all are told before any of my groups is.
    fn failed(&self, rank: usize, cause: Error) {
        let mut registry = lock(&self.registry);
        let cause = registry.cause.get_or_insert(cause).clone();
        if registry.gone.insert(rank, Some(cause.clone())).is_some() {
            return;
        }
        drop(registry);
        self.plane.tell_all(&Note::Cause(cause.clone()));
        for group in self.live() {
            if group.ranks.contains(&rank) {
                group.fail(cause.clone());
            }
        }
        self.rouse_all();
    }

    pub(super) fn bye(&self, rank: usize) {
        self.byes[rank].store(true, Ordering::Release);
        self.see_off(rank);
    }

    /// Whether a rank has left in good order: both its connections have said so, each after all
    /// else that it had to say.
    pub(super) fn has_left(&self, registry: &Registry, rank: usize) -> bool {
        registry.gone.get(&rank) == Some(&None) && self.byes[rank].load(Ordering::Acquire)
    }

    fn see_off(&self, rank: usize) {
        if !self.has_left(&lock(&self.registry), rank) {
            return;
        }
        for group in self.live() {
            if let Some(place) = group.ranks.iter().position(|&r| r == rank) {
                group.leave(place);
            }
        }
    }

    /// This rank's own failure, told to all; the world's first cause.
    pub(in super::super) fn leave(&self, failure: Option<Error>) {
        let cause = failure.map(|failure| {
            let mut registry = lock(&self.registry);
            registry.cause.get_or_insert(failure).clone()
        });
        self.plane.tell_all(&Note::Leave(cause));
    }

    pub(in super::super) fn await_meeting(
        &self,
        generation: u32,
        timeout: Duration,
    ) -> Option<(String, u16, Vec<usize>)> {
        let until = Instant::now() + timeout;
        let mut meeting = lock(&self.meeting.0);
        loop {
            if let Some((told, host, port, members)) = &*meeting
                && *told == generation
            {
                return Some((host.clone(), *port, members.clone()));
            }
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return None;
            }
            meeting = self
                .meeting
                .1
                .wait_timeout(meeting, left)
                .unwrap_or_else(PoisonError::into_inner)
                .0;
        }
    }

    /// Whether anything has gone wrong.
    pub(in super::super) fn failing(&self) -> bool {
        lock(&self.registry).cause.is_some()
    }

    /// Ranks that have ended.
    pub(in super::super) fn gone(&self) -> Vec<usize> {
        lock(&self.registry).gone.keys().copied().collect()
    }

    /// Ranks known to be lost.
    pub(in super::super) fn lost(&self) -> Vec<usize> {
        let registry = lock(&self.registry);
        let lost = registry.gone.iter().filter(|(_, cause)| cause.is_some());
        lost.map(|(rank, _)| *rank).collect()
    }
}
