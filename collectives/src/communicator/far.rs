//! Collectives on a device's memory, where the transport reaches it; messages stand in `parcel.rs`.
//!
//! ```text
//! collective   idle? (barrier alone) -> announce -> all alike? -> counts agree? (all_to_all_v) -> device
//! ```

use std::{
    format,
    string::{String, ToString},
    sync::Arc,
    vec::Vec,
};

use super::{
    Communicator,
    act::{Act, Report, Run, Track, Yields},
    observer::Subject,
};
use crate::{
    Error, Pending, ReduceOp, Result,
    performer::Link,
    plan::CollectiveShape as Shape,
    transport::{
        Call, Message, Tag, Transport, Wait,
        device::{Device, Job, Lane, Span},
    },
};

/// Tags from here on are this module's and the devices' own.
pub(crate) const RESERVED: u64 = 1 << 61;

impl<T: Transport + Send + 'static> Communicator<T> {
    /// Whether collectives on a device's memory can be performed where it lies:
    /// [`Communicator::on_device`] and its kin.
    #[must_use]
    pub fn reaches_device(&self) -> bool {
        self.device
    }

    /// Performs a collective on device memory; returns once it is over there.
    ///
    /// The input may lie in the output (all_gather: my chunk of it; all_reduce, broadcast, reduce: all of it) or
    /// the output in the input (reduce_scatter: my chunk); else they lie apart.
    ///
    /// # Errors
    /// Those of [`Communicator::all_reduce_into`]; [`Error::Plan`] where the device's fold is not as the
    /// order wants it; [`Error::Layout`] where no device is reached.
    #[track_caller]
    pub fn on_device(
        &self,
        shape: Shape,
        redop: ReduceOp,
        [input, output]: [Span; 2],
        lane: Arc<dyn Lane>,
    ) -> Result<()> {
        let mut far = self.far((), shape, redop, [input, output], lane)?;
        if self.core.idle() {
            return self.core.drive(&mut far, self.deadline);
        }
        self.core.start(far, (), self.deadline)?.wait()
    }

    /// Starts [`Communicator::on_device`]; `keep`, which owns the memory, comes back at the end.
    ///
    /// # Errors
    /// Those of [`Communicator::on_device`] that are known at once; the rest comes from [`Pending::wait`].
    #[track_caller]
    pub fn start_on_device<K: Send + 'static>(
        &self,
        keep: K,
        shape: Shape,
        redop: ReduceOp,
        [input, output]: [Span; 2],
        lane: Arc<dyn Lane>,
    ) -> Result<Pending<K>> {
        let far = self.far(keep, shape, redop, [input, output], lane)?;
        self.core.start(far, (), self.deadline)
    }

    #[track_caller]
    fn far<K>(
        &self,
        keep: K,
        shape: Shape,
        redop: ReduceOp,
        [input, output]: [Span; 2],
        lane: Arc<dyn Lane>,
    ) -> Result<Far<K>> {
        self.reached()?;
        let (dtype, op) = (output.dtype(), shape.operation());
        let run = self.run(shape.clone(), dtype, op.folds().then_some(redop))?;
        let refused = |link: &Link<T>| {
            link.transport
                .device_refuses(&shape, dtype, redop, self.order)
        };
        if let Some(reason) = self.core.visit(refused) {
            return Err(Error::Plan {
                op: op.name(),
                algorithm: "the device's library",
                world: self.world(),
                reason,
            });
        }
        let (plan, me) = (run.known.plan(), self.rank());
        let wanted = [plan.input_len(me), plan.output_len(me)];
        // Where a root alone reads or writes, the others' memory may be absent.
        let rooted = |want: usize| want == 0 && shape.root().is_some();
        for (what, want, got) in [
            ("the input", wanted[0], input),
            ("the output", wanted[1], output),
        ] {
            if got.dtype() != dtype && !rooted(want) {
                let got = got.dtype();
                return Err(Error::Layout(format!(
                    "{op}: {what} is of {got}, not {dtype}"
                )));
            }
            if got.len() != want && !rooted(want) {
                return Err(Error::Len {
                    op: op.name(),
                    what,
                    expected: want,
                    got: got.len(),
                });
            }
        }
        let [input, output] = [input.part(0..wanted[0]), output.part(0..wanted[1])];
        lie_well(&shape, me, input, output)?;
        Ok(Far {
            keep,
            run,
            job: Job {
                shape,
                redop,
                input,
                output,
                lane,
            },
            stage: Stage::Open,
        })
    }

    pub(super) fn reached(&self) -> Result<()> {
        if self.device {
            return Ok(());
        }
        Err(Error::Layout(format!(
            "the transport of group {} reaches no device",
            self.name()
        )))
    }
}

/// Refuses input and output that overlap otherwise than in place.
fn lie_well(shape: &Shape, me: usize, input: Span, output: Span) -> Result<()> {
    let end = |span: Span| span.at(span.len());
    let apart = end(input) <= output.address() || end(output) <= input.address();
    let own = || super::own(shape.counts(), me);
    let in_place = match shape {
        Shape::AllReduce { .. } | Shape::Broadcast { .. } | Shape::Reduce { .. } => input == output,
        Shape::ReduceScatter { .. } => output == input.part(own()),
        Shape::AllGather { .. } => input == output.part(own()),
        _ => false,
    };
    if apart || in_place || input.is_empty() || output.is_empty() {
        return Ok(());
    }
    Err(Error::Layout(format!(
        "{}: input and output overlap and are not in place",
        shape.operation()
    )))
}

/// A collective on device memory; `K` owns the memory.
#[derive(Debug)]
struct Far<K> {
    keep: K,
    run: Run,
    job: Job,
    stage: Stage,
}

