//! What one round costs: constants at one length, and what the hosts make of a pattern.

use super::{Constants, Model, Topology, predict::Query};

/// Constants at one length, and the hosts.
#[derive(Clone, Copy)]
pub(super) struct Net<'a> {
    model: &'a Model,
    pub(super) n: usize,
    /// Ranks of the fullest host.
    pub(super) m: usize,
    /// Hosts.
    pub(super) h: usize,
    pub(super) within: Rates,
    pub(super) between: Rates,
    pub(super) nic: f64,
    pub(super) topology: Option<&'a Topology>,
}

#[derive(Clone, Copy)]
pub(super) struct Rates {
    pub(super) latency: f64,
    pub(super) overhead: f64,
    pub(super) send: f64,
    pub(super) fold: f64,
}

impl Rates {
    pub(super) fn of(constants: &Constants, bytes: u64) -> Self {
        Self {
            latency: constants.latency,
            overhead: constants.overhead,
            send: constants.send.at(bytes),
            fold: constants.fold.at(bytes),
        }
    }
}

impl<'a> Net<'a> {
    pub(super) fn of(model: &'a Model, query: &Query) -> Self {
        let bytes = query.bytes();
        let topology = model.topology_of(query.world);
        let between = Rates::of(&model.between, bytes);
        Self {
            model,
            n: query.world,
            m: topology.map_or(query.world, |all| all.hosts().most()),
            h: topology.map_or(1, |all| all.hosts().len()),
            within: Rates::of(&model.within, bytes),
            between,
            nic: topology.and_then(Topology::nic).unwrap_or(between.send),
            topology,
        }
    }

    /// The same for what lies in a buffer of so many bytes.
    pub(super) fn of_buffer(&self, bytes: u64) -> Self {
        Self {
            within: Rates::of(&self.model.within, bytes),
            between: Rates::of(&self.model.between, bytes),
            ..*self
        }
    }

    /// A round in which a rank posts messages of `bytes` within its host and out of it, and its whole
    /// host posts `leaving` of them out.
    pub(super) fn round(&self, within: f64, between: f64, leaving: f64, bytes: f64) -> f64 {
        let of = |rates: &Rates, messages| messages * (rates.overhead + bytes * rates.send);
        let ports = of(&self.within, within) + of(&self.between, between);
        let latency = if leaving > 0.0 {
            self.between.latency
        } else {
            self.within.latency
        };
        latency + ports.max(leaving * bytes * self.nic)
    }

    /// Everybody sends one message, `leaving` ranks of the fullest host out of it.
    pub(super) fn one(&self, leaving: usize, bytes: f64) -> f64 {
        if leaving > 0 {
            self.round(0.0, 1.0, leaving as f64, bytes)
        } else {
            self.round(1.0, 0.0, 0.0, bytes)
        }
    }

    /// To the rank 2^k to the right or left.
    pub(super) fn shift(&self, k: usize, bytes: f64) -> f64 {
        let leaving = self.topology.map_or(0, |all| all.crossing().shift[k]);
        self.one(leaving, bytes)
    }

    /// To the rank whose number differs in bit k.
    pub(super) fn flip(&self, k: usize, bytes: f64) -> f64 {
        let leaving = self.topology.map_or(0, |all| all.crossing().flip[k]);
        self.one(leaving, bytes)
    }

    /// One edge of a binomial tree: of a host one rank at most sends at a time.
    pub(super) fn edge(&self, k: usize, bytes: f64) -> f64 {
        let leaving = self.topology.map_or(0, |all| all.crossing().flip[k]);
        self.one(leaving.min(1), bytes)
    }

    /// `hops` hops round the ring, one after another, each with a fold; then `more` messages that
    /// follow without waiting for it. What goes round passes the links between hosts as seldom as
    /// everybody else's.
    pub(super) fn ring(&self, hops: f64, more: f64, bytes: f64, fold: f64) -> f64 {
        let all = self.topology.map_or(0, |all| all.crossing().ring) as f64 / self.n as f64;
        let most = self.topology.map_or(0, |all| all.crossing().shift[0]);
        let (near, far) = (self.one(0, bytes), self.one(most, bytes));
        let port = if most > 0 {
            far - self.between.latency
        } else {
            near - self.within.latency
        };
        let hop = (near * (1.0 - all) + far * all + fold).max(port);
        hops * hop + more * port.max(fold)
    }

    /// Everybody sends to everybody else.
    pub(super) fn peers(&self, bytes: f64) -> f64 {
        let (mates, others) = (self.m - 1, self.n - self.m);
        let leaving = self.m * others;
        self.round(mates as f64, others as f64, leaving as f64, bytes)
    }

    /// One rank sends to everybody else, or gets something of everybody.
    pub(super) fn star(&self, bytes: f64) -> f64 {
        let (mates, others) = (self.m - 1, self.n - self.m);
        self.round(mates as f64, others as f64, others as f64, bytes)
    }

    pub(super) fn fold(&self, bytes: f64) -> f64 {
        bytes * self.within.fold
    }

    /// A round of one level; none where it has no peers.
    pub(super) fn level(&self, within: f64, between: f64, leaving: f64, bytes: f64) -> f64 {
        if within + between > 0.0 {
            self.round(within, between, leaving, bytes)
        } else {
            0.0
        }
    }
}
