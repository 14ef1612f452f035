//! The equality table: steps of a run, done again by the oracle and by the twin.
//!
//! ```text
//! run      ... state --- step n ---> loss, gradients, norm, parameters
//!                |                              compared with
//!                +----> oracle: the same step in plain f64
//!                +----> twin:   the same step by these crates on one rank
//! ```

use std::collections::BTreeMap;

use quintet_collectives::transport::local::World;
use quintet_kernels::{Cpu, Scalar, bf16};
use quintet_planner::traffic::{self, Routing};

use crate::compare::{Difference, Tensors};
use crate::data::Samples;
use crate::failure::Failure;
use crate::job::{Dtype, Job};
use crate::oracle::{Rounding, Routed};
use crate::rank::{Begin, Rank};
use crate::record::Step;
use crate::report::{EqualityRow, EqualityTable, Losses};
use crate::schedule_lr::learning_rate;
use crate::tolerance::{Each, bounds};
use crate::verify::{Apart, OracleOptimizer, condition, predicted_rows, predicted_step, twin_of};

/// One step of a run with the state it began from.
#[derive(Debug, Clone)]
pub struct Proof {
    /// The step.
    pub number: u64,
    /// Parameters before it.
    pub before: Tensors,
    /// Optimizer state before it, by kind.
    pub state: BTreeMap<String, Tensors>,
    /// Bytes that all ranks sent in it, by group.
    pub bytes: BTreeMap<String, u64>,
    /// What it came to.
    pub step: Step,
}

/// Does each step again on one device, twice, and compares; `bytes` were sent in `steps` steps.
///
/// # Errors
/// Where the oracle or the twin cannot run.
pub fn prove(
    job: &Job,
    samples: &Samples,
    proofs: &[Proof],
    steps: u64,
    bytes: BTreeMap<String, u64>,
) -> Result<EqualityTable, Failure> {
    let (mut rows, mut losses) = (Vec::new(), Vec::new());
    let mut routed = RowBytes::default();
    for proof in proofs {
        let (truth, went) = oracle_step(job, samples, proof, Rounding::none())?;
        let twin = twin_step(&twin_of(job), samples, proof)?;
        routed.add(job, proof, &truth, went)?;
        let scatter = condition(job, std::slice::from_ref(&truth), |rounding| {
            Ok(vec![oracle_step(job, samples, proof, rounding)?.0])
        })?;
        let bounds = bounds(job, scatter);
        let (ours, number) = (&proof.step, proof.number);
        rows.extend(rows_against(job, ours, &truth, number, "", &bounds));
        rows.extend(rows_against(job, ours, &twin, number, "twin ", &bounds));
        losses.push(Losses {
            step: number,
            ours: ours.loss,
            twin: twin.loss,
            oracle: truth.loss,
        });
    }
    // Rows go where the router sends them, which is known of the steps that were done again.
    let known = |(group, _): &(String, u64)| !(job.model.moe.is_some() && moves_rows(group));
    let predicted = predicted_step(job)?
        .into_iter()
        .map(|(group, b)| (group, b * steps));
    let predicted = predicted.filter(|(_, b)| *b > 0).filter(known);
    Ok(EqualityTable {
        against: "one device: oracle (plain f64) and twin (these crates, one rank)".into(),
        rows,
        losses,
        bytes_predicted: predicted
            .filter(|(_, b)| *b > 0)
            .filter(known)
            .chain(routed.predicted)
            .collect(),
        bytes_counted: bytes
            .into_iter()
            .filter(known)
            .chain(routed.counted)
            .collect(),
    })
}

/// Whether a group carries the rows of experts.
fn moves_rows(group: &str) -> bool {
    ["ep", "etp"].contains(&group)
}

/// What was sent in groups that carry rows, in the steps that were done again.
#[derive(Default)]
struct RowBytes {
    predicted: BTreeMap<String, u64>,
    counted: BTreeMap<String, u64>,
}

