//! One rank's end of a group whose collectives on device memory NCCL performs.

use std::{
    collections::BTreeMap,
    format,
    string::{String, ToString},
    sync::Arc,
    time::{Duration, Instant},
    vec::Vec,
};

use super::{
    calls::{Part, Place},
    folds,
    library::{Fault, Library},
    line::{Comm, Failed, LOOK, Line, Shared},
};
use crate::{
    DType, Error, Order, ReduceOp, Result,
    communicator::far::RESERVED,
    plan::CollectiveShape as Shape,
    store::Store,
    transport::{
        Transport, Wait,
        device::{Device, Job, Lane, Parcel, Said},
    },
};

/// Ids of the group's own communicator, and of those of two ranks.
const TAGS: [u64; 2] = [RESERVED | 1, RESERVED | 2];

/// A transport that carries everything but collectives and messages on device memory, and NCCL for those.
/// Its calls are announced and compared, its losses told, its waits ended as those of the transport it is made of.
///
/// Communicators are made when they are first used: one for the collectives of the group, and one for each pair
/// of ranks and direction that messages go. It can be sent to another thread but not shared:
///
/// ```compile_fail
/// fn shared<T: Sync>() {}
/// shared::<quintet_collectives::nccl::Nccl<quintet_collectives::Local>>();
/// ```
pub struct Nccl<T: Transport> {
    control: T,
    shared: Arc<Shared>,
    main: Option<Line>,
    job: Option<(Job, bool)>,
    /// By peer, and whether it is sent to.
    pairs: BTreeMap<(usize, bool), Pair>,
    said: BTreeMap<usize, Vec<Said>>,
    dead: Option<Error>,
    /// What NCCL says of another rank, and since when nobody has said why.
    doubt: Option<(Error, Instant)>,
    /// Since when it is waited for the device without anything being over.
    waiting: Option<Instant>,
}

/// How long another rank's cause may take to come over the transport.
const DOUBT: Duration = Duration::from_millis(700);

/// `ncclRemoteError`.
const REMOTE: i32 = 6;

/// The way of messages to or from one rank.
struct Pair {
    line: Line,
    parcel: Option<(Parcel, bool)>,
}

impl<T: Transport> core::fmt::Debug for Nccl<T> {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        let (rank, world) = (self.control.rank(), self.control.world());
        write!(f, "rank {rank} of {world} over {:?}", self.shared.library)
    }
}

impl<T: Transport> Nccl<T> {
    /// This rank's end of the group that `control` is an endpoint of. Nothing is sent. NCCL's ids go over
    /// `control`.
    pub fn new(control: T, library: Arc<Library>) -> Self {
        Self::made(control, Arc::new(Shared::new(library, None)))
    }

    /// The same, its ids left in `store`, under keys that begin with `prefix`: what keeps one run and generation
    /// from another. All ranks must do so.
    pub fn with_store(
        control: T,
        library: Arc<Library>,
        store: Arc<dyn Store>,
        prefix: &str,
    ) -> Self {
        let store = (store, String::from(prefix));
        Self::made(control, Arc::new(Shared::new(library, Some(store))))
    }

    fn made(control: T, shared: Arc<Shared>) -> Self {
        Self {
            control,
            shared,
            main: None,
            job: None,
            pairs: BTreeMap::new(),
            said: BTreeMap::new(),
            dead: None,
            doubt: None,
            waiting: None,
        }
    }

    /// How long it may sleep before it asks the device again: an eighth of what it has waited, which is then all
    /// that asking late can cost, while who waits long leaves the processor to others.
    fn nap(&mut self) -> Duration {
        let waited = self.waiting.get_or_insert_with(Instant::now).elapsed();
        (waited / 8).clamp(LOOK, LONGEST)
    }

    /// The library.
    #[must_use]
    pub fn library(&self) -> &Arc<Library> {
        &self.shared.library
    }

    fn error(&self, failed: Failed) -> Error {
        let fault = match failed {
            Failed::Other(error) => return error,
            Failed::Library(fault) => fault,
        };
        let Fault {
            call,
            code,
            said,
            last,
        } = fault;
        if last.contains("driver version is insufficient") {
            return Error::Library(format!(
                "the NVIDIA driver is older than {:?} needs ({last}); update it, or take a library for an older CUDA",
                self.shared.library
            ));
        }
        Error::Nccl {
            group: self.control.name().to_string(),
            rank: self.control.global(self.control.rank()),
            call,
            code,
            said,
            last: if last.is_empty() {
                last
            } else {
                format!(": {last}")
            },
        }
    }

