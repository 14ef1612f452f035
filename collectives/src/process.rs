//! One process, one rank: from the environment to a communicator (`std`, unix).
//!
//! ```text
//! from_env() -> Process --communicator()--> Communicator<Sockets>
//!    |              |
//!    |              +-- finish(outcome), run(body), rebuild() without the lost
//!    +-- Place::parse (who, where) -> store -> Join
//! ```

use std::{
    format, fs,
    os::unix::fs::{DirBuilderExt, MetadataExt},
    path::PathBuf,
    string::{String, ToString},
    time::{Duration, Instant},
    vec::Vec,
};

use crate::{
    Communicator, Error, Result,
    environment::{Meeting, Place, Variables},
    launch,
    store::{FileStore, Store, StoreServer, TcpStore},
    transport::socket::{Join, Kind, Seat, Sockets},
};

/// This process's rank in the run that the environment describes; see [`crate::environment`].
///
/// ```no_run
/// use quintet_collectives::{ReduceOp, process};
/// // mpirun -n 4 ./program, srun -n 4 ./program, torchrun --no-python ... ./program
/// process::from_env()?.run(|comm| {
///     let mut x = [comm.rank() as f32];
///     comm.all_reduce(&mut x, ReduceOp::Sum)
/// })?;
/// # Ok::<(), quintet_collectives::Error>(())
/// ```
///
/// # Errors
/// [`Error::Environment`] where the environment does not say who this is, [`Error::Rendezvous`]
/// where the others are not found.
pub fn from_env() -> Result<Process> {
    from_env_with(|_| {})
}

/// [`from_env`] where `change` has the last word on what the environment chooses beside the ranks.
///
/// # Errors
/// Those of [`from_env`].
pub fn from_env_with(change: impl FnOnce(&mut Options)) -> Result<Process> {
    let variables = environment();
    launch::tie(&variables)?;
    let mut options = Options::parse(&variables)?;
    change(&mut options);
    Process::join(Place::parse(&variables)?, options)
}

/// All environment variables whose names and values are text.
#[must_use]
pub fn environment() -> Variables {
    std::env::vars_os()
        .filter_map(|(name, value)| Some((name.into_string().ok()?, value.into_string().ok()?)))
        .collect()
}

/// What may be chosen about a run beside its ranks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Options {
    /// `QUINTET_TRANSPORT`: `tcp` (default), `unix`, `shm`, or `auto`: shared memory between ranks that can
    /// really open each other's, tcp between all others; or `mpi`, where MPI has started the ranks.
    pub kind: Kind,
    /// `QUINTET_SECRET`: who lacks it cannot take part.
    pub secret: Vec<u8>,
    /// `QUINTET_TIMEOUT`, seconds: how long the ranks may take to meet (default 300).
    pub timeout: Duration,
    /// `QUINTET_ADDR`: the address at which others reach this rank.
    pub host: Option<String>,
    /// `QUINTET_PORTS`, as `61000-61100`: where ranks listen (default: any port).
    pub ports: core::ops::RangeInclusive<u16>,
    /// `QUINTET_CHECKSUM`, `0` or `1`: whether payloads carry a CRC32C (default 0).
    pub payload_crc: bool,
    /// `QUINTET_HOST`: under `auto` ranks whose labels differ do not share memory, even if they could.
    pub label: Option<String>,
    /// `QUINTET_SHM_DIR`: shared memory lies in nameless files there, instead of in memory without a name.
    pub folder: Option<PathBuf>,
    /// `QUINTET_SINGLE_COPY`, `0` or `1`: whether ranks that share memory also read each other's where it lies, if the
    /// system permits it (default 1).
    pub single_copy: bool,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            kind: Kind::Tcp,
            secret: Vec::new(),
            timeout: Duration::from_secs(300),
            host: None,
            ports: 0..=0,
            payload_crc: false,
            label: None,
            folder: None,
            single_copy: true,
        }
    }
}

