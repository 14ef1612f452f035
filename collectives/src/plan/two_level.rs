//! Two levels: exchanges among the ranks of a host, and between hosts, where each byte passes once.
//!
//! ```text
//! all_reduce     host a: 0 1 2     host b: 3 4        chunk r ends at rank r
//!   within       0 gets from 1 and 2 what it carries: its own chunk and that of 3
//!   between      0 sends its host's sum of chunk 3 to 3, and gets b's sum of chunk 0
//!   between      0 sends chunk 0 to the one of b that carries it
//!   within       0 sends to 1 and 2 what it carries
//! ```
//!
//! On each host the chunk of a rank elsewhere is *carried* by the member whose place is that rank's
//! place modulo the number of members; so hosts may be uneven. A level that has nothing to do is
//! left out. Folded: each host's parts at their carrier (its own first, then by place), then the
//! hosts' sums at the owner (its own host's first, then by host). Broadcast, reduce and the barrier
//! go through one head per host, by binomial trees and a dissemination.

mod heads;

use heads::{kids, shift, to_head, tree_between, tree_within};

use alloc::vec::Vec;
use core::ops::Range;

use super::{
    Action, CollectiveShape as S, Hosts, Local, Operation, Place, Plan, Round, What,
    steps::push_part, tree,
};

/// One round of a plan.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stage {
    ScatterWithin,
    ScatterBetween,
    GatherBetween,
    GatherWithin,
    ShuffleWithin,
    ShuffleBetween,
    TreeWithin(usize),
    TreeBetween(usize),
    Enter,
    Shift(usize),
    Leave,
}

/// A rank among the hosts.
struct At<'a> {
    hosts: &'a Hosts,
    rank: usize,
    host: usize,
    place: usize,
    mates: &'a [usize],
}

impl<'a> At<'a> {
    fn of(plan: &'a Plan, rank: usize) -> Option<Self> {
        let hosts = plan.spec.hosts.as_ref()?;
        let host = hosts.host(rank);
        Some(Self {
            hosts,
            rank,
            host,
            place: hosts.place(rank),
            mates: hosts.members(host),
        })
    }

    fn others(&self) -> impl Iterator<Item = usize> + '_ {
        let m = self.mates.len();
        (1..m).map(move |step| self.mates[(self.place + step) % m])
    }

    /// Ranks elsewhere whose chunks the member at `place` of this host carries, host by host from the
    /// next one on, so that not all hosts send to the first one first.
    fn carried(&self, place: usize) -> impl Iterator<Item = usize> + '_ {
        let m = self.mates.len();
        self.elsewhere().flat_map(move |host| {
            let ranks = self.hosts.members(host).iter();
            ranks.skip(place).step_by(m).copied()
        })
    }

    /// Who carries this rank's chunk on another host.
    fn carrier(&self, host: usize) -> usize {
        let members = self.hosts.members(host);
        members[self.place % members.len()]
    }

    fn elsewhere(&self) -> impl Iterator<Item = usize> + '_ {
        let n = self.hosts.len();
        (1..n).map(move |step| (self.host + step) % n)
    }

    /// A member's own chunk and those it carries.
    fn chunks<'p>(
        &'p self,
        plan: &'p Plan,
        rank: usize,
    ) -> impl Iterator<Item = Range<usize>> + 'p {
        let place = self.hosts.place(rank);
        core::iter::once(rank)
            .chain(self.carried(place))
            .map(|r| plan.chunk(r))
    }
}

fn depth_within(hosts: &Hosts) -> usize {
    tree::depth(hosts.most())
}

fn stage(plan: &Plan, index: usize) -> Option<Stage> {
    let hosts = plan.spec.hosts.as_ref()?;
    let (within, between) = (depth_within(hosts), tree::depth(hosts.len()));
    let has = |stage: &Stage| match stage {
        Stage::ScatterBetween | Stage::GatherBetween | Stage::ShuffleBetween => hosts.len() > 1,
        _ => hosts.most() > 1,
    };
    let pick = |stages: &[Stage]| stages.iter().copied().filter(has).nth(index);
    match plan.shape().operation() {
        Operation::AllReduce => pick(&[
            Stage::ScatterWithin,
            Stage::ScatterBetween,
            Stage::GatherBetween,
            Stage::GatherWithin,
        ]),
        Operation::ReduceScatter => pick(&[Stage::ScatterWithin, Stage::ScatterBetween]),
        Operation::AllGather => pick(&[Stage::GatherBetween, Stage::GatherWithin]),
        Operation::AllToAll => pick(&[Stage::ShuffleWithin, Stage::ShuffleBetween]),
        Operation::Broadcast if index < between => Some(Stage::TreeBetween(between - 1 - index)),
        Operation::Broadcast => Some(Stage::TreeWithin(within + between - 1 - index)),
        Operation::Reduce if index < within => Some(Stage::TreeWithin(index)),
        Operation::Reduce => Some(Stage::TreeBetween(index - within)),
        Operation::Barrier => {
            let enter = usize::from(within > 0);
            Some(match index {
                0 if enter == 1 => Stage::Enter,
                _ if index < enter + between => Stage::Shift(index - enter),
                _ => Stage::Leave,
            })
        }
        _ => None,
    }
}

