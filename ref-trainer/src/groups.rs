//! The communicators of one rank, each made from the mesh and counted under the axis it serves.
//!
//! ```text
//! world     every rank: the norm, the loss, the word to stop
//! tp        inside a layer                   pp   between stages
//! cp        parts of a sequence: keys over the outer factor, heads over the inner (ulysses)
//! dp        replicas (dp x cp): gradients, the token count; parameters, which under ZeRO-3 have a
//!           communicator of their own, so that they do not queue behind gradients
//! replica   the ranks that share a microbatch (cp x tp): statistics of routers
//! ep, etp   the ranks that share the experts, and each expert: rows
//! edp       replicas of experts: their gradients and parameters
//! tie       first and last stage: a shared table
//! report    every rank, not counted: times, full states for the proof, checkpoints
//! ```

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use quintet_collectives::transport::Transport;
use quintet_collectives::{Axis, Communicator, DeviceMesh, Factor, Order, ProcessGroup};
use quintet_parallel_layers::ContextGroups;
use quintet_planner::traffic::replicas;
use quintet_planner::{CpComm, Layout};
use quintet_zero::{FlatLayout, Groups as ZeroGroups, Part, tie_ranks};

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
    /// Bytes that this rank has sent in the group, by the global rank that got them.
    fn sent_to(&self) -> BTreeMap<usize, u64>;
}

impl<T: Transport + Send + 'static> Counted for Communicator<T> {
    fn traffic(&self) -> Traffic {
        let stats = self.stats();
        Traffic {
            bytes: stats.bytes,
            blocked: stats.blocked,
        }
    }

    fn sent_to(&self) -> BTreeMap<usize, u64> {
        self.sent_to()
    }
}

/// The communicators of one rank.
#[derive(Debug)]
pub struct Groups<C> {
    /// Every rank.
    pub world: C,
    /// The ranks that share a layer.
    pub tp: C,
    /// The ranks that bring keys and values together; none where one has them all.
    pub keys: Option<C>,
    /// Whether those gather them.
    pub gather: bool,
    /// The ranks that exchange tokens for heads.
    pub heads: Option<C>,
    /// Replicas and parts of sequences, which sum the token count.
    pub data: C,
    /// The ranks that share a microbatch.
    pub replica: C,
    /// The ranks that share the experts.
    pub ep: C,
    /// The ranks that share each expert.
    pub etp: C,
    /// Every rank, for what is not part of training.
    pub report: C,
    over: BTreeMap<Vec<Factor>, (&'static str, C)>,
    gathering: BTreeMap<Vec<Factor>, (&'static str, C)>,
    tie: BTreeMap<Vec<usize>, C>,
    /// Labels of groups that ranks of other stages have.
    elsewhere: BTreeSet<&'static str>,
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
        layout: &Layout,
    ) -> Result<(Self, Communicator<T>), Failure> {
        let rank = world.rank();
        let order = if layout.any_order {
            Order::Any
        } else {
            Order::Rank
        };
        let make = |ranks: Vec<usize>, name: &str| -> Result<Communicator<T>, Failure> {
            let group = ProcessGroup::new(ranks, rank)?;
            Ok(world.subgroup(&group, name)?.with_order(order))
        };
        let along = |axes: &[Axis], name: &str| {
            let factors: Vec<Factor> = axes.iter().map(|&axis| mesh.factor(axis)).collect();
            make(mesh.group(rank, &factors), name)
        };
        let (mut over, mut tie) = (BTreeMap::new(), BTreeMap::new());
        let mut gathering = BTreeMap::new();
        for (flat, part) in flats
            .iter()
            .flat_map(|f| f.parts().iter().map(move |p| (f, p)))
        {
            for (label, factors) in summed(part) {
                if !factors.is_empty() && !over.contains_key(factors) {
                    let name = format!("{label} gradients {factors:?}");
                    let group = make(mesh.group(rank, factors), &name)?;
                    over.insert(factors.clone(), (label, group));
                }
            }
            if layout.zero_stage == 3 && part.places > 1 && !gathering.contains_key(&part.shard) {
                let label = replicas(&part.shard);
                let name = format!("{label} parameters {:?}", part.shard);
                let group = make(mesh.group(rank, &part.shard), &name)?;
                gathering.insert(part.shard.clone(), (label, group));
            }
            if !part.stages.is_empty() && !tie.contains_key(&part.stages) {
                tie.insert(part.stages.clone(), make(tie_ranks(flat, part), "tie")?);
            }
        }
        let (outer, inner) = mesh.split_axis(Axis::Cp, layout.cp_outer())?;
        let part = |factor: Factor, name: &str| match factor.degree {
            1 => Ok(None),
            _ => make(mesh.group(rank, &[factor]), name).map(Some),
        };
        let everyone: Vec<usize> = (0..mesh.world()).collect();
        let groups = Self {
            tp: along(&[Axis::Tp], "tp")?,
            keys: part(outer, "cp keys")?,
            gather: layout.cp_comm == CpComm::AllGather,
            heads: part(inner, "cp heads")?,
            data: along(&[Axis::Dp, Axis::Cp], "dp")?,
            replica: along(&[Axis::Cp, Axis::Tp], "replica")?,
            ep: along(&[Axis::Ep], "ep")?,
            etp: along(&[Axis::Etp], "etp")?,
            report: make(everyone.clone(), "report")?,
            world: make(everyone, "world of training")?,
            over,
            gathering,
            tie,
            elsewhere: BTreeSet::new(),
        };
        Ok((groups, along(&[Axis::Pp], "pp")?))
    }
}

/// What a part is summed over, with the label that is counted under.
fn summed(part: &Part) -> [(&'static str, &Vec<Factor>); 3] {
    [
        (replicas(&part.shard), &part.shard),
        (replicas(&part.across), &part.across),
        ("tp", &part.extra),
    ]
}

/// The labels of the groups that parts of these chunks are summed in.
pub fn labels<'a>(flats: impl IntoIterator<Item = &'a FlatLayout>) -> BTreeSet<&'static str> {
    let mut labels = BTreeSet::new();
    for part in flats.into_iter().flat_map(FlatLayout::parts) {
        let summed = summed(part).into_iter().filter(|(_, f)| !f.is_empty());
        labels.extend(summed.map(|(label, _)| label));
        labels.extend((!part.stages.is_empty()).then_some(TIE));
    }
    labels
}

