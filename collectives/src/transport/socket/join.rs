//! How the ranks of a run find each other and connect.
//!
//! ```text
//! every rank   listens, and writes its address into the store under generation and rank
//! rank r       connects to every rank below r, twice: data and control
//!              and waits for every rank above r
//! ```
//!
//! Whatever else comes to the listener is heard by a thread of its own for a few seconds at most
//! and turned away.

use std::{
    format,
    ops::RangeInclusive,
    path::PathBuf,
    string::{String, ToString},
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
        mpsc,
    },
    thread,
    time::{Duration, Instant},
    vec::Vec,
};

use rustix::event::{PollFd, PollFlags};

use super::{
    control::Plane,
    faulty::Faulty,
    handshake::{self, Hello, Identity, PATIENCE, Purpose, Refusal, introduce, receive},
    mesh::{Mesh, Peer},
    mpi::Wires,
    poll,
    seat::Seat,
    stream::{Listener, Stream, attempt, connect},
};
#[cfg(target_os = "linux")]
use crate::transport::shm::{Host, Neighbour, Shm, WINDOW};
use crate::{Error, Result, store::Store, transport::fault::WireFaults};

#[cfg(not(target_os = "linux"))]
use super::apart::{Host, Neighbour, WINDOW};

/// Which sockets.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// Between hosts, or on one.
    Tcp,
    /// On one host: lower latency, no ports.
    Unix,
    /// On one host, with memory that all ranks share (Linux).
    Shm,
    /// Shared memory and unix sockets between ranks that can really open each other's memory, tcp between
    /// all others.
    Auto,
    /// What MPI has, which has started the ranks and knows them: no store, address or secret is looked at. Needs the
    /// feature `mpi`.
    Mpi,
}

/// What a rank needs to know to join its run.
///
/// ```no_run
/// # fn main() -> quintet_collectives::Result<()> {
/// use quintet_collectives::{ReduceOp, store::FileStore, transport::socket::{Join, Kind}};
/// let store = FileStore::new("/shared/run-7")?;
/// let seat = Join { kind: Kind::Tcp, ..Join::new(0, 4, "run-7") }.over(&store)?;
/// let comm = seat.communicator()?;
/// let mut x = [1.0f32; 3];
/// comm.all_reduce(&mut x, ReduceOp::Sum)?;
/// seat.finish(Ok(()));
/// # Ok(()) }
/// ```
#[derive(Debug, Clone)]
pub struct Join {
    /// My rank.
    pub rank: usize,
    /// Ranks of the run.
    pub world: usize,
    /// The run's name: who has another is not let in. A restart is another run.
    pub run: String,
    /// Counts the rebuilds of one run; ranks of different generations do not connect.
    pub generation: u32,
    /// Which sockets.
    pub kind: Kind,
    /// The name or address at which others reach this host; by default the one from which this rank
    /// reached the store, and loopback where the store is a file.
    pub host: Option<String>,
    /// Ports to listen on; `0..=0` is any.
    pub ports: RangeInclusive<u16>,
    /// Proves that a peer may take part; it never travels.
    pub secret: Vec<u8>,
    /// How long all of this may take.
    pub timeout: Duration,
    /// User bytes that may be under way to a peer in a group before `send` waits.
    pub buffer: usize,
    /// Whether payloads carry a CRC32C; headers always do.
    pub payload_crc: bool,
    /// With [`Kind::Auto`]: ranks whose labels differ do not share memory, even if they could.
    pub label: Option<String>,
    /// Where segments are files without a name, instead of memory without one.
    pub folder: Option<PathBuf>,
    /// Address space for each rank's segment: the most it can share. All ranks may differ.
    pub window: usize,
    /// Whether ranks that share memory may also read each other's where it lies, if the system permits it.
    pub single_copy: bool,
    /// What goes wrong on purpose, once all are connected; for tests.
    pub faults: Option<WireFaults>,
}

