//! The closed formulas of the table in [`crate::plan`]: payload bytes that a rank sends.

use super::{
    Algorithm as A, CollectiveShape as S, Plan, double_tree, halving,
    nodes::{Nodes, Role, group},
    tree, two_level,
};
use crate::DType;

pub(super) fn sent(plan: &Plan, rank: usize, dtype: DType) -> u64 {
    if plan.world() == 1 {
        return 0;
    }
    let (raw, wide) = elements(plan, rank);
    raw as u64 * dtype.bytes() as u64 + wide as u64 * dtype.accumulator().bytes() as u64
}

/// Elements sent raw, and as accumulators.
fn elements(plan: &Plan, rank: usize) -> (usize, usize) {
    let n = plan.world();
    let total = plan.shape().len(n);
    let chunk = |r: usize| plan.chunk(r % n).len();
    let others = n - 1;
    let kids = |root: usize| tree::children(n, (rank + n - root) % n);
    let only = |yes: bool, len: usize| if yes { len } else { 0 };
    match (plan.algorithm(), plan.shape()) {
        (A::TwoLevel, _) => two_level::traffic(plan, rank),
        (A::DoubleTree, _) => double_tree_elements(plan, rank),
        (A::RecursiveDoubling, _) => doubling(plan, rank),
        (A::HalvingDoubling, _) => halved(plan, rank),
        (A::Bruck, S::AllReduce { len }) => (others * len, 0),
        (A::Bruck, S::AllGather { .. }) => {
            let blocks = |k: usize| (1 << k).min(n - (1 << k));
            let sent = |k: usize| (0..blocks(k)).map(|i| chunk(rank + i)).sum::<usize>();
            ((0..tree::depth(n)).map(sent).sum(), 0)
        }
        (A::Bruck, S::AllToAll { len }) => {
            // Block j is sent once for each bit that is set in j.
            let hops: u32 = (1..n).map(usize::count_ones).sum();
            (hops as usize * len, 0)
        }
        (A::Direct, S::AllReduce { .. }) => (others * total, 0),
        (_, S::AllReduce { .. }) if plan.algorithm() == A::Pairwise => {
            (total - chunk(rank) + others * chunk(rank), 0)
        }
        (A::Ring, S::AllReduce { .. }) => (total - chunk(rank + 1), total - chunk(rank)),
        (_, S::AllReduce { .. }) => (kids(0) * total, only(rank != 0, total)),
        (A::Ring, S::ReduceScatter { .. }) => (0, total - chunk(rank)),
        (_, S::ReduceScatter { .. }) => (total - chunk(rank), 0),
        (A::Ring, S::AllGather { .. }) => (total - chunk(rank + 1), 0),
        (_, S::AllGather { .. }) => (others * chunk(rank), 0),
        (A::Ring, S::Broadcast { root, .. }) => (only((rank + 1) % n != *root, total), 0),
        (A::Tree, S::Broadcast { root, .. }) => (kids(*root) * total, 0),
        (_, S::Broadcast { root, .. }) => (only(rank == *root, others * total), 0),
        (A::Ring | A::Tree, S::Reduce { root, .. }) => (0, only(rank != *root, total)),
        (_, S::Reduce { root, .. }) => (only(rank != *root, total), 0),
        (_, S::Gather { root, .. }) => (only(rank != *root, chunk(rank)), 0),
        (_, S::Scatter { root, .. }) => (only(rank == *root, total - chunk(rank)), 0),
        (_, S::AllToAll { len }) => (others * len, 0),
        (_, S::AllToAllV { send, .. }) => (total - send[rank], 0),
        (_, S::Barrier) => (0, 0),
    }
}

fn doubling(plan: &Plan, rank: usize) -> (usize, usize) {
    let nodes = Nodes::of(plan.world());
    let total = plan.shape().len(plan.world());
    match (plan.shape(), nodes.role(rank)) {
        (S::AllReduce { .. }, Role::Extra { .. }) => (0, total),
        (S::AllReduce { .. }, Role::Node { extra, .. }) => (
            if extra.is_some() { total } else { 0 },
            nodes.levels() * total,
        ),
        (S::AllGather { .. }, Role::Extra { .. }) => (plan.chunk(rank).len(), 0),
        (S::AllGather { .. }, Role::Node { node, extra }) => {
            let gathered = |k: usize| plan.chunks(nodes.ranks(group(node, 1 << k))).len();
            let back = extra.map_or(0, |extra| total - plan.chunk(extra).len());
            ((0..nodes.levels()).map(gathered).sum::<usize>() + back, 0)
        }
        _ => (0, 0),
    }
}

fn halved(plan: &Plan, rank: usize) -> (usize, usize) {
    let nodes = Nodes::of(plan.world());
    let total = plan.shape().len(plan.world());
    match (plan.shape(), nodes.role(rank)) {
        (_, Role::Extra { .. }) => (0, total),
        (S::AllReduce { .. }, Role::Node { node, extra }) => {
            let left = |k| halving::left(nodes, node, k, total).len();
            let doubled: usize = (1..=nodes.levels()).map(left).sum();
            let back = if extra.is_some() { total } else { 0 };
            (doubled + back, total - left(nodes.levels()))
        }
        (_, Role::Node { node, extra }) => {
            let back = extra.map_or(0, |extra| plan.chunk(extra).len());
            let own = plan.chunks(nodes.ranks(node..node + 1)).len();
            (back, total - own)
        }
    }
}

fn double_tree_elements(plan: &Plan, rank: usize) -> (usize, usize) {
    let (mut raw, mut wide) = (0, 0);
    for (kids, up, len) in double_tree::traffic(plan, rank) {
        match plan.shape() {
            S::AllReduce { .. } => {
                raw += kids * len;
                wide += usize::from(up) * len;
            }
            S::Broadcast { .. } => raw += kids * len,
            _ => wide += usize::from(up) * len,
        }
    }
    (raw, wide)
}
