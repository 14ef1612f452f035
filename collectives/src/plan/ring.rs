//! Chunks travel round a ring; every rank talks to its two neighbours only.
//!
//! ```text
//! reduce_scatter, world 4: chunk 0 starts at rank 1 and is complete at rank 0
//!
//!   1 --(b0)--> 2 --(b0+c0)--> 3 --(b0+c0+d0)--> 0 = ((b0+c0)+d0)+a0
//! ```
//!
//! In round t rank r sends chunk r-1-t to r+1 and receives chunk r-2-t from r-1 (modulo n). The
//! fold order of a chunk is fixed by its index: from its right neighbour round to its owner.
//! all_gather is the same walk with stores: in round t rank r sends chunk r-t.

use alloc::{vec, vec::Vec};

use super::{Action, CollectiveShape as S, Local, Plan, Round, What};

pub(super) fn rounds(plan: &Plan, rank: usize) -> Vec<Round> {
    let own = plan.chunk(rank);
    match plan.shape() {
        S::AllReduce { .. } => {
            let mut rounds = reduce_scatter(plan, rank, own.start);
            rounds.extend(all_gather(plan, rank, What::Output(own)));
            rounds
        }
        S::ReduceScatter { .. } => reduce_scatter(plan, rank, 0),
        S::AllGather { .. } => {
            let copy = Local::Copy {
                input: 0..own.len(),
                at: own.start,
            };
            let mut rounds = all_gather(plan, rank, What::Input(0..own.len()));
            match rounds.first_mut() {
                Some(first) => first.then.push(copy),
                None => rounds.push(Round::local(copy)),
            }
            rounds
        }
        _ => vec![Round::default()],
    }
}

fn reduce_scatter(plan: &Plan, rank: usize, at: usize) -> Vec<Round> {
    let (n, own) = (plan.world(), plan.chunk(rank));
    let (right, left) = ((rank + 1) % n, (rank + n - 1) % n);
    let finish = Local::Finish { input: own, at };
    if n == 1 {
        return vec![Round::local(finish)];
    }
    let mut rounds = Vec::with_capacity(2 * (n - 1));
    for t in 0..n - 1 {
        let outgoing = plan.chunk((rank + 2 * n - 1 - t) % n);
        let incoming = plan.chunk((rank + 2 * n - 2 - t) % n);
        let mut round = Round::default();
        round.send(right, What::Partial(outgoing));
        round.recv(left, incoming.len(), Action::Fold(incoming));
        rounds.push(round);
    }
    if let Some(last) = rounds.last_mut() {
        last.then.push(finish);
    }
    rounds
}

fn all_gather(plan: &Plan, rank: usize, own: What) -> Vec<Round> {
    let n = plan.world();
    let (right, left) = ((rank + 1) % n, (rank + n - 1) % n);
    let mut rounds = Vec::with_capacity(n - 1);
    let mut outgoing = own;
    for t in 0..n - 1 {
        let incoming = plan.chunk((rank + 2 * n - 1 - t) % n);
        let mut round = Round::default();
        round.send(right, outgoing);
        round.recv(left, incoming.len(), Action::Store(incoming.start));
        outgoing = What::Output(incoming);
        rounds.push(round);
    }
    rounds
}
