//! A group's ranks speaking with each other (`std`): one method per operation.
//!
//! ```text
//!  all_reduce(&mut x) ----------------> plan -> performer -> transport     on this thread
//!  start_all_reduce(buf, after) -> Pending                                 on the worker
//!         program order:  [ gate | all_reduce ] [ gate | all_gather ] ...     collectives in order
//!                         [ gate | send to 3 ]  [ gate | recv from 1 ] ...    messages beside them
//! ```
//!
//! Every rank of a group calls the same collectives in the same order; the transport compares the
//! calls, and a difference is [`Error::Mismatch`] on all of them. No collective returns on any rank
//! before every rank has called it. Roots and peers are places in the group; errors name global ranks.
//!
//! A blocking call goes after what was started before it: while started operations are under way it
//! is itself started, on a copy, and waited for.

use std::{
    collections::{BTreeMap, VecDeque},
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
    vec::Vec,
};

use crate::{
    DType, Element, Error, Order, ProcessGroup, ReduceOp, Result,
    cost::Model,
    performer::{View, fits},
    plan::CollectiveShape as Shape,
    recorder::Recorder,
    transport::{Site, Transport, buffer::Buffer},
};

mod act;
mod by;
mod bytes;
mod calls;
pub(crate) mod far;
mod known;
mod messages;
mod observer;
mod parcel;
mod started;
pub(crate) mod stats;
mod worker;

pub use observer::{Made, Observed, Observer};
pub use stats::Stats;

use act::{Owned, Pair, Run};
use known::Known;
use worker::Core;

/// A group of ranks and this rank's endpoint in it.
#[derive(Debug)]
pub struct Communicator<T: Transport + Send + 'static> {
    core: Arc<Core<T>>,
    order: Order,
    deadline: Duration,
    model: Arc<Model>,
    /// Whether the transport reaches a device.
    device: bool,
    /// No other communicator of this process has it.
    number: u64,
    /// Plans of the last calls: choosing one costs more than a short call.
    plans: Mutex<VecDeque<Arc<Known>>>,
}

/// The next communicator's number.
static NUMBER: AtomicU64 = AtomicU64::new(0);

/// Plans kept.
const PLANS: usize = 16;

/// How long a wait may take unless [`Communicator::with_deadline`] says otherwise.
pub const DEFAULT_DEADLINE: Duration = Duration::from_secs(300);

