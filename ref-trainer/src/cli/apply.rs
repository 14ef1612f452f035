//! From flags to a job: what a flag says wins over the saved job or the checkpoint that is gone on
//! from, which wins over the defaults.

use std::path::Path;

use quintet_collectives::environment::{Place, Variables};
use quintet_parallel_layers::Recompute;
use quintet_parallel_layers::pipeline::ScheduleKind;
use quintet_planner::config::{Layout, ModelConfig, MoeConfig};

use super::args::{
    BatchArgs, DeviceArgs, JobArgs, LayoutArgs, ModelArgs, OptimiserArgs, OutputArgs, StepArgs,
};
use super::ranks;
use super::words::{ReductionOrder, Schedule};
use crate::checkpoint::job_of;
use crate::failure::Failure;
use crate::job::{DataSource, Job, Ranks};
use crate::model_config::Model;

/// What this process was told beside its arguments.
#[derive(Clone, Copy)]
pub(super) struct Told<'a> {
    /// The environment.
    pub env: &'a Variables,
    /// Its place, where a launcher has started it as a rank.
    pub launched: Option<&'a Place>,
}

/// Where a job starts from.
pub(super) struct Base {
    job: Job,
    from: Origin,
}

/// What the numbers in a base are worth.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Origin {
    /// Defaults, which give way to what a model brings along.
    Defaults,
    /// Defaults whose batch is the subcommand's own: small, and made to fit the layout.
    OwnBatch,
    /// A checkpoint: what is learnt is its, the layout and the output are defaults.
    Checkpoint,
    /// A saved job: nothing in it is a mere default.
    Saved,
}

impl Base {
    pub(super) fn train(job: Job) -> Self {
        Self {
            job,
            from: Origin::Defaults,
        }
    }

    pub(super) fn own_batch(job: Job) -> Self {
        Self {
            job,
            from: Origin::OwnBatch,
        }
    }

    /// The saved job instead, where there is one; else the problem of the checkpoint, where one is
    /// gone on from.
    fn or_saved(self, config: Option<&Path>, load: Option<&Path>) -> Result<Self, Failure> {
        match (config, load) {
            (None, None) => Ok(self),
            (Some(path), _) => Ok(Self {
                job: Job::read(path)?,
                from: Origin::Saved,
            }),
            (None, Some(root)) => Ok(Self {
                job: job_of(root)?.goes_on(self.job),
                from: Origin::Checkpoint,
            }),
        }
    }

    fn own_batch_fits(&self) -> bool {
        self.from == Origin::OwnBatch
    }

    /// Whether lengths and optimizer are somebody's choice.
    fn chosen(&self) -> bool {
        matches!(self.from, Origin::Checkpoint | Origin::Saved)
    }
}

/// Refuses what is not built, fills in the rest and judges the whole.
pub(super) fn job(base: Base, args: &JobArgs, told: Told<'_>) -> Result<Job, Failure> {
    let device = &args.device;
    let mut base = base.or_saved(args.step.config.as_deref(), args.output.load.as_deref())?;
    parts(&mut base, &args.layout, &args.model, &args.batch, device)?;
    let chosen = base.chosen();
    let Base { mut job, .. } = base;
    steps(&mut job, &args.step);
    optimiser(&mut job, &args.optimiser, chosen);
    output(&mut job, &args.output);
    job.check()?;
    let order = args.layout.reduction_order;
    started(&mut job, device, order, told)?;
    Ok(job)
}

/// The same for a subcommand that takes no step.
pub(super) fn job_without_steps(
    mut base: Base,
    layout: &LayoutArgs,
    model: &ModelArgs,
    batch: &BatchArgs,
    device: &DeviceArgs,
    told: Told<'_>,
) -> Result<Job, Failure> {
    parts(&mut base, layout, model, batch, device)?;
    base.job.check()?;
    started(&mut base.job, device, layout.reduction_order, told)?;
    Ok(base.job)
}

/// Who starts the ranks.
fn started(
    job: &mut Job,
    device: &DeviceArgs,
    order: Option<ReductionOrder>,
    told: Told<'_>,
) -> Result<(), Failure> {
    ranks::nccl(job, device.transport, order)?;
    job.ranks = ranks::ranks((device.launch, device.transport), told, job.ranks)?;
    job.launched = told.launched.is_some();
    if job.by_messages && job.ranks != Ranks::Threads {
        return Err(Failure::usage(
            "--by-messages is for threads; processes send messages over --transport unix or tcp",
        ));
    }
    ranks::fit(job, told.launched)
}

