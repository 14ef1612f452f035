//! Everything one rank owns, and how it begins.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use quintet_collectives::transport::Transport;
use quintet_collectives::{Axis, Communicator, DeviceMesh};
use quintet_kernels::{Collectives, Float, Scalar};
use quintet_parallel_layers::init::{init_random, init_value};
use quintet_parallel_layers::pipeline::{Action, Schedule, Stage};
use quintet_planner::config::validate;
use quintet_planner::model::{self, StageLayer, borrows_table, flat_layout, mesh, stage_layers};
use quintet_zero::{
    Entry, FlatLayout, GradSync, ParamStore, Partition, Rule, ShardedOptimizer, ZeroStage,
};

use crate::failure::Failure;
use crate::groups::{Counted, Groups, Traffic, labels};
use crate::job::{Job, OptimizerKind};
use crate::load::Load;
use crate::model::{Device, StageModel};
use crate::seat::Seat;
use crate::spans::{Open, Recorder, What};

mod state;

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
    /// Whether its head uses the table of the stage's first chunk.
    pub borrows_table: bool,
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
    /// The tokens I hold.
    pub seat: Seat,
    /// My device.
    pub device: B,
    /// My communicators.
    pub groups: Groups<C>,
    /// The performer of the pipeline's actions.
    pub stage: Stage<B, C, E>,
    /// The order of work of all stages.
    pub schedule: Schedule,
    /// My actions in a step.
    pub actions: Vec<Action>,
    /// What I hold of the model, in the order of the model.
    pub chunks: Vec<Chunk<B, C, E>>,
    /// What routers did in the step whose update is due.
    pub(crate) load: Option<Load>,
    /// Who records what this rank does when.
    pub recorder: Option<Arc<Recorder>>,
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
        let grad_bytes = size_of::<E::Acc>();
        let (mut groups, pp) = Groups::new(world, &mesh, &by_ref(&flats), layout)?;
        for stage in mesh.group(rank, &[mesh.factor(Axis::Pp)]) {
            let flats = flat_layouts(job, &mesh, stage, grad_bytes)?;
            groups.count_also(labels(by_ref(&flats)));
        }
        let schedule = schedule(job, &mesh, grad_bytes)?;
        let stage = mesh.index(rank, Axis::Pp);
        let chunks = flats.iter().enumerate().map(|(chunk, flat)| {
            let layers = stage_layers(&job.model, layout, &mesh, stage, chunk)?;
            let mut made = Chunk::new(job, &device, &groups, layers, flat, begin)?;
            made.borrows_table = borrows_table(&job.model, layout, stage, chunk);
            Ok(made)
        });
        let chunks = chunks.collect::<Result<_, Failure>>()?;
        let boundary = boundary_len(job, &mesh, rank);
        Ok(Self {
            job,
            mesh,
            rank,
            seat: Seat::new(layout, &mesh, rank),
            stage: Stage::new(device.clone(), pp, layout.route(), boundary),
            device,
            groups,
            actions: schedule.actions(stage),
            schedule,
            chunks,
            load: None,
            recorder: None,
        })
    }
}

impl<B: Device, C: Collectives<B>, E: Scalar> Chunk<B, C, E> {
    /// Layers with their parameters drawn as `begin` says, gradients and moments of zero. It
    /// borrows no table.
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
        let partition = Partition::new(flat.clone(), zero);
        let mut params = ParamStore::zeros(device, &partition)?;
        let first = |entry: &Entry, index| match begin {
            Begin::Init => init_value(&entry.spec, job.seed, index),
            Begin::Random => init_random(&entry.spec, job.seed, index),
        };
        params.fill_with(|entry, index| rounded(first(entry, index)))?;
        let grads = GradSync::new(device, &partition, groups)?;
        let mut optimizer = ShardedOptimizer::new(device, &partition, rule(job), &params)?;
        optimizer.fill_master(first)?;
        Ok(Self {
            model: StageModel { layers },
            segments: flat.segments(),
            borrows_table: false,
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

    /// Bytes sent so far, by axis and receiver.
    #[must_use]
    pub fn sent_to(&self) -> BTreeMap<&'static str, BTreeMap<usize, u64>> {
        self.groups.sent_to(self.stage.group())
    }

    /// Whether I hold the model's last chunk, whose head takes the loss.
    #[must_use]
    pub fn takes_the_loss(&self) -> bool {
        let route = self.schedule.route();
        let last = route.places().saturating_sub(1);
        route.home(last).map(|(stage, _)| stage) == Some(self.stage_index())
    }

    /// A span of a part of the step, where somebody records it.
    pub(crate) fn phase(&self, name: &'static str) -> Option<Open> {
        self.recorder.as_ref()?.open(What::Phase(name))
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

/// A parameter as it is used: its master weight, rounded.
pub(crate) fn rounded<E: Scalar>(value: f64) -> E {
    E::from_acc(E::Acc::from_f64(value))
}

/// References to them.
pub fn by_ref(flats: &[Arc<FlatLayout>]) -> Vec<&FlatLayout> {
    flats.iter().map(|flat| &**flat).collect()
}

/// The order of work of all stages.
pub(crate) fn schedule(
    job: &Job,
    mesh: &DeviceMesh,
    grad_bytes: usize,
) -> Result<Schedule, Failure> {
    let (layout, batch) = (&job.layout, &job.batch);
    Ok(model::schedule(
        &job.model, layout, batch, mesh, grad_bytes,
    )?)
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
