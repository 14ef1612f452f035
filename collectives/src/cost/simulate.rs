//! A plan's messages placed on links, one by one, in the order in which they are posted.
//!
//! ```text
//! time ->      0         1         2
//! rank 0 out   [to 1 ===][to 2 ===]          a message begins on a link when it has begun on the one
//! host 0 out   [to 1]    [to 2]              before and the link is free; it is there `latency` after
//! rank 1 in    [to 1 ===]                    its last byte has passed the last link
//! ```
//!
//! A rank posts the messages of a round one after another, goes on when they have left it and all of
//! the round has come, and folds what came. Nobody waits for room further on. A message holds a rank's
//! port for `overhead + bytes * send`, a shared link for bytes times that link's rate; of two messages
//! the one posted first goes first.

use alloc::{
    collections::{BinaryHeap, VecDeque},
    vec::Vec,
};
use core::cmp::Reverse;

use super::{Link, Model, ports::Ports};
use crate::{
    DType, Error, Result,
    plan::{Action, Local, Plan, Round, What},
};

/// What a simulation found.
#[derive(Debug, Clone, PartialEq)]
pub struct Simulated {
    /// When each rank is done, in seconds.
    pub finish: Vec<f64>,
    /// What each link carried; links that carried nothing are left out.
    pub links: Vec<LinkLoad>,
    /// Messages in all.
    pub messages: u64,
}

/// The load of one link.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LinkLoad {
    /// Which.
    pub link: Link,
    /// Payload bytes.
    pub bytes: u64,
    /// Seconds it was held.
    pub busy: f64,
}

impl Simulated {
    /// When the last rank is done.
    #[must_use]
    pub fn seconds(&self) -> f64 {
        self.finish.iter().copied().fold(0.0, f64::max)
    }

    /// The load of a link; 0 where it carried nothing.
    #[must_use]
    pub fn bytes(&self, link: Link) -> u64 {
        let load = self.links.iter().find(|load| load.link == link);
        load.map_or(0, |load| load.bytes)
    }
}

/// Places the messages of a plan on the links of `topology` (none: one host), with the constants of
/// `model`.
///
/// # Errors
/// [`Error::Plan`] where the topology does not hold the plan's ranks, or the shape is all_to_all_v,
/// whose one plan knows the counts of one rank only; [`Error::Unsound`] where a rank waits for what
/// nobody sends.
///
/// ```
/// use quintet_collectives::{Algorithm, CollectiveShape, DType, Plan, cost::{Model, simulate}};
/// let plan = Plan::new(CollectiveShape::AllReduce { len: 1 << 20 }, Algorithm::Ring, 8)?;
/// let done = simulate(&plan, DType::F32, &Model::default())?;
/// assert_eq!(done.messages, 8 * 14);
/// # Ok::<(), quintet_collectives::Error>(())
/// ```
pub fn simulate(plan: &Plan, dtype: DType, model: &Model) -> Result<Simulated> {
    let refuse = |reason: &str| Error::Plan {
        op: plan.shape().operation().name(),
        algorithm: plan.algorithm().name(),
        world: plan.world(),
        reason: reason.into(),
    };
    if plan.shape().operation() == crate::plan::Operation::AllToAllV {
        return Err(refuse("the counts of the other ranks are not known"));
    }
    let topology = model.topology.as_ref();
    if topology.is_some_and(|all| all.hosts().world() != plan.world()) {
        return Err(refuse("the topology holds another number of ranks"));
    }
    let mut run = Run::new(plan, dtype, model);
    for rank in 0..plan.world() {
        run.enter(rank, 0.0);
    }
    while let Some((time, rank)) = run.queue.pop() {
        run.step(rank, time);
    }
    if let Some(rank) = run.ranks.iter().position(|rank| !rank.done) {
        return Err(Error::Unsound {
            plan: alloc::format!("{} by {}", plan.shape().operation(), plan.algorithm()),
            fault: alloc::format!(
                "rank {rank} waits in round {} for what nobody sends",
                run.ranks[rank].index
            ),
        });
    }
    Ok(Simulated {
        finish: run.ranks.iter().map(|rank| rank.entered).collect(),
        messages: run.messages,
        links: run.ports.loads(),
    })
}

/// Events by time. Most come in ascending order, which a plain queue keeps.
#[derive(Default)]
struct Queue {
    ascending: VecDeque<(u64, usize)>,
    others: BinaryHeap<Reverse<(u64, usize)>>,
}

impl Queue {
    fn push(&mut self, time: f64, rank: usize) {
        // Times are not negative, so their bits are ordered as they are.
        let bits = time.to_bits();
        if self.ascending.back().is_none_or(|last| last.0 <= bits) {
            self.ascending.push_back((bits, rank));
        } else {
            self.others.push(Reverse((bits, rank)));
        }
    }

    fn pop(&mut self) -> Option<(f64, usize)> {
        let first = self.ascending.front().map(|first| first.0);
        let heap = self.others.peek().map(|Reverse(first)| first.0);
        let next = match (first, heap) {
            (Some(first), Some(heap)) if heap < first => self.others.pop().map(|r| r.0),
            (None, Some(_)) => self.others.pop().map(|r| r.0),
            _ => self.ascending.pop_front(),
        };
        next.map(|(bits, rank)| (f64::from_bits(bits), rank))
    }
}

