//! Memory that processes of one host share (`std`, Linux): a segment a rank, mapped by all.
//!
//! ```text
//! rank 0's segment   [ arenas of the groups that rank 0 leads | its shared buffers | messages it lends ]
//! rank 1's segment   [ ...                                                                             ]
//!                      ^ found by a group's number in the segment's directory
//! ```
//!
//! It is the data's way beside the unix sockets of [`super::socket`], which carry calls, short messages,
//! farewells and failures as ever: collectives are performed in an arena ([`super::direct`]), and a long
//! message is written into the sender's segment, from where its receiver takes it.
//!
//! Two ranks are on one host where each has really opened the other's segment (`pass.rs`); names and counts
//! say nothing. Nothing has a name in a file system, so nothing is left behind by a crash.
#![allow(unsafe_code)]

use core::ptr::NonNull;
use std::{
    boxed::Box,
    collections::BTreeMap,
    path::Path,
    sync::{
        Arc, Mutex, MutexGuard, OnceLock, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    time::Instant,
    vec::Vec,
};

use super::{
    direct::{Arena, Plot, Segments, copy},
    socket::stream::Stream,
};
use crate::Result;

mod heap;
mod pass;
mod remote;
mod segment;

use remote::Owner;
use segment::{Segment, Window};

/// Bytes of a stage: with the other stages it fits a second-level cache.
const STAGE: usize = 256 << 10;

/// Address space for a segment, unless told otherwise.
pub(crate) const WINDOW: usize = 64 << 30;

/// Messages from this length on are lent.
pub(super) const LONG: usize = 16 << 10;

/// Before a lent message: whether it may be taken back.
const HEADER: usize = 64 + 2112;

/// My segment and those of the ranks that share memory with me, by global rank.
#[derive(Debug)]
pub(crate) struct Shm {
    mine: Arc<Host>,
    windows: Vec<Option<Window>>,
    /// Which ranks have opened each other's segments, as all of them know.
    together: Vec<Vec<bool>>,
    me: usize,
    /// Whether others' memory may be read where it lies.
    single_copy: bool,
    state: Mutex<State>,
    /// Payload bytes that went this way.
    pub(super) moved: Arc<AtomicU64>,
    /// Bytes that this rank has read where they lay.
    pub(super) read: AtomicU64,
}

#[derive(Debug, Default)]
struct State {
    /// Arenas of mine: number, place, members.
    arenas: Vec<(u64, usize, Plot)>,
    /// Arenas that this rank is through with before it ever found them: leader, number, members.
    early: Vec<(usize, u64, Plot)>,
    /// Messages that a receiver may still hold, by place.
    lent: Vec<usize>,
    /// Areas that were taken away from others: their places are this process's alone now.
    parted: Vec<(usize, usize)>,
    /// Which ranks' memory can be read where it lies, once that was tried.
    readable: BTreeMap<usize, bool>,
}

/// A segment before anybody else knows it.
#[derive(Debug)]
pub(super) struct Host(Segment);

/// Another rank's segment.
#[derive(Debug)]
pub(super) struct Neighbour(Window);

impl Host {
    pub(super) fn new(window: usize, folder: Option<&Path>) -> Result<Self> {
        Segment::new(window, folder).map(Self)
    }

    /// Shows the other end of a fresh connection this segment and opens its own.
    pub(super) fn swap(
        &self,
        stream: &Stream,
        first: bool,
        until: Instant,
    ) -> Result<Neighbour, std::string::String> {
        pass::swap(stream, &self.0, first, until).map(Neighbour)
    }
}

impl Shm {
    pub(super) fn new(
        host: Arc<Host>,
        me: usize,
        neighbours: Vec<Option<Neighbour>>,
        together: Vec<Vec<bool>>,
        single_copy: bool,
    ) -> Self {
        Self {
            single_copy,
            together,
            mine: host,
            windows: neighbours.into_iter().map(|n| n.map(|n| n.0)).collect(),
            me,
            state: Mutex::default(),
            moved: Arc::default(),
            read: AtomicU64::new(0),
        }
    }

    /// Whether these ranks all share memory.
    pub(super) fn near(&self, ranks: &[usize]) -> bool {
        let sees =
            |a: usize, b: usize| self.together.get(a).and_then(|row| row.get(b)) == Some(&true);
        let all = |a: &usize| ranks.iter().all(|&b| *a == b || sees(*a, b) && sees(b, *a));
        ranks.len() > 1 && ranks.iter().all(all)
    }

    /// Whether this rank has a rank's segment.
    pub(super) fn sees(&self, rank: usize) -> bool {
        self.windows.get(rank).is_some_and(Option::is_some)
    }

    fn window(&self, rank: usize) -> Option<&Window> {
        if rank == self.me {
            return Some(self.mine.0.window());
        }
        self.windows.get(rank)?.as_ref()
    }

    /// Whether a rank's memory can be read where it lies.
    fn readable(&self, rank: usize) -> bool {
        let tried = || self.window(rank).is_some_and(|w| w.owner().answers());
        self.single_copy && *lock(&self.state).readable.entry(rank).or_insert_with(tried)
    }

    /// Makes the arena of a group that I lead.
    pub(super) fn offer(self: &Arc<Self>, name: u64, n: usize) -> Result<Arena> {
        self.tidy();
        let plot = Plot::new(n, STAGE);
        let at = self.mine.0.take(plot.bytes())?;
        self.mine
            .0
            .publish(name, at)
            .inspect_err(|_| self.mine.0.give(at))?;
        lock(&self.state).arenas.push((name, at, plot));
        self.arena(self.me, at, plot)
            .ok_or_else(|| crate::Error::Layout("an arena beyond its window".into()))
    }

    /// The arena of a group, once its leader has made it.
    pub(super) fn find(self: &Arc<Self>, leader: usize, name: u64, n: usize) -> Option<Arena> {
        let at = self.window(leader)?.find(name)?;
        self.arena(leader, at, Plot::new(n, STAGE))
    }

    fn arena(self: &Arc<Self>, leader: usize, at: usize, plot: Plot) -> Option<Arena> {
        let base = self.window(leader)?.at(at, plot.bytes())?;
        // SAFETY: an area that its owner took for this, zero, and aligned to a page; the windows stay as
        // long as the arena holds them.
        Some(unsafe { Arena::over(base, plot, Box::new(self.clone())) })
    }

    /// I am through with a group.
    pub(super) fn leave(
        self: &Arc<Self>,
        arena: Option<&Arena>,
        leader: usize,
        name: u64,
        n: usize,
    ) {
        match arena {
            Some(arena) => {
                arena.closed().fetch_add(1, Ordering::AcqRel);
            }
            None => lock(&self.state)
                .early
                .push((leader, name, Plot::new(n, STAGE))),
        }
        self.tidy();
    }

    /// Gives back what everybody is through with.
    fn tidy(self: &Arc<Self>) {
        let mut state = lock(&self.state);
        state.early.retain(|&(leader, name, plot)| {
            let place = self.window(leader).and_then(|window| window.find(name));
            let Some(arena) = place.and_then(|at| self.arena(leader, at, plot)) else {
                return true;
            };
            arena.closed().fetch_add(1, Ordering::AcqRel);
            false
        });
        state.arenas.retain(|&(name, at, plot)| {
            let Some(arena) = self.arena(self.me, at, plot) else {
                return false;
            };
            let over = arena.closed().load(Ordering::Acquire) >= plot.ranks_len() as u64;
            if over {
                self.mine.0.retract(name, at);
                self.mine.0.give(at);
            }
            !over
        });
    }

    /// Copies a message into my segment for somebody to take: its place, if there is room.
    pub(super) fn lend(&self, bytes: &[u8]) -> Option<u64> {
        let mut state = lock(&self.state);
        state.lent.retain(|&at| {
            let back = self
                .flag(self.me, at)
                .is_some_and(|flag| flag.load(Ordering::Acquire) == 0);
            if back {
                self.mine.0.give(at);
            }
            !back
        });
        let at = self.mine.0.take_any(HEADER + bytes.len()).ok()?;
        let to = self.mine.0.window().at(at + HEADER, bytes.len())?;
        self.flag(self.me, at)?.store(1, Ordering::Relaxed);
        state.lent.push(at);
        drop(state);
        // SAFETY: an area just taken, and the caller's bytes.
        unsafe { copy(bytes.as_ptr(), to.as_ptr(), bytes.len()) };
        self.moved.fetch_add(bytes.len() as u64, Ordering::Relaxed);
        // The socket that carries the place orders these writes before the receiver's reads.
        std::sync::atomic::fence(Ordering::Release);
        Some(at as u64)
    }

    /// Takes a lent message out of a rank's segment; false where there is none.
    pub(super) fn collect(&self, rank: usize, place: u64, to: &mut [u8]) -> bool {
        std::sync::atomic::fence(Ordering::Acquire);
        let at = place as usize;
        let from = self
            .window(rank)
            .and_then(|window| window.at(at.checked_add(HEADER)?, to.len()));
        let (Some(from), Some(flag)) = (from, self.flag(rank, at)) else {
            return false;
        };
        // SAFETY: the sender wrote it before it sent the place, and leaves it alone until it is given back.
        unsafe { copy(from.as_ptr(), to.as_mut_ptr(), to.len()) };
        flag.store(0, Ordering::Release);
        true
    }

    fn flag(&self, rank: usize, at: usize) -> Option<&AtomicU64> {
        if !at.is_multiple_of(heap::PAGE) {
            return None;
        }
        let word = self.window(rank)?.at(at, 8)?;
        // SAFETY: the first word of an area, aligned, only ever used as an atomic.
        Some(unsafe { AtomicU64::from_ptr(word.as_ptr().cast()) })
    }

    /// Memory of mine that collectives reach directly.
    pub(super) fn region(self: &Arc<Self>, bytes: usize) -> Result<Region> {
        let at = self.mine.0.take(bytes)?;
        self.mine.0.touch(at, bytes);
        let start = self
            .mine
            .0
            .window()
            .at(at, bytes)
            .unwrap_or(NonNull::dangling());
        Ok(Region {
            shm: self.clone(),
            at,
            start,
        })
    }
}

/// The segments of one group's ranks.
pub(super) struct Members {
    shm: Arc<Shm>,
    ranks: Vec<usize>,
    /// Whose they are, where the memory of all can be read; looked at when it is first of use.
    owners: OnceLock<Option<Vec<Owner>>>,
}

impl Members {
    pub(super) fn new(shm: Arc<Shm>, ranks: Vec<usize>) -> Self {
        Self {
            shm,
            ranks,
            owners: OnceLock::new(),
        }
    }

    fn owners(&self) -> Option<&[Owner]> {
        let owners = self.owners.get_or_init(|| {
            let owner = |&rank: &usize| {
                let window = self.shm.window(rank)?;
                self.shm.readable(rank).then(|| window.owner())
            };
            self.ranks.iter().map(owner).collect()
        });
        owners.as_deref()
    }
}

impl Segments for Members {
    fn place(&self, address: *const u8, bytes: usize) -> Option<u64> {
        let shm = &self.shm;
        let at = shm.mine.0.window().offset(address, bytes)?;
        let parted = &lock(&shm.state).parted;
        let overlaps = |&(start, len): &(usize, usize)| at < start + len && start < at + bytes;
        (!parted.iter().any(overlaps)).then_some(at as u64)
    }

    fn address(&self, rank: usize, place: u64, bytes: usize) -> Option<NonNull<u8>> {
        let window = self.shm.window(*self.ranks.get(rank)?)?;
        window.at(usize::try_from(place).ok()?, bytes)
    }

    fn reads(&self) -> bool {
        self.owners().is_some()
    }

    unsafe fn read(&self, rank: usize, from: u64, to: *mut u8, bytes: usize) -> bool {
        let owner = self.owners().and_then(|owners| owners.get(rank));
        // SAFETY: the caller's word.
        let read = owner.is_some_and(|owner| unsafe { owner.read(from, to, bytes) });
        if read {
            self.shm.read.fetch_add(bytes as u64, Ordering::Relaxed);
        }
        read
    }

    fn part(&self, address: NonNull<u8>, bytes: usize) {
        let shm = &self.shm;
        if let Some(at) = shm.mine.0.window().offset(address.as_ptr(), bytes) {
            let area = shm.mine.0.part(at);
            lock(&shm.state).parted.extend(area);
        }
    }
}

/// An area of my segment that a buffer lies in.
#[derive(Debug)]
pub struct Region {
    shm: Arc<Shm>,
    at: usize,
    start: NonNull<u8>,
}

// SAFETY: an address in a window that is kept.
unsafe impl Send for Region {}
// SAFETY: as above.
unsafe impl Sync for Region {}

impl Region {
    pub(crate) fn start(&self) -> NonNull<u8> {
        self.start
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        let parted = lock(&self.shm.state)
            .parted
            .iter()
            .any(|&(at, _)| at == self.at);
        // What was taken away from others may still be written by them in the segment.
        if !parted {
            self.shm.mine.0.give(self.at);
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