    /// What came of a step. A rank that gives up says why before it aborts, but NCCL may be the faster: what it
    /// says of others is believed once nobody has said more.
    fn judged(&mut self, outcome: Result<bool, Failed>) -> Result<bool> {
        let failed = match outcome {
            Ok(over) => return Ok(over),
            Err(failed) => failed,
        };
        let error = self.error(failed);
        self.control.healthy()?;
        if !matches!(error, Error::Nccl { code: REMOTE, .. }) {
            return Err(error);
        }
        self.doubt = Some((error, Instant::now()));
        Ok(false)
    }

    /// Whether what NCCL has said of others is still in doubt; not for ever.
    fn doubts(&mut self) -> Result<bool> {
        match &self.doubt {
            Some((error, since)) if since.elapsed() >= DOUBT => Err(error.clone()),
            doubt => Ok(doubt.is_some()),
        }
    }

    fn alive(&self) -> Result<()> {
        self.dead.clone().map_or(Ok(()), Err)
    }

    fn step(&mut self) -> Result<bool, Failed> {
        let Some((job, issued)) = &mut self.job else {
            return Ok(true);
        };
        let line = self.main.get_or_insert_with(|| {
            let (world, me) = (self.control.world(), self.control.rank());
            let name = self.control.name().to_string();
            Line::new(&self.shared, (0..world).collect(), me, TAGS[0], name)
        });
        if !*issued {
            if !line.join(&mut self.control, &job.lane)? {
                return Ok(false);
            }
            let Some(comm) = line.ready() else {
                return Ok(false);
            };
            job.lane.enter()?;
            job.lane.begin()?;
            let at = Place::new(comm, &self.shared.library, job.lane.handle());
            at.collective(job, self.control.rank())?;
            *issued = true;
        }
        let settled = line.ready().map_or(Ok(true), Comm::settled)?;
        if !settled || !idle(&self.shared.library, &*job.lane)? {
            return Ok(false);
        }
        self.job = None;
        Ok(true)
    }

    fn step_message(&mut self, peer: usize, out: bool) -> Result<bool, Failed> {
        let Some(Pair { line, parcel }) = self.pairs.get_mut(&(peer, out)) else {
            return Ok(true);
        };
        let Some((Parcel { span, lane, .. }, issued)) = parcel else {
            return Ok(true);
        };
        if !*issued {
            if !line.join(&mut self.control, lane)? {
                return Ok(false);
            }
            let Some(comm) = line.ready() else {
                return Ok(false);
            };
            lane.enter()?;
            lane.begin()?;
            // Of the two, 0 sends and 1 receives.
            let at = Place::new(comm, &self.shared.library, lane.handle());
            let part = match out {
                true => Part::Send(*span, 1),
                false => Part::Recv(*span, 0),
            };
            at.group(&[part])?;
            *issued = true;
        }
        let settled = line.ready().map_or(Ok(true), Comm::settled)?;
        if !settled || !idle(&self.shared.library, &**lane)? {
            return Ok(false);
        }
        *parcel = None;
        Ok(true)
    }
}

impl<T: Transport> Device for Nccl<T> {
    fn begin(&mut self, job: Job) -> Result<()> {
        self.alive()?;
        self.waiting = None;
        // Of no elements at all there is nothing to do, which every rank knows; but for all_to_all_v, whose
        // counts are other ranks' own.
        let something = job.shape.len(self.control.world()) > 0;
        if something || matches!(job.shape, Shape::AllToAllV { .. }) {
            self.job = Some((job, false));
        }
        Ok(())
    }

    fn poll(&mut self) -> Result<bool> {
        self.alive()?;
        // Whoever has slept longer than it takes to look so often looks once.
        let glances = if self.nap() > LOOK { 1 } else { GLANCES };
        for _ in 0..glances {
            if self.doubts()? {
                return Ok(false);
            }
            let outcome = self.step();
            if self.judged(outcome)? {
                self.waiting = None;
                return Ok(true);
            }
            std::thread::yield_now();
        }
        Ok(false)
    }

