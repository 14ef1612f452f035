//! A binomial tree: reduce climbs it, broadcast descends it, all_reduce does both.
//!
//! ```text
//! world 8, root 0, reduce:
//! round 0   1->0  3->2  5->4  7->6
//! round 1   2->0        6->4
//! round 2   4->0
//! ```
//!
//! Ranks are counted from the root. A node that receives covers the ranks just before those of the
//! sender, so its own partial is the left operand. Broadcast is the same tree from the last round to
//! the first.

use core::ops::Range;

use super::{CollectiveShape as S, Local, Plan, Round, What};

/// Rounds from the leaves to the root: ceil(log2 n).
pub(super) fn depth(n: usize) -> usize {
    n.next_power_of_two().trailing_zeros() as usize
}

/// Children of `node` (counted from the root) among `n`.
pub(super) fn children(n: usize, node: usize) -> usize {
    let levels = if node == 0 {
        depth(n)
    } else {
        node.trailing_zeros() as usize
    };
    (0..levels).filter(|&k| node + (1 << k) < n).count()
}

/// What a node does in one round: who gets something of it, or from whom it gets something.
pub(super) enum Edge {
    Up(usize),
    Down(usize),
}

/// The edge of `node` that carries in round `k` of a reduce: `Up` to its parent, `Down` from its
/// child. A broadcast runs the other way, from the last k to the first.
pub(super) fn edge(n: usize, node: usize, k: usize) -> Option<Edge> {
    let bit = 1 << k;
    if node % (2 * bit) == bit {
        Some(Edge::Up(node - bit))
    } else if node.is_multiple_of(2 * bit) && node + bit < n {
        Some(Edge::Down(node + bit))
    } else {
        None
    }
}

pub(super) fn round(plan: &Plan, rank: usize, index: usize, piece: usize, round: &mut Round) {
    let levels = depth(plan.world());
    match plan.shape() {
        S::AllReduce { len } if index < levels => {
            reduce(plan, rank, 0, index, plan.piece(0..*len, piece), round);
        }
        S::AllReduce { len } => {
            let (k, range) = (2 * levels - 1 - index, plan.piece(0..*len, piece));
            broadcast(plan, rank, 0, k, range, round);
        }
        S::Reduce { len, root } => {
            reduce(plan, rank, *root, index, plan.piece(0..*len, piece), round);
        }
        S::Broadcast { len, root } => {
            let (k, range) = (levels - 1 - index, plan.piece(0..*len, piece));
            broadcast(plan, rank, *root, k, range.clone(), round);
            if rank == *root {
                for send in &mut round.sends {
                    if send.what == What::Output(range.clone()) {
                        send.what = What::Input(range.clone());
                    }
                }
                if k == 0 {
                    let at = range.start;
                    round.then.push(Local::Copy { input: range, at });
                }
            }
        }
        _ => {}
    }
}

fn reduce(plan: &Plan, rank: usize, root: usize, k: usize, range: Range<usize>, round: &mut Round) {
    let n = plan.world();
    let node = (rank + n - root) % n;
    let real = |node: usize| (node + root) % n;
    match edge(n, node, k) {
        Some(Edge::Up(parent)) => round.send(real(parent), What::Partial(range.clone())),
        Some(Edge::Down(child)) => round.fold(real(child), range.clone(), false),
        None => {}
    }
    if node == 0 && k + 1 == depth(n) {
        let at = range.start;
        round.then.push(Local::Finish { input: range, at });
    }
}

/// From the output of the root, where a sum has just been stored.
fn broadcast(
    plan: &Plan,
    rank: usize,
    root: usize,
    k: usize,
    range: Range<usize>,
    round: &mut Round,
) {
    let n = plan.world();
    let node = (rank + n - root) % n;
    let real = |node: usize| (node + root) % n;
    match edge(n, node, k) {
        Some(Edge::Up(parent)) => round.store(real(parent), range),
        Some(Edge::Down(child)) => round.send(real(child), What::Output(range)),
        None => {}
    }
}
