//! What a step was like, over all ranks.

use std::collections::BTreeMap;

use quintet_collectives::ReduceOp;
use quintet_kernels::{Collectives, Scalar, Tag};
use quintet_parallel_layers::pipeline::{Durations, StageTime, simulate};

use crate::failure::Failure;
use crate::groups::Counted;
use crate::load::Load;
use crate::model::Device;
use crate::rank::Rank;
use crate::report::{ExpertReport, StepReport};
use crate::step::Gradients;

/// The step's report, joined over ranks beside the traffic of training.
pub(super) fn measure<B: Device, C: Collectives<B> + Counted, E: Scalar>(
    rank: &mut Rank<'_, B, C, E>,
    done: &Gradients,
    before: &BTreeMap<&'static str, crate::groups::Traffic>,
    seconds: f64,
    bytes: &mut BTreeMap<String, u64>,
) -> Result<StepReport, Failure> {
    let (places, stage) = (rank.schedule.route().places(), rank.stage_index());
    let world = rank.mesh.world() as f64;
    let mut sums = vec![0.0; 3 * places];
    for (chunk, times) in done.times.iter().enumerate() {
        let place = rank.schedule.route().place(stage, chunk);
        sums[3 * place..3 * place + 3].copy_from_slice(&[
            times.forward,
            times.backward_input,
            times.backward_weight,
        ]);
    }
    // Under the same labels on every rank.
    let after = rank.traffic();
    for (axis, a) in &after {
        let b = before.get(axis).copied().unwrap_or_default();
        let sent = a.bytes - b.bytes;
        sums.extend([sent as f64, (a.blocked - b.blocked).as_secs_f64()]);
        if sent > 0 {
            *bytes.entry(axis.to_string()).or_default() += sent;
        }
    }
    let mut peaks: Vec<f64> = Tag::ALL
        .iter()
        .map(|&tag| rank.device.meter().peak(tag) as f64)
        .collect();
    reduce(rank, &mut sums, ReduceOp::Sum)?;
    reduce(rank, &mut peaks, ReduceOp::Max)?;
    let (times, groups) = sums.split_at(3 * places);
    let by_axis = after
        .keys()
        .zip(groups.chunks(2))
        .filter(|(_, g)| g[0] > 0.0);
    let mut report = StepReport {
        loss: done.loss,
        grad_norm: done.norm,
        tokens: done.count as u64,
        tokens_per_s: done.count / seconds,
        step_ms: seconds * 1e3,
        bubble: bubble(rank, times)?,
        experts: experts(&done.load),
        ..StepReport::default()
    };
    for (axis, group) in by_axis {
        report.bytes.insert(axis.to_string(), group[0] as u64);
        report
            .comm_wait_ms
            .insert(axis.to_string(), group[1] * 1e3 / world);
    }
    let memory = Tag::ALL.iter().zip(peaks);
    report.memory_bytes = memory
        .map(|(tag, bytes)| (tag.name().to_string(), bytes as u64))
        .collect();
    Ok(report)
}

/// What the routers did; none without experts.
fn experts(load: &Load) -> Option<ExpertReport> {
    (!load.counts.is_empty()).then(|| ExpertReport {
        aux_loss: load.aux,
        z_loss: load.z,
        imbalance: load.imbalance(),
        dropped: load.dropped_share(),
        load: load.counts.clone(),
    })
}

/// The idle share of the schedule, played with the CPU times that its passes took.
fn bubble<B: Device, C: Collectives<B> + Counted, E: Scalar>(
    rank: &Rank<'_, B, C, E>,
    times: &[f64],
) -> Result<f64, Failure> {
    let passes = rank.schedule.microbatches() * (rank.mesh.world() / rank.job.layout.pp);
    let each = 1.0 / passes.max(1) as f64;
    let chunks = times.chunks(3).map(|t| StageTime {
        forward: t[0] * each,
        backward_input: t[1] * each,
        backward_weight: t[2] * each,
    });
    let played = simulate(
        &rank.schedule,
        &Durations {
            chunks: chunks.collect(),
            message: 0.0,
        },
    )?;
    Ok(played.bubble())
}

/// Reduces numbers over all ranks, beside the traffic of training.
pub(super) fn reduce<B: Device, C: Collectives<B> + Counted, E: Scalar>(
    rank: &Rank<'_, B, C, E>,
    values: &mut [f64],
    op: ReduceOp,
) -> Result<(), Failure> {
    let mut buf = rank.device.upload(Tag::Scratch, values)?;
    Collectives::<B>::all_reduce(&rank.groups.report, B::whole_mut(&mut buf), op)?;
    Ok(rank.device.download(B::whole(&buf), values)?)
}
