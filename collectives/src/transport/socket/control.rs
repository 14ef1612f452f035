//! The control connections: one to every rank, beside the data, served by a thread of its own.
//!
//! ```text
//! note    length (u32)  CRC32C (u32)  body: Beat | Poison(group, cause) | Abort(rank) | Cause | Leave
//! ```
//!
//! * A connection that ends without `Leave` is a process that was killed.
//! * A rank that learns why something failed tells it to all before it acts on it, so that its own
//!   end is never taken for the cause.
//! * Beats keep unacknowledged bytes under way over tcp, so that the kernel notices a dead link. They
//!   are acknowledged by the peer's kernel: a stopped or computing process is not lost.

use std::{
    collections::VecDeque,
    format,
    io::{self, IoSlice, IoSliceMut},
    net::Shutdown,
    string::String,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
    vec,
    vec::Vec,
};

use rustix::event::{PollFd, PollFlags};

use super::{
    codec::{Reader, Writer, get_error, put_error},
    lock,
    mesh::Mesh,
    mpi::Wires,
    poll,
    stream::Stream,
    waker::Waker,
};
use crate::{Error, Result};

/// What ranks tell each other beside the data.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Note {
    /// I am here.
    Beat,
    /// This group is over, for this cause.
    Poison {
        /// The group's number.
        group: u64,
        /// Why.
        cause: Error,
    },
    /// All groups are over.
    Abort {
        /// Who said so.
        rank: usize,
    },
    /// What went wrong first, as far as I know.
    Cause(Error),
    /// I leave: in good order, or for this cause.
    Leave(Option<Error>),
    /// Those who are left of the run meet here for their next generation.
    Meet {
        /// The generation.
        generation: u32,
        /// Where.
        host: String,
        /// On which port.
        port: u16,
        /// Their ranks in this generation, in the order of the next.
        members: Vec<usize>,
    },
}

impl Note {
    /// As bytes, with length and checksum.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let mut w = Writer::default();
        match self {
            Self::Beat => w.u8(0),
            Self::Poison { group, cause } => {
                w.u8(1);
                w.u64(*group);
                put_error(&mut w, cause);
            }
            Self::Abort { rank } => {
                w.u8(2);
                w.u64(*rank as u64);
            }
            Self::Cause(cause) => {
                w.u8(3);
                put_error(&mut w, cause);
            }
            Self::Leave(None) => w.u8(4),
            Self::Leave(Some(cause)) => {
                w.u8(5);
                put_error(&mut w, cause);
            }
            Self::Meet {
                generation,
                host,
                port,
                members,
            } => {
                w.u8(6);
                w.u32(*generation);
                w.text(host);
                w.u32(u32::from(*port));
                w.u32(members.len() as u32);
                members.iter().for_each(|&rank| w.u32(rank as u32));
            }
        }
        let mut note = Vec::with_capacity(8 + w.0.len());
        note.extend((w.0.len() as u32).to_le_bytes());
        note.extend(crc32c::crc32c(&w.0).to_le_bytes());
        note.extend(w.0);
        note
    }

    /// The first note of `bytes` and how many of them it took; none where more must come.
    ///
    /// # Errors
    /// In words, where these are no notes.
    pub fn decode(bytes: &[u8]) -> Result<Option<(Self, usize)>, &'static str> {
        let mut r = Reader(bytes);
        let (Some(len), Some(crc)) = (r.u32(), r.u32()) else {
            return Ok(None);
        };
        if len > MAX_NOTE {
            return Err("a note longer than any");
        }
        let Some(body) = r.take(len as usize) else {
            return Ok(None);
        };
        if crc32c::crc32c(body) != crc {
            return Err("a note with a wrong checksum");
        }
        let mut r = Reader(body);
        let note = Self::body(&mut r).filter(|_| r.0.is_empty());
        let note = note.ok_or("a note without meaning")?;
        Ok(Some((note, 8 + body.len())))
    }

    fn body(r: &mut Reader<'_>) -> Option<Self> {
        Some(match r.u8()? {
            0 => Self::Beat,
            1 => Self::Poison {
                group: r.u64()?,
                cause: get_error(r)?,
            },
            2 => Self::Abort { rank: r.usize()? },
            3 => Self::Cause(get_error(r)?),
            4 => Self::Leave(None),
            5 => Self::Leave(Some(get_error(r)?)),
            6 => {
                let (generation, host) = (r.u32()?, r.text()?);
                let port = u16::try_from(r.u32()?).ok()?;
                let members = (0..r.u32()?).map(|_| r.u32().map(|rank| rank as usize));
                Self::Meet {
                    generation,
                    host,
                    port,
                    members: members.collect::<Option<_>>()?,
                }
            }
            _ => return None,
        })
    }
}

