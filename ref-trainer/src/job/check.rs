//! What a job may hold. Bounds come first, so that no later sum or product can overflow.

use quintet_planner::config::validate;

use super::{Decay, Job, OptimizerKind};
use crate::failure::Failure;

/// Ranks are threads of one process; more than this is a slip of the finger.
pub(super) const MOST_RANKS: usize = 1024;
const MOST: usize = 1 << 24;
const MOST_STEPS: u64 = 1 << 40;

pub(super) fn check(job: &Job) -> Result<(), Failure> {
    bounds(job)?;
    validate(&job.model, &job.layout, &job.batch)?;
    let world = job.layout.world();
    if world > MOST_RANKS {
        return Err(Failure::usage(format!(
            "the layout has {world} ranks, and ranks run as threads: at most {MOST_RANKS}"
        )));
    }
    optimizer(job)?;
    run(job)
}

fn bounds(job: &Job) -> Result<(), Failure> {
    let (l, b, m) = (&job.layout, &job.batch, &job.model);
    let lengths = [
        ("dp", l.dp, MOST_RANKS),
        ("tp", l.tp, MOST_RANKS),
        ("pp", l.pp, MOST_RANKS),
        ("cp", l.cp, MOST_RANKS),
        ("ulysses-degree", l.ulysses(), MOST_RANKS),
        ("ep", l.ep, MOST_RANKS),
        ("etp", l.etp, MOST_RANKS),
        (
            "hybrid-shard-size",
            l.hybrid_shard_size.unwrap_or(1),
            MOST_RANKS,
        ),
        ("virtual-stages", l.virtual_stages, 1 << 16),
        ("seq-length", b.seq, MOST),
        ("micro-batch-size", b.micro_batch, MOST),
        ("global-batch-size", b.global_batch, MOST),
        ("threads-per-rank", job.threads_per_rank, MOST_RANKS),
        ("the model's vocab", m.vocab, MOST),
        ("the model's hidden", m.hidden, 1 << 20),
        ("the model's layers", m.layers, 1 << 16),
        ("the model's heads", m.heads, 1 << 16),
        ("the model's kv_heads", m.kv_heads, 1 << 16),
        ("the model's head_dim", m.head_dim, 1 << 16),
        ("the model's ffn", m.ffn, 1 << 20),
        ("window-size", m.window.unwrap_or(0), MOST),
    ];
    let moe = m.moe.iter().flat_map(|moe| {
        [
            ("num-experts", moe.experts, 1 << 14),
            ("moe-router-topk", moe.topk, 1 << 14),
            ("moe-ffn-hidden-size", moe.ffn, 1 << 20),
            (
                "moe-shared-expert-intermediate-size",
                moe.shared_ffn,
                1 << 20,
            ),
        ]
    });
    for (name, value, most) in lengths.into_iter().chain(moe) {
        if value > most {
            return Err(Failure::usage(format!("{name} is {value}; at most {most}")));
        }
    }
    for &blocks in l.stage_layers.iter().flatten() {
        if blocks > m.layers {
            return Err(Failure::usage(format!(
                "pipeline-layout puts {blocks} layers on a stage of a model of {}",
                m.layers
            )));
        }
    }
    Ok(())
}

fn optimizer(job: &Job) -> Result<(), Failure> {
    let o = &job.optimizer;
    let at_least_zero = [
        ("lr", o.lr),
        ("min-lr", o.min_lr),
        ("weight-decay", o.weight_decay),
        ("clip-grad", o.clip_grad),
    ];
    for (name, value) in at_least_zero {
        if !value.is_finite() || value < 0.0 {
            return no(format!(
                "{name} is {value}; it must be a number of at least 0"
            ));
        }
    }
    for (name, value) in [("adam-beta1", o.beta1), ("adam-beta2", o.beta2)] {
        if !(0.0..1.0).contains(&value) {
            return no(format!(
                "{name} is {value}; it must be at least 0 and less than 1"
            ));
        }
    }
    if o.kind == OptimizerKind::AdamW && !(o.eps.is_finite() && o.eps > 0.0) {
        return no(format!("adam-eps is {}; it must be more than 0", o.eps));
    }
    if o.decay != Decay::Constant && o.min_lr > o.lr {
        return no(format!(
            "min-lr {} is more than lr {}; the rate falls from lr to min-lr",
            o.min_lr, o.lr
        ));
    }
    Ok(())
}

fn run(job: &Job) -> Result<(), Failure> {
    if !(0.0..1.0).contains(&job.mask_fraction) {
        return no(format!(
            "mask-fraction is {}; it must be at least 0 and less than 1",
            job.mask_fraction
        ));
    }
    let samples = job.mask_samples.unwrap_or(0.0);
    if !(0.0..=1.0).contains(&samples) {
        return no(format!("mask-samples is {samples}; it must be from 0 to 1"));
    }
    if job.steps == 0 || job.steps > MOST_STEPS {
        return no(format!(
            "steps is {}; it must be from 1 to {MOST_STEPS}",
            job.steps
        ));
    }
    if let Some(most) = job.max_positions
        && job.batch.seq > most
    {
        return no(format!(
            "seq-length {} is more than the {most} positions that {} is made for (max_position_embeddings); use at most {most}",
            job.batch.seq, job.model_name
        ));
    }
    if job.threads_per_rank == 0 {
        return no("threads-per-rank is 0; it must be at least 1".into());
    }
    let (start, end) = (job.profile_step_start, job.profile_step_end);
    if let Some(start) = start.filter(|start| *start >= job.steps) {
        return no(format!(
            "profile-step-start is {start}; the recording must begin before the last step, {}",
            job.steps
        ));
    }
    if let Some(end) = end.filter(|end| *end <= start.unwrap_or(0)) {
        return no(format!(
            "profile-step-end is {end}; the recording must end after it begins, at {} or later",
            start.unwrap_or(0) + 1
        ));
    }
    if job.save_interval > 0 && job.save.is_none() {
        return no("save-interval is given but no folder to save to; add --save DIR".into());
    }
    Ok(())
}

fn no(sentence: String) -> Result<(), Failure> {
    Err(Failure::usage(sentence))
}