impl Join {
    /// Over tcp, on any port, without a secret, in five minutes at most.
    #[must_use]
    pub fn new(rank: usize, world: usize, run: &str) -> Self {
        Self {
            rank,
            world,
            run: run.to_string(),
            generation: 0,
            kind: Kind::Tcp,
            host: None,
            ports: 0..=0,
            secret: Vec::new(),
            timeout: Duration::from_secs(300),
            buffer: 64 << 20,
            payload_crc: false,
            label: None,
            folder: None,
            window: WINDOW,
            single_copy: true,
            faults: None,
        }
    }

    /// Meets the others by way of `store` and connects to all of them.
    ///
    /// # Errors
    /// [`Error::Rendezvous`] naming the ranks that did not come in time, [`Error::System`] where
    /// this rank cannot listen, [`Error::Layout`] for a rank that is none, and the store's.
    pub fn over(&self, store: &dyn Store) -> Result<Seat> {
        let until = Instant::now() + self.timeout;
        if self.rank >= self.world || u32::try_from(self.world).is_err() {
            return Err(Error::Layout(format!(
                "rank {} is no rank of a world of {}",
                self.rank, self.world
            )));
        }
        if self.world == 1 {
            return self.alone();
        }
        if self.kind == Kind::Mpi {
            return self.by_mpi();
        }
        let host = match &self.host {
            Some(host) => host.clone(),
            None => store.host().unwrap_or_else(|| String::from("127.0.0.1")),
        };
        let shares = self.shares()?.map(Arc::new);
        let mut listeners = Vec::new();
        if matches!(self.kind, Kind::Tcp | Kind::Auto) {
            listeners.push(Listener::tcp(self.ports.clone(), &host)?);
        }
        if matches!(self.kind, Kind::Unix | Kind::Shm) || shares.is_some() {
            listeners.push(Listener::unix()?);
        }
        let mut address: Vec<String> = listeners.iter().map(|l| l.address(&host)).collect();
        address.extend(self.label.iter().map(|label| format!("host:{label}")));
        let address = address.join(" ");
        store.set(&self.key(self.rank), address.as_bytes(), left(until))?;
        let (sender, receiver) = mpsc::channel();
        let me = Arc::new(self.identity());
        // The acceptor ends when it is told to, whatever became of the rest.
        let (stop, stopped) = mpsc::channel::<()>();
        let acceptor = Acceptor {
            listeners,
            me: me.clone(),
            shares: shares.clone(),
            sender,
            stopped,
        };
        let thread = thread::Builder::new().name(String::from("accept"));
        let thread = thread
            .spawn(move || acceptor.run())
            .map_err(|e| Error::System {
                what: "start a thread",
                reason: e.to_string(),
            })?;
        let outcome = self.meet(store, &me, shares.as_deref(), &receiver, until);
        drop(stop);
        // It has nothing to say.
        let _ = thread.join();
        let met = outcome?;
        let together = match self.kind {
            Kind::Auto => self.compare(store, &met, until)?,
            _ => std::vec![std::vec![true; self.world]; self.world],
        };
        self.seat(met, shares, together)
    }

    /// Memory to share, where this kind has some.
    fn shares(&self) -> Result<Option<Host>> {
        let host = || Host::new(self.window, self.folder.as_deref());
        match self.kind {
            Kind::Shm => host().map(Some),
            // Without any it goes by tcp.
            Kind::Auto => Ok(host().ok()),
            Kind::Tcp | Kind::Unix | Kind::Mpi => Ok(None),
        }
    }

    /// Which ranks have opened each other's segments: everybody says whose it has, and all come to the
    /// same table.
    fn compare(&self, store: &dyn Store, met: &Met, until: Instant) -> Result<Vec<Vec<bool>>> {
        let key = |rank: usize| format!("{}/{}/near/{rank}", self.run, self.generation);
        let row: Vec<u8> = met.near.iter().map(|n| u8::from(n.is_some())).collect();
        store.set(&key(self.rank), &row, left(until))?;
        (0..self.world)
            .map(|rank| {
                let row = store.wait(&key(rank), left(until))?;
                Ok(row.iter().map(|&sees| sees == 1).collect())
            })
            .collect()
    }

