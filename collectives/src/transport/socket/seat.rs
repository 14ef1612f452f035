//! A rank's place in a run, and what its end means for the others.

use std::{
    format,
    net::Shutdown,
    string::{String, ToString},
    sync::Arc,
    thread::{self, JoinHandle},
    time::{Duration, Instant},
    vec::Vec,
};

use rustix::event::{PollFd, PollFlags};

use super::{
    Sockets,
    control::{Note, serve},
    frame::{Frame, Kind},
    lock,
    mesh::{Mesh, Peer},
    poll,
};
use crate::{Communicator, Error, Result, transport::Tag};

/// Payload bytes that a rank has sent, by the way they went, and what it has read of others'.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Moved {
    /// Over tcp.
    pub tcp: u64,
    /// Over unix sockets.
    pub unix: u64,
    /// By shared memory, of collectives as many as the plan sends.
    pub shm: u64,
    /// By MPI.
    pub mpi: u64,
    /// Bytes that this rank has read out of the others' memory where they lay, instead of being handed them.
    pub read: u64,
}

/// A rank's place in a run. Dropped without [`Seat::finish`] it counts as finished well, or, while
/// its thread panics, as failed.
#[derive(Debug)]
pub struct Seat {
    mesh: Arc<Mesh>,
    service: Option<JoinHandle<()>>,
}

/// How long the end of a rank waits for a peer to take in what was sent to it.
const LINGER: Duration = Duration::from_secs(30);

/// The same where something in the run has failed.
const BRIEFLY: Duration = Duration::from_millis(300);

/// Between two looks at what only others can send.
const LOOK: Duration = Duration::from_millis(5);

impl Seat {
    pub(super) fn new(mesh: Mesh) -> Result<Self> {
        let mesh = Arc::new(mesh);
        let served = mesh.clone();
        let thread = thread::Builder::new().name(String::from("control"));
        let service = thread
            .spawn(move || serve(&served))
            .map_err(|e| Error::System {
                what: "start a thread",
                reason: e.to_string(),
            })?;
        Ok(Self {
            mesh,
            service: Some(service),
        })
    }

    /// The global rank.
    #[must_use]
    pub fn rank(&self) -> usize {
        self.mesh.rank
    }

    /// Ranks of the run.
    #[must_use]
    pub fn world(&self) -> usize {
        self.mesh.world
    }

    /// The generation of the run.
    #[must_use]
    pub fn generation(&self) -> u32 {
        self.mesh.generation
    }

    /// Payload bytes sent so far.
    #[must_use]
    pub fn moved(&self) -> Moved {
        let [tcp, unix, shm, mpi] = self.mesh.moved();
        Moved {
            tcp,
            unix,
            shm,
            mpi,
            read: self.mesh.read(),
        }
    }

    /// Ranks that are known to have died or failed, in order.
    #[must_use]
    pub fn lost(&self) -> Vec<usize> {
        self.mesh.lost()
    }

    /// Ranks that have ended in whatever way, in order.
    #[must_use]
    pub fn gone(&self) -> Vec<usize> {
        self.mesh.gone()
    }

    /// Tells the others where those who are left meet for the next generation.
    pub(crate) fn tell_meeting(&self, generation: u32, host: &str, port: u16, members: &[usize]) {
        self.mesh.plane.tell_all(&Note::Meet {
            generation,
            host: host.to_string(),
            port,
            members: members.to_vec(),
        });
    }

    /// Where to meet for this generation, as soon as somebody says it.
    pub(crate) fn await_meeting(
        &self,
        generation: u32,
        timeout: Duration,
    ) -> Option<(String, u16, Vec<usize>)> {
        self.mesh.await_meeting(generation, timeout)
    }

    /// An endpoint of the group of all ranks, named `world`. The k-th call of one rank belongs to
    /// the k-th call of the others.
    ///
    /// # Errors
    /// [`Error::System`] where the process has no descriptor left.
    pub fn endpoint(&self) -> Result<Sockets> {
        let ranks = (0..self.mesh.world).collect();
        let group = self.mesh.group("world", ranks, self.mesh.rank)?;
        Sockets::new(self.mesh.clone(), group)
    }

    /// [`Seat::endpoint`] as a communicator.
    ///
    /// # Errors
    /// Those of [`Seat::endpoint`].
    pub fn communicator(&self) -> Result<Communicator<Sockets>> {
        self.endpoint().map(Communicator::new)
    }

    /// Makes every operation of every group on every rank fail with [`Error::Aborted`].
    pub fn abort(&self) {
        self.mesh.abort();
    }

    /// Says how this rank ended. After a failure every wait on it ends with the run's first cause;
    /// after a good end what it sent can still be received, and what it did not send is
    /// [`Error::PeerLost`]. Waits for what is still to be sent, half a minute at most.
    pub fn finish(mut self, outcome: Result<(), &dyn core::fmt::Display>) {
        let failure = outcome.err().map(|failure| self.failed(failure));
        self.end(failure);
    }

