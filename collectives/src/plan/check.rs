//! Checks a plan without running it: every rank's rounds are replayed on symbols.
//!
//! ```text
//! an element is the list of contributions folded into it:   [a3]   [a3 b3]   [a3 b3 c3]
//!                                                           rank a, element 3 of its input
//! ```
//!
//! Replayed under two deliveries, the harshest there are: *rendezvous* (a message leaves when the
//! receiver asks for it) and one buffered message per directed pair. A plan is sound where both
//! end; each output element holds each contribution once, and from left to right where the plan
//! says [`FoldOrder::RankOrder`]; every message is received in the round it was sent in; ranges stay
//! in bounds; no input is read after it was overwritten by an output that lies in the same place (as
//! the in-place forms have it); rounds and bytes are those of the formula; and, for a barrier, every
//! rank has heard of every other.

use alloc::{
    collections::{BTreeSet, VecDeque},
    format,
    string::{String, ToString},
    vec,
    vec::Vec,
};

mod symbols;

use symbols::{Alias, Fault, Letter, Sum, Symbols};

use super::{CollectiveShape, FoldOrder, Operation, Plan, Round, What};
use crate::{DType, Error, Result};

/// Checks a plan whose shape is the same on all ranks.
///
/// # Errors
/// [`Error::Unsound`] naming the first fault.
///
/// ```
/// use quintet_collectives::{Algorithm, CollectiveShape, Plan, plan::check};
/// check::check(&Plan::new(CollectiveShape::AllReduce { len: 1000 }, Algorithm::Ring, 7)?)?;
/// # Ok::<(), quintet_collectives::Error>(())
/// ```
pub fn check(plan: &Plan) -> Result<()> {
    check_ranks(&vec![plan.clone(); plan.world()])
}

/// Checks the plans of all ranks, one each: all_to_all_v has another shape on each.
///
/// # Errors
/// [`Error::Unsound`] naming the first fault.
pub fn check_ranks(plans: &[Plan]) -> Result<()> {
    let rounds: Vec<Vec<Round>> = plans
        .iter()
        .enumerate()
        .map(|(r, plan)| plan.rounds(r))
        .collect();
    check_rounds(plans, &rounds)
}

/// Checks these rounds, which may have been changed, against what the plans promise.
///
/// # Errors
/// [`Error::Unsound`] naming the first fault.
pub fn check_rounds(plans: &[Plan], rounds: &[Vec<Round>]) -> Result<()> {
    let Some(plan) = plans.first() else {
        return Ok(());
    };
    let unsound = |fault: String| Error::Unsound {
        plan: format!(
            "{} by {} over {}, len {}",
            plan.shape().operation(),
            plan.algorithm(),
            plan.world(),
            plan.shape().len(plan.world())
        ),
        fault,
    };
    if plans.len() != plan.world() || rounds.len() != plan.world() {
        return Err(unsound(format!("{} ranks were given", plans.len())));
    }
    for (rank, (plan, rounds)) in plans.iter().zip(rounds).enumerate() {
        formulas(plan, rank, rounds).map_err(&unsound)?;
    }
    for capacity in [0, 1] {
        let ranks = replay(plans, rounds, capacity).map_err(&unsound)?;
        for (rank, symbols) in ranks.iter().enumerate() {
            placed(plans, rank, symbols).map_err(&unsound)?;
        }
    }
    Ok(())
}

