//! Training: ranks as threads or processes, steps reported as they end, and at the end the proof.

use std::collections::BTreeMap;
use std::marker::PhantomData;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex};
use std::time::Instant;

use quintet_collectives::{Communicator, ReduceOp, Transport, recorder};
use quintet_kernels::{Collectives, Cpu, Scalar, Tag, bf16};
use serde::{Deserialize, Serialize};

use crate::crew::{Crew, End, Work};
use crate::data::{Corpus, Part, Samples};
use crate::eval::share;
use crate::failure::{Exit, Failure};
use crate::forecast::{forecast, samples};
use crate::groups::Counted;
use crate::job::{DeviceKind, Dtype, Job};
use crate::lock::Lock;
use crate::model::Device;
use crate::proof::{Proof, prove};
use crate::rank::{Begin, Rank};
use crate::report::{Reporter, Seen, StepReport};
use crate::room::has_room;
use crate::schedule_lr::learning_rate;
use crate::spans::{Recorder, What};

mod measure;

use measure::{measure, reduce};

/// What a rank tells the console.
enum News {
    Step(Box<StepReport>),
    Note(String),
}

/// What a rank leaves when the run ends well.
#[derive(Default, Serialize, Deserialize)]
struct Left {
    /// Rank 0's alone.
    #[serde(skip)]
    proofs: Vec<Proof>,
    /// Bytes sent in training steps, by group.
    bytes: BTreeMap<String, u64>,
    steps: u64,
    stopped: bool,
    /// What each rank saw: of a rank its own, of a run all, in rank order.
    seen: Vec<Seen>,
}

/// Trains as the job says; where rank 0 is, prints, writes the run's folder and, where the job asks
/// for it, proves the run against one device.
///
/// # Errors
/// The first cause that ended the run; a proof that fails.
pub fn train(job: &Job, stop: &Arc<AtomicBool>) -> Result<Exit, Failure> {
    has_room(job)?;
    let samples = samples(job)?;
    let done = match &job.load {
        Some(root) => crate::checkpoint::steps_done(job, samples.corpus(), root)?,
        None => 0,
    };
    let ran = Crew::with(job, samples.corpus(), |crew| {
        if crew.leads() {
            lead(crew, job, &samples, done, stop)
        } else {
            run(crew, job, &samples, done, stop, None).map(|_| None)
        }
    })?;
    let Some((reporter, left)) = ran else {
        return Ok(Exit::Fine);
    };
    if left.stopped || !job.prove {
        reporter.finish(None, &left.seen)?;
        return Ok(if left.stopped {
            Exit::Aborted
        } else {
            Exit::Fine
        });
    }
    let table = prove(job, &samples, &left.proofs, left.steps, left.bytes)?;
    let holds = table.holds();
    reporter.finish(Some(&table), &left.seen)?;
    if holds {
        Ok(Exit::Fine)
    } else {
        Err(Failure::mismatch("the run is not what one device computes"))
    }
}

/// Runs what ranks are here, rank 0 among them, and reports the steps beside it.
fn lead(
    crew: &Crew,
    job: &Job,
    samples: &Samples,
    done: u64,
    stop: &AtomicBool,
) -> Result<Option<(Reporter, Left)>, Failure> {
    let _saving = match &job.save {
        Some(root) => {
            crate::checkpoint::probe(root)?;
            Some(Lock::folder(root, "save")?)
        }
        None => None,
    };
    let mut reporter = Reporter::start(job, &forecast(job, samples.corpus())?, done)?;
    let (sender, news) = channel();
    let ran = std::thread::scope(|scope| {
        let ranks = scope.spawn(|| run(crew, job, samples, done, stop, Some(sender)));
        let mut written = Ok(());
        for item in news {
            // A console that fails stops the run, but the ranks come to their end together.
            let shown = match item {
                News::Step(report) => reporter.step(&report),
                News::Note(text) => reporter.note(&text),
            };
            if shown.is_err() && written.is_ok() {
                written = shown;
                stop.store(true, Ordering::Relaxed);
            }
        }
        let left = ranks
            .join()
            .unwrap_or_else(|_| Err(Failure::aborted("a rank's thread panicked")));
        written.and(left)
    });
    match ran {
        Ok(left) => Ok(left.map(|left| (reporter, left))),
        Err(failure) => {
            // What ended the run is what is said; that stdout is lost too is not.
            let _ = reporter.finish(None, &[]);
            Err(failure)
        }
    }
}

/// Lets the ranks that are here train, and joins what all leave.
fn run(
    crew: &Crew,
    job: &Job,
    samples: &Samples,
    done: u64,
    stop: &AtomicBool,
    sender: Option<Sender<News>>,
) -> Result<Option<Left>, Failure> {
    let ranks = match job.dtype {
        Dtype::F64 => Training::<f64>::of(crew, job, samples, done, stop, sender),
        Dtype::F32 => Training::<f32>::of(crew, job, samples, done, stop, sender),
        Dtype::Bf16 => Training::<bf16>::of(crew, job, samples, done, stop, sender),
    }?;
    Ok(ranks.map(|ranks| {
        let mut all = Left::default();
        for left in ranks {
            all.proofs.extend(left.proofs);
            for (group, bytes) in left.bytes {
                *all.bytes.entry(group).or_default() += bytes;
            }
            (all.steps, all.stopped) = (left.steps, left.stopped);
            all.seen.extend(left.seen);
        }
        all
    }))
}

