//! Runs a few steps of a layout and keeps everything that a proof looks at.

use std::collections::BTreeMap;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::marker::PhantomData;
use std::time::Duration;

use quintet_collectives::communicator::DEFAULT_DEADLINE;
use quintet_collectives::transport::local::{Local, World};
use quintet_collectives::{Communicator, Transport};
use quintet_kernels::{Collectives, Cpu, Meter, Scalar, Tag, bf16};
use quintet_planner::states::{Bytes, Memory};
use quintet_planner::traffic::tokens_of;
use serde::{Deserialize, Serialize};

use crate::compare::Tensors;
use crate::crew::{Crew, End, Work};
use crate::data::Samples;
use crate::failure::Failure;
use crate::job::{DeviceKind, Dtype, Job};
use crate::load::Load;
use crate::model::Device;
use crate::rank::{Begin, Rank, rounded};
use crate::schedule_lr::learning_rate;

/// One step of a layout.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Step {
    /// Mean loss over valid tokens.
    pub loss: f64,
    /// Valid tokens.
    pub count: f64,
    /// Norm of the gradient before clipping.
    pub norm: f64,
    /// Gradients before clipping, by name.
    pub grads: Tensors,
    /// Parameters after the update, by name; master weights where there are any.
    pub params: Tensors,
    /// What routers did.
    pub load: Load,
}

/// The hash of what one rank holds of one parameter.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Held {
    /// Step after whose update it was taken.
    pub step: u64,
    /// The parameter.
    pub name: String,
    /// Which elements of the logical tensor: runs of first index and length.
    pub part: Vec<(usize, usize)>,
    /// A hash of their bits.
    pub hash: u64,
}

/// The experts that tokens chose: `[microbatch][layer][token * topk + choice]`, -1 where no rank
/// said; nothing for a layer without experts.
pub type Choices = Vec<Vec<Vec<i32>>>;

/// What a run of a layout leaves.
#[derive(Debug, Clone, Default)]
pub struct Record {
    /// Step by step.
    pub steps: Vec<Step>,
    /// By rank: what it held after each step.
    pub held: Vec<Vec<Held>>,
    /// The first parameter that is used otherwise than as its master weight, rounded; empty where
    /// there is none, or no master weight.
    pub stale: String,
    /// Step by step, and by microbatch and layer: the experts that each token chose.
    pub choices: Vec<Choices>,
    /// Whether collectives were performed where a device's memory lies, on every rank.
    pub on_device: bool,
    /// By rank: bytes sent by group, over all steps.
    pub bytes: Vec<BTreeMap<String, u64>>,
    /// By rank: bytes allocated by category, over all steps; of activations those that forward saved.
    pub memory: Vec<Memory>,
    /// By rank: the most bytes of activations, with what backward and messages had besides.
    pub highest: Vec<u64>,
}

/// A rank of a recorded run.
pub type Recorded<'a, E> = Rank<'a, Cpu, Communicator<Local>, E>;

/// What one rank leaves of it.
#[derive(Debug, Default, Serialize, Deserialize)]
pub struct Part {
    /// Rank 0's alone, which has them all.
    #[serde(skip)]
    steps: Vec<Step>,
    held: Vec<Held>,
    stale: String,
    on_device: bool,
    bytes: BTreeMap<String, u64>,
    /// At rest and at the highest.
    memory: BTreeMap<String, (u64, u64)>,
    /// The most bytes of activations, with what backward and messages had besides.
    highest: u64,
    /// The tokens of a microbatch that it holds.
    tokens: Vec<usize>,
    /// Step by step: microbatch, layer, and what each of these tokens chose there.
    choices: Vec<Vec<(usize, usize, Vec<i32>)>>,
}

/// Runs the job's steps from `begin`, as many rank threads as its layout has.
///
/// # Errors
/// The first cause that ended the run.
pub fn record(job: &Job, samples: &Samples, begin: Begin) -> Result<Record, Failure> {
    let crew = Crew::threads(job)?;
    // Where all ranks are, rank 0 is.
    Ok(record_in(&crew, job, samples, begin)?.unwrap_or_default())
}

