//! Partitions that say otherwise who keeps what, and how many keep it.

use quintet_ref_trainer::job::{Job, OptimizerKind};
use quintet_zero::{ParamStore, Partition, ZeroStage};

use super::{Fault, fault, replicas};
use crate::common::plant;

pub fn faults() -> Vec<Fault> {
    let mut all = stages();
    all.extend(shards());
    all
}

fn sharded(job: &Job, stage: u8) -> bool {
    // Whole replicas that shard among one are not sharded at all.
    let among = job.layout.hybrid_shard_size.unwrap_or(replicas(job));
    job.layout.zero_stage == stage && among > 1
}

fn stages() -> Vec<Fault> {
    vec![
        fault(
            "ZeRO 1: gradients scattered, the optimizer whole",
            |job| sharded(job, 1),
            |rank| plant::stages(rank, ZeroStage::One, ZeroStage::Ddp),
        ),
        fault(
            "ZeRO 1: gradients whole, the optimizer scattered",
            |job| sharded(job, 1),
            |rank| plant::stages(rank, ZeroStage::Ddp, ZeroStage::One),
        ),
        fault(
            "ZeRO 2: gradients kept whole until the step",
            |job| sharded(job, 2),
            |rank| plant::stages(rank, ZeroStage::One, ZeroStage::Two),
        ),
        fault(
            "ZeRO 3: parameters gathered once and kept",
            |job| sharded(job, 3),
            |rank| {
                for chunk in &mut rank.chunks {
                    for bucket in 0..chunk.segments.len() {
                        chunk.params.gather(&rank.groups, bucket)?;
                    }
                }
                Ok(())
            },
        ),
        fault(
            "ZeRO 3: parameters whole",
            |job| sharded(job, 3),
            |rank| {
                for chunk in &mut rank.chunks {
                    let whole = Partition::new(chunk.params.layout().clone(), ZeroStage::Two);
                    chunk.params = ParamStore::zeros(&rank.device, &whole)?;
                }
                plant::set(rank, |_, _, was| was)
            },
        ),
        fault(
            "AdamW counts its steps from 1",
            |job| job.optimizer.kind == OptimizerKind::AdamW,
            |rank| {
                for chunk in &mut rank.chunks {
                    chunk.optimizer.fill(1, |_, _, _| 0.0)?;
                }
                Ok(())
            },
        ),
    ]
}

fn shards() -> Vec<Fault> {
    vec![
        fault(
            "hybrid: shards among all replicas",
            |job| {
                let within = job.layout.hybrid_shard_size;
                within.is_some_and(|within| within < replicas(job))
            },
            |rank| plant::sharded_within(rank, None),
        ),
        fault(
            "shards among one replica where all should share",
            |job| (1..4).any(|stage| sharded(job, stage)),
            |rank| plant::sharded_within(rank, Some(1)),
        ),
    ]
}
