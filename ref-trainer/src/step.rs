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

use quintet_collectives::ReduceOp;
use quintet_kernels::{Collectives, Scalar, Tag};
use quintet_parallel_layers::Ctx;
use quintet_parallel_layers::pipeline::StageTime;
use quintet_planner::model::StageLayer;
use quintet_zero::{clip_factor, grad_norm};

use crate::data::{Sample, Samples};
use crate::failure::Failure;
use crate::groups::Counted;
use crate::load::Load;
use crate::microbatch::DropoutKey;
use crate::model::Device;
use crate::rank::{Chunk, Rank};
use crate::spans::{Open, Recorder, What};

mod pass;

use pass::{Pass, Savings, lending};

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
    /// The most bytes that forward had saved at once.
    pub saved: u64,
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
            savings: Savings::default(),
            loss: 0.0,
            clock: 0.0,
            recorder: self.recorder.as_deref().filter(|r| r.is_on()),
            begun: None,
        };
        let phase = open(&self.recorder, "pipeline");
        self.stage.run(&self.actions, &mut pass)?;
        drop(phase);
        let (loss, times, load, choices) = (pass.loss, pass.times, pass.load, pass.choices);
        let saved = pass.savings.most as u64;
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
            saved,
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
            savings: Savings::default(),
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

/// What is known by microbatch of this replica, by microbatch of the step.
fn of_step<T>(mine: BTreeMap<(usize, usize), T>, first: usize) -> BTreeMap<(usize, usize), T> {
    let of = |((mb, layer), x)| ((first + mb, layer), x);
    mine.into_iter().map(of).collect()
}

/// As [`Rank::phase`], where a part of the rank is lent.
fn open(recorder: &Option<Arc<Recorder>>, name: &'static str) -> Option<Open> {
    recorder.as_ref()?.open(What::Phase(name))
}
