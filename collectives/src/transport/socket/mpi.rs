//! Ranks that MPI has started, and speaks for (feature `mpi`, by the crate of that name).
//!
//! ```text
//! mpirun -n 4 ./program       every process      mpi::join()? -> Seat -> Communicator
//!
//!          frames, notes      immediate sends on a duplicate of MPI_COMM_WORLD, matched by immediate probes
//! rank 0 ================ rank 1
//!
//! message     payload, padded to words      frame or note, padded      its bytes (one word)
//! ```
//!
//! What the frames say is what they say over sockets ([`super::frame`]), so calls are compared, groups made, user
//! messages bounded and causes told in the same way. A tag of ours has more bits than one of MPI's: it travels in the
//! frame, and MPI's own says only whether a frame or a note comes. A group is a number in the frame and costs MPI nothing.
//!
//! * **Waiting polls.** MPI wakes nobody. A parked rank looks at once, then yields, then sleeps between looks, for a
//!   millisecond at most, and wakes where another thread has taken in what it waits for. A thread of the seat
//!   looks fifty times a second, so that a rank which computes holds up nobody's send.
//! * **Threads.** Every call of MPI is made behind one lock: where this module initialises MPI,
//!   `MPI_THREAD_SERIALIZED` is enough. Where the program has done so itself, its own calls are not behind that lock, and it must
//!   have been granted `MPI_THREAD_MULTIPLE`. A lower level is refused. [`Seat`] must be
//!   ended on the thread that made it, as MPI wants; then MPI is finalised, if it was initialised here, and cannot be again.
//! * **Failure** is MPI's. A rank that ends with an error still says so and why, and a mismatch is
//!   named on every rank. But a process that dies is not seen by the others: `mpirun` ends them all, and where it
//!   does not, a wait ends at its deadline. An error within MPI ends the job. Nothing is rebuilt. The end of a
//!   rank waits for the ends of all others, for so does `MPI_Finalize`.
//! * A message is at most 16 GiB long: MPI counts in `int`.

use std::{
    collections::VecDeque,
    format,
    mem::ManuallyDrop,
    string::String,
    sync::{Mutex, TryLockError},
    thread,
    time::{Duration, Instant},
    vec::Vec,
};

use ::mpi::{
    Threading,
    environment::{Universe, initialize_with_threading, is_finalized, threading_support},
    point_to_point::Message as Matched,
    request::{Request, StaticScope},
    topology::SimpleCommunicator,
    traits::{Communicator as _, Destination as _, Equivalence as _, Source as _},
};
use rustix::event::{PollFd, PollFlags};

use super::{
    conn::Pool,
    control::Note,
    frame::Frame,
    group::Group,
    join::{Join, Kind},
    lock,
    mesh::Mesh,
    poll,
    seat::Seat,
};
use crate::{Error, Result};

/// This process's rank in the job that MPI has started: rank and world are those of `MPI_COMM_WORLD`, which is
/// duplicated, so that all its processes must call this.
///
/// ```no_run
/// use quintet_collectives::{ReduceOp, transport::mpi};
/// // mpirun -n 4 ./program
/// mpi::join()?.run(|comm| {
///     let mut x = [comm.rank() as f32];
///     comm.all_reduce(&mut x, ReduceOp::Sum)
/// })?;
/// # Ok::<(), quintet_collectives::Error>(())
/// ```
///
/// # Errors
/// [`Error::Rendezvous`] where MPI grants too few threads, or is over.
pub fn join() -> Result<Seat> {
    let wires = Wires::open()?;
    let (rank, world) = (wires.rank, wires.world);
    let join = Join {
        kind: Kind::Mpi,
        ..Join::new(rank, world, "mpi")
    };
    join.by(wires)
}

/// MPI as this rank uses it.
pub(super) struct Wires {
    rank: usize,
    world: usize,
    /// Held for every call of MPI.
    engine: Mutex<Engine>,
    /// Held by whoever takes in what has come, until it is where it belongs: messages stay in order.
    taking: Mutex<()>,
}

struct Engine {
    /// Finalises MPI; none where the program does.
    universe: Option<Universe>,
    /// None once it is over.
    comm: Option<SimpleCommunicator>,
    lanes: Vec<Lane>,
}

// SAFETY: MPI's handles belong to the process and not to a thread; from MPI_THREAD_SERIALIZED on, which
// `Wires::open` insists on, any thread may use them, one at a time. The engine lies in a mutex.
#[allow(unsafe_code)]
unsafe impl Send for Engine {}

/// What is under way to and from a rank, in order.
#[derive(Default)]
struct Lane {
    /// Messages sent.
    sent: u64,
    out: VecDeque<Flight>,
    inn: VecDeque<(i32, Flight)>,
}

