//! A training step as the trainer does it, on ranks that wait for orders.

use std::sync::{Arc, Mutex, PoisonError};

use quintet_collectives::{Communicator, Local};
use quintet_kernels::{Collectives, Cpu};
use quintet_ref_trainer::data::{Corpus, Samples};
use quintet_ref_trainer::failure::Failure;
use quintet_ref_trainer::forecast::forecast;
use quintet_ref_trainer::job::{Decay, Dtype, Job, OptimizerOptions};
use quintet_ref_trainer::model::Device;
use quintet_ref_trainer::model_config::Model;
use quintet_ref_trainer::rank::{Begin, Rank};
use quintet_ref_trainer::schedule_lr::learning_rate;

use crate::profile::{self, Book};
use crate::team::{Orders, Team};
use crate::timed::Timed;

/// Which step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Setup {
    /// A preset's name, or the path of a config.json.
    pub model: &'static str,
    /// dp, tp, pp, cp.
    pub layout: [usize; 4],
    /// What is sharded over dp and cp, as `--zero-stage` says it.
    pub zero_stage: u8,
    /// Threads of each rank.
    pub threads: usize,
    /// Sequences of a microbatch.
    pub micro_batch: usize,
}

/// What a trainer's ranks leave behind.
#[derive(Debug, Default)]
pub struct Trace {
    /// Loss of the last step.
    pub loss: f64,
    /// One book a rank, where a profile was asked for.
    pub books: Vec<Book>,
}

/// Ranks that train.
pub struct Trainer {
    /// The ranks; a call is a step.
    pub team: Team,
    /// Tokens of a step.
    pub tokens: u64,
    /// Parameters of the model.
    pub parameters: u64,
    trace: Arc<Mutex<Trace>>,
}

impl Setup {
    /// bench-s, sequences one by one.
    #[must_use]
    pub fn bench_s(layout: [usize; 4], threads: usize) -> Self {
        Self {
            model: "bench-s",
            layout,
            zero_stage: 0,
            threads,
            micro_batch: 1,
        }
    }

    /// The job: AdamW as PyTorch begins it, gradients clipped at 1.
    ///
    /// # Errors
    /// Where there is no such model, or the layout cannot be.
    pub fn job(&self) -> Result<Job, Failure> {
        let model = Model::named(self.model)?;
        let [dp, tp, pp, cp] = self.layout;
        let mut job = Job {
            model_name: self.model.into(),
            model: model.config,
            dtype: Dtype::F32,
            threads_per_rank: self.threads,
            optimizer: OptimizerOptions {
                lr: 3e-4,
                decay: Decay::Constant,
                warmup: 0,
                weight_decay: 0.01,
                clip_grad: 1.0,
                beta1: 0.9,
                beta2: 0.999,
                ..OptimizerOptions::default()
            },
            quiet: true,
            ..Job::default()
        };
        (job.layout.dp, job.layout.tp, job.layout.pp) = (dp, tp, pp);
        (job.layout.cp, job.layout.zero_stage) = (cp, self.zero_stage);
        job.batch.seq = model.seq;
        job.batch.micro_batch = self.micro_batch;
        job.batch.global_batch = model.global_batch;
        job.check()?;
        Ok(job)
    }

    /// Starts the ranks. With `profiled` steps given, each rank keeps a book that begins after so
    /// many steps.
    ///
    /// # Errors
    /// As [`Setup::job`]. What goes wrong on a rank comes out of [`Team::run`].
    pub fn start(&self, profiled: Option<u64>) -> Result<Trainer, Failure> {
        let job = self.job()?;
        let samples = Samples::new(noise()?, job.seed, job.batch.seq)?;
        let (ranks, threads) = (job.layout.world(), self.threads);
        let parameters = forecast(&job, samples.corpus())?.parameters;
        let tokens = (job.batch.seq * job.batch.global_batch) as u64;
        let trace = Arc::new(Mutex::new(Trace::default()));
        let left = trace.clone();
        let team = Team::start(ranks, move |comm, orders| match profiled {
            None => train(&job, &samples, Cpu::new(threads), comm, orders, None, &left),
            Some(_) => {
                let device = Timed(Cpu::new(threads));
                train(&job, &samples, device, comm, orders, profiled, &left)
            }
        })?;
        Ok(Trainer {
            team,
            tokens,
            parameters,
            trace,
        })
    }
}

impl Trainer {
    /// Ends the ranks.
    ///
    /// # Errors
    /// What a rank failed with.
    pub fn end(self) -> Result<Trace, Failure> {
        self.team.dismiss()?;
        let mut trace = self.trace.lock().unwrap_or_else(PoisonError::into_inner);
        Ok(std::mem::take(&mut *trace))
    }
}

fn train<B: Device>(
    job: &Job,
    samples: &Samples,
    device: B,
    comm: Communicator<Local>,
    orders: Orders,
    profiled: Option<u64>,
    trace: &Mutex<Trace>,
) -> Result<(), Failure>
where
    Communicator<Local>: Collectives<B>,
{
    let mut rank = Rank::<B, Communicator<Local>, f32>::new(job, device, comm, Begin::Init)?;
    let (mut step, mut loss) = (0, f64::NAN);
    orders.serve(|| {
        if profiled == Some(step) {
            profile::open();
        }
        step += 1;
        let done = rank.accumulate(samples, step, false)?;
        loss = done.loss;
        rank.update(learning_rate(step, job.steps, &job.optimizer), done.norm)
    })?;
    let mut trace = trace.lock().unwrap_or_else(PoisonError::into_inner);
    if rank.rank == 0 {
        trace.loss = loss;
    }
    trace.books.extend(profiled.map(|_| profile::close()));
    Ok(())
}

/// A text of random bytes: each a token.
fn noise() -> Result<Corpus, Failure> {
    let mut state = 0x9E37_79B9_7F4A_7C15_u64;
    let bytes: Vec<u8> = (0..1 << 18)
        .map(|_| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            (state >> 32) as u8
        })
        .collect();
    Ok(Corpus::from_bytes("(noise)", &bytes)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_degree_comes_to_the_job() {
        let setup = Setup {
            zero_stage: 1,
            ..Setup::bench_s([8, 4, 2, 16], 1)
        };
        let layout = setup.job().expect("bench-s can be cut so").layout;
        let degrees = [layout.dp, layout.tp, layout.pp, layout.cp];
        assert_eq!((degrees, layout.zero_stage), ([8, 4, 2, 16], 1));
    }
}
