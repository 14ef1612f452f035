//! What the pipeline's actions do in the trainer.

use std::collections::BTreeMap;
use std::time::Instant;

use quintet_kernels::{Collectives, Float, Scalar, Tag};
use quintet_parallel_layers::Ctx;
use quintet_parallel_layers::pipeline::{Action, Moment, StageTime, Work};
use rustix::time::{ClockId, clock_gettime};

use crate::data::Sample;
use crate::failure::Failure;
use crate::groups::Groups;
use crate::lending::Lending;
use crate::load::Load;
use crate::microbatch::{DropoutKey, upload};
use crate::model::{Device, Forward, Lent, LentGrads, StageSaved};
use crate::rank::Chunk;
use crate::seat::Seat;
use crate::spans::{Recorder, What};

/// The work of a stage during one step: what the pipeline's actions act on.
pub(super) struct Pass<'a, B: Device, C: Collectives<B>, E: Scalar> {
    pub(super) ctx: Ctx<'a, B, C>,
    pub(super) seat: Seat,
    pub(super) groups: &'a Groups<C>,
    pub(super) chunks: &'a mut [Chunk<B, C, E>],
    /// By chunk.
    pub(super) lending: Vec<Lendings<B, C, E>>,
    pub(super) actions: &'a [Action],
    /// Actions that have begun.
    pub(super) at: usize,
    /// An evaluation saves nothing for backward.
    pub(super) training: bool,
    /// None where nothing is let go.
    pub(super) dropout: Option<DropoutKey>,
    pub(super) microbatches: &'a [Vec<Sample>],
    pub(super) weight: f64,
    pub(super) share: f64,
    pub(super) load: Load,
    /// By microbatch and layer.
    pub(super) choices: BTreeMap<(usize, usize), Vec<i32>>,
    /// By microbatch and chunk.
    pub(super) saved: BTreeMap<(usize, usize), StageSaved<B, C, E>>,
    pub(super) savings: Savings,
    pub(super) loss: f64,
    pub(super) clock: f64,
    pub(super) times: Vec<StageTime>,
    /// Who records, where somebody does.
    pub(super) recorder: Option<&'a Recorder>,
    /// When the action under way began; only where that is recorded.
    pub(super) begun: Option<Instant>,
}

