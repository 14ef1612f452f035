//! Ranks as threads of one process (`std`).
//!
//! ```text
//! group                 inbox of rank 0        inbox of rank 1       arena
//!   lane from rank 0      [        ]             [ m m ]               progress, calls, duties, slots
//!   lane from rank 1      [ m      ]             [     ]
//!                           ^ one mutex, one condvar per inbox
//! ```
//!
//! A message is handed over by pushing its storage into the receiver's lane: one copy on each side,
//! no allocation once storages circulate. A lane is bounded in bytes; a message larger than the bound
//! passes when the lane is empty. A receiver sleeps on its own inbox and says what it wants, so it is
//! woken once, when all of it is there, and never for something else.
//!
//! Calls are announced in the group's arena ([`super::direct`]), in which collectives that fold in rank
//! order are performed without any message: each rank compares the others' calls with its own, and
//! a difference poisons the group before anything wrong can be received.

use std::{
    boxed::Box,
    collections::{BTreeMap, VecDeque},
    format,
    string::{String, ToString},
    sync::{
        Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError, Weak,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread::JoinHandle,
    time::{Duration, Instant},
    vec::Vec,
};

use crate::{
    Error, Result,
    transport::{
        Call, Control, Message, Tag, Transport, Wait, checked_members,
        direct::{Arena, Bell, End, Heard, Reach, Sharing},
    },
};

mod world;

#[cfg(unix)]
pub(crate) use world::panic_message;
pub use world::{Seat, World};

/// One rank's endpoint of one group of a [`World`].
#[derive(Debug)]
pub struct Local {
    shared: Arc<Shared>,
    group: Arc<Group>,
    rank: usize,
    end: End,
    /// My last two calls, as they stand in the group.
    told: [Option<Call>; 2],
}

/// What all groups of a world share.
#[derive(Debug)]
struct Shared {
    world: usize,
    bound: usize,
    by_messages: bool,
    registry: Mutex<Registry>,
    /// Threads that outlived their communicator, by global rank.
    adopted: Mutex<Vec<(usize, JoinHandle<()>)>>,
}

#[derive(Debug, Default)]
struct Registry {
    /// By name and members: every instance, in order of creation.
    groups: BTreeMap<(String, Vec<usize>), Vec<Instance>>,
    /// How many instances a rank has taken up.
    taken: BTreeMap<(String, Vec<usize>, usize), usize>,
    /// What went wrong first.
    cause: Option<Error>,
    /// Set by an abort: groups made later are poisoned from the start.
    aborted: Option<Error>,
    /// Ranks that are gone; with the cause that poisons groups made later, if they failed.
    gone: BTreeMap<usize, Option<Error>>,
}

/// A group is kept alive by the registry until all its members have it.
#[derive(Debug)]
struct Instance {
    group: Weak<Group>,
    hold: Option<Arc<Group>>,
    takers: usize,
}

#[derive(Debug)]
struct Group {
    name: String,
    ranks: Vec<usize>,
    bound: usize,
    /// Whether nothing is done in shared memory.
    by_messages: bool,
    inboxes: Vec<Inbox>,
    arena: Arc<Arena>,
    /// The last two calls of each rank.
    calls: Vec<Mutex<[Option<Call>; 2]>>,
    poison: OnceLock<Error>,
    left: Vec<AtomicBool>,
}

#[derive(Debug, Default)]
struct Inbox {
    state: Mutex<InboxState>,
    cond: Condvar,
    /// How often the owner had reason to look.
    roused: AtomicU64,
}

#[derive(Debug, Default)]
struct InboxState {
    lanes: Vec<Lane>,
    /// What the parked owner lacks still; empty while it runs.
    wanted: Vec<(usize, Tag)>,
    /// How many messages are to come before it is woken.
    needed: usize,
    parked: bool,
    /// Something else has happened: look again before sleeping.
    poked: bool,
}

#[derive(Debug, Default)]
struct Lane {
    queue: VecDeque<Message>,
    /// Messages and bytes held, of collectives and of `send`: each is bounded by itself, so that
    /// what nobody has received yet does not keep a collective from passing.
    held: [(usize, usize); 2],
    /// The sender found no room.
    blocked: bool,
}

impl Transport for Local {
    fn rank(&self) -> usize {
        self.rank
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
        if self.group.left[to].load(Ordering::Acquire) {
            return Err(self.lost(to));
        }
        let bytes = message.bytes();
        let inbox = &self.group.inboxes[to];
        let mut state = lock(&inbox.state);
        let lane = &mut state.lanes[self.rank];
        let (count, held) = lane.held[class(message.tag)];
        if count > 0 && held + bytes > self.group.bound {
            lane.blocked = true;
            // The owner may sleep for a message that is behind this one.
            state.poke(inbox);
            return Ok(Some(message));
        }
        let key = (self.rank, message.tag);
        lane.held[class(message.tag)] = (count + 1, held + bytes);
        lane.queue.push_back(message);
        if state.wanted.contains(&key) {
            state.needed = state.needed.saturating_sub(1);
            if state.needed == 0 {
                inbox.roused.fetch_add(1, Ordering::Release);
                let parked = core::mem::take(&mut state.parked);
                drop(state);
                if parked {
                    inbox.cond.notify_one();
                }
            }
        }
        Ok(None)
    }

    fn try_recv(&mut self, from: usize, tag: Tag) -> Result<Option<Message>> {
        self.group.healthy()?;
        // Read before the queue: what a rank sent before it left is still to be had.
        let left = self.group.left[from].load(Ordering::Acquire);
        let mut state = lock(&self.group.inboxes[self.rank].state);
        let lane = &mut state.lanes[from];
        let Some(at) = lane.queue.iter().position(|m| m.tag == tag) else {
            drop(state);
            return if left { Err(self.lost(from)) } else { Ok(None) };
        };
        let message = lane.queue.remove(at);
        let (count, held) = &mut lane.held[class(tag)];
        *count -= 1;
        *held -= message.as_ref().map_or(0, Message::bytes);
        let blocked = core::mem::take(&mut lane.blocked);
        drop(state);
        if blocked {
            self.group.poke(from);
        }
        if let Tag::Collective(sequence) = tag
            && self.end.differs(from, sequence)
        {
            return Err(self.mismatch(from, sequence));
        }
        Ok(message)
    }

    fn announce(&mut self, call: &Call) -> Result<()> {
        self.group.healthy()?;
        let kept = (call.sequence % 2) as usize;
        // What stands there already need not be written again, but for its number.
        if !self.told[kept].is_some_and(|told| call.repeats(&told)) {
            lock(&self.group.calls[self.rank])[kept] = Some(*call);
            self.told[kept] = Some(*call);
        }
        self.end.announce(call);
        match self.end.heard() {
            Heard::Differs(rank) => Err(self.mismatch(rank, call.sequence)),
            _ => Ok(()),
        }
    }

    fn confirmed(&mut self, sequence: u64) -> Result<bool> {
        self.group.healthy()?;
        match self.end.heard() {
            Heard::All => return Ok(true),
            Heard::Differs(rank) => return Err(self.mismatch(rank, sequence)),
            Heard::Some => {}
        }
        // Whether it left is read first: what a rank announced before it left counts.
        let absent =
            |&r: &usize| self.group.left[r].load(Ordering::Acquire) && !self.end.has_called(r);
        let absent = (0..self.world()).find(absent);
        absent.map_or(Ok(false), |rank| Err(self.lost(rank)))
    }

    fn healthy(&mut self) -> Result<()> {
        self.group.healthy()
    }

    fn absent(&self, _: u64) -> Option<usize> {
        self.end.laggard()
    }

    fn direct(&mut self) -> Sharing<'_> {
        if self.group.by_messages {
            return Sharing::Never;
        }
        Sharing::Ready(&mut self.end)
    }

    fn park(&mut self, wait: &Wait, timeout: Duration) {
        let inbox = &self.group.inboxes[self.rank];
        let mut state = lock(&inbox.state);
        let until = Instant::now() + timeout;
        let (mut looking, watching) = (true, wait.confirm.is_some());
        state.want(wait);
        loop {
            let nothing = state.needed == 0 && !wait.recv.is_empty();
            let poisoned = self.group.poison.get().is_some();
            let arrived = watching && self.end.arrived();
            if core::mem::take(&mut state.poked) || nothing || poisoned || arrived {
                break;
            }
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                break;
            }
            if core::mem::take(&mut looking) {
                // What is due soon is not worth a sleep.
                let before = inbox.roused.load(Ordering::Acquire);
                drop(state);
                self.end.linger(wait.eager, left, || {
                    inbox.roused.load(Ordering::Acquire) != before || watching && self.end.arrived()
                });
                state = lock(&inbox.state);
                continue;
            }
            if watching && !self.end.may_sleep(1) {
                break;
            }
            state.parked = true;
            state = inbox
                .cond
                .wait_timeout(state, left)
                .unwrap_or_else(PoisonError::into_inner)
                .0;
            if !state.parked {
                break;
            }
        }
        state.parked = false;
        state.poked = false;
        state.wanted.clear();
        drop(state);
        if watching {
            self.end.awake();
        }
    }

    fn subgroup(&self, members: &[usize], name: &str) -> Result<Self> {
        let rank = checked_members(members, self.world(), self.rank)?;
        let ranks: Vec<usize> = members.iter().map(|&m| self.group.ranks[m]).collect();
        let group = self.shared.group(name, ranks, self.global(self.rank));
        Ok(Self::new(self.shared.clone(), group, rank))
    }

    fn control(&self) -> Arc<dyn Control> {
        Arc::new(Handle {
            shared: self.shared.clone(),
            group: self.group.clone(),
            rank: self.rank,
        })
    }
}

