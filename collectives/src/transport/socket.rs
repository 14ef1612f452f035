//! Ranks as processes, over tcp or unix sockets and shared memory (`std`, unix).
//!
//! ```text
//! Join --store--> Seat --communicator()--> Communicator<Sockets>
//!
//!            data        one connection a pair: frames with length, tag, number, generation, checksum
//! rank 0 ============ rank 1
//!            control     one more: beats, the first cause of a failure, farewells; a thread serves it
//! ```
//!
//! A rank that waits drives its own data connections: it writes what is queued and reads whatever
//! comes, for all its groups, so that no two ranks can block each other by sending at the same time.
//! Nobody waits in a write. What a `send` leaves behind is written by the control thread.
//!
//! Long messages of collectives are written from and read to the memory of the call, in parts (`socket/along.rs`).
//! Whoever waits for ranks of its own host in a blocking call keeps looking for a moment before it sleeps, if there is a
//! core for each of them.
//!
//! Every rank hears every call of its group: with the first message about it, or else by itself. A
//! call is over when all have been heard.
//!
//! Between ranks of one host the same with [`Kind::Shm`]: the sockets then carry what is short, and what is long
//! goes by memory that the ranks share ([`super::shm`]).
//!
//! And with [`Kind::Mpi`] what MPI has, without a socket (`mpi`, a feature).
//!
//! Failure: a process that dies closes its control connections, and each survivor sees that for
//! itself; a survivor that gives up says first why. A host that falls silent is noticed over tcp in
//! about two seconds, by the kernel. A stopped or busy process is not lost: who waits for it has its
//! deadline.

use std::{
    string::ToString,
    sync::{Arc, Mutex, MutexGuard, PoisonError, atomic::Ordering},
    thread::JoinHandle,
    time::{Duration, Instant},
    vec,
    vec::Vec,
};

use rustix::event::{PollFd, Timespec};

use crate::{
    DType, Error, Result,
    transport::{Call, Control, Message, Sent, Tag, Transport, Wait, checked_members},
};

mod along;
#[cfg(not(target_os = "linux"))]
mod apart;
mod codec;
mod conn;
pub mod control;
mod faulty;
pub mod frame;
mod group;
pub(crate) mod handshake;
mod join;
#[cfg(target_os = "linux")]
mod kernel;
mod mesh;
#[cfg(feature = "mpi")]
pub mod mpi;
#[cfg(not(feature = "mpi"))]
#[path = "socket/no_mpi.rs"]
mod mpi;
#[cfg(target_os = "linux")]
mod near;
mod seat;
pub(crate) mod stream;
mod through;
mod wait;
pub(crate) mod waker;

pub use join::{Join, Kind};
pub use seat::{Moved, Seat};

use frame::Kind as Purpose;
use group::Group;
use mesh::Mesh;

/// One rank's endpoint of one group.
#[derive(Debug)]
pub struct Sockets {
    mesh: Arc<Mesh>,
    group: Arc<Group>,
    /// My call under way.
    call: Option<Call>,
    /// By place: calls it has been told of.
    told: Vec<u64>,
    /// By place: frames of collectives sent to it, as the number after the last.
    sent: Vec<u64>,
    /// By place: user bytes sent and not given back, and whether it was asked for them.
    owed: Vec<(u64, bool)>,
    /// Whether a collective has sent something since it was last seen to be with the kernel.
    sending: bool,
    along: along::Along,
    /// Where all members share memory.
    #[cfg(target_os = "linux")]
    near: Option<near::Near>,
}

/// How long a rank that has nothing else to do keeps looking before it sleeps.
const LINGER: Duration = Duration::from_micros(60);

impl Sockets {
    fn new(mesh: Arc<Mesh>, group: Arc<Group>) -> Result<Self> {
        let n = group.ranks.len();
        Ok(Self {
            #[cfg(target_os = "linux")]
            near: near::Near::new(&mesh, &group)?,
            mesh,
            group,
            call: None,
            told: vec![0; n],
            sent: vec![0; n],
            owed: vec![(0, false); n],
            sending: false,
            along: along::Along::new(n),
        })
    }

    /// That member is gone and something was still expected of it: nobody in the group can go on.
    fn lost(&self, place: usize) -> Error {
        let reason = std::format!(
            "it left before its part in group {} was done",
            self.group.name
        );
        let cause = Error::PeerLost {
            rank: self.group.ranks[place],
            reason,
        };
        self.mesh.poison(&self.group, cause)
    }

