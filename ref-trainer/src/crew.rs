//! The ranks of a run, as far as they are in this process.
//!
//! ```text
//! threads      World::go(work)              all ranks are here
//! processes    work on my communicator      one is; what each leaves goes to rank 0 as JSON
//!                |
//!                +-- first of all they compare what they were started with, and see who is where (`seats.rs`)
//! ```

mod end;
mod seats;

pub use end::End;

use std::fmt::Display;
use std::sync::Arc;
use std::time::Instant;

use quintet_collectives::cost::{self, Model};
use quintet_collectives::transport::Transport;
use quintet_collectives::{Communicator, Process, ReduceOp, World, process};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;

use crate::checkpoint::Fingerprint;
use crate::choice::choice;
use crate::data::Corpus;
use crate::failure::Failure;
use crate::job::{Job, LogFormat, Ranks};

/// What each rank does, whatever carries its messages.
pub trait Work: Sync {
    /// What it leaves for rank 0; what is not serialized stays where it was made.
    type Left: Serialize + DeserializeOwned + Send;

    /// One rank's part.
    ///
    /// # Errors
    /// What ends the run.
    fn rank(&self, comm: Communicator<End>) -> Result<Self::Left, Failure>;
}

/// The ranks of a run, as far as they are in this process.
#[derive(Debug)]
pub struct Crew {
    world: usize,
    by_messages: bool,
    process: Option<Process>,
    /// Of a process that computes on a device: its number on its host.
    number: Option<usize>,
    /// What all communicators choose their plans by.
    choice: Arc<Model>,
}

impl Crew {
    /// Meets the other processes of the run, if it has such, gives the crew to `body` and tells them
    /// how that ended.
    ///
    /// # Errors
    /// Those of `body`; exit 2 where the ranks were not started alike, 5 where they do not meet.
    pub fn with<R>(
        job: &Job,
        corpus: &Corpus,
        body: impl FnOnce(&Self) -> Result<R, Failure>,
    ) -> Result<R, Failure> {
        let mut crew = Self::meet(job)?;
        let alike = crew.alike(job, corpus).and_then(|()| crew.seated(job));
        if let Err(failure) = alike {
            // All find it, each in its own time: whoever ended badly would hide it from the rest.
            if let Some(process) = crew.process {
                process.finish(Ok(()));
            }
            return Err(failure);
        }
        let outcome = body(&crew);
        if let Some(process) = crew.process {
            process.finish(match &outcome {
                Ok(_) => Ok(()),
                Err(failure) => Err(failure as &dyn Display),
            });
        }
        outcome
    }

    /// All ranks of a job as threads of this process, whatever it says of its ranks.
    ///
    /// # Errors
    /// Exit 3 where what it chooses plans by cannot be read.
    pub fn threads(job: &Job) -> Result<Self, Failure> {
        Ok(Self {
            world: job.layout.world(),
            by_messages: job.by_messages,
            process: None,
            number: None,
            choice: Arc::new(choice(job)?),
        })
    }

    fn meet(job: &Job) -> Result<Self, Failure> {
        let mut crew = Self::threads(job)?;
        if let (Ranks::Processes(over), true) = (job.ranks, job.launched) {
            let choose = |options: &mut process::Options| options.kind = over.kind();
            crew.process = Some(process::from_env_with(choose)?);
        }
        Ok(crew)
    }

    /// Whether rank 0 is here, which alone prints and writes.
    #[must_use]
    pub fn leads(&self) -> bool {
        self.process.as_ref().is_none_or(|p| p.rank() == 0)
    }

    /// Whether this process is one rank of several.
    #[must_use]
    pub fn is_process(&self) -> bool {
        self.process.is_some()
    }

    /// The GPUs that its ranks here run on.
    #[cfg(feature = "cuda")]
    pub(crate) fn gpus(&self) -> crate::gpus::Gpus {
        crate::gpus::Gpus::of(self.number)
    }

    /// Lets every rank do its work; where rank 0 is, what all have left, in rank order. Once.
    ///
    /// # Errors
    /// The first cause that ended the run.
    pub fn go<W: Work>(&self, work: &W) -> Result<Option<Vec<W::Left>>, Failure> {
        let Some(process) = &self.process else {
            let threads = if self.by_messages {
                World::by_messages(self.world)?
            } else {
                World::new(self.world)?
            };
            let all = threads.go(|comm| {
                let comm = comm.over("world", End::Thread)?;
                work.rank(comm.with_model(Arc::clone(&self.choice)))
            })?;
            return Ok(Some(all));
        };
        let end = End::Process(process.seat().endpoint()?);
        let comm = Communicator::new(end).with_model(Arc::clone(&self.choice));
        let results = comm.subgroup(&comm.group().clone(), "results")?;
        let mine = work.rank(comm)?;
        let told = serde_json::to_vec(&mine)
            .map_err(|e| Failure::aborted(format!("a rank's results cannot be told: {e}")))?;
        // My own need not go round.
        let told = if self.leads() { &[][..] } else { &told };
        let others = results.gather_bytes(told, 0)?;
        if !self.leads() {
            return Ok(None);
        }
        let read = |(rank, bytes): (usize, Vec<u8>)| {
            serde_json::from_slice(&bytes).map_err(|e| {
                Failure::aborted(format!("the results of rank {rank} cannot be read: {e}"))
            })
        };
        let mut all = vec![mine];
        for told in others.into_iter().enumerate().skip(1) {
            all.push(read(told)?);
        }
        Ok(Some(all))
    }