impl Local {
    fn new(shared: Arc<Shared>, group: Arc<Group>, rank: usize) -> Self {
        let bell = Arc::new(Pokes(Arc::downgrade(&group)));
        let end = (group.arena.clone(), rank);
        Self {
            end: End::new(end, shared.world, Reach::Threads, bell),
            shared,
            group,
            rank,
            told: [None; 2],
        }
    }

    /// As after so many calls.
    #[cfg(test)]
    pub(crate) fn begin_late(&mut self, calls: u64) {
        self.end.begin_late(calls);
    }

    /// The same sentence on whichever rank finds it: the lower rank first.
    fn mismatch(&self, other: usize, sequence: u64) -> Error {
        let (first, second) = (self.rank.min(other), self.rank.max(other));
        let call = |rank: usize| {
            let call = lock(&self.group.calls[rank])[(sequence % 2) as usize];
            call.map(|call| Call { sequence, ..call })
        };
        let (Some(first_call), Some(second_call)) = (call(first), call(second)) else {
            return self.lost(other);
        };
        let mismatch = Error::Mismatch {
            group: self.group.name.clone(),
            sequence,
            first: self.group.ranks[first],
            first_call: Box::new(first_call),
            second: self.group.ranks[second],
            second_call: Box::new(second_call),
        };
        self.shared.poison(&self.group, mismatch)
    }