/// Bytes, rounds and bounds of one rank.
fn formulas(plan: &Plan, rank: usize, rounds: &[Round]) -> Fault<()> {
    if rounds.len() != plan.rounds_len().max(1) {
        return Err(format!(
            "rank {rank} has {} rounds, the formula says {}",
            rounds.len(),
            plan.rounds_len()
        ));
    }
    for dtype in [DType::F32, DType::Bf16, DType::F64, DType::U8] {
        let bytes: usize = rounds
            .iter()
            .flat_map(|round| &round.sends)
            .map(|send| bytes_of(&send.what, dtype))
            .sum();
        let formula = plan.bytes_sent(rank, dtype);
        if bytes as u64 != formula {
            return Err(format!(
                "rank {rank} sends {bytes} bytes of {dtype}, the formula says {formula}"
            ));
        }
    }
    for (i, round) in rounds.iter().enumerate() {
        let peers = round
            .sends
            .iter()
            .map(|s| s.to)
            .chain(round.recvs.iter().map(|r| r.from));
        if let Some(peer) = peers
            .into_iter()
            .find(|&peer| peer >= plan.world() || peer == rank)
        {
            return Err(format!(
                "rank {rank}, round {i}: no message can pass with rank {peer}"
            ));
        }
    }
    Ok(())
}

fn bytes_of(what: &What, dtype: DType) -> usize {
    let wire = if what.wide() {
        dtype.accumulator()
    } else {
        dtype
    };
    what.len() * wire.bytes()
}

/// Runs all ranks until they are done or none can move; `capacity` messages fit into a pair.
fn replay(plans: &[Plan], rounds: &[Vec<Round>], capacity: usize) -> Fault<Vec<Symbols>> {
    let n = plans.len();
    let mut ranks: Vec<Symbols> = plans
        .iter()
        .enumerate()
        .map(|(r, plan)| Symbols {
            input: plan.input_len(r),
            alias: Alias::of(plan, r),
            output: vec![None; plan.output_len(r)],
            kept: vec![None; n],
            heard: BTreeSet::from([r]),
            ..Symbols::default()
        })
        .collect();
    let mut wires: Vec<VecDeque<Letter>> = vec![VecDeque::new(); n * n];
    loop {
        let mut moved = false;
        for me in 0..n {
            moved |= advance(me, &mut ranks[me], &rounds[me])?;
            moved |= post(me, &mut ranks, &mut wires, capacity);
            moved |= take(me, &mut ranks, &mut wires)?;
        }
        if !moved {
            break;
        }
    }
    let stuck: Vec<String> = (0..n).filter_map(|me| stuck(me, &ranks[me])).collect();
    if !stuck.is_empty() {
        let mode = if capacity == 0 {
            "rendezvous"
        } else {
            "one message per pair"
        };
        return Err(format!("deadlock under {mode}: {}", stuck.join("; ")));
    }
    if let Some(at) = wires.iter().position(|wire| !wire.is_empty()) {
        return Err(format!(
            "a message from rank {} to rank {} is never received",
            at / n,
            at % n
        ));
    }
    Ok(ranks)
}

/// Ends a finished round and enters the next.
fn advance(me: usize, rank: &mut Symbols, rounds: &[Round]) -> Fault<bool> {
    if !rank.posted.is_empty() || !rank.missing.is_empty() {
        return Ok(false);
    }
    let mut moved = false;
    for local in core::mem::take(&mut rank.then) {
        rank.work(me, local)?;
        moved = true;
    }
    let Some(round) = rounds.get(rank.next) else {
        return Ok(moved);
    };
    rank.next += 1;
    for send in &round.sends {
        let letter = Letter {
            sums: rank.outgoing(me, &send.what)?,
            wide: send.what.wide(),
            round: rank.next - 1,
            heard: rank.heard.clone(),
        };
        rank.posted.push_back((send.to, letter));
    }
    rank.missing.clone_from(&round.recvs);
    rank.then.clone_from(&round.then);
    Ok(true)
}

/// Puts on the wire what there is room for, or what is asked for at this moment.
fn post(me: usize, ranks: &mut [Symbols], wires: &mut [VecDeque<Letter>], capacity: usize) -> bool {
    let n = ranks.len();
    let (mut moved, mut left) = (false, VecDeque::new());
    while let Some((to, letter)) = ranks[me].posted.pop_front() {
        let wire = &mut wires[me * n + to];
        let asked = ranks[to].missing.iter().any(|recv| recv.from == me) && wire.is_empty();
        let behind = left.iter().any(|(earlier, _)| *earlier == to);
        if !behind && (asked || wire.len() < capacity) {
            wire.push_back(letter);
            moved = true;
        } else {
            left.push_back((to, letter));
        }
    }
    ranks[me].posted = left;
    moved
}

