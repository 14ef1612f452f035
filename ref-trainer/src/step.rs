//! One training step of one rank, all of it.
//!
//! ```text
//! count      valid tokens of the whole batch                all-reduce over dp x cp
//! run        the schedule's actions: forward, backward, sends; a bucket whose last microbatch
//!            is through starts its reduction while earlier layers still run backward (ZeRO-2, 3:
//!            after each microbatch); ZeRO-3 gathers parameters one segment ahead of their use
//! finish     wait for the reductions
//! norm       sum of squares, each logical element once      all-reduce over the world
//! update     optimizer on what this rank owns, then parameters to where they are used
//! ```

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Instant;

use quintet_collectives::ReduceOp;
use quintet_kernels::{Collectives, Float, Scalar, Tag};
use quintet_parallel_layers::Ctx;
use quintet_parallel_layers::pipeline::{Action, Moment, StageTime, Work};
use quintet_planner::model::StageLayer;
use quintet_zero::{clip_factor, grad_norm};
use rustix::time::{ClockId, clock_gettime};

use crate::data::{Sample, Samples};
use crate::failure::Failure;
use crate::groups::{Counted, Groups};
use crate::lending::Lending;
use crate::load::Load;
use crate::microbatch::{DropoutKey, upload};
use crate::model::{Device, Forward, Lent, LentGrads, StageSaved};
use crate::rank::{Chunk, Rank};
use crate::seat::Seat;
use crate::spans::{Open, Recorder, What};

/// What the forward and backward passes of a step leave, equal on every rank but for times and choices.
#[derive(Debug, Clone, PartialEq)]
pub struct Gradients {
    /// Mean loss in nats per valid token of the whole batch; 0 where there is none.
    pub loss: f64,
    /// Valid tokens of the whole batch.
    pub count: f64,
    /// Global norm of the gradient, before clipping.
    pub norm: f64,
    /// What routers did; empty for a model without experts.
    pub load: Load,
    /// Whether some rank was asked to stop.
    pub stop: bool,
    /// By microbatch of the step and layer: which experts this rank's tokens chose.
    pub choices: BTreeMap<(usize, usize), Vec<i32>>,
    /// CPU time of the passes of each of this rank's chunks, summed over the step.
    pub times: Vec<StageTime>,
}