    /// That member is gone and something was still expected of it: nobody in the group can go on.
    fn lost(&self, rank: usize) -> Error {
        let reason = format!(
            "it left before its part in group {} was done",
            self.group.name
        );
        let cause = Error::PeerLost {
            rank: self.group.ranks[rank],
            reason,
        };
        self.shared.poison(&self.group, cause)
    }
}

/// Wakes members through their inboxes. A group whose members are gone has nobody to wake.
struct Pokes(Weak<Group>);

impl Bell for Pokes {
    fn ring(&self, rank: usize, _: u64) {
        if let Some(group) = self.0.upgrade() {
            group.poke(rank);
        }
    }
}

/// [`Control`] of a [`Local`].
#[derive(Debug)]
struct Handle {
    shared: Arc<Shared>,
    group: Arc<Group>,
    rank: usize,
}

impl Control for Handle {
    fn poison(&self, cause: Error) {
        self.shared.poison(&self.group, cause);
    }

    fn abort(&self) {
        self.shared.abort(self.group.ranks[self.rank]);
    }

    fn wake(&self) {
        self.group.poke(self.rank);
    }

    fn adopt(&self, worker: JoinHandle<()>) {
        lock(&self.shared.adopted).push((self.group.ranks[self.rank], worker));
    }
}

impl Shared {
    /// The instance of this group that is next for `me`.
    fn group(&self, name: &str, ranks: Vec<usize>, me: usize) -> Arc<Group> {
        let mut registry = lock(&self.registry);
        let turn = registry
            .taken
            .entry((name.to_string(), ranks.clone(), me))
            .or_default();
        let index = *turn;
        *turn += 1;
        let instances = registry
            .groups
            .entry((name.to_string(), ranks.clone()))
            .or_default();
        if let Some(instance) = instances.get_mut(index)
            && let Some(group) = instance.group.upgrade()
        {
            instance.takers += 1;
            if instance.takers == ranks.len() {
                instance.hold = None;
            }
            return group;
        }
        let group = Arc::new(Group::new(name, ranks.clone(), self));
        let hold = (ranks.len() > 1).then(|| group.clone());
        instances.push(Instance {
            group: Arc::downgrade(&group),
            hold,
            takers: 1,
        });
        registry.welcome(&group);
        group
    }

