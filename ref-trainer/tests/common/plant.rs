//! Changing ranks before their first step: other parameters, another ledger, another partition.

use std::sync::Arc;

use quintet_collectives::{ParamSpec, ProcessGroup};
use quintet_kernels::Scalar;
use quintet_parallel_layers::init::init_random;
use quintet_planner::model::{StageLayer, tied};
use quintet_ref_trainer::failure::Failure;
use quintet_ref_trainer::groups::Groups;
use quintet_ref_trainer::rank::rule;
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
    Ok(rank.params.fill_with(|entry, index| {
        let before = E::from_f64(init_random(&entry.spec, seed, index));
        E::from_f64(value(&entry.spec.name, index, before.to_f64()))
    })?)
}

/// Builds everything that follows from the ledger again, from lines that `change` has changed.
pub fn ledger(
    rank: &mut Recorded<'_, f64>,
    change: impl Fn(&mut ParamSpec),
) -> Result<(), Failure> {
    let tied = tied(&rank.job.model, &rank.job.layout);
    rebuild(rank, change, &tied)
}

/// Forgets which tables are tied over stages.
pub fn untie(rank: &mut Recorded<'_, f64>) -> Result<(), Failure> {
    rebuild(rank, |_| (), &[])
}

fn rebuild(
    rank: &mut Recorded<'_, f64>,
    change: impl Fn(&mut ParamSpec),
    tied: &[quintet_zero::Tied],
) -> Result<(), Failure> {
    let mut specs: Vec<Vec<ParamSpec>> = rank.model.layers.iter().map(StageLayer::params).collect();
    specs.iter_mut().flatten().for_each(change);
    let spec = LayoutSpec {
        bucket_bytes: rank.job.layout.bucket_bytes,
        element_bytes: size_of::<f64>(),
        tied,
    };
    let flat = Arc::new(FlatLayout::build(&specs, &rank.mesh, rank.rank, &spec)?);
    let everyone = ProcessGroup::whole(rank.mesh.world(), rank.rank)?;
    let world = rank.groups.world.subgroup(&everyone, "planted")?;
    let (groups, _) = Groups::new(world, &rank.mesh, &flat, &rank.job.layout)?;
    rank.groups = groups;
    rank.params = ParamStore::zeros(&rank.device, &flat)?;
    set(rank, |_, _, was| was)?;
    let stage = ZeroStage::from_number(rank.job.layout.zero_stage)?;
    partition(rank, &flat, stage, stage)
}

/// Partitions gradients by one stage and the optimizer by another.
pub fn stages(
    rank: &mut Recorded<'_, f64>,
    gradients: ZeroStage,
    optimizer: ZeroStage,
) -> Result<(), Failure> {
    let flat = rank.params.layout().clone();
    partition(rank, &flat, gradients, optimizer)
}

fn partition(
    rank: &mut Recorded<'_, f64>,
    flat: &Arc<FlatLayout>,
    gradients: ZeroStage,
    optimizer: ZeroStage,
) -> Result<(), Failure> {
    let of = |stage| Partition::new(flat.clone(), stage);
    rank.grads = GradSync::new(&rank.device, &of(gradients)?, &rank.groups)?;
    let rule = rule(rank.job);
    rank.optimizer = ShardedOptimizer::new(&rank.device, &of(optimizer)?, rule, &rank.params)?;
    Ok(())
}
