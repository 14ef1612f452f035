//! Values that are moved between other ranks than the mesh says, in another order, or by another
//! move.

use quintet_collectives::Axis;
use quintet_planner::config::Layout;
use quintet_planner::model::stage_layers;
use quintet_ref_trainer::failure::Failure;
use quintet_ref_trainer::job::Job;
use quintet_ref_trainer::record::Recorded;

use super::{Fault, fault, regrouped, replicas};

pub fn faults() -> Vec<Fault> {
    [counts(), experts(), context(), tensor()].concat()
}

/// The ranks along `axes`, in another order or without some.
fn along(
    rank: &Recorded<'_, f64>,
    axes: &[Axis],
    change: impl Fn(&mut Vec<usize>),
) -> Result<quintet_collectives::Communicator<quintet_collectives::Local>, Failure> {
    let factors: Vec<_> = axes.iter().map(|&axis| rank.mesh.factor(axis)).collect();
    let mut ranks = rank.mesh.group(rank.rank, &factors);
    change(&mut ranks);
    regrouped(rank, ranks, "planted")
}

fn moe(job: &Job) -> bool {
    job.model
        .moe
        .is_some_and(|moe| moe.first_dense < job.model.layers)
}

fn counts() -> Vec<Fault> {
    vec![
        fault(
            "the mean is of each rank's own tokens",
            |job| replicas(job) > 1,
            |rank| {
                rank.groups.data = regrouped(rank, vec![rank.rank], "planted")?;
                Ok(())
            },
        ),
        fault(
            "tokens are counted over dp alone",
            |job| job.layout.cp > 1,
            |rank| {
                rank.groups.data = along(rank, &[Axis::Dp], |_| ())?;
                Ok(())
            },
        ),
        fault(
            "tokens are counted over cp alone",
            |job| job.layout.dp > 1,
            |rank| {
                rank.groups.data = along(rank, &[Axis::Cp], |_| ())?;
                Ok(())
            },
        ),
        fault(
            "tokens are counted over tp too",
            |job| job.layout.tp > 1,
            |rank| {
                rank.groups.data = along(rank, &[Axis::Dp, Axis::Cp, Axis::Tp], |_| ())?;
                Ok(())
            },
        ),
        fault(
            "the norm is of each stage alone",
            |job| job.layout.pp > 1,
            |rank| {
                rank.groups.world = along(rank, &[Axis::Dp, Axis::Cp, Axis::Tp], |_| ())?;
                Ok(())
            },
        ),
    ]
}

fn experts() -> Vec<Fault> {
    let alone: super::Plant = |rank| {
        rank.groups.replica = regrouped(rank, vec![rank.rank], "planted")?;
        Ok(())
    };
    vec![
        fault(
            "a loss of balance from local counts",
            |job| {
                let of = |moe: quintet_planner::config::MoeConfig| {
                    moe.aux_loss > 0.0 && moe.capacity_factor.is_none()
                };
                moe(job) && job.layout.cp * job.layout.tp > 1 && job.model.moe.is_some_and(of)
            },
            alone,
        ),
        fault(
            "capacity is dealt out by local order",
            |job| {
                let of = |moe: quintet_planner::config::MoeConfig| {
                    moe.aux_loss == 0.0 && moe.z_loss == 0.0 && moe.capacity_factor.is_some()
                };
                moe(job) && job.layout.cp * job.layout.tp > 1 && job.model.moe.is_some_and(of)
            },
            alone,
        ),
        fault(
            "experts are looked for on the wrong ranks",
            |job| moe(job) && job.layout.ep > 1,
            |rank| {
                rank.groups.ep = along(rank, &[Axis::Ep], |ranks| ranks.reverse())?;
                Ok(())
            },
        ),
        fault(
            "parts of experts are not summed over etp",
            |job| moe(job) && job.layout.etp > 1,
            |rank| {
                rank.groups.etp = regrouped(rank, vec![rank.rank], "planted")?;
                Ok(())
            },
        ),
    ]
}

fn context() -> Vec<Fault> {
    vec![
        fault(
            "each part of a sequence sees only itself",
            |job| job.layout.cp > 1,
            |rank| {
                (rank.groups.keys, rank.groups.heads) = (None, None);
                Ok(())
            },
        ),
        fault(
            "keys of one place under the positions of another",
            |job| job.layout.cp_outer() > 1,
            |rank| {
                let Some(keys) = rank.groups.keys.take() else {
                    return Ok(());
                };
                let mut ranks = keys.group().ranks().to_vec();
                ranks.reverse();
                rank.groups.keys = Some(regrouped(rank, ranks, "planted")?);
                Ok(())
            },
        ),
        fault(
            "ulysses: heads are permuted",
            |job| job.layout.cp > 1 && job.layout.ulysses() > 1,
            |rank| {
                let Some(heads) = rank.groups.heads.take() else {
                    return Ok(());
                };
                let mut ranks = heads.group().ranks().to_vec();
                ranks.reverse();
                rank.groups.heads = Some(regrouped(rank, ranks, "planted")?);
                Ok(())
            },
        ),
        fault(
            "a ring where keys are to be gathered, and the other way round",
            |job| job.layout.cp_outer() > 1,
            |rank| {
                rank.groups.gather = !rank.groups.gather;
                Ok(())
            },
        ),
        fault(
            "tokens of the mirrored place",
            |job| job.layout.cp > 1,
            |rank| {
                rank.seat.place = rank.seat.cp - 1 - rank.seat.place;
                Ok(())
            },
        ),
    ]
}

/// Builds the layers of every chunk again, under a layout that `change` has changed.
fn other_layers(rank: &mut Recorded<'_, f64>, change: impl Fn(&mut Layout)) -> Result<(), Failure> {
    let mut layout = rank.job.layout.clone();
    change(&mut layout);
    let stage = rank.stage_index();
    for (chunk, held) in rank.chunks.iter_mut().enumerate() {
        held.model.layers = stage_layers(&rank.job.model, &layout, &rank.mesh, stage, chunk)?;
    }
    Ok(())
}

fn tensor() -> Vec<Fault> {
    vec![
        fault(
            "shards of tp on the wrong ranks",
            |job| job.layout.tp > 1,
            |rank| {
                rank.groups.tp = along(rank, &[Axis::Tp], |ranks| ranks.reverse())?;
                Ok(())
            },
        ),
        fault(
            "layers sum over ranks that are not of their tp",
            |job| job.layout.tp > 1,
            |rank| {
                rank.groups.tp = regrouped(rank, vec![rank.rank], "planted")?;
                Ok(())
            },
        ),
        fault(
            "the moves of layers are those without sequence-parallel",
            |job| job.layout.tp > 1 && job.layout.sequence_parallel,
            |rank| other_layers(rank, |layout| layout.sequence_parallel = false),
        ),
        fault(
            "the moves of layers are those of sequence-parallel",
            |job| job.layout.tp > 1 && !job.layout.sequence_parallel,
            |rank| other_layers(rank, |layout| layout.sequence_parallel = true),
        ),
    ]
}
