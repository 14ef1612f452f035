//! Recursive doubling: in round k each node exchanges all it has with the node 2^k away.
//!
//! ```text
//! world 4:   round 0   0<->1   2<->3        what each has:   1 part
//!            round 1   0<->2   1<->3                         2 parts, then 4
//! ```
//!
//! Worlds that are no power of two are folded first (`nodes.rs`). all_reduce sends the whole buffer
//! each time and folds with the lower ranks on the left: (x0 + x1) + (x2 + x3). Both of a pair
//! compute that, so all ranks end with the same bits.

use alloc::vec::Vec;

use super::{
    Action, CollectiveShape as S, Local, Operation, Place, Plan, Round, What,
    nodes::{Nodes, Role, group},
    steps::push_part,
};

pub(super) fn rounds_len(n: usize) -> usize {
    let nodes = Nodes::of(n);
    nodes.levels() + 2 * nodes.odd()
}

pub(super) fn round(plan: &Plan, rank: usize, index: usize, round: &mut Round) {
    let nodes = Nodes::of(plan.world());
    let role = nodes.role(rank);
    if index == 0 && plan.shape().operation() == Operation::AllGather {
        let own = plan.chunk(rank);
        round.then.push(Local::Copy {
            input: 0..own.len(),
            at: own.start,
        });
    }
    if nodes.rem > 0 && index == 0 {
        before(plan, role, rank, round);
    } else if index == nodes.levels() + nodes.odd() {
        after(plan, role, rank, round);
    } else if let Role::Node { node, .. } = role {
        exchange(plan, nodes, node, index - nodes.odd(), round);
    }
}

/// The extra ranks hand in what they have.
fn before(plan: &Plan, role: Role, rank: usize, round: &mut Round) {
    match (plan.shape(), role) {
        (S::AllReduce { len }, Role::Extra { buddy }) => round.send(buddy, What::Partial(0..*len)),
        (S::AllReduce { len }, Role::Node { extra: Some(e), .. }) => round.fold(e, 0..*len, true),
        (_, Role::Extra { buddy }) => round.send(buddy, What::Input(0..plan.input_len(rank))),
        (S::AllGather { .. }, Role::Node { extra: Some(e), .. }) => round.store(e, plan.chunk(e)),
        (_, Role::Node { extra: Some(e), .. }) => round.recv(e, 0, Action::Store(0)),
        _ => {}
    }
}

fn exchange(plan: &Plan, nodes: Nodes, node: usize, k: usize, round: &mut Round) {
    let other = node ^ (1 << k);
    let peer = nodes.rank(other);
    match plan.shape() {
        S::AllReduce { len } => {
            round.send(peer, What::Shared(0..*len));
            round.fold(peer, 0..*len, other < node);
            if k + 1 == nodes.levels() {
                round.then.push(Local::Finish {
                    input: 0..*len,
                    at: 0,
                });
            }
        }
        S::AllGather { .. } => {
            let gathered = |node| plan.chunks(nodes.ranks(group(node, 1 << k)));
            let mine = gathered(node);
            // Without a round before, the own chunk is not in the output yet.
            let fresh = k == 0 && nodes.rem == 0;
            let what = if fresh {
                What::Input(0..mine.len())
            } else {
                What::Output(mine)
            };
            round.send(peer, what);
            round.store(peer, gathered(other));
        }
        _ => {
            round.send(peer, What::Input(0..0));
            round.recv(peer, 0, Action::Store(0));
        }
    }
}

/// The extra ranks get what came of it.
pub(super) fn after(plan: &Plan, role: Role, rank: usize, round: &mut Round) {
    let len = plan.shape().len(plan.world());
    // All but what the extra rank had itself.
    let but = |extra: usize| {
        let (own, mut parts) = (plan.chunk(extra), Vec::new());
        push_part(&mut parts, Place::Output, 0..own.start);
        push_part(&mut parts, Place::Output, own.end..len);
        parts
    };
    match (plan.shape(), role) {
        (S::AllReduce { .. }, Role::Node { extra: Some(e), .. }) => {
            round.send(e, What::Output(0..len));
        }
        (S::AllReduce { .. }, Role::Extra { buddy }) => round.store(buddy, 0..len),
        (S::AllGather { .. }, Role::Node { extra: Some(e), .. }) => {
            round.send(e, What::parts(but(e)));
        }
        (S::AllGather { .. }, Role::Extra { buddy }) => {
            let own = plan.chunk(rank).len();
            round.recv(buddy, len - own, Action::parts(but(rank)));
        }
        (_, Role::Node { extra: Some(e), .. }) => round.send(e, What::Input(0..0)),
        (_, Role::Extra { buddy }) => round.recv(buddy, 0, Action::Store(0)),
        _ => {}
    }
}