/// The work of [`run`].
struct Training<'a, E> {
    crew: &'a Crew,
    job: &'a Job,
    samples: &'a Samples,
    /// Steps behind the run.
    done: u64,
    stop: &'a AtomicBool,
    /// Rank 0's, where it is here.
    sender: Mutex<Option<Sender<News>>>,
    epoch: Instant,
    #[cfg(feature = "cuda")]
    gpus: crate::gpus::Gpus,
    dtype: PhantomData<fn() -> E>,
}

impl<'a, E: Scalar> Training<'a, E> {
    fn of(
        crew: &'a Crew,
        job: &'a Job,
        samples: &'a Samples,
        done: u64,
        stop: &'a AtomicBool,
        sender: Option<Sender<News>>,
    ) -> Result<Option<Vec<Left>>, Failure> {
        crew.go(&Self {
            crew,
            job,
            samples,
            done,
            stop,
            sender: Mutex::new(sender),
            epoch: Instant::now(),
            #[cfg(feature = "cuda")]
            gpus: crew.gpus(),
            dtype: PhantomData,
        })
    }
}

impl<E: Scalar> Training<'_, E> {
    fn on<B: Device, T: Transport + Send + 'static>(
        &self,
        device: B,
        comm: Communicator<T>,
        spans: &Arc<Recorder>,
        news: Option<Sender<News>>,
    ) -> Result<Left, Failure>
    where
        Communicator<T>: Collectives<B>,
    {
        let mut rank = Rank::<_, _, E>::new(self.job, device, comm, Begin::Init)?;
        if let Some(root) = &self.job.load {
            rank.load(root, true)?;
        }
        rank.recorder = Some(spans.clone());
        let (samples, news) = (self.samples, news.as_ref());
        steps(rank, samples, self.done, self.stop, spans, news)
    }
}

impl<E: Scalar> Work for Training<'_, E> {
    type Left = Left;

    fn rank(&self, comm: Communicator<End>) -> Result<Left, Failure> {
        let mut news = None;
        if comm.rank() == 0 {
            news = self.sender.lock().ok().and_then(|mut s| s.take());
        }
        let comm = match &self.job.recorder {
            None => comm,
            Some(folder) => {
                let flight = recorder::Recorder::in_folder(folder, comm.rank(), recorder::SLOTS)?;
                comm.with_recorder(&Arc::new(flight))
            }
        };
        let spans = Recorder::new(self.crew.epoch(&comm, self.epoch)?);
        let comm = comm.with_observer(spans.clone());
        match self.job.device {
            #[cfg(feature = "cuda")]
            DeviceKind::Cuda => {
                let all_here = (!self.crew.is_process()).then_some(self.job);
                let (device, shared) = self.gpus.of_rank(comm.rank(), all_here)?;
                #[cfg(feature = "nccl")]
                if self.job.nccl {
                    let comm = crate::reach::over_nccl(&comm, self.job.device)?;
                    return self.on(device, comm, &spans, news);
                }
                let comm = crate::shared_device::reaching(&comm, shared)?;
                self.on(device, comm, &spans, news)
            }
            #[cfg(not(feature = "cuda"))]
            DeviceKind::Cuda => Err(crate::precompile::no_cuda()),
            // The command line leaves no other to training.
            DeviceKind::Cpu | DeviceKind::Emulated => {
                let device = Cpu::new(self.job.threads_per_rank);
                self.on(device, comm, &spans, news)
            }
        }
    }
}

