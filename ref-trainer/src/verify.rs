//! The proof: a layout, the oracle and the twin run the same steps and are compared after each.
//!
//! ```text
//! layout   these crates, as cut          compared with   oracle   plain f64, one device, no code in common
//!                                                        twin     these crates at world 1, bit for bit
//! bytes    counted on the transports     compared with   planner  worked out before the first message
//! copies   of a value on several ranks   compared with   each other, by hash
//! ```

use std::collections::BTreeMap;
use std::fmt;

use quintet_collectives::DType;
use quintet_planner::Layout;
use quintet_planner::memory::{Activations, routed};
use quintet_planner::states::{self, Bytes, Memory};
use quintet_planner::traffic::{self, Routing, WireTypes};
use serde::Serialize;

use crate::choice::choice;
use crate::compare::{
    Difference, Tensors, compare, compare_sized, relative_scalar, relative_scalar_above,
};
use crate::crew::Crew;
use crate::data::Samples;
use crate::failure::Failure;
use crate::job::{Dtype, Job, OptimizerKind};
use crate::load::Load;
use crate::oracle::{self, AdamW, Params, Rounding, Sgd, Ties, Way};
use crate::rank::{Begin, rule};
use crate::record::{Choices, Record, Step, record, record_in};
use crate::room::has_room;
use crate::schedule_lr::learning_rate;
use crate::tolerance::{Each, SEEDS, bounds, floor, tie, units};

/// What a proof found; `--json` prints it.
#[derive(Debug, Clone, Serialize)]
pub struct Verdict {
    /// Whether everything holds.
    pub ok: bool,
    /// Steps compared.
    pub steps: u64,
    /// Worst relative difference of the loss from the oracle's.
    pub loss_rel: f64,
    /// Worst relative difference of a gradient (see [`Difference`]).
    pub grad_rel_max: f64,
    /// The parameter in which it was found.
    pub worst: String,
    /// Worst relative difference of a parameter after an update.
    pub param_rel_max: f64,
    /// Worst relative difference of the gradient's norm.
    pub grad_norm_rel: f64,
    /// Worst relative difference of the losses of balance (0 without experts).
    pub aux_rel: f64,
    /// Choices of experts in which two were as good as equal, and which the oracle took over.
    pub ties: u64,
    /// Whether every expert was chosen, and every choice dropped, as often as by the oracle.
    pub routed_equal: bool,
    /// The largest of `bounds`.
    pub bound: f64,
    /// What each of these must not exceed: what is promised in f64, else derived from how far
    /// roundings take the oracle (see [`crate::tolerance`]).
    pub bounds: Each,
    /// Which quantities have the twin's bits.
    pub bit_equal: BitEqual,
    /// The first copies that differ (a parameter from its master weight, too); empty where none do.
    pub copies_differ: String,
    /// Bytes sent by group, worked out before the first message.
    pub bytes_predicted: BTreeMap<String, u64>,
    /// Bytes sent by group, counted.
    pub bytes_counted: BTreeMap<String, u64>,
    /// Bytes held by category on the fullest rank, at rest and at the highest, worked out before
    /// anything was allocated.
    pub memory_predicted: BTreeMap<String, Held>,
    /// The same as allocations were counted.
    pub memory_counted: BTreeMap<String, Held>,
    /// The first rank and category in which these differ; empty where none do.
    pub memory_differs: String,
}

/// Bytes of a category on one rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize)]
pub struct Held {
    /// Between steps.
    pub at_rest: u64,
    /// The most during a step.
    pub peak: u64,
}

