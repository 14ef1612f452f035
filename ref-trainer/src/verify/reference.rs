//! The oracle's steps, how far roundings take them, and how far two runs are apart.

use std::collections::BTreeMap;

use quintet_planner::traffic::Routing;

use crate::compare::{
    Difference, Tensors, compare, compare_sized, relative_scalar, relative_scalar_above,
};
use crate::data::Samples;
use crate::failure::Failure;
use crate::job::{Job, OptimizerKind};
use crate::load::Load;
use crate::oracle::{self, AdamW, Params, Rounding, Sgd, Ties, Way};
use crate::record::{Choices, Step};
use crate::schedule_lr::learning_rate;
use crate::tolerance::{Each, SEEDS, SEEDS_OF_TENSORS, floor, tie, units};

/// The oracle's steps, where its tokens went in each, and how many choices it made as told because
/// they were ties; `told` are the choices of a layout in each step.
pub(super) fn oracle_steps(
    job: &Job,
    samples: &Samples,
    told: &[Choices],
) -> Result<(Vec<Step>, Vec<Routing>, u64), Failure> {
    let mut params = first_params(job);
    let mut optimizer = OracleOptimizer::new(job);
    let (mut steps, mut routing, mut ties) = (Vec::new(), Vec::new(), 0);
    for step in 1..=job.steps {
        optimizer.told = told.get(step as usize - 1).cloned();
        steps.push(optimizer.step(job, samples, step, &mut params)?);
        let kept = std::mem::take(&mut optimizer.routed.kept);
        routing.push(Routing { kept });
        ties += optimizer.routed.ties;
    }
    Ok((steps, routing, ties))
}

/// The oracle's parameters before the first step. Where masters are kept they begin alike to the
/// bit, for what is used is their rounding.
fn first_params(job: &Job) -> Params {
    let mut params = oracle::init_random(&job.model, job.seed);
    if job.dtype.has_masters() {
        let masters = params.values_mut().flatten();
        masters.for_each(|w| *w = f64::from(*w as f32));
    }
    params
}

/// How far the oracle's steps move where each value on the way, and each parameter, is rounded once
/// as in the job's type. `told` are the choices of a layout in each step.
///
/// # Errors
/// Where the oracle refuses the model or the data.
pub fn scatter(
    job: &Job,
    samples: &Samples,
    truth: &[Step],
    told: &[Choices],
) -> Result<Each, Failure> {
    condition(job, truth, |rounding| {
        let mut params = first_params(job);
        params.values_mut().for_each(|w| rounding.kept(w));
        let mut optimizer = OracleOptimizer {
            rounding,
            ..OracleOptimizer::new(job)
        };
        let step = |step| {
            optimizer.told = told.get(step as usize - 1).cloned();
            optimizer.step(job, samples, step, &mut params)
        };
        (1..=job.steps).map(step).collect()
    })
}

/// The largest distances from `truth` over [`SEEDS`] draws of the roundings with which `again` does
/// its steps again; those of tensors over the first [`SEEDS_OF_TENSORS`].
///
/// # Errors
/// What `again` fails with.
pub fn condition(
    job: &Job,
    truth: &[Step],
    again: impl Fn(Rounding) -> Result<Vec<Step>, Failure>,
) -> Result<Each, Failure> {
    let mut most = Each::default();
    let (unit, wide) = units(job.dtype);
    for seed in 0..SEEDS {
        let steps = again(Rounding::of(unit, wide, seed))?;
        let moved = distances(job, &steps, truth).0;
        let norm = || {
            // It moves by no more than the gradients together; by how much less is a matter of luck.
            let relative = steps.iter().zip(truth).map(|(x, r)| {
                let least = floor(job.dtype) * balance(job);
                apart(&x.grads, &r.grads) / if r.norm < least { least } else { r.norm }
            });
            relative.filter(|x| !x.is_nan()).fold(0.0, f64::max)
        };
        most = most.max(if seed < SEEDS_OF_TENSORS {
            Each {
                norm: norm(),
                ..moved
            }
        } else {
            let Each { loss, aux, .. } = moved;
            Each {
                loss,
                aux,
                ..Each::default()
            }
        });
    }
    if truth.iter().any(|step| all_cancels(job, step)) {
        // The oracle's terms may cancel to the last bit where those of a layout do not.
        let terms = unit / floor(job.dtype);
        (most.grads, most.norm) = (most.grads.max(terms), most.norm.max(terms));
    }
    Ok(most)
}

/// The oracle's optimizer, as the job asks for it.
pub struct OracleOptimizer {
    /// The rule and its state.
    pub rule: OracleRule,
    /// What routers did in the last step.
    pub routed: oracle::Routed,
    /// What happens to values on the way.
    pub rounding: Rounding,
    /// Choices of experts that the next step makes where they are ties.
    pub told: Option<Choices>,
}

/// The oracle's rules.
pub enum OracleRule {
    /// Plain descent.
    Sgd(Sgd),
    /// AdamW with its moments.
    AdamW(Box<AdamW>),
}

impl OracleOptimizer {
    /// At the first step.
    #[must_use]
    pub fn new(job: &Job) -> Self {
        let o = &job.optimizer;
        let rule = match o.kind {
            OptimizerKind::Sgd => OracleRule::Sgd(Sgd::new(&job.model, o.weight_decay)),
            OptimizerKind::AdamW => {
                let betas = (o.beta1, o.beta2);
                OracleRule::AdamW(Box::new(AdamW::new(
                    &job.model,
                    betas,
                    o.eps,
                    o.weight_decay,
                )))
            }
        };
        Self {
            rule,
            routed: oracle::Routed::default(),
            rounding: Rounding::none(),
            told: None,
        }
    }