pub(super) fn rounds_len(plan: &Plan) -> usize {
    let Some(hosts) = &plan.spec.hosts else {
        return 0;
    };
    let levels = usize::from(hosts.most() > 1) + usize::from(hosts.len() > 1);
    match plan.shape().operation() {
        Operation::AllReduce => 2 * levels,
        Operation::Broadcast | Operation::Reduce => depth_within(hosts) + tree::depth(hosts.len()),
        Operation::Barrier => 2 * usize::from(hosts.most() > 1) + tree::depth(hosts.len()),
        _ => levels,
    }
}

pub(super) fn round(plan: &Plan, rank: usize, index: usize, round: &mut Round) {
    let (Some(at), Some(stage)) = (At::of(plan, rank), stage(plan, index)) else {
        return;
    };
    match stage {
        Stage::ScatterWithin => scatter_within(plan, &at, round),
        Stage::ScatterBetween => scatter_between(plan, &at, round),
        Stage::GatherBetween => gather_between(plan, &at, round),
        Stage::GatherWithin => gather_within(plan, &at, index, round),
        Stage::ShuffleWithin => shuffle_within(plan, &at, round),
        Stage::ShuffleBetween => shuffle_between(plan, &at, round),
        Stage::TreeWithin(k) => tree_within(plan, &at, k, round),
        Stage::TreeBetween(k) => tree_between(plan, &at, k, round),
        Stage::Enter => to_head(&at, round, true),
        Stage::Leave => to_head(&at, round, false),
        Stage::Shift(k) => shift(&at, k, round),
    }
    let own = plan.chunk(rank);
    match plan.shape() {
        // The last round of scattering completes the own chunk.
        S::AllReduce { .. } | S::ReduceScatter { .. } if index + 1 == scatters(at.hosts) => {
            let in_place = plan.shape().operation() == Operation::AllReduce;
            let at = if in_place { own.start } else { 0 };
            round.then.push(Local::Finish { input: own, at });
        }
        S::AllGather { .. } if index == 0 => round.then.push(Local::Copy {
            input: 0..own.len(),
            at: own.start,
        }),
        S::AllToAll { len } if index == 0 => round.then.push(Local::Copy {
            input: rank * len..(rank + 1) * len,
            at: rank * len,
        }),
        S::Broadcast { len, root } if index == 0 && rank == *root => {
            round.then.push(Local::Copy {
                input: 0..*len,
                at: 0,
            });
        }
        S::Reduce { len, root } if rank == *root && index + 1 == rounds_len(plan) => {
            round.then.push(Local::Finish {
                input: 0..*len,
                at: 0,
            });
        }
        _ => {}
    }
}

/// Rounds of scattering.
fn scatters(hosts: &Hosts) -> usize {
    usize::from(hosts.most() > 1) + usize::from(hosts.len() > 1)
}

fn scatter_within(plan: &Plan, at: &At<'_>, round: &mut Round) {
    let own: Vec<Range<usize>> = at.chunks(plan, at.rank).collect();
    let len = own.iter().map(ExactSizeIterator::len).sum();
    for peer in at.others() {
        let mut parts = Vec::new();
        at.chunks(plan, peer)
            .for_each(|range| push_part(&mut parts, Place::Input, range));
        round.send(peer, What::parts(parts));
    }
    let mates = at.mates.iter().filter(|mate| **mate != at.rank);
    mates.for_each(|&mate| round.recv(mate, len, Action::FoldRaw(own.clone())));
}

fn scatter_between(plan: &Plan, at: &At<'_>, round: &mut Round) {
    for owner in at.carried(at.place) {
        round.send(owner, What::Partial(plan.chunk(owner)));
    }
    let hosts = (0..at.hosts.len()).filter(|host| *host != at.host);
    hosts.for_each(|host| round.fold(at.carrier(host), plan.chunk(at.rank), false));
}