impl<B: Device, C: Collectives<B>, E: Scalar> Work<B, E> for Pass<'_, B, C, E> {
    type Error = Failure;

    fn gather(&mut self, chunk: usize) -> Result<(), Failure> {
        match self.first_segment(chunk) {
            Some(first) => self.begin(chunk, first),
            None => Ok(()),
        }
    }

    fn release(&mut self, chunk: usize) -> Result<(), Failure> {
        self.lending[chunk]
            .own
            .end(&mut self.chunks[chunk].params)?;
        self.lending[chunk].table.end(&mut self.chunks[0].params)
    }

    fn forward(
        &mut self,
        mb: usize,
        chunk: usize,
        input: Option<B::Buf<E>>,
    ) -> Result<Option<B::Buf<E>>, Failure> {
        let (dev, samples) = (self.ctx.device, &self.microbatches[mb]);
        let weights = (self.weight, self.share);
        let mut batch = upload::<B, E>(dev, samples, weights, &self.seat)?;
        let drawn = self
            .dropout
            .map(|of| of.upload(dev, mb, samples, &self.seat));
        batch.drawn = drawn.transpose()?;
        let mut done = Forward::begin(batch, input);
        for segment in (0..self.chunks[chunk].segments.len()).rev() {
            self.enter(chunk, segment, segment.checked_sub(1))?;
            let Chunk {
                model, segments, ..
            } = &self.chunks[chunk];
            let params = lent(self.chunks, chunk);
            let before = settled(dev, &done);
            done = model.forward(&self.ctx, &params, segments[segment].clone(), done)?;
            if self.training {
                let saved = settled(dev, &done).saturating_sub(before);
                self.savings.add((mb, chunk, segment), saved);
            }
            self.leave(chunk, segment)?;
        }
        if let Some(loss_t) = done.loss_t.filter(|_| self.ctx.tp.rank() == 0) {
            self.loss += self.total(&loss_t)?;
        }
        if self.training {
            for (layer, routing) in done.routing {
                self.load.add(layer, &routing, self.share);
                self.choices.insert((mb, layer), routing.choices);
            }
            self.saved.insert((mb, chunk), done.saved);
        }
        Ok(done.output)
    }

    fn backward_input(
        &mut self,
        mb: usize,
        chunk: usize,
        segment: usize,
        dout: Option<B::Buf<E>>,
    ) -> Result<Option<B::Buf<E>>, Failure> {
        let last = self.chunks[chunk].segments.len();
        self.enter(
            chunk,
            segment,
            Some(segment + 1).filter(|&next| next < last),
        )?;
        let saved = self.saved.get_mut(&(mb, chunk)).ok_or_else(unsaved)?;
        let params = lent(self.chunks, chunk);
        let Chunk {
            model, segments, ..
        } = &self.chunks[chunk];
        let run = segments[segment].clone();
        let din = model.backward_input(&self.ctx, &params, saved, run, dout)?;
        self.leave(chunk, segment)?;
        Ok(din)
    }

    fn backward_weight(&mut self, mb: usize, chunk: usize, segment: usize) -> Result<(), Failure> {
        let saved = self.saved.get_mut(&(mb, chunk)).ok_or_else(unsaved)?;
        let (before, rest) = self.chunks.split_at_mut(chunk);
        let Chunk {
            model,
            segments,
            borrows_table,
            grads: own,
            ..
        } = &mut rest[0];
        let lender = before.first_mut().filter(|_| *borrows_table);
        let table = lender.map(|first| &mut first.grads);
        let mut grads = LentGrads { own, table };
        model.backward_weight(&self.ctx, saved, segments[segment].clone(), &mut grads)?;
        self.savings.sub((mb, chunk, segment));
        if segment + 1 == segments.len() {
            self.saved.remove(&(mb, chunk));
        }
        Ok(())
    }

    fn reduce_grads(&mut self, chunk: usize, bucket: usize) -> Result<(), Failure> {
        Ok(self.chunks[chunk].grads.reduce(self.groups, bucket)?)
    }

    fn on_action(&mut self, action: &Action, moment: Moment) {
        if let Some(recorder) = self.recorder {
            match (moment, self.begun.take()) {
                (Moment::End, Some(begun)) => {
                    recorder.keep(What::Action(*action), begun, Instant::now());
                }
                _ => self.begun = Some(Instant::now()),
            }
        }
        let now = thread_seconds();
        self.at += usize::from(moment == Moment::Begin);
        if moment == Moment::End {
            let time = now - self.clock;
            match *action {
                Action::Forward { chunk, .. } => self.times[chunk].forward += time,
                Action::BackwardInput { chunk, .. } => self.times[chunk].backward_input += time,
                Action::BackwardWeight { chunk, .. } => self.times[chunk].backward_weight += time,
                _ => {}
            }
        }
        self.clock = now;
    }
}

impl<B: Device, C: Collectives<B>, E: Scalar> Pass<'_, B, C, E> {
    /// Starts to gather a segment of a chunk, and the table that its head borrows of chunk 0.
    fn begin(&mut self, chunk: usize, segment: usize) -> Result<(), Failure> {
        let (groups, lending) = (self.groups, &mut self.lending[chunk]);
        let params = &mut self.chunks[chunk].params;
        lending.own.begin(params, groups, segment)?;
        if let Some(table) = table_segment(self.chunks, chunk, segment) {
            let params = &mut self.chunks[0].params;
            lending.table.begin(params, groups, table)?;
        }
        Ok(())
    }

    /// Waits for a segment that is to be used now, and starts to gather the next.
    fn enter(&mut self, chunk: usize, segment: usize, next: Option<usize>) -> Result<(), Failure> {
        self.begin(chunk, segment)?;
        let lending = &mut self.lending[chunk];
        lending.own.ready(&mut self.chunks[chunk].params, segment)?;
        if let Some(table) = table_segment(self.chunks, chunk, segment) {
            lending.table.ready(&mut self.chunks[0].params, table)?;
        }
        next.map_or(Ok(()), |next| self.begin(chunk, next))
    }

    /// Lets a segment go that has been used.
    fn leave(&mut self, chunk: usize, segment: usize) -> Result<(), Failure> {
        let lending = &mut self.lending[chunk];
        lending.own.leave(&mut self.chunks[chunk].params, segment)?;
        match table_segment(self.chunks, chunk, segment) {
            Some(table) => lending.table.leave(&mut self.chunks[0].params, table),
            None => Ok(()),
        }
    }

    /// The segment that the pass which begins now uses first; none where it uses none.
    fn first_segment(&self, of: usize) -> Option<usize> {
        let rest = self.actions.get(self.at..).unwrap_or_default();
        rest.iter().find_map(|action| match *action {
            Action::Forward { chunk, .. } if chunk == of => {
                Some(self.chunks[of].segments.len().checked_sub(1))
            }
            Action::BackwardInput { chunk, segment, .. } if chunk == of => Some(Some(segment)),
            Action::Release { chunk } if chunk == of => Some(None),
            _ => None,
        })?
    }

    /// The sum of the token losses, in f64 and token order.
    fn total(&self, loss_t: &B::Buf<E::Acc>) -> Result<f64, Failure> {
        let mut host = vec![E::Acc::from_f64(0.0); B::len(B::whole(loss_t))];
        self.ctx.device.download(B::whole(loss_t), &mut host)?;
        Ok(host.iter().map(|loss| loss.to_f64()).sum())
    }
}

