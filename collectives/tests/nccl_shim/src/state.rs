//! Communicators, kernels and streams; how kernels go on stands in `perform.rs`.

use std::collections::{BTreeMap, VecDeque};
use std::ffi::c_int;
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread::ThreadId;

use crate::across::Mail;
use crate::driver::Driver;
use crate::fold::{Fold, Kind};
use crate::knobs::Knobs;
use crate::{ARGUMENT, Answer, CUDA, IN_PROGRESS, REMOTE, SUCCESS, SYSTEM, USAGE};

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

impl Op {
    /// Bytes that a rank's call reads and writes.
    pub(crate) fn bytes(&self, rank: usize, world: usize) -> (usize, usize) {
        let bytes = self.len * self.kind.bytes();
        let if_at = |root: usize| if root == rank { bytes } else { 0 };
        match self.verb {
            Verb::AllReduce(_) => (bytes, bytes),
            Verb::ReduceScatter(_) => (world * bytes, bytes),
            Verb::AllGather => (bytes, world * bytes),
            Verb::Broadcast(root) => (if_at(root), bytes),
            Verb::Reduce(_, root) => (bytes, if_at(root)),
            Verb::Send(_) => (bytes, 0),
            Verb::Recv(_) => (0, bytes),
        }
    }
}

/// What one communicator has put on one stream by one group.
pub(crate) struct Kernel {
    pub(crate) comm: usize,
    pub(crate) stream: usize,
    pub(crate) ops: Vec<Op>,
    /// Looks until it may run.
    pub(crate) late: u32,
}

/// Ranks of one id.
pub(crate) struct Clique {
    /// By rank: its communicator, once it has come. Of processes only this one's.
    pub(crate) ranks: Vec<Option<usize>>,
    /// Ranks that are finalized, destroyed or aborted.
    over: Vec<bool>,
    aborted: Vec<bool>,
    pub(crate) wrong: Option<String>,
    /// Where its ranks are processes.
    pub(crate) mail: Option<Mail>,
}

impl Clique {
    fn all_came(&self) -> bool {
        match &self.mail {
            Some(mail) => mail.all("here"),
            None => self.ranks.iter().all(Option::is_some),
        }
    }

    fn all_over(&self) -> bool {
        match &self.mail {
            Some(mail) => mail.all("over"),
            None => self.over.iter().all(|over| *over),
        }
    }

    fn lost(&self) -> Option<usize> {
        match &self.mail {
            Some(mail) => mail.first("aborted"),
            None => self.aborted.iter().position(|aborted| *aborted),
        }
    }

    /// A rank is through with it.
    fn leaves(&mut self, rank: usize, aborts: bool) {
        self.aborted[rank] |= aborts && !self.over[rank];
        self.over[rank] = true;
        if let Some(mail) = &self.mail {
            if self.aborted[rank] {
                mail.mark("aborted");
            }
            mail.mark("over");
        }
    }
}

/// A rank's communicator.
pub(crate) struct Member {
    pub(crate) clique: u64,
    pub(crate) rank: usize,
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
    pub(crate) cliques: BTreeMap<u64, Option<Clique>>,
    pub(crate) members: BTreeMap<usize, Member>,
    /// In the order in which they were put.
    pub(crate) kernels: VecDeque<Kernel>,
    /// Whose device's memory and streams it works with, where they are not the host's.
    pub(crate) driver: Option<Driver>,
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
            driver: None,
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
    /// A number that no other process of this host gives.
    pub(crate) fn fresh_id(&mut self) -> u64 {
        self.next += 1;
        let id = u64::from(std::process::id()) << 32 | self.next;
        self.cliques.insert(id, None);
        id
    }

    /// The driver that it was told of, loaded when it is first needed.
    pub(crate) fn driver(&mut self) -> Result<Option<&Driver>, (c_int, String)> {
        if let (None, Some(path)) = (&self.driver, &self.knobs.driver) {
            let driver = Driver::open(path);
            self.driver = Some(driver.map_err(|error| (CUDA, error))?);
        }
        Ok(self.driver.as_ref())
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
        let across = self.knobs.across.as_ref();
        let ours = id >> 32 == u64::from(std::process::id());
        if !ours && across.is_none() {
            return Err((
                SYSTEM,
                "the stand-in knows processes by a folder that it is told alone".into(),
            ));
        }
        if ours && !self.cliques.contains_key(&id) {
            return Err((ARGUMENT, "an id that nobody was given".into()));
        }
        let mail = across.map(|folder| Mail::open(folder, id, (rank, world)));
        let mail = mail.transpose().map_err(|error| (SYSTEM, error))?;
        let clique = self.cliques.entry(id).or_default();
        let clique = clique.get_or_insert_with(|| Clique {
            ranks: vec![None; world],
            over: vec![false; world],
            aborted: vec![false; world],
            wrong: None,
            mail,
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
        let (reads, writes) = op.bytes(rank, world);
        let (reads, writes) = (reads > 0, writes > 0);
        if reads && op.from == 0 || writes && op.to == 0 {
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
        let (from, to) = op.bytes(rank, world);
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
            self.lend(kernel)?;
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
                clique.all_came(),
                clique.all_over(),
                clique.lost(),
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
        clique.leaves(rank, false);
        Ok(IN_PROGRESS)
    }

    pub(crate) fn destroy(&mut self, comm: usize) -> Answer {
        if self.member(comm)?.phase != Phase::Finalized {
            return usage("a communicator that is not finalized");
        }
        self.leave(comm, false)
    }

    pub(crate) fn abort(&mut self, comm: usize) -> Answer {
        self.leave(comm, true)
    }

    fn leave(&mut self, comm: usize, aborts: bool) -> Answer {
        let (clique, rank) = self.clique(comm)?;
        clique.leaves(rank, aborts);
        self.take(|kernel| kernel.comm == comm);
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
}
