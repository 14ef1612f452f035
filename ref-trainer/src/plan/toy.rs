//! The best layout's shape at toy scale, run on CPU ranks: predicted beside counted.

use quintet_planner::config::{Batch, Layout};
use quintet_planner::search::{Candidate, Request};

use crate::failure::Failure;
use crate::forecast::samples;
use crate::job::{Job, OptimizerKind, OptimizerOptions};
use crate::model_config::Model;
use crate::verify::verify;

/// Runs and tells.
///
/// # Errors
/// Where the toy cannot run; a difference from one device is exit 4.
pub(super) fn run(request: &Request, candidate: &Candidate) -> Result<String, Failure> {
    let job = job(request, candidate);
    let l = &job.layout;
    let verdict = verify(&job, &samples(&job)?)?;
    if !verdict.ok {
        return Err(Failure::mismatch(format!(
            "the toy run differs from one device: {verdict}"
        )));
    }
    Ok(format!(
        "\nthe same shape at toy scale, on {} CPU ranks: tp {} x pp {} x cp {} x dp {}, ep {} x etp {}, zero {}, {}, {} chunk(s) a stage, recompute {}\n{verdict}",
        l.world(),
        l.tp,
        l.pp,
        l.cp,
        l.dp,
        l.ep,
        l.etp,
        l.zero_stage,
        l.schedule,
        l.chunks(),
        l.recompute.name()
    ))
}

/// Every axis that is used has two ranks; schedule, ZeRO stage, recompute and the way of cp are
/// those of the plan.
fn job(request: &Request, candidate: &Candidate) -> Job {
    let from = &candidate.layout;
    let two = |degree: usize| degree.min(2);
    let experts = request.shape.config.moe.is_some();
    let mut model = if experts {
        Model::tiny_moe()
    } else {
        Model::tiny()
    };
    let layout = Layout {
        tp: two(from.tp),
        pp: two(from.pp),
        cp: two(from.cp),
        dp: two(from.dp),
        ep: two(from.ep),
        etp: two(from.etp),
        ulysses_degree: None,
        virtual_stages: two(from.virtual_stages),
        stage_layers: None,
        hybrid_shard_size: None,
        ..from.clone()
    };
    model.config.tied = request.shape.config.tied;
    let mut layout = layout;
    let folded = layout.dp * layout.cp * layout.tp;
    while !folded.is_multiple_of(layout.ep * layout.etp) {
        layout.ep -= 1;
    }
    let base = Job::verify();
    Job {
        model_name: String::from("tiny"),
        model: model.config,
        batch: Batch {
            micro_batch: 1,
            global_batch: layout.dp * 2 * layout.pp,
            ..base.batch
        },
        layout,
        steps: 1,
        // With moments, so that there is an optimizer's memory to compare.
        optimizer: OptimizerOptions {
            kind: OptimizerKind::AdamW,
            ..base.optimizer
        },
        ..base
    }
}
