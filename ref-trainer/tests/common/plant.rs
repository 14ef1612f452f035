//! Changing ranks before their first step: other parameters, another ledger, another partition.

use std::sync::Arc;

use quintet_collectives::{ParamSpec, ProcessGroup};
use quintet_kernels::Scalar;
use quintet_parallel_layers::init::init_random;
use quintet_parallel_layers::pipeline::Action;
use quintet_planner::model::{StageLayer, TABLE, tied};
use quintet_ref_trainer::failure::Failure;
use quintet_ref_trainer::groups::Groups;
use quintet_ref_trainer::rank::{by_ref, rule};
use quintet_ref_trainer::record::Recorded;
use quintet_zero::{
    FlatLayout, GradSync, LayoutSpec, ParamStore, Partition, ShardedOptimizer, ZeroStage,
};

/// Sets every parameter, `value` being given its name, its logical index and what it would be.
pub fn set<E: Scalar>(
    rank: &mut Recorded<'_, E>,
    value: impl Fn(&str, usize, f64) -> f64,
) -> Result<(), Failure> {
    let seed = rank.job.seed;
    rank.fill_with(|entry, index| {
        let before = E::from_f64(init_random(&entry.spec, seed, index));
        value(&entry.spec.name, index, before.to_f64())
    })
}

/// Builds everything that follows from the ledger again, from lines that `change` has changed.
pub fn ledger(
    rank: &mut Recorded<'_, f64>,
    change: impl Fn(&mut ParamSpec),
) -> Result<(), Failure> {
    let tied = tied(&rank.job.model, &rank.job.layout);
    let within = rank.job.layout.hybrid_shard_size;
    rebuild(rank, change, &tied, within)
}

/// Gives every head a table of its own, though it is one with the embedding's on the same stage.
pub fn lend_nothing(rank: &mut Recorded<'_, f64>) -> Result<(), Failure> {
    rank.chunks.iter_mut().for_each(|c| c.borrows_table = false);
    ledger(rank, |_| ())
}

/// Changes the actions of a stage.
pub fn actions(rank: &mut Recorded<'_, f64>, stage: usize, change: impl Fn(&mut Vec<Action>)) {
    if rank.stage_index() == stage {
        change(&mut rank.actions);
    }
}

/// Forgets which tables are tied over stages.
pub fn untie(rank: &mut Recorded<'_, f64>) -> Result<(), Failure> {
    let within = rank.job.layout.hybrid_shard_size;
    rebuild(rank, |_| (), &[], within)
}

/// Shards among other replicas than the job says.
pub fn sharded_within(rank: &mut Recorded<'_, f64>, within: Option<usize>) -> Result<(), Failure> {
    let tied = tied(&rank.job.model, &rank.job.layout);
    rebuild(rank, |_| (), &tied, within)
}

fn rebuild(
    rank: &mut Recorded<'_, f64>,
    change: impl Fn(&mut ParamSpec),
    tied: &[quintet_zero::Tied],
    within: Option<usize>,
) -> Result<(), Failure> {
    let mut flats = Vec::new();
    for chunk in &rank.chunks {
        let layers = chunk.model.layers.iter().map(StageLayer::params);
        let mut specs: Vec<Vec<ParamSpec>> = layers.collect();
        specs.iter_mut().flatten().for_each(&change);
        if chunk.borrows_table {
            specs.iter_mut().for_each(|l| l.retain(|p| p.name != TABLE));
        }
        let spec = LayoutSpec {
            bucket_bytes: rank.job.layout.bucket_bytes,
            element_bytes: size_of::<f64>(),
            tied,
            shard_within: within,
        };
        let flat = FlatLayout::build(&specs, &rank.mesh, rank.rank, &spec)?;
        flats.push(Arc::new(flat));
    }
    let everyone = ProcessGroup::whole(rank.mesh.world(), rank.rank)?;
    let order = rank.groups.world.order();
    let world = rank.groups.world.subgroup(&everyone, "planted")?;
    let (groups, _) = Groups::new(world, &rank.mesh, &by_ref(&flats), order)?;
    rank.groups = groups;
    let stage = ZeroStage::from_number(rank.job.layout.zero_stage)?;
    for (chunk, flat) in rank.chunks.iter_mut().zip(&flats) {
        let partition = Partition::new(flat.clone(), stage);
        chunk.params = ParamStore::zeros(&rank.device, &partition)?;
    }
    set(rank, |_, _, was| was)?;
    stages(rank, stage, stage)
}

/// Partitions gradients by one stage and the optimizer by another.
pub fn stages(
    rank: &mut Recorded<'_, f64>,
    gradients: ZeroStage,
    optimizer: ZeroStage,
) -> Result<(), Failure> {
    for chunk in &mut rank.chunks {
        let of = |stage| Partition::new(chunk.params.layout().clone(), stage);
        let (gradients, optimizer) = (of(gradients), of(optimizer));
        chunk.grads = GradSync::new(&rank.device, &gradients, &rank.groups)?;
        let rule = rule(rank.job);
        chunk.optimizer = ShardedOptimizer::new(&rank.device, &optimizer, rule, &chunk.params)?;
    }
    Ok(())
}