/// What has come for one round of one rank.
#[derive(Default, Clone, Copy)]
struct Come {
    messages: usize,
    /// When the last of it was folded, as far as that could begin on arrival.
    ready: f64,
    /// Seconds of folding.
    folds: f64,
}

/// A message to send, as short as it can be said: a round may hold one for every other rank.
#[derive(Clone, Copy)]
struct Post {
    to: u32,
    wide: bool,
    /// Whether it was just computed.
    recent: bool,
    len: usize,
}

/// One rank.
#[derive(Default)]
struct State {
    index: usize,
    sends: Vec<Post>,
    /// The next of the round's sends.
    next: usize,
    /// Messages that the round waits for, and elements folded when all have come.
    expects: usize,
    work: usize,
    entered: f64,
    sent: f64,
    come: VecDeque<Come>,
    /// Whether the event that begins its round is still to come.
    waiting: bool,
    done: bool,
}

struct Run<'a> {
    plan: &'a Plan,
    rounds: usize,
    width: (usize, usize),
    fold: f64,
    ports: Ports<'a>,
    ranks: Vec<State>,
    /// The round that is just being entered.
    round: Round,
    queue: Queue,
    messages: u64,
}

impl<'a> Run<'a> {
    fn new(plan: &'a Plan, dtype: DType, model: &'a Model) -> Self {
        let n = plan.world();
        let width = dtype.bytes() as u64;
        let bytes = plan.shape().len(n) as u64 * width;
        let mut ranks = Vec::new();
        ranks.resize_with(n, State::default);
        Self {
            plan,
            rounds: plan.rounds_len().max(1),
            width: (dtype.bytes(), dtype.accumulator().bytes()),
            fold: model.within.fold.at(bytes) * dtype.bytes() as f64,
            ports: Ports::new(model, n, bytes, plan.recent_len() as u64 * width),
            ranks,
            round: Round::default(),
            queue: Queue::default(),
            messages: 0,
        }
    }

    fn enter(&mut self, rank: usize, time: f64) {
        let state = &mut self.ranks[rank];
        state.entered = time;
        state.sent = time;
        state.next = 0;
        state.waiting = true;
        if state.index == self.rounds {
            state.done = true;
            return;
        }
        self.plan.round_into(rank, state.index, &mut self.round);
        let posts = self.round.sends.iter().map(|send| Post {
            to: send.to as u32,
            wide: send.what.wide(),
            recent: matches!(send.what, What::Output(_)),
            len: send.what.len(),
        });
        state.sends.clear();
        state.sends.extend(posts);
        state.expects = self.round.recvs.len();
        state.work = folded_after(&self.round, self.plan.world());
        self.queue.push(time, rank);
    }

    /// The next send of a rank, or, after the last one, the end of its round.
    fn step(&mut self, rank: usize, time: f64) {
        let state = &mut self.ranks[rank];
        state.waiting = false;
        if let Some(&post) = state.sends.get(state.next) {
            let Post { wide, len, .. } = post;
            let (to, index) = (post.to as usize, state.index);
            state.next += 1;
            let width = if wide { self.width.1 } else { self.width.0 };
            let bytes = len as u64 * width as u64;
            let (gone, there) = self.ports.carry((rank, to), (bytes, post.recent), time);
            self.messages += 1;
            let state = &mut self.ranks[rank];
            state.sent = gone;
            let more = state.next < state.sends.len();
            self.deliver(
                to,
                index,
                there,
                if wide { len as f64 * self.fold } else { 0.0 },
            );
            if more {
                self.queue.push(gone, rank);
                return;
            }
        }
        self.end(rank);
    }

    fn deliver(&mut self, to: usize, index: usize, there: f64, fold: f64) {
        let state = &mut self.ranks[to];
        // A message of a round that is over is the checker's to find.
        let Some(ahead) = index.checked_sub(state.index) else {
            return;
        };
        if state.come.len() <= ahead {
            state.come.resize(ahead + 1, Come::default());
        }
        let come = &mut state.come[ahead];
        come.messages += 1;
        come.ready = come.ready.max(there) + fold;
        come.folds += fold;
        if ahead == 0 {
            self.end(to);
        }
    }

    /// Ends a rank's round where all has been sent and all has come.
    fn end(&mut self, rank: usize) {
        let state = &mut self.ranks[rank];
        let come = state.come.front().copied().unwrap_or_default();
        let unsent = state.next < state.sends.len();
        let unseen = come.messages < state.expects;
        if state.waiting || unsent || unseen {
            return;
        }
        let folded = state.sent.max(come.ready).max(state.entered + come.folds);
        let time = folded + state.work as f64 * self.fold;
        state.come.pop_front();
        state.index += 1;
        self.enter(rank, time);
    }
}

/// Elements folded when all of a round has come.
fn folded_after(round: &Round, world: usize) -> usize {
    let raw = round.recvs.iter().map(|recv| match &recv.action {
        Action::FoldRaw(_) => recv.len,
        _ => 0,
    });
    let ranks = round.then.iter().map(|local| match local {
        Local::FoldRanks { input, .. } | Local::FoldStash { input, .. } => {
            input.len() * (world - 1)
        }
        Local::Copy { .. } | Local::Finish { .. } => 0,
    });
    raw.sum::<usize>() + ranks.sum::<usize>()
}