/// The parameters of a chunk, and of whom it borrows.
fn lent<B: Device, C: Collectives<B>, E: Scalar>(
    chunks: &[Chunk<B, C, E>],
    chunk: usize,
) -> Lent<'_, B, E> {
    let (own, first) = (&chunks[chunk], chunks.first());
    let lender = first.filter(|_| own.borrows_table);
    Lent {
        own: &own.params,
        table: lender.map(|first| &first.params),
    }
}

/// What is gathered for the passes of one chunk.
pub(super) struct Lendings<B: Device, C: Collectives<B>, E: Scalar> {
    own: Lending<B, C, E>,
    /// Of chunk 0, where that holds the table of this one's head.
    table: Lending<B, C, E>,
}

/// Nothing gathered yet of any chunk.
pub(super) fn lending<B: Device, C: Collectives<B>, E: Scalar>(
    chunks: &[Chunk<B, C, E>],
) -> Vec<Lendings<B, C, E>> {
    let none = |_| Lendings {
        own: Lending::default(),
        table: Lending::default(),
    };
    chunks.iter().map(none).collect()
}

/// The segment of chunk 0 in which the table lies that a segment's head borrows: a chunk's head is
/// in segment 0, the embedding in the last one of chunk 0.
fn table_segment<B: Device, C: Collectives<B>, E: Scalar>(
    chunks: &[Chunk<B, C, E>],
    chunk: usize,
    segment: usize,
) -> Option<usize> {
    let borrows = segment == 0 && chunks[chunk].borrows_table;
    chunks[0].segments.len().checked_sub(1).filter(|_| borrows)
}

/// Bytes of activations that are there, but for what is about to be passed on.
fn settled<B: Device, C: Collectives<B>, E: Scalar>(
    device: &B,
    so_far: &Forward<B, C, E>,
) -> usize {
    let output = so_far.output.as_ref().map_or(0, |x| B::len(B::whole(x)));
    let loss = so_far.loss_t.as_ref().map_or(0, |x| B::len(B::whole(x)));
    let passing = output * size_of::<E>() + loss * size_of::<E::Acc>();
    device.meter().now(Tag::Activation).saturating_sub(passing)
}

/// What forward has saved for backward, as allocations were counted.
#[derive(Debug, Default)]
pub(super) struct Savings {
    /// By microbatch, chunk and segment.
    bytes: BTreeMap<(usize, usize, usize), usize>,
    now: usize,
    pub(super) most: usize,
}

impl Savings {
    fn add(&mut self, of: (usize, usize, usize), bytes: usize) {
        self.bytes.insert(of, bytes);
        self.now += bytes;
        self.most = self.most.max(self.now);
    }

    fn sub(&mut self, of: (usize, usize, usize)) {
        self.now -= self.bytes.remove(&of).unwrap_or(0);
    }
}

fn unsaved() -> Failure {
    Failure::aborted("backward was asked for a microbatch that forward has not seen")
}

/// CPU time of this thread, in seconds: what work costs, whoever else has the core.
fn thread_seconds() -> f64 {
    let now = clock_gettime(ClockId::ThreadCPUTime);
    now.tv_sec as f64 + now.tv_nsec as f64 * 1e-9
}