/// A storage that MPI writes or reads until its request is over.
struct Flight {
    request: Request<'static, [u64], StaticScope>,
    /// Where, how long and of which capacity.
    storage: (*mut u64, usize, usize),
}

/// MPI's tags.
const FRAME: i32 = 0;
const NOTE: i32 = 1;

/// Messages taken in before those who wait for them are told.
const TURN: usize = 256;

/// Looks of a parked rank before it sleeps in between.
const LOOKS: u32 = 200;

/// The first and the longest sleep between two looks.
const NAP: Duration = Duration::from_micros(20);
const LONG_NAP: Duration = Duration::from_millis(1);

/// The longest message in words, a frame included.
const LONGEST: usize = i32::MAX as usize;

/// Whether a payload of so many bytes can be a message.
pub(super) fn fits(bytes: usize) -> Result<()> {
    if bytes.div_ceil(8) + 64 <= LONGEST {
        return Ok(());
    }
    Err(Error::System {
        what: "send a message by MPI",
        reason: format!("it has {bytes} bytes, and MPI counts to 16 GiB"),
    })
}

impl Wires {
    /// Rank and world.
    pub(super) fn place(&self) -> (usize, usize) {
        (self.rank, self.world)
    }

    pub(super) fn open() -> Result<Self> {
        let refused = |why: String| Err(Error::Rendezvous(why));
        if is_finalized() {
            return refused(String::from(
                "MPI was finalised in this process before, and cannot be initialised again",
            ));
        }
        let (universe, granted, needed) = match initialize_with_threading(Threading::Serialized) {
            Some((universe, granted)) => (Some(universe), granted, Threading::Serialized),
            None => (None, threading_support(), Threading::Multiple),
        };
        if granted < needed {
            let own = match universe {
                Some(_) => "calls come from several threads, one at a time",
                None => "the program's own calls and those of this transport may meet",
            };
            return refused(format!(
                "MPI grants MPI_THREAD_{} here and MPI_THREAD_{} is needed: {own}",
                spelt(granted),
                spelt(needed)
            ));
        }
        let all = SimpleCommunicator::world();
        let (rank, world) = (all.rank() as usize, all.size() as usize);
        let comm = all.duplicate();
        let engine = Engine {
            universe,
            comm: Some(comm),
            lanes: (0..world).map(|_| Lane::default()).collect(),
        };
        Ok(Self {
            rank,
            world,
            engine: Mutex::new(engine),
            taking: Mutex::default(),
        })
    }

    /// Hands a frame and its payload to MPI; its number on the way to that rank.
    pub(super) fn send(&self, to: usize, frame: &Frame, payload: Vec<u64>, pool: &Pool) -> u64 {
        let mut words = payload;
        words.truncate(frame.payload().div_ceil(8));
        append(&mut words, &frame.encode());
        lock(&self.engine).send(to, FRAME, words, Some(pool))
    }

    pub(super) fn tell(&self, to: usize, note: &Note) {
        let mut words = Vec::new();
        append(&mut words, &note.encode());
        lock(&self.engine).send(to, NOTE, words, None);
    }

    /// Messages to a rank below this number are out of our hands.
    pub(super) fn done(&self, to: usize) -> u64 {
        let engine = lock(&self.engine);
        let lane = engine.lanes.get(to);
        lane.map_or(0, |lane| lane.sent - lane.out.len() as u64)
    }

    /// Whether MPI has everything that was sent.
    pub(super) fn is_out(&self) -> bool {
        lock(&self.engine)
            .lanes
            .iter()
            .all(|lane| lane.out.is_empty())
    }

    /// Takes in what has come and takes back what was sent; whether there was any. Nothing where another
    /// thread is at it.
    pub(super) fn progress(&self, mesh: &Mesh) -> bool {
        let taking = match self.taking.try_lock() {
            Ok(taking) => taking,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => return false,
        };
        let mut engine = lock(&self.engine);
        let came = engine.receive(&mesh.pool);
        let sent = engine.reclaim(&mesh.pool);
        drop(engine);
        let any = sent || !came.is_empty();
        for (from, tag, words) in came {
            match Content::read(tag, words) {
                Some(Content::Frame(frame, payload)) => mesh.deliver(from, frame, payload),
                Some(Content::Note(note)) => mesh.told(from, note),
                None => mesh.ended(from, String::from("it sent what is no message of ours")),
            }
        }
        drop(taking);
        any
    }