#[derive(Debug)]
enum Stage {
    Open,
    Called(Call),
    /// The counts of all_to_all_v: whom they are still to be told, and from whom they are to come.
    Counting(u64, Vec<usize>, Vec<usize>),
    Begun,
}

impl<K> Far<K> {
    fn step<T: Transport>(&mut self, link: &mut Link<T>, sequence: &mut u64) -> Result<bool> {
        loop {
            match &mut self.stage {
                Stage::Open => {
                    let shape = &self.job.shape;
                    if matches!(shape, Shape::Barrier) && !self.job.lane.idle()? {
                        return link.transport.healthy().map(|()| false);
                    }
                    let run = &mut self.run;
                    let call = run.known.call(*sequence, run.site);
                    run.sequence = Some(*sequence);
                    *sequence += 1;
                    link.transport.announce(&call)?;
                    self.stage = Stage::Called(call);
                }
                Stage::Called(call) => {
                    if !link.transport.confirmed(call.sequence)? {
                        return Ok(false);
                    }
                    let me = link.transport.rank();
                    let others = || (0..link.transport.world()).filter(|&r| r != me).collect();
                    self.stage = match &self.job.shape {
                        Shape::Barrier => return Ok(true),
                        Shape::AllToAllV { .. } => {
                            Stage::Counting(call.sequence, others(), others())
                        }
                        _ => self.begin(link)?,
                    };
                }
                Stage::Counting(..) => {
                    if !self.counts_agree(link)? {
                        return Ok(false);
                    }
                    self.stage = self.begin(link)?;
                }
                Stage::Begun => {
                    link.transport.healthy()?;
                    if !device(link)?.poll()? {
                        return Ok(false);
                    }
                    self.run.count(link);
                    return Ok(true);
                }
            }
        }
    }

    fn begin<T: Transport>(&self, link: &mut Link<T>) -> Result<Stage> {
        device(link)?.begin(self.job.clone())?;
        Ok(Stage::Begun)
    }

    /// Tells every rank what it gets and compares what this one gets; true once all have been heard.
    fn counts_agree<T: Transport>(&mut self, link: &mut Link<T>) -> Result<bool> {
        let Shape::AllToAllV { send, recv } = &self.job.shape else {
            return Ok(true);
        };
        let Stage::Counting(sequence, untold, unheard) = &mut self.stage else {
            return Ok(true);
        };
        let tag = Tag::Collective(*sequence);
        while let Some(&to) = untold.last() {
            let count = Message::new(tag, &[send[to] as i64], Vec::new());
            if link.transport.try_send(to, count)?.is_some() {
                break;
            }
            untold.pop();
        }
        while let Some(&from) = unheard.last() {
            let Some(count) = link.try_recv::<i64>(from, tag, 1, "all_to_all_v")? else {
                break;
            };
            let dtype = self.run.known.dtype();
            let got = count.elements::<i64>().first().map_or(0, |&n| n as usize);
            if got != recv[from] {
                let [expected, got] = [recv[from], got].map(|n| format!("{dtype} x {n}"));
                return Err(other(link, from, "all_to_all_v", expected, got));
            }
            unheard.pop();
        }
        Ok(untold.is_empty() && unheard.is_empty())
    }
}

impl<K, T: Transport> Act<T> for Far<K> {
    fn poll(&mut self, link: &mut Link<T>, sequence: &mut u64) -> Result<bool> {
        let outcome = self.step(link, sequence);
        if let Err(cause) = &outcome {
            self.give_up(link, cause);
        }
        outcome
    }

    fn give_up(&mut self, link: &mut Link<T>, cause: &Error) {
        if let Some(device) = link.transport.device() {
            device.abort(cause);
        }
    }

    fn wait(&self, wait: &mut Wait) {
        match &self.stage {
            Stage::Called(call) => wait.confirm = Some(call.sequence),
            Stage::Counting(sequence, untold, unheard) => {
                wait.send.extend(untold.last());
                let tag = Tag::Collective(*sequence);
                wait.recv.extend(unheard.last().map(|&from| (from, tag)));
            }
            Stage::Open | Stage::Begun => {}
        }
    }

    fn report(&self) -> Report {
        let (peer, what) = match &self.stage {
            Stage::Open => (None, "the work on its lane"),
            Stage::Called(_) => (None, "every rank of the group to do its part"),
            Stage::Counting(_, _, unheard) => (unheard.last().copied(), "its counts"),
            Stage::Begun => (None, "the device"),
        };
        Report {
            op: self.job.shape.operation().name(),
            sequence: self.run.sequence.unwrap_or(0),
            peer,
            what: String::from(what),
            called: self.run.sequence.is_some(),
            all: matches!(self.stage, Stage::Counting(..) | Stage::Begun),
        }
    }

    fn track(&self) -> Track {
        Track::Collective
    }

    fn subject(&self) -> Subject {
        self.run.subject()
    }
}

impl<K: Send + 'static> Yields for Far<K> {
    type Output = K;
    fn output(self) -> K {
        self.keep
    }
}

pub(super) fn device<T: Transport>(link: &mut Link<T>) -> Result<&mut dyn Device> {
    let device = link.transport.device();
    device.ok_or_else(|| Error::Layout(String::from("the transport reaches no device")))
}

pub(super) fn other<T: Transport>(
    link: &Link<T>,
    from: usize,
    op: &'static str,
    expected: String,
    got: String,
) -> Error {
    Error::Message {
        group: link.transport.name().to_string(),
        rank: link.transport.global(link.transport.rank()),
        peer: link.transport.global(from),
        op,
        expected,
        got,
    }
}