impl Options {
    /// Reads the `QUINTET_*` variables above.
    ///
    /// # Errors
    /// [`Error::Environment`] for a value that makes no sense.
    pub fn parse(variables: &Variables) -> Result<Self> {
        let text = |name: &str| {
            let value = variables.get(name).map(|value| value.trim());
            value.filter(|value| !value.is_empty())
        };
        let wrong = |name: &str, what: &str| {
            Error::Environment(format!("{name} is {:?}, which is not {what}", text(name)))
        };
        let kind = match text("QUINTET_TRANSPORT") {
            None | Some("tcp") => Kind::Tcp,
            Some("unix") => Kind::Unix,
            Some("shm") => Kind::Shm,
            Some("auto") => Kind::Auto,
            Some("mpi") => Kind::Mpi,
            Some(_) => return Err(wrong("QUINTET_TRANSPORT", "tcp, unix, shm, auto or mpi")),
        };
        let mut options = Self {
            kind,
            ..Self::default()
        };
        options.secret = text("QUINTET_SECRET").unwrap_or("").as_bytes().to_vec();
        if let Some(seconds) = text("QUINTET_TIMEOUT") {
            let seconds: f64 = seconds
                .parse()
                .ok()
                .filter(|s| (0.001..=1e6).contains(s))
                .ok_or_else(|| wrong("QUINTET_TIMEOUT", "a number of seconds up to a million"))?;
            options.timeout = Duration::from_secs_f64(seconds);
        }
        options.host = text("QUINTET_ADDR").map(String::from);
        if let Some(ports) = text("QUINTET_PORTS") {
            let (first, last) = ports.split_once('-').unwrap_or((ports, ports));
            options.ports = match (first.trim().parse(), last.trim().parse()) {
                (Ok(first), Ok(last)) if first <= last && first > 0 => first..=last,
                _ => return Err(wrong("QUINTET_PORTS", "a range of ports like 61000-61100")),
            };
        }
        let flag = |name: &str, unsaid: bool| match text(name) {
            None => Ok(unsaid),
            Some("0") => Ok(false),
            Some("1") => Ok(true),
            Some(_) => Err(wrong(name, "0 or 1")),
        };
        options.payload_crc = flag("QUINTET_CHECKSUM", false)?;
        options.single_copy = flag("QUINTET_SINGLE_COPY", true)?;
        options.label = text("QUINTET_HOST").map(String::from);
        if options
            .label
            .as_ref()
            .is_some_and(|label| label.contains(' '))
        {
            return Err(wrong("QUINTET_HOST", "a name without spaces"));
        }
        options.folder = text("QUINTET_SHM_DIR").map(PathBuf::from);
        Ok(options)
    }
}

/// This process's rank, connected to all others.
#[derive(Debug)]
pub struct Process {
    seat: Seat,
    place: Place,
    options: Options,
    /// The address at which others reach this rank.
    host: String,
    /// Rank 0 keeps what others may still ask.
    server: Option<StoreServer>,
    folder: Option<Folder>,
}

impl Process {
    /// Meets the others and connects to them.
    ///
    /// # Errors
    /// Those of [`Join::over`].
    pub fn join(place: Place, options: Options) -> Result<Self> {
        let until = Instant::now() + options.timeout;
        let mut found = Found::default();
        let mut host = options.host.clone();
        match &place.meeting {
            // MPI has brought them together.
            _ if options.kind == Kind::Mpi => {}
            Meeting::Nowhere => {}
            Meeting::Folder(key) => {
                // What the user named is the user's; what was made up here goes again.
                let named = key
                    .as_ref()
                    .filter(|_| place.family == crate::environment::Family::Ours);
                let path = match named {
                    Some(path) => PathBuf::from(path),
                    None => made_up(key.as_deref())?,
                };
                found.store = Some(std::boxed::Box::new(FileStore::new(&path)?));
                // Only made where it is to go: dropping one removes it.
                found.folder = (named.is_none() && place.rank == 0).then(|| Folder(path));
            }
            Meeting::Store { host: name, port } => {
                let (run, secret) = (&place.run, &options.secret);
                let store = TcpStore::connect(name, *port..=*port, run, secret, options.timeout)?;
                found.store = Some(std::boxed::Box::new(store));
            }
            Meeting::Host { host: name, ports } => {
                let (run, secret) = (&place.run, &options.secret);
                let mut reached = (name.clone(), ports.clone());
                if place.rank == 0 {
                    let server = StoreServer::start(ports.clone(), name, run, secret)?;
                    reached = (loopback(name), server.port()..=server.port());
                    found.server = Some(server);
                    host.get_or_insert_with(|| name.clone());
                }
                let (name, ports) = reached;
                let store = TcpStore::connect(&name, ports, run, secret, options.timeout)?;
                found.store = Some(std::boxed::Box::new(store));
            }
        }
        Self::seated(place, options, found, host, (0, until))
    }

