//! All ranks in one thread: the same performer, polled in a seeded order, without a clock.
//!
//! ```text
//! sweep 1:  2 0 3 1     each rank goes as far as it can
//! sweep 2:  1 3 0 2
//! ...                   a sweep in which nothing moved is a deadlock, and the cycle is named
//! ```
//!
//! [`Delivery::Rendezvous`] accepts a message only while its receiver asks for it;
//! [`Delivery::Bounded`] buffers so many bytes per directed pair, and one message whatever its
//! length.

use alloc::{
    boxed::Box,
    collections::{BTreeMap, BTreeSet, VecDeque},
    format,
    rc::Rc,
    string::{String, ToString},
    sync::Arc,
    vec,
    vec::Vec,
};
use core::{cell::RefCell, time::Duration};

use crate::{
    Element, Error, Order, ReduceOp, Result,
    performer::{Link, Performer, View, fits},
    plan::{Plan, Round},
    transport::{Call, Control, Message, Tag, Transport, Wait, checked_members},
};

/// When a message leaves its sender.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Delivery {
    /// When the receiver asks for it.
    Rendezvous,
    /// At once, while fewer than so many bytes are under way between the two.
    Bounded(usize),
}

/// A simulated group.
#[derive(Debug, Clone, Copy)]
pub struct Sim {
    /// How messages are delivered.
    pub delivery: Delivery,
    /// Decides in which order the ranks are polled.
    pub seed: u64,
}

/// One rank's call in a simulation.
#[derive(Debug, Clone)]
pub struct Part<E> {
    /// Its plan.
    pub plan: Plan,
    /// The fold.
    pub redop: ReduceOp,
    /// The input.
    pub input: Vec<E>,
}

/// What came of a simulation, by rank.
#[derive(Debug, Clone, PartialEq)]
pub struct Outcome<E> {
    /// The outputs.
    pub outputs: Vec<Vec<E>>,
    /// Payload bytes sent.
    pub bytes: Vec<u64>,
    /// Messages sent.
    pub messages: Vec<u64>,
}

impl Sim {
    /// Performs one collective, each rank with its own part.
    ///
    /// # Errors
    /// [`Error::Deadlock`] naming the cycle, [`Error::Mismatch`] where the parts differ, and
    /// [`Error::Len`] where an input does not fit its plan.
    pub fn run<E: Element>(&self, parts: &[Part<E>]) -> Result<Outcome<E>> {
        let rounds = parts
            .iter()
            .enumerate()
            .map(|(r, part)| part.plan.rounds(r))
            .collect();
        self.run_rounds(parts, rounds)
    }

    /// The same with these rounds instead of the plans' own: for tests of broken plans.
    ///
    /// # Errors
    /// Those of [`Sim::run`].
    pub fn run_rounds<E: Element>(
        &self,
        parts: &[Part<E>],
        rounds: Vec<Vec<Round>>,
    ) -> Result<Outcome<E>> {
        let net = Rc::new(RefCell::new(Net::new(parts.len(), self.delivery)));
        let mut ranks = Vec::with_capacity(parts.len());
        for (rank, (part, rounds)) in parts.iter().zip(rounds).enumerate() {
            let (plan, n) = (&part.plan, parts.len());
            let members = Rc::new((0..n).collect());
            let mut link = Link::new(Endpoint {
                net: net.clone(),
                rank,
                members,
                name: "sim".to_string(),
            });
            let call = Call::new(0, plan.shape(), n, E::DTYPE, Some(part.redop), Order::Rank);
            let mut output = vec![E::zeroed(); plan.output_len(rank)];
            fits(
                plan,
                rank,
                &View::Apart {
                    input: &part.input,
                    output: &mut output,
                },
            )?;
            let performer = Performer::with_rounds(rounds, n, call, &mut link)?;
            ranks.push(Rank {
                link,
                performer,
                input: &part.input,
                output,
                done: false,
            });
        }
        self.sweep(&net, &mut ranks)?;
        Ok(Outcome {
            bytes: ranks.iter().map(|rank| rank.link.bytes).collect(),
            messages: ranks.iter().map(|rank| rank.link.messages).collect(),
            outputs: ranks.into_iter().map(|rank| rank.output).collect(),
        })
    }

