//! Faults on purpose, from a seed (`std`): what a network may do at its worst, in a test.
//!
//! ```text
//! Faulty<T>     messages: late, hence in another order across tags and peers; refused for now;
//!               a park that returns for nothing.           All legal: no result may change.
//! WireFaults    bytes of a socket's data connections: short reads and writes (legal);
//!               cut at byte k, or bit flipped at byte k (every rank must say so).
//! ```
//!
//! The same seed makes the same choices; what the threads' timing makes of them may differ.

use std::{time::Duration, vec::Vec};

use super::delay::Delay;
use crate::{
    Result,
    transport::{Message, Tag, Transport, Wait},
};

/// How a [`Faulty`] transport misbehaves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Faults {
    /// Of all choices.
    pub seed: u64,
    /// A message arrives up to so much later than it would.
    pub late: Duration,
    /// Of 256 messages so many find no room at the first try.
    pub refused: u8,
    /// Of 256 parks so many return at once.
    pub woken: u8,
}

impl Faults {
    /// A bit of everything.
    #[must_use]
    pub fn some(seed: u64) -> Self {
        Self {
            seed,
            late: Duration::from_micros(300),
            refused: 64,
            woken: 64,
        }
    }
}

/// What is done to the bytes that one rank writes and reads; see
/// [`Join::faults`](super::socket::Join::faults).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct WireFaults {
    /// Of all choices.
    pub seed: u64,
    /// Reads and writes stop short at random.
    pub short: bool,
    /// The connection to this rank ends after so many bytes were written to it.
    pub cut: Option<(usize, u64)>,
    /// In the bytes written to this rank, one bit of the byte at this offset is flipped.
    pub flipped: Option<(usize, u64)>,
}

/// A small generator of numbers (Vigna's splitmix64).
#[derive(Debug, Clone)]
pub(crate) struct Dice(u64);

impl Dice {
    pub(crate) fn new(seed: u64) -> Self {
        Self(seed)
    }

    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// True in `of_256` of 256 throws.
    fn falls(&mut self, of_256: u8) -> bool {
        (self.next() >> 56) < u64::from(of_256)
    }
}

/// Wraps a transport; all ranks of a group must be wrapped.
///
/// ```
/// use quintet_collectives::{Communicator, ReduceOp, World, transport::fault::{Faults, Faulty}};
/// let world = World::new(3)?;
/// std::thread::scope(|scope| {
///     for seat in world.seats() {
///         scope.spawn(move || {
///             let faults = Faults::some(7 + seat.rank() as u64);
///             let comm = Communicator::new(Faulty::new(seat.endpoint(), faults));
///             let mut x = [1.0f32; 100];
///             comm.all_reduce(&mut x, ReduceOp::Sum).unwrap();
///             assert_eq!(x, [3.0; 100]);
///             seat.finish(Ok(()));
///         });
///     }
/// });
/// # Ok::<(), quintet_collectives::Error>(())
/// ```
#[derive(Debug)]
pub struct Faulty<T> {
    inner: Delay<T>,
    faults: Faults,
    dice: Dice,
    /// The peers whose next message goes through: it was refused before.
    owed: Vec<usize>,
}

impl<T: Transport> Faulty<T> {
    /// An endpoint that misbehaves; ranks may have different seeds.
    pub fn new(inner: T, faults: Faults) -> Self {
        Self {
            inner: Delay::new(inner, Duration::ZERO, Duration::ZERO),
            faults,
            dice: Dice::new(faults.seed),
            owed: Vec::new(),
        }
    }
}

impl<T: Transport> Transport for Faulty<T> {
    crate::forward_transport!(inner: group, calls);

    fn try_send(&mut self, to: usize, message: Message) -> Result<Option<Message>> {
        // Nobody waits for room that never comes: what was refused goes through the second time.
        match self.owed.iter().position(|peer| *peer == to) {
            Some(at) => drop(self.owed.swap_remove(at)),
            None if self.dice.falls(self.faults.refused) => {
                self.owed.push(to);
                return Ok(Some(message));
            }
            None => {}
        }
        let late = self.faults.late.as_nanos().max(1) as u64;
        let late = Duration::from_nanos(self.dice.next() % late);
        self.inner.send_after(to, message, late)
    }

    fn try_recv(&mut self, from: usize, tag: Tag) -> Result<Option<Message>> {
        self.inner.try_recv(from, tag)
    }

    fn park(&mut self, wait: &Wait, timeout: Duration) {
        // Who was refused here is not woken by the inner transport, which has room.
        let refused = wait.send.iter().any(|peer| self.owed.contains(peer));
        if !refused && !self.dice.falls(self.faults.woken) {
            self.inner.park(wait, timeout);
        }
    }

    fn subgroup(&self, members: &[usize], name: &str) -> Result<Self> {
        let inner = self.inner.subgroup(members, name)?;
        let mut dice = self.dice.clone();
        Ok(Self {
            inner,
            faults: self.faults,
            dice: Dice::new(dice.next()),
            owed: Vec::new(),
        })
    }
}
