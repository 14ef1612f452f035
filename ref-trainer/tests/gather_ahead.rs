//! ZeRO-3 in the trainer: while the layers of a segment compute, the parameters of the next are on
//! the wire, in forward and in backward. Every message takes a while; what begins meanwhile is
//! written down.

use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

mod common;

use common::{cut, samples_of, small_job, with};
use quintet_collectives::plan::Operation;
use quintet_collectives::transport::delay::Delay;
use quintet_collectives::transport::local::{Local, World};
use quintet_collectives::transport::{Call, Message, Tag, Transport, Wait};
use quintet_collectives::{Communicator, Result, forward_transport};
use quintet_kernels::Cpu;
use quintet_ref_trainer::job::Job;
use quintet_ref_trainer::rank::{Begin, Rank};

const MESSAGE: Duration = Duration::from_millis(50);

/// The calls of one rank over all its groups, in the order in which they begin.
type Log = Arc<Mutex<Vec<(String, Operation)>>>;

struct Traced {
    inner: Delay<Local>,
    log: Log,
}

impl Transport for Traced {
    forward_transport!(inner: group);

    fn try_send(&mut self, to: usize, message: Message) -> Result<Option<Message>> {
        self.inner.try_send(to, message)
    }
    fn try_recv(&mut self, from: usize, tag: Tag) -> Result<Option<Message>> {
        self.inner.try_recv(from, tag)
    }
    fn announce(&mut self, call: &Call) -> Result<()> {
        let name = self.inner.name().to_string();
        self.log.lock().expect("a log").push((name, call.operation));
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

/// The calls of every rank in one step.
fn step(job: &Job) -> Vec<Vec<(String, Operation)>> {
    let samples = samples_of(job);
    let world = World::new(4).expect("a world");
    thread::scope(|scope| {
        let ranks = world.seats().into_iter().map(|seat| {
            let samples = &samples;
            scope.spawn(move || {
                let log = Log::default();
                let comm = Communicator::new(Traced {
                    inner: Delay::new(seat.endpoint(), MESSAGE, Duration::ZERO),
                    log: log.clone(),
                });
                let device = Cpu::new(1);
                let mut rank =
                    Rank::<_, _, f64>::new(job, device, comm, Begin::Random).expect("a rank");
                log.lock().expect("a log").clear();
                rank.accumulate(samples, 1, false).expect("a step");
                log.lock().expect("a log").clone()
            })
        });
        let ranks: Vec<_> = ranks.collect();
        let join = |rank: thread::ScopedJoinHandle<'_, _>| rank.join().expect("no panic");
        ranks.into_iter().map(join).collect()
    })
}

/// What a rank's calls have out of order; `blocks` blocks between embedding and head.
fn out_of_order(log: &[(String, Operation)], blocks: usize) -> Option<String> {
    let at = |group: &str, operation| -> Vec<usize> {
        let calls = log.iter().enumerate();
        let of = calls.filter(|(_, (name, op))| name.starts_with(group) && *op == operation);
        of.map(|(at, _)| at).collect()
    };
    let gathers = at("dp parameters", Operation::AllGather);
    let scatters = at("dp gradients", Operation::ReduceScatter);
    let tp = at("tp", Operation::AllReduce);
    // Embedding, blocks, head: gathered in each direction, reduced once.
    assert_eq!(
        (gathers.len(), scatters.len()),
        (2 * (blocks + 2), blocks + 2)
    );
    // The table has one sum over tp, a block two forward and two backward, the head two and one.
    assert_eq!(tp.len(), 1 + 2 * blocks + 2 + 1 + 2 * blocks);
    // From the first sum of each direction: that of the table, that of the head.
    let back = 1 + 2 * blocks + 2;
    for (way, gathers, tp) in [
        ("forward", &gathers[..blocks + 2], &tp[..back]),
        ("backward", &gathers[blocks + 2..], &tp[back..]),
    ] {
        for k in 0..blocks {
            // Between the two sums of a block the wire has had a message's time for what was issued
            // before it; in backward gradients of what was done are on it too.
            let (first, second, next) = (tp[1 + 2 * k], tp[2 + 2 * k], gathers[k + 2]);
            if next > second {
                return Some(format!("{way}: block {k} computes before the next is sent"));
            }
            // And not two ahead: what comes after the next is gathered when a segment is done.
            if gathers.get(k + 3).is_some_and(|after| *after < first) {
                return Some(format!("{way}: two segments ahead of block {k}"));
            }
        }
    }
    None
}

#[test]
fn the_next_segment_is_gathered_while_one_computes() {
    // One microbatch a replica, each layer a segment.
    let mut job = with(&cut(&small_job(), (2, 2, 1)), |l| {
        (l.zero_stage, l.bucket_bytes) = (3, 1);
    });
    (job.batch.global_batch, job.steps) = (2, 1);
    // On a busy machine a thread may wake later than a message takes; what is issued too late is
    // too late each time.
    let mut wrong = Vec::new();
    for _ in 0..8 {
        let logs = step(&job);
        let found = logs
            .iter()
            .find_map(|log| out_of_order(log, job.model.layers));
        match found {
            None => return,
            Some(what) => wrong.push(what),
        }
    }
    panic!("{wrong:?}");
}
