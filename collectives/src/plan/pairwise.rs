//! Each pair of ranks exchanges just the chunks that one has and the other needs.
//!
//! ```text
//! reduce_scatter, world 3:       all_gather:
//! rank 0 gets chunk 0 of all     rank 0 gives its chunk to all
//!   [a0 .  . ]                     [0 . .] -> [0 1 2]
//!   [b0 .  . ] -> a0 + b0 + c0     [. 1 .] -> [0 1 2]
//!   [c0 .  . ]                     [. . 2] -> [0 1 2]
//! ```
//!
//! The same bytes as a ring. The n-1 exchanges of a phase do not depend on each other, so they are
//! one round; and since contributions meet only at their owner, it can fold them in rank order.
//!
//! An all_reduce in pieces goes through both phases with a part of every chunk before it begins with the
//! next, so that what is at work at a time fits the caches. No two pieces are under way together: it is for ranks
//! of one host.

use alloc::vec;

use super::{Action, CollectiveShape as S, Local, Plan, Round, What};

pub(super) fn round(plan: &Plan, rank: usize, index: usize, piece: usize, round: &mut Round) {
    let own = plan.chunk(rank);
    match plan.shape() {
        S::AllReduce { .. } => {
            let own = plan.piece(own, piece);
            if index == 0 {
                reduce_scatter(plan, rank, piece, own.start, round);
            } else {
                all_gather(plan, rank, piece, &What::Output(own), round);
            }
        }
        S::ReduceScatter { .. } => reduce_scatter(plan, rank, piece, 0, round),
        S::AllGather { .. } => {
            all_gather(plan, rank, piece, &What::Input(0..own.len()), round);
            round.then.push(Local::Copy {
                input: 0..own.len(),
                at: own.start,
            });
        }
        S::AllToAll { len } => {
            let counts = vec![*len; plan.world()];
            all_to_all(&counts, &counts, rank, round);
        }
        S::AllToAllV { send, recv } => all_to_all(send, recv, rank, round),
        _ => {}
    }
}

/// A piece of my chunk of everybody's input, folded in rank order, becomes the output from `at` on.
fn reduce_scatter(plan: &Plan, rank: usize, piece: usize, at: usize, round: &mut Round) {
    let n = plan.world();
    let segment = |r: usize| plan.piece(plan.chunk(r), piece);
    let own = segment(rank);
    for step in 1..n {
        let (to, from) = ((rank + step) % n, (rank + n - step) % n);
        round.send(to, What::Input(segment(to)));
        round.recv(from, own.len(), Action::Keep);
    }
    round.then.push(Local::FoldRanks { input: own, at });
}

/// `own` goes to everybody; a piece of everybody's chunk comes.
fn all_gather(plan: &Plan, rank: usize, piece: usize, own: &What, round: &mut Round) {
    let n = plan.world();
    for step in 1..n {
        let (to, from) = ((rank + step) % n, (rank + n - step) % n);
        round.send(to, own.clone());
        round.store(from, plan.piece(plan.chunk(from), piece));
    }
}

fn all_to_all(send: &[usize], recv: &[usize], rank: usize, round: &mut Round) {
    let n = send.len();
    let starts = |counts: &[usize]| {
        let mut at = 0;
        let start = |count: &usize| {
            at += count;
            at - count
        };
        counts.iter().map(start).collect::<vec::Vec<usize>>()
    };
    let (send_at, recv_at) = (starts(send), starts(recv));
    let part = |r: usize| send_at[r]..send_at[r] + send[r];
    for step in 1..n {
        let (to, from) = ((rank + step) % n, (rank + n - step) % n);
        round.send(to, What::Input(part(to)));
        round.recv(from, recv[from], Action::Store(recv_at[from]));
    }
    round.then.push(Local::Copy {
        input: part(rank),
        at: recv_at[rank],
    });
}
