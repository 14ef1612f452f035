//! Where the ranks are, and what they share.
//!
//! ```text
//! rank out --> [NIC out] --> [leaf up] --> [leaf down] --> [NIC in] --> rank in
//!              per host      per group of hosts            per host
//!              |-- only between hosts --------------------------|
//! ```

use alloc::vec::Vec;
use core::fmt;

use crate::plan::Hosts;

/// Hosts and the links between them. Ranks of one host reach each other without a shared link.
#[derive(Debug, Clone, PartialEq)]
pub struct Topology {
    hosts: Hosts,
    nic: Option<f64>,
    leaf: Option<Leaf>,
    crossing: Crossing,
}

/// How many ranks have their peer elsewhere, by the pattern in which all ranks speak.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Crossing {
    /// At rank + 2^k: the most of one host.
    pub(super) shift: Vec<usize>,
    /// At rank xor 2^k: the most of one host.
    pub(super) flip: Vec<usize>,
    /// At rank + 1: of all hosts.
    pub(super) ring: usize,
}

/// Switches that each join some consecutive hosts and share a link to the rest.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Leaf {
    /// Hosts below one switch; at least one.
    pub hosts: usize,
    /// Seconds a byte of its link to the rest, each way.
    pub per_byte: f64,
}

/// A link, one way.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Link {
    /// Out of a rank.
    RankOut(usize),
    /// Into a rank.
    RankIn(usize),
    /// Out of a host.
    NicOut(usize),
    /// Into a host.
    NicIn(usize),
    /// From the switch of some hosts to the rest.
    LeafUp(usize),
    /// From the rest to that switch.
    LeafDown(usize),
}

impl fmt::Display for Link {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::RankOut(rank) => write!(f, "out of rank {rank}"),
            Self::RankIn(rank) => write!(f, "into rank {rank}"),
            Self::NicOut(host) => write!(f, "out of host {host}"),
            Self::NicIn(host) => write!(f, "into host {host}"),
            Self::LeafUp(leaf) => write!(f, "up from switch {leaf}"),
            Self::LeafDown(leaf) => write!(f, "down to switch {leaf}"),
        }
    }
}

impl Topology {
    /// Hosts whose ranks share one network card, as fast as one rank alone can send, and a switch
    /// that joins all hosts at full rate.
    ///
    /// ```
    /// use quintet_collectives::{cost::Topology, plan::Hosts};
    /// let two_hosts = Topology::new(Hosts::blocks(8, 4));
    /// assert_eq!(two_hosts.hosts().len(), 2);
    /// ```
    #[must_use]
    pub fn new(hosts: Hosts) -> Self {
        let crossing = Crossing::of(&hosts);
        Self {
            hosts,
            nic: None,
            leaf: None,
            crossing,
        }
    }

    /// The same with network cards of another rate, in seconds a byte each way.
    #[must_use]
    pub fn with_nic(mut self, per_byte: f64) -> Self {
        self.nic = Some(per_byte);
        self
    }

    /// The same with a link of its own for every `leaf.hosts` hosts.
    #[must_use]
    pub fn with_leaf(mut self, leaf: Leaf) -> Self {
        self.leaf = Some(Leaf {
            hosts: leaf.hosts.max(1),
            ..leaf
        });
        self
    }

    /// The hosts.
    #[must_use]
    pub fn hosts(&self) -> &Hosts {
        &self.hosts
    }

    /// Seconds a byte of a network card; none: as of one rank.
    #[must_use]
    pub fn nic(&self) -> Option<f64> {
        self.nic
    }

    /// The switches.
    #[must_use]
    pub fn leaf(&self) -> Option<Leaf> {
        self.leaf
    }

    /// The switch of a host.
    #[must_use]
    pub fn leaf_of(&self, host: usize) -> usize {
        self.leaf.map_or(0, |leaf| host / leaf.hosts)
    }

    /// Some of the ranks, in their new order; members that are no ranks are left out.
    pub(super) fn among(&self, members: &[usize]) -> Self {
        let known = members.iter().filter(|rank| **rank < self.hosts.world());
        let ids: Vec<usize> = known.map(|rank| self.hosts.host(*rank)).collect();
        Self {
            nic: self.nic,
            leaf: self.leaf,
            ..Self::new(Hosts::new(&ids))
        }
    }

    pub(super) fn crossing(&self) -> &Crossing {
        &self.crossing
    }
}

impl Crossing {
    fn of(hosts: &Hosts) -> Self {
        let n = hosts.world();
        let levels = n.next_power_of_two().trailing_zeros() as usize;
        let leaves = |rank: usize, peer: usize| hosts.host(peer % n) != hosts.host(rank);
        let most = |peer: &dyn Fn(usize) -> usize| {
            let of = |host| {
                let members = hosts.members(host).iter();
                members.filter(|rank| leaves(**rank, peer(**rank))).count()
            };
            (0..hosts.len()).map(of).max().unwrap_or(0)
        };
        let flipped = |rank: usize, k: usize| {
            let peer = rank ^ (1 << k);
            if peer < n { peer } else { rank }
        };
        Self {
            shift: (0..levels.max(1))
                .map(|k| most(&|rank| rank + (1 << k)))
                .collect(),
            flip: (0..levels.max(1))
                .map(|k| most(&|rank| flipped(rank, k)))
                .collect(),
            ring: (0..n).filter(|rank| leaves(*rank, rank + 1)).count(),
        }
    }
}
