//! All connections of one rank and all its groups: who is where, what went wrong first.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    format,
    string::{String, ToString},
    sync::{
        Arc, Condvar, Mutex, PoisonError, RwLock, Weak,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread::JoinHandle,
    vec::Vec,
};

use sha2::{Digest, Sha256};

use super::{
    conn::{Claim, End, In, Out, Pool, Sink},
    control::Plane,
    frame::{Frame, Kind},
    group::Group,
    lock,
    mpi::Wires,
    stream::Stream,
};
#[cfg(target_os = "linux")]
use crate::transport::shm::Shm;
use crate::{
    Error, Result,
    transport::{Message, direct::cores},
};

mod failure;

#[derive(Debug)]
pub(super) struct Mesh {
    pub(super) birth: crate::forked::Birth,
    pub(super) rank: usize,
    pub(super) world: usize,
    pub(super) generation: u32,
    /// User bytes that may be under way to a peer in a group.
    pub(super) bound: u64,
    pub(super) payload_crc: bool,
    pub(super) peers: Vec<Option<Peer>>,
    /// Whether the ranks of this host have a core each, so that to keep looking is not to keep others from running.
    pub(super) brisk: bool,
    /// By rank: it said that no more data comes.
    byes: Vec<AtomicBool>,
    pub(super) plane: Plane,
    pub(super) pool: Pool,
    /// Memory shared with ranks of this host.
    #[cfg(target_os = "linux")]
    pub(super) shm: Option<Arc<Shm>>,
    /// Payload bytes sent over tcp, unix sockets and MPI.
    sent: [AtomicU64; 3],
    groups: RwLock<HashMap<u64, Weak<Group>>>,
    registry: Mutex<Registry>,
    /// Threads that outlived their communicator.
    pub(super) adopted: Mutex<Vec<JoinHandle<()>>>,
    /// The last meeting that was told, and its bell.
    meeting: (Mutex<Option<Meeting>>, Condvar),
}

/// Generation, host, port and members of a rebuilt run.
type Meeting = (u32, String, u16, Vec<usize>);

/// The data connection to another rank.
#[derive(Debug)]
pub(super) struct Peer {
    pub(super) data: Stream,
    pub(super) out: Mutex<Out>,
    pub(super) inn: Mutex<In>,
    /// What is queued must go out though nobody waits for it.
    pub(super) helped: AtomicBool,
    /// Whether that rank is on this host.
    pub(super) near: bool,
}

#[derive(Debug, Default)]
struct Registry {
    /// How often a group of this name and these members was taken up.
    taken: BTreeMap<(String, Vec<usize>), u64>,
    /// What came for groups that this rank has not taken up yet.
    early: HashMap<u64, Vec<(usize, Frame, Vec<u64>)>>,
    early_poison: HashMap<u64, Error>,
    /// Groups that are over here.
    closed: BTreeSet<u64>,
    /// What went wrong first.
    cause: Option<Error>,
    aborted: Option<Error>,
    /// Ranks that are gone; with the cause that poisons their groups, if they failed.
    gone: BTreeMap<usize, Option<Error>>,
}

impl Peer {
    pub(super) fn new(data: Stream) -> Self {
        Self {
            near: data.is_near(),
            data,
            out: Mutex::default(),
            inn: Mutex::new(In::new()),
            helped: AtomicBool::new(false),
        }
    }
}

impl Mesh {
    pub(super) fn new(
        (rank, world, generation): (usize, usize, u32),
        (bound, payload_crc): (u64, bool),
        peers: Vec<Option<Peer>>,
        plane: Plane,
    ) -> Self {
        let near = peers.iter().flatten().filter(|peer| peer.near).count();
        Self {
            brisk: near < cores(),
            birth: crate::forked::Birth::here(),
            rank,
            world,
            generation,
            bound,
            payload_crc,
            peers,
            byes: (0..world).map(|_| AtomicBool::new(false)).collect(),
            plane,
            pool: Pool::default(),
            #[cfg(target_os = "linux")]
            shm: None,
            sent: Default::default(),
            groups: RwLock::default(),
            registry: Mutex::default(),
            adopted: Mutex::default(),
            meeting: Default::default(),
        }
    }