    /// Poisons one group; what went wrong first in the world is what it is told.
    fn poison(&self, group: &Group, cause: Error) -> Error {
        let mut registry = lock(&self.registry);
        let cause = cause.after(&mut registry.cause);
        drop(registry);
        group.fail(cause)
    }

    fn abort(&self, rank: usize) {
        let mut registry = lock(&self.registry);
        let cause = Error::Aborted { rank };
        registry.cause.get_or_insert_with(|| cause.clone());
        registry.aborted.get_or_insert_with(|| cause.clone());
        let groups = registry.live();
        drop(registry);
        for group in groups {
            group.fail(cause.clone());
        }
    }

    /// Rank `rank` is gone: in good order, or failed for `failure`.
    fn leave(&self, rank: usize, failure: Option<Error>) {
        let mut registry = lock(&self.registry);
        let failure = failure.map(|error| registry.cause.get_or_insert(error).clone());
        registry.gone.insert(rank, failure.clone());
        let groups = registry.live();
        drop(registry);
        for group in groups {
            let Some(place) = group.ranks.iter().position(|&r| r == rank) else {
                continue;
            };
            match &failure {
                Some(cause) => {
                    group.fail(cause.clone());
                }
                None => {
                    group.left[place].store(true, Ordering::Release);
                    (0..group.ranks.len()).for_each(|r| group.poke(r));
                }
            }
        }
    }
}

impl Registry {
    fn live(&self) -> Vec<Arc<Group>> {
        self.groups
            .values()
            .flatten()
            .filter_map(|instance| instance.group.upgrade())
            .collect()
    }

    /// Tells a new group what happened before it was made.
    fn welcome(&self, group: &Group) {
        if let Some(cause) = &self.aborted {
            group.fail(cause.clone());
        }
        for (place, rank) in group.ranks.iter().enumerate() {
            match self.gone.get(rank) {
                Some(Some(cause)) => {
                    group.fail(cause.clone());
                }
                Some(None) => group.left[place].store(true, Ordering::Release),
                None => {}
            }
        }
    }
}

impl Group {
    fn new(name: &str, ranks: Vec<usize>, world: &Shared) -> Self {
        let n = ranks.len();
        let inbox = || {
            let lanes = (0..n).map(|_| Lane::default()).collect();
            Inbox {
                state: Mutex::new(InboxState {
                    lanes,
                    ..Default::default()
                }),
                cond: Condvar::new(),
                roused: AtomicU64::new(0),
            }
        };
        Self {
            name: name.to_string(),
            bound: world.bound,
            by_messages: world.by_messages,
            inboxes: (0..n).map(|_| inbox()).collect(),
            arena: Arc::new(Arena::heap(n)),
            calls: (0..n).map(|_| Mutex::default()).collect(),
            poison: OnceLock::new(),
            left: (0..n).map(|_| AtomicBool::new(false)).collect(),
            ranks,
        }
    }

    fn healthy(&self) -> Result<()> {
        self.poison.get().map_or(Ok(()), |cause| Err(cause.clone()))
    }

    /// The first cause stays; everybody is woken.
    fn fail(&self, cause: Error) -> Error {
        let first = self.poison.get_or_init(|| cause).clone();
        (0..self.ranks.len()).for_each(|rank| self.poke(rank));
        first
    }

    fn poke(&self, rank: usize) {
        let inbox = &self.inboxes[rank];
        lock(&inbox.state).poke(inbox);
    }
}

impl InboxState {
    fn poke(&mut self, inbox: &Inbox) {
        self.poked = true;
        inbox.roused.fetch_add(1, Ordering::Release);
        if core::mem::take(&mut self.parked) {
            inbox.cond.notify_one();
        }
    }

    /// Notes what the owner is about to sleep for, and how much of it is not here yet.
    fn want(&mut self, wait: &Wait) {
        self.wanted.clear();
        for &(from, tag) in &wait.recv {
            if !self.lanes[from].queue.iter().any(|m| m.tag == tag) {
                self.wanted.push((from, tag));
            }
        }
        // A sender without room takes what room there is, whatever else is awaited.
        let here = wait.recv.len() - self.wanted.len();
        self.needed = match (wait.all && wait.send.is_empty(), here) {
            (true, _) => self.wanted.len(),
            (false, 0) => 1,
            (false, _) => 0,
        };
    }
}

/// Which bound a message counts towards.
fn class(tag: Tag) -> usize {
    usize::from(matches!(tag, Tag::User(_)))
}

/// A panic while a lock was held leaves data that is still whole here: each critical section is a
/// few moves.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
