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
    poll,
    seat::Seat,
    stream::{Listener, Stream, connect},
};
use crate::{Error, Result, store::Store, transport::fault::WireFaults};

/// Which sockets.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// Between hosts, or on one.
    Tcp,
    /// On one host: lower latency, no ports.
    Unix,
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
        let host = match &self.host {
            Some(host) => host.clone(),
            None => store.host().unwrap_or_else(|| String::from("127.0.0.1")),
        };
        let listener = match self.kind {
            Kind::Tcp => Listener::tcp(self.ports.clone(), &host)?,
            Kind::Unix => Listener::unix()?,
        };
        let address = listener.address(&host);
        store.set(&self.key(self.rank), address.as_bytes(), left(until))?;
        let (sender, receiver) = mpsc::channel();
        let me = Arc::new(self.identity());
        // The acceptor ends when it is told to, whatever became of the rest.
        let (stop, stopped) = mpsc::channel::<()>();
        let acceptor = Acceptor {
            listener,
            me: me.clone(),
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
        let outcome = self.meet(store, &me, &receiver, until);
        drop(stop);
        // It has nothing to say.
        let _ = thread.join();
        let (data, control) = outcome?;
        self.seat(data, control)
    }

    /// A world of one, which needs nobody.
    pub(crate) fn alone(&self) -> Result<Seat> {
        self.seat(vec_of_none(1), vec_of_none(1))
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
        comers: &mpsc::Receiver<(Hello, Stream)>,
        until: Instant,
    ) -> Result<(Streams, Streams)> {
        let (mut data, mut control) = (vec_of_none(self.world), vec_of_none(self.world));
        for rank in 0..self.rank {
            for (purpose, streams) in [(Purpose::Data, &mut data), (Purpose::Control, &mut control)]
            {
                streams[rank] = Some(self.reach(store, me, rank, purpose, until)?);
            }
        }
        while (self.rank + 1..self.world).any(|r| data[r].is_none() || control[r].is_none()) {
            let Ok((hello, stream)) = comers.recv_timeout(left(until)) else {
                let missing = (self.rank + 1..self.world)
                    .filter(|&r| data[r].is_none() || control[r].is_none());
                return Err(self.missing(missing.collect()));
            };
            let rank = hello.from as usize;
            match hello.purpose {
                Purpose::Data => data[rank] = Some(stream),
                _ => control[rank] = Some(stream),
            }
        }
        Ok((data, control))
    }

    /// Connects to a lower rank. Its address is read again after each failure: what was there first
    /// may be left from a run that crashed.
    fn reach(
        &self,
        store: &dyn Store,
        me: &Identity,
        to: usize,
        purpose: Purpose,
        until: Instant,
    ) -> Result<Stream> {
        loop {
            let address = store.wait(&self.key(to), left(until)).map_err(|error| {
                if Instant::now() < until {
                    return error;
                }
                let known = |&r: &usize| matches!(store.get(&self.key(r), PATIENCE), Ok(Some(_)));
                self.missing((0..self.rank).filter(|r| !known(r)).collect())
            })?;
            let address = String::from_utf8_lossy(&address).to_string();
            let by = until.min(Instant::now() + Duration::from_secs(2));
            let why = match connect(&address, by) {
                Err(error) => error.to_string(),
                Ok(stream) => {
                    let by = until.min(Instant::now() + PATIENCE);
                    match introduce(&stream, me, to as u32, purpose, by) {
                        Ok(()) => return Ok(stream),
                        Err(Refusal::Refused(why)) => {
                            return Err(Error::Rendezvous(format!(
                                "rank {to} at {address}: {why}"
                            )));
                        }
                        Err(Refusal::Stranger(why)) => format!("{address}: {why}"),
                    }
                }
            };
            if left(until).is_zero() {
                return Err(Error::Rendezvous(format!(
                    "rank {} found no rank {to} of run {}: {why}",
                    self.rank, self.run
                )));
            }
            thread::sleep(Duration::from_millis(20).min(left(until)));
        }
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

    fn seat(&self, data: Streams, control: Streams) -> Result<Seat> {
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
        let mesh = Mesh::new(
            (self.rank, self.world, self.generation),
            (self.buffer as u64, self.payload_crc),
            peers,
            Plane::new(control)?,
        );
        Seat::new(mesh)
    }
}

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
    listener: Listener,
    me: Arc<Identity>,
    sender: mpsc::Sender<(Hello, Stream)>,
    stopped: mpsc::Receiver<()>,
}

/// Strangers heard at a time; more are turned away at once.
const GUESTS: usize = 256;

impl Acceptor {
    fn run(self) {
        let guests = Arc::new(AtomicUsize::new(0));
        while matches!(self.stopped.try_recv(), Err(mpsc::TryRecvError::Empty)) {
            let mut fds = [PollFd::new(&self.listener, PollFlags::IN)];
            poll(&mut fds, Duration::from_millis(20));
            loop {
                let stream = match self.listener.accept() {
                    Ok(Some(stream)) => stream,
                    Ok(None) => break,
                    Err(_) => {
                        // No descriptor is free, say: the next moment may be better.
                        thread::sleep(Duration::from_millis(20));
                        break;
                    }
                };
                let count = guests.clone();
                if count.fetch_add(1, Ordering::AcqRel) >= GUESTS + 2 * self.me.world as usize {
                    count.fetch_sub(1, Ordering::AcqRel);
                    continue;
                }
                let (me, sender) = (self.me.clone(), self.sender.clone());
                let thread = thread::Builder::new().name(String::from("handshake"));
                let spawned = thread.spawn(move || {
                    let by = Instant::now() + PATIENCE;
                    if let Ok(hello) = receive(&stream, &me, by, |hello| judge(&me, hello)) {
                        // Nobody listens any more where the rendezvous has failed. Of two with one
                        // name the later one stays: the earlier may have broken off.
                        let _ = sender.send((hello, stream));
                    }
                    count.fetch_sub(1, Ordering::AcqRel);
                });
                if spawned.is_err() {
                    guests.fetch_sub(1, Ordering::AcqRel);
                }
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
