//! Several ranks of one process on one device: collectives by copies and the fold kernel, ordered by
//! events, with nothing of them on the host.
//!
//! ```text
//! rank 0   stream  --given-----fold--folded-----copy--taken-----after 1 taken--   Steps (`steps.rs`)
//! rank 1   stream  -----given--------fold--folded-----copy--taken-------------
//!                       \_ posts: addresses and events, on a Board (`board.rs`)
//! ```
//!
//! A rank reads the others' memory where it lies and writes its own. A fold is the left fold in rank order
//! (cuda/fold.cu), so every order that may be asked for gets the bits of [`Order::Rank`]. An
//! operation is over for the host when all of it stands on the rank's stream: nobody waits for the device.
//! Calls are announced and compared, losses told and waits ended by the transport below, and what
//! is sent is counted as its plan has it.

mod board;
mod steps;
#[cfg(all(test, feature = "emulated"))]
mod tests;

use std::collections::BTreeMap;
use std::format;
use std::string::String;
use std::sync::Arc;
use std::time::Duration;
use std::vec::Vec;

use quintet_collectives::plan::CollectiveShape as Shape;
use quintet_collectives::transport::device::{Device, Job, Lane, Parcel, Said};
use quintet_collectives::transport::{Transport, Wait};
use quintet_collectives::{DType, Error, Order, ReduceOp};

pub use board::Board;
use board::{Group, Passing, Place, Running};

use super::near::GpuLane;
use crate::gpu::{Folded, PARTS};
use crate::launch::Launch;

/// Between two looks at what other ranks have put.
const LOOK: Duration = Duration::from_micros(100);

/// What performs a collective among ranks that share a device, and what one of them puts on its stream.
///
/// ```
/// use quintet_collectives::{DType, ReduceOp, plan::CollectiveShape};
/// let said = quintet_kernels::wire::explain(&CollectiveShape::AllReduce { len: 48 }, DType::F32, ReduceOp::Sum, 3, 1);
/// assert!(said.contains("fold_f32"));
/// assert!(said.contains("fold 16..32 of all inputs, in rank order -> 16"));
/// ```
#[must_use]
pub fn explain(shape: &Shape, dtype: DType, redop: ReduceOp, world: usize, me: usize) -> String {
    let mut said = match refused(shape, dtype, world) {
        Some(why) => return format!("{}: refused: {why}\n", shape.operation()),
        None => format!("{} among {world} ranks on one device: ", shape.operation()),
    };
    said += &match shape.operation().folds() {
        true => format!(
            "copies and kernel fold_{dtype} ({redop}, left fold in rank order, rounded once)"
        ),
        false => String::from("copies"),
    };
    said += &format!("; what rank {me} puts on its stream once it has given its input:\n");
    let shapes: Vec<&Shape> = (0..world).map(|_| shape).collect();
    said + &steps::drawn(&shapes, me)
}

/// Why a collective cannot be done here, if so.
fn refused(shape: &Shape, dtype: DType, world: usize) -> Option<String> {
    if !shape.operation().folds() {
        return None;
    }
    match Folded::named(dtype.name()) {
        None => Some(format!(
            "there is no kernel that folds {dtype} on a device; fold f32, f64, bf16, i32, u32, i64 or u64"
        )),
        Some(folded) if !folded.takes(world) => Some(format!(
            "{dtype} of more than {PARTS} ranks would be rounded more than once on a device; fold f32"
        )),
        Some(_) => None,
    }
}

/// How many ranks of a process may share a device in this way whatever they fold.
pub const RANKS: usize = PARTS;

/// A transport that carries everything but collectives and messages on device memory, which the ranks,
/// threads of one process on one device, perform there.
pub struct SameDevice<L: Launch, T: Transport> {
    control: T,
    device: Option<(L, Board<L>)>,
    group: Option<Arc<Group<L>>>,
    job: Option<(Running, Arc<dyn Lane>)>,
    /// Collectives so far.
    number: u64,
    /// By peer, and whether it is sent to: messages so far, and the one under way.
    messages: BTreeMap<(usize, bool), (u64, Option<(Passing, Arc<dyn Lane>)>)>,
    said: BTreeMap<usize, Vec<Said>>,
}

impl<L: Launch, T: Transport> core::fmt::Debug for SameDevice<L, T> {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        let (rank, world) = (self.control.rank(), self.control.world());
        write!(f, "rank {rank} of {world} on one device")
    }
}

impl<L: Launch, T: Transport> SameDevice<L, T> {
    /// This rank's end of the group that `control` is an endpoint of. Nothing is sent. All ranks of the
    /// group give clones of one launcher and one board, and call with device memory of that
    /// launcher's on streams of their own.
    ///
    /// Without a board nothing is reached, and what lies on the device travels through the host: for
    /// ranks that are not all here.
    pub fn new(control: T, device: Option<(L, Board<L>)>) -> Self {
        let group = device.as_ref().map(|(_, board)| {
            let ranks: Vec<usize> = (0..control.world()).map(|r| control.global(r)).collect();
            board.group(control.global(control.rank()), &ranks, control.name())
        });
        Self {
            control,
            device,
            group,
            job: None,
            number: 0,
            messages: BTreeMap::new(),
            said: BTreeMap::new(),
        }
    }