    fn seated(
        place: Place,
        options: Options,
        found: Found,
        host: Option<String>,
        (generation, until): (u32, Instant),
    ) -> Result<Self> {
        let of_store = || found.store.as_ref().and_then(|store| store.host());
        let host = host
            .or_else(of_store)
            .unwrap_or_else(|| String::from("127.0.0.1"));
        let join = Join {
            generation,
            kind: options.kind,
            host: Some(host.clone()),
            ports: options.ports.clone(),
            secret: options.secret.clone(),
            timeout: until.saturating_duration_since(Instant::now()),
            payload_crc: options.payload_crc,
            label: options.label.clone(),
            folder: options.folder.clone(),
            single_copy: options.single_copy,
            ..Join::new(place.rank, place.world, &place.run)
        };
        let seat = match &found.store {
            Some(store) => join.over(&**store)?,
            None if place.world == 1 => join.alone()?,
            None if join.kind == Kind::Mpi => join.by_mpi()?,
            None => {
                return Err(Error::Environment(format!(
                    "a world of {} must meet somewhere",
                    place.world
                )));
            }
        };
        Ok(Self {
            seat,
            place,
            options,
            host,
            server: found.server,
            folder: found.folder,
        })
    }

    /// My rank.
    #[must_use]
    pub fn rank(&self) -> usize {
        self.place.rank
    }

    /// Ranks of the run.
    #[must_use]
    pub fn world(&self) -> usize {
        self.place.world
    }

    /// What the launcher said.
    #[must_use]
    pub fn place(&self) -> &Place {
        &self.place
    }

    /// The connections.
    #[must_use]
    pub fn seat(&self) -> &Seat {
        &self.seat
    }

    /// A communicator of all ranks.
    ///
    /// # Errors
    /// Those of [`Seat::communicator`].
    pub fn communicator(&self) -> Result<Communicator<Sockets>> {
        self.seat.communicator()
    }

    /// Says how this rank ended; see [`Seat::finish`].
    pub fn finish(self, outcome: Result<(), &dyn core::fmt::Display>) {
        let Self {
            seat,
            server,
            folder,
            ..
        } = self;
        seat.finish(outcome);
        drop((server, folder));
    }

    /// Runs `body` as this rank and makes its end this rank's end; see [`Seat::run`].
    ///
    /// # Errors
    /// The body's, and [`Error::Panicked`].
    pub fn run<R, E, F>(self, body: F) -> Result<R, E>
    where
        E: From<Error> + ToString,
        F: FnOnce(Communicator<Sockets>) -> Result<R, E>,
    {
        let Self {
            seat,
            server,
            folder,
            ..
        } = self;
        let outcome = seat.run(body);
        drop((server, folder));
        outcome
    }

    /// The run goes on without the ranks that were lost: the next generation, in which the others
    /// are numbered anew in their old order. Every survivor calls it, after all its communicators
    /// of this generation have failed.
    ///
    /// The lowest survivor serves a store and tells the others over the old control connections.
    ///
    /// # Errors
    /// [`Error::Rendezvous`] where the survivors do not meet within the timeout of the run.
    pub fn rebuild(self) -> Result<Self> {
        if self.options.kind == Kind::Mpi {
            return Err(Error::Rendezvous(String::from(
                "MPI cannot go on without the ranks that were lost; start the run again, or let it speak over tcp",
            )));
        }
        let until = Instant::now() + self.options.timeout;
        let generation = self.seat.generation() + 1;
        let (members, found, host) = if self.leads() {
            self.lead(generation)?
        } else {
            self.follow(generation, until)?
        };
        let rank = members.iter().position(|&rank| rank == self.place.rank);
        let rank = rank.ok_or_else(|| {
            Error::Rendezvous(format!(
                "rank {} is thought lost by the others and has no place in generation {generation}",
                self.place.rank
            ))
        })?;
        let place = Place {
            rank,
            world: members.len(),
            local_rank: None,
            local_world: None,
            ..self.place.clone()
        };
        let next = Self::seated(
            place,
            self.options.clone(),
            found,
            Some(host),
            (generation, until),
        )?;
        self.finish(Ok(()));
        Ok(next)
    }