impl RowBytes {
    /// Adds a step: worked out from where the oracle's tokens went, and counted. A step in which
    /// rounding has sent a token elsewhere is left out: its rows are others.
    fn add(
        &mut self,
        job: &Job,
        proof: &Proof,
        truth: &Step,
        routed: Routed,
    ) -> Result<(), Failure> {
        if job.model.moe.is_none() || proof.step.load.counts != truth.load.counts {
            return Ok(());
        }
        let routing = Routing { kept: routed.kept };
        let rows = traffic::total(&predicted_rows(job, &routing)?);
        let step = predicted_step(job)?;
        for (group, bytes) in step.iter().chain(&rows).filter(|(g, _)| moves_rows(g)) {
            *self.predicted.entry(proven(group)).or_default() += bytes;
        }
        for (group, bytes) in proof.bytes.iter().filter(|(g, _)| moves_rows(g)) {
            *self.counted.entry(proven(group)).or_default() += bytes;
        }
        self.predicted.retain(|_, bytes| *bytes > 0);
        Ok(())
    }
}

/// A group's bytes in the steps above alone.
fn proven(group: &str) -> String {
    format!("{group} (steps above)")
}

/// Loss, gradients, norm and parameters of a step beside those of another.
fn rows_against(
    job: &Job,
    ours: &Step,
    other: &Step,
    step: u64,
    who: &str,
    bounds: &Each,
) -> Vec<EqualityRow> {
    let apart = Apart::of(job, ours, other);
    let rows = [
        ("loss", Some(ours.loss), apart.loss, bounds.loss),
        ("gradients", None, apart.grads, bounds.grads),
        ("gradient norm", Some(ours.norm), apart.norm, bounds.norm),
        ("parameters", None, apart.params, bounds.params),
    ];
    let row = |(name, value, d, bound): (&str, _, Difference, f64)| {
        let named = !d.bit_equal && !d.worst.is_empty();
        let place = if named {
            format!(" (worst: {})", d.worst)
        } else {
            String::new()
        };
        EqualityRow {
            step: Some(step),
            quantity: format!("{who}{name}{place}"),
            value,
            difference: d.relative,
            bound,
            bit_equal: d.bit_equal,
        }
    };
    rows.map(row).into()
}

/// The oracle's step from the same state, and where its tokens went.
fn oracle_step(
    job: &Job,
    samples: &Samples,
    proof: &Proof,
    rounding: Rounding,
) -> Result<(Step, Routed), Failure> {
    let mut params = proof.before.clone();
    params.values_mut().for_each(|w| rounding.kept(w));
    let mut optimizer = OracleOptimizer {
        rounding,
        ..OracleOptimizer::at(job, proof.number - 1, &proof.state)
    };
    let step = optimizer.step(job, samples, proof.number, &mut params)?;
    Ok((step, optimizer.routed))
}

/// The twin's step from the same state.
fn twin_step(job: &Job, samples: &Samples, proof: &Proof) -> Result<Step, Failure> {
    match job.dtype {
        Dtype::F64 => twin_step_as::<f64>(job, samples, proof),
        Dtype::F32 => twin_step_as::<f32>(job, samples, proof),
        Dtype::Bf16 => twin_step_as::<bf16>(job, samples, proof),
    }
}

fn twin_step_as<E: Scalar>(job: &Job, samples: &Samples, proof: &Proof) -> Result<Step, Failure> {
    let value = |tensors: Option<&Tensors>, name: &str, index: usize| {
        tensors
            .and_then(|t| t.get(name))
            .and_then(|t| t.get(index))
            .copied()
            .unwrap_or(f64::NAN)
    };
    let done = World::new(1)?.go(|comm| {
        let mut rank = Rank::<_, _, E>::new(job, Cpu::new(2), comm, Begin::Init)?;
        rank.fill_with(|entry, index| value(Some(&proof.before), &entry.spec.name, index))?;
        for chunk in &mut rank.chunks {
            chunk
                .optimizer
                .fill(proof.number - 1, |kind, entry, index| {
                    value(proof.state.get(kind), &entry.spec.name, index)
                })?;
        }
        let done = rank.accumulate(samples, proof.number, false)?;
        let grads = rank.full_grads()?;
        rank.update(
            learning_rate(proof.number, job.steps, &job.optimizer),
            done.norm,
        )?;
        let params = rank.full_weights()?;
        let (loss, count, norm, load) = (done.loss, done.count, done.norm, done.load);
        Ok::<_, Failure>(Step {
            loss,
            count,
            norm,
            grads,
            params,
            load,
        })
    })?;
    Ok(done.into_iter().next().unwrap_or_default())
}