/// [`record`] wherever the ranks are; a record where rank 0 is.
///
/// # Errors
/// The first cause that ended the run.
pub fn record_in(
    crew: &Crew,
    job: &Job,
    samples: &Samples,
    begin: Begin,
) -> Result<Option<Record>, Failure> {
    match job.dtype {
        Dtype::F64 => Recording::<f64>::of(crew, job, samples, begin),
        Dtype::F32 => Recording::<f32>::of(crew, job, samples, begin),
        Dtype::Bf16 => Recording::<bf16>::of(crew, job, samples, begin),
    }
}

/// The work of [`record_in`].
struct Recording<'a, E> {
    job: &'a Job,
    samples: &'a Samples,
    begin: Begin,
    /// Whether all ranks are threads here.
    #[cfg(any(feature = "cuda", feature = "emulated"))]
    all_here: bool,
    #[cfg(feature = "cuda")]
    gpus: crate::gpus::Gpus,
    #[cfg(feature = "emulated")]
    emulated: crate::shared_device::Devices<quintet_kernels::emulated::Emulated>,
    dtype: PhantomData<fn() -> E>,
}

impl<'a, E: Scalar> Recording<'a, E> {
    fn of(
        crew: &Crew,
        job: &'a Job,
        samples: &'a Samples,
        begin: Begin,
    ) -> Result<Option<Record>, Failure> {
        let work = Self {
            job,
            samples,
            begin,
            #[cfg(any(feature = "cuda", feature = "emulated"))]
            all_here: !crew.is_process(),
            #[cfg(feature = "cuda")]
            gpus: crew.gpus(),
            #[cfg(feature = "emulated")]
            emulated: crate::shared_device::Devices::default(),
            dtype: PhantomData,
        };
        Ok(crew.go(&work)?.map(|parts| joined(job, parts)))
    }

    fn on<B: Device, T: Transport + Send + 'static>(
        &self,
        device: B,
        comm: Communicator<T>,
    ) -> Result<Part, Failure>
    where
        Communicator<T>: Collectives<B>,
    {
        let on_device = comm.reaches_device();
        let rank = Rank::<_, _, E>::new(self.job, device, comm, self.begin)?;
        let mut part = steps(rank, self.job, self.samples)?;
        part.on_device = on_device;
        Ok(part)
    }
}

impl<E: Scalar> Work for Recording<'_, E> {
    type Left = Part;

    fn rank(&self, comm: Communicator<End>) -> Result<Part, Failure> {
        match self.job.device {
            DeviceKind::Cpu => self.on(Cpu::new(self.job.threads_per_rank), comm),
            #[cfg(feature = "emulated")]
            DeviceKind::Emulated => {
                let all_here = self.all_here.then_some(self.job);
                let seed = self.job.seed;
                let (device, shared) = self.emulated.emulated(comm.rank(), all_here, seed)?;
                #[cfg(feature = "nccl")]
                if self.job.nccl {
                    return self.on(device, crate::reach::over_nccl(&comm, self.job.device)?);
                }
                self.on(device, crate::shared_device::reaching(&comm, shared)?)
            }
            #[cfg(feature = "cuda")]
            DeviceKind::Cuda => {
                let all_here = self.all_here.then_some(self.job);
                let (device, shared) = self.gpus.of_rank(comm.rank(), all_here)?;
                #[cfg(feature = "nccl")]
                if self.job.nccl {
                    return self.on(device, crate::reach::over_nccl(&comm, self.job.device)?);
                }
                self.on(device, crate::shared_device::reaching(&comm, shared)?)
            }
            #[cfg(not(feature = "cuda"))]
            DeviceKind::Cuda => Err(crate::precompile::no_cuda()),
            #[cfg(not(feature = "emulated"))]
            DeviceKind::Emulated => Err(crate::reach::no_emulator()),
        }
    }
}