    fn left(&self, place: usize) -> bool {
        self.group.left[place].load(Ordering::Acquire)
    }

    /// Whether `bytes` more may be under way to a member that need not have asked for them.
    fn has_room(&mut self, to: usize, bytes: u64) -> bool {
        let given = core::mem::take(&mut lock(&self.group.inbox).credit[to]);
        let (owed, asked) = &mut self.owed[to];
        *owed -= given;
        if *owed == 0 || *owed + bytes <= self.mesh.bound {
            *owed += bytes;
            *asked = false;
            return true;
        }
        if !core::mem::replace(asked, true) {
            let frame = self.mesh.frame(&self.group, Purpose::Ask, 0);
            self.mesh.push(self.group.ranks[to], frame, Vec::new());
        }
        false
    }

    /// The frame of a message, with my call where it is the first about it to that member.
    fn message(&mut self, to: usize, tag: Tag, dtype: DType, len: usize) -> frame::Frame {
        let mut call = None;
        if let Tag::Collective(sequence) = tag
            && self.told[to] <= sequence
        {
            call = self.call.filter(|call| call.sequence == sequence);
            self.told[to] = sequence + 1;
        }
        frame::Frame {
            tag,
            dtype,
            call,
            ..self.mesh.frame(&self.group, Purpose::Data, len as u64)
        }
    }

    /// Sends a long message by shared memory; false where there is none or no room in it.
    #[cfg(target_os = "linux")]
    fn lend_memory(&mut self, to: usize, tag: Tag, dtype: DType, bytes: &[u8]) -> bool {
        let (mesh, rank) = (self.mesh.clone(), self.group.ranks[to]);
        let Some(shm) = mesh.shm.as_ref().filter(|shm| shm.sees(rank)) else {
            return false;
        };
        if bytes.len() < super::shm::LONG {
            return false;
        }
        let Some(place) = shm.lend(bytes) else {
            return false;
        };
        let frame = frame::Frame {
            kind: Purpose::Lent,
            ..self.message(to, tag, dtype, bytes.len() / dtype.bytes())
        };
        let number = mesh.push(rank, frame, vec![place]);
        self.note(to, tag, number);
        true
    }

    #[cfg(not(target_os = "linux"))]
    fn lend_memory(&mut self, _: usize, _: Tag, _: DType, _: &[u8]) -> bool {
        false
    }

    /// A collective is over when what it sent is with the kernel.
    fn note(&mut self, to: usize, tag: Tag, number: u64) {
        if matches!(tag, Tag::Collective(_)) {
            self.sent[to] = number + 1;
            self.sending = true;
        }
    }

    /// The mismatch with a member's call, told to all.
    #[cfg(target_os = "linux")]
    fn differs(&self, place: usize) -> Error {
        let cause = self
            .near
            .as_ref()
            .map(|near| near.mismatch(place, &self.group));
        let cause = cause.unwrap_or_else(|| self.lost(place));
        self.mesh.poison(&self.group, cause)
    }

    /// [`Transport::confirmed`] where the calls are in the arena.
    #[cfg(target_os = "linux")]
    fn confirmed_near(&mut self) -> Result<bool> {
        use super::direct::Heard;
        let Some(near) = &mut self.near else {
            return Ok(false);
        };
        let heard = near.heard(&self.mesh, &self.group);
        match heard {
            Some(Heard::All) => return Ok(self.flushed()),
            Some(Heard::Differs(place)) => return Err(self.differs(place)),
            Some(Heard::Some) | None => {}
        }
        for place in 0..self.group.ranks.len() {
            // Whether it left is read first: what it called before it left counts.
            let left = self.left(place);
            let called = self
                .near
                .as_ref()
                .and_then(near::Near::known)
                .map_or(place != 0, |end| end.has_called(place));
            if left && !called {
                return Err(self.lost(place));
            }
        }
        Ok(false)
    }

    /// The same with the payload's checksum, where this run has them.
    fn summed(&self, frame: frame::Frame, payload: &[u8]) -> frame::Frame {
        let payload_crc = self.mesh.payload_crc.then(|| crc32c::crc32c(payload));
        frame::Frame {
            payload_crc,
            ..frame
        }
    }

