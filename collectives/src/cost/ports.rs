//! The links of a topology during a simulation: until when each is held, and what it has carried.

use alloc::{vec, vec::Vec};

use super::{Link, LinkLoad, Model, Topology, net::Rates};

/// The links, and until when each is held.
pub(super) struct Ports<'a> {
    topology: Option<&'a Topology>,
    whole: Pair,
    recent: Pair,
    nic: f64,
    leaf: f64,
    rank_out: Vec<Port>,
    rank_in: Vec<Port>,
    nic_out: Vec<Port>,
    nic_in: Vec<Port>,
    leaf_up: Vec<Port>,
    leaf_down: Vec<Port>,
}

/// Within a host, and between hosts.
#[derive(Clone, Copy)]
struct Pair(Rates, Rates);

impl Pair {
    fn of(model: &Model, bytes: u64) -> Self {
        Self(
            Rates::of(&model.within, bytes),
            Rates::of(&model.between, bytes),
        )
    }
}

#[derive(Default, Clone, Copy)]
struct Port {
    free: f64,
    bytes: u64,
    busy: f64,
}

impl<'a> Ports<'a> {
    /// Of a buffer of `bytes`; what was just computed lies in as many of them as `recent` says.
    pub(super) fn new(model: &'a Model, n: usize, bytes: u64, recent: u64) -> Self {
        let topology = model.topology.as_ref();
        let hosts = topology.map_or(0, |all| all.hosts().len());
        let leaves = topology.map_or(0, |all| all.leaf_of(hosts.saturating_sub(1)) + 1);
        let whole = Pair::of(model, bytes);
        let ports = |count| vec![Port::default(); count];
        Self {
            topology,
            whole,
            recent: Pair::of(model, recent),
            nic: topology.and_then(Topology::nic).unwrap_or(whole.1.send),
            leaf: topology
                .and_then(Topology::leaf)
                .map_or(0.0, |leaf| leaf.per_byte),
            rank_out: ports(n),
            rank_in: ports(n),
            nic_out: ports(hosts),
            nic_in: ports(hosts),
            leaf_up: ports(leaves),
            leaf_down: ports(leaves),
        }
    }

    /// When a message posted at `time` has left its sender, and when it is there. What was just computed is
    /// `recent`.
    pub(super) fn carry(
        &mut self,
        (from, to): (usize, usize),
        (bytes, recent): (u64, bool),
        time: f64,
    ) -> (f64, f64) {
        let hosts = self
            .topology
            .map(|all| (all, all.hosts().host(from), all.hosts().host(to)));
        let far = hosts.filter(|(_, from, to)| from != to);
        let Pair(within, between) = if recent { self.recent } else { self.whole };
        let rates = if far.is_some() { between } else { within };
        let (port, length) = (rates.overhead + bytes as f64 * rates.send, bytes as f64);
        let start = self.rank_out[from].hold(time, port, bytes);
        let gone = start + port;
        let (mut at, mut there) = (start, gone);
        let mut pass = |link: &mut Port, seconds: f64| {
            at = link.hold(at, seconds, bytes);
            there = there.max(at + seconds);
        };
        if let Some((all, source, target)) = far {
            pass(&mut self.nic_out[source], length * self.nic);
            let (up, down) = (all.leaf_of(source), all.leaf_of(target));
            if up != down {
                pass(&mut self.leaf_up[up], length * self.leaf);
                pass(&mut self.leaf_down[down], length * self.leaf);
            }
            pass(&mut self.nic_in[target], length * self.nic);
        }
        pass(&mut self.rank_in[to], port);
        (gone, there + rates.latency)
    }

    pub(super) fn loads(&self) -> Vec<LinkLoad> {
        let links: [(&[Port], fn(usize) -> Link); 6] = [
            (&self.rank_out, Link::RankOut),
            (&self.rank_in, Link::RankIn),
            (&self.nic_out, Link::NicOut),
            (&self.nic_in, Link::NicIn),
            (&self.leaf_up, Link::LeafUp),
            (&self.leaf_down, Link::LeafDown),
        ];
        let loads = links.into_iter().flat_map(|(ports, link)| {
            let used = ports.iter().enumerate().filter(|(_, port)| port.bytes > 0);
            used.map(move |(i, port)| LinkLoad {
                link: link(i),
                bytes: port.bytes,
                busy: port.busy,
            })
        });
        loads.collect()
    }
}

impl Port {
    /// Holds the link from `time` on, or from when it is free; says which.
    fn hold(&mut self, time: f64, seconds: f64, bytes: u64) -> f64 {
        let start = time.max(self.free);
        self.free = start + seconds;
        self.bytes += bytes;
        self.busy += seconds;
        start
    }
}
