//! One stage of a pipeline: performs its actions, moves the messages, asks the [`Work`] for the
//! rest.
//!
//! ```text
//!            F <- 0            F <- 0's buffer         F -> 2
//!   peers  ----------> [arrived] ------> forward ------> [ready] ------> peers
//!          <---------- [flowing] <------ backward  <---- [arrived] <----
//!            B -> 0             segment by segment        B <- 2
//! ```
//!
//! A send is started behind the compute queue and kept; at most [`IN_FLIGHT`] stay under way to
//! one peer, then the oldest is waited for. The law [`progress`](super::laws::progress) with room
//! for one message says that this cannot block for ever. A receive is started when the schedule
//! comes to it, and the compute queue waits for it. Where the next chunk of the model is on this
//! stage too, it takes the buffer from `[ready]` itself.

use alloc::collections::{BTreeMap, VecDeque};

use quintet_collectives::Error as WireError;
use quintet_kernels::{Backend, Collectives, Error as KernelError, Pending, Queue, Tag, Wire};

use super::{Action, Direction, Error, Route};

/// Sends that may be under way to one peer in one direction: one that is being taken, and one
/// behind it. This bounds the activations that sends hold.
pub const IN_FLIGHT: usize = 2;

/// Which side of an action [`Work::on_action`] hears of.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Moment {
    /// Before the stage performs it.
    Begin,
    /// After; not called for an action that fails.
    End,
}

/// What a stage does between its messages: implemented by whoever owns layers and parameters.
///
/// Everything is asked for in the order of the schedule. A buffer given is the callee's to keep
/// or drop; a buffer returned goes to the neighbour, or to the next segment.
pub trait Work<B: Backend, E: Wire> {
    /// The trainer's error.
    type Error: From<Error> + From<WireError> + From<KernelError>;

    /// Makes a chunk's parameters whole.
    ///
    /// # Errors
    /// The implementor's own.
    fn gather(&mut self, chunk: usize) -> Result<(), Self::Error>;

    /// Lets a chunk's gathered parameters go.
    ///
    /// # Errors
    /// The implementor's own.
    fn release(&mut self, chunk: usize) -> Result<(), Self::Error>;

    /// Runs a chunk forward. `input` is none on the first chunk of the model, the output is none
    /// on the last.
    ///
    /// # Errors
    /// The implementor's own.
    fn forward(
        &mut self,
        mb: usize,
        chunk: usize,
        input: Option<B::Buf<E>>,
    ) -> Result<Option<B::Buf<E>>, Self::Error>;

    /// Takes the gradient of a segment's output to that of its input. `dout` is none for segment
    /// 0 of the last chunk; the result is none for the last segment of the first chunk.
    ///
    /// # Errors
    /// The implementor's own.
    fn backward_input(
        &mut self,
        mb: usize,
        chunk: usize,
        segment: usize,
        dout: Option<B::Buf<E>>,
    ) -> Result<Option<B::Buf<E>>, Self::Error>;

    /// Adds the gradients of a segment's parameters.
    ///
    /// # Errors
    /// The implementor's own.
    fn backward_weight(
        &mut self,
        mb: usize,
        chunk: usize,
        segment: usize,
    ) -> Result<(), Self::Error>;

    /// Starts the reduction of a bucket whose gradients are complete.
    ///
    /// # Errors
    /// The implementor's own.
    fn reduce_grads(&mut self, chunk: usize, bucket: usize) -> Result<(), Self::Error>;

    /// Told before and after each action: the place for clocks and traces.
    fn on_action(&mut self, action: &Action, moment: Moment) {
        let _ = (action, moment);
    }
}

/// The tag of a message: one number for each direction, microbatch and boundary of the model (below
/// 2^16 chunks and 2^47 microbatches). A boundary is named by the place of the chunk behind it
/// ([`Route::place`]), so that both ends know it.
#[must_use]
pub fn tag(direction: Direction, mb: usize, boundary: usize) -> u64 {
    (mb as u64) << 17 | (boundary as u64 & 0xFFFF) << 1 | direction as u64
}

/// Performs the actions of one stage: `C` is the group of pipeline ranks, rank by stage, `E` the
/// type in which activations travel.
pub struct Stage<B: Backend, C: Collectives<B>, E: Wire> {
    backend: B,
    group: C,
    route: Route,
    boundary: usize,
    in_flight: BTreeMap<(usize, Direction), VecDeque<C::Pending<E>>>,
    held: Held<B, E>,
}