    /// Looks again and again until something has come, the group's owner is roused, `over` says so, or
    /// `timeout` is over.
    pub(super) fn wait(
        &self,
        mesh: &Mesh,
        group: &Group,
        timeout: Duration,
        over: impl Fn() -> bool,
    ) {
        let until = Instant::now() + timeout;
        let (mut looks, mut nap) = (0, NAP);
        while !self.progress(mesh) && lock(&group.inbox).is_parked() && !over() {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                break;
            }
            looks += 1;
            if looks < LOOKS {
                thread::yield_now();
                continue;
            }
            poll(
                &mut [PollFd::new(&group.waker, PollFlags::IN)],
                nap.min(left),
            );
            nap = (2 * nap).min(LONG_NAP);
        }
        lock(&group.inbox).park(false);
        group.waker.hush();
    }

    /// Looks until all that was sent is out, or that time has come.
    pub(super) fn drain(&self, mesh: &Mesh, until: Instant) {
        self.look_until(mesh, until, || self.is_out());
    }

    /// Waits for the others, and gives MPI up.
    pub(super) fn close(&self, mesh: &Mesh, until: Instant) {
        // What nobody has taken in when MPI ends is an error of MPI's.
        let over = || mesh.gone().len() + 1 >= self.world;
        self.look_until(mesh, until, over);
        let mut engine = lock(&self.engine);
        drop(engine.comm.take());
        drop(engine.universe.take());
    }

    fn look_until(&self, mesh: &Mesh, until: Instant, over: impl Fn() -> bool) {
        while !over() && Instant::now() < until {
            if !self.progress(mesh) {
                thread::sleep(LONG_NAP);
            }
        }
    }
}

impl Engine {
    fn send(&mut self, to: usize, tag: i32, words: Vec<u64>, pool: Option<&Pool>) -> u64 {
        let (Some(comm), Some(lane)) = (&self.comm, self.lanes.get_mut(to)) else {
            return 0;
        };
        let peer = comm.process_at_rank(to as i32);
        let flight = Flight::new(words, |words| {
            peer.immediate_send_with_tag(StaticScope, &*words, tag)
        });
        lane.sent += 1;
        lane.out.push_back(flight);
        // What is short is mostly gone by now.
        if lane.out.len() == 1 {
            lane.reclaim(pool);
        }
        lane.sent - 1
    }

    /// What has come whole, from each rank in its order.
    fn receive(&mut self, pool: &Pool) -> Vec<(usize, i32, Vec<u64>)> {
        let Some(comm) = &self.comm else {
            return Vec::new();
        };
        let anybody = comm.any_process();
        for _ in 0..TURN {
            let Some((message, status)) = anybody.immediate_matched_probe() else {
                break;
            };
            let len = status.count(u64::equivalent_datatype());
            let words = pool.take(usize::try_from(len).unwrap_or(0));
            let flight = Flight::new(words, |words| {
                Matched::immediate_matched_receive_into(message, StaticScope, words)
            });
            if let Some(lane) = self.lanes.get_mut(status.source_rank() as usize) {
                lane.inn.push_back((status.tag(), flight));
            }
        }
        let mut came = Vec::new();
        for (from, lane) in self.lanes.iter_mut().enumerate() {
            while let Some((tag, flight)) = lane.inn.pop_front() {
                match flight.land() {
                    Ok(words) => came.push((from, tag, words)),
                    Err(flight) => {
                        lane.inn.push_front((tag, flight));
                        break;
                    }
                }
            }
        }
        came
    }

    /// Takes back what MPI has sent; whether there was any.
    fn reclaim(&mut self, pool: &Pool) -> bool {
        let lanes = self.lanes.iter_mut();
        lanes.fold(false, |any, lane| lane.reclaim(Some(pool)) | any)
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        drop(self.comm.take());
        // MPI may still write to or read from what is under way: it stays where it is. A request must not be dropped.
        for lane in &mut self.lanes {
            lane.out.drain(..).for_each(core::mem::forget);
            lane.inn.drain(..).for_each(core::mem::forget);
        }
    }
}

impl Lane {
    fn reclaim(&mut self, pool: Option<&Pool>) -> bool {
        let before = self.out.len();
        while let Some(flight) = self.out.pop_front() {
            match flight.land() {
                Ok(words) => drop(pool.map(|pool| pool.give(words))),
                Err(flight) => {
                    self.out.push_front(flight);
                    break;
                }
            }
        }
        self.out.len() < before
    }
}

