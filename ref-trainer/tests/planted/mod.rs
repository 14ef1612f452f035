//! Faults in data, by what they change: each is switched on for a whole run of draws.

pub mod ledger;
pub mod moves;
pub mod plans;
pub mod schedules;
pub mod step;

use quintet_collectives::{Communicator, Local, ProcessGroup};
use quintet_ref_trainer::failure::Failure;
use quintet_ref_trainer::job::Job;
use quintet_ref_trainer::record::Recorded;

/// Changes a sound rank before its first step.
pub type Plant = fn(&mut Recorded<'_, f64>) -> Result<(), Failure>;

/// One fault.
#[derive(Clone, Copy)]
pub struct Fault {
    /// What goes wrong.
    pub what: &'static str,
    /// Whether a job has what the fault changes. Others run as they would without it, and are not
    /// run again.
    pub touches: fn(&Job) -> bool,
    /// Plants it in each rank.
    pub plant: Plant,
}

const fn fault(what: &'static str, touches: fn(&Job) -> bool, plant: Plant) -> Fault {
    Fault {
        what,
        touches,
        plant,
    }
}

/// All of them.
pub fn all() -> Vec<Fault> {
    [
        ledger::faults(),
        moves::faults(),
        schedules::faults(),
        plans::faults(),
        step::faults(),
    ]
    .concat()
}

/// A group of the rank's world with other members, or in another order.
fn regrouped(
    rank: &Recorded<'_, f64>,
    ranks: Vec<usize>,
    name: &str,
) -> Result<Communicator<Local>, Failure> {
    let group = ProcessGroup::new(ranks, rank.rank)?;
    Ok(rank.groups.world.subgroup(&group, name)?)
}

/// Ranks that dp and cp deal tokens to.
fn replicas(job: &Job) -> usize {
    job.layout.dp * job.layout.cp
}