/// Buffers between the action that brings one and the action that takes it, by (mb, chunk).
struct Held<B: Backend, E: Wire> {
    inputs: BTreeMap<(usize, usize), B::Buf<E>>,
    outputs: BTreeMap<(usize, usize), B::Buf<E>>,
    /// With the segment that takes it.
    gradients: BTreeMap<(usize, usize), (usize, B::Buf<E>)>,
}

impl<B: Backend, C: Collectives<B>, E: Wire> Stage<B, C, E> {
    /// A stage among `group`, whose chunks lie as `route` says; an activation between stages has
    /// `boundary` elements.
    pub fn new(backend: B, group: C, route: Route, boundary: usize) -> Self {
        Self {
            backend,
            group,
            route,
            boundary,
            in_flight: BTreeMap::new(),
            held: Held::new(),
        }
    }

    /// The group of pipeline ranks.
    pub fn group(&self) -> &C {
        &self.group
    }

    /// Performs a step. It is over when all its sends are.
    ///
    /// Where the worker fails, the sends already under way are still waited for (they are whole,
    /// and the neighbours may be taking them), and what they say is dropped. Where the pipeline's
    /// own messages fail, nothing more is waited for. Either way the first error is returned and
    /// no buffer stays behind.
    ///
    /// # Errors
    /// The worker's; what collectives and the backend report; [`Error::Missing`] where an action
    /// lacks its buffer; [`Error::Left`] where a buffer was taken by nobody.
    pub fn run<W: Work<B, E>>(
        &mut self,
        actions: &[Action],
        worker: &mut W,
    ) -> Result<(), W::Error> {
        for action in actions {
            worker.on_action(action, Moment::Begin);
            if let Err(failure) = self.perform(action, worker) {
                self.held = Held::new();
                return Err(match failure {
                    Failure::Worker(error) => {
                        let _ = self.finish();
                        error
                    }
                    Failure::Wire(error) => {
                        self.in_flight.clear();
                        error.into()
                    }
                });
            }
            worker.on_action(action, Moment::End);
        }
        self.finish()?;
        self.held.empty().map_err(Into::into)
    }

    fn perform<W: Work<B, E>>(
        &mut self,
        action: &Action,
        worker: &mut W,
    ) -> Result<(), Failure<W::Error>> {
        let missing = |what| {
            own(Error::Missing {
                action: *action,
                what,
            })
        };
        let work = Failure::Worker;
        match *action {
            Action::Gather { chunk } => worker.gather(chunk).map_err(work),
            Action::Release { chunk } => worker.release(chunk).map_err(work),
            Action::ReduceGrads { chunk, bucket } => {
                worker.reduce_grads(chunk, bucket).map_err(work)
            }
            Action::BackwardWeight { mb, chunk, segment } => {
                worker.backward_weight(mb, chunk, segment).map_err(work)
            }
            Action::RecvForward { mb, chunk, from } => {
                let tag = tag(Direction::Forward, mb, self.place(chunk));
                let input = self.receive::<W>(from, tag)?;
                self.held.inputs.insert((mb, chunk), input);
                Ok(())
            }
            Action::RecvBackward { mb, chunk, from } => {
                let tag = tag(Direction::Backward, mb, self.place(chunk) + 1);
                let dout = self.receive::<W>(from, tag)?;
                self.held.gradients.insert((mb, chunk), (0, dout));
                Ok(())
            }
            Action::Forward { mb, chunk } => {
                let before = self.route.before(self.group.rank(), chunk);
                let input = match before {
                    Some((stage, before)) if stage == self.group.rank() => {
                        self.held.outputs.remove(&(mb, before))
                    }
                    _ => self.held.inputs.remove(&(mb, chunk)),
                };
                if input.is_none() && before.is_some() {
                    return Err(missing("an input activation"));
                }
                if let Some(output) = worker.forward(mb, chunk, input).map_err(work)? {
                    self.held.outputs.insert((mb, chunk), output);
                }
                Ok(())
            }
            Action::BackwardInput { mb, chunk, segment } => {
                let after = self.route.after(self.group.rank(), chunk);
                let dout = match after {
                    _ if segment > 0 => self.taken((mb, chunk), |at| at == segment),
                    Some((stage, after)) if stage == self.group.rank() => {
                        self.taken((mb, after), |at| at > 0)
                    }
                    _ => self.taken((mb, chunk), |at| at == 0),
                };
                if dout.is_none() && (segment > 0 || after.is_some()) {
                    return Err(missing("an output gradient"));
                }
                let din = worker.backward_input(mb, chunk, segment, dout);
                if let Some(din) = din.map_err(work)? {
                    let next = (segment + 1, din);
                    self.held.gradients.insert((mb, chunk), next);
                }
                Ok(())
            }
            Action::SendForward { mb, chunk, to } => {
                let output = self.held.outputs.remove(&(mb, chunk));
                let output = output.ok_or_else(|| missing("an output activation"))?;
                let tag = tag(Direction::Forward, mb, self.place(chunk) + 1);
                self.send((to, Direction::Forward), tag, output)
                    .map_err(Failure::Wire)
            }
            Action::SendBackward { mb, chunk, to } => {
                let din = self.taken((mb, chunk), |at| at > 0);
                let din = din.ok_or_else(|| missing("an input gradient"))?;
                let tag = tag(Direction::Backward, mb, self.place(chunk));
                self.send((to, Direction::Backward), tag, din)
                    .map_err(Failure::Wire)
            }
        }
    }