impl Flight {
    /// Gives a storage to a request.
    #[allow(unsafe_code)]
    fn new(
        words: Vec<u64>,
        begin: impl FnOnce(&'static mut [u64]) -> Request<'static, [u64], StaticScope>,
    ) -> Self {
        let mut words = ManuallyDrop::new(words);
        let storage = (words.as_mut_ptr(), words.len(), words.capacity());
        // SAFETY: the storage is the Vec's, initialised and that long; the Vec is never looked at again. It is freed
        // or made a Vec again only by `land`, which the request, the sole holder of this slice, does not outlive.
        let whole = unsafe { core::slice::from_raw_parts_mut(storage.0, storage.1) };
        Self {
            request: begin(whole),
            storage,
        }
    }

    /// The storage, once MPI is done with it.
    #[allow(unsafe_code)]
    fn land(self) -> Result<Vec<u64>, Self> {
        let Self { request, storage } = self;
        match request.test() {
            // SAFETY: `storage` is what `new` took a Vec apart to, nothing else was made of it, and MPI, whose
            // request is over, and the slice, which went with the request, have let go of it.
            Ok(_) => Ok(unsafe { Vec::from_raw_parts(storage.0, storage.1, storage.2) }),
            Err(request) => Err(Self { request, storage }),
        }
    }
}

/// What a message turns out to be.
enum Content {
    Frame(Frame, Vec<u64>),
    Note(Note),
}

impl Content {
    fn read(tag: i32, mut words: Vec<u64>) -> Option<Self> {
        let len = usize::try_from(words.pop()?).ok()?;
        let at = words.len().checked_sub(len.div_ceil(8))?;
        let bytes = bytemuck::cast_slice::<u64, u8>(&words[at..]).get(..len)?;
        if tag == NOTE {
            return Some(Self::Note(Note::decode(bytes).ok()??.0));
        }
        let frame = Frame::decode(bytes).ok()?;
        words.truncate(at);
        let payload = bytemuck::cast_slice::<u64, u8>(&words).get(..frame.payload())?;
        let intact = frame
            .payload_crc
            .is_none_or(|crc| crc32c::crc32c(payload) == crc);
        (at == frame.payload().div_ceil(8) && intact).then_some(Self::Frame(frame, words))
    }
}

/// Appends bytes, padded, and how many there are.
fn append(words: &mut Vec<u64>, bytes: &[u8]) {
    words.reserve(bytes.len().div_ceil(8) + 1);
    for chunk in bytes.chunks(8) {
        let mut word = [0; 8];
        word[..chunk.len()].copy_from_slice(chunk);
        words.push(u64::from_ne_bytes(word));
    }
    words.push(bytes.len() as u64);
}

fn spelt(level: Threading) -> &'static str {
    match level {
        Threading::Single => "SINGLE",
        Threading::Funneled => "FUNNELED",
        Threading::Serialized => "SERIALIZED",
        Threading::Multiple => "MULTIPLE",
    }
}

impl core::fmt::Debug for Wires {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_struct("Wires")
            .field("rank", &self.rank)
            .field("world", &self.world)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{DType, transport::Tag};
    use proptest::prelude::*;
    use std::{string::ToString, vec};

    fn message(payload: &[u8], crc: bool) -> Vec<u64> {
        let frame = Frame {
            kind: super::super::frame::Kind::Data,
            dtype: DType::U8,
            generation: 0,
            from: 1,
            group: 2,
            tag: Tag::User(u64::MAX),
            number: 3,
            len: payload.len() as u64,
            payload_crc: crc.then(|| crc32c::crc32c(payload)),
            call: None,
        };
        let mut words = vec![0; payload.len().div_ceil(8)];
        bytemuck::cast_slice_mut::<u64, u8>(&mut words)[..payload.len()].copy_from_slice(payload);
        append(&mut words, &frame.encode());
        words
    }

    proptest! {
        #[test]
        fn what_was_packed_is_read_and_what_was_changed_is_not(
            payload: Vec<u8>, crc: bool, at: u16, flip in 1u64..
        ) {
            let words = message(&payload, crc);
            let Some(Content::Frame(frame, read)) = Content::read(FRAME, words.clone()) else {
                panic!("it is no frame");
            };
            prop_assert_eq!(frame.tag, Tag::User(u64::MAX));
            prop_assert_eq!(&bytemuck::cast_slice::<u64, u8>(&read)[..payload.len()], &payload[..]);
            let (mut words, before) = (words, payload.len().div_ceil(8));
            let at = usize::from(at) % words.len();
            words[at] ^= flip;
            // A payload is looked at only under a checksum, its padding never.
            let whole = payload.len() / 8;
            if at >= before || crc && at < whole {
                prop_assert!(Content::read(FRAME, words).is_none());
            }
        }

        #[test]
        fn anything_may_come(words: Vec<u64>, tag in 0..3) {
            prop_assert!(Content::read(tag, words).is_none());
        }
    }

    #[test]
    fn a_message_that_int_cannot_count_is_refused() {
        assert!(fits((16 << 30) - 4096).is_ok());
        let error = fits(16 << 30).unwrap_err().to_string();
        assert!(error.contains("17179869184 bytes"), "{error}");
        assert!(fits(usize::MAX).is_err());
    }
}