    /// Tells my call to those whom no message of it has reached.
    fn tell_rest(&mut self, sequence: u64) {
        let Some(call) = self.call.filter(|call| call.sequence == sequence) else {
            return;
        };
        for place in 0..self.told.len() {
            if place != self.group.me && self.told[place] <= sequence {
                let frame = frame::Frame {
                    tag: Tag::Collective(sequence),
                    call: Some(call),
                    ..self.mesh.frame(&self.group, Purpose::Announce, 0)
                };
                self.told[place] = sequence + 1;
                let number = self.mesh.push(self.group.ranks[place], frame, Vec::new());
                self.sent[place] = number + 1;
                self.sending = true;
            }
        }
    }

    /// Whether what collectives sent is with the kernel.
    fn flushed(&self) -> bool {
        if !self.sending {
            return true;
        }
        let ranks = self.group.ranks.iter().zip(&self.sent);
        ranks
            .into_iter()
            .all(|(&rank, &sent)| self.mesh.has_sent(rank, sent))
    }

    /// Whether what is waited for in the arena has come.
    fn arrived(&self) -> bool {
        #[cfg(target_os = "linux")]
        if let Some(end) = self.near.as_ref().and_then(near::Near::known) {
            return end.arrived();
        }
        false
    }

    /// Whether nothing that is waited for in the arena has come; who brings it knocks from now on.
    fn may_sleep(&self) -> bool {
        #[cfg(target_os = "linux")]
        if let Some(end) = self.near.as_ref().and_then(near::Near::known) {
            return end.may_sleep(near::ON_SOCKETS);
        }
        true
    }
}

impl Transport for Sockets {
    fn rank(&self) -> usize {
        self.group.me
    }

    fn world(&self) -> usize {
        self.group.ranks.len()
    }

    fn global(&self, rank: usize) -> usize {
        self.group.ranks.get(rank).copied().unwrap_or(rank)
    }

    fn name(&self) -> &str {
        &self.group.name
    }

    fn try_send(&mut self, to: usize, message: Message) -> Result<Option<Message>> {
        self.group.healthy()?;
        if self.left(to) {
            return Err(self.lost(to));
        }
        if to == self.group.me {
            self.group.push(to, message);
            return Ok(None);
        }
        if self.mesh.mpi().is_some() {
            mpi::fits(message.bytes())?;
        }
        if matches!(message.tag, Tag::User(_)) && !self.has_room(to, message.bytes() as u64) {
            return Ok(Some(message));
        }
        let (tag, dtype, len, bytes) = (message.tag, message.dtype, message.len(), message.bytes());
        let words = message.into_storage();
        let payload = &bytemuck::cast_slice::<u64, u8>(&words)[..bytes];
        if self.lend_memory(to, tag, dtype, payload) {
            drop(self.mesh.pool.give(words));
            return Ok(None);
        }
        let frame = self.message(to, tag, dtype, len);
        let frame = self.summed(frame, payload);
        let number = self.mesh.push(self.group.ranks[to], frame, words);
        self.note(to, tag, number);
        Ok(None)
    }

    fn send_bytes(&mut self, to: usize, tag: Tag, dtype: DType, bytes: &[u8]) -> Result<bool> {
        self.group.healthy()?;
        if self.left(to) {
            return Err(self.lost(to));
        }
        let mesh = self.mesh.clone();
        let Some(peer) = mesh.peer(self.group.ranks[to]) else {
            return Ok(false);
        };
        if matches!(tag, Tag::User(_)) {
            return Ok(false);
        }
        if self.lend_memory(to, tag, dtype, bytes) {
            return Ok(true);
        }
        let frame = self.message(to, tag, dtype, bytes.len() / dtype.bytes());
        let frame = self.summed(frame, bytes);
        mesh.count(self.group.ranks[to], bytes.len());
        let number = lock(&peer.out).push_bytes(frame, bytes, &peer.data, &mesh.pool);
        self.note(to, tag, number);
        Ok(true)
    }

    fn send_along(&mut self, to: usize, tag: Tag, dtype: DType, bytes: &[u8]) -> Result<Sent> {
        self.lend(to, (tag, dtype), bytes)
    }

    fn send_alone(&mut self, to: usize, bytes: &[u8]) {
        self.unlend(to, Some(bytes));
    }

    fn recv_along(
        &mut self,
        from: usize,
        tag: Tag,
        (dtype, len): (DType, usize),
        room: &mut [u8],
    ) -> Result<Option<usize>> {
        self.take(from, (tag, dtype, len), room)
    }

    fn recycle(&mut self, storage: Vec<u64>) -> Option<Vec<u64>> {
        self.mesh.pool.give(storage)
    }