    /// Where a chunk of this stage lies along the model.
    fn place(&self, chunk: usize) -> usize {
        self.route.place(self.group.rank(), chunk)
    }

    /// The gradient of a chunk on its way, where the segment that takes it next is the right one.
    fn taken(&mut self, key: (usize, usize), right: impl Fn(usize) -> bool) -> Option<B::Buf<E>> {
        let (at, _) = self.held.gradients.get(&key)?;
        if !right(*at) {
            return None;
        }
        self.held.gradients.remove(&key).map(|(_, dout)| dout)
    }

    fn receive<W: Work<B, E>>(
        &self,
        from: usize,
        tag: u64,
    ) -> Result<B::Buf<E>, Failure<W::Error>> {
        let buf = self.backend.alloc(Tag::Activation, self.boundary);
        let buf = buf.map_err(|error| Failure::Worker(error.into()))?;
        let pending = self.group.start_recv(from, tag, buf);
        pending
            .and_then(|pending| pending.wait_on(&self.backend, Queue::Compute))
            .map_err(Failure::Wire)
    }

    fn send(
        &mut self,
        lane: (usize, Direction),
        tag: u64,
        buf: B::Buf<E>,
    ) -> Result<(), WireError> {
        let line = self.in_flight.entry(lane).or_default();
        while line.len() >= IN_FLIGHT {
            if let Some(oldest) = line.pop_front() {
                oldest.wait_host()?;
            }
        }
        let after = self.backend.record(Queue::Compute);
        line.push_back(self.group.start_send(lane.0, tag, buf, after)?);
        Ok(())
    }

    /// Waits for every send; the first error stops the waiting.
    fn finish(&mut self) -> Result<(), WireError> {
        let lines = core::mem::take(&mut self.in_flight);
        for pending in lines.into_values().flatten() {
            pending.wait_host()?;
        }
        Ok(())
    }
}

/// Who failed: after the wire did, there is no use in waiting for it.
enum Failure<E> {
    Worker(E),
    Wire(WireError),
}

fn own<E: From<Error>>(error: Error) -> Failure<E> {
    Failure::Worker(error.into())
}

impl<B: Backend, E: Wire> Held<B, E> {
    fn new() -> Self {
        Self {
            inputs: BTreeMap::new(),
            outputs: BTreeMap::new(),
            gradients: BTreeMap::new(),
        }
    }

    /// Drops what is held; an error where that is anything.
    fn empty(&mut self) -> Result<(), Error> {
        let held = core::mem::replace(self, Self::new());
        let first = [
            ("an input activation", held.inputs.keys().next().copied()),
            ("an output activation", held.outputs.keys().next().copied()),
            ("a gradient", held.gradients.keys().next().copied()),
        ];
        for (what, key) in first {
            if let Some((mb, chunk)) = key {
                return Err(Error::Left { what, mb, chunk });
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::collections::BTreeSet;

    #[test]
    fn tags_are_unique() {
        let mut seen = BTreeSet::new();
        for direction in [Direction::Forward, Direction::Backward] {
            for mb in 0..50 {
                for boundary in 0..5 {
                    assert!(seen.insert(tag(direction, mb, boundary)));
                }
            }
        }
    }
}
