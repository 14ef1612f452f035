//! Everything one rank owns, and how it begins.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use quintet_collectives::transport::Transport;
use quintet_collectives::{Axis, Communicator, DeviceMesh};
use quintet_kernels::{Collectives, Scalar};
use quintet_parallel_layers::init::{init_random, init_value};
use quintet_parallel_layers::pipeline::{Schedule, Stage};
use quintet_planner::config::validate;
use quintet_planner::model::{StageLayer, flat_layout, mesh, stage_layers};
use quintet_zero::{GradSync, ParamStore, Partition, Rule, ShardedOptimizer, ZeroStage};

use crate::failure::Failure;
use crate::groups::{Counted, Groups, Traffic};
use crate::job::{Job, OptimizerKind};
use crate::model::{Device, StageModel};
use crate::seat::Seat;

/// How parameters begin.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Begin {
    /// As training begins: the ledger's rule for each.
    Init,
    /// Every parameter at random, norms too, so that a proof sees each of them at work.
    Random,
}

/// One rank of a run.
pub struct Rank<'a, B: Device, C: Collectives<B> + Counted, E: Scalar> {
    /// The job.
    pub job: &'a Job,
    /// The mesh.
    pub mesh: DeviceMesh,
    /// My global rank.
    pub rank: usize,
    /// The tokens I hold.
    pub seat: Seat,
    /// My device.
    pub device: B,
    /// My communicators.
    pub groups: Groups<C>,
    /// The performer of the pipeline's actions.
    pub stage: Stage<B, C, E>,
    /// My layers.
    pub model: StageModel,
    /// Runs of layers, in the order backward reaches them.
    pub segments: Vec<Range<usize>>,
    /// The order of work of all stages.
    pub schedule: Schedule,
    /// My parameters.
    pub params: ParamStore<B, E>,
    /// Their gradients.
    pub grads: GradSync<B, C, E>,
    /// My part of the optimizer.
    pub optimizer: ShardedOptimizer<B, E>,
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
        let grad_bytes = size_of::<E::Acc>();
        let flat = |rank| flat_layout(&job.model, layout, &mesh, rank, grad_bytes);
        let mine = Arc::new(flat(rank)?);
        let (groups, pp) = Groups::new(world, &mesh, &mine, layout)?;
        let stage_index = mesh.index(rank, Axis::Pp);
        let per_stage = mesh.world() / layout.pp;
        let segments: Vec<usize> = (0..layout.pp)
            .map(|stage| Ok(flat(stage * per_stage)?.buckets().len()))
            .collect::<Result<_, quintet_planner::Error>>()?;
        let mbs = job.batch.microbatches() / layout.dp;
        let layers: Vec<StageLayer> = stage_layers(&job.model, layout, &mesh, stage_index)?;
        let zero = if layout.zero_stage == 0 {
            ZeroStage::Ddp
        } else {
            ZeroStage::One
        };
        let partition = Partition::new(mine.clone(), zero)?;
        let mut params = ParamStore::zeros(&device, &mine)?;
        params.fill_with(|entry, index| {
            E::from_f64(match begin {
                Begin::Init => init_value(&entry.spec, job.seed, index),
                Begin::Random => init_random(&entry.spec, job.seed, index),
            })
        })?;
        let grads = GradSync::new(&device, &partition, &groups)?;
        let optimizer = ShardedOptimizer::new(&device, &partition, rule(job), &params)?;
        let boundary = boundary_len(job, &mesh, rank);
        Ok(Self {
            job,
            mesh,
            rank,
            seat: Seat::new(layout, &mesh, rank),
            stage: Stage::new(device.clone(), pp, boundary),
            device,
            groups,
            model: StageModel { layers },
            segments: mine.segments(),
            schedule: Schedule::new(layout.schedule, layout.pp, mbs, &segments)?,
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
    let tokens = job.batch.micro_batch * job.batch.seq / job.layout.cp;
    let mine = if job.layout.sequence_parallel {
        let place = mesh.index(rank, Axis::Tp);
        quintet_collectives::chunk::chunk_len(tokens, job.layout.tp, place)
    } else {
        tokens
    };
    mine * job.model.hidden
}