    fn sweep<E: Element>(&self, net: &RefCell<Net>, ranks: &mut [Rank<'_, E>]) -> Result<()> {
        let mut random = self.seed;
        let mut order: Vec<usize> = (0..ranks.len()).collect();
        while ranks.iter().any(|rank| !rank.done) {
            let before = net.borrow().moves;
            shuffle(&mut order, &mut random);
            for &r in &order {
                let Rank {
                    link,
                    performer,
                    input,
                    output,
                    done,
                } = &mut ranks[r];
                if !*done {
                    *done = performer.poll(link, &mut View::Apart { input, output })?;
                    net.borrow_mut().moves += u64::from(*done);
                }
            }
            if net.borrow().moves == before {
                return Err(Error::Deadlock {
                    cycle: cycle(ranks),
                });
            }
        }
        Ok(())
    }
}

struct Rank<'a, E> {
    link: Link<Endpoint>,
    performer: Performer,
    input: &'a [E],
    output: Vec<E>,
    done: bool,
}

/// Follows who waits for whom until a rank comes up again.
fn cycle<E>(ranks: &[Rank<'_, E>]) -> String {
    let mut path: Vec<usize> = Vec::new();
    let mut at = ranks.iter().position(|rank| !rank.done);
    while let Some(rank) = at.filter(|rank| !path.contains(rank)) {
        path.push(rank);
        at = ranks[rank]
            .performer
            .blocked_on()
            .0
            .filter(|&peer| !ranks[peer].done);
    }
    // Those before the first rank of the cycle only wait for it.
    let start = at
        .and_then(|rank| path.iter().position(|&r| r == rank))
        .unwrap_or(0);
    let links: Vec<String> = path[start..]
        .iter()
        .map(|&rank| {
            let (peer, what) = ranks[rank].performer.blocked_on();
            peer.map_or_else(
                || format!("rank {rank} waits for {what}"),
                |peer| format!("rank {rank} waits for rank {peer} ({what})"),
            )
        })
        .collect();
    links.join(", ")
}

/// What all endpoints share.
#[derive(Debug)]
struct Net {
    delivery: Delivery,
    lanes: BTreeMap<(usize, usize), VecDeque<Message>>,
    asked: BTreeSet<(usize, usize, Tag)>,
    calls: BTreeMap<u64, (usize, Call, usize)>,
    world: usize,
    poison: Option<Error>,
    moves: u64,
}

impl Net {
    fn new(world: usize, delivery: Delivery) -> Self {
        Self {
            delivery,
            lanes: BTreeMap::new(),
            asked: BTreeSet::new(),
            calls: BTreeMap::new(),
            world,
            poison: None,
            moves: 0,
        }
    }

    fn healthy(&self) -> Result<()> {
        self.poison.clone().map_or(Ok(()), Err)
    }
}

/// One simulated rank's end. Single-threaded: nothing ever sleeps in it.
#[derive(Debug, Clone)]
pub struct Endpoint {
    net: Rc<RefCell<Net>>,
    rank: usize,
    members: Rc<Vec<usize>>,
    name: String,
}

impl Transport for Endpoint {
    fn rank(&self) -> usize {
        self.rank
    }

    fn world(&self) -> usize {
        self.members.len()
    }

    fn global(&self, rank: usize) -> usize {
        self.members.get(rank).copied().unwrap_or(rank)
    }

    fn name(&self) -> &str {
        &self.name
    }

    fn try_send(&mut self, to: usize, message: Message) -> Result<Option<Message>> {
        let net = &mut *self.net.borrow_mut();
        net.healthy()?;
        let lane = net.lanes.entry((self.rank, to)).or_default();
        let room = match net.delivery {
            Delivery::Rendezvous => {
                lane.is_empty() && net.asked.remove(&(self.rank, to, message.tag))
            }
            Delivery::Bounded(bytes) => {
                let held: usize = lane.iter().map(Message::bytes).sum();
                lane.is_empty() || held + message.bytes() <= bytes
            }
        };
        if !room {
            return Ok(Some(message));
        }
        lane.push_back(message);
        net.moves += 1;
        Ok(None)
    }

    fn try_recv(&mut self, from: usize, tag: Tag) -> Result<Option<Message>> {
        let net = &mut *self.net.borrow_mut();
        net.healthy()?;
        let lane = net.lanes.entry((from, self.rank)).or_default();
        let message = lane
            .iter()
            .position(|m| m.tag == tag)
            .and_then(|at| lane.remove(at));
        if message.is_some() || net.asked.insert((from, self.rank, tag)) {
            net.moves += 1;
        }
        Ok(message)
    }

    fn announce(&mut self, call: &Call) -> Result<()> {
        let net = &mut *self.net.borrow_mut();
        net.healthy()?;
        net.moves += 1;
        let (first, first_call, came) = net
            .calls
            .entry(call.sequence)
            .or_insert((self.rank, *call, 0));
        *came += 1;
        if first_call == call {
            return Ok(());
        }
        let mismatch = Error::Mismatch {
            group: self.name.clone(),
            sequence: call.sequence,
            first: self.members[*first],
            first_call: Box::new(*first_call),
            second: self.members[self.rank],
            second_call: Box::new(*call),
        };
        net.poison = Some(mismatch.clone());
        Err(mismatch)
    }

    fn confirmed(&mut self, sequence: u64) -> Result<bool> {
        let net = self.net.borrow();
        net.healthy()?;
        Ok(net
            .calls
            .get(&sequence)
            .is_some_and(|(_, _, came)| *came == net.world))
    }

    fn park(&mut self, _: &Wait, _: Duration) {}

    fn subgroup(&self, members: &[usize], name: &str) -> Result<Self> {
        let rank = checked_members(members, self.world(), self.rank)?;
        let delivery = self.net.borrow().delivery;
        let ranks: Vec<usize> = members.iter().map(|&m| self.members[m]).collect();
        // One net per endpoint: a simulation runs one group; subgroups are simulated apart.
        let net = Rc::new(RefCell::new(Net::new(ranks.len(), delivery)));
        Ok(Self {
            net,
            rank,
            members: Rc::new(ranks),
            name: name.to_string(),
        })
    }

    fn control(&self) -> Arc<dyn Control> {
        Arc::new(NoOutside)
    }
}

/// There is no other thread that could use a control.
#[derive(Debug)]
struct NoOutside;

impl Control for NoOutside {
    fn poison(&self, _: Error) {}
    fn abort(&self) {}
    fn wake(&self) {}
}

/// Fisher and Yates, drawing from a 64-bit linear congruential generator (Knuth's constants).
fn shuffle(order: &mut [usize], random: &mut u64) {
    for i in (1..order.len()).rev() {
        *random = random
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        order.swap(i, (*random >> 33) as usize % (i + 1));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::{Action, Algorithm, CollectiveShape, Recv, Send, What};

    /// Both ranks send in one round and receive in the next.
    fn send_first(rank: usize) -> Vec<Round> {
        let send = Send {
            to: 1 - rank,
            what: What::Input(0..1),
        };
        let recv = Recv {
            from: 1 - rank,
            len: 1,
            action: Action::Store(0),
        };
        vec![
            Round {
                sends: vec![send],
                ..Round::default()
            },
            Round {
                recvs: vec![recv],
                ..Round::default()
            },
        ]
    }

    #[test]
    fn a_deadlock_names_its_cycle() {
        let plan = Plan::new(CollectiveShape::AllToAll { len: 1 }, Algorithm::Pairwise, 2).unwrap();
        let parts = vec![
            Part {
                plan,
                redop: ReduceOp::Sum,
                input: vec![1i32, 2]
            };
            2
        ];
        let rounds = || vec![send_first(0), send_first(1)];
        let error = Sim {
            delivery: Delivery::Rendezvous,
            seed: 1,
        }
        .run_rounds(&parts, rounds())
        .unwrap_err();
        let text = error.to_string();
        assert!(
            text.contains("rank 0 waits for rank 1") && text.contains("rank 1 waits for rank 0"),
            "{text}"
        );
        Sim {
            delivery: Delivery::Bounded(0),
            seed: 1,
        }
        .run_rounds(&parts, rounds())
        .unwrap();
    }
}
