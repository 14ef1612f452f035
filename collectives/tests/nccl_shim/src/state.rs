//! Communicators, kernels and streams, and how kernels go on.

use std::collections::{BTreeMap, VecDeque};
use std::ffi::c_int;
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread::ThreadId;

use crate::fold::{Fold, Kind, fold};
use crate::knobs::Knobs;
use crate::{ARGUMENT, Answer, IN_PROGRESS, REMOTE, SUCCESS, USAGE};

/// What is done.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Verb {
    AllReduce(Fold),
    ReduceScatter(Fold),
    AllGather,
    Broadcast(usize),
    Reduce(Fold, usize),
    Send(usize),
    Recv(usize),
}

/// An operation as one rank called it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Op {
    pub(crate) comm: usize,
    pub(crate) verb: Verb,
    pub(crate) kind: Kind,
    pub(crate) len: usize,
    pub(crate) from: usize,
    pub(crate) to: usize,
    pub(crate) stream: usize,
    pub(crate) done: bool,
}

/// What one communicator has put on one stream by one group.
struct Kernel {
    comm: usize,
    stream: usize,
    ops: Vec<Op>,
    /// Looks until it may run.
    late: u32,
}

/// Ranks of one id.
struct Clique {
    /// By rank: its communicator, once it has come.
    ranks: Vec<Option<usize>>,
    /// Ranks that are finalized, destroyed or aborted.
    over: Vec<bool>,
    aborted: Vec<bool>,
    wrong: Option<String>,
}

/// A rank's communicator.
struct Member {
    clique: u64,
    rank: usize,
    phase: Phase,
    /// Looks until a call is no longer in progress.
    busy: u32,
    /// Who used it last and has not looked at how it went.
    user: Option<ThreadId>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    Joining,
    Ready,
    Finalizing,
    Finalized,
}

/// All there is.
pub(crate) struct State {
    pub(crate) knobs: Knobs,
    pub(crate) faults: Vec<String>,
    /// Kernels put so far.
    pub(crate) put: u64,
    next: u64,
    /// By id; those that somebody asked for and nobody has joined too.
    cliques: BTreeMap<u64, Option<Clique>>,
    members: BTreeMap<usize, Member>,
    /// In the order in which they were put.
    kernels: VecDeque<Kernel>,
}

/// The one state of the process.
pub(crate) fn lock() -> MutexGuard<'static, State> {
    static STATE: OnceLock<Mutex<State>> = OnceLock::new();
    let made = || {
        Mutex::new(State {
            knobs: Knobs::from_environment(),
            faults: Vec::new(),
            put: 0,
            next: 1,
            cliques: BTreeMap::new(),
            members: BTreeMap::new(),
            kernels: VecDeque::new(),
        })
    };
    STATE
        .get_or_init(made)
        .lock()
        .unwrap_or_else(PoisonError::into_inner)
}

fn usage<T>(what: impl Into<String>) -> Result<T, (c_int, String)> {
    Err((USAGE, what.into()))
}

impl State {
    pub(crate) fn fresh_id(&mut self) -> u64 {
        self.next += 1;
        self.cliques.insert(self.next, None);
        self.next
    }

    pub(crate) fn live(&self) -> usize {
        self.members.len()
    }

    pub(crate) fn join(
        &mut self,
        id: u64,
        world: usize,
        rank: usize,
    ) -> Result<usize, (c_int, String)> {
        let Some(clique) = self.cliques.get_mut(&id) else {
            return Err((ARGUMENT, "an id that nobody was given".into()));
        };
        let clique = clique.get_or_insert_with(|| Clique {
            ranks: vec![None; world],
            over: vec![false; world],
            aborted: vec![false; world],
            wrong: None,
        });
        if rank >= world || clique.ranks.len() != world {
            let expected = clique.ranks.len();
            return usage(format!(
                "rank {rank} of {world} where others are of {expected}"
            ));
        }
        if clique.ranks[rank].is_some() {
            return usage(format!("rank {rank} has come twice"));
        }
        self.next += 1;
        // Numbers that no address has, so that nobody follows them.
        let comm = (self.next as usize) << 4 | 1;
        clique.ranks[rank] = Some(comm);
        let member = Member {
            clique: id,
            rank,
            phase: Phase::Joining,
            busy: 2,
            user: None,
        };
        self.members.insert(comm, member);
        Ok(comm)
    }

