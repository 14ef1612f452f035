//! One NCCL communicator of one rank, from the id to its end.
//!
//! ```text
//! New --lead: fresh id, told to the others--> Joining --no longer in progress--> Ready
//!     --others: wait for the id-----------------^                                 |
//!                                     failure, abort: ncclCommAbort  <------------+--> drop: ncclCommFinalize,
//!                                                                                      then Endings
//! ```
//!
//! Nothing here waits: the configuration says `blocking = 0`, and whoever drives it asks again. A communicator
//! that is dropped is finalized at once and destroyed once that is over; since ranks may drop several in
//! different orders, only the last owner of the rank's [`Endings`] waits.

#![allow(unsafe_code)] // calls of a C library

use std::{
    collections::BTreeMap,
    format,
    string::{String, ToString},
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant},
    vec::Vec,
};

use cudarc::nccl::sys::{ncclComm_t, ncclConfig_t, ncclUniqueId};

use super::library::{Fault, Library};
use crate::{
    Error, Result,
    store::Store,
    transport::{Message, Tag, Transport, device::Lane},
};

/// How long a rank's last end waits for its communicators to be over in good order.
const FAREWELL: Duration = Duration::from_secs(5);

/// Between two looks at what is not over.
pub(super) const LOOK: Duration = Duration::from_micros(100);

/// An `ncclComm_t` with what is needed to end it.
pub(super) struct Comm {
    raw: ncclComm_t,
    library: Arc<Library>,
    /// The device's lane, so that whatever thread ends it has the device.
    lane: Arc<dyn Lane>,
}

// SAFETY: NCCL lets a communicator move between threads, though not be used by two at once; it is used only
// through `&mut` or by whoever owns it, and is not `Sync`.
unsafe impl Send for Comm {}

impl Comm {
    fn join(
        library: &Arc<Library>,
        (world, rank): (usize, usize),
        id: ncclUniqueId,
        lane: &Arc<dyn Lane>,
    ) -> Result<Self, Fault> {
        // As a program compiled against 2.14 says it: what later versions added keeps its default.
        let mut config = ncclConfig_t {
            size: 24,
            magic: 0xcafe_beef,
            version: super::OLDEST.0 as u32,
            blocking: 0,
            cgaClusterSize: i32::MIN,
            // SAFETY: numbers and pointers, for all of which zero is a value; NCCL reads the first 24 bytes.
            ..unsafe { core::mem::zeroed() }
        };
        let mut raw = core::ptr::null_mut();
        // SAFETY: the pointers are to locals that outlive the call; the id came from ncclGetUniqueId.
        let code = unsafe {
            (library.symbols.ncclCommInitRankConfig)(
                &mut raw,
                world as i32,
                id,
                rank as i32,
                &mut config,
            )
        };
        let begun = library.check("ncclCommInitRankConfig", code, raw);
        let (library, lane) = (library.clone(), lane.clone());
        // Where it could not begin, what there is of it goes.
        let comm = Self { raw, library, lane };
        begun.map(|_| comm)
    }

    pub(super) fn raw(&self) -> ncclComm_t {
        self.raw
    }

    /// Whether what was asked of it last has been taken up.
    pub(super) fn settled(&self) -> Result<bool, Fault> {
        let mut state = 0;
        // SAFETY: the communicator is live, the pointer is to a local.
        let code = unsafe { (self.library.symbols.ncclCommGetAsyncError)(self.raw, &mut state) };
        self.library
            .check("ncclCommGetAsyncError", code, self.raw)?;
        self.library.check("ncclCommGetAsyncError", state, self.raw)
    }

    fn same_place(&self, world: usize, rank: usize) -> Result<bool, Fault> {
        let (mut count, mut user) = (0, 0);
        let symbols = &self.library.symbols;
        // SAFETY: the communicator is live and settled, the pointer is to a local.
        let code = unsafe { (symbols.ncclCommCount)(self.raw, &mut count) };
        self.library.check("ncclCommCount", code, self.raw)?;
        // SAFETY: the communicator is live and settled, the pointer is to a local.
        let code = unsafe { (symbols.ncclCommUserRank)(self.raw, &mut user) };
        self.library.check("ncclCommUserRank", code, self.raw)?;
        Ok((count, user) == (world as i32, rank as i32))
    }

    /// Flushes it; destroyed in `endings`.
    fn finalize(self, endings: &Endings) {
        let _ = self.lane.enter();
        // SAFETY: the communicator is live and nothing is begun on it any more.
        let code = unsafe { (self.library.symbols.ncclCommFinalize)(self.raw) };
        // One that cannot be flushed is dropped, and so aborted.
        if self
            .library
            .check("ncclCommFinalize", code, self.raw)
            .is_ok()
        {
            endings.take(self);
        }
    }