    /// After `steps` steps, with the moments of a run by kind and name.
    #[must_use]
    pub fn at(job: &Job, steps: u64, state: &BTreeMap<String, Tensors>) -> Self {
        let mut optimizer = Self::new(job);
        if let OracleRule::AdamW(adam) = &mut optimizer.rule {
            adam.steps = steps;
            let kind = |name: &str| state.get(name).cloned().unwrap_or_default();
            (adam.first, adam.second) = (kind("exp_avg"), kind("exp_avg_sq"));
        }
        optimizer
    }

    /// One step of the oracle from `params`, which it updates. In bf16 they are masters: what is
    /// used is their rounding, so that only arithmetic tells a layout from the oracle.
    ///
    /// # Errors
    /// Where the oracle refuses the model or the data.
    pub fn step(
        &mut self,
        job: &Job,
        samples: &Samples,
        step: u64,
        params: &mut Params,
    ) -> Result<Step, Failure> {
        let batch = samples.batch(step, job.batch.global_batch);
        let (model, micro) = (&job.model, job.batch.micro_batch);
        let ties = self.told.as_ref().map(|choices| Ties {
            choices,
            within: tie(job),
        });
        let way = Way {
            rounding: &self.rounding,
            ties,
            run: Some((job.seed, step)),
        };
        let done = if job.dtype.has_masters() {
            let mut used = params.clone();
            used.values_mut()
                .flatten()
                .for_each(|w| *w = oracle::to_bf16(*w));
            oracle::step_on(model, &used, &batch, micro, way)?
        } else {
            oracle::step_on(model, params, &batch, micro, way)?
        };
        let (grads, norm) = (done.grads.clone(), oracle::grad_norm(&done.grads));
        let mut clipped = done.grads;
        if job.optimizer.clip_grad > 0.0 {
            oracle::clip(&mut clipped, job.optimizer.clip_grad);
        }
        let lr = learning_rate(step, job.steps, &job.optimizer);
        match &mut self.rule {
            OracleRule::Sgd(sgd) => sgd.step(params, &clipped, lr)?,
            OracleRule::AdamW(adam) => adam.step(params, &clipped, lr)?,
        }
        oracle::move_bias(&job.model, params, &done.routed)?;
        params.values_mut().for_each(|w| self.rounding.kept(w));
        self.routed = done.routed;
        let (loss, count) = (done.loss, done.count as f64);
        Ok(Step {
            loss,
            count,
            norm,
            grads,
            params: params.clone(),
            load: Load {
                aux: self.routed.aux,
                z: self.routed.z,
                counts: self.routed.counts.clone(),
                dropped: self.routed.dropped.clone(),
            },
        })
    }
}

/// Whether a step's gradients are nothing but what is left of the terms of a loss of balance.
fn all_cancels(job: &Job, step: &Step) -> bool {
    step.norm < floor(job.dtype) * balance(job)
}

/// The largest relative distances of steps from the oracle's, and the gradient that is furthest off.
#[must_use]
pub fn distances(job: &Job, steps: &[Step], truth: &[Step]) -> (Each, Difference) {
    let (mut most, mut worst) = (Each::default(), Difference::default());
    for (x, r) in steps.iter().zip(truth) {
        let apart = Apart::of(job, x, r);
        most = most.max(apart.each());
        if apart.grads.relative >= worst.relative {
            worst = apart.grads;
        }
    }
    (most, worst)
}

/// How far one step is from another of the same job.
#[derive(Debug, Clone, Default)]
pub struct Apart {
    /// Of the loss.
    pub loss: Difference,
    /// Of the gradients.
    pub grads: Difference,
    /// Of their norm.
    pub norm: Difference,
    /// Of the parameters after the step.
    pub params: Difference,
    /// Of the losses of balance, the larger.
    pub aux: f64,
}

impl Apart {
    /// Of `x` from `r`.
    #[must_use]
    pub fn of(job: &Job, x: &Step, r: &Step) -> Self {
        let (floor, balance) = (floor(job.dtype), balance(job));
        // A loss is a difference of logits; that of what is known by heart is all rounding.
        let least = if r.count > 0.0 { floor } else { 0.0 };
        let scalar = |x: f64, r: f64, least| Difference {
            relative: relative_scalar_above(x, r, least),
            worst: String::new(),
            bit_equal: x.to_bits() == r.to_bits(),
        };
        let (load, other) = (&x.load, &r.load);
        Self {
            loss: scalar(x.loss, r.loss, least),
            grads: compare_sized(&x.grads, &r.grads, floor, balance),
            norm: scalar(x.norm, r.norm, floor * balance),
            params: compare(&x.params, &r.params),
            aux: relative_scalar(load.aux, other.aux).max(relative_scalar(load.z, other.z)),
        }
    }

    /// Its numbers alone.
    #[must_use]
    pub fn each(&self) -> Each {
        Each {
            loss: self.loss.relative,
            grads: self.grads.relative,
            norm: self.norm.relative,
            params: self.params.relative,
            aux: self.aux,
        }
    }
}

/// Where no token counts and routing is even, gradients are what is left of this.
fn balance(job: &Job) -> f64 {
    job.model.moe.map_or(0.0, |moe| moe.aux_loss)
}

/// Root of the squares of all differences.
fn apart(x: &Tensors, r: &Tensors) -> f64 {
    let squares = x.iter().filter_map(|(name, x)| {
        let pairs = x.iter().zip(r.get(name)?);
        Some(pairs.map(|(x, r)| (x - r) * (x - r)).sum::<f64>())
    });
    squares.sum::<f64>().sqrt()
}