impl<B: Device, C: Collectives<B> + Counted, E: Scalar> Rank<'_, B, C, E> {
    /// Forward, backward and the sums of the gradients. `stop` asks all ranks to stop together.
    ///
    /// # Errors
    /// Where a kernel or a peer fails, or a loss or gradient is not finite (on all ranks alike,
    /// naming the parameter and the rank).
    pub fn accumulate(
        &mut self,
        samples: &Samples,
        step: u64,
        stop: bool,
    ) -> Result<Gradients, Failure> {
        let micro = self.job.batch.micro_batch;
        let phase = self.phase("data");
        let mine: Vec<Vec<Sample>> = self
            .microbatches()
            .map(|m| samples.microbatch(step, m as u64, micro))
            .collect();
        let valid: usize = mine.iter().flatten().map(|s| self.seat.valid(s)).sum();
        drop(phase);
        let phase = self.phase("token count");
        let count = self.sum(&self.groups.data, [valid as f64])?[0];
        self.chunks.iter_mut().try_for_each(|c| c.grads.zero())?;
        drop(phase);
        let dropout = (self.job.model.dropout > 0.0).then(|| DropoutKey {
            seed: self.job.seed,
            step,
            first: self.microbatches().start,
        });
        let mut pass = Pass {
            ctx: Ctx {
                device: &self.device,
                tp: &self.groups.tp,
                replica: &self.groups.replica,
                ep: &self.groups.ep,
                etp: &self.groups.etp,
                cp: self.groups.context(),
            },
            seat: self.seat,
            groups: &self.groups,
            lending: lending(&self.chunks),
            times: vec![StageTime::default(); self.chunks.len()],
            chunks: &mut self.chunks,
            actions: &self.actions,
            at: 0,
            training: true,
            dropout,
            microbatches: &mine,
            weight: if count > 0.0 { 1.0 / count } else { 0.0 },
            share: 1.0 / self.job.batch.microbatches() as f64,
            load: Load::new(&self.job.model),
            choices: BTreeMap::new(),
            saved: BTreeMap::new(),
            loss: 0.0,
            clock: 0.0,
            recorder: self.recorder.as_deref().filter(|r| r.is_on()),
            begun: None,
        };
        let phase = open(&self.recorder, "pipeline");
        self.stage.run(&self.actions, &mut pass)?;
        drop(phase);
        let (loss, times, load, choices) = (pass.loss, pass.times, pass.load, pass.choices);
        let phase = self.phase("gradient sums");
        for chunk in &mut self.chunks {
            chunk.grads.finish(&self.groups)?;
        }
        drop(phase);
        let phase = self.phase("loss and norm");
        let mut report = vec![loss, f64::from(u8::from(stop))];
        report.extend(load.numbers());
        let report = self.sum_all(&self.groups.world, &report)?;
        let (loss, stop) = (report[0], report[1]);
        let load = Load::from_numbers(&self.job.model, &report[2..]);
        self.load = Some(load.clone());
        let loss = if count > 0.0 { loss / count } else { 0.0 };
        let norm = grad_norm(&self.device, &self.grads(), &self.groups)?;
        drop(phase);
        if !loss.is_finite() {
            return Err(Failure::aborted(format!(
                "the loss of step {step} is {loss}, though every gradient is finite"
            )));
        }
        Ok(Gradients {
            loss,
            count,
            norm,
            load,
            stop: stop > 0.0,
            choices: of_step(choices, self.microbatches().start),
            times,
        })
    }

    /// The optimizer's step on what [`Rank::accumulate`] summed.
    ///
    /// # Errors
    /// Where a kernel or a peer fails.
    pub fn update(&mut self, lr: f64, norm: f64) -> Result<(), Failure> {
        self.move_bias()?;
        let _phase = self.phase("optimizer");
        let limit = self.job.optimizer.clip_grad;
        let scale = if limit > 0.0 {
            clip_factor(norm, limit)
        } else {
            1.0
        };
        for Chunk {
            params,
            grads,
            optimizer,
            ..
        } in &mut self.chunks
        {
            optimizer.step(params, grads, &self.groups, lr, scale)?;
        }
        Ok(())
    }

    /// Moves the bias of the routers' choice by the counts of the step: once, and on every rank
    /// that holds it alike, for all have the same counts. No gradient reaches it; where there are
    /// master weights the optimizer's step carries it to where it is used.
    fn move_bias(&mut self) -> Result<(), Failure> {
        let moe = self.job.model.moe.filter(|moe| moe.selection_bias);
        let (Some(moe), Some(load)) = (moe, self.load.take()) else {
            return Ok(());
        };
        for Chunk {
            model,
            params,
            optimizer,
            ..
        } in &mut self.chunks
        {
            for layer in &model.layers {
                let StageLayer::Block(block) = layer else {
                    continue;
                };
                let Some(name) = block.selection_bias() else {
                    continue;
                };
                let layout = params.layout().clone();
                for entry in layout.entries().iter().filter(|e| e.spec.name == name) {
                    let steps: Vec<f64> = load.bias_steps(block.index()).collect();
                    optimizer.shift(params, entry, |expert| {
                        moe.bias_update_rate * steps.get(expert).copied().unwrap_or(0.0)
                    })?;
                }
            }
        }
        Ok(())
    }

    /// Sum of the token losses over microbatches, forward alone, and the number of valid tokens,
    /// over all ranks. Every replica must be given the same number of microbatches, each of the
    /// job's shape.
    ///
    /// # Errors
    /// As [`Rank::accumulate`].
    pub fn evaluate(&mut self, microbatches: &[Vec<Sample>]) -> Result<(f64, f64), Failure> {
        let samples = microbatches.iter().flatten();
        let valid: usize = samples.map(|s| self.seat.valid(s)).sum();
        let actions = self
            .schedule
            .forward_only(self.stage_index(), microbatches.len());
        let mut pass = Pass {
            ctx: Ctx {
                device: &self.device,
                tp: &self.groups.tp,
                replica: &self.groups.replica,
                ep: &self.groups.ep,
                etp: &self.groups.etp,
                cp: self.groups.context(),
            },
            seat: self.seat,
            groups: &self.groups,
            lending: lending(&self.chunks),
            times: vec![StageTime::default(); self.chunks.len()],
            chunks: &mut self.chunks,
            actions: &actions,
            at: 0,
            training: false,
            dropout: None,
            microbatches,
            weight: 1.0,
            share: 1.0,
            load: Load::default(),
            choices: BTreeMap::new(),
            saved: BTreeMap::new(),
            loss: 0.0,
            clock: 0.0,
            recorder: self.recorder.as_deref().filter(|r| r.is_on()),
            begun: None,
        };
        self.stage.run(&actions, &mut pass)?;
        let loss = pass.loss;
        // Each token is counted once: on the rank that also reports its loss.
        let last = self.takes_the_loss() && self.groups.tp.rank() == 0;
        let valid = if last { valid as f64 } else { 0.0 };
        let [loss, valid] = self.sum(&self.groups.world, [loss, valid])?;
        Ok((loss, valid))
    }

    /// The sum of a few numbers over a group.
    pub(crate) fn sum<const N: usize>(
        &self,
        group: &C,
        values: [f64; N],
    ) -> Result<[f64; N], Failure> {
        let mut sum = [0.0; N];
        sum.copy_from_slice(&self.sum_all(group, &values)?);
        Ok(sum)
    }

    /// The sum of numbers over a group.
    fn sum_all(&self, group: &C, values: &[f64]) -> Result<Vec<f64>, Failure> {
        let mut buf = self.device.upload(Tag::Scratch, values)?;
        if group.world() > 1 {
            group.all_reduce(B::whole_mut(&mut buf), ReduceOp::Sum)?;
        }
        let mut sum = vec![0.0; values.len()];
        self.device.download(B::whole(&buf), &mut sum)?;
        Ok(sum)
    }
}