    fn begin_message(&mut self, parcel: Parcel) -> Result<()> {
        self.alive()?;
        self.waiting = None;
        let (me, peer, out) = (self.control.rank(), parcel.peer, parcel.out);
        let shared = &self.shared;
        let pair = self.pairs.entry((peer, out)).or_insert_with(|| {
            let (members, place) = match out {
                true => ([me, peer], 0),
                false => ([peer, me], 1),
            };
            let name = format!("{}/{}to{}", self.control.name(), members[0], members[1]);
            let line = Line::new(shared, members.to_vec(), place, TAGS[1], name);
            Pair { line, parcel: None }
        });
        pair.parcel = Some((parcel, false));
        Ok(())
    }

    fn poll_message(&mut self, peer: usize, out: bool) -> Result<bool> {
        self.alive()?;
        if self.doubts()? {
            return Ok(false);
        }
        let outcome = self.step_message(peer, out);
        let over = self.judged(outcome)?;
        if over {
            self.waiting = None;
        }
        Ok(over)
    }

    fn has_message(&self, peer: usize, out: bool) -> bool {
        self.pairs
            .get(&(peer, out))
            .is_some_and(|pair| pair.parcel.is_some())
    }

    fn abort(&mut self, cause: &Error) {
        self.dead.get_or_insert_with(|| cause.clone());
        let pairs = self.pairs.values_mut().map(|pair| &mut pair.line);
        self.main.iter_mut().chain(pairs).for_each(Line::abort);
        self.job = None;
        self.pairs.clear();
    }

    fn said(&mut self, peer: usize) -> &mut Vec<Said> {
        self.said.entry(peer).or_default()
    }
}

/// Whether what was put on a lane is over. A library on host memory has streams of its own.
fn idle(library: &Library, lane: &dyn Lane) -> Result<bool> {
    Ok(library.waiting(lane.handle()) == 0 && lane.idle()?)
}

/// How often a collective looks again before it lets its thread sleep.
const GLANCES: u32 = 16;

/// The longest sleep between two looks at the device.
const LONGEST: Duration = Duration::from_millis(2);

impl<T: Transport> Transport for Nccl<T> {
    crate::forward_transport!(control: group, calls, messages);

    fn device(&mut self) -> Option<&mut dyn Device> {
        Some(self)
    }

    fn reaches_device(&self) -> bool {
        true
    }

    fn device_refuses(
        &self,
        shape: &Shape,
        dtype: DType,
        redop: ReduceOp,
        order: Order,
    ) -> Option<String> {
        let operation = shape.operation();
        let asked = order == Order::Any || !operation.folds();
        (!asked && !folds::in_rank_order(dtype, redop, self.world())).then(|| {
            format!(
                "order rank: NCCL chooses how it folds {redop} of {dtype}, and may choose otherwise on other machines; ask for order any, or fold on the host"
            )
        })
    }

    fn park(&mut self, wait: &Wait, timeout: Duration) {
        // What the device does wakes nobody.
        let flying = self.job.is_some() || self.pairs.values().any(|pair| pair.parcel.is_some());
        let still = wait.recv.is_empty() && wait.send.is_empty() && wait.confirm.is_none();
        let timeout = if flying || still {
            timeout.min(self.nap())
        } else {
            timeout
        };
        if !wait.recv.is_empty() {
            return self.control.park(wait, timeout);
        }
        // An id is a message like others, which a transport looks for where it is waited for.
        let lines = self.pairs.values().map(|pair| &pair.line);
        let ids = self.main.iter().chain(lines).filter_map(Line::awaited);
        let wait = Wait {
            recv: ids.collect(),
            all: false,
            ..wait.clone()
        };
        self.control.park(&wait, timeout);
    }

    fn subgroup(&self, members: &[usize], name: &str) -> Result<Self> {
        let control = self.control.subgroup(members, name)?;
        Ok(Self::made(control, self.shared.clone()))
    }
}

impl<T: Transport> Drop for Nccl<T> {
    fn drop(&mut self) {
        // In good order only where all goes well: else others may never end their part.
        if let Err(cause) = self.control.healthy() {
            self.abort(&cause);
        } else if self.job.is_some() || self.pairs.values().any(|pair| pair.parcel.is_some()) {
            self.abort(&Error::Gate(String::from("its communicator was dropped")));
        }
    }
}