/// The label that the traffic of the group of this name is counted under, which its name begins with;
/// none for a group that is no part of training.
#[must_use]
pub fn label(name: &str) -> Option<&'static str> {
    let first = name.split(' ').next()?;
    let known = [
        "cp", "dp", "edp", "ep", "etp", "pp", "replica", TIE, "tp", "world",
    ];
    known.into_iter().find(|label| *label == first)
}

/// What the group of a table that stages share is counted under.
const TIE: &str = "tie";

impl<C> Groups<C> {
    /// Counts under these labels too, at 0: with those of every stage all ranks count under the
    /// same.
    pub fn count_also(&mut self, labels: BTreeSet<&'static str>) {
        self.elsewhere.extend(labels);
    }

    /// The context parallel groups, as layers take them.
    pub fn context(&self) -> ContextGroups<'_, C> {
        ContextGroups {
            keys: self.keys.as_ref(),
            gather: self.gather,
            heads: self.heads.as_ref(),
        }
    }
}

impl<C: Counted> Groups<C> {
    /// Bytes and waiting by label, the pipeline's group included.
    pub fn traffic(&self, pp: &C) -> BTreeMap<&'static str, Traffic> {
        let none = self.elsewhere.iter().map(|&l| (l, Traffic::default()));
        let mut sum: BTreeMap<&'static str, Traffic> = none.collect();
        for (label, group) in self.counted(pp) {
            let (entry, more) = (sum.entry(label).or_default(), group.traffic());
            entry.bytes += more.bytes;
            entry.blocked += more.blocked;
        }
        sum
    }

    /// Bytes sent so far, by axis and by the global rank that got them.
    pub fn sent_to(&self, pp: &C) -> BTreeMap<&'static str, BTreeMap<usize, u64>> {
        let mut sum: BTreeMap<&'static str, BTreeMap<usize, u64>> = BTreeMap::new();
        for (label, group) in self.counted(pp) {
            let entry = sum.entry(label).or_default();
            for (to, bytes) in group.sent_to() {
                *entry.entry(to).or_default() += bytes;
            }
        }
        sum
    }

    /// Every group that is part of training, with the label it is counted under.
    fn counted<'a>(&'a self, pp: &'a C) -> impl Iterator<Item = (&'static str, &'a C)> {
        let fixed = [
            ("world", &self.world),
            ("tp", &self.tp),
            ("dp", &self.data),
            ("replica", &self.replica),
            ("ep", &self.ep),
            ("etp", &self.etp),
            ("pp", pp),
        ];
        let over = self.over.values().chain(self.gathering.values());
        let over = over.map(|(label, group)| (*label, group));
        let context = [&self.keys, &self.heads].into_iter().flatten();
        let context = context.map(|group| ("cp", group));
        let tie = self.tie.values().map(|group| (TIE, group));
        fixed.into_iter().chain(context).chain(over).chain(tie)
    }
}

impl<C> ZeroGroups<C> for Groups<C> {
    fn over(&self, factors: &[Factor]) -> Option<&C> {
        self.over.get(factors).map(|(_, group)| group)
    }

    fn gathering(&self, factors: &[Factor]) -> Option<&C> {
        let own = self.gathering.get(factors).map(|(_, group)| group);
        own.or_else(|| self.over(factors))
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

    fn gathering(&self, factors: &[Factor]) -> Option<&C> {
        self.0.gathering(factors)
    }

    fn tie(&self, stages: &[usize]) -> Option<&C> {
        self.0.tie(stages)
    }

    #[allow(clippy::misnamed_getters)] // that is the point of this wrapper
    fn world(&self) -> &C {
        &self.0.report
    }
}