    /// The seat that MPI has given this process.
    pub(crate) fn by_mpi(&self) -> Result<Seat> {
        self.by(Wires::open()?)
    }

    pub(super) fn by(&self, wires: Wires) -> Result<Seat> {
        let (rank, world) = wires.place();
        if (rank, world) != (self.rank, self.world) {
            return Err(Error::Rendezvous(format!(
                "this process is rank {} of {}, and to MPI rank {rank} of {world}: it must be started by the mpirun of the MPI that it was built with",
                self.rank, self.world
            )));
        }
        let mesh = Mesh::new(
            (rank, world, self.generation),
            (self.buffer as u64, self.payload_crc),
            (0..world).map(|_| None).collect(),
            Plane::by(wires)?,
        );
        Seat::new(mesh)
    }

    /// A world of one, which needs nobody.
    pub(crate) fn alone(&self) -> Result<Seat> {
        self.seat(Met::new(1), None, Vec::new())
    }

    fn identity(&self) -> Identity {
        Identity {
            run: handshake::run_digest(&self.run),
            generation: self.generation,
            world: self.world as u32,
            rank: self.rank as u32,
            secret: self.secret.clone(),
        }
    }

    fn key(&self, rank: usize) -> String {
        format!("{}/{}/address/{rank}", self.run, self.generation)
    }

    fn meet(
        &self,
        store: &dyn Store,
        me: &Identity,
        shares: Option<&Host>,
        comers: &mpsc::Receiver<Comer>,
        until: Instant,
    ) -> Result<Met> {
        let mut met = Met::new(self.world);
        for rank in 0..self.rank {
            let (stream, near) = self.reach(store, (me, shares), rank, Purpose::Data, until)?;
            (met.data[rank], met.near[rank]) = (Some(stream), near);
            let (stream, _) = self.reach(store, (me, None), rank, Purpose::Control, until)?;
            met.control[rank] = Some(stream);
        }
        let lacks = |met: &Met, r: usize| met.data[r].is_none() || met.control[r].is_none();
        while (self.rank + 1..self.world).any(|r| lacks(&met, r)) {
            let Ok((hello, stream, near)) = comers.recv_timeout(left(until)) else {
                let missing = (self.rank + 1..self.world).filter(|&r| lacks(&met, r));
                return Err(self.missing(missing.collect()));
            };
            let rank = hello.from as usize;
            match (hello.purpose, near) {
                (Purpose::Data, Some(Err(why))) if self.kind == Kind::Shm => {
                    return Err(self.apart(rank, &why));
                }
                // It comes again over tcp.
                (Purpose::Data, Some(Err(_))) => {}
                (Purpose::Data, near) => {
                    (met.data[rank], met.near[rank]) = (Some(stream), near.and_then(Result::ok));
                }
                _ => met.control[rank] = Some(stream),
            }
        }
        Ok(met)
    }

    fn apart(&self, rank: usize, why: &str) -> Error {
        Error::Rendezvous(format!(
            "rank {} shares no memory with rank {rank}: {why}",
            self.rank
        ))
    }