/// Four texts of the longest kind, or the ranks of a large run.
const MAX_NOTE: u32 = 256 << 10;

/// All control connections of one rank.
#[derive(Debug)]
pub(super) struct Plane {
    lines: Vec<Option<Line>>,
    /// What carries notes and frames instead of connections.
    pub(super) mpi: Option<Wires>,
    waker: Waker,
    /// Peers whose data connection ended, and when that is proof enough.
    suspects: Mutex<Vec<(usize, String, Instant)>>,
    closing: AtomicBool,
}

#[derive(Debug)]
struct Line {
    stream: Stream,
    out: Mutex<VecDeque<u8>>,
    over: AtomicBool,
}

/// Between two beats.
const BEAT: Duration = Duration::from_millis(350);

/// A peer not heard for so long is not beaten at: its host answers for itself.
const QUIET: Duration = Duration::from_secs(10);

/// How long the control connection may contradict the end of a data connection.
const DOUBT: Duration = Duration::from_millis(700);

/// How long the last notes may take.
const FAREWELL: Duration = Duration::from_secs(2);

impl Plane {
    /// One connection by global rank, none at my own.
    pub(super) fn new(streams: Vec<Option<Stream>>) -> Result<Self> {
        let lines = streams.into_iter().map(|stream| {
            stream.map(|stream| Line {
                stream,
                out: Mutex::default(),
                over: AtomicBool::new(false),
            })
        });
        Ok(Self {
            lines: lines.collect(),
            mpi: None,
            waker: Waker::new()?,
            suspects: Mutex::default(),
            closing: AtomicBool::new(false),
        })
    }

    /// No connection, everything by MPI.
    pub(super) fn by(wires: Wires) -> Result<Self> {
        let lines = (0..wires.place().1).map(|_| None).collect();
        let plane = Self::new(lines)?;
        Ok(Self {
            mpi: Some(wires),
            ..plane
        })
    }

    /// Tells one rank.
    pub(super) fn tell(&self, rank: usize, note: &Note) {
        if let Some(mpi) = self.mpi.as_ref().filter(|mpi| mpi.place().0 != rank) {
            return mpi.tell(rank, note);
        }
        let Some(line) = self.lines.get(rank).and_then(Option::as_ref) else {
            return;
        };
        if line.over.load(Ordering::Acquire) {
            return;
        }
        let mut out = lock(&line.out);
        out.extend(note.encode());
        line.flush(&mut out);
        if !out.is_empty() {
            self.waker.wake();
        }
    }

    /// Tells every rank.
    pub(super) fn tell_all(&self, note: &Note) {
        (0..self.lines.len()).for_each(|rank| self.tell(rank, note));
    }

    /// The data connection of `rank` ended: if nothing explains it soon, the rank is lost.
    pub(super) fn suspect(&self, rank: usize, reason: String) {
        lock(&self.suspects).push((rank, reason, Instant::now() + DOUBT));
        self.waker.wake();
    }

    /// Asks the thread to look at the data connections too: something is left to be sent.
    pub(super) fn help(&self) {
        self.waker.wake();
    }

    /// The thread ends once the last notes are out.
    pub(super) fn close(&self) {
        self.closing.store(true, Ordering::Release);
        self.waker.wake();
    }

    fn live(&self) -> impl Iterator<Item = (usize, &Line)> {
        let lines = self.lines.iter().enumerate();
        lines
            .filter_map(|(rank, line)| Some((rank, line.as_ref()?)))
            .filter(|(_, line)| !line.over.load(Ordering::Acquire))
    }
}

impl Line {
    fn flush(&self, out: &mut VecDeque<u8>) {
        while !out.is_empty() {
            let (a, b) = out.as_slices();
            match self
                .stream
                .write_vectored(&[IoSlice::new(a), IoSlice::new(b)])
            {
                Ok(n) => drop(out.drain(..n)),
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => return,
                // The reading side will tell.
                Err(_) => out.clear(),
            }
        }
    }
}

/// Between two looks at MPI where nobody else looks.
const LOOK: Duration = Duration::from_millis(20);

/// The same where something is on its way out.
const LOOK_AGAIN: Duration = Duration::from_millis(1);

/// Looks after MPI, which goes on only while it is called, until `mesh` is closed.
fn look_after(mesh: &Mesh, mpi: &Wires) {
    let plane = &mesh.plane;
    let mut end = None;
    loop {
        let pause = if mpi.is_out() { LOOK } else { LOOK_AGAIN };
        poll(&mut [PollFd::new(&plane.waker, PollFlags::IN)], pause);
        plane.waker.hush();
        mpi.progress(mesh);
        if plane.closing.load(Ordering::Acquire) {
            let now = Instant::now();
            if mpi.is_out() || now >= *end.get_or_insert(now + FAREWELL) {
                return;
            }
        }
    }
}