fn parts(
    base: &mut Base,
    layout: &LayoutArgs,
    model: &ModelArgs,
    batch: &BatchArgs,
    device: &DeviceArgs,
) -> Result<(), Failure> {
    let saved = base.from == Origin::Saved;
    cut(&mut base.job.layout, layout, saved);
    shape(base, model)?;
    if !saved && !gives_a_degree(layout) {
        let job = &mut base.job;
        share_experts(&mut job.layout, job.model.moe.as_ref());
    }
    lengths(base, batch);
    set(&mut base.job.dtype, device.dtype.map(Into::into));
    set(&mut base.job.device, device.device.map(Into::into));
    base.job.by_messages |= device.by_messages;
    if device.constants.is_some() {
        base.job.constants.clone_from(&device.constants);
    }
    set(&mut base.job.threads_per_rank, device.threads_per_rank);
    Ok(())
}

fn cut(layout: &mut Layout, args: &LayoutArgs, saved: bool) {
    if !saved && gives_a_degree(args) {
        *layout = Layout::single();
    }
    if args.pp.is_some_and(|pp| pp != layout.pp) {
        layout.stage_layers = None;
    }
    set(&mut layout.dp, args.dp);
    set(&mut layout.tp, args.tp);
    set(&mut layout.pp, args.pp);
    set(&mut layout.cp, args.cp);
    set(&mut layout.cp_comm, args.cp_comm.map(Into::into));
    if args.ulysses_degree.is_some() {
        layout.ulysses_degree = args.ulysses_degree;
    }
    set(&mut layout.ep, args.ep);
    set(&mut layout.etp, args.etp);
    set(&mut layout.sequence_parallel, args.sequence_parallel);
    set(
        &mut layout.zero_stage,
        args.use_distributed_optimizer
            .then_some(1)
            .or(args.zero_stage),
    );
    if args.hybrid_shard_size.is_some() {
        layout.hybrid_shard_size = args.hybrid_shard_size;
    }
    set(&mut layout.recompute, args.recompute.map(Into::into));
    // What is gathered, whole or made again only for a while should be small: a layer.
    let for_a_while = layout.zero_stage >= 2 || layout.recompute == Recompute::Full;
    let each_layer = (!saved && for_a_while).then_some(1);
    set(&mut layout.bucket_bytes, args.bucket_bytes.or(each_layer));
    set(
        &mut layout.any_order,
        args.reduction_order
            .map(|order| order == ReductionOrder::Any),
    );
    schedule(layout, args);
    if let Some(stages) = &args.pipeline_layout {
        layout.stage_layers = Some(stages.clone());
    }
}

fn gives_a_degree(args: &LayoutArgs) -> bool {
    let degrees = [args.dp, args.tp, args.pp, args.cp, args.ep, args.etp];
    degrees.iter().any(Option::is_some)
}

/// An ep that nobody asked for gives way to the model: none without experts, else the most up to it
/// that divides them.
fn share_experts(layout: &mut Layout, moe: Option<&MoeConfig>) {
    let experts = moe.map_or(1, |moe| moe.experts);
    let fits = |ep: &usize| layout.ep.is_multiple_of(*ep) && experts.is_multiple_of(*ep);
    layout.ep = (1..=layout.ep).rev().find(fits).unwrap_or(1);
}

/// A schedule brings its own number of chunks, and a number of chunks its schedule.
fn schedule(layout: &mut Layout, args: &LayoutArgs) {
    let before = (layout.schedule, layout.chunks());
    match (args.schedule, args.virtual_stages) {
        (Some(Schedule::Interleaved), None) => {
            layout.schedule = ScheduleKind::Interleaved;
            layout.virtual_stages = layout.virtual_stages.max(2);
        }
        (Some(kind), chunks) => {
            (layout.schedule, layout.virtual_stages) = (kind.into(), chunks.unwrap_or(1));
        }
        (None, Some(chunks)) => {
            if chunks > 1 && layout.schedule == ScheduleKind::OneFOneB {
                layout.schedule = ScheduleKind::Interleaved;
            }
            layout.virtual_stages = chunks;
        }
        (None, None) => {}
    }
    if before != (layout.schedule, layout.chunks()) {
        layout.stage_layers = None;
    }
}

