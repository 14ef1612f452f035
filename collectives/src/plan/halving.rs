//! Halving and doubling (Rabenseifner): halves are exchanged and folded until each node owns one
//! block of the sum; all_reduce then gathers the blocks the way back.
//!
//! ```text
//! all_reduce, world 4       round 0  0<->1 2<->3  half      round 2  0<->2 1<->3  quarter
//!                           round 1  0<->2 1<->3  quarter   round 3  0<->1 2<->3  half
//! ```
//!
//! all_reduce begins with the nearest node, where most is sent; a node's block is then its number
//! with the bits reversed, and the fold is (x0 + x1) + (x2 + x3), as by recursive doubling.
//! reduce_scatter begins with the farthest, so that each node ends with the chunks of its own ranks:
//! (x0 + x2) + (x1 + x3). Worlds that are no power of two are folded first (`nodes.rs`).

use core::ops::Range;

use super::{
    CollectiveShape as S, Local, Operation, Plan, Round, What, doubling,
    nodes::{Nodes, Role, group},
};
use crate::chunk::chunk;

pub(super) fn rounds_len(plan: &Plan) -> usize {
    let nodes = Nodes::of(plan.world());
    let phases = 1 + usize::from(plan.shape().operation() == Operation::AllReduce);
    phases * nodes.levels() + 2 * nodes.odd()
}

pub(super) fn round(plan: &Plan, rank: usize, index: usize, round: &mut Round) {
    let nodes = Nodes::of(plan.world());
    let (role, len) = (nodes.role(rank), plan.shape().len(plan.world()));
    if nodes.rem > 0 && index == 0 {
        match role {
            Role::Extra { buddy } => round.send(buddy, What::Partial(0..len)),
            Role::Node { extra: Some(e), .. } => round.fold(e, 0..len, true),
            Role::Node { .. } => {}
        }
        return;
    }
    let all_reduce = matches!(plan.shape(), S::AllReduce { .. });
    if index + 1 == rounds_len(plan) && nodes.rem > 0 {
        match role {
            _ if all_reduce => doubling::after(plan, role, rank, round),
            Role::Node { extra: Some(e), .. } => round.send(e, What::Finished(plan.chunk(e))),
            Role::Extra { buddy } => round.store(buddy, 0..plan.chunk(rank).len()),
            Role::Node { .. } => {}
        }
        return;
    }
    let (Role::Node { node, .. }, k) = (role, index - nodes.odd()) else {
        return;
    };
    if !all_reduce {
        scatter(plan, nodes, node, k, round);
    } else if k < nodes.levels() {
        halve(nodes, node, k, len, round);
    } else {
        double(nodes, node, 2 * nodes.levels() - 1 - k, len, round);
    }
}

/// The elements that `node` still folds after `k` rounds of all_reduce.
pub(super) fn left(nodes: Nodes, node: usize, k: usize, len: usize) -> Range<usize> {
    let (mut first, mut blocks) = (0, nodes.p);
    for bit in 0..k {
        blocks /= 2;
        first += (node >> bit & 1) * blocks;
    }
    chunk(len, nodes.p, first).start..chunk(len, nodes.p, first + blocks - 1).end
}

fn halve(nodes: Nodes, node: usize, k: usize, len: usize, round: &mut Round) {
    let other = node ^ (1 << k);
    let (peer, own) = (nodes.rank(other), left(nodes, node, k + 1, len));
    round.send(peer, What::Partial(left(nodes, other, k + 1, len)));
    round.fold(peer, own.clone(), other < node);
    if k + 1 == nodes.levels() {
        let at = own.start;
        round.then.push(Local::Finish { input: own, at });
    }
}

fn double(nodes: Nodes, node: usize, k: usize, len: usize, round: &mut Round) {
    let other = node ^ (1 << k);
    let peer = nodes.rank(other);
    round.send(peer, What::Output(left(nodes, node, k + 1, len)));
    round.store(peer, left(nodes, other, k + 1, len));
}

fn scatter(plan: &Plan, nodes: Nodes, node: usize, k: usize, round: &mut Round) {
    let half = nodes.p >> (k + 1);
    let other = node ^ half;
    let peer = nodes.rank(other);
    let chunks = |node| plan.chunks(nodes.ranks(group(node, half)));
    round.send(peer, What::Partial(chunks(other)));
    round.fold(peer, chunks(node), other < node);
    if half == 1 {
        let input = plan.chunk(nodes.rank(node));
        round.then.push(Local::Finish { input, at: 0 });
    }
}
