//! A transport that writes down what passes, beside the counters of the library.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use quintet_collectives::transport::local::{Local, World};
use quintet_collectives::transport::{Call, Message, Tag, Transport, Wait};
use quintet_collectives::{Communicator, Result, forward_transport};
use quintet_kernels::Cpu;
use quintet_ref_trainer::data::Samples;
use quintet_ref_trainer::failure::Failure;
use quintet_ref_trainer::job::Job;
use quintet_ref_trainer::rank::{Begin, Rank};
use quintet_ref_trainer::schedule_lr::learning_rate;

/// What one rank did in one group.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Seen {
    /// Its collectives, in order.
    pub calls: Vec<Call>,
    /// Messages it sent: to whom, and how long; ascending, as their order is a matter of timing.
    pub sent: Vec<(usize, usize)>,
}

/// A group by name and members.
pub type Group = (String, Vec<usize>);

/// By group and global rank.
pub type Log = BTreeMap<Group, BTreeMap<usize, Seen>>;

/// An endpoint that writes down what passes.
pub struct Watched {
    inner: Local,
    log: Arc<Mutex<Log>>,
}

impl Watched {
    fn note(&self, write: impl FnOnce(&mut Seen)) {
        let ranks = (0..self.inner.world())
            .map(|r| self.inner.global(r))
            .collect();
        let group = (self.inner.name().to_string(), ranks);
        let mut log = self.log.lock().expect("a log");
        write(
            log.entry(group)
                .or_default()
                .entry(self.inner.global(self.inner.rank()))
                .or_default(),
        );
    }
}

impl Transport for Watched {
    forward_transport!(inner: group);

    fn try_send(&mut self, to: usize, message: Message) -> Result<Option<Message>> {
        let bytes = message.bytes();
        let back = self.inner.try_send(to, message)?;
        if back.is_none() {
            self.note(|seen| seen.sent.push((to, bytes)));
        }
        Ok(back)
    }

    fn try_recv(&mut self, from: usize, tag: Tag) -> Result<Option<Message>> {
        self.inner.try_recv(from, tag)
    }

    fn announce(&mut self, call: &Call) -> Result<()> {
        self.note(|seen| seen.calls.push(*call));
        self.inner.announce(call)
    }

    fn confirmed(&mut self, sequence: u64) -> Result<bool> {
        self.inner.confirmed(sequence)
    }

    fn park(&mut self, wait: &Wait, timeout: Duration) {
        self.inner.park(wait, timeout);
    }

    fn subgroup(&self, members: &[usize], name: &str) -> Result<Self> {
        Ok(Self {
            inner: self.inner.subgroup(members, name)?,
            log: self.log.clone(),
        })
    }
}

/// Trains the job's steps in f64 and tells everything that was sent.
pub fn watch(job: &Job, samples: &Samples) -> std::result::Result<Log, Failure> {
    let world = World::new(job.layout.world())?;
    let log = Arc::new(Mutex::new(Log::new()));
    thread::scope(|scope| {
        let train = |comm| {
            let mut rank = Rank::<_, _, f64>::new(job, Cpu::new(1), comm, Begin::Random)?;
            for step in 1..=job.steps {
                let done = rank.accumulate(samples, step, false)?;
                rank.update(learning_rate(step, job.steps, &job.optimizer), done.norm)?;
            }
            Ok::<_, Failure>(())
        };
        let ranks: Vec<_> = world
            .seats()
            .into_iter()
            .map(|seat| {
                let watched = Watched {
                    inner: seat.endpoint(),
                    log: log.clone(),
                };
                scope.spawn(move || {
                    let outcome = train(Communicator::new(watched));
                    seat.finish(outcome.as_ref().map(|_| ()).map_err(|e| e as _));
                    outcome
                })
            })
            .collect();
        ranks
            .into_iter()
            .try_for_each(|rank| rank.join().expect("no panic"))
    })?;
    let mut log = log.lock().expect("a log").clone();
    log.values_mut()
        .flat_map(BTreeMap::values_mut)
        .for_each(|seen| seen.sent.sort_unstable());
    Ok(log)
}