/// A model brings its own lengths, except where somebody or the subcommand has set them.
fn shape(base: &mut Base, args: &ModelArgs) -> Result<(), Failure> {
    let (own_batch, chosen) = (base.own_batch_fits(), base.chosen());
    let job = &mut base.job;
    if let Some(name) = &args.model {
        let model = Model::named(name)?;
        job.model_name.clone_from(name);
        job.model = model.config;
        job.max_positions = model.from_file.then_some(model.max_positions);
        if own_batch {
            job.batch.seq = job.batch.seq.min(model.seq);
        } else if !chosen {
            job.batch.seq = model.seq;
            job.batch.global_batch = model.global_batch;
            job.batch.micro_batch = if name.starts_with("tiny") {
                job.batch.micro_batch
            } else {
                1
            };
        }
    }
    set(
        &mut job.model.tied,
        args.untie_embeddings_and_output_weights.map(|untie| !untie),
    );
    set(
        &mut job.model.window,
        args.window_size
            .map(|tokens| (tokens > 0).then_some(tokens)),
    );
    set(&mut job.model.dropout, args.dropout);
    set(&mut job.pack_documents, args.pack_documents);
    experts(&mut job.model, args)
}

/// Experts in place of a model's MLPs, or other rules for those it has.
fn experts(model: &mut ModelConfig, args: &ModelArgs) -> Result<(), Failure> {
    match args.num_experts {
        None => {}
        Some(0) => model.moe = None,
        Some(experts) => {
            let new = MoeConfig::new(experts, experts.min(2), model.ffn);
            model.moe.get_or_insert(new).experts = experts;
        }
    }
    let rules = [
        ("moe-router-topk", args.moe_router_topk.is_some()),
        (
            "moe-router-score-function",
            args.moe_router_score_function.is_some(),
        ),
        ("moe-aux-loss-coeff", args.moe_aux_loss_coeff.is_some()),
        ("moe-z-loss-coeff", args.moe_z_loss_coeff.is_some()),
        ("moe-capacity-factor", args.moe_capacity_factor.is_some()),
        ("moe-ffn-hidden-size", args.moe_ffn_hidden_size.is_some()),
        (
            "moe-router-pre-softmax",
            args.moe_router_pre_softmax.is_some(),
        ),
        (
            "moe-router-topk-scaling-factor",
            args.moe_router_topk_scaling_factor.is_some(),
        ),
        (
            "moe-router-enable-expert-bias",
            args.moe_router_enable_expert_bias.is_some(),
        ),
        (
            "moe-router-bias-update-rate",
            args.moe_router_bias_update_rate.is_some(),
        ),
        (
            "moe-shared-expert-intermediate-size",
            args.moe_shared_expert_intermediate_size.is_some(),
        ),
        (
            "moe-shared-expert-gate",
            args.moe_shared_expert_gate.is_some(),
        ),
    ];
    let Some(moe) = &mut model.moe else {
        return match rules.iter().find(|(_, given)| *given) {
            None => Ok(()),
            Some((flag, _)) => Err(Failure::usage(format!(
                "--{flag} is a rule for experts and the model has none; give --num-experts N or --model tiny-moe, or leave it out"
            ))),
        };
    };
    set(&mut moe.topk, args.moe_router_topk);
    set(
        &mut moe.score,
        args.moe_router_score_function.map(Into::into),
    );
    set(&mut moe.aux_loss, args.moe_aux_loss_coeff);
    set(&mut moe.z_loss, args.moe_z_loss_coeff);
    set(&mut moe.capacity_factor, args.moe_capacity_factor.map(Some));
    set(&mut moe.ffn, args.moe_ffn_hidden_size);
    set(
        &mut moe.normalize,
        args.moe_router_pre_softmax.map(|pre| !pre),
    );
    set(&mut moe.scale, args.moe_router_topk_scaling_factor);
    set(&mut moe.selection_bias, args.moe_router_enable_expert_bias);
    set(&mut moe.bias_update_rate, args.moe_router_bias_update_rate);
    set(
        &mut moe.shared_ffn,
        args.moe_shared_expert_intermediate_size,
    );
    set(&mut moe.shared_gate, args.moe_shared_expert_gate);
    Ok(())
}

