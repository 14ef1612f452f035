//! Which links a group's bytes go over, where ranks lie on nodes in the order of the mesh.
//!
//! ```text
//! nodes of 4     0 1 2 3 | 4 5 6 7 | 8 9 ..
//! stride 1 of 4  o-o-o-o                      inside alone
//! stride 2 of 4  o---o-----o---o              2 members a node: 1 hop of 2 crosses
//! stride 4 of 2  o---------o                  every hop crosses
//! ```
//!
//! A collective is taken for a ring through its members in their order, an all-to-all goes from
//! each to each.

use alloc::collections::BTreeMap;

use crate::closed::sent::Collective;
use crate::cluster::Cluster;

/// How a kind of group lies on the nodes, over all groups of the kind.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Lie {
    /// Of a ring's hops, the share that crosses nodes.
    pub crossing: f64,
    /// Of the pairs of different members, the share on two nodes.
    pub apart: f64,
    /// Of the hops from a member to the next that do not close the ring, the share that crosses.
    pub onward: f64,
}

/// How groups of `degree` ranks, each `stride` after the one before, lie on nodes of `per_node`.
#[must_use]
pub fn lie(stride: usize, degree: usize, per_node: usize) -> Lie {
    if degree < 2 || per_node == 0 {
        return Lie::default();
    }
    // The pattern repeats after the least common multiple of a block of groups and a node.
    let block = stride * degree;
    let period = block / gcd(block, per_node) * per_node;
    let (mut hops, mut crossing, mut onward, mut pairs, mut apart) = (0u64, 0u64, 0u64, 0u64, 0u64);
    let mut counts: BTreeMap<usize, u64> = BTreeMap::new();
    for first in (0..period).filter(|r| r % block < stride) {
        let node = |member: usize| (first + member % degree * stride) / per_node;
        counts.clear();
        for member in 0..degree {
            let crosses = node(member) != node(member + 1);
            crossing += u64::from(crosses);
            onward += u64::from(crosses && member + 1 < degree);
            *counts.entry(node(member)).or_default() += 1;
        }
        hops += degree as u64;
        let n = degree as u64;
        pairs += n * (n - 1);
        apart += counts.values().map(|&here| here * (n - here)).sum::<u64>();
    }
    let groups = hops / degree as u64;
    Lie {
        crossing: crossing as f64 / hops as f64,
        apart: apart as f64 / pairs as f64,
        onward: onward as f64 / (groups * (degree as u64 - 1)) as f64,
    }
}

fn gcd(a: usize, b: usize) -> usize {
    if b == 0 { a } else { gcd(b, a % b) }
}

/// [`lie`], remembered.
#[derive(Debug, Default)]
pub struct Lies(BTreeMap<(usize, usize), Lie>);

impl Lies {
    /// As [`lie`] says, on the nodes of one cluster.
    pub fn of(&mut self, (stride, degree): (usize, usize), cluster: &Cluster) -> Lie {
        *self
            .0
            .entry((stride, degree))
            .or_insert_with(|| lie(stride, degree, cluster.gpus_per_node))
    }
}

/// Bytes that a rank sends over the links inside a node and between nodes, the mean of all members.
#[must_use]
pub fn split(lie: Lie, collective: Collective, bytes: f64) -> (f64, f64) {
    let out = match collective {
        Collective::AllToAll => lie.apart,
        Collective::Send => lie.onward,
        _ => lie.crossing,
    };
    (bytes * (1.0 - out), bytes * out)
}

/// Seconds that a collective of `degree` ranks takes, `bytes` being what one of them sends.
///
/// A ring is as fast as its slower kind of link: all GPUs of a node that are members carry the
/// node's traffic together. An all-to-all uses both kinds at once. Each of log2 n rounds costs a
/// latency (twice as many where it sums and gathers, one where it sends once).
#[must_use]
pub fn seconds(
    cluster: &Cluster,
    lie: Lie,
    collective: Collective,
    bytes: f64,
    degree: usize,
    efficiency: f64,
) -> f64 {
    let (inside, between) = split(lie, collective, bytes);
    let (fast, slow) = (cluster.inside, cluster.between);
    let carried = match collective {
        Collective::AllToAll | Collective::Send => inside / fast.bandwidth,
        _ => bytes / fast.bandwidth,
    };
    let seconds = carried.max(between / slow.bandwidth);
    let latency = if between > 0.0 {
        slow.latency
    } else {
        fast.latency
    };
    let depth = f64::from(degree.next_power_of_two().trailing_zeros());
    let rounds = match collective {
        Collective::AllReduce => 2.0 * depth,
        Collective::AllGather | Collective::ReduceScatter => depth,
        Collective::Ring => degree.saturating_sub(1) as f64,
        Collective::AllToAll | Collective::Send => 1.0,
    };
    seconds / efficiency + rounds * latency
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn drawn_by_hand() {
        let of = |stride, degree, per_node| {
            let l = lie(stride, degree, per_node);
            (l.crossing, l.apart, l.onward)
        };
        assert_eq!(of(1, 8, 8), (0.0, 0.0, 0.0));
        assert_eq!(of(8, 16, 8), (1.0, 1.0, 1.0));
        // Two members a node, four nodes: half the hops of the ring, 3 of the 7 onward.
        assert_eq!(of(4, 8, 8), (0.5, 48.0 / 56.0, 3.0 / 7.0));
        assert_eq!(of(1, 16, 8), (2.0 / 16.0, 8.0 / 15.0, 1.0 / 15.0));
        assert_eq!(of(3, 1, 8), (0.0, 0.0, 0.0));
        // Groups of three lie on nodes of four in several ways: 012, 3|45, 67|8, 9ab.
        assert_eq!(of(1, 3, 4).0, 4.0 / 12.0);
    }

    #[test]
    fn a_ring_is_as_fast_as_the_network_of_all_its_members_in_a_node() {
        let cluster = Cluster::preset("h100", 64).unwrap();
        let time = |stride, degree| {
            let lie = lie(stride, degree, 8);
            seconds(&cluster, lie, Collective::AllGather, 1e12, degree, 1.0)
        };
        let near = |a: f64, b: f64| assert!((a / b - 1.0).abs() < 1e-3, "{a} {b}");
        near(time(1, 8), 1e12 / 450e9);
        near(time(8, 8), 1e12 / 50e9);
        near(time(4, 16), 1e12 / 100e9);
        near(time(1, 64), 1e12 / 400e9);
    }
}