fn gather_between(plan: &Plan, at: &At<'_>, round: &mut Round) {
    let own = plan.chunk(at.rank);
    let what = match plan.shape() {
        S::AllGather { .. } => What::Input(0..own.len()),
        _ => What::Output(own),
    };
    for host in at.elsewhere() {
        round.send(at.carrier(host), what.clone());
    }
    for owner in at.carried(at.place) {
        round.store(owner, plan.chunk(owner));
    }
}

fn gather_within(plan: &Plan, at: &At<'_>, index: usize, round: &mut Round) {
    let parts = |rank| {
        let mut parts = Vec::new();
        at.chunks(plan, rank)
            .for_each(|range| push_part(&mut parts, Place::Output, range));
        parts
    };
    let what = match plan.shape() {
        S::AllGather { .. } if index == 0 => What::Input(0..plan.chunk(at.rank).len()),
        _ => What::parts(parts(at.rank)),
    };
    for peer in at.others() {
        round.send(peer, what.clone());
        let come = parts(peer);
        let len = come.iter().map(|part| part.range.len()).sum();
        round.recv(peer, len, Action::parts(come));
    }
}

/// Blocks for the member itself, then for those it carries. They are laid down so that the blocks of
/// all members for one rank elsewhere lie together.
fn shuffle_within(plan: &Plan, at: &At<'_>, round: &mut Round) {
    let (len, m) = (
        plan.shape().len(plan.world()) / plan.world(),
        at.mates.len(),
    );
    let block = |index: usize| index * len..(index + 1) * len;
    for peer in at.others() {
        let (mut go, mut come) = (Vec::new(), Vec::new());
        push_part(&mut go, Place::Input, block(peer));
        push_part(&mut come, Place::Output, block(peer));
        for owner in at.carried(at.hosts.place(peer)) {
            push_part(&mut go, Place::Input, block(owner));
        }
        for (i, _) in at.carried(at.place).enumerate() {
            let slot = i * m + at.hosts.place(peer);
            push_part(&mut come, Place::Stash, block(slot));
        }
        let total = come.iter().map(|part| part.range.len()).sum();
        round.send(peer, What::parts(go));
        round.recv(peer, total, Action::parts(come));
    }
}

fn shuffle_between(plan: &Plan, at: &At<'_>, round: &mut Round) {
    let (len, m) = (
        plan.shape().len(plan.world()) / plan.world(),
        at.mates.len(),
    );
    let block = |index: usize| index * len..(index + 1) * len;
    for (i, owner) in at.carried(at.place).enumerate() {
        let mut parts = Vec::new();
        for place in 0..m {
            if place == at.place {
                push_part(&mut parts, Place::Input, block(owner));
            } else {
                push_part(&mut parts, Place::Stash, block(i * m + place));
            }
        }
        round.send(owner, What::parts(parts));
    }
    for host in at.elsewhere() {
        let mut parts = Vec::new();
        for &source in at.hosts.members(host) {
            push_part(&mut parts, Place::Output, block(source));
        }
        let total = parts.iter().map(|part| part.range.len()).sum();
        round.recv(at.carrier(host), total, Action::parts(parts));
    }
}

/// Payload elements that `rank` sends: raw, and as accumulators.
pub(super) fn traffic(plan: &Plan, rank: usize) -> (usize, usize) {
    let Some(at) = At::of(plan, rank) else {
        return (0, 0);
    };
    let (hosts, len) = (at.hosts, plan.shape().len(plan.world()));
    let own = plan.chunk(rank).len();
    let carried: usize = at.carried(at.place).map(|r| plan.chunk(r).len()).sum();
    let (mates, others) = (at.mates.len() - 1, hosts.len() - 1);
    // All but what this member itself carries; where it is alone there is nobody to send it to.
    let within = if mates > 0 { len - own - carried } else { 0 };
    let gathered = others * own + mates * (own + carried);
    match plan.shape() {
        S::AllReduce { .. } => (within + gathered, carried),
        S::ReduceScatter { .. } => (within, carried),
        S::AllGather { .. } => (gathered, 0),
        S::AllToAll { len } => {
            let carried = at.carried(at.place).count();
            let all = plan.world();
            let within = if mates > 0 { all - 1 - carried } else { 0 };
            ((within + carried * at.mates.len()) * len, 0)
        }
        S::Broadcast { root, .. } => (kids(&at, *root) * len, 0),
        S::Reduce { root, .. } => (0, usize::from(rank != *root) * len),
        _ => (0, 0),
    }
}
