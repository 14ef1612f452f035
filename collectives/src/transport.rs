//! What a collective asks of whatever moves its messages, without waiting and without I/O.
//!
//! ```text
//! Communicator      one call: announce -> poll a Performer until done -> confirm
//!      |                                       |  ^
//!      v                          try_send, try_recv  park
//! Transport         an endpoint of ONE group: ranks are places in it, not global
//!      |
//!      +-- sim    all ranks in one thread, seeded      +-- local   ranks are threads (std)
//!      +-- delay  wraps another, each message takes time; fault: and goes other ways wrong
//!      +-- socket ranks are processes, over tcp or unix sockets (std, unix), shm (Linux), or mpi (a feature)
//! ```
//!
//! `try_send` and `try_recv` never wait. Whoever has nothing left to do calls [`Transport::park`],
//! which is the only place where a thread sleeps.

use alloc::{format, string::String, sync::Arc, vec::Vec};
use core::{fmt, time::Duration};

use crate::{
    DType, Element, Error, Order, ReduceOp, Result,
    plan::{CollectiveShape, Operation},
};

#[cfg(feature = "std")]
pub mod buffer;
#[cfg(feature = "std")]
pub mod delay;
#[cfg(feature = "std")]
pub mod device;
#[cfg(feature = "std")]
pub mod direct;
#[cfg(feature = "std")]
pub mod fault;
#[cfg(feature = "std")]
mod forward;
#[cfg(feature = "std")]
pub mod local;
#[cfg(all(feature = "std", target_os = "linux"))]
pub mod shm;
pub mod sim;
mod site;
#[cfg(all(feature = "std", unix))]
pub mod socket;

pub use site::Site;
#[cfg(all(feature = "mpi", unix))]
pub use socket::mpi;

/// One rank's end of one group.
pub trait Transport {
    /// My place in the group, `0..world`.
    fn rank(&self) -> usize;

    /// Members of the group.
    fn world(&self) -> usize;

    /// The global rank of a member; for reports.
    fn global(&self, rank: usize) -> usize;

    /// The group's name; for reports.
    fn name(&self) -> &str;

    /// Hands a message over, or gives it back where there is no room for it now.
    ///
    /// Messages of one tag to one peer arrive in order.
    ///
    /// # Errors
    /// The group's poison, or [`Error::PeerLost`].
    fn try_send(&mut self, to: usize, message: Message) -> Result<Option<Message>>;

    /// Sends the message that these bytes are, without asking for room, straight from where they lie
    /// as far as that goes; false where this transport has no such way and nothing was sent.
    ///
    /// # Errors
    /// Those of [`Transport::try_send`].
    fn send_bytes(&mut self, _to: usize, _tag: Tag, _dtype: DType, _bytes: &[u8]) -> Result<bool> {
        Ok(false)
    }

    /// Sends the message that these bytes are, a long one of a collective, as far as it goes now, and straight from where
    /// they lie. After [`Sent::Part`] the caller comes again with the same bytes, and nothing else of this tag, until it
    /// is [`Sent::All`], or else gives it to [`Transport::send_alone`].
    ///
    /// # Errors
    /// Those of [`Transport::try_send`].
    fn send_along(&mut self, _to: usize, _tag: Tag, _dtype: DType, _bytes: &[u8]) -> Result<Sent> {
        Ok(Sent::Never)
    }

    /// What [`Transport::send_along`] has begun goes on without its caller, who does not keep these bytes.
    fn send_alone(&mut self, _to: usize, _bytes: &[u8]) {}

    /// Takes the next bytes of the oldest message of this tag from this peer straight to where they are wanted, as far as
    /// they have come. `None`: no such message comes this way. 0: nothing has come, or the message is one for
    /// [`Transport::try_recv`]. Whoever has got something comes again until he has got all.
    ///
    /// # Errors
    /// Those of [`Transport::try_recv`].
    fn recv_along(
        &mut self,
        _from: usize,
        _tag: Tag,
        _of: (DType, usize),
        _room: &mut [u8],
    ) -> Result<Option<usize>> {
        Ok(None)
    }

    /// Takes the storage of a finished message for one to come, or gives it back.
    fn recycle(&mut self, storage: Vec<u64>) -> Option<Vec<u64>> {
        Some(storage)
    }

