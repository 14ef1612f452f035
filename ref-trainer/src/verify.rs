//! The proof: a layout, the oracle and the twin run the same steps and are compared after each.
//!
//! ```text
//! layout   these crates, as cut          compared with   oracle   plain f64, one device, no code in common
//!                                                        twin     these crates at world 1, bit for bit
//! bytes    counted on the transports     compared with   planner  worked out before the first message
//! copies   of a value on several ranks   compared with   each other, by hash
//! ```

mod reference;
mod verdict;

use std::collections::BTreeMap;

use quintet_collectives::DType;
use quintet_planner::Layout;
use quintet_planner::memory::{Activations, routed};
use quintet_planner::states::{self, Bytes, Memory};
use quintet_planner::traffic::{self, Routing, WireTypes};

pub use reference::{Apart, OracleOptimizer, OracleRule, condition, distances, scatter};
pub use verdict::{BitEqual, Held, Verdict};

use crate::choice::choice;
use crate::compare::{Tensors, compare};
use crate::crew::Crew;
use crate::data::Samples;
use crate::failure::Failure;
use crate::job::{Dtype, Job};
use crate::rank::{Begin, rule};
use crate::record::{Record, Step, record, record_in};
use crate::room::has_room;
use crate::tolerance::{Each, bounds};

use reference::oracle_steps;

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
        on_device: ours.on_device,
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