    fn destroy(mut self) {
        let _ = self.lane.enter();
        let raw = core::mem::replace(&mut self.raw, core::ptr::null_mut());
        // SAFETY: the communicator is finalized; owned here, nobody else has it.
        unsafe { (self.library.symbols.ncclCommDestroy)(raw) };
    }
}

impl Drop for Comm {
    /// Ends what is under way, and the communicator. What the calls answer changes nothing: it is gone.
    fn drop(&mut self) {
        if self.raw.is_null() {
            return;
        }
        let _ = self.lane.enter();
        // SAFETY: the communicator is live and, owned here, used by nobody else.
        unsafe { (self.library.symbols.ncclCommAbort)(self.raw) };
        // The device may still be on its way out of what was aborted.
        let until = Instant::now() + FAREWELL;
        while matches!(self.lane.idle(), Ok(false)) && Instant::now() < until {
            std::thread::sleep(LOOK);
        }
    }
}

/// The communicators of one rank that are on their way out.
#[derive(Default)]
pub(super) struct Endings(Mutex<Vec<Comm>>);

impl Endings {
    fn take(&self, comm: Comm) {
        let mut ending = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        ending.push(comm);
        Self::sweep(&mut ending);
    }

    /// Destroys those that are over.
    fn sweep(ending: &mut Vec<Comm>) {
        for comm in core::mem::take(ending) {
            match comm.settled() {
                Ok(true) => comm.destroy(),
                Ok(false) => ending.push(comm),
                Err(_) => drop(comm),
            }
        }
    }
}

impl Drop for Endings {
    fn drop(&mut self) {
        let ending = self.0.get_mut().unwrap_or_else(PoisonError::into_inner);
        let until = Instant::now() + FAREWELL;
        loop {
            Self::sweep(ending);
            if ending.is_empty() {
                return;
            }
            if Instant::now() >= until {
                // A peer that never ends its part.
                return ending.clear();
            }
            std::thread::sleep(LOOK);
        }
    }
}

/// What the lines of one rank share.
pub(super) struct Shared {
    pub(super) library: Arc<Library>,
    /// Where ids are left; else they go over the transport.
    pub(super) store: Option<(Arc<dyn Store>, String)>,
    /// How often a line of this name was made: the k-th of one rank belongs to the k-th of the others.
    made: Mutex<BTreeMap<String, usize>>,
    endings: Endings,
}

impl Shared {
    pub(super) fn new(library: Arc<Library>, store: Option<(Arc<dyn Store>, String)>) -> Self {
        Self {
            library,
            store,
            made: Mutex::default(),
            endings: Endings::default(),
        }
    }

    fn key(&self, prefix: &str, name: &str) -> String {
        let mut made = self.made.lock().unwrap_or_else(PoisonError::into_inner);
        let count = made.entry(String::from(name)).or_default();
        *count += 1;
        format!("{prefix}/nccl/{name}/{count}")
    }
}

/// A communicator among some members of a group, made when it is first used.
pub(super) struct Line {
    shared: Arc<Shared>,
    /// Places in the group; the first makes the id.
    members: Vec<usize>,
    /// My place among them.
    me: usize,
    tag: Tag,
    name: String,
    state: State,
}

enum State {
    New,
    /// The id, and whom it is still to be told.
    Telling(ncclUniqueId, Vec<usize>),
    /// The key under which it will be found, or none where it comes as a message.
    Listening(Option<String>),
    Joining(Comm),
    Ready(Comm),
    Gone,
}

impl Line {
    pub(super) fn new(
        shared: &Arc<Shared>,
        members: Vec<usize>,
        me: usize,
        tag: u64,
        name: String,
    ) -> Self {
        Self {
            shared: shared.clone(),
            members,
            me,
            tag: Tag::User(tag),
            name,
            state: State::New,
        }
    }