impl<T: Transport + Send + 'static> Communicator<T> {
    /// A communicator over an endpoint, with [`Order::Rank`] and [`DEFAULT_DEADLINE`].
    #[must_use]
    pub fn new(transport: T) -> Self {
        Self {
            order: Order::default(),
            deadline: DEFAULT_DEADLINE,
            model: Arc::default(),
            device: transport.reaches_device(),
            number: NUMBER.fetch_add(1, Ordering::Relaxed),
            plans: Mutex::default(),
            core: Core::new(transport),
        }
    }

    /// The same with another fold order; all ranks must agree.
    #[must_use]
    pub fn with_order(mut self, order: Order) -> Self {
        self.order = order;
        self.plans = Mutex::default();
        self
    }

    /// The same with another deadline for each wait.
    #[must_use]
    pub fn with_deadline(mut self, deadline: Duration) -> Self {
        self.deadline = deadline;
        self
    }

    /// The same with another model for choosing plans; all ranks must agree. Sub-groups take the
    /// part of it that is theirs.
    ///
    /// ```
    /// use quintet_collectives::{Order, ReduceOp, World, cost::Model};
    /// let model = Model { overrides: "all_reduce:ring".parse()?, ..Model::default() };
    /// World::run(3, |comm| {
    ///     let comm = comm.with_order(Order::Any).with_model(model.clone());
    ///     comm.all_reduce(&mut [1.0f32; 10], ReduceOp::Sum)?;
    ///     assert_eq!(comm.stats().messages, 2 * 2);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), quintet_collectives::Error>(())
    /// ```
    #[must_use]
    pub fn with_model(mut self, model: impl Into<Arc<Model>>) -> Self {
        self.model = model.into();
        self.plans = Mutex::default();
        self
    }

    /// The same, whose calls and those of its later sub-groups are recorded.
    ///
    /// ```
    /// use std::sync::Arc;
    /// use quintet_collectives::{Recorder, ReduceOp, World, recorder};
    /// let rings = World::run(2, |comm| {
    ///     let recorder = Arc::new(Recorder::new(comm.rank(), recorder::SLOTS));
    ///     let comm = comm.with_recorder(&recorder);
    ///     comm.all_reduce(&mut [1.0f32], ReduceOp::Sum)?;
    ///     Ok(recorder.ring())
    /// })?;
    /// assert_eq!(rings[1].entries[0].op, "all_reduce");
    /// assert_eq!(recorder::merge(&rings).blames, []);
    /// # Ok::<(), quintet_collectives::Error>(())
    /// ```
    #[must_use]
    pub fn with_recorder(self, recorder: &Arc<Recorder>) -> Self {
        self.with_observer(recorder.clone())
    }

    /// The model that chooses plans.
    #[must_use]
    pub fn model(&self) -> &Model {
        &self.model
    }

    /// The same, telling `observer` too of each operation. Sub-groups made from it tell the same ones.
    ///
    /// ```
    /// use quintet_collectives::{Observed, Observer, ReduceOp, World};
    /// use std::sync::{Arc, Mutex};
    /// #[derive(Default)]
    /// struct Seen(Mutex<Vec<(&'static str, u64)>>);
    /// impl Observer for Seen {
    ///     fn over(&self, op: &Observed<'_>) {
    ///         self.0.lock().unwrap().push((op.op, op.bytes));
    ///     }
    /// }
    /// World::run(2, |comm| {
    ///     let seen = Arc::new(Seen::default());
    ///     comm.with_observer(seen.clone()).all_reduce(&mut [1.0f32; 10], ReduceOp::Sum)?;
    ///     assert_eq!(*seen.0.lock().unwrap(), [("all_reduce", 40)]);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), quintet_collectives::Error>(())
    /// ```
    #[must_use]
    pub fn with_observer(self, observer: Arc<dyn Observer>) -> Self {
        self.core.observers.add(observer);
        self
    }

    /// What a part of this group inherits.
    fn heir<U: Transport + Send + 'static>(
        &self,
        transport: U,
        members: &[usize],
    ) -> Communicator<U> {
        let model = match self.model.topology {
            Some(_) => Arc::new(self.model.among(members)),
            None => Arc::clone(&self.model),
        };
        let heir = Communicator::new(transport)
            .with_order(self.order)
            .with_deadline(self.deadline)
            .with_model(model);
        self.core
            .observers
            .iter()
            .fold(heir, |heir, observer| heir.with_observer(observer.clone()))
    }

    /// My place in the group.
    #[must_use]
    pub fn rank(&self) -> usize {
        self.core.group.rank()
    }

    /// Ranks in the group.
    #[must_use]
    pub fn world(&self) -> usize {
        self.core.group.world()
    }

    /// The group.
    #[must_use]
    pub fn group(&self) -> &ProcessGroup {
        &self.core.group
    }

    /// The group's name, as reports have it.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.core.name
    }

    /// A number that no other communicator of this process has.
    #[must_use]
    pub fn number(&self) -> u64 {
        self.number
    }

    /// The fold order.
    #[must_use]
    pub fn order(&self) -> Order {
        self.order
    }

    /// The deadline of each wait.
    #[must_use]
    pub fn deadline(&self) -> Duration {
        self.deadline
    }

    /// What this rank has sent in this group so far, and how long it waited.
    #[must_use]
    pub fn stats(&self) -> Stats {
        self.core.stats()
    }

    /// Payload bytes that this rank has sent in this group so far, by the global rank that got them.
    /// Their sum is [`Stats::bytes`].
    #[must_use]
    pub fn sent_to(&self) -> BTreeMap<usize, u64> {
        let sent = |(&to, &bytes): (&usize, &u64)| (self.core.group.ranks()[to], bytes);
        self.core
            .visit(|link| link.sent_to().iter().map(sent).collect())
    }

    /// Makes every operation of every group of this world fail with [`Error::Aborted`], now and
    /// later, on all ranks. A step that is dead in one group would hang in the next.
    pub fn abort(&self) {
        self.core.control.abort();
    }

    /// A buffer of `len` zeros of this rank, in memory that the ranks share where the transport has such:
    /// a collective on slices of such buffers, on all ranks, touches each byte once. Nothing is sent.
    ///
    /// ```
    /// use quintet_collectives::{ReduceOp, World};
    /// World::run(2, |comm| {
    ///     let mut x = comm.alloc::<f32>(1000)?;
    ///     x.fill(1.0);
    ///     comm.all_reduce(&mut x, ReduceOp::Sum)?;
    ///     assert_eq!(x[999], 2.0);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), quintet_collectives::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::System`] where there is no room for it.
    pub fn alloc<E: Element>(&self, len: usize) -> Result<Buffer<E>> {
        self.core.visit(|link| link.transport.allocate(len))
    }

    /// The communicator of some ranks of this one, with the same order and deadline.
    ///
    /// Nothing is sent: each member calls it with the same ranks and name, and the k-th call of
    /// one member with these belongs to the k-th of the others.
    ///
    /// # Errors
    /// [`Error::Layout`] where the group holds a rank that this communicator lacks.
    pub fn subgroup(&self, group: &ProcessGroup, name: &str) -> Result<Self> {
        let members = group
            .ranks()
            .iter()
            .map(|&global| {
                self.core.group.place(global).ok_or_else(|| {
                    Error::Layout(std::format!(
                        "rank {global} is not a member of group {}",
                        self.core.name
                    ))
                })
            })
            .collect::<Result<Vec<usize>>>()?;
        let transport = self
            .core
            .visit(|link| link.transport.subgroup(&members, name))?;
        Ok(self.heir(transport, &members))
    }

    /// The communicator of the same ranks over what `make` makes of another endpoint of theirs, with the same
    /// order and deadline: a transport that adds something to this one. Nothing is sent; the rules are those of
    /// [`Communicator::subgroup`].
    ///
    /// # Errors
    /// Those of [`Transport::subgroup`].
    pub fn over<U: Transport + Send + 'static>(
        &self,
        name: &str,
        make: impl FnOnce(T) -> U,
    ) -> Result<Communicator<U>> {
        let members: Vec<usize> = (0..self.world()).collect();
        let transport = self
            .core
            .visit(|link| link.transport.subgroup(&members, name))?;
        Ok(self.heir(make(transport), &members))
    }

    /// The communicators of all ranks that gave the same `color`, ordered by `key`, then rank.
    /// A collective: every rank calls it.
    ///
    /// # Errors
    /// Those of [`Communicator::all_gather`].
    #[track_caller]
    pub fn split(&self, color: i64, key: i64) -> Result<Self> {
        let mut pairs = std::vec![0i64; 2 * self.world()];
        self.all_gather(&[color, key], &mut pairs)?;
        let mut members: Vec<(i64, usize)> = (0..self.world())
            .filter(|&r| pairs[2 * r] == color)
            .map(|r| (pairs[2 * r + 1], r))
            .collect();
        members.sort_unstable();
        let members: Vec<usize> = members.into_iter().map(|(_, r)| r).collect();
        let name = std::format!("{}/{color}", self.core.name);
        let transport = self
            .core
            .visit(|link| link.transport.subgroup(&members, &name))?;
        Ok(self.heir(transport, &members))
    }

    /// On this thread where nothing is under way, else on the worker with a copy.
    #[track_caller]
    fn perform<E: Element>(
        &self,
        shape: Shape,
        redop: Option<ReduceOp>,
        mut view: View<'_, E>,
    ) -> Result<()> {
        let run = self.run(shape, E::DTYPE, redop)?;
        fits(run.known.plan(), self.rank(), &view)?;
        if self.core.idle() {
            return self
                .core
                .drive(&mut act::Borrowed { run, view }, self.deadline);
        }
        let (input, output) = view.slices();
        let pair = Pair {
            input: input.to_vec(),
            output: output.to_vec(),
        };
        let done = self
            .core
            .start(Owned::new(run, pair), (), self.deadline)?
            .wait()?;
        view.output_all().copy_from_slice(&done);
        Ok(())
    }

    #[track_caller]
    fn run(&self, shape: Shape, dtype: DType, redop: Option<ReduceOp>) -> Result<Run> {
        Ok(Run::new(self.known(shape, dtype, redop)?, Site::here()))
    }

    fn known(&self, shape: Shape, dtype: DType, redop: Option<ReduceOp>) -> Result<Arc<Known>> {
        let mut plans = self.plans.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(known) = plans.iter().find(|k| k.is(&shape, dtype, redop)) {
            return Ok(known.clone());
        }
        let plan = self.model.plan(shape, self.world(), dtype, self.order)?;
        let known = Arc::new(Known::new(plan, dtype, (redop, self.order), self.rank()));
        plans.push_front(known.clone());
        plans.truncate(PLANS);
        Ok(known)
    }
}

impl<T: Transport + Send + 'static> Drop for Communicator<T> {
    fn drop(&mut self) {
        self.core.close();
    }
}

/// The chunk of `rank`; counts that are not one per rank are refused later, by the plan.
fn own(counts: &[usize], rank: usize) -> core::ops::Range<usize> {
    let start = counts
        .iter()
        .take(rank)
        .fold(0, |sum: usize, &c| sum.saturating_add(c));
    start..start.saturating_add(counts.get(rank).copied().unwrap_or(0))
}
