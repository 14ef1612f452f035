//! Everything one rank owns, and how it begins.

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use quintet_collectives::transport::Transport;
use quintet_collectives::{Axis, Communicator, DeviceMesh, Order};
use quintet_kernels::{Collectives, Scalar};
use quintet_parallel_layers::init::{init_random, init_value};
use quintet_parallel_layers::pipeline::{Schedule, Stage};
use quintet_planner::config::validate;
use quintet_planner::model::{StageLayer, flat_layout, mesh, segments, stage_layers};
use quintet_zero::checkpoint::{Target, load};
use quintet_zero::{
    Entry, FlatLayout, Full, GradSync, ParamStore, Partition, Rule, ShardedOptimizer, ZeroStage,
    gather_grads, gather_params, gather_state,
};

use crate::failure::Failure;
use crate::groups::{Aside, Counted, Groups, Traffic};
use crate::job::{Job, OptimizerKind};
use crate::model::{Device, StageModel};

/// How parameters begin.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Begin {
    /// As training begins: the ledger's rule for each.
    Init,
    /// Every parameter at random, norms too, so that a proof sees each of them at work.
    Random,
}

/// A part of the model that a rank holds (a virtual stage), with all that belongs to it.
pub struct Chunk<B: Device, C: Collectives<B>, E: Scalar> {
    /// Its layers.
    pub model: StageModel,
    /// Runs of layers, in the order backward reaches them.
    pub segments: Vec<Range<usize>>,
    /// Its parameters.
    pub params: ParamStore<B, E>,
    /// Their gradients.
    pub grads: GradSync<B, C, E>,
    /// My part of the optimizer.
    pub optimizer: ShardedOptimizer<B, E>,
}

/// One rank of a run.
pub struct Rank<'a, B: Device, C: Collectives<B> + Counted, E: Scalar> {
    /// The job.
    pub job: &'a Job,
    /// The mesh.
    pub mesh: DeviceMesh,
    /// My global rank.
    pub rank: usize,
    /// My device.
    pub device: B,
    /// My communicators.
    pub groups: Groups<C>,
    /// The performer of the pipeline's actions.
    pub stage: Stage<B, C, E>,
    /// The order of work of all stages.
    pub schedule: Schedule,
    /// What I hold of the model, in the order of the model.
    pub chunks: Vec<Chunk<B, C, E>>,
}

impl<'a, B: Device, T: Transport + Send + 'static, E: Scalar> Rank<'a, B, Communicator<T>, E>
where
    Communicator<T>: Collectives<B>,
{
    /// Sets up a rank of `world`, parameters drawn as `begin` says.
    ///
    /// # Errors
    /// Where the layout cannot be, memory is short, or a group cannot be made.
    pub fn new(
        job: &'a Job,
        device: B,
        world: Communicator<T>,
        begin: Begin,
    ) -> Result<Self, Failure> {
        let (layout, rank) = (&job.layout, world.rank());
        // A batch that replicas cannot share would be cut short without a word.
        validate(&job.model, layout, &job.batch)?;
        let mesh = mesh(layout)?;
        let flats = flat_layouts(job, &mesh, rank, size_of::<E::Acc>())?;
        let order = if layout.any_order {
            Order::Any
        } else {
            Order::Rank
        };
        let (groups, pp) = Groups::new(world, &mesh, &by_ref(&flats), order)?;
        let schedule = schedule(job, &mesh, size_of::<E::Acc>())?;
        let stage = mesh.index(rank, Axis::Pp);
        let chunks = flats.iter().enumerate().map(|(chunk, flat)| {
            let layers = stage_layers(&job.model, layout, &mesh, stage, chunk)?;
            Chunk::new(job, &device, &groups, layers, flat, begin)
        });
        let chunks = chunks.collect::<Result<_, Failure>>()?;
        let boundary = boundary_len(job, &mesh, rank);
        Ok(Self {
            job,
            mesh,
            rank,
            stage: Stage::new(device.clone(), pp, boundary),
            device,
            groups,
            schedule,
            chunks,
        })
    }
}

impl<B: Device, C: Collectives<B>, E: Scalar> Chunk<B, C, E> {
    /// Layers with their parameters drawn as `begin` says, gradients and moments of zero.
    ///
    /// # Errors
    /// Where memory is short or a group is missing.
    pub fn new(
        job: &Job,
        device: &B,
        groups: &Groups<C>,
        layers: Vec<StageLayer>,
        flat: &Arc<FlatLayout>,
        begin: Begin,
    ) -> Result<Self, Failure> {
        let zero = ZeroStage::from_number(job.layout.zero_stage)?;
        let partition = Partition::new(flat.clone(), zero)?;
        let mut params = ParamStore::zeros(device, flat)?;
        params.fill_with(|entry, index| {
            E::from_f64(match begin {
                Begin::Init => init_value(&entry.spec, job.seed, index),
                Begin::Random => init_random(&entry.spec, job.seed, index),
            })
        })?;
        let grads = GradSync::new(device, &partition, groups)?;
        let optimizer = ShardedOptimizer::new(device, &partition, rule(job), &params)?;
        Ok(Self {
            model: StageModel { layers },
            segments: flat.segments(),
            params,
            grads,
            optimizer,
        })
    }
}

