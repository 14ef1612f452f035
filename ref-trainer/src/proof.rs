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
use quintet_kernels::{Cpu, Scalar};
use quintet_zero::{gather_grads, gather_params};

use crate::compare::{Difference, Tensors, compare, relative_scalar};
use crate::data::Samples;
use crate::failure::Failure;
use crate::groups::Aside;
use crate::job::{Dtype, Job};
use crate::rank::{Begin, Rank};
use crate::record::Step;
use crate::report::{EqualityRow, EqualityTable};
use crate::schedule_lr::learning_rate;
use crate::verify::{OracleOptimizer, bound, predicted_step, twin_of};

/// One step of a run with the state it began from.
#[derive(Debug, Clone)]
pub struct Proof {
    /// The step.
    pub number: u64,
    /// Parameters before it.
    pub before: Tensors,
    /// Optimizer state before it, by kind.
    pub state: BTreeMap<String, Tensors>,
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
    let mut rows = Vec::new();
    for proof in proofs {
        let mut optimizer = OracleOptimizer::at(job, proof.number - 1, &proof.state);
        let mut params = proof.before.clone();
        let truth = optimizer.step(job, samples, proof.number, &mut params)?;
        rows.extend(rows_against(
            &proof.step,
            &truth,
            proof.number,
            "",
            bound(job.dtype),
        ));
        let twin = twin_step(&twin_of(job), samples, proof)?;
        rows.extend(rows_against(
            &proof.step,
            &twin,
            proof.number,
            "twin ",
            bound(job.dtype),
        ));
    }
    let predicted = predicted_step(job)?
        .into_iter()
        .map(|(group, b)| (group, b * steps));
    Ok(EqualityTable {
        against: "one device: oracle (plain f64) and twin (these crates, one rank)".into(),
        rows,
        bytes_predicted: predicted.filter(|(_, b)| *b > 0).collect(),
        bytes_counted: bytes,
    })
}

fn rows_against(ours: &Step, other: &Step, step: u64, who: &str, bound: f64) -> Vec<EqualityRow> {
    let row = |quantity: String, value, difference, bit_equal| EqualityRow {
        step: Some(step),
        quantity: format!("{who}{quantity}"),
        value,
        difference,
        bound,
        bit_equal,
    };
    let scalar = |name: &str, x: f64, r: f64| {
        row(
            name.into(),
            Some(x),
            relative_scalar(x, r),
            x.to_bits() == r.to_bits(),
        )
    };
    let tensors = |name: &str, x: &Tensors, r: &Tensors| {
        let Difference {
            relative,
            worst,
            bit_equal,
        } = compare(x, r);
        let place = if bit_equal {
            String::new()
        } else {
            format!(" (worst: {worst})")
        };
        row(format!("{name}{place}"), None, relative, bit_equal)
    };
    vec![
        scalar("loss", ours.loss, other.loss),
        tensors("gradients", &ours.grads, &other.grads),
        scalar("gradient norm", ours.norm, other.norm),
        tensors("parameters", &ours.params, &other.params),
    ]
}

/// The twin's step from the same state.
fn twin_step(job: &Job, samples: &Samples, proof: &Proof) -> Result<Step, Failure> {
    match job.dtype {
        Dtype::F64 => twin_step_as::<f64>(job, samples, proof),
        Dtype::F32 => twin_step_as::<f32>(job, samples, proof),
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
        rank.params.fill_with(|entry, index| {
            E::from_f64(value(Some(&proof.before), &entry.spec.name, index))
        })?;
        rank.optimizer
            .fill(proof.number - 1, |kind, entry, index| {
                value(proof.state.get(kind), &entry.spec.name, index)
            })?;
        let done = rank.accumulate(samples, proof.number, false)?;
        let grads = gather_grads(&rank.device, &[&rank.grads], &Aside(&rank.groups))?;
        rank.update(
            learning_rate(proof.number, job.steps, &job.optimizer),
            done.norm,
        )?;
        let params = gather_params(&rank.device, &[&rank.params], &Aside(&rank.groups))?;
        let (loss, count, norm) = (done.loss, done.count, done.norm);
        Ok::<_, Failure>(Step {
            loss,
            count,
            norm,
            grads,
            params,
        })
    })?;
    Ok(done.into_iter().next().unwrap_or_default())
}
