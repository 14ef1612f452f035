//! Through one head per host: broadcast, reduce and the barrier.

use super::{
    super::{
        Action, CollectiveShape as S, Hosts, Plan, Round, What,
        tree::{self, Edge},
    },
    At,
};

/// Who speaks for a host: the root for its own, else the first member.
fn head(hosts: &Hosts, host: usize, root: usize) -> usize {
    if hosts.host(root) == host {
        root
    } else {
        hosts.members(host)[0]
    }
}

pub(super) fn tree_within(plan: &Plan, at: &At<'_>, k: usize, round: &mut Round) {
    let m = at.mates.len();
    let head = head(at.hosts, at.host, plan.shape().root().unwrap_or(0));
    let first = at.hosts.place(head);
    let node = (at.place + m - first) % m;
    let edge = tree::edge(m, node, k);
    climb_or_descend(
        plan,
        edge,
        |node| at.mates[(node + first) % m],
        round,
        at.rank,
    );
}

pub(super) fn tree_between(plan: &Plan, at: &At<'_>, k: usize, round: &mut Round) {
    let (root, n) = (plan.shape().root().unwrap_or(0), at.hosts.len());
    if head(at.hosts, at.host, root) != at.rank {
        return;
    }
    let first = at.hosts.host(root);
    let node = (at.host + n - first) % n;
    let real = |node: usize| head(at.hosts, (node + first) % n, root);
    climb_or_descend(plan, tree::edge(n, node, k), real, round, at.rank);
}

fn climb_or_descend(
    plan: &Plan,
    edge: Option<Edge>,
    real: impl Fn(usize) -> usize,
    round: &mut Round,
    rank: usize,
) {
    let range = 0..plan.shape().len(plan.world());
    match (plan.shape(), edge) {
        (S::Broadcast { root, .. }, Some(Edge::Down(node))) => {
            let what = if rank == *root {
                What::Input(range)
            } else {
                What::Output(range)
            };
            round.send(real(node), what);
        }
        (S::Broadcast { .. }, Some(Edge::Up(node))) => round.store(real(node), range),
        (_, Some(Edge::Up(node))) => round.send(real(node), What::Partial(range)),
        (_, Some(Edge::Down(node))) => round.fold(real(node), range, false),
        (_, None) => {}
    }
}

/// Empty messages between the head and the rest of a host.
pub(super) fn to_head(at: &At<'_>, round: &mut Round, inwards: bool) {
    let head = at.mates[0];
    if at.rank == head {
        for mate in at.others() {
            if inwards {
                round.recv(mate, 0, Action::Store(0));
            } else {
                round.send(mate, What::Input(0..0));
            }
        }
    } else if inwards {
        round.send(head, What::Input(0..0));
    } else {
        round.recv(head, 0, Action::Store(0));
    }
}

pub(super) fn shift(at: &At<'_>, k: usize, round: &mut Round) {
    if at.rank != at.mates[0] {
        return;
    }
    let (n, hop) = (at.hosts.len(), 1 << k);
    let head = |host: usize| at.hosts.members(host % n)[0];
    round.send(head(at.host + hop), What::Input(0..0));
    round.recv(head(at.host + n - hop), 0, Action::Store(0));
}

/// Children in the tree of the host and, for a head, in that of the hosts.
pub(super) fn kids(at: &At<'_>, root: usize) -> usize {
    let (m, n) = (at.mates.len(), at.hosts.len());
    let head = head(at.hosts, at.host, root);
    let within = tree::children(m, (at.place + m - at.hosts.place(head)) % m);
    let between = if head == at.rank {
        tree::children(n, (at.host + n - at.hosts.host(root)) % n)
    } else {
        0
    };
    within + between
}