    /// The oldest message of this tag from this peer, if there is one.
    ///
    /// # Errors
    /// The group's poison, or [`Error::PeerLost`] where the peer is gone and nothing is left of it.
    fn try_recv(&mut self, from: usize, tag: Tag) -> Result<Option<Message>>;

    /// Tells the group what this rank's next collective is.
    ///
    /// # Errors
    /// [`Error::Mismatch`] where another rank announced something else under this number, and
    /// the group's poison; in both cases the group stays poisoned.
    fn announce(&mut self, call: &Call) -> Result<()>;

    /// Whether every rank of the group has announced this number, all alike.
    ///
    /// # Errors
    /// As [`Transport::announce`], and [`Error::PeerLost`] where a rank left before it.
    fn confirmed(&mut self, sequence: u64) -> Result<bool>;

    /// Whether nothing has poisoned the group.
    ///
    /// # Errors
    /// The group's poison.
    fn healthy(&mut self) -> Result<()> {
        Ok(())
    }

    /// A member that has not announced this number, where that is known; for reports.
    fn absent(&self, _sequence: u64) -> Option<usize> {
        None
    }

    /// The memory that this group shares, if it does: collectives that fold in rank order or not at
    /// all are then performed in it, and no message is sent for them.
    #[cfg(feature = "std")]
    fn direct(&mut self) -> direct::Sharing<'_> {
        direct::Sharing::Never
    }

    /// What performs collectives on device memory here, if something does.
    #[cfg(feature = "std")]
    fn device(&mut self) -> Option<&mut dyn device::Device> {
        None
    }

    /// Whether [`Transport::device`] is something.
    #[cfg(feature = "std")]
    fn reaches_device(&self) -> bool {
        false
    }

    /// Why the device cannot fold as `order` wants it, if so; see [`Transport::device`].
    #[cfg(feature = "std")]
    fn device_refuses(
        &self,
        _shape: &CollectiveShape,
        _dtype: DType,
        _redop: ReduceOp,
        _order: Order,
    ) -> Option<String> {
        None
    }

    /// A buffer of zeros, in memory that the ranks share where there is some.
    ///
    /// # Errors
    /// [`Error::System`] where there is no room.
    #[cfg(feature = "std")]
    fn allocate<E: Element>(&self, len: usize) -> Result<buffer::Buffer<E>>
    where
        Self: Sized,
    {
        Ok(buffer::Buffer::private(len))
    }

    /// Sleeps until one of `wait` may have come true, the group is poisoned, somebody called
    /// [`Control::wake`], or `timeout` is over. It may return early at any time, never late.
    fn park(&mut self, wait: &Wait, timeout: Duration);

    /// An endpoint of the group of these members (places in this group, in the new order), of
    /// which this rank is one. Nothing is sent: each member calls it with the same list and name,
    /// and the k-th call of one belongs to the k-th of the others.
    ///
    /// # Errors
    /// [`Error::Layout`] where the list is not a group of members that holds this rank.
    fn subgroup(&self, members: &[usize], name: &str) -> Result<Self>
    where
        Self: Sized;

    /// A handle that other threads may use while this endpoint is busy.
    fn control(&self) -> Arc<dyn Control>;
}

/// What may be done to an endpoint from outside.
pub trait Control: core::marker::Send + Sync {
    /// Makes every operation of the group fail with `cause`, now and later. The first cause stays.
    fn poison(&self, cause: Error);

    /// Makes every operation of every group fail with [`Error::Aborted`].
    fn abort(&self);

    /// Makes a `park` in progress, or else the next, return at once.
    fn wake(&self);

    /// Takes over a thread that still finishes started operations after its communicator was
    /// dropped. The default waits for it.
    #[cfg(feature = "std")]
    fn adopt(&self, worker: std::thread::JoinHandle<()>) {
        // A worker that panicked has already failed its operations; there is nothing to add here.
        let _ = worker.join();
    }
}

/// How far a message that stays with its sender has gone.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Sent {
    /// It does not go this way; nothing was sent.
    Never,
    /// Not all of it.
    Part {
        /// Whether more of it than before.
        moved: bool,
    },
    /// All of it.
    All,
}