    pub(super) fn peer(&self, rank: usize) -> Option<&Peer> {
        self.peers.get(rank).and_then(Option::as_ref)
    }

    /// MPI, where it carries everything and there are no connections.
    pub(super) fn mpi(&self) -> Option<&Wires> {
        self.plane.mpi.as_ref()
    }

    /// Whether that rank's frames below this number are with the kernel, or with MPI.
    pub(super) fn has_sent(&self, rank: usize, number: u64) -> bool {
        match (self.mpi(), self.peer(rank)) {
            (Some(mpi), _) => mpi.done(rank) >= number,
            (None, Some(peer)) => lock(&peer.out).done >= number,
            (None, None) => true,
        }
    }

    // Groups.

    /// The next instance of this group; `ranks` are global and `me` is my place in them.
    pub(super) fn group(&self, name: &str, ranks: Vec<usize>, me: usize) -> Result<Arc<Group>> {
        let mut registry = lock(&self.registry);
        let turn = registry
            .taken
            .entry((name.to_string(), ranks.clone()))
            .or_default();
        let id = group_id(name, &ranks, *turn);
        *turn += 1;
        let group = Arc::new(Group::new(id, name, ranks, me)?);
        self.tidy(&mut registry);
        // What came before goes in before anything newer can: only then is the group to be found.
        while let Some(early) = registry.early.remove(&id) {
            drop(registry);
            for (from, frame, words) in early {
                self.hand(&group, from, frame, words);
            }
            registry = lock(&self.registry);
        }
        write(&self.groups).insert(id, Arc::downgrade(&group));
        self.welcome(&mut registry, &group);
        Ok(group)
    }

    /// Tells a new group what happened before it was made.
    fn welcome(&self, registry: &mut Registry, group: &Group) {
        let poison = registry.early_poison.remove(&group.id);
        for cause in registry.aborted.iter().chain(&poison) {
            group.fail(cause.clone());
        }
        for (place, rank) in group.ranks.iter().enumerate() {
            if let Some(Some(cause)) = registry.gone.get(rank) {
                group.fail(cause.clone());
            }
            if self.has_left(registry, *rank) {
                group.leave(place);
            }
        }
    }

    /// Notes which groups are over.
    fn tidy(&self, registry: &mut Registry) {
        write(&self.groups).retain(|id, group| {
            let live = group.strong_count() > 0;
            if !live {
                registry.closed.insert(*id);
            }
            live
        });
    }

    pub(super) fn live(&self) -> Vec<Arc<Group>> {
        let groups = self.groups.read().unwrap_or_else(PoisonError::into_inner);
        groups.values().filter_map(Weak::upgrade).collect()
    }

    pub(super) fn find(&self, id: u64) -> Option<Arc<Group>> {
        let groups = self.groups.read().unwrap_or_else(PoisonError::into_inner);
        groups.get(&id).and_then(Weak::upgrade)
    }

    // Data.

    /// Takes in what has come from a rank, for a group or for all, up to a payload that only its claimant reads; whether
    /// anything has come.
    pub(super) fn pull(&self, rank: usize, group: Option<u64>) -> bool {
        let Some(peer) = self.peer(rank) else {
            return false;
        };
        let mut inn = lock(&peer.inn);
        if inn.over {
            return false;
        }
        let mut freed = false;
        if let Some(claim) = inn.claim() {
            let mine = group == Some(claim.group);
            match self.claims_still(claim.group) {
                true if claim.wanted || mine => return false,
                true => inn.store(&self.pool),
                false => {
                    inn.disclaim();
                    freed = true;
                }
            }
        }
        let end = inn.pull(&peer.data, &self.pool, &mut From { mesh: self, rank });
        drop(inn);
        if freed {
            self.rouse_all();
        }
        end.unwrap_or_else(|end| {
            self.end_of(rank, end);
            true
        })
    }

