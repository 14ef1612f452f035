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

use alloc::{vec, vec::Vec};

use super::{Action, CollectiveShape as S, Local, Plan, Round, What};

pub(super) fn rounds(plan: &Plan, rank: usize) -> Vec<Round> {
    let own = plan.chunk(rank);
    match plan.shape() {
        S::AllReduce { .. } if plan.world() == 1 => {
            vec![Round::local(Local::FoldRanks {
                input: own.clone(),
                at: 0,
            })]
        }
        S::AllReduce { .. } => vec![
            reduce_scatter(plan, rank, own.start),
            all_gather(plan, rank, What::Output(own.clone())),
        ],
        S::ReduceScatter { .. } => vec![reduce_scatter(plan, rank, 0)],
        S::AllGather { .. } => {
            let mut round = all_gather(plan, rank, What::Input(0..own.len()));
            round.then.push(Local::Copy {
                input: 0..own.len(),
                at: own.start,
            });
            vec![round]
        }
        S::AllToAll { len } => {
            let counts = vec![*len; plan.world()];
            vec![all_to_all(&counts, &counts, rank)]
        }
        S::AllToAllV { send, recv } => vec![all_to_all(send, recv, rank)],
        _ => vec![Round::default()],
    }
}

/// My chunk of everybody's input, folded in rank order, becomes the output from `at` on.
fn reduce_scatter(plan: &Plan, rank: usize, at: usize) -> Round {
    let (n, own) = (plan.world(), plan.chunk(rank));
    let mut round = Round::default();
    for step in 1..n {
        let (to, from) = ((rank + step) % n, (rank + n - step) % n);
        round.send(to, What::Input(plan.chunk(to)));
        round.recv(from, own.len(), Action::Keep);
    }
    round.then.push(Local::FoldRanks { input: own, at });
    round
}

/// `own` goes to everybody; everybody's chunk comes.
fn all_gather(plan: &Plan, rank: usize, own: What) -> Round {
    let n = plan.world();
    let mut round = Round::default();
    for step in 1..n {
        let (to, from) = ((rank + step) % n, (rank + n - step) % n);
        let chunk = plan.chunk(from);
        round.send(to, own.clone());
        round.recv(from, chunk.len(), Action::Store(chunk.start));
    }
    round
}

fn all_to_all(send: &[usize], recv: &[usize], rank: usize) -> Round {
    let n = send.len();
    let start = |counts: &[usize], r: usize| counts[..r].iter().sum::<usize>();
    let part = |r: usize| start(send, r)..start(send, r) + send[r];
    let mut round = Round::default();
    for step in 1..n {
        let (to, from) = ((rank + step) % n, (rank + n - step) % n);
        round.send(to, What::Input(part(to)));
        round.recv(from, recv[from], Action::Store(start(recv, from)));
    }
    round.then.push(Local::Copy {
        input: part(rank),
        at: start(recv, rank),
    });
    round
}