/// Which stream of messages between two ranks a message belongs to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Tag {
    /// The collective of this number.
    Collective(u64),
    /// `send` and `recv` with this tag.
    User(u64),
}

/// What a parked rank waits for; ranks are places in the group.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Wait {
    /// Messages to come.
    pub recv: Vec<(usize, Tag)>,
    /// Whether all of `recv` are needed before anything can go on; else one is enough.
    pub all: bool,
    /// Peers that had no room.
    pub send: Vec<usize>,
    /// The collective that is not confirmed yet.
    pub confirm: Option<u64>,
    /// Whether this thread has nothing else to do: it may keep looking for a moment before it sleeps. Not so where
    /// others compute meanwhile, for whom that would be a core less.
    pub eager: bool,
}

/// A message: elements of one type in storage aligned for all of them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Message {
    /// Which stream it belongs to.
    pub tag: Tag,
    /// Type of its elements.
    pub dtype: DType,
    /// When it may be seen, in nanoseconds of the wrapper that set it; 0: at once.
    pub due: u64,
    len: usize,
    words: Vec<u64>,
}

impl Message {
    /// A message holding a copy of `elements`, in `storage`, which may come from a finished one.
    #[must_use]
    pub fn new<E: Element>(tag: Tag, elements: &[E], storage: Vec<u64>) -> Self {
        let mut message = Self::zeroed::<E>(tag, elements.len(), storage);
        message.elements_mut::<E>().copy_from_slice(elements);
        message
    }

    /// A message of `len` elements of any value, to be filled in.
    #[must_use]
    pub fn zeroed<E: Element>(tag: Tag, len: usize, mut storage: Vec<u64>) -> Self {
        // Old contents are left where they are: zeroing them would cost a pass over memory.
        storage.resize((len * E::DTYPE.bytes()).div_ceil(8), 0);
        Self {
            tag,
            dtype: E::DTYPE,
            due: 0,
            len,
            words: storage,
        }
    }

    /// A message of `len` elements that are the first bytes of `words`.
    #[cfg(all(feature = "std", unix))]
    pub(crate) fn from_words(tag: Tag, dtype: DType, len: usize, mut words: Vec<u64>) -> Self {
        words.resize((len * dtype.bytes()).div_ceil(8), 0);
        Self {
            tag,
            dtype,
            due: 0,
            len,
            words,
        }
    }

    /// Number of elements.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether it holds no element.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Payload bytes.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.len * self.dtype.bytes()
    }

    /// The elements; empty where they are of another type.
    #[must_use]
    pub fn elements<E: Element>(&self) -> &[E] {
        if self.dtype != E::DTYPE {
            return &[];
        }
        let bytes = &bytemuck::cast_slice::<u64, u8>(&self.words)[..self.bytes()];
        bytemuck::cast_slice(bytes)
    }

    /// The elements, to be written; empty where they are of another type.
    #[must_use]
    pub fn elements_mut<E: Element>(&mut self) -> &mut [E] {
        if self.dtype != E::DTYPE {
            return &mut [];
        }
        let len = self.bytes();
        let bytes = &mut bytemuck::cast_slice_mut::<u64, u8>(&mut self.words)[..len];
        bytemuck::cast_slice_mut(bytes)
    }

    /// The storage, for another message.
    #[must_use]
    pub fn into_storage(self) -> Vec<u64> {
        self.words
    }
}

/// A collective as one rank called it: what must be equal on all ranks of the group, and where in
/// the program it was called, which may differ and is not compared.
#[derive(Debug, Clone, Copy)]
pub struct Call {
    /// The number of the call on its group, from 0.
    pub sequence: u64,
    /// The operation.
    pub operation: Operation,
    /// Type of the elements.
    pub dtype: DType,
    /// Elements of the whole; 0 for all_to_all_v, whose counts differ from rank to rank.
    pub len: usize,
    /// Stands for the counts of all ranks, where the operation has them.
    pub counts: u64,
    /// The root (place in the group), where the operation has one.
    pub root: Option<usize>,
    /// The fold, where the operation has one.
    pub redop: Option<ReduceOp>,
    /// The order asked for.
    pub order: Order,
    /// Where in the program it was called, if that is known.
    pub site: Option<Site>,
}