    /// Goes on until it can be used; true once it can.
    pub(super) fn join<T: Transport>(
        &mut self,
        control: &mut T,
        lane: &Arc<dyn Lane>,
    ) -> Result<bool, Failed> {
        loop {
            self.state = match core::mem::replace(&mut self.state, State::Gone) {
                State::New => self.begin()?,
                State::Telling(id, mut untold) => {
                    while let Some(&to) = untold.last() {
                        let words: Vec<u8> = id.internal.iter().map(|&c| c as u8).collect();
                        let message = Message::new(self.tag, &words, Vec::new());
                        if control.try_send(to, message)?.is_some() {
                            self.state = State::Telling(id, untold);
                            return Ok(false);
                        }
                        untold.pop();
                    }
                    lane.enter()?;
                    State::Joining(self.enter(id, lane)?)
                }
                State::Listening(key) => match self.heard(control, key.as_deref())? {
                    Some(id) => {
                        lane.enter()?;
                        State::Joining(self.enter(id, lane)?)
                    }
                    None => {
                        self.state = State::Listening(key);
                        return Ok(false);
                    }
                },
                State::Joining(comm) => match comm.settled() {
                    Ok(true) => {
                        if !comm.same_place(self.members.len(), self.me)? {
                            return Err(Failed::Other(Error::Library(format!(
                                "{:?} gives another place than rank {} of {}",
                                self.shared.library,
                                self.me,
                                self.members.len()
                            ))));
                        }
                        State::Ready(comm)
                    }
                    Ok(false) => {
                        self.state = State::Joining(comm);
                        return Ok(false);
                    }
                    Err(fault) => return Err(fault.into()),
                },
                State::Ready(comm) => {
                    self.state = State::Ready(comm);
                    return Ok(true);
                }
                State::Gone => {
                    return Err(Failed::Other(Error::Gate(format!(
                        "{} has failed before",
                        self.name
                    ))));
                }
            };
        }
    }

    fn begin(&self) -> Result<State, Failed> {
        let store = self.shared.store.as_ref();
        let key = store.map(|(store, prefix)| (store, self.shared.key(prefix, &self.name)));
        if self.me > 0 {
            return Ok(State::Listening(key.map(|(_, key)| key)));
        }
        let id = self.shared.library.unique_id()?;
        let others = self.members[1..].to_vec();
        Ok(match key {
            Some((store, key)) if !others.is_empty() => {
                let bytes: Vec<u8> = id.internal.iter().map(|&c| c as u8).collect();
                store.set(&key, &bytes, FAREWELL)?;
                State::Telling(id, Vec::new())
            }
            _ => State::Telling(id, others),
        })
    }

    fn heard<T: Transport>(
        &self,
        control: &mut T,
        key: Option<&str>,
    ) -> Result<Option<ncclUniqueId>, Failed> {
        let bytes = match (key, &self.shared.store) {
            (Some(key), Some((store, _))) => {
                control.healthy()?;
                store.get(key, FAREWELL)?
            }
            _ => {
                let message = control.try_recv(self.members[0], self.tag)?;
                message.map(|message| message.elements::<u8>().to_vec())
            }
        };
        let Some(bytes) = bytes else {
            return Ok(None);
        };
        let mut id = ncclUniqueId { internal: [0; 128] };
        if bytes.len() != id.internal.len() {
            return Err(Failed::Other(Error::Message {
                group: control.name().to_string(),
                rank: control.global(control.rank()),
                peer: control.global(self.members[0]),
                op: "NCCL's id",
                expected: String::from("u8 x 128"),
                got: format!("u8 x {}", bytes.len()),
            }));
        }
        for (to, from) in id.internal.iter_mut().zip(bytes) {
            *to = from as core::ffi::c_char;
        }
        Ok(Some(id))
    }

    fn enter(&self, id: ncclUniqueId, lane: &Arc<dyn Lane>) -> Result<Comm, Fault> {
        Comm::join(
            &self.shared.library,
            (self.members.len(), self.me),
            id,
            lane,
        )
    }

    /// The communicator, once it can be used.
    pub(super) fn ready(&self) -> Option<&Comm> {
        match &self.state {
            State::Ready(comm) => Some(comm),
            _ => None,
        }
    }

    /// The message that has the id, where that is what it waits for.
    pub(super) fn awaited(&self) -> Option<(usize, Tag)> {
        matches!(self.state, State::Listening(None)).then_some((self.members[0], self.tag))
    }

    /// Ends it and what is under way on it.
    pub(super) fn abort(&mut self) {
        self.state = State::Gone;
    }
}

impl Drop for Line {
    fn drop(&mut self) {
        if let State::Ready(comm) = core::mem::replace(&mut self.state, State::Gone) {
            comm.finalize(&self.shared.endings);
        }
    }
}

/// Why a step on a line failed.
pub(super) enum Failed {
    Library(Fault),
    Other(Error),
}

impl From<Fault> for Failed {
    fn from(fault: Fault) -> Self {
        Self::Library(fault)
    }
}

impl From<Error> for Failed {
    fn from(error: Error) -> Self {
        Self::Other(error)
    }
}
