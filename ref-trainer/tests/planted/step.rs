//! Numbers that a step computes with.

use quintet_collectives::Axis;
use quintet_parallel_layers::Positions;
use quintet_planner::ModelConfig;
use quintet_planner::config::MoeConfig;
use quintet_planner::model::stage_layers;
use quintet_ref_trainer::failure::Failure;
use quintet_ref_trainer::job::Job;
use quintet_ref_trainer::record::Recorded;

use super::{Fault, fault};

pub fn faults() -> Vec<Fault> {
    let mut all = blocks();
    all.extend(experts());
    all
}

/// Builds the layers of every chunk again, of a model that `change` has changed.
fn other_model(
    rank: &mut Recorded<'_, f64>,
    change: impl Fn(&mut ModelConfig),
) -> Result<(), Failure> {
    let mut model = rank.job.model.clone();
    change(&mut model);
    let stage = rank.stage_index();
    for (chunk, held) in rank.chunks.iter_mut().enumerate() {
        held.model.layers = stage_layers(&model, &rank.job.layout, &rank.mesh, stage, chunk)?;
    }
    Ok(())
}

fn blocks() -> Vec<Fault> {
    vec![
        fault(
            "a stage turns positions by another base",
            |job| {
                let learned = matches!(job.model.architecture.positions, Positions::Learned(_));
                job.layout.pp > 1 && !learned && job.model.head_dim > 2
            },
            |rank| {
                let second = rank.stage_index() == 1;
                let factor = if second { 1.0 + 1e-4 } else { 1.0 };
                other_model(rank, |model| model.rope_theta *= factor)
            },
        ),
        fault(
            "norms of one tensor parallel rank add another eps",
            |job| job.layout.tp > 1,
            |rank| {
                let second = rank.mesh.index(rank.rank, Axis::Tp) == 1;
                other_model(rank, |model| {
                    model.norm_eps *= if second { 1.0 + 1e-3 } else { 1.0 };
                })
            },
        ),
        fault(
            "a window lets one token more be seen",
            |job| job.model.window.is_some_and(|w| w < job.batch.seq),
            |rank| other_model(rank, |model| model.window = model.window.map(|w| w + 1)),
        ),
        fault(
            "a window that only one part of a sequence keeps",
            |job| job.layout.cp > 1 && job.model.window.is_some_and(|w| w < job.batch.seq),
            |rank| {
                let second = rank.mesh.index(rank.rank, Axis::Cp) == 1;
                other_model(rank, |model| {
                    model.window = model.window.filter(|_| !second)
                })
            },
        ),
    ]
}

fn with(job: &Job, on: fn(&MoeConfig) -> bool) -> bool {
    let moe = job
        .model
        .moe
        .filter(|moe| moe.first_dense < job.model.layers);
    moe.is_some_and(|moe| on(&moe))
}

/// Changes the rules of the mixture.
fn other_experts(
    rank: &mut Recorded<'_, f64>,
    change: impl Fn(&mut MoeConfig),
) -> Result<(), Failure> {
    other_model(rank, |model| model.moe.iter_mut().for_each(&change))
}

fn experts() -> Vec<Fault> {
    vec![
        fault(
            "weights of experts divided by ep",
            |job| job.layout.ep > 1 && with(job, |_| true),
            |rank| {
                let ep = rank.job.layout.ep as f64;
                other_experts(rank, |moe| moe.scale /= ep)
            },
        ),
        fault(
            "weights of experts without their factor",
            |job| with(job, |moe| moe.scale != 1.0),
            |rank| other_experts(rank, |moe| moe.scale = 1.0),
        ),
        fault(
            "weights of a choice divided by their sum, or not",
            |job| with(job, |_| true),
            |rank| other_experts(rank, |moe| moe.normalize = !moe.normalize),
        ),
        fault(
            "the loss of balance divided by the ranks that share it",
            |job| job.layout.tp * job.layout.cp > 1 && with(job, |moe| moe.aux_loss > 0.0),
            |rank| {
                let ranks = (rank.job.layout.tp * rank.job.layout.cp) as f64;
                other_experts(rank, |moe| moe.aux_loss /= ranks)
            },
        ),
        fault(
            "the z-loss divided by the ranks that share it",
            |job| job.layout.tp * job.layout.cp > 1 && with(job, |moe| moe.z_loss > 0.0),
            |rank| {
                let ranks = (rank.job.layout.tp * rank.job.layout.cp) as f64;
                other_experts(rank, |moe| moe.z_loss /= ranks)
            },
        ),
        fault(
            "room of an expert by the tokens of one rank",
            |job| {
                let ranks = job.layout.tp * job.layout.cp;
                ranks > 1 && with(job, |moe| moe.capacity_factor.is_some())
            },
            |rank| {
                let ranks = (rank.job.layout.tp * rank.job.layout.cp) as f64;
                other_experts(rank, |moe| {
                    moe.capacity_factor = moe.capacity_factor.map(|c| c / ranks)
                })
            },
        ),
        fault(
            "a choice less for each token",
            |job| with(job, |moe| moe.topk > 1),
            |rank| other_experts(rank, |moe| moe.topk -= 1),
        ),
    ]
}
