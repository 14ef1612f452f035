//! The command line.

mod anything;
mod files;
mod flags;
mod help;
mod launched;
mod refused;

use super::*;
use crate::failure::Exit;
use crate::job::{DataSource, Decay, Dtype, LogFormat, OptimizerKind, Over, Ranks};
use crate::model_config::Model;
use proptest::prelude::*;
use quintet_parallel_layers::Recompute;
use quintet_parallel_layers::moe::Score;
use quintet_parallel_layers::pipeline::ScheduleKind;
use quintet_planner::CpComm;
use quintet_planner::config::{Layout, MoeConfig};

fn run(line: &str) -> Result<Command, Failure> {
    let words = std::iter::once("quintet").chain(line.split_whitespace());
    parse(words, &Variables::new())
}

fn train(line: &str) -> Job {
    match run(line) {
        Ok(Command::Train(job)) => job,
        other => panic!("{line}: {other:?}"),
    }
}

fn verify(line: &str) -> Job {
    match run(line) {
        Ok(Command::Verify { job, .. }) => job,
        other => panic!("{line}: {other:?}"),
    }
}

/// Refused with exit 2, in one sentence that holds `words`.
fn refused(line: &str, words: &str) {
    let failure = run(line).expect_err(line);
    assert_eq!(failure.exit, Exit::Usage, "{line}: {failure}");
    let sentence = failure.sentence;
    assert!(sentence.contains(words), "{line}: {sentence}");
    assert!(
        !sentence.contains('\n') && !sentence.ends_with('.'),
        "{line}: {sentence}"
    );
}

/// Every flag of the contract (DESIGN, "The command line") and every spelling of Megatron's that
/// we take.
const CONTRACT: &str = "data-parallel-size tensor-parallel-size pipeline-parallel-size \
    context-parallel-size expert-parallel-size expert-tensor-parallel-size dp tp pp cp ep etp \
    tensor-model-parallel-size pipeline-model-parallel-size expert-model-parallel-size \
    sequence-parallel zero-stage use-distributed-optimizer schedule virtual-stages \
    num-virtual-stages-per-pipeline-rank cp-comm cp-comm-type recompute recompute-granularity \
    ulysses-degree pipeline-layout pipeline-model-parallel-layout hybrid-shard-size bucket-bytes \
    reduction-order model dropout window-size pack-documents \
    untie-embeddings-and-output-weights num-experts moe-router-topk moe-router-score-function \
    moe-aux-loss-coeff moe-z-loss-coeff moe-capacity-factor moe-expert-capacity-factor \
    moe-ffn-hidden-size moe-router-pre-softmax moe-router-topk-scaling-factor \
    moe-router-enable-expert-bias moe-router-bias-update-rate \
    moe-shared-expert-intermediate-size moe-shared-expert-gate optimizer \
    lr min-lr lr-decay-style lr-warmup-iters weight-decay clip-grad adam-beta1 adam-beta2 adam-eps \
    eval-interval steps train-iters micro-batch-size mbs global-batch-size gbs seq-length seq-len \
    seed data data-path dtype device launch transport constants threads-per-rank save load save-interval \
    run-dir metrics trace profile-step-start profile-step-end report tensorboard-dir log-format config mask-fraction \
    mask-samples prove quiet";