/// Receives what is there.
fn take(me: usize, ranks: &mut [Symbols], wires: &mut [VecDeque<Letter>]) -> Fault<bool> {
    let n = ranks.len();
    let (mut moved, mut i) = (false, 0);
    while i < ranks[me].missing.len() {
        let from = ranks[me].missing[i].from;
        let (earlier, recv) = (&ranks[me].missing[..i], &ranks[me].missing[i]);
        if earlier.iter().any(|earlier| recv.after(earlier)) {
            i += 1;
            continue;
        }
        let Some(letter) = wires[from * n + me].pop_front() else {
            i += 1;
            continue;
        };
        let recv = ranks[me].missing.remove(i);
        ranks[me].receive(me, recv, letter)?;
        moved = true;
    }
    Ok(moved)
}

fn stuck(me: usize, rank: &Symbols) -> Option<String> {
    if let Some(recv) = rank.missing.first() {
        return Some(format!(
            "rank {me} waits for rank {} in round {}",
            recv.from,
            rank.next - 1
        ));
    }
    let (to, _) = rank.posted.front()?;
    Some(format!(
        "rank {me} waits to send to rank {to} in round {}",
        rank.next - 1
    ))
}

/// Whether `rank` ended with what its operation promises.
fn placed(plans: &[Plan], rank: usize, symbols: &Symbols) -> Fault<()> {
    let plan = &plans[rank];
    if plan.shape().operation() == Operation::Barrier && symbols.heard.len() != plans.len() {
        return Err(format!(
            "rank {rank} leaves the barrier having heard of {:?} only",
            symbols.heard
        ));
    }
    for (i, sum) in symbols.output.iter().enumerate() {
        let Some(sum) = sum else {
            return Err(format!("rank {rank} has no output {i}"));
        };
        let expected = expected(plans, rank, i);
        let mut got = sum.clone();
        if plan.fold_order() == FoldOrder::Fixed {
            got.sort_unstable();
        }
        if got != expected {
            return Err(format!(
                "rank {rank}, output {i}: is the fold of {got:?}, not of {expected:?}"
            ));
        }
    }
    Ok(())
}

/// The contributions of output `i` of `rank`, in rank order.
fn expected(plans: &[Plan], rank: usize, i: usize) -> Sum {
    use CollectiveShape as S;
    let plan = &plans[rank];
    let n = plans.len();
    let all = |at: usize| (0..n).map(|r| (r, at)).collect();
    let owner = |i: usize| (0..n).find(|&r| plan.chunk(r).contains(&i)).unwrap_or(n);
    match plan.shape() {
        S::AllReduce { .. } | S::Reduce { .. } => all(i),
        S::ReduceScatter { .. } => all(plan.chunk(rank).start + i),
        S::Broadcast { root, .. } => vec![(*root, i)],
        S::Scatter { root, .. } => vec![(*root, plan.chunk(rank).start + i)],
        S::AllGather { .. } | S::Gather { .. } => {
            let owner = owner(i);
            vec![(owner, i - plan.chunk(owner).start)]
        }
        S::AllToAll { len } => vec![(i / len, rank * len + i % len)],
        S::AllToAllV { recv, .. } => {
            let (mut from, mut at) = (0, i);
            while at >= recv[from] {
                at -= recv[from];
                from += 1;
            }
            let before: usize = match plans[from].shape() {
                S::AllToAllV { send, .. } => send[..rank].iter().sum(),
                _ => 0,
            };
            vec![(from, before + at)]
        }
        S::Barrier => vec![],
    }
}

impl Error {
    /// The fault of an [`Error::Unsound`], for tests that expect one.
    #[must_use]
    pub fn fault(&self) -> String {
        match self {
            Self::Unsound { fault, .. } => fault.clone(),
            other => other.to_string(),
        }
    }
}