    /// Connects to a lower rank. Its address is read again after each failure: what was there first
    /// may be left from a run that crashed.
    fn reach(
        &self,
        store: &dyn Store,
        (me, shares): (&Identity, Option<&Host>),
        to: usize,
        purpose: Purpose,
        until: Instant,
    ) -> Result<(Stream, Option<Neighbour>)> {
        loop {
            let address = store.wait(&self.key(to), left(until)).map_err(|error| {
                if Instant::now() < until {
                    return error;
                }
                let known = |&r: &usize| matches!(store.get(&self.key(r), PATIENCE), Ok(Some(_)));
                self.missing((0..self.rank).filter(|r| !known(r)).collect())
            })?;
            let address = String::from_utf8_lossy(&address).to_string();
            let mut why = String::from("it has no address of this kind");
            for address in self.ways(&address) {
                let last = self.kind != Kind::Auto || address.starts_with("tcp:");
                let by = until.min(Instant::now() + Duration::from_secs(2));
                let outcome = if last {
                    connect(address, by).map_err(|e| e.to_string())
                } else {
                    // Who is not on this host answers at once that nobody is there.
                    attempt(address, by)
                };
                let stream = match outcome {
                    Ok(stream) => stream,
                    Err(error) => {
                        why = error;
                        continue;
                    }
                };
                let by = until.min(Instant::now() + PATIENCE);
                match introduce(&stream, me, to as u32, purpose, by) {
                    Ok(()) => {}
                    Err(Refusal::Refused(why)) => {
                        return Err(Error::Rendezvous(format!("rank {to} at {address}: {why}")));
                    }
                    Err(Refusal::Stranger(stranger)) => {
                        why = format!("{address}: {stranger}");
                        continue;
                    }
                }
                match shares.filter(|_| matches!(stream, Stream::Unix(_))) {
                    None => return Ok((stream, None)),
                    Some(host) => match host.swap(&stream, true, by) {
                        Ok(near) => return Ok((stream, Some(near))),
                        Err(error) if last => return Err(self.apart(to, &error)),
                        Err(error) => why = error,
                    },
                }
            }
            if left(until).is_zero() {
                return Err(Error::Rendezvous(format!(
                    "rank {} found no rank {to} of run {}: {why}",
                    self.rank, self.run
                )));
            }
            thread::sleep(Duration::from_millis(20).min(left(until)));
        }
    }

    /// The addresses to try, the nearest first.
    fn ways<'a>(&self, address: &'a str) -> Vec<&'a str> {
        let parts = || address.split(' ');
        let label = parts().find_map(|part| part.strip_prefix("host:"));
        let apart = self.kind == Kind::Auto && label != self.label.as_deref();
        let unix = parts().filter(|part| part.starts_with("unix:") && !apart);
        unix.chain(parts().filter(|part| part.starts_with("tcp:")))
            .collect()
    }

    fn missing(&self, ranks: Vec<usize>) -> Error {
        let names: Vec<String> = ranks.iter().map(ToString::to_string).collect();
        Error::Rendezvous(format!(
            "rank {} of run {} waited {:?} for rank{} {}",
            self.rank,
            self.run,
            self.timeout,
            if ranks.len() == 1 { "" } else { "s" },
            names.join(", "),
        ))
    }

    fn seat(&self, met: Met, host: Option<Arc<Host>>, together: Vec<Vec<bool>>) -> Result<Seat> {
        let Met {
            data,
            control,
            near,
        } = met;
        let failed = |e: std::io::Error| Error::System {
            what: "set up a connection",
            reason: e.to_string(),
        };
        for stream in data.iter().chain(&control).flatten() {
            stream.tune();
            stream.set_nonblocking(true).map_err(failed)?;
        }
        control.iter().flatten().for_each(Stream::watch);
        let faulty = |(to, stream): (usize, Stream)| match &self.faults {
            Some(faults) => Stream::Faulty(Faulty::new(stream, faults, to).into()),
            None => stream,
        };
        let peers = data.into_iter().enumerate();
        let peers = peers
            .map(|(to, stream)| Some(Peer::new(faulty((to, stream?)))))
            .collect();
        #[allow(unused_mut, reason = "only Linux has memory to share")]
        let mut mesh = Mesh::new(
            (self.rank, self.world, self.generation),
            (self.buffer as u64, self.payload_crc),
            peers,
            Plane::new(control)?,
        );
        #[cfg(target_os = "linux")]
        if let Some(host) = host {
            mesh.shm = Some(Arc::new(Shm::new(
                host,
                self.rank,
                near,
                together,
                self.single_copy,
            )));
        }
        #[cfg(not(target_os = "linux"))]
        drop((host, near, together));
        Seat::new(mesh)
    }
}