    /// A live communicator; whoever has it must not be two threads at once.
    fn member(&mut self, comm: usize) -> Result<&mut Member, (c_int, String)> {
        let gone = || {
            (
                ARGUMENT,
                format!("{comm:#x} is no communicator, or one no more"),
            )
        };
        self.members.get_mut(&comm).ok_or_else(gone)
    }

    fn clique(&mut self, comm: usize) -> Result<(&mut Clique, usize), (c_int, String)> {
        let (id, rank) = {
            let member = self.member(comm)?;
            (member.clique, member.rank)
        };
        match self.cliques.get_mut(&id) {
            Some(Some(clique)) => Ok((clique, rank)),
            _ => Err((ARGUMENT, "a communicator without ranks".into())),
        }
    }

    /// Rank and world.
    pub(crate) fn place(&mut self, comm: usize) -> Result<(usize, usize), (c_int, String)> {
        self.clique(comm)
            .map(|(clique, rank)| (rank, clique.ranks.len()))
    }

    /// Refuses what nccl.h forbids.
    pub(crate) fn fits(&mut self, op: &Op) -> Result<(), (c_int, String)> {
        let (rank, world) = self.place(op.comm)?;
        let me = std::thread::current().id();
        let member = self.member(op.comm)?;
        if member.phase != Phase::Ready || member.busy > 0 {
            return usage(format!(
                "called while the communicator is {:?} or in progress",
                member.phase
            ));
        }
        if member.user.replace(me).is_some_and(|user| user != me) {
            return usage("used by two threads, neither of which has looked how it went");
        }
        let (reads, writes) = match op.verb {
            Verb::Send(_) => (true, false),
            Verb::Recv(_) => (false, true),
            Verb::Broadcast(root) => (root == rank, true),
            Verb::Reduce(_, root) => (true, root == rank),
            _ => (true, true),
        };
        if op.len > 0 && (reads && op.from == 0 || writes && op.to == 0) {
            return usage(format!("{:?} of {} elements at null", op.verb, op.len));
        }
        let peer = match op.verb {
            Verb::Broadcast(peer) | Verb::Reduce(_, peer) | Verb::Send(peer) | Verb::Recv(peer) => {
                peer
            }
            _ => 0,
        };
        if peer >= world {
            return usage(format!("{:?} among {world} ranks", op.verb));
        }
        // In place is one way only.
        let bytes = op.len * op.kind.bytes();
        let (from, to) = match op.verb {
            Verb::AllGather => (bytes, world * bytes),
            Verb::ReduceScatter(_) => (world * bytes, bytes),
            _ => (bytes, bytes),
        };
        let overlap = reads && writes && op.from < op.to + to && op.to < op.from + from;
        let in_place = match op.verb {
            Verb::AllGather => op.from == op.to + rank * bytes,
            Verb::ReduceScatter(_) => op.to == op.from + rank * bytes,
            _ => op.from == op.to,
        };
        if overlap && !in_place && bytes > 0 {
            return usage(format!("{:?} overlaps itself and is not in place", op.verb));
        }
        Ok(())
    }

    /// Puts a group on its streams.
    pub(crate) fn launch(&mut self, ops: Vec<Op>) -> Answer {
        let mut kernels: Vec<Kernel> = Vec::new();
        for op in ops {
            match kernels.iter_mut().find(|kernel| kernel.comm == op.comm) {
                Some(kernel) if kernel.stream != op.stream => {
                    return usage("one communicator on two streams in a group");
                }
                Some(kernel) => kernel.ops.push(op),
                None => kernels.push(Kernel {
                    comm: op.comm,
                    stream: op.stream,
                    ops: vec![op],
                    late: self.knobs.late,
                }),
            }
        }
        for kernel in &kernels {
            self.member(kernel.comm)?.busy = 2;
        }
        self.put += kernels.len() as u64;
        self.kernels.extend(kernels);
        Ok(IN_PROGRESS)
    }