fn lengths(base: &mut Base, args: &BatchArgs) {
    let own_batch = base.own_batch_fits();
    let job = &mut base.job;
    match args.data.as_deref() {
        None => {}
        Some(path) if path == Path::new("embedded") => job.data = DataSource::Embedded,
        Some(path) => job.data = DataSource::File(path.into()),
    }
    match args.seq_length {
        Some(len) => job.batch.seq = len,
        // Nobody asked for this number, so it gives way to the layout.
        None if own_batch && job.layout.cp > 1 => {
            let unit = job.layout.cp.saturating_mul(2);
            job.batch.seq = (job.batch.seq / unit).max(1).saturating_mul(unit);
        }
        None => {}
    }
    set(&mut job.batch.micro_batch, args.micro_batch_size);
    match args.global_batch_size {
        Some(samples) => job.batch.global_batch = samples,
        // Nor for this one.
        None if own_batch => {
            let unit = job.batch.micro_batch.saturating_mul(job.layout.dp).max(1);
            let wanted = job.batch.global_batch.div_ceil(unit);
            let (kind, pp) = (job.layout.schedule, job.layout.pp);
            let fits = kind.nearest_microbatches(pp, wanted).into_iter().max();
            let fits = fits.unwrap_or(wanted).checked_mul(unit);
            job.batch.global_batch = fits.unwrap_or(job.batch.global_batch);
        }
        None => {}
    }
}

fn steps(job: &mut Job, args: &StepArgs) {
    set(&mut job.steps, args.steps);
    set(&mut job.seed, args.seed);
    set(&mut job.mask_fraction, args.mask_fraction);
    job.mask_samples = args.mask_samples.or(job.mask_samples);
}

fn optimiser(job: &mut Job, args: &OptimiserArgs, chosen: bool) {
    let o = &mut job.optimizer;
    if let Some(lr) = args.lr {
        // The lowest rate keeps its share of the highest.
        o.min_lr = if o.lr > 0.0 {
            o.min_lr * lr / o.lr
        } else {
            o.min_lr.min(lr)
        };
        o.lr = lr;
    }
    if !chosen {
        o.warmup = o.warmup.min(job.steps / 10);
    }
    set(&mut o.kind, args.optimizer.map(Into::into));
    set(&mut o.min_lr, args.min_lr);
    set(&mut o.decay, args.lr_decay_style.map(Into::into));
    set(&mut o.warmup, args.lr_warmup_iters);
    set(&mut o.weight_decay, args.weight_decay);
    set(&mut o.clip_grad, args.clip_grad);
    set(&mut o.beta1, args.adam_beta1);
    set(&mut o.beta2, args.adam_beta2);
    set(&mut o.eps, args.adam_eps);
}

fn output(job: &mut Job, args: &OutputArgs) {
    set(&mut job.eval_interval, args.eval_interval);
    set(&mut job.save_interval, args.save_interval);
    set(&mut job.log_format, args.log_format.map(Into::into));
    set(&mut job.log_interval, args.log_interval);
    set(&mut job.prove, args.prove);
    set(&mut job.quiet, args.quiet);
    let paths = [
        (&mut job.save, &args.save),
        (&mut job.load, &args.load),
        (&mut job.run_dir, &args.run_dir),
        (&mut job.metrics, &args.metrics),
        (&mut job.trace, &args.trace),
        (&mut job.report, &args.report),
        (&mut job.tensorboard_dir, &args.tensorboard_dir),
        (&mut job.recorder, &args.recorder),
    ];
    let steps = [
        (&mut job.profile_step_start, args.profile_step_start),
        (&mut job.profile_step_end, args.profile_step_end),
    ];
    for (step, given) in steps {
        *step = given.or(*step);
    }
    for (path, given) in paths {
        if given.is_some() {
            path.clone_from(given);
        }
    }
}

fn set<T>(place: &mut T, given: Option<T>) {
    if let Some(value) = given {
        *place = value;
    }
}