    fn try_recv(&mut self, from: usize, tag: Tag) -> Result<Option<Message>> {
        self.group.healthy()?;
        // Read before the inbox: what a rank sent before it left is still to be had.
        let left = self.left(from);
        let mut inbox = lock(&self.group.inbox);
        let Some(message) = inbox.take(from, tag) else {
            drop(inbox);
            return if left { Err(self.lost(from)) } else { Ok(None) };
        };
        #[cfg(target_os = "linux")]
        if let (Tag::Collective(sequence), Some(near)) = (tag, &self.near)
            && near.known().is_some_and(|end| end.differs(from, sequence))
        {
            drop(inbox);
            return Err(self.differs(from));
        }
        if matches!(tag, Tag::User(_)) && from != self.group.me {
            let (bytes, asked) = &mut inbox.consumed[from];
            *bytes += message.bytes() as u64;
            if *bytes > 0 && (*asked || *bytes > self.mesh.bound / 4) {
                let bytes = core::mem::take(bytes);
                *asked = false;
                drop(inbox);
                self.mesh.give_credit(&self.group, from, bytes);
            }
        }
        Ok(Some(message))
    }

    fn announce(&mut self, call: &Call) -> Result<()> {
        self.forget_along();
        self.group.healthy()?;
        #[cfg(target_os = "linux")]
        if let Some(near) = &mut self.near {
            near.announce(call, &self.mesh, &self.group);
            return match near.heard(&self.mesh, &self.group) {
                Some(super::direct::Heard::Differs(place)) => Err(self.differs(place)),
                _ => Ok(()),
            };
        }
        self.call = Some(*call);
        lock(&self.group.inbox).within = Some(call.sequence);
        let outcome = self.group.announce(*call);
        outcome.map_err(|mismatch| {
            // Those who have not heard of this call must see the same difference.
            self.tell_rest(call.sequence);
            self.mesh.poison(&self.group, mismatch)
        })
    }

    fn confirmed(&mut self, sequence: u64) -> Result<bool> {
        self.group.healthy()?;
        #[cfg(target_os = "linux")]
        if self.near.is_some() {
            return self.confirmed_near();
        }
        self.tell_rest(sequence);
        let inbox = lock(&self.group.inbox);
        if inbox.all_called(sequence) {
            drop(inbox);
            let flushed = self.flushed();
            if flushed {
                self.sending = false;
                let mut inbox = lock(&self.group.inbox);
                inbox.forget(sequence);
                inbox.within = None;
            }
            return Ok(flushed);
        }
        let absent: Vec<usize> = inbox.absentees(sequence).collect();
        drop(inbox);
        let gone = absent.into_iter().find(|&place| self.left(place));
        // What it called before it left counts, though it came after the first look.
        let gone = gone.filter(|&place| !lock(&self.group.inbox).has_called(place, sequence));
        gone.map_or(Ok(false), |place| Err(self.lost(place)))
    }

    fn absent(&self, sequence: u64) -> Option<usize> {
        #[cfg(target_os = "linux")]
        if let Some(near) = &self.near {
            return near.known().map_or(Some(0), |end| end.laggard());
        }
        lock(&self.group.inbox).absent(sequence)
    }

    fn healthy(&mut self) -> Result<()> {
        self.group.healthy()
    }