    /// What became of the last call, and the words where that is an error.
    pub(crate) fn look(&mut self, comm: usize) -> Result<(c_int, String), (c_int, String)> {
        self.progress();
        let under_way = self.kernels.iter().any(|kernel| kernel.comm == comm);
        let broken = self.knobs.broken.filter(|_| under_way);
        let (all, over, lost, wrong) = {
            let (clique, _) = self.clique(comm)?;
            (
                clique.ranks.iter().all(Option::is_some),
                clique.over.iter().all(|over| *over),
                clique.aborted.iter().position(|aborted| *aborted),
                clique.wrong.clone(),
            )
        };
        let member = self.member(comm)?;
        member.user = None;
        if let Some(code) = broken {
            return Ok((code, "the stand-in was told to break".into()));
        }
        if let Some(wrong) = wrong {
            return Ok((USAGE, wrong));
        }
        if let Some(lost) = lost.filter(|_| under_way || member.phase == Phase::Joining) {
            return Ok((REMOTE, format!("rank {lost} has aborted")));
        }
        if member.busy > 0 {
            member.busy -= 1;
        }
        member.phase = match member.phase {
            Phase::Joining if all => Phase::Ready,
            Phase::Finalizing if over && !under_way => Phase::Finalized,
            phase => phase,
        };
        let settled = member.busy == 0 && matches!(member.phase, Phase::Ready | Phase::Finalized);
        Ok((if settled { SUCCESS } else { IN_PROGRESS }, String::new()))
    }

    pub(crate) fn finalize(&mut self, comm: usize) -> Answer {
        let member = self.member(comm)?;
        if member.phase != Phase::Ready {
            return usage(format!("a communicator that is {:?}", member.phase));
        }
        member.phase = Phase::Finalizing;
        let (clique, rank) = self.clique(comm)?;
        clique.over[rank] = true;
        Ok(IN_PROGRESS)
    }

    pub(crate) fn destroy(&mut self, comm: usize) -> Answer {
        if self.member(comm)?.phase != Phase::Finalized {
            return usage("a communicator that is not finalized");
        }
        self.leave(comm)
    }

    pub(crate) fn abort(&mut self, comm: usize) -> Answer {
        let (clique, rank) = self.clique(comm)?;
        if !clique.over[rank] {
            clique.aborted[rank] = true;
        }
        self.leave(comm)
    }

    fn leave(&mut self, comm: usize) -> Answer {
        let (clique, rank) = self.clique(comm)?;
        clique.over[rank] = true;
        self.kernels.retain(|kernel| kernel.comm != comm);
        self.members.remove(&comm);
        Ok(SUCCESS)
    }

    /// Kernels on a stream.
    pub(crate) fn waiting(&self, stream: usize) -> usize {
        self.kernels
            .iter()
            .filter(|kernel| kernel.stream == stream)
            .count()
    }

    /// Lets kernels go as far as they can.
    pub(crate) fn progress(&mut self) {
        if self.knobs.stall {
            return;
        }
        for kernel in &mut self.kernels {
            kernel.late = kernel.late.saturating_sub(1);
        }
        while self.step() {
            self.kernels
                .retain(|kernel| kernel.ops.iter().any(|op| !op.done));
        }
    }

    /// Whether nothing is before it on its stream and its communicator.
    fn runs(&self, at: usize) -> bool {
        let kernel = &self.kernels[at];
        let lost = self.members.get(&kernel.comm).map(|member| member.rank);
        let held = self.kernels.iter().take(at);
        let held = held
            .filter(|k| k.comm == kernel.comm || k.stream == kernel.stream)
            .count()
            > 0;
        !held && kernel.late == 0 && (lost.is_none() || lost != self.knobs.lost)
    }

    /// The first operation of this rank that a running kernel has under way, of those that `of` takes.
    fn first(&self, comm: usize, of: impl Fn(&Op) -> bool) -> Option<(usize, usize)> {
        let at = self.kernels.iter().position(|kernel| kernel.comm == comm)?;
        if !self.runs(at) {
            return None;
        }
        let place = self.kernels[at]
            .ops
            .iter()
            .position(|op| !op.done && of(op))?;
        Some((at, place))
    }

    /// Performs one operation whose ranks are all there; whether there was one.
    fn step(&mut self) -> bool {
        let ids: Vec<u64> = self.cliques.keys().copied().collect();
        ids.into_iter().any(|id| self.step_in(id))
    }