    pub(super) fn end_of(&self, rank: usize, end: End) {
        match end {
            End::Closed(_) if self.byes[rank].load(Ordering::Acquire) => {}
            End::Closed(why) => self.plane.suspect(rank, why),
            End::Damaged(why) => self.ended(rank, why),
        }
    }

    pub(super) fn deliver(&self, from: usize, frame: Frame, words: Vec<u64>) {
        if frame.generation != self.generation || frame.from as usize != from {
            let why = format!(
                "it sent a frame of rank {} and generation {}",
                frame.from, frame.generation
            );
            return self.ended(from, why);
        }
        if frame.kind == Kind::Bye {
            return self.bye(from);
        }
        if let Some(group) = self.find(frame.group) {
            return self.hand(&group, from, frame, words);
        }
        let mut registry = lock(&self.registry);
        match self.find(frame.group) {
            Some(group) => {
                drop(registry);
                self.hand(&group, from, frame, words);
            }
            None => {
                self.tidy(&mut registry);
                if !registry.closed.contains(&frame.group) {
                    let early = registry.early.entry(frame.group).or_default();
                    early.push((from, frame, words));
                }
            }
        }
    }

    fn hand(&self, group: &Arc<Group>, from: usize, frame: Frame, words: Vec<u64>) {
        let Some(place) = group.ranks.iter().position(|&rank| rank == from) else {
            return self.ended(
                from,
                format!("it sent to group {}, which it is not in", group.name),
            );
        };
        if let Some(call) = frame.call
            && let Err(mismatch) = group.heard(place, call)
        {
            self.poison(group, mismatch);
        }
        match frame.kind {
            Kind::Data => group.push(
                place,
                Message::from_words(frame.tag, frame.dtype, frame.len as usize, words),
            ),
            Kind::Lent => self.collect(group, (place, from), frame, &words),
            Kind::Knock => group.poke(),
            Kind::Credit => group.credited(place, frame.len),
            Kind::Ask => self.asked(group, place),
            Kind::Announce | Kind::Bye => {}
        }
    }

    /// Takes a message out of its sender's segment.
    #[cfg(target_os = "linux")]
    fn collect(&self, group: &Group, (place, from): (usize, usize), frame: Frame, at: &[u64]) {
        let bytes = frame.len as usize * frame.dtype.bytes();
        let mut words = self.pool.take(bytes.div_ceil(8));
        let to = &mut bytemuck::cast_slice_mut::<u64, u8>(&mut words)[..bytes];
        let found = match (&self.shm, at) {
            (Some(shm), [at, ..]) => shm.collect(from, *at, to),
            _ => false,
        };
        if !found {
            return self.ended(from, String::from("it lent a message that is not there"));
        }
        let message = Message::from_words(frame.tag, frame.dtype, frame.len as usize, words);
        group.push(place, message);
    }

    #[cfg(not(target_os = "linux"))]
    fn collect(&self, _: &Group, (_, from): (usize, usize), _: Frame, _: &[u64]) {
        self.ended(
            from,
            String::from("it lent a message from memory that is not shared"),
        );
    }

    /// Counts payload on its way to a rank.
    pub(super) fn count(&self, rank: usize, bytes: usize) {
        let way = match self.peer(rank).map(|peer| &peer.data) {
            None if self.mpi().is_none() || rank == self.rank => return,
            None => 2,
            Some(Stream::Unix(_)) => 1,
            Some(_) => 0,
        };
        self.sent[way].fetch_add(bytes as u64, Ordering::Relaxed);
    }

    /// Bytes that were read out of other processes' memory where they lay.
    pub(super) fn read(&self) -> u64 {
        #[cfg(target_os = "linux")]
        if let Some(shm) = &self.shm {
            return shm.read.load(Ordering::Relaxed);
        }
        0
    }

    /// Payload bytes sent over tcp, over unix sockets, by shared memory, and by MPI.
    pub(super) fn moved(&self) -> [u64; 4] {
        #[cfg(target_os = "linux")]
        let shm = self
            .shm
            .as_ref()
            .map_or(0, |shm| shm.moved.load(Ordering::Relaxed));
        #[cfg(not(target_os = "linux"))]
        let shm = 0;
        let [tcp, unix, mpi] = self.sent.each_ref().map(|n| n.load(Ordering::Relaxed));
        [tcp, unix, shm, mpi]
    }