    /// Runs `body` as this rank and makes its end this rank's end.
    ///
    /// # Errors
    /// The body's, and [`Error::Panicked`].
    pub fn run<R, E, F>(mut self, body: F) -> Result<R, E>
    where
        E: From<Error> + ToString,
        F: FnOnce(Communicator<Sockets>) -> Result<R, E>,
    {
        let comm = self.communicator()?;
        // The closure is not looked at again after a panic, so nothing half-done is seen.
        let outcome = std::panic::catch_unwind(core::panic::AssertUnwindSafe(|| body(comm)));
        let outcome = outcome.unwrap_or_else(|panic| {
            Err(E::from(Error::Panicked {
                rank: self.rank(),
                message: crate::transport::local::panic_message(&*panic),
            }))
        });
        let failure = outcome.as_ref().err().map(ToString::to_string);
        let failure = failure.map(|reason| self.failed(&reason));
        self.end(failure);
        outcome
    }

    fn failed(&self, failure: &dyn core::fmt::Display) -> Error {
        Error::PeerLost {
            rank: self.mesh.rank,
            reason: failure.to_string(),
        }
    }

    fn end(&mut self, failure: Option<Error>) {
        let Some(service) = self.service.take() else {
            return;
        };
        if self.mesh.birth.elsewhere() {
            // A fork has neither a say in how its parent's rank ends, nor its threads.
            return;
        }
        // A failure is told first, so that the threads joined next cannot wait for it; a good end
        // is told last, when they have sent all they had.
        let failed = failure.is_some();
        if failed {
            self.mesh.leave(failure);
        }
        for worker in core::mem::take(&mut *lock(&self.mesh.adopted)) {
            // What a worker has to say went to its operations.
            let _ = worker.join();
        }
        if !failed {
            self.say_bye();
            self.mesh.plane.tell_all(&Note::Leave(None));
        }
        self.mesh.plane.close();
        // It ends within its own deadline and has nothing to say.
        let _ = service.join();
        self.shut();
    }

    /// The last frame of each direction, behind all that was sent.
    fn say_bye(&self) {
        let mesh = &self.mesh;
        let bye = Frame {
            kind: Kind::Bye,
            dtype: crate::DType::U8,
            generation: mesh.generation,
            from: mesh.rank as u32,
            group: 0,
            tag: Tag::Collective(0),
            number: 0,
            len: 0,
            payload_crc: None,
            call: None,
        };
        for rank in 0..mesh.world {
            mesh.push(rank, bye, Vec::new());
        }
        let until = Instant::now() + self.patience();
        if let Some(mpi) = mesh.mpi() {
            return mpi.drain(mesh, until);
        }
        loop {
            let unsent: Vec<usize> = (0..mesh.world)
                .filter(|&rank| {
                    mesh.peer(rank)
                        .is_some_and(|peer| !lock(&peer.out).is_empty())
                })
                .collect();
            let left = until.saturating_duration_since(Instant::now());
            if unsent.is_empty() || left.is_zero() {
                return;
            }
            // Another thread may still be writing what it has lent.
            let peers = unsent.iter().filter_map(|&rank| mesh.peer(rank));
            let mut fds: Vec<PollFd<'_>> = peers
                .filter(|peer| !lock(&peer.out).is_lent())
                .map(|peer| PollFd::new(&peer.data, PollFlags::OUT))
                .collect();
            poll(&mut fds, left.min(LOOK));
            // Nobody else may be reading, here or there.
            for &rank in &unsent {
                mesh.pull(rank, None);
            }
            unsent.into_iter().for_each(|rank| mesh.flush(rank));
        }
    }

    /// After a failure nobody may be reading.
    fn patience(&self) -> Duration {
        if self.mesh.failing() { BRIEFLY } else { LINGER }
    }

    /// Closes this direction of each connection. What comes is read until the peer has all that was sent: to close on
    /// unread bytes, or to be closed when more come, would take back what is under way to it.
    fn shut(&self) {
        let until = Instant::now() + self.patience();
        if let Some(mpi) = self.mesh.mpi() {
            return mpi.close(&self.mesh, until);
        }
        let peers = || (0..self.mesh.world).filter_map(|rank| Some((rank, self.mesh.peer(rank)?)));
        peers().for_each(|(_, peer)| peer.data.shutdown(Shutdown::Write));
        loop {
            for (rank, peer) in peers() {
                while self.mesh.pull(rank, None) && !lock(&peer.inn).over {}
            }
            let behind = |peer: &Peer| peer.data.is_behind() && !lock(&peer.inn).over;
            if !peers().any(|(_, peer)| behind(peer)) || Instant::now() >= until {
                return;
            }
            thread::sleep(LOOK);
        }
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        let failure = thread::panicking().then(|| self.failed(&"its thread panicked"));
        self.end(failure);
    }
}

impl core::fmt::Display for Seat {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        let place = format!("rank {} of {}", self.mesh.rank, self.mesh.world);
        f.pad(&place)
    }
}
