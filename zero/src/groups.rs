//! The communicators that sharding needs, as the trainer gives them.

use alloc::collections::BTreeMap;
use alloc::format;
use alloc::string::String;
use alloc::vec::Vec;

use quintet_collectives::{Axis, Factor};
use quintet_kernels::{Backend, Collectives};

use crate::{Error, FlatLayout, Part};

/// Communicators by what they span. In each, ranks are in ascending order of their global rank.
pub trait Groups<C> {
    /// The ranks that differ from this one at most on these factors.
    fn over(&self, factors: &[Factor]) -> Option<&C>;

    /// The same ranks, for parameters on their way to their use under stage 3. A communicator
    /// issues its collectives in order: with one of their own, gathers of the next layer do not
    /// queue behind the reductions of the one before. Where there is none, [`Groups::over`].
    fn gathering(&self, factors: &[Factor]) -> Option<&C> {
        self.over(factors)
    }

    /// The ranks at this one's place on these stages.
    fn tie(&self, stages: &[usize]) -> Option<&C>;

    /// All ranks.
    fn world(&self) -> &C;
}

/// The groups of a layout, made by a closure: what a trainer needs in the common case.
#[derive(Debug)]
pub struct GroupSet<C> {
    over: BTreeMap<Vec<Factor>, C>,
    gathering: BTreeMap<Vec<Factor>, C>,
    tie: BTreeMap<Vec<usize>, C>,
    world: C,
}

impl<C> GroupSet<C> {
    /// Makes every group that `layouts` (the chunks of this rank) need by `make(name, ranks)`,
    /// with the ranks ascending. All members of a group ask for it under the same name, but ranks
    /// of different stages may do so in a different order.
    ///
    /// # Errors
    /// What `make` fails with.
    pub fn build<X>(
        layouts: &[&FlatLayout],
        world: C,
        mut make: impl FnMut(&str, &[usize]) -> Result<C, X>,
    ) -> Result<Self, X> {
        let (mut over, mut tie) = (BTreeMap::new(), BTreeMap::new());
        for layout in layouts {
            for part in layout.parts() {
                for factors in [&part.shard, &part.across, &part.extra] {
                    if !factors.is_empty() && !over.contains_key(factors) {
                        let ranks = layout.mesh().group(layout.rank(), factors);
                        over.insert(factors.clone(), make(&factors_name(factors), &ranks)?);
                    }
                }
                if !part.stages.is_empty() && !tie.contains_key(&part.stages) {
                    let name = format!("zero tie {:?}", part.stages);
                    tie.insert(part.stages.clone(), make(&name, &tie_ranks(layout, part))?);
                }
            }
        }
        Ok(Self {
            over,
            gathering: BTreeMap::new(),
            tie,
            world,
        })
    }

    /// Adds communicators of their own for gathers ([`Groups::gathering`]), made in the same way:
    /// for stage 3, so that in backward parameters and gradients move at once.
    ///
    /// # Errors
    /// What `make` fails with.
    pub fn with_gathering<X>(
        mut self,
        layouts: &[&FlatLayout],
        mut make: impl FnMut(&str, &[usize]) -> Result<C, X>,
    ) -> Result<Self, X> {
        for layout in layouts {
            for shard in layout.parts().iter().map(|part| &part.shard) {
                if !shard.is_empty() && !self.gathering.contains_key(shard) {
                    let ranks = layout.mesh().group(layout.rank(), shard);
                    let name = format!("{} gathers", factors_name(shard));
                    self.gathering.insert(shard.clone(), make(&name, &ranks)?);
                }
            }
        }
        Ok(self)
    }
}

impl<C> Groups<C> for GroupSet<C> {
    fn over(&self, factors: &[Factor]) -> Option<&C> {
        self.over.get(factors)
    }

    fn gathering(&self, factors: &[Factor]) -> Option<&C> {
        self.gathering.get(factors).or_else(|| self.over(factors))
    }

    fn tie(&self, stages: &[usize]) -> Option<&C> {
        self.tie.get(stages)
    }

    fn world(&self) -> &C {
        &self.world
    }
}

/// The ranks at the layout's place on the stages that hold copies of a part, ascending.
#[must_use]
pub fn tie_ranks(layout: &FlatLayout, part: &Part) -> Vec<usize> {
    let per_stage = layout.mesh().world() / layout.mesh().degree(Axis::Pp);
    let place = layout.rank() % per_stage;
    part.stages.iter().map(|s| s * per_stage + place).collect()
}

/// The communicator over `factors`, found to span the right ranks.
pub(crate) fn over<'a, B: Backend, C: Collectives<B>>(
    groups: &'a impl Groups<C>,
    layout: &FlatLayout,
    factors: &[Factor],
) -> Result<&'a C, Error> {
    let ranks = layout.mesh().group(layout.rank(), factors);
    checked(
        groups.over(factors),
        || factors_name(factors),
        &ranks,
        layout.rank(),
    )
}

/// The communicator on which parameters are gathered over `factors`, found to span the right ranks.
pub(crate) fn gathering<'a, B: Backend, C: Collectives<B>>(
    groups: &'a impl Groups<C>,
    layout: &FlatLayout,
    factors: &[Factor],
) -> Result<&'a C, Error> {
    let ranks = layout.mesh().group(layout.rank(), factors);
    let name = || format!("{} gathers", factors_name(factors));
    checked(groups.gathering(factors), name, &ranks, layout.rank())
}

/// The communicator over a part's stages, found to span the right ranks.
pub(crate) fn tie<'a, B: Backend, C: Collectives<B>>(
    groups: &'a impl Groups<C>,
    layout: &FlatLayout,
    part: &Part,
) -> Result<&'a C, Error> {
    let name = || format!("the tie of stages {:?}", part.stages);
    checked(
        groups.tie(&part.stages),
        name,
        &tie_ranks(layout, part),
        layout.rank(),
    )
}

/// The communicator over all ranks.
pub(crate) fn world<'a, B: Backend, C: Collectives<B>>(
    groups: &'a impl Groups<C>,
    layout: &FlatLayout,
) -> Result<&'a C, Error> {
    let ranks: Vec<usize> = (0..layout.mesh().world()).collect();
    checked(
        Some(groups.world()),
        || "the world".into(),
        &ranks,
        layout.rank(),
    )
}

fn checked<'a, B: Backend, C: Collectives<B>>(
    group: Option<&'a C>,
    what: impl Fn() -> String,
    ranks: &[usize],
    rank: usize,
) -> Result<&'a C, Error> {
    let place = ranks.iter().position(|&r| r == rank).unwrap_or(0);
    let got = match group {
        Some(c) if (c.rank(), c.world()) == (place, ranks.len()) => return Ok(c),
        Some(c) => format!("it has it at place {} of {}", c.rank(), c.world()),
        None => "there is none".into(),
    };
    Err(Error::Group {
        what: what(),
        place,
        world: ranks.len(),
        got,
    })
}

fn factors_name(factors: &[Factor]) -> String {
    let mut name = String::from("zero");
    for f in factors {
        name += &format!(" {}{}/{}", f.axis.name(), f.degree, f.stride);
    }
    name
}
