//! Bruck: in round k each rank sends to the one 2^k away on one side and receives from the other;
//! ceil(log2 n) rounds for any world.
//!
//! ```text
//! all_gather, world 5, rank 0 has:   0 | 0 1 | 0 1 2 3 | 0 1 2 3 4
//!                                      <-1   <-2 (2 3)   <-4 (4)
//! ```
//!
//! all_gather sends what it has to the left. all_reduce gathers every input whole and folds them in
//! rank order at each rank: many bytes, few messages. all_to_all hands a block for the rank j to
//! the right on in those rounds k where bit k of j is set. The barrier is the same shifts, empty: a
//! dissemination.

use alloc::vec::Vec;
use core::ops::Range;

use super::{
    Action, CollectiveShape as S, Local, Part, Place, Plan, Round, What, steps::push_part, tree,
};

pub(super) fn round(plan: &Plan, rank: usize, k: usize, round: &mut Round) {
    let n = plan.world();
    let hop = 1 << k;
    let (right, left) = ((rank + hop) % n, (rank + n - hop) % n);
    match plan.shape() {
        S::AllReduce { .. } | S::AllGather { .. } => {
            let blocks = hop.min(n - hop);
            let what = What::parts(gathered(plan, rank, rank, blocks, k == 0));
            let parts = gathered(plan, rank, right, blocks, false);
            round.send(left, what);
            let len = parts.iter().map(|part| part.range.len()).sum();
            round.recv(right, len, Action::parts(parts));
            gather_work(plan, rank, k, round);
        }
        S::AllToAll { len } => {
            let mut come = Vec::new();
            let mut go = Vec::new();
            for j in (hop..n).filter(|j| j & hop != 0) {
                let (place, at) = if j & (hop - 1) == 0 {
                    (Place::Input, (rank + j) % n)
                } else {
                    (Place::Stash, j)
                };
                push_part(&mut go, place, at * len..(at + 1) * len);
                let (place, at) = if j >> (k + 1) == 0 {
                    (Place::Output, (rank + n - j) % n)
                } else {
                    (Place::Stash, j)
                };
                push_part(&mut come, place, at * len..(at + 1) * len);
            }
            let total = come.iter().map(|part| part.range.len()).sum();
            round.send(right, What::parts(go));
            round.recv(left, total, Action::parts(come));
            if k == 0 {
                round.then.push(Local::Copy {
                    input: rank * len..(rank + 1) * len,
                    at: rank * len,
                });
            }
        }
        _ => {
            round.send(right, What::Input(0..0));
            round.recv(left, 0, Action::Store(0));
        }
    }
}

/// Where `rank` holds the blocks of `count` ranks from `first` on. `fresh`: the own block is still
/// in the input only.
fn gathered(plan: &Plan, rank: usize, first: usize, count: usize, fresh: bool) -> Vec<Part> {
    let n = plan.world();
    let mut parts = Vec::new();
    for block in (first..first + count).map(|r| r % n) {
        let (place, range): (_, Range<usize>) = match plan.shape() {
            S::AllReduce { len } if block == rank => (Place::Input, 0..*len),
            S::AllReduce { len } => (Place::Stash, block * len..(block + 1) * len),
            _ if fresh && block == rank => (Place::Input, 0..plan.chunk(rank).len()),
            _ => (Place::Output, plan.chunk(block)),
        };
        push_part(&mut parts, place, range);
    }
    parts
}

fn gather_work(plan: &Plan, rank: usize, k: usize, round: &mut Round) {
    match plan.shape() {
        S::AllReduce { len } if k + 1 == tree::depth(plan.world()) => {
            round.then.push(Local::FoldStash {
                input: 0..*len,
                at: 0,
            });
        }
        S::AllGather { .. } if k == 0 => {
            let own = plan.chunk(rank);
            round.then.push(Local::Copy {
                input: 0..own.len(),
                at: own.start,
            });
        }
        _ => {}
    }
}