    #[cfg(target_os = "linux")]
    fn direct(&mut self) -> super::direct::Sharing<'_> {
        match &mut self.near {
            Some(near) => near.share(&self.mesh, &self.group),
            None => super::direct::Sharing::Never,
        }
    }

    #[cfg(target_os = "linux")]
    fn allocate<E: crate::Element>(&self, len: usize) -> Result<super::buffer::Buffer<E>> {
        use super::buffer::Buffer;
        let bytes = len.checked_mul(size_of::<E>());
        match (&self.mesh.shm, bytes) {
            (Some(shm), Some(bytes)) if self.near.is_some() => {
                Ok(Buffer::shared(shm.region(bytes)?, len))
            }
            _ => Ok(Buffer::private(len)),
        }
    }

    fn park(&mut self, wait: &Wait, timeout: Duration) {
        let until = Instant::now() + timeout;
        #[cfg(target_os = "linux")]
        if let Some(near) = &self.near
            && wait.recv.is_empty()
            && wait.send.is_empty()
            && self.flushed()
        {
            let patience = (wait.eager, timeout);
            near.park(&self.group, patience, |time| self.serve(time));
            return lock(&self.group.inbox).unpark();
        }
        let called = wait.confirm.or_else(|| {
            let tags = wait.recv.iter().map(|(_, tag)| *tag);
            tags.filter_map(|tag| match tag {
                Tag::Collective(sequence) => Some(sequence),
                Tag::User(_) => None,
            })
            .max()
        });
        if let Some(sequence) = called {
            self.tell_rest(sequence);
        }
        // In this order: whoever reads a header in between sees what is wanted, or is seen to have left it for later.
        lock(&self.group.inbox).want(wait);
        self.store_whole(wait);
        if wait.eager && self.hurries().unwrap_or_else(|| self.linger(wait, timeout)) {
            return lock(&self.group.inbox).unpark();
        }
        loop {
            let flushed = wait.confirm.is_none() || self.flushed();
            // What comes in the arena instead rings here too.
            let arrived = wait.confirm.is_some() && flushed && !self.may_sleep();
            let mut inbox = lock(&self.group.inbox);
            let ready = arrived || inbox.ready(!wait.recv.is_empty(), flushed);
            let left = until.saturating_duration_since(Instant::now());
            if ready || left.is_zero() || self.group.is_poisoned() {
                inbox.unpark();
                break;
            }
            inbox.park(true);
            drop(inbox);
            self.serve(left);
        }
        #[cfg(target_os = "linux")]
        if let Some(end) = self.near.as_ref().and_then(near::Near::known) {
            end.awake();
        }
    }

    fn subgroup(&self, members: &[usize], name: &str) -> Result<Self> {
        let me = checked_members(members, self.world(), self.group.me)?;
        let ranks = members.iter().map(|&m| self.group.ranks[m]).collect();
        let group = self.mesh.group(name, ranks, me)?;
        Self::new(self.mesh.clone(), group)
    }

    fn control(&self) -> Arc<dyn Control> {
        Arc::new(Handle {
            mesh: self.mesh.clone(),
            group: self.group.clone(),
        })
    }
}

impl Drop for Sockets {
    fn drop(&mut self) {
        if self.mesh.birth.elsewhere() {
            return;
        }
        self.forget_along();
        #[cfg(target_os = "linux")]
        if let Some(near) = &self.near {
            near.leave(&self.group);
        }
    }
}

/// [`Control`] of a [`Sockets`].
#[derive(Debug)]
struct Handle {
    mesh: Arc<Mesh>,
    group: Arc<Group>,
}

impl Control for Handle {
    fn poison(&self, cause: Error) {
        self.mesh.poison(&self.group, cause);
    }

    fn abort(&self) {
        self.mesh.abort();
    }

    fn wake(&self) {
        self.group.poke();
    }

    fn adopt(&self, worker: JoinHandle<()>) {
        lock(&self.mesh.adopted).push(worker);
    }
}

/// What bytes that were seen on a wire are: the name of a message of ours that they begin with.
///
/// ```
/// use quintet_collectives::transport::socket::{control::Note, identify};
/// assert_eq!(identify(&Note::Abort { rank: 3 }.encode()), Some("note"));
/// assert_eq!(identify(b"GET / HTTP/1.1"), None);
/// ```
#[must_use]
pub fn identify(bytes: &[u8]) -> Option<&'static str> {
    let hello = bytes
        .first_chunk()
        .and_then(handshake::Hello::decode)
        .map(|_| "hello");
    let frame = frame::Frame::decode(bytes).ok().map(|_| "frame");
    let note = matches!(control::Note::decode(bytes), Ok(Some(_))).then_some("note");
    let request = crate::store::is_request(bytes).then_some("store request");
    hello.or(frame).or(note).or(request)
}

/// Sleeps until one is ready or `timeout` is over; early returns are harmless.
fn poll(fds: &mut [PollFd<'_>], timeout: Duration) {
    let timeout = timeout.min(Duration::from_secs(3600));
    let time = Timespec {
        tv_sec: timeout.as_secs() as i64,
        tv_nsec: i64::from(timeout.subsec_nanos()),
    };
    // An interrupted sleep is an early return; bad descriptors show when they are used.
    let _ = rustix::event::poll(fds, Some(&time));
}

/// A number nobody else draws.
pub(crate) fn random_u64() -> Result<u64> {
    getrandom::u64().map_err(|e| Error::System {
        what: "draw a random number",
        reason: e.to_string(),
    })
}

/// A panic while a lock was held leaves data that is still whole here: each critical section is a
/// few moves.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
