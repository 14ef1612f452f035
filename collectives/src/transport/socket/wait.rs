//! How a rank waits: it looks for a moment, then sleeps on its sockets and serves what comes.

use std::{
    time::{Duration, Instant},
    vec,
    vec::Vec,
};

use rustix::event::{PollFd, PollFlags};

use super::{LINGER, Sockets, lock, poll};
use crate::transport::Wait;

impl Sockets {
    /// Keeps looking for a while where what is waited for comes from this host and nobody is kept from running; whether
    /// it has come. A sleep and a wake take longer than a short message.
    pub(super) fn linger(&self, wait: &Wait, timeout: Duration) -> bool {
        let (mesh, group) = (&self.mesh, &self.group);
        let from: Vec<usize> = match wait.recv.is_empty() {
            true => (0..group.ranks.len()).collect(),
            false => wait.recv.iter().map(|(from, _)| *from).collect(),
        };
        let ranks = || from.iter().map(|&place| group.ranks[place]);
        let near = |rank: usize| mesh.peer(rank).is_some_and(|peer| peer.near);
        if !mesh.brisk || !ranks().any(near) {
            return false;
        }
        let (begin, time) = (Instant::now(), LINGER.min(timeout));
        loop {
            for rank in ranks() {
                mesh.pull(rank, Some(group.id));
            }
            if !self.flushed() {
                group.ranks.iter().for_each(|&rank| mesh.flush(rank));
            }
            let flushed = wait.confirm.is_none() || self.flushed();
            let arrived = wait.confirm.is_some() && flushed && self.arrived();
            let ready = lock(&group.inbox).ready(!wait.recv.is_empty(), flushed);
            if arrived || ready || group.is_poisoned() {
                return true;
            }
            if begin.elapsed() > time {
                return false;
            }
            core::hint::spin_loop();
        }
    }

    /// Sleeps until a socket of this group is ready or somebody rings, and serves what is ready.
    pub(super) fn serve(&self, timeout: Duration) {
        let (mesh, group) = (&self.mesh, &self.group);
        if let Some(mpi) = mesh.mpi() {
            // What it sent may be taken back by another thread, which rouses nobody.
            let sending = !self.flushed();
            return mpi.wait(mesh, group, timeout, || sending && self.flushed());
        }
        let mut fds = vec![PollFd::new(&group.waker, PollFlags::IN)];
        let mut places = Vec::with_capacity(group.ranks.len());
        for (place, &rank) in group.ranks.iter().enumerate() {
            let Some(peer) = mesh.peer(rank) else {
                continue;
            };
            let mut flags = PollFlags::empty();
            // What somebody else reads or writes from his own memory has nobody but him.
            let mut inn = lock(&peer.inn);
            let later = inn.claim().is_some_and(|claim| {
                claim.wanted != (claim.group == group.id) && mesh.claims_still(claim.group)
            });
            if !inn.over && !later {
                inn.doze(&peer.data);
                flags |= PollFlags::IN;
            }
            drop(inn);
            flags.set(
                PollFlags::OUT,
                lock(&peer.out).waits(self.along.lends(place)),
            );
            if !flags.is_empty() {
                places.push(place);
                fds.push(PollFd::new(&peer.data, flags));
            }
        }
        poll(&mut fds, timeout);
        // What this thread brings itself need not wake it.
        lock(&group.inbox).park(false);
        if !fds[0].revents().is_empty() {
            group.waker.hush();
        }
        let mut along = false;
        for (fd, place) in fds[1..].iter().zip(places) {
            let (ready, rank) = (fd.revents(), group.ranks[place]);
            if ready.contains(PollFlags::OUT) {
                along |= self.along.lends(place).is_some();
                mesh.flush(rank);
            }
            if ready.intersects(PollFlags::IN | PollFlags::HUP | PollFlags::ERR) {
                along |= self.along.takes(place);
                mesh.pull(rank, Some(group.id));
            }
        }
        if along {
            // What this thread's caller does itself.
            lock(&group.inbox).poked = true;
        }
    }
}
