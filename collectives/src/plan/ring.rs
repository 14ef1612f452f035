//! Chunks travel round a ring; every rank talks to its two neighbours only.
//!
//! ```text
//! reduce_scatter, world 4: chunk 0 starts at rank 1 and is complete at rank 0
//!
//!   1 --(b0)--> 2 --(b0+c0)--> 3 --(b0+c0+d0)--> 0 = ((b0+c0)+d0)+a0
//!
//! broadcast, world 4, root 1, two pieces:      1 ==> 2 ==> 3 ==> 0
//! ```
//!
//! In round t rank r sends chunk r-1-t to r+1 and receives chunk r-2-t from r-1 (modulo n). The
//! fold order of a chunk is fixed by its index: from its right neighbour round to its owner.
//! all_gather is the same walk with stores: in round t rank r sends chunk r-t. Broadcast runs down
//! the chain that starts at the root, reduce up the same chain: x0 + (x1 + (x2 + x3)), counted
//! from the root.

use super::{CollectiveShape as S, Local, Plan, Round, What};

pub(super) fn round(plan: &Plan, rank: usize, index: usize, piece: usize, round: &mut Round) {
    let steps = plan.world() - 1;
    let own = plan.chunk(rank);
    match plan.shape() {
        S::AllReduce { .. } if index < steps => {
            reduce_scatter(plan, rank, index, piece, own.start, round);
        }
        S::AllReduce { .. } => all_gather(plan, rank, index - steps, piece, round),
        S::ReduceScatter { .. } => reduce_scatter(plan, rank, index, piece, 0, round),
        S::AllGather { .. } => {
            all_gather(plan, rank, index, piece, round);
            if index == 0 {
                // The first message comes from the input.
                let input = plan.piece(0..own.len(), piece);
                round.sends.last_mut().into_iter().for_each(|send| {
                    send.what = What::Input(input.clone());
                });
                let at = own.start + input.start;
                round.then.push(Local::Copy { input, at });
            }
        }
        S::Broadcast { len, root } => {
            broadcast(plan, rank, *root, index, plan.piece(0..*len, piece), round);
        }
        S::Reduce { len, root } => {
            reduce(plan, rank, *root, index, plan.piece(0..*len, piece), round);
        }
        _ => {}
    }
}

/// The rank `steps` (at most n) to the left. Divisions would be most of a simulation's time.
fn back(rank: usize, steps: usize, n: usize) -> usize {
    if rank >= steps {
        rank - steps
    } else {
        rank + n - steps
    }
}

/// The owner's chunk becomes its output from `at` on.
fn reduce_scatter(plan: &Plan, rank: usize, t: usize, piece: usize, at: usize, round: &mut Round) {
    let n = plan.world();
    let segment = |r: usize| plan.piece(plan.chunk(r), piece);
    let left = back(rank, 1, n);
    let (outgoing, incoming) = (segment(back(left, t, n)), segment(back(left, t + 1, n)));
    round.send(back(rank, n - 1, n), What::Partial(outgoing));
    round.fold(left, incoming.clone(), true);
    if t + 2 == n {
        let at = at + (incoming.start - plan.chunk(rank).start);
        round.then.push(Local::Finish {
            input: incoming,
            at,
        });
    }
}

fn all_gather(plan: &Plan, rank: usize, t: usize, piece: usize, round: &mut Round) {
    let n = plan.world();
    let segment = |r: usize| plan.piece(plan.chunk(r), piece);
    let left = back(rank, 1, n);
    let (right, outgoing) = (back(rank, n - 1, n), segment(back(rank, t, n)));
    round.send(right, What::Output(outgoing));
    round.store(left, segment(back(left, t, n)));
}

fn broadcast(
    plan: &Plan,
    rank: usize,
    root: usize,
    t: usize,
    range: core::ops::Range<usize>,
    round: &mut Round,
) {
    let n = plan.world();
    let link = (rank + n - root) % n;
    if link == t + 1 {
        round.store((rank + n - 1) % n, range.clone());
    }
    if link == t {
        let to = (rank + 1) % n;
        if link > 0 {
            round.send(to, What::Output(range));
        } else {
            round.send(to, What::Input(range.clone()));
            let at = range.start;
            round.then.push(Local::Copy { input: range, at });
        }
    }
}

fn reduce(
    plan: &Plan,
    rank: usize,
    root: usize,
    t: usize,
    range: core::ops::Range<usize>,
    round: &mut Round,
) {
    let n = plan.world();
    let link = (rank + n - root) % n;
    if link + t + 1 == n {
        round.send((rank + n - 1) % n, What::Partial(range.clone()));
    }
    if link + t + 2 == n {
        round.fold((rank + 1) % n, range.clone(), false);
        if link == 0 {
            let at = range.start;
            round.then.push(Local::Finish { input: range, at });
        }
    }
}
