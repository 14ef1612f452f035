//! How kernels go on: memory is moved once all that an operation needs is there.
//!
//! ```text
//! ranks are threads     every rank's operation is at hand: all of them are done at once
//! ranks are processes   each posts what it gives (`across.rs`) and does its own part when it has everybody's
//! ```

use std::collections::BTreeSet;

use crate::across::Mail;
use crate::fold::fold;
use crate::state::{Kernel, Op, State, Verb};
use crate::{Answer, CUDA, SUCCESS};

impl State {
    /// Lets kernels go as far as they can.
    pub(crate) fn progress(&mut self) {
        if self.knobs.stall {
            return;
        }
        for kernel in &mut self.kernels {
            kernel.late = kernel.late.saturating_sub(1);
        }
        while self.step() {
            self.take(|kernel| kernel.ops.iter().all(|op| op.done));
        }
    }

    /// Takes these kernels off their streams.
    pub(crate) fn take(&mut self, which: impl Fn(&Kernel) -> bool) {
        let driver = &self.driver;
        self.kernels.retain(|kernel| {
            let goes = which(kernel);
            if let (Some(driver), true) = (driver, goes) {
                driver.holds(kernel.stream, false);
            }
            !goes
        });
    }

    /// Tells the driver, where there is one, of a kernel that is put on its stream, and what that reads.
    pub(crate) fn lend(&mut self, kernel: &Kernel) -> Answer {
        let (rank, world) = self.place(kernel.comm)?;
        let Some(driver) = self.driver()? else {
            return Ok(SUCCESS);
        };
        for op in &kernel.ops {
            let code = driver.reads(kernel.stream, op.from, op.bytes(rank, world).0);
            if code != 0 {
                return Err((CUDA, format!("Cuda failure {code}")));
            }
        }
        driver.holds(kernel.stream, true);
        Ok(SUCCESS)
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
        // Those alone that have something under way: there are many, and this is asked often.
        let members = self
            .kernels
            .iter()
            .filter_map(|kernel| self.members.get(&kernel.comm));
        let ids: BTreeSet<u64> = members.map(|member| member.clique).collect();
        ids.into_iter().any(|id| self.step_in(id))
    }

    fn step_in(&mut self, id: u64) -> bool {
        let Some(Some(clique)) = self.cliques.get(&id) else {
            return false;
        };
        if clique.wrong.is_some() {
            return false;
        }
        if let Some(mail) = clique.mail.clone() {
            let mine = clique.ranks.iter().flatten().next().copied();
            return mine.is_some_and(|comm| self.step_across(id, comm, &mail));
        }
        let Some(comms) = clique.ranks.iter().copied().collect::<Option<Vec<usize>>>() else {
            return false;
        };
        let collectives: Option<Vec<(usize, usize)>> = comms
            .iter()
            .map(|&comm| self.first(comm, |op| !op.is_message()))
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

    /// The same where other ranks are other processes: posts what this one gives, and takes what is there.
    fn step_across(&mut self, id: u64, comm: usize, mail: &Mail) -> bool {
        let world = mail.world();
        let Some((at, place)) = self.first(comm, |op| !op.is_message()) else {
            return self.message_across(id, comm, mail);
        };
        let op = self.kernels[at].ops[place];
        let (reads, writes) = op.bytes(mail.rank(), world);
        mail.give(&op, || read(op.from, reads));
        let outcome = match mail.everybodys(&op) {
            Ok(None) => return false,
            Ok(Some(inputs)) => {
                if writes > 0 {
                    self.give(&op, &result(&op, &inputs, mail.rank()));
                }
                Ok(())
            }
            Err(what) => Err(what),
        };
        self.over(id, &[(at, place)], outcome)
    }

    fn message_across(&mut self, id: u64, comm: usize, mail: &Mail) -> bool {
        for peer in 0..mail.world() {
            if let Some((at, place)) = self.first(comm, |op| op.verb == Verb::Send(peer)) {
                let op = self.kernels[at].ops[place];
                mail.send(peer, &op, &read(op.from, op.len * op.kind.bytes()));
                return self.over(id, &[(at, place)], Ok(()));
            }
            if let Some((at, place)) = self.first(comm, |op| op.verb == Verb::Recv(peer)) {
                let op = self.kernels[at].ops[place];
                let outcome = match mail.receive(peer, &op) {
                    Ok(None) => continue,
                    Ok(Some(bytes)) => {
                        self.give(&op, &bytes);
                        Ok(())
                    }
                    Err(what) => Err(what),
                };
                return self.over(id, &[(at, place)], outcome);
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
        self.give(&got, &read(sent.from, sent.len * sent.kind.bytes()));
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
        let world = ops.len();
        let ranks = || ops.iter().enumerate();
        let inputs: Vec<Vec<u8>> = ranks()
            .map(|(rank, op)| read(op.from, op.bytes(rank, world).0))
            .collect();
        // What all get alike is worked out once.
        let alike = !matches!(first.verb, Verb::ReduceScatter(_) | Verb::Reduce(..));
        let all = alike.then(|| result(&first, &inputs, 0));
        for (rank, op) in ranks().filter(|(rank, op)| op.bytes(*rank, world).1 > 0) {
            match &all {
                Some(all) => self.give(op, all),
                None => self.give(op, &result(op, &inputs, rank)),
            }
        }
        Ok(())
    }

    /// Writes an operation's result.
    fn give(&self, op: &Op, bytes: &[u8]) {
        write(op.to, bytes);
        if let Some(driver) = &self.driver {
            driver.wrote(op.stream, op.to, bytes.len());
        }
    }
}

impl Op {
    pub(crate) fn is_message(&self) -> bool {
        matches!(self.verb, Verb::Send(_) | Verb::Recv(_))
    }
}

/// What a rank that gets something gets of a collective.
fn result(op: &Op, inputs: &[Vec<u8>], me: usize) -> Vec<u8> {
    match op.verb {
        Verb::AllReduce(how) | Verb::Reduce(how, _) => fold(op.kind, how, inputs),
        Verb::ReduceScatter(how) => {
            let bytes = op.len * op.kind.bytes();
            let chunk = |input: &Vec<u8>| input[me * bytes..(me + 1) * bytes].to_vec();
            fold(op.kind, how, &inputs.iter().map(chunk).collect::<Vec<_>>())
        }
        Verb::AllGather => inputs.concat(),
        Verb::Broadcast(root) => inputs[root].clone(),
        Verb::Send(_) | Verb::Recv(_) => Vec::new(),
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
