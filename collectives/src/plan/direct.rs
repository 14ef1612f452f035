//! Everyone sends at once, straight to whoever needs it: one round.
//!
//! ```text
//! all_reduce        reduce, gather      broadcast, scatter
//! 0 <---> 1         1 --\               /--> 1
//! ^ \   / ^         2 ---> root    root ---> 2
//! v /   \ v         3 --/               \--> 3
//! 2 <---> 3
//! ```
//!
//! The fewest rounds and the most bytes: right where a message costs more than what it carries.
//! all_reduce and reduce keep the inputs apart and fold them in rank order.

use super::{Action, CollectiveShape as S, Local, Plan, Round, What};

pub(super) fn round(plan: &Plan, rank: usize, round: &mut Round) {
    let n = plan.world();
    // Starting with the neighbour on the right, so that not all send to rank 0 first.
    let others = (1..n).map(|step| (rank + step) % n);
    match plan.shape() {
        S::AllReduce { len } => {
            for peer in others {
                round.send(peer, What::Input(0..*len));
                round.recv(peer, *len, Action::Keep);
            }
            round.then.push(Local::FoldRanks {
                input: 0..*len,
                at: 0,
            });
        }
        S::Reduce { len, root } if rank == *root => {
            others.for_each(|peer| round.recv(peer, *len, Action::Keep));
            round.then.push(Local::FoldRanks {
                input: 0..*len,
                at: 0,
            });
        }
        S::Reduce { len, root } => round.send(*root, What::Input(0..*len)),
        S::Broadcast { len, root } if rank == *root => {
            others.for_each(|peer| round.send(peer, What::Input(0..*len)));
            round.then.push(Local::Copy {
                input: 0..*len,
                at: 0,
            });
        }
        S::Broadcast { len, root } => round.recv(*root, *len, Action::Store(0)),
        S::Gather { counts, root } => {
            if rank == *root {
                for peer in others {
                    let chunk = plan.chunk(peer);
                    round.recv(peer, chunk.len(), Action::Store(chunk.start));
                }
                round.then.push(Local::Copy {
                    input: 0..counts[rank],
                    at: plan.chunk(rank).start,
                });
            } else {
                round.send(*root, What::Input(0..counts[rank]));
            }
        }
        S::Scatter { counts, root } => {
            if rank == *root {
                others.for_each(|peer| round.send(peer, What::Input(plan.chunk(peer))));
                round.then.push(Local::Copy {
                    input: plan.chunk(rank),
                    at: 0,
                });
            } else {
                round.recv(*root, counts[rank], Action::Store(0));
            }
        }
        S::Barrier => {
            for peer in others {
                round.send(peer, What::Input(0..0));
                round.recv(peer, 0, Action::Store(0));
            }
        }
        S::ReduceScatter { .. }
        | S::AllGather { .. }
        | S::AllToAll { .. }
        | S::AllToAllV { .. } => {}
    }
}