    fn survivors(&self) -> Vec<usize> {
        let gone = self.seat.gone();
        (0..self.place.world)
            .filter(|rank| !gone.contains(rank))
            .collect()
    }

    fn leads(&self) -> bool {
        self.survivors().first() == Some(&self.place.rank)
    }

    fn lead(&self, generation: u32) -> Result<(Vec<usize>, Found, String)> {
        let members = self.survivors();
        let (run, secret) = (&self.place.run, &self.options.secret);
        let server = StoreServer::start(self.options.ports.clone(), &self.host, run, secret)?;
        let port = server.port();
        self.seat
            .tell_meeting(generation, &self.host, port, &members);
        let near = loopback(&self.host);
        let store = TcpStore::connect(&near, port..=port, run, secret, self.options.timeout)?;
        let found = Found {
            store: Some(std::boxed::Box::new(store)),
            server: Some(server),
            folder: None,
        };
        Ok((members, found, self.host.clone()))
    }

    fn follow(&self, generation: u32, until: Instant) -> Result<(Vec<usize>, Found, String)> {
        loop {
            if let Some((host, port, members)) = self
                .seat
                .await_meeting(generation, Duration::from_millis(50))
            {
                let (run, secret) = (&self.place.run, &self.options.secret);
                let left = until.saturating_duration_since(Instant::now());
                let store = TcpStore::connect(&host, port..=port, run, secret, left)?;
                let found = Found {
                    store: Some(std::boxed::Box::new(store)),
                    ..Found::default()
                };
                return Ok((members, found, self.host.clone()));
            }
            if self.leads() {
                // Whoever was to lead is lost too.
                return self.lead(generation);
            }
            if Instant::now() >= until {
                return Err(Error::Rendezvous(format!(
                    "rank {} waited {:?} for rank {} to rebuild the run",
                    self.place.rank,
                    self.options.timeout,
                    self.survivors().first().copied().unwrap_or(0)
                )));
            }
        }
    }
}

#[derive(Default)]
struct Found {
    store: Option<std::boxed::Box<dyn Store>>,
    server: Option<StoreServer>,
    folder: Option<Folder>,
}

/// A folder that goes with the value.
#[derive(Debug)]
struct Folder(PathBuf);

impl Drop for Folder {
    fn drop(&mut self) {
        // What cannot be removed is a few bytes in the folder for temporary files.
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// A server bound to a loopback address is reached there, any other on the usual one.
fn loopback(host: &str) -> String {
    let inner = host.trim_matches(['[', ']']);
    match inner.parse::<std::net::IpAddr>() {
        Ok(ip) if ip.is_loopback() => inner.to_string(),
        _ => String::from("127.0.0.1"),
    }
}

/// A folder that all processes of this user under one launcher find, and nobody else may use.
fn made_up(key: Option<&str>) -> Result<PathBuf> {
    let uid = rustix::process::geteuid().as_raw();
    let key = match key {
        Some(key) => key
            .chars()
            .map(|c| if c.is_ascii_alphanumeric() { c } else { '-' })
            .collect(),
        None => format!(
            "parent-{}",
            rustix::process::getppid().map_or(0, |pid| pid.as_raw_nonzero().get())
        ),
    };
    let path = std::env::temp_dir().join(format!("quintet-{uid}-{key}"));
    let failed = |reason: String| Error::System {
        what: "make a folder to meet in",
        reason: format!("{}: {reason}", path.display()),
    };
    let made = fs::DirBuilder::new()
        .mode(0o700)
        .recursive(true)
        .create(&path);
    made.map_err(|e| failed(e.to_string()))?;
    let found = fs::symlink_metadata(&path).map_err(|e| failed(e.to_string()))?;
    if !found.is_dir() || found.uid() != uid || found.mode() & 0o077 != 0 {
        return Err(failed(String::from(
            "it exists and is not this user's alone",
        )));
    }
    Ok(path)
}