/// A rank's steps.
fn steps<B: Device, C: Collectives<B> + Counted, E: Scalar>(
    mut rank: Rank<'_, B, C, E>,
    samples: &Samples,
    done: u64,
    stop: &AtomicBool,
    recorder: &Arc<Recorder>,
    news: Option<&Sender<News>>,
) -> Result<Left, Failure> {
    let job = rank.job;
    let mut seen = Seen::default();
    let recorded = job.recorded_steps(done);
    let say = |item| news.map(|sender| sender.send(item));
    let mut left = Left::default();
    for step in done + 1..=job.steps {
        let start = Instant::now();
        let (before, sent_before) = (rank.traffic(), rank.sent_to());
        recorder.set(recorded.contains(&step));
        let whole = recorder.open(What::Step(step));
        rank.device.meter().reset_peak();
        let mut proof = None;
        if job.prove && proof_steps(done, job.steps).contains(&step) {
            let _phase = rank.phase("state, for the proof");
            proof = Some(begin_proof(&rank, step)?);
        }
        let lr = learning_rate(step, job.steps, &job.optimizer);
        let done = rank.accumulate(samples, step, stop.load(Ordering::Relaxed))?;
        if let Some(proof) = &mut proof {
            let _phase = rank.phase("gradients, for the proof");
            proof.step.grads = rank.full_grads()?;
        }
        rank.update(lr, done.norm)?;
        drop(whole);
        recorder.set(false);
        let seconds = start.elapsed().as_secs_f64();
        // What the proof gathers is none of the step's; a run of proven steps alone shows it.
        let bare = proof.is_none() || step == job.steps && seen.memory == [0; 6];
        see(&mut seen, &rank, bare, sent_before);
        let mut report = measure(&mut rank, &done, &before, seconds, &mut left.bytes)?;
        (report.step, report.lr) = (step, lr);
        if let Some(mut proof) = proof {
            (proof.step.loss, proof.step.count, proof.step.norm) =
                (done.loss, done.count, done.norm);
            proof.step.load = done.load.clone();
            proof.step.params = rank.full_weights()?;
            proof.bytes.clone_from(&report.bytes);
            if rank.rank == 0 {
                left.proofs.push(proof);
            }
        }
        let last = step == job.steps || done.stop;
        if job.eval_interval > 0 && (step % job.eval_interval == 0 || last) {
            report.held_out = held_out(&mut rank, samples.corpus())?;
        }
        say(News::Step(Box::new(report)));
        if let Some(root) = &job.save {
            let due = job.save_interval > 0 && step % job.save_interval == 0;
            if due || last {
                let at = write(&rank, samples.corpus(), root, step)?;
                say(News::Note(format!("saved {at}")));
            }
        }
        left.steps += 1;
        if done.stop {
            left.stopped = step < job.steps;
            break;
        }
    }
    seen.recording = recorder.take();
    left.seen.push(seen);
    Ok(left)
}

/// Adds a step to what a rank saw: what it held at most (where `memory` is the step's own), and what
/// it sent to whom.
fn see<B: Device, C: Collectives<B> + Counted, E: Scalar>(
    seen: &mut Seen,
    rank: &Rank<'_, B, C, E>,
    memory: bool,
    before: BTreeMap<&'static str, BTreeMap<usize, u64>>,
) {
    for (most, tag) in seen.memory.iter_mut().zip(Tag::ALL).filter(|_| memory) {
        *most = (*most).max(rank.device.meter().peak(tag) as u64);
    }
    for (group, receivers) in rank.sent_to() {
        let sum = seen.sent.entry(group.to_string()).or_default();
        for (to, bytes) in receivers {
            let earlier = before.get(group).and_then(|sent| sent.get(&to));
            *sum.entry(to).or_default() += bytes - earlier.copied().unwrap_or(0);
        }
    }
}

/// The first, a middle and the last step of a run.
fn proof_steps(done: u64, steps: u64) -> [u64; 3] {
    [
        done + 1,
        done + 1 + (steps.saturating_sub(done + 1)) / 2,
        steps,
    ]
}

/// The full state before a step.
fn begin_proof<B: Device, C: Collectives<B> + Counted, E: Scalar>(
    rank: &Rank<'_, B, C, E>,
    number: u64,
) -> Result<Proof, Failure> {
    Ok(Proof {
        number,
        before: rank.full_weights()?,
        state: rank.full_state()?,
        bytes: BTreeMap::new(),
        step: crate::record::Step::default(),
    })
}

/// Mean loss on the part of the text that is never learnt from; none where it is too short.
fn held_out<B: Device, C: Collectives<B> + Counted, E: Scalar>(
    rank: &mut Rank<'_, B, C, E>,
    corpus: &Corpus,
) -> Result<Option<f64>, Failure> {
    let (seq, packed) = (rank.job.batch.seq, rank.job.pack_documents);
    let Ok(windows) = corpus.windows(Part::HeldOut, seq, packed) else {
        return Ok(None);
    };
    let mine = share(windows.collect(), rank.job, &rank.mesh, rank.rank);
    let (loss, tokens) = rank.evaluate(&mine)?;
    let mean = loss / tokens;
    if tokens > 0.0 && !mean.is_finite() {
        return Err(Failure::aborted(format!(
            "the held-out loss is {mean}: the parameters are no longer finite"
        )));
    }
    Ok((tokens > 0.0).then_some(mean))
}

/// Saves all ranks' parts under `root`.
fn write<B: Device, C: Collectives<B> + Counted, E: Scalar>(
    rank: &Rank<'_, B, C, E>,
    corpus: &Corpus,
    root: &Path,
    step: u64,
) -> Result<String, Failure> {
    let mut squares = rank.device.zeros::<f64>(Tag::Scratch, 1)?;
    for params in rank.chunks.iter().map(|chunk| &chunk.params) {
        for part in 0..params.layout().parts().len() {
            rank.device
                .add_squares::<E>(params.part(part)?.view(), B::whole_mut(&mut squares))?;
        }
    }
    let mut sum = [0.0];
    rank.device.download(B::whole(&squares), &mut sum)?;
    reduce(rank, &mut sum, ReduceOp::Sum)?;
    if !sum[0].is_finite() {
        return Err(Failure::aborted(format!(
            "parameters are not finite after step {step}; nothing was saved"
        )));
    }
    let about = crate::checkpoint::about(rank.job, corpus, step)?;
    let folder = rank.save(root, &about)?;
    Ok(folder.display().to_string())
}