/// [`record`] on a world made beforehand; `prepare` may change each rank before its first step.
///
/// # Errors
/// As [`record`], and those of `prepare`.
pub fn record_on<E: Scalar>(
    world: &World,
    job: &Job,
    samples: &Samples,
    begin: Begin,
    prepare: impl Fn(&mut Recorded<'_, E>) -> Result<(), Failure> + Sync,
) -> Result<Record, Failure> {
    record_within(world, DEFAULT_DEADLINE, job, samples, begin, prepare)
}

/// [`record_on`] with another deadline for each wait.
///
/// # Errors
/// As [`record_on`].
pub fn record_within<E: Scalar>(
    world: &World,
    deadline: Duration,
    job: &Job,
    samples: &Samples,
    begin: Begin,
    prepare: impl Fn(&mut Recorded<'_, E>) -> Result<(), Failure> + Sync,
) -> Result<Record, Failure> {
    let device = |_| Ok(Cpu::new(job.threads_per_rank));
    record_with::<Cpu, E>(world, deadline, job, samples, begin, device, prepare)
}

/// The same on the device that `device` makes for each rank.
///
/// # Errors
/// As [`record_on`], and those of `device`.
pub fn record_with<B: Device, E: Scalar>(
    world: &World,
    deadline: Duration,
    job: &Job,
    samples: &Samples,
    begin: Begin,
    device: impl Fn(usize) -> Result<B, Failure> + Sync,
    prepare: impl Fn(&mut Rank<'_, B, Communicator<Local>, E>) -> Result<(), Failure> + Sync,
) -> Result<Record, Failure>
where
    Communicator<Local>: Collectives<B>,
{
    let parts = world.go(|comm| {
        let comm = comm.with_deadline(deadline);
        let device = device(comm.rank())?;
        let mut rank = Rank::<_, _, E>::new(job, device, comm, begin)?;
        prepare(&mut rank)?;
        steps(rank, job, samples)
    })?;
    Ok(joined(job, parts))
}

/// A rank's steps.
fn steps<B: Device, T: Transport + Send + 'static, E: Scalar>(
    mut rank: Rank<'_, B, Communicator<T>, E>,
    job: &Job,
    samples: &Samples,
) -> Result<Part, Failure>
where
    Communicator<T>: Collectives<B>,
{
    let (mut part, mut saved) = (Part::default(), 0);
    rank.device.meter().reset_peak();
    for step in 1..=job.steps {
        let done = rank.accumulate(samples, step, false)?;
        let grads = rank.full_grads()?;
        saved = done.saved.max(saved);
        let choices = done.choices.into_iter();
        let choices = choices.map(|((microbatch, layer), chosen)| (microbatch, layer, chosen));
        part.choices.push(choices.collect());
        rank.update(learning_rate(step, job.steps, &job.optimizer), done.norm)?;
        let params = rank.full_weights()?;
        if job.dtype.has_masters() && part.stale.is_empty() {
            part.stale = not_rounded::<E>(&rank.full_params()?, &params, step);
        }
        part.held.extend(hashes(&rank, step)?);
        if rank.rank == 0 {
            let (loss, count, norm) = (done.loss, done.count, done.norm);
            part.steps.push(Step {
                loss,
                count,
                norm,
                grads,
                params,
                load: done.load,
            });
        }
    }
    let bytes = rank
        .traffic()
        .into_iter()
        .map(|(name, t)| (name.to_string(), t.bytes));
    part.bytes = bytes.filter(|(_, b)| *b > 0).collect();
    part.memory = counted(rank.device.meter(), saved);
    part.highest = rank.device.meter().peak(Tag::Activation) as u64;
    part.tokens = tokens_of(&rank.mesh, rank.rank, &job.batch);
    Ok(part)
}

/// What all ranks have left.
fn joined(job: &Job, parts: Vec<Part>) -> Record {
    let on_device = !parts.is_empty() && parts.iter().all(|part| part.on_device);
    let mut record = Record {
        on_device,
        ..Record::default()
    };
    for part in parts {
        for (step, choices) in part.choices.into_iter().enumerate() {
            if record.choices.len() == step {
                record.choices.push(no_choices(job));
            }
            join(job, &part.tokens, choices, &mut record.choices[step]);
        }
        if record.stale.is_empty() {
            record.stale = part.stale;
        }
        let bytes = |(at_rest, peak)| Bytes { at_rest, peak };
        let memory = part.memory.into_iter();
        record
            .memory
            .push(memory.map(|(name, held)| (name, bytes(held))).collect());
        record.highest.push(part.highest);
        record.steps.extend(part.steps);
        record.held.push(part.held);
        record.bytes.push(part.bytes);
    }
    record
}

/// What the meter has counted since its peaks were last reset, in the categories that are planned; of
/// activations what forward had `saved` at the most.
fn counted(meter: &Meter, saved: u64) -> BTreeMap<String, (u64, u64)> {
    let planned = [Tag::Param, Tag::Grad, Tag::Optimizer, Tag::Activation];
    let bytes = planned.map(|tag| {
        let peak = match tag {
            Tag::Activation => saved,
            _ => meter.peak(tag) as u64,
        };
        (tag.name().to_string(), (meter.now(tag) as u64, peak))
    });
    bytes.into()
}

fn no_choices(job: &Job) -> Choices {
    let layer = |layer| {
        let topk = job.model.moe_at(layer).map_or(0, |moe| moe.topk);
        vec![-1; job.batch.micro_batch * job.batch.seq * topk]
    };
    vec![(0..job.model.layers).map(layer).collect(); job.batch.microbatches()]
}

/// Puts what a rank's `tokens` chose where it belongs.
fn join(job: &Job, tokens: &[usize], choices: Vec<(usize, usize, Vec<i32>)>, all: &mut Choices) {
    let topk = job.model.moe.map_or(1, |moe| moe.topk);
    for (microbatch, layer, chosen) in choices {
        let Some(slots) = all.get_mut(microbatch).and_then(|m| m.get_mut(layer)) else {
            continue;
        };
        // A rank that has lost tokens, by a fault, has fewer choices.
        for (token, chosen) in tokens.iter().zip(chosen.chunks(topk)) {
            let slots = slots.iter_mut().skip(token * topk).take(topk);
            slots.zip(chosen).for_each(|(slot, choice)| *slot = *choice);
        }
    }
}

/// The first parameter that is not its master weight rounded, if there is one.
fn not_rounded<E: Scalar>(used: &Tensors, masters: &Tensors, step: u64) -> String {
    let as_used = |master: &f64| rounded::<E>(*master).to_f64().to_bits();
    for (name, master) in masters {
        let used = used.get(name).into_iter().flatten().map(|x| x.to_bits());
        if !used.eq(master.iter().map(as_used)) {
            return format!("{name} is not its master weight rounded after step {step}");
        }
    }
    String::new()
}

fn hashes<B, C, E>(rank: &Rank<'_, B, C, E>, step: u64) -> Result<Vec<Held>, Failure>
where
    B: Device,
    C: Collectives<B> + crate::groups::Counted,
    E: Scalar,
{
    let mut all = Vec::new();
    for params in rank.chunks.iter().map(|chunk| &chunk.params) {
        for entry in params.layout().entries() {
            let mut hasher = DefaultHasher::new();
            let (values, runs) = params.read(entry)?;
            for value in values {
                value.to_f64().to_bits().hash(&mut hasher);
            }
            all.push(Held {
                step,
                name: entry.spec.name.clone(),
                part: runs
                    .into_iter()
                    .map(|(_, first, len)| (first, len))
                    .collect(),
                hash: hasher.finish(),
            });
        }
    }
    Ok(all)
}