/// The work of a stage during one step: what the pipeline's actions act on.
struct Pass<'a, B: Device, C: Collectives<B>, E: Scalar> {
    ctx: Ctx<'a, B, C>,
    seat: Seat,
    groups: &'a Groups<C>,
    chunks: &'a mut [Chunk<B, C, E>],
    /// By chunk.
    lending: Vec<Lendings<B, C, E>>,
    actions: &'a [Action],
    /// Actions that have begun.
    at: usize,
    /// An evaluation saves nothing for backward.
    training: bool,
    /// None where nothing is let go.
    dropout: Option<DropoutKey>,
    microbatches: &'a [Vec<Sample>],
    weight: f64,
    share: f64,
    load: Load,
    /// By microbatch and layer.
    choices: BTreeMap<(usize, usize), Vec<i32>>,
    /// By microbatch and chunk.
    saved: BTreeMap<(usize, usize), StageSaved<B, C, E>>,
    loss: f64,
    clock: f64,
    times: Vec<StageTime>,
    /// Who records, where somebody does.
    recorder: Option<&'a Recorder>,
    /// When the action under way began; only where that is recorded.
    begun: Option<Instant>,
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
            done = model.forward(&self.ctx, &params, segments[segment].clone(), done)?;
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

/// What is known by microbatch of this replica, by microbatch of the step.
fn of_step<T>(mine: BTreeMap<(usize, usize), T>, first: usize) -> BTreeMap<(usize, usize), T> {
    let of = |((mb, layer), x)| ((first + mb, layer), x);
    mine.into_iter().map(of).collect()
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
struct Lendings<B: Device, C: Collectives<B>, E: Scalar> {
    own: Lending<B, C, E>,
    /// Of chunk 0, where that holds the table of this one's head.
    table: Lending<B, C, E>,
}

/// Nothing gathered yet of any chunk.
fn lending<B: Device, C: Collectives<B>, E: Scalar>(
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

/// As [`Rank::phase`], where a part of the rank is lent.
fn open(recorder: &Option<Arc<Recorder>>, name: &'static str) -> Option<Open> {
    recorder.as_ref()?.open(What::Phase(name))
}

fn unsaved() -> Failure {
    Failure::aborted("backward was asked for a microbatch that forward has not seen")
}

/// CPU time of this thread, in seconds: what work costs, whoever else has the core.
fn thread_seconds() -> f64 {
    let now = clock_gettime(ClockId::ThreadCPUTime);
    now.tv_sec as f64 + now.tv_nsec as f64 * 1e-9
}