impl Verdict {
    /// One JSON object on a line.
    ///
    /// # Errors
    /// Where JSON refuses it.
    pub fn json(&self) -> Result<String, Failure> {
        serde_json::to_string(self)
            .map(|text| text + "\n")
            .map_err(|e| Failure::data(format!("the verdict cannot be written as JSON: {e}")))
    }
}

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let said = |ok: bool| if ok { "ok" } else { "DIFFERS" };
        writeln!(
            f,
            "{} steps against the oracle (plain f64, one device)",
            self.steps
        )?;
        let worst = format!("gradients (worst: {})", self.worst);
        let (bits, bounds) = (self.bit_equal, self.bounds);
        for (what, value, bound, bits) in [
            ("loss", self.loss_rel, bounds.loss, bits.loss),
            (&worst, self.grad_rel_max, bounds.grads, bits.grads),
            (
                "gradient norm",
                self.grad_norm_rel,
                bounds.norm,
                bits.grad_norm,
            ),
            ("parameters", self.param_rel_max, bounds.params, bits.params),
            ("losses of balance", self.aux_rel, bounds.aux, false),
        ] {
            if what == "losses of balance" && value == 0.0 {
                continue;
            }
            let twin = if bits { ", the twin's bits" } else { "" };
            let said = said(value <= bound);
            writeln!(f, "  {what:<50} {value:>9.1e} of {bound:.1e}  {said}{twin}")?;
        }
        if self.ties > 0 {
            let what = "choices of experts that rounding decided";
            writeln!(f, "  {what:<50} {:>9}", self.ties)?;
        }
        if !self.routed_equal {
            writeln!(
                f,
                "  experts were not chosen as often as by the oracle: DIFFERS"
            )?;
        }
        let copies = if self.copies_differ.is_empty() {
            "equal"
        } else {
            &self.copies_differ
        };
        writeln!(f, "  copies on several ranks: {copies}")?;
        for (group, predicted) in &self.bytes_predicted {
            let counted = self.bytes_counted.get(group).copied().unwrap_or(0);
            let same = if counted == *predicted {
                "equal"
            } else {
                "DIFFERS"
            };
            writeln!(
                f,
                "  bytes of {group}: predicted {predicted}, counted {counted}, {same}"
            )?;
        }
        for (group, counted) in &self.bytes_counted {
            if !self.bytes_predicted.contains_key(group) {
                writeln!(
                    f,
                    "  bytes of {group}: predicted none, counted {counted}, DIFFERS"
                )?;
            }
        }
        for (category, predicted) in &self.memory_predicted {
            let (rest, peak) = (predicted.at_rest, predicted.peak);
            let counted = self.memory_counted.get(category).copied();
            let counted = counted.unwrap_or_default();
            let said = match counted == *predicted {
                true => "equal".into(),
                false => format!("{} at rest, DIFFERS", counted.at_rest),
            };
            writeln!(
                f,
                "  {category} on the fullest rank: predicted {peak} bytes, {rest} at rest; counted {}, {said}",
                counted.peak
            )?;
        }
        let memory = if self.memory_differs.is_empty() {
            "equal on every rank"
        } else {
            &self.memory_differs
        };
        writeln!(f, "  bytes allocated: {memory}")?;
        writeln!(
            f,
            "{}",
            if self.ok {
                "all ok"
            } else {
                "the layout is not what one device computes"
            }
        )
    }
}

/// Which quantities have the twin's bits, over all steps.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct BitEqual {
    /// The loss.
    pub loss: bool,
    /// Every gradient.
    pub grads: bool,
    /// The norm.
    pub grad_norm: bool,
    /// Every parameter.
    pub params: bool,
}

/// What a verdict is made from.
#[derive(Debug, Clone, Default)]
pub struct Evidence {
    /// The layout's run.
    pub ours: Record,
    /// The twin's steps.
    pub twin: Vec<Step>,
    /// The oracle's steps.
    pub truth: Vec<Step>,
    /// Bytes by group over all ranks and steps, worked out before the first message.
    pub predicted: BTreeMap<String, u64>,
    /// By rank: bytes held by category, worked out before anything was allocated.
    pub memory: Vec<Memory>,
    /// By rank: the most bytes of activations that there can be; none where that is not known.
    pub most: Vec<u64>,
    /// How far roundings took the oracle; nothing in f64, where the bound is a promise.
    pub scatter: Each,
    /// Choices of experts that the oracle made as the layout did because they were ties.
    pub ties: u64,
}

/// Proves a job: runs its steps from random parameters under its layout, on the oracle and on the
/// twin.
///
/// # Errors
/// Where one of them cannot run; a difference is no error but a verdict.
pub fn verify(job: &Job, samples: &Samples) -> Result<Verdict, Failure> {
    has_room(job)?;
    Ok(judge(job, &evidence(job, samples)?))
}

/// [`verify`] wherever the ranks are; a verdict where rank 0 is, which compares alone.
///
/// # Errors
/// As [`verify`].
pub fn verify_in(crew: &Crew, job: &Job, samples: &Samples) -> Result<Option<Verdict>, Failure> {
    has_room(job)?;
    let run = || record_in(crew, job, samples, Begin::Random);
    if !crew.leads() {
        return run().map(|_| None);
    }
    let evidence = evidence_of(job, samples, || Ok(run()?.unwrap_or_default()))?;
    Ok(Some(judge(job, &evidence)))
}