/// Serves the control connections of `mesh` until it is closed.
pub(super) fn serve(mesh: &Arc<Mesh>) {
    if let Some(mpi) = mesh.mpi() {
        return look_after(mesh, mpi);
    }
    let n = mesh.plane.lines.len();
    let mut service = Service {
        mesh,
        bytes: vec![Vec::new(); n],
        heard: vec![Instant::now(); n],
        beat: Instant::now() + BEAT,
        end: None,
    };
    while service.turn() {}
    for line in mesh.plane.lines.iter().flatten() {
        line.stream.shutdown(Shutdown::Write);
    }
}

struct Service<'a> {
    mesh: &'a Arc<Mesh>,
    /// Notes that are not complete, by rank.
    bytes: Vec<Vec<u8>>,
    heard: Vec<Instant>,
    beat: Instant,
    end: Option<Instant>,
}

impl Service<'_> {
    /// Sleeps for something to do and does it; false when it is time to end.
    fn turn(&mut self) -> bool {
        let (mesh, plane) = (self.mesh, &self.mesh.plane);
        let now = Instant::now();
        let mut until = self.beat;
        for (_, _, due) in &*lock(&plane.suspects) {
            until = until.min(*due);
        }
        let lines: Vec<(usize, &Line)> = plane.live().collect();
        let unsent = mesh.unsent();
        let mut fds = vec![PollFd::new(&plane.waker, PollFlags::IN)];
        for (_, line) in &lines {
            let mut flags = PollFlags::IN;
            flags.set(PollFlags::OUT, !lock(&line.out).is_empty());
            fds.push(PollFd::new(&line.stream, flags));
        }
        for &rank in &unsent {
            if let Some(peer) = mesh.peer(rank) {
                fds.push(PollFd::new(&peer.data, PollFlags::OUT));
            }
        }
        poll(&mut fds, until.saturating_duration_since(now));
        let ready: Vec<PollFlags> = fds.iter().map(PollFd::revents).collect();
        plane.waker.hush();
        for ((rank, line), flags) in lines.iter().zip(&ready[1..]) {
            if flags.contains(PollFlags::OUT) {
                line.flush(&mut lock(&line.out));
            }
            if flags.intersects(PollFlags::IN | PollFlags::HUP | PollFlags::ERR) {
                self.read(*rank, line);
            }
        }
        unsent.into_iter().for_each(|rank| mesh.flush(rank));
        self.judge();
        self.beat_all();
        self.goes_on()
    }

    fn read(&mut self, rank: usize, line: &Line) {
        let mut chunk = [0; 4096];
        let why = loop {
            match line
                .stream
                .read_vectored(&mut [IoSliceMut::new(&mut chunk)])
            {
                Ok(0) => break String::from("its process has ended"),
                Ok(n) => {
                    self.heard[rank] = Instant::now();
                    self.bytes[rank].extend(&chunk[..n]);
                    if let Err(fault) = self.notes(rank) {
                        break format!("it sent {fault}");
                    }
                    if n < chunk.len() {
                        return;
                    }
                }
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => return,
                Err(e) => break format!("its control connection failed: {e}"),
            }
        };
        line.over.store(true, Ordering::Release);
        self.mesh.ended(rank, why);
    }

    fn notes(&mut self, rank: usize) -> Result<(), &'static str> {
        let mut at = 0;
        while let Some((note, len)) = Note::decode(&self.bytes[rank][at..])? {
            at += len;
            self.mesh.told(rank, note);
        }
        self.bytes[rank].drain(..at);
        Ok(())
    }

    /// Data connections that ended and that nothing has explained since.
    fn judge(&self) {
        let now = Instant::now();
        let mut suspects = lock(&self.mesh.plane.suspects);
        let due: Vec<(usize, String, Instant)> =
            suspects.extract_if(.., |(_, _, at)| *at <= now).collect();
        drop(suspects);
        for (rank, reason, _) in due {
            self.mesh.ended(rank, reason);
        }
    }

    fn beat_all(&mut self) {
        let now = Instant::now();
        if now < self.beat {
            return;
        }
        self.beat = now + BEAT;
        let plane = &self.mesh.plane;
        for (rank, line) in plane.live() {
            let heard = now.saturating_duration_since(self.heard[rank]) < QUIET;
            if heard && matches!(line.stream, Stream::Tcp(_)) && lock(&line.out).is_empty() {
                plane.tell(rank, &Note::Beat);
            }
        }
    }

    fn goes_on(&mut self) -> bool {
        let plane = &self.mesh.plane;
        if !plane.closing.load(Ordering::Acquire) {
            return true;
        }
        let end = *self.end.get_or_insert_with(|| Instant::now() + FAREWELL);
        Instant::now() < end && plane.live().any(|(_, line)| !lock(&line.out).is_empty())
    }
}