    fn group(&self) -> Result<Arc<Group<L>>, Error> {
        let group = self.group.clone();
        group.ok_or_else(|| Error::Layout("the transport reaches no device".into()))
    }

    fn flying(&self) -> bool {
        self.job.is_some()
            || self
                .messages
                .values()
                .any(|(_, under_way)| under_way.is_some())
    }
}

fn lane_of<L: Launch>(lane: &Arc<dyn Lane>) -> Result<&GpuLane<L>, Error> {
    let lane = lane.as_any().and_then(|any| any.downcast_ref());
    lane.ok_or_else(|| Error::Layout("a lane of another kind of device".into()))
}

impl<L: Launch, T: Transport> Device for SameDevice<L, T> {
    fn begin(&mut self, job: Job) -> Result<(), Error> {
        let group = self.group()?;
        let mut state = group.state();
        state.alive()?;
        let place = Place {
            me: self.control.rank(),
            world: self.control.world(),
            number: self.number,
        };
        self.number += 1;
        let running = Running::begin(&mut state, place, &job, lane_of::<L>(&job.lane)?);
        self.job = Some((running, job.lane));
        Ok(())
    }

    fn poll(&mut self) -> Result<bool, Error> {
        let group = self.group()?;
        let mut state = group.state();
        state.alive()?;
        let Some((running, lane)) = &mut self.job else {
            return Ok(true);
        };
        let over = running.go_on(&mut state, lane_of::<L>(lane)?, steps::steps)?;
        if over {
            self.job = None;
        }
        Ok(over)
    }

    fn begin_message(&mut self, parcel: Parcel) -> Result<(), Error> {
        let group = self.group()?;
        let mut state = group.state();
        state.alive()?;
        let Parcel {
            peer,
            out,
            span,
            lane,
        } = parcel;
        let (count, under_way) = self.messages.entry((peer, out)).or_default();
        let me = self.control.rank();
        let (from, to) = if out { (me, peer) } else { (peer, me) };
        let way = (from, to, *count);
        *count += 1;
        let passing = Passing::begin(&mut state, way, (span, out), lane_of::<L>(&lane)?);
        *under_way = Some((passing, lane));
        Ok(())
    }

    fn poll_message(&mut self, peer: usize, out: bool) -> Result<bool, Error> {
        let group = self.group()?;
        let mut state = group.state();
        state.alive()?;
        let Some((_, under_way)) = self.messages.get_mut(&(peer, out)) else {
            return Ok(true);
        };
        let Some((passing, lane)) = under_way else {
            return Ok(true);
        };
        let over = passing.go_on(&mut state, lane_of::<L>(lane)?)?;
        if over {
            *under_way = None;
        }
        Ok(over)
    }

    fn has_message(&self, peer: usize, out: bool) -> bool {
        let message = self.messages.get(&(peer, out));
        message.is_some_and(|(_, under_way)| under_way.is_some())
    }

    fn abort(&mut self, cause: &Error) {
        let (Some(group), Some((launcher, _))) = (&self.group, &self.device) else {
            return;
        };
        let streams = group.state().end(cause);
        self.job = None;
        for (_, under_way) in self.messages.values_mut() {
            *under_way = None;
        }
        for stream in streams {
            // Over, well or not: a device that fails does no more work.
            let _ = launcher.synchronize(stream);
        }
    }

    fn said(&mut self, peer: usize) -> &mut Vec<Said> {
        self.said.entry(peer).or_default()
    }
}

impl<L: Launch, T: Transport> Transport for SameDevice<L, T> {
    quintet_collectives::forward_transport!(control: group, calls, messages);

    fn device(&mut self) -> Option<&mut dyn Device> {
        self.group.is_some().then_some(self as &mut dyn Device)
    }

    fn reaches_device(&self) -> bool {
        self.group.is_some()
    }

    fn device_refuses(&self, shape: &Shape, dtype: DType, _: ReduceOp, _: Order) -> Option<String> {
        refused(shape, dtype, self.world())
    }

    fn park(&mut self, wait: &Wait, timeout: Duration) {
        // What other ranks put wakes nobody.
        let timeout = if self.flying() {
            timeout.min(LOOK)
        } else {
            timeout
        };
        self.control.park(wait, timeout);
    }

    fn subgroup(&self, members: &[usize], name: &str) -> Result<Self, Error> {
        let control = self.control.subgroup(members, name)?;
        Ok(Self::new(control, self.device.clone()))
    }
}

impl<L: Launch, T: Transport> Drop for SameDevice<L, T> {
    fn drop(&mut self) {
        // Others may still read what this rank has given.
        if let Err(cause) = self.control.healthy() {
            self.abort(&cause);
        } else if self.flying() {
            self.abort(&Error::Gate("its communicator was dropped".into()));
        }
    }
}