/// Runs what [`judge`] compares.
///
/// # Errors
/// As [`verify`].
pub fn evidence(job: &Job, samples: &Samples) -> Result<Evidence, Failure> {
    evidence_of(job, samples, || record(job, samples, Begin::Random))
}

/// The same where `run` runs the layout, which it does once.
fn evidence_of(
    job: &Job,
    samples: &Samples,
    run: impl Fn() -> Result<Record, Failure>,
) -> Result<Evidence, Failure> {
    // Where tokens go is the oracle's word, and in f64 stands before the first message of the layout;
    // in a narrower type the oracle has ties broken as the layout breaks them.
    let (mut ours, ties) = (None, job.model.moe.is_some() && job.dtype != Dtype::F64);
    if ties {
        ours = Some(run()?);
    }
    let told = ours.as_ref().map_or(&[][..], |ours| &ours.choices);
    let (truth, routing, ties) = oracle_steps(job, samples, told)?;
    let scatter = match job.dtype {
        Dtype::F64 => Each::default(),
        Dtype::F32 | Dtype::Bf16 => scatter(job, samples, &truth, told)?,
    };
    let mut predicted = predicted_step(job)?;
    predicted.values_mut().for_each(|bytes| *bytes *= job.steps);
    for routing in &routing {
        for (group, bytes) in traffic::total(&predicted_rows(job, routing)?) {
            *predicted.entry(group).or_default() += bytes;
        }
    }
    predicted.retain(|_, bytes| *bytes > 0);
    let (memory, most) = memory(job, &routing)?;
    Ok(Evidence {
        predicted,
        memory,
        most,
        ours: match ours {
            Some(ours) => ours,
            None => run()?,
        },
        twin: record(&twin_of(job), samples, Begin::Random)?.steps,
        scatter,
        truth,
        ties,
    })
}

/// Bytes that each rank sends in a step, by group, before anything has run.
///
/// # Errors
/// Where the layout cannot be.
pub fn predicted_ranks(job: &Job) -> Result<Vec<traffic::Traffic>, Failure> {
    let (choice, types) = (choice(job)?, wire_types(job));
    Ok(traffic::step_by(
        &choice,
        &job.model,
        &job.layout,
        &job.batch,
        types,
    )?)
}

/// Bytes that each rank sends in a step to move the rows of experts, were they routed so.
///
/// # Errors
/// Where the layout cannot be.
pub fn predicted_rows(job: &Job, routing: &Routing) -> Result<Vec<traffic::Traffic>, Failure> {
    let (choice, types) = (choice(job)?, wire_types(job));
    Ok(traffic::rows_by(
        &choice,
        &job.model,
        &job.layout,
        &job.batch,
        types,
        routing,
    )?)
}

/// Bytes that each rank holds by category, before anything is allocated.
///
/// # Errors
/// Where the layout cannot be.
pub fn predicted_memory(job: &Job) -> Result<Vec<Memory>, Failure> {
    let (types, moments) = (wire_types(job), rule(job).moments().len());
    Ok(states::step(
        &job.model,
        &job.layout,
        &job.batch,
        types,
        moments,
    )?)
}

/// The same with the activations that forward saves over steps that are routed so; and the most that
/// there can be with what backward and messages have besides, which is a bound without experts alone.
fn memory(job: &Job, routing: &[Routing]) -> Result<(Vec<Memory>, Vec<u64>), Failure> {
    let mut memory = predicted_memory(job)?;
    let mut most = vec![0; memory.len()];
    for routing in routing {
        let types = wire_types(job);
        let ranks = routed(&job.model, &job.layout, &job.batch, types, routing)?;
        for (rank, Activations { saved, work }) in ranks.into_iter().enumerate() {
            let held = memory[rank].entry("activations".into()).or_default();
            held.peak = held.peak.max(saved);
            most[rank] = (saved + work).max(most[rank]);
        }
    }
    if job.model.moe.is_some() {
        most.clear();
    }
    Ok((memory, most))
}