    fn step_in(&mut self, id: u64) -> bool {
        let Some(Some(clique)) = self.cliques.get(&id) else {
            return false;
        };
        if clique.wrong.is_some() {
            return false;
        }
        let Some(comms) = clique.ranks.iter().copied().collect::<Option<Vec<usize>>>() else {
            return false;
        };
        let message = |op: &Op| matches!(op.verb, Verb::Send(_) | Verb::Recv(_));
        let collectives: Option<Vec<(usize, usize)>> = comms
            .iter()
            .map(|&comm| self.first(comm, |op| !message(op)))
            .collect();
        if let Some(all) = collectives {
            let outcome = self.collective(&all);
            return self.over(id, &all, outcome);
        }
        for (rank, &comm) in comms.iter().enumerate() {
            for (peer, &other) in comms.iter().enumerate() {
                let sent = self.first(comm, |op| op.verb == Verb::Send(peer));
                let got = self.first(other, |op| op.verb == Verb::Recv(rank));
                if let (Some(sent), Some(got)) = (sent, got) {
                    let outcome = self.message(sent, got);
                    return self.over(id, &[sent, got], outcome);
                }
            }
        }
        false
    }

    fn over(&mut self, id: u64, ops: &[(usize, usize)], outcome: Result<(), String>) -> bool {
        for &(kernel, op) in ops {
            self.kernels[kernel].ops[op].done = true;
        }
        if let Err(what) = outcome {
            self.faults.push(what.clone());
            if let Some(Some(clique)) = self.cliques.get_mut(&id) {
                clique.wrong = Some(what);
            }
        }
        true
    }

    fn message(&mut self, sent: (usize, usize), got: (usize, usize)) -> Result<(), String> {
        let [sent, got] = [sent, got].map(|(kernel, op)| self.kernels[kernel].ops[op]);
        if (sent.kind, sent.len) != (got.kind, got.len) {
            return Err(format!("{sent:?} meets {got:?}"));
        }
        write(got.to, &read(sent.from, sent.len * sent.kind.bytes()));
        Ok(())
    }

    fn collective(&mut self, all: &[(usize, usize)]) -> Result<(), String> {
        let ops: Vec<Op> = all
            .iter()
            .map(|&(kernel, op)| self.kernels[kernel].ops[op])
            .collect();
        let first = ops[0];
        if let Some(other) = ops
            .iter()
            .find(|op| (op.verb, op.kind, op.len) != (first.verb, first.kind, first.len))
        {
            return Err(format!("{first:?} meets {other:?}"));
        }
        let (bytes, world) = (first.len * first.kind.bytes(), ops.len());
        let inputs =
            |bytes: usize| -> Vec<Vec<u8>> { ops.iter().map(|op| read(op.from, bytes)).collect() };
        match first.verb {
            Verb::AllReduce(op) => {
                let folded = fold(first.kind, op, &inputs(bytes));
                ops.iter().for_each(|op| write(op.to, &folded));
            }
            Verb::Reduce(op, root) => write(ops[root].to, &fold(first.kind, op, &inputs(bytes))),
            Verb::ReduceScatter(op) => {
                let folded = fold(first.kind, op, &inputs(world * bytes));
                for (rank, op) in ops.iter().enumerate() {
                    write(op.to, &folded[rank * bytes..(rank + 1) * bytes]);
                }
            }
            Verb::AllGather => {
                let all = inputs(bytes).concat();
                ops.iter().for_each(|op| write(op.to, &all));
            }
            Verb::Broadcast(root) => {
                let input = read(ops[root].from, bytes);
                ops.iter().for_each(|op| write(op.to, &input));
            }
            Verb::Send(_) | Verb::Recv(_) => {}
        }
        Ok(())
    }
}

fn read(at: usize, bytes: usize) -> Vec<u8> {
    let mut out = vec![0; bytes];
    if bytes > 0 {
        // SAFETY: whoever called with this address promised memory as long as its count, until the stream is
        // idle or the communicator aborted, and this kernel is still on the stream.
        unsafe { std::ptr::copy_nonoverlapping(at as *const u8, out.as_mut_ptr(), bytes) };
    }
    out
}

fn write(at: usize, bytes: &[u8]) {
    if !bytes.is_empty() {
        // SAFETY: as in `read`.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), at as *mut u8, bytes.len()) };
    }
}
