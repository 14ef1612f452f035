//! Which plan when: predicted times from a few constants, overrides, and a simulation on links.
//!
//! ```text
//! shape, world, dtype, order --> hard constraints --> override --> least predicted time --> PlanSpec
//!                                (order, world)       (a string)    constants x closed form
//! ```
//!
//! Everything here is a pure function of values that are equal on all ranks: whoever has the same
//! [`Model`] makes the same choice, and times that are equal but for roundings are settled by
//! [`Algorithm::ALL`]'s order.
//! [`Model::explain`] shows every candidate; [`simulate`] places a plan's messages one by one on the
//! links of a [`Topology`].
//!
//! # The closed forms
//!
//! A rank that posts k messages of b bytes in a round, and folds f bytes of what comes, takes
//! `latency + k (overhead + b * send) + f * fold`; where they leave the host, at least the time its
//! network card needs for what all its ranks send. A plan takes the sum over its rounds. With
//! a = latency + overhead, n = 2^L ranks and S bytes:
//!
//! | all_reduce         | time |
//! |--------------------|------|
//! | ring               | 2(n-1) a + 2(n-1)/n S send + (n-1)/n S fold |
//! | tree               | 2L (a + S send) + L S fold |
//! | recursive_doubling | L (a + S send + S fold) |
//! | halving_doubling   | 2L a + 2(n-1)/n S send + (n-1)/n S fold |
//!
//! The tests hold [`simulate`] to these. The names are those of Thakur, Rabenseifner and Gropp
//! (2005); the choice by measured constants follows NCCL's tuner, the override string UCC's.

use alloc::string::ToString;

use crate::{
    Algorithm, DType, Error, Order, Result,
    plan::{CollectiveShape, Operation, Plan, PlanSpec},
};

mod constants;
mod explain;
mod net;
mod overrides;
mod ports;
mod predict;
mod simulate;
mod topology;

pub use constants::{Constants, Curve, Piece, parse, write};
pub use explain::{Explanation, Row, Verdict};
pub use overrides::Overrides;
pub use simulate::{LinkLoad, Simulated, simulate};
pub use topology::{Leaf, Link, Topology};

/// What a choice is made from; equal on all ranks.
#[derive(Debug, Clone, PartialEq)]
pub struct Model {
    /// Messages between ranks of one host.
    pub within: Constants,
    /// Messages between hosts.
    pub between: Constants,
    /// Where the ranks are; `None`: nobody says, and times are those of one host. Pairs take a long sum in pieces
    /// that fit the caches only where this says that all are on one host: over a network each is one more wait.
    pub topology: Option<Topology>,
    /// What somebody demands.
    pub overrides: Overrides,
}

impl Default for Model {
    /// Threads of one host, constants of [`Constants::LOCAL`], nothing demanded.
    fn default() -> Self {
        Self {
            within: Constants::LOCAL,
            between: Constants::TCP,
            topology: None,
            overrides: Overrides::default(),
        }
    }
}

impl Model {
    /// The algorithm for an operation whose chunks are all alike: `bytes` of f32 in all.
    #[must_use]
    pub fn choose_even(
        &self,
        op: Operation,
        bytes: usize,
        world: usize,
        order: Order,
    ) -> Algorithm {
        let call = predict::Query::even(op, bytes, world);
        self.best(&call, order)
            .map_or(Algorithm::Direct, |(spec, _)| spec.algorithm)
    }

    /// The plan to perform, with its parameters.
    ///
    /// # Errors
    /// [`Error::Override`] where what is demanded cannot be, [`Error::Plan`] as of
    /// [`Plan::from_spec`].
    ///
    /// ```
    /// use quintet_collectives::{Algorithm, CollectiveShape, DType, Order, cost::Model};
    /// let model = Model { overrides: "all_reduce:0-4k:tree,4k-:ring".parse()?, ..Model::default() };
    /// let shape = CollectiveShape::AllReduce { len: 100 };
    /// let plan = model.plan(shape.clone(), 8, DType::F32, Order::Any)?;
    /// assert_eq!(plan.algorithm(), Algorithm::Tree);
    /// // A tree folds on the way, which the default order does not admit.
    /// assert!(model.plan(shape, 8, DType::F32, Order::Rank).is_err());
    /// # Ok::<(), quintet_collectives::Error>(())
    /// ```
    pub fn plan(
        &self,
        shape: CollectiveShape,
        world: usize,
        dtype: DType,
        order: Order,
    ) -> Result<Plan> {
        let spec = self.choose(&shape, world, dtype, order)?;
        Plan::from_spec(shape, spec, world)
    }

    /// The algorithm and its parameters.
    ///
    /// # Errors
    /// [`Error::Override`] where nothing is left that the operation, the order and the override
    /// string all admit; [`Error::Plan`] for counts or a topology that do not fit the world.
    pub fn choose(
        &self,
        shape: &CollectiveShape,
        world: usize,
        dtype: DType,
        order: Order,
    ) -> Result<PlanSpec> {
        let call = self.query(shape, world, dtype)?;
        match self.best(&call, order) {
            Some((spec, _)) => Ok(spec),
            None => Err(Error::Override {
                text: self.overrides.to_string(),
                reason: self.explain_query(&call, order).why_none(),
            }),
        }
    }

    /// Every candidate with its predicted time, and what is excluded with its reason.
    ///
    /// # Errors
    /// [`Error::Plan`] for counts or a topology that do not fit the world.
    pub fn explain(
        &self,
        shape: &CollectiveShape,
        world: usize,
        dtype: DType,
        order: Order,
    ) -> Result<Explanation> {
        Ok(self.explain_query(&self.query(shape, world, dtype)?, order))
    }

    /// The same model for some of the ranks, in their new order.
    #[must_use]
    pub fn among(&self, members: &[usize]) -> Self {
        let topology = self.topology.as_ref().map(|all| all.among(members));
        Self {
            topology,
            ..self.clone()
        }
    }

    /// The topology, where it is of a world of so many.
    fn topology_of(&self, world: usize) -> Option<&Topology> {
        let topology = self.topology.as_ref();
        topology.filter(|all| all.hosts().world() == world)
    }

    fn query(&self, shape: &CollectiveShape, world: usize, dtype: DType) -> Result<predict::Query> {
        let hosts = self.topology.as_ref().map(|all| all.hosts().world());
        let reason = if world == 0 {
            Some("a group has at least one rank".to_string())
        } else if let Some(hosts) = hosts.filter(|hosts| *hosts != world) {
            Some(alloc::format!("the topology holds {hosts} ranks"))
        } else {
            shape.unfit(world)
        };
        match reason {
            None => {
                let topology = self.topology_of(world);
                let near = topology.is_some_and(|all| all.hosts().len() == 1);
                Ok(predict::Query::of(shape, world, dtype, near))
            }
            Some(reason) => Err(Error::Plan {
                op: shape.operation().name(),
                algorithm: "any",
                world,
                reason,
            }),
        }
    }
}