impl<B: Device, C: Collectives<B> + Counted, E: Scalar> Rank<'_, B, C, E> {
    /// My pipeline stage.
    #[must_use]
    pub fn stage_index(&self) -> usize {
        self.mesh.index(self.rank, Axis::Pp)
    }

    /// Microbatches of a step that this replica works on, by number in the step.
    #[must_use]
    pub fn microbatches(&self) -> Range<usize> {
        let each = self.job.batch.microbatches() / self.job.layout.dp;
        let first = self.mesh.index(self.rank, Axis::Dp) * each;
        first..first + each
    }

    /// Bytes and waiting so far, by axis.
    #[must_use]
    pub fn traffic(&self) -> BTreeMap<&'static str, Traffic> {
        self.groups.traffic(self.stage.group())
    }

    /// Sets every parameter of every chunk: `value(entry, logical index)`.
    ///
    /// # Errors
    /// Where the device has no memory.
    pub fn fill_with(
        &mut self,
        mut value: impl FnMut(&Entry, usize) -> f64,
    ) -> Result<(), Failure> {
        for chunk in &mut self.chunks {
            let fill = |entry: &Entry, index| E::from_f64(value(entry, index));
            chunk.params.fill_with(fill)?;
        }
        Ok(())
    }

    /// The whole model's parameters, on every rank, beside the traffic of training.
    ///
    /// # Errors
    /// What a collective fails with.
    pub fn full_params(&self) -> Result<Full, Failure> {
        let stores: Vec<_> = self.chunks.iter().map(|c| &c.params).collect();
        Ok(gather_params(&self.device, &stores, &Aside(&self.groups))?)
    }

    /// The whole model's reduced gradients, as [`Rank::full_params`].
    ///
    /// # Errors
    /// As there.
    pub fn full_grads(&self) -> Result<Full, Failure> {
        let syncs = self.grads();
        Ok(gather_grads(&self.device, &syncs, &Aside(&self.groups))?)
    }

    /// The whole optimizer state by kind, as [`Rank::full_params`].
    ///
    /// # Errors
    /// As there.
    pub fn full_state(&self) -> Result<BTreeMap<String, Full>, Failure> {
        let optimizers: Vec<_> = self.chunks.iter().map(|c| &c.optimizer).collect();
        let state = gather_state(&self.device, &optimizers, &Aside(&self.groups))?;
        let named = |(kind, full): (&str, Full)| (kind.to_string(), full);
        Ok(state.into_iter().map(named).collect())
    }

    /// Loads the newest checkpoint of `root` into all chunks, on all ranks together.
    ///
    /// # Errors
    /// Where it is torn, foreign or of another model; nothing is changed then.
    pub fn load(&mut self, root: &Path, optimizer: bool) -> Result<(), Failure> {
        let mut targets = Vec::new();
        for chunk in &mut self.chunks {
            targets.push(Target {
                params: &mut chunk.params,
                optimizer: optimizer.then_some(&mut chunk.optimizer),
            });
        }
        load(root, &self.device, &Aside(&self.groups), &mut targets)?;
        Ok(())
    }

    /// The gradients of all chunks.
    pub(crate) fn grads(&self) -> Vec<&GradSync<B, C, E>> {
        self.chunks.iter().map(|c| &c.grads).collect()
    }
}

/// Where the parameters of each chunk of a rank lie.
fn flat_layouts(
    job: &Job,
    mesh: &DeviceMesh,
    rank: usize,
    grad_bytes: usize,
) -> Result<Vec<Arc<FlatLayout>>, Failure> {
    let flat = |chunk| {
        let (model, layout) = (&job.model, &job.layout);
        Ok(Arc::new(flat_layout(
            model, layout, mesh, rank, chunk, grad_bytes,
        )?))
    };
    (0..job.layout.chunks()).map(flat).collect()
}

/// References to them.
pub fn by_ref(flats: &[Arc<FlatLayout>]) -> Vec<&FlatLayout> {
    flats.iter().map(|flat| &**flat).collect()
}

/// The order of work of all stages.
fn schedule(job: &Job, mesh: &DeviceMesh, grad_bytes: usize) -> Result<Schedule, Failure> {
    let segments = segments(&job.model, &job.layout, mesh, grad_bytes)?;
    let mbs = job.batch.microbatches() / job.layout.dp;
    let kind = job.layout.schedule;
    Ok(Schedule::new(kind, job.layout.pp, mbs, &segments)?)
}

/// The optimizer's rule of a job.
#[must_use]
pub fn rule(job: &Job) -> Rule {
    let o = &job.optimizer;
    match o.kind {
        OptimizerKind::AdamW => Rule::AdamW {
            beta1: o.beta1,
            beta2: o.beta2,
            eps: o.eps,
            weight_decay: o.weight_decay,
        },
        OptimizerKind::Sgd => Rule::Sgd {
            weight_decay: o.weight_decay,
        },
    }
}

/// Elements of an activation between stages, as this rank holds it.
fn boundary_len(job: &Job, mesh: &DeviceMesh, rank: usize) -> usize {
    let tokens = job.batch.micro_batch * job.batch.seq;
    let mine = if job.layout.sequence_parallel {
        let place = mesh.index(rank, Axis::Tp);
        quintet_collectives::chunk::chunk_len(tokens, job.layout.tp, place)
    } else {
        tokens
    };
    mine * job.model.hidden
}
