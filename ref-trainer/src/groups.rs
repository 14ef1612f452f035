//! The communicators of one rank, each made from the mesh and counted under the axis it serves.
//!
//! ```text
//! world     every rank: the norm, the loss, the word to stop
//! tp        inside a layer                   pp   between stages
//! dp        replicas (dp x cp): gradients, parameters, the token count
//! tie       first and last stage: a shared table
//! report    every rank, not counted: times, full states for the proof, checkpoints
//! ```

use std::collections::BTreeMap;
use std::time::Duration;

use quintet_collectives::transport::Transport;
use quintet_collectives::{Axis, Communicator, DeviceMesh, Factor, Order, ProcessGroup};
use quintet_zero::{FlatLayout, Groups as ZeroGroups, tie_ranks};

use crate::failure::Failure;

/// What a group has sent and waited for so far.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Traffic {
    /// Payload bytes sent.
    pub bytes: u64,
    /// Time the rank stood still in blocking calls.
    pub blocked: Duration,
}

/// A group whose traffic is counted.
pub trait Counted {
    /// What this rank has sent and waited for in the group.
    fn traffic(&self) -> Traffic;
}

impl<T: Transport + Send + 'static> Counted for Communicator<T> {
    fn traffic(&self) -> Traffic {
        let stats = self.stats();
        Traffic {
            bytes: stats.bytes,
            blocked: stats.blocked,
        }
    }
}

/// The communicators of one rank.
#[derive(Debug)]
pub struct Groups<C> {
    /// Every rank.
    pub world: C,
    /// The ranks that share a layer.
    pub tp: C,
    /// Replicas that sum the token count.
    pub data: C,
    /// Every rank, for what is not part of training.
    pub report: C,
    over: BTreeMap<Vec<Factor>, (&'static str, C)>,
    tie: BTreeMap<Vec<usize>, C>,
}

impl<T: Transport + Send + 'static> Groups<Communicator<T>> {
    /// Makes the groups of a rank out of the communicator over all ranks; the pipeline's group,
    /// which the stage owns, comes beside them. `flats` are the chunks of this rank.
    ///
    /// # Errors
    /// Where a group cannot be made.
    pub fn new(
        world: Communicator<T>,
        mesh: &DeviceMesh,
        flats: &[&FlatLayout],
        order: Order,
    ) -> Result<(Self, Communicator<T>), Failure> {
        let rank = world.rank();
        let make = |ranks: Vec<usize>, name: &str| -> Result<Communicator<T>, Failure> {
            let group = ProcessGroup::new(ranks, rank)?;
            Ok(world.subgroup(&group, name)?.with_order(order))
        };
        let along = |axes: &[Axis], name: &str| {
            let factors: Vec<Factor> = axes.iter().map(|&axis| mesh.factor(axis)).collect();
            make(mesh.group(rank, &factors), name)
        };
        let (mut over, mut tie) = (BTreeMap::new(), BTreeMap::new());
        for (flat, part) in flats
            .iter()
            .flat_map(|f| f.parts().iter().map(move |p| (f, p)))
        {
            for (label, factors) in [
                ("dp", &part.shard),
                ("dp", &part.across),
                ("tp", &part.extra),
            ] {
                if !factors.is_empty() && !over.contains_key(factors) {
                    let name = format!("{label} gradients {factors:?}");
                    let group = make(mesh.group(rank, factors), &name)?;
                    over.insert(factors.clone(), (label, group));
                }
            }
            if !part.stages.is_empty() && !tie.contains_key(&part.stages) {
                tie.insert(part.stages.clone(), make(tie_ranks(flat, part), "tie")?);
            }
        }
        let everyone: Vec<usize> = (0..mesh.world()).collect();
        let groups = Self {
            tp: along(&[Axis::Tp], "tp")?,
            data: along(&[Axis::Dp, Axis::Cp], "dp")?,
            report: make(everyone.clone(), "report")?,
            world: make(everyone, "world of training")?,
            over,
            tie,
        };
        Ok((groups, along(&[Axis::Pp], "pp")?))
    }
}

impl<C: Counted> Groups<C> {
    /// Bytes and waiting by axis, the pipeline's group included.
    pub fn traffic(&self, pp: &C) -> BTreeMap<&'static str, Traffic> {
        let fixed = [
            ("world", &self.world),
            ("tp", &self.tp),
            ("dp", &self.data),
            ("pp", pp),
        ];
        let over = self.over.values().map(|(label, group)| (*label, group));
        let tie = self.tie.values().map(|group| ("tie", group));
        let mut sum: BTreeMap<&'static str, Traffic> = BTreeMap::new();
        for (label, group) in fixed.into_iter().chain(over).chain(tie) {
            let (entry, more) = (sum.entry(label).or_default(), group.traffic());
            entry.bytes += more.bytes;
            entry.blocked += more.blocked;
        }
        sum
    }
}

impl<C> ZeroGroups<C> for Groups<C> {
    fn over(&self, factors: &[Factor]) -> Option<&C> {
        self.over.get(factors).map(|(_, group)| group)
    }

    fn tie(&self, stages: &[usize]) -> Option<&C> {
        self.tie.get(stages)
    }

    fn world(&self) -> &C {
        &self.world
    }
}

/// The same groups, but what goes over all ranks is not counted as training.
#[derive(Debug)]
pub struct Aside<'a, C>(pub &'a Groups<C>);

impl<C> ZeroGroups<C> for Aside<'_, C> {
    fn over(&self, factors: &[Factor]) -> Option<&C> {
        self.0.over(factors)
    }

    fn tie(&self, stages: &[usize]) -> Option<&C> {
        self.0.tie(stages)
    }

    #[allow(clippy::misnamed_getters)] // that is the point of this wrapper
    fn world(&self) -> &C {
        &self.0.report
    }
}
