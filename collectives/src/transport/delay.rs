//! A transport on which each message takes a given time (`std`): overlap shows even in one process.
//!
//! ```text
//! try_send at t --> inner --> held back by the receiver until t + latency + bytes * per_byte
//! ```
//!
//! Messages do not queue behind each other: the delay is latency, not bandwidth of a shared link.

use std::{
    sync::OnceLock,
    time::{Duration, Instant},
    vec::Vec,
};

use crate::{
    Result,
    transport::{Message, Tag, Transport, Wait},
};

/// Wraps a transport; all ranks of a group must be wrapped.
#[derive(Debug)]
pub struct Delay<T> {
    inner: T,
    latency: Duration,
    per_byte: Duration,
    /// Arrived, not yet to be seen, in order of arrival.
    held: Vec<(usize, Message)>,
}

impl<T: Transport> Delay<T> {
    /// Every message sent over this endpoint takes `latency`, and `per_byte` for each byte.
    pub fn new(inner: T, latency: Duration, per_byte: Duration) -> Self {
        Self {
            inner,
            latency,
            per_byte,
            held: Vec::new(),
        }
    }

    /// Sends a message that arrives so much later than it would.
    pub(super) fn send_after(
        &mut self,
        to: usize,
        mut message: Message,
        late: Duration,
    ) -> Result<Option<Message>> {
        message.due = now() + late.as_nanos() as u64;
        self.inner.try_send(to, message)
    }

    fn held_at(&self, from: usize, tag: Tag) -> Option<usize> {
        self.held
            .iter()
            .position(|(peer, message)| *peer == from && message.tag == tag)
    }
}

impl<T: Transport> Transport for Delay<T> {
    crate::forward_transport!(inner: group, calls);

    fn try_send(&mut self, to: usize, message: Message) -> Result<Option<Message>> {
        let bytes = u32::try_from(message.bytes()).unwrap_or(u32::MAX);
        let late = self.latency + self.per_byte.saturating_mul(bytes);
        self.send_after(to, message, late)
    }

    fn try_recv(&mut self, from: usize, tag: Tag) -> Result<Option<Message>> {
        if self.held_at(from, tag).is_none()
            && let Some(message) = self.inner.try_recv(from, tag)?
        {
            self.held.push((from, message));
        }
        Ok(match self.held_at(from, tag) {
            Some(at) if self.held[at].1.due <= now() => Some(self.held.remove(at).1),
            _ => None,
        })
    }

    fn park(&mut self, wait: &Wait, timeout: Duration) {
        // What is held is no longer the inner transport's to announce.
        let (mut rest, now) = (wait.clone(), now());
        rest.recv
            .retain(|&(from, tag)| self.held_at(from, tag).is_none());
        let held = wait
            .recv
            .iter()
            .filter_map(|&(from, tag)| self.held_at(from, tag));
        let due = held.map(|at| self.held[at].1.due.saturating_sub(now)).min();
        let timeout = due.map_or(timeout, |nanos| timeout.min(Duration::from_nanos(nanos)));
        self.inner.park(&rest, timeout);
    }

    fn subgroup(&self, members: &[usize], name: &str) -> Result<Self> {
        let inner = self.inner.subgroup(members, name)?;
        Ok(Self::new(inner, self.latency, self.per_byte))
    }
}

/// Nanoseconds since some moment of this process, never 0.
fn now() -> u64 {
    static START: OnceLock<Instant> = OnceLock::new();
    START.get_or_init(Instant::now).elapsed().as_nanos() as u64 + 1
}