/// What the job's types are on the wire.
#[must_use]
pub fn wire_types(job: &Job) -> WireTypes {
    let (storage, accumulation) = match job.dtype {
        Dtype::F64 => (DType::F64, DType::F64),
        Dtype::F32 => (DType::F32, DType::F32),
        Dtype::Bf16 => (DType::Bf16, DType::F32),
    };
    WireTypes {
        storage,
        accumulation,
    }
}

/// Bytes that all ranks send in a step, by group, before anything has run.
///
/// # Errors
/// Where the layout cannot be.
pub fn predicted_step(job: &Job) -> Result<traffic::Traffic, Failure> {
    let mut total = traffic::total(&predicted_ranks(job)?);
    total.retain(|_, bytes| *bytes > 0);
    Ok(total)
}

/// The same job on one rank, microbatch for microbatch.
#[must_use]
pub fn twin_of(job: &Job) -> Job {
    Job {
        layout: Layout::single(),
        nccl: false,
        ..job.clone()
    }
}

/// The oracle's steps, where its tokens went in each, and how many choices it made as told because
/// they were ties; `told` are the choices of a layout in each step.
fn oracle_steps(
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
/// as in the job's type: the largest distances over a few draws of the roundings. `told` are the
/// choices of a layout in each step.
///
/// # Errors
/// Where the oracle refuses the model or the data.
pub fn scatter(
    job: &Job,
    samples: &Samples,
    truth: &[Step],
    told: &[Choices],
) -> Result<Each, Failure> {
    let mut most = Each::default();
    for seed in 0..SEEDS {
        let (unit, wide) = units(job.dtype);
        let mut optimizer = OracleOptimizer {
            rounding: Rounding::of(unit, wide, seed),
            ..OracleOptimizer::new(job)
        };
        let mut params = first_params(job);
        let begin = params.values_mut();
        begin.for_each(|w| optimizer.rounding.kept(w));
        let step = |step| {
            optimizer.told = told.get(step as usize - 1).cloned();
            optimizer.step(job, samples, step, &mut params)
        };
        let steps: Vec<Step> = (1..=job.steps).map(step).collect::<Result<_, _>>()?;
        // A norm moves by no more than the gradients together; by how much less is a matter of luck.
        let norm = steps.iter().zip(truth).map(|(x, r)| {
            let least = floor(job.dtype) * balance(job);
            apart(&x.grads, &r.grads) / if r.norm < least { least } else { r.norm }
        });
        let moved = distances(job, &steps, truth).0;
        most = most.max(Each {
            norm: norm.filter(|x| !x.is_nan()).fold(0.0, f64::max),
            ..moved
        });
    }
    if truth.iter().any(|step| all_cancels(job, step)) {
        // The oracle's terms may cancel to the last bit where those of a layout do not.
        let terms = units(job.dtype).0 / floor(job.dtype);
        (most.grads, most.norm) = (most.grads.max(terms), most.norm.max(terms));
    }
    Ok(most)
}

/// Whether a step's gradients are nothing but what is left of the terms of a loss of balance.
fn all_cancels(job: &Job, step: &Step) -> bool {
    step.norm < floor(job.dtype) * balance(job)
}

/// The largest relative distances of steps from the oracle's, and the gradient that is furthest off.
#[must_use]
pub fn distances(job: &Job, steps: &[Step], truth: &[Step]) -> (Each, Difference) {
    let (mut most, mut worst) = (Each::default(), Difference::default());
    let floor = floor(job.dtype);
    let balance = balance(job);
    for (x, r) in steps.iter().zip(truth) {
        // A loss is a difference of logits; that of what is known by heart is all rounding.
        let least = if r.count > 0.0 { floor } else { 0.0 };
        let grads = compare_sized(&x.grads, &r.grads, floor, balance);
        let aux = relative_scalar(x.load.aux, r.load.aux);
        most = most.max(Each {
            loss: relative_scalar_above(x.loss, r.loss, least),
            grads: grads.relative,
            norm: relative_scalar_above(x.norm, r.norm, floor * balance),
            params: compare(&x.params, &r.params).relative,
            aux: aux.max(relative_scalar(x.load.z, r.load.z)),
        });
        if grads.relative >= worst.relative {
            worst = grads;
        }
    }
    (most, worst)
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

/// Compares, step by step, everything that must agree.
#[must_use]
pub fn judge(job: &Job, evidence: &Evidence) -> Verdict {
    let Evidence {
        ours,
        twin,
        truth,
        predicted,
        memory,
        most,
        scatter,
        ties,
    } = evidence;
    let bounds = bounds(job, *scatter);
    let (found, worst) = distances(job, &ours.steps, truth);
    let mut routed_equal = true;
    let mut bits = BitEqual {
        loss: true,
        grads: true,
        grad_norm: true,
        params: true,
    };
    let complete = |steps: &[Step]| steps.len() as u64 == job.steps;
    let mut ok = complete(&ours.steps) && complete(twin) && complete(truth);
    for ((x, t), r) in ours.steps.iter().zip(twin).zip(truth) {
        routed_equal &= x.load.counts == r.load.counts && x.load.dropped == r.load.dropped;
        ok &= x.count == r.count;
        bits.loss &= x.loss.to_bits() == t.loss.to_bits();
        bits.grad_norm &= x.norm.to_bits() == t.norm.to_bits();
        bits.grads &= same(&x.grads, &t.grads);
        bits.params &= same(&x.params, &t.params);
    }
    let copies_differ = differing_copies(ours);
    let mut memory_differs = differing_memory(memory, &ours.memory);
    if memory_differs.is_empty() {
        memory_differs = beyond(most, &ours.highest);
    }
    let bytes_counted = traffic::total(&ours.bytes);
    ok &= *predicted == bytes_counted;
    ok &= found.within(&bounds) && routed_equal;
    Verdict {
        ok: ok && copies_differ.is_empty() && memory_differs.is_empty(),
        steps: job.steps,
        loss_rel: found.loss,
        grad_rel_max: found.grads,
        worst: worst.worst,
        param_rel_max: found.params,
        grad_norm_rel: found.norm,
        aux_rel: found.aux,
        ties: *ties,
        routed_equal,
        bound: bounds.largest(),
        bounds,
        bit_equal: bits,
        copies_differ,
        bytes_predicted: predicted.clone(),
        bytes_counted,
        memory_predicted: on_the_fullest(memory),
        memory_counted: on_the_fullest(&ours.memory),
        memory_differs,
    }
}

fn on_the_fullest(ranks: &[Memory]) -> BTreeMap<String, Held> {
    let most = states::fullest(ranks).into_iter();
    let held = |Bytes { at_rest, peak }| Held { at_rest, peak };
    most.map(|(category, bytes)| (category, held(bytes)))
        .collect()
}

/// The first rank and category in which more or less was allocated than predicted.
fn differing_memory(predicted: &[Memory], counted: &[Memory]) -> String {
    if predicted.len() != counted.len() {
        let (want, got) = (predicted.len(), counted.len());
        return format!("{got} ranks were counted where {want} were predicted");
    }
    for (rank, (want, got)) in predicted.iter().zip(counted).enumerate() {
        for category in want.keys().chain(got.keys()) {
            let of = |memory: &Memory| memory.get(category).copied().unwrap_or_default();
            let (want, got) = (of(want), of(got));
            if want != got {
                return format!(
                    "rank {rank} held {} bytes of {category}, {} at rest, where {} and {} were predicted",
                    got.peak, got.at_rest, want.peak, want.at_rest
                );
            }
        }
    }
    String::new()
}

/// The first rank whose activations went beyond the most that was predicted.
fn beyond(most: &[u64], highest: &[u64]) -> String {
    let ranks = most.iter().zip(highest).enumerate();
    for (rank, (most, highest)) in ranks {
        if highest > most {
            return format!(
                "rank {rank} held {highest} bytes of activations in all, where at most {most} were predicted"
            );
        }
    }
    String::new()
}

fn same(a: &Tensors, b: &Tensors) -> bool {
    compare(a, b).bit_equal
}

/// The first value of which two ranks hold copies that differ, or whose master weight does.
fn differing_copies(ours: &Record) -> String {
    if !ours.stale.is_empty() {
        return ours.stale.clone();
    }
    let mut first = BTreeMap::new();
    for (rank, held) in ours.held.iter().enumerate() {
        for h in held {
            if h.part.is_empty() {
                continue;
            }
            let (holder, hash) = *first
                .entry((h.step, &h.name, &h.part))
                .or_insert((rank, h.hash));
            if hash != h.hash {
                return format!(
                    "{} differs between ranks {holder} and {rank} after step {}",
                    h.name, h.step
                );
            }
        }
    }
    String::new()
}