/// Everybody this rank is connected to.
struct Met {
    data: Streams,
    control: Streams,
    near: Vec<Option<Neighbour>>,
}

impl Met {
    fn new(world: usize) -> Self {
        Self {
            data: vec_of_none(world),
            control: vec_of_none(world),
            near: (0..world).map(|_| None).collect(),
        }
    }
}

/// Who connected, and its segment, or why that cannot be had.
type Comer = (Hello, Stream, Option<Result<Neighbour, String>>);

/// One connection by rank.
type Streams = Vec<Option<Stream>>;

fn vec_of_none(n: usize) -> Streams {
    (0..n).map(|_| None).collect()
}

fn left(until: Instant) -> Duration {
    until.saturating_duration_since(Instant::now())
}

/// Hears everybody who connects and passes on those who are peers.
struct Acceptor {
    listeners: Vec<Listener>,
    me: Arc<Identity>,
    shares: Option<Arc<Host>>,
    sender: mpsc::Sender<Comer>,
    stopped: mpsc::Receiver<()>,
}

/// Strangers heard at a time; more are turned away at once.
const GUESTS: usize = 256;

impl Acceptor {
    fn run(self) {
        let guests = Arc::new(AtomicUsize::new(0));
        while matches!(self.stopped.try_recv(), Err(mpsc::TryRecvError::Empty)) {
            let listening = self.listeners.iter().map(|l| PollFd::new(l, PollFlags::IN));
            poll(
                &mut listening.collect::<Vec<_>>(),
                Duration::from_millis(20),
            );
            self.listeners
                .iter()
                .for_each(|listener| self.admit(listener, &guests));
        }
    }

    /// Hears all who are waiting at a listener, each on a thread of its own.
    fn admit(&self, listener: &Listener, guests: &Arc<AtomicUsize>) {
        loop {
            let stream = match listener.accept() {
                Ok(Some(stream)) => stream,
                Ok(None) => return,
                Err(_) => {
                    // No descriptor is free, say: the next moment may be better.
                    return thread::sleep(Duration::from_millis(20));
                }
            };
            let count = guests.clone();
            if count.fetch_add(1, Ordering::AcqRel) >= GUESTS + 2 * self.me.world as usize {
                count.fetch_sub(1, Ordering::AcqRel);
                continue;
            }
            let (me, sender) = (self.me.clone(), self.sender.clone());
            let shares = self.shares.clone();
            let thread = thread::Builder::new().name(String::from("handshake"));
            let spawned = thread.spawn(move || {
                let by = Instant::now() + PATIENCE;
                if let Ok(hello) = receive(&stream, &me, by, |hello| judge(&me, hello)) {
                    let unix = matches!(stream, Stream::Unix(_)) && hello.purpose == Purpose::Data;
                    let near = shares.as_ref().filter(|_| unix);
                    let near = near.map(|host| host.swap(&stream, false, by));
                    drop(shares);
                    // Nobody listens any more where the rendezvous has failed. Of two with one
                    // name the later one stays: the earlier may have broken off.
                    let _ = sender.send((hello, stream, near));
                }
                count.fetch_sub(1, Ordering::AcqRel);
            });
            if spawned.is_err() {
                guests.fetch_sub(1, Ordering::AcqRel);
            }
        }
    }
}

fn judge(me: &Identity, hello: &Hello) -> u8 {
    if hello.run != me.run || hello.purpose == Purpose::Store {
        handshake::OTHER_RUN
    } else if hello.generation != me.generation {
        handshake::OTHER_GENERATION
    } else if hello.world != me.world {
        handshake::OTHER_WORLD
    } else if hello.to != me.rank || hello.from <= me.rank || hello.from >= me.world {
        handshake::OTHER_RANK
    } else {
        0
    }
}