impl PartialEq for Call {
    fn eq(&self, other: &Self) -> bool {
        let key = |c: &Self| {
            let shape = (c.sequence, c.operation, c.dtype, c.len, c.counts);
            (shape, c.root, c.redop, c.order)
        };
        key(self) == key(other)
    }
}

impl Eq for Call {}

impl Call {
    /// The call of `shape` as number `sequence`.
    #[must_use]
    pub fn new(
        sequence: u64,
        shape: &CollectiveShape,
        world: usize,
        dtype: DType,
        redop: Option<ReduceOp>,
        order: Order,
    ) -> Self {
        let operation = shape.operation();
        Self {
            sequence,
            operation,
            dtype,
            len: if operation == Operation::AllToAllV {
                0
            } else {
                shape.len(world)
            },
            counts: digest(shape.counts()),
            root: shape.root(),
            redop: redop.filter(|_| operation.folds()),
            order,
            site: None,
        }
    }

    /// What must be equal on all ranks, as one number.
    #[cfg(feature = "std")]
    pub(crate) fn digest(&self) -> u64 {
        let root = self.root.map_or(0, |root| root as u64 + 1);
        let redop = self.redop.map_or(0, |redop| redop as u64 + 1);
        let kinds = (self.operation as u64) << 24
            | (self.dtype as u64) << 16
            | redop << 8
            | self.order as u64;
        let fields = [self.sequence, kinds, self.len as u64, self.counts, root];
        fields
            .iter()
            .fold(0x9e37_79b9_7f4a_7c15, |hash: u64, &field| {
                let mixed = (hash ^ field).wrapping_mul(0xff51_afd7_ed55_8ccd);
                mixed ^ (mixed >> 32)
            })
    }

    /// Whether the two differ in no more than their number.
    #[cfg(feature = "std")]
    pub(crate) fn repeats(&self, earlier: &Self) -> bool {
        let sequence = self.sequence;
        *self
            == Self {
                sequence,
                ..*earlier
            }
            && self.site == earlier.site
    }

    /// The same, called at `site`.
    #[must_use]
    pub fn at(mut self, site: Site) -> Self {
        self.site = Some(site);
        self
    }
}

impl fmt::Display for Call {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut text = format!("{}({}", self.operation, self.dtype);
        if self.operation != Operation::AllToAllV {
            text += &format!(" x {}", self.len);
        }
        if let Some(redop) = self.redop {
            text += &format!(", {redop}");
        }
        if let Some(root) = self.root {
            text += &format!(", root {root}");
        }
        if self.counts != 0 {
            text += &format!(", counts #{:04x}", self.counts & 0xffff);
        }
        if self.order != Order::Rank {
            text += &format!(", order {}", self.order);
        }
        write!(f, "{text})")?;
        self.site.map_or(Ok(()), |site| write!(f, " at {site}"))
    }
}

/// FNV-1a over the counts; 0 for none.
fn digest(counts: &[usize]) -> u64 {
    if counts.is_empty() {
        return 0;
    }
    counts.iter().fold(0xcbf2_9ce4_8422_2325, |hash, &count| {
        (hash ^ count as u64)
            .wrapping_mul(0x0000_0100_0000_01b3)
            .rotate_left(17)
    })
}

/// Resolves members of a group to a list without repetition that holds `me`, or says what is wrong.
pub(crate) fn checked_members(members: &[usize], world: usize, me: usize) -> Result<usize> {
    let mut sorted: Vec<usize> = members.to_vec();
    sorted.sort_unstable();
    let fault: Option<String> = if let Some(pair) = sorted.windows(2).find(|p| p[0] == p[1]) {
        Some(format!("names rank {} twice", pair[0]))
    } else {
        sorted
            .last()
            .filter(|&&r| r >= world)
            .map(|r| format!("names rank {r} of a group of {world}"))
    };
    match (fault, members.iter().position(|&r| r == me)) {
        (None, Some(place)) => Ok(place),
        (None, None) => Err(Error::Layout(format!(
            "the subgroup {members:?} lacks this rank, {me}"
        ))),
        (Some(fault), _) => Err(Error::Layout(format!("the subgroup {members:?} {fault}"))),
    }
}