    /// A moment that all ranks take for the beginning of time: processes agree on it as well as a
    /// barrier does.
    ///
    /// # Errors
    /// What the barrier fails with.
    pub fn epoch<T: Transport + Send + 'static>(
        &self,
        comm: &Communicator<T>,
        threads: Instant,
    ) -> Result<Instant, Failure> {
        if !self.is_process() {
            return Ok(threads);
        }
        comm.barrier()?;
        Ok(Instant::now())
    }

    /// Refuses ranks that were started with other words or another text: they would train different
    /// models together, or wait for each other in vain.
    fn alike(&self, job: &Job, corpus: &Corpus) -> Result<(), Failure> {
        let Some(process) = &self.process else {
            return Ok(());
        };
        let comm = process.communicator()?;
        let mine = essence(job, corpus, &self.choice)?;
        let text = mine.to_string();
        let first = comm.broadcast_bytes(text.as_bytes(), 0)?;
        let rank = comm.rank();
        let theirs: Value = serde_json::from_slice(&first)
            .map_err(|e| Failure::aborted(format!("rank 0 tells no job: {e}")))?;
        // All hear of it before anybody ends for it.
        let mut differing = [if mine == theirs {
            i64::MAX
        } else {
            rank as i64
        }];
        comm.all_reduce(&mut differing, ReduceOp::Min)?;
        match differing[0] {
            i64::MAX => Ok(()),
            one if one == rank as i64 => {
                let (key, mine, theirs) = difference("", &mine, &theirs);
                Err(Failure::usage(format!(
                    "rank {rank} was started with {key} {mine} and rank 0 with {theirs}; start all ranks alike"
                )))
            }
            one => Err(Failure {
                lost: usize::try_from(one).ok(),
                ..Failure::usage(format!(
                    "rank {one} was not started as rank 0 was; start all ranks alike"
                ))
            }),
        }
    }
}

/// What ranks must have in common: all of the job but where output goes and how much one computes
/// with, and the text as it is.
fn essence(job: &Job, corpus: &Corpus, choice: &Model) -> Result<Value, Failure> {
    let job = Job {
        data: crate::job::DataSource::Embedded,
        load: job.load.as_ref().map(|_| "(a checkpoint)".into()),
        save: job.save.as_ref().map(|_| "(a folder)".into()),
        constants: None,
        threads_per_rank: 1,
        run_dir: None,
        metrics: None,
        trace: None,
        report: None,
        tensorboard_dir: None,
        recorder: None,
        log_format: LogFormat::Plain,
        log_interval: 0,
        quiet: false,
        model_name: String::new(),
        ..job.clone()
    };
    let value = |value: serde_json::Result<Value>| {
        value.map_err(|e| Failure::data(format!("the job cannot be written as JSON: {e}")))
    };
    let text = value(serde_json::to_value(Fingerprint::of(corpus)))?;
    let job = value(serde_json::to_value(job))?;
    let version = env!("CARGO_PKG_VERSION");
    let plans = cost::write(&[("constants".into(), choice.within)]);
    Ok(serde_json::json!({"quintet": version, "text": text, "plans": plans, "job": job}))
}

/// The first place where two values differ, and both.
fn difference(key: &str, a: &Value, b: &Value) -> (String, String, String) {
    if let (Value::Object(a), Value::Object(b)) = (a, b) {
        let keys = a.keys().chain(b.keys());
        for name in keys {
            let (a, b) = (a.get(name), b.get(name));
            if a != b {
                let name = match key {
                    "" | "job" => name.clone(),
                    _ => format!("{key}.{name}"),
                };
                let value = |v: Option<&Value>| v.cloned().unwrap_or(Value::Null);
                return difference(&name, &value(a), &value(b));
            }
        }
    }
    (key.to_string(), a.to_string(), b.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_differs_is_named_and_what_may_differ_is_not() -> Result<(), Failure> {
        let corpus = Corpus::built_in();
        let of = |change: &dyn Fn(&mut Job)| {
            let mut job = Job::demo();
            change(&mut job);
            essence(&job, &corpus, &Model::default())
        };
        let first = of(&|_| ())?;
        let same = of(&|job| {
            job.run_dir = Some("elsewhere".into());
            job.quiet = true;
            job.threads_per_rank = 7;
            job.launched = true;
        })?;
        assert_eq!(first, same);
        let other = of(&|job| job.optimizer.lr = 0.5)?;
        let (key, mine, theirs) = difference("", &other, &first);
        assert_eq!(
            (key.as_str(), mine.as_str(), theirs.as_str()),
            ("optimizer.lr", "0.5", "0.002")
        );
        let other = of(&|job| job.steps = 7)?;
        assert_eq!(difference("", &other, &first).0, "steps");
        Ok(())
    }
}