    /// A sender waits for credit: it gets what there is, or else is remembered.
    fn asked(&self, group: &Group, place: usize) {
        let mut inbox = lock(&group.inbox);
        let (bytes, asked) = &mut inbox.consumed[place];
        *asked = *bytes == 0;
        let bytes = core::mem::take(bytes);
        drop(inbox);
        if bytes > 0 {
            self.give_credit(group, place, bytes);
        }
    }

    pub(super) fn give_credit(&self, group: &Group, place: usize, bytes: u64) {
        let frame = self.frame(group, Kind::Credit, bytes);
        self.push(group.ranks[place], frame, Vec::new());
    }

    /// A frame of this group without message or call.
    pub(super) fn frame(&self, group: &Group, kind: Kind, len: u64) -> Frame {
        Frame {
            kind,
            dtype: crate::DType::U8,
            generation: self.generation,
            from: self.rank as u32,
            group: group.id,
            tag: crate::transport::Tag::User(0),
            number: 0,
            len,
            payload_crc: None,
            call: None,
        }
    }

    /// Queues a frame for a rank and writes what can be written; the frame's number. What is not
    /// a collective's goes out although its sender may not wait for it.
    pub(super) fn push(&self, rank: usize, frame: Frame, words: Vec<u64>) -> u64 {
        if frame.kind == Kind::Data {
            self.count(rank, frame.payload());
        }
        if let Some(mpi) = self.mpi().filter(|_| rank != self.rank) {
            return mpi.send(rank, &frame, words, &self.pool);
        }
        let Some(peer) = self.peer(rank) else {
            return 0;
        };
        let alone = matches!(frame.tag, crate::transport::Tag::User(_));
        let mut out = lock(&peer.out);
        let number = out.push(frame, words, &peer.data, &self.pool);
        let unsent = !out.is_empty();
        drop(out);
        if unsent && alone && !peer.helped.swap(true, Ordering::AcqRel) {
            self.plane.help();
        }
        number
    }

    pub(super) fn flush(&self, rank: usize) {
        if let Some(peer) = self.peer(rank) {
            let mut out = lock(&peer.out);
            out.flush(&peer.data, &self.pool);
            if out.is_empty() {
                peer.helped.store(false, Ordering::Release);
            }
        }
    }

    /// Ranks to which something must go out though nobody waits for it.
    pub(super) fn unsent(&self) -> Vec<usize> {
        let helped = |rank: &usize| {
            self.peer(*rank).is_some_and(|peer| {
                peer.helped.load(Ordering::Acquire) && !lock(&peer.out).is_lent()
            })
        };
        (0..self.world).filter(helped).collect()
    }
}

/// Gives what comes from a rank to whom it is for.
pub(super) struct From<'a> {
    pub(super) mesh: &'a Mesh,
    pub(super) rank: usize,
}

impl Sink for From<'_> {
    fn claims(&mut self, frame: &Frame) -> Option<Claim> {
        self.mesh.claim(self.rank, frame)
    }

    fn deliver(&mut self, frame: Frame, words: Vec<u64>) {
        self.mesh.deliver(self.rank, frame, words);
    }
}

/// A number that all members compute alike.
fn group_id(name: &str, ranks: &[usize], turn: u64) -> u64 {
    let mut hash = Sha256::new();
    hash.update((name.len() as u64).to_le_bytes());
    hash.update(name);
    for &rank in ranks {
        hash.update((rank as u64).to_le_bytes());
    }
    hash.update(turn.to_le_bytes());
    let [a, b, c, d, e, f, g, h, ..] = hash.finalize().0;
    u64::from_le_bytes([a, b, c, d, e, f, g, h])
}

fn write<T>(lock: &RwLock<T>) -> std::sync::RwLockWriteGuard<'_, T> {
    lock.write().unwrap_or_else(PoisonError::into_inner)
}
