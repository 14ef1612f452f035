//! A binomial tree: reduce climbs it, broadcast descends it, all_reduce does both; and the barrier
//! of the same depth.
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
//! the first. The barrier is a dissemination: in round k each rank tells the one 2^k to its right.

use alloc::{vec, vec::Vec};

use super::{Action, CollectiveShape as S, Local, Plan, Round, What};

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

pub(super) fn rounds(plan: &Plan, rank: usize) -> Vec<Round> {
    let mut rounds = match plan.shape() {
        S::AllReduce { len } => {
            let mut rounds = reduce(plan.world(), rank, 0, *len);
            rounds.extend(broadcast(plan.world(), rank, 0, *len, false));
            rounds
        }
        S::Reduce { len, root } => reduce(plan.world(), rank, *root, *len),
        S::Broadcast { len, root } => broadcast(plan.world(), rank, *root, *len, true),
        S::Barrier => disseminate(plan.world(), rank),
        _ => vec![],
    };
    if rounds.is_empty() {
        rounds.push(match plan.shape() {
            S::Broadcast { len, .. } => Round::local(Local::Copy {
                input: 0..*len,
                at: 0,
            }),
            S::AllReduce { len } | S::Reduce { len, .. } => Round::local(Local::Finish {
                input: 0..*len,
                at: 0,
            }),
            _ => Round::default(),
        });
    }
    rounds
}

fn reduce(n: usize, rank: usize, root: usize, len: usize) -> Vec<Round> {
    let node = (rank + n - root) % n;
    let real = |node: usize| (node + root) % n;
    let mut rounds = vec![Round::default(); depth(n)];
    for (k, round) in rounds.iter_mut().enumerate() {
        let bit = 1 << k;
        if node & bit != 0 {
            round.send(real(node - bit), What::Partial(0..len));
            break;
        }
        if node + bit < n {
            round.recv(real(node + bit), len, Action::Fold(0..len));
        }
    }
    if let (0, Some(last)) = (node, rounds.last_mut()) {
        last.then.push(Local::Finish {
            input: 0..len,
            at: 0,
        });
    }
    rounds
}

/// `fresh`: the root's buffer is its input; else it is its output, where a sum has just been stored.
fn broadcast(n: usize, rank: usize, root: usize, len: usize, fresh: bool) -> Vec<Round> {
    let node = (rank + n - root) % n;
    let real = |node: usize| (node + root) % n;
    let mut rounds = vec![Round::default(); depth(n)];
    for (k, round) in rounds.iter_mut().rev().enumerate() {
        let bit = 1 << k;
        if node % (2 * bit) == bit {
            round.recv(real(node - bit), len, Action::Store(0));
        } else if node.is_multiple_of(2 * bit) && node + bit < n {
            let root = node == 0 && fresh;
            round.send(
                real(node + bit),
                if root {
                    What::Input(0..len)
                } else {
                    What::Output(0..len)
                },
            );
        }
    }
    if let (true, 0, Some(last)) = (fresh, node, rounds.last_mut()) {
        last.then.push(Local::Copy {
            input: 0..len,
            at: 0,
        });
    }
    rounds
}

fn disseminate(n: usize, rank: usize) -> Vec<Round> {
    let mut rounds = vec![Round::default(); depth(n)];
    for (k, round) in rounds.iter_mut().enumerate() {
        let hop = (1 << k) % n;
        round.send((rank + hop) % n, What::Input(0..0));
        round.recv((rank + n - hop) % n, 0, Action::Store(0));
    }
    rounds
}
