//! Lists of actions that leave something out, do it twice, too early, or with the wrong chunk.

use quintet_parallel_layers::pipeline::{Action, Reduction, ScheduleKind};
use quintet_ref_trainer::failure::Failure;
use quintet_ref_trainer::job::Job;
use quintet_ref_trainer::record::Recorded;

use super::{Fault, fault, replicas};
use crate::common::plant;

pub fn faults() -> Vec<Fault> {
    [passes(), sends(), reductions()].concat()
}

/// The microbatch of an action, where it has one.
fn microbatch(action: &Action) -> Option<usize> {
    match *action {
        Action::Forward { mb, .. }
        | Action::BackwardInput { mb, .. }
        | Action::BackwardWeight { mb, .. }
        | Action::RecvForward { mb, .. }
        | Action::SendForward { mb, .. }
        | Action::RecvBackward { mb, .. }
        | Action::SendBackward { mb, .. } => Some(mb),
        _ => None,
    }
}

fn microbatches(job: &Job) -> usize {
    job.batch.microbatches() / job.layout.dp
}

fn several(job: &Job) -> bool {
    microbatches(job) > 1
}

/// Changes the actions of every stage.
fn everywhere(
    rank: &mut Recorded<'_, f64>,
    change: impl Fn(&mut Vec<Action>),
) -> Result<(), Failure> {
    let stage = rank.stage_index();
    plant::actions(rank, stage, change);
    Ok(())
}

fn passes() -> Vec<Fault> {
    vec![
        fault("the last microbatch is not run", several, |rank| {
            let last = microbatches(rank.job) - 1;
            everywhere(rank, |actions| {
                actions.retain(|a| microbatch(a) != Some(last))
            })
        }),
        fault(
            "the last weight half is dropped",
            |_| true,
            |rank| {
                everywhere(rank, |actions| {
                    let weight = |a: &Action| matches!(a, Action::BackwardWeight { .. });
                    if let Some(at) = actions.iter().rposition(weight) {
                        actions.remove(at);
                    }
                })
            },
        ),
        fault(
            "the weight halves of the last microbatch are dropped",
            several,
            |rank| {
                let last = microbatches(rank.job) - 1;
                everywhere(rank, |actions| {
                    let dropped =
                        |a: &Action| matches!(a, Action::BackwardWeight { mb, .. } if *mb == last);
                    actions.retain(|a| !dropped(a));
                })
            },
        ),
        fault(
            "a weight half is done twice",
            |_| true,
            |rank| {
                everywhere(rank, |actions| {
                    let weight = |a: &Action| matches!(a, Action::BackwardWeight { .. });
                    if let Some(at) = actions.iter().position(weight) {
                        actions.insert(at, actions[at]);
                    }
                })
            },
        ),
        fault(
            "weights are taken with another microbatch's activations",
            |job| job.layout.schedule == ScheduleKind::ZbH1 && several(job) && job.layout.pp > 1,
            |rank| {
                everywhere(rank, |actions| {
                    let first = |a: &&mut Action| matches!(a, Action::BackwardWeight { mb: 0, .. });
                    if let Some(Action::BackwardWeight { mb, .. }) = actions.iter_mut().find(first)
                    {
                        *mb = 1;
                    }
                })
            },
        ),
        fault(
            "a first forward is run twice, and counted twice",
            |_| true,
            |rank| {
                let first_stage = rank.schedule.route().home(0).map(|(stage, _)| stage);
                if Some(rank.stage_index()) != first_stage {
                    return Ok(());
                }
                let chunk = rank.schedule.route().home(0).map_or(0, |(_, chunk)| chunk);
                everywhere(rank, |actions| {
                    let first =
                        |a: &Action| matches!(*a, Action::Forward { chunk: c, .. } if c == chunk);
                    if let Some(at) = actions.iter().position(first) {
                        actions.insert(at, actions[at]);
                    }
                })
            },
        ),
        fault(
            "the chunks of the last stage lie the other way round",
            |job| job.layout.chunks() > 1,
            |rank| {
                if rank.stage_index() + 1 == rank.job.layout.pp {
                    rank.chunks.reverse();
                }
                Ok(())
            },
        ),
    ]
}

fn sends() -> Vec<Fault> {
    vec![
        fault(
            "two activations change places",
            |job| job.layout.pp > 1 && several(job),
            |rank| {
                everywhere(rank, |actions| {
                    let is = |wanted| move |a: &Action| matches!(a, Action::SendForward { mb, .. } if *mb == wanted);
                    let one = actions.iter().position(is(0));
                    if let (Some(one), Some(other)) = (one, actions.iter().position(is(1))) {
                        actions.swap(one, other);
                    }
                })
            },
        ),
        fault(
            "activations are sent under each other's number",
            |job| job.layout.pp > 1 && several(job),
            |rank| {
                everywhere(rank, |actions| {
                    for action in actions.iter_mut() {
                        if let Action::SendForward { mb, .. } | Action::Forward { mb, .. } = action
                            && *mb < 2
                        {
                            *mb = 1 - *mb;
                        }
                    }
                })
            },
        ),
    ]
}

fn bucket_0(action: &Action) -> bool {
    matches!(
        action,
        Action::ReduceGrads {
            chunk: 0,
            bucket: 0
        }
    )
}

fn each_microbatch(job: &Job) -> bool {
    job.layout.zero_stage > 1 && several(job) && replicas(job) > 1
}

fn reductions() -> Vec<Fault> {
    vec![
        fault(
            "a bucket is not reduced",
            |_| true,
            |rank| everywhere(rank, |actions| actions.retain(|a| !bucket_0(a))),
        ),
        fault(
            "ZeRO 0 and 1: reduced after each microbatch",
            |job| job.layout.zero_stage < 2 && several(job),
            |rank| {
                let each = rank
                    .schedule
                    .clone()
                    .with_reduction(Reduction::EachMicrobatch);
                rank.actions = each.actions(rank.stage_index());
                Ok(())
            },
        ),
        fault(
            "ZeRO 2 and 3: reduced once a step",
            each_microbatch,
            |rank| {
                let once = rank.schedule.clone().with_reduction(Reduction::Once);
                rank.actions = once.actions(rank.stage_index());
                Ok(())
            },
        ),
        fault(
            "ZeRO 2 and 3: the first reduction left out",
            each_microbatch,
            |rank| {
                everywhere(rank, |actions| {
                    if let Some(at) = actions.iter().position(bucket_0) {
                        actions.remove(at);
                    }
                })
            },
        ),
        fault(
            "ZeRO 2 and 3: the last reduction left out",
            each_microbatch,
            |rank| {
                everywhere(rank, |actions| {
                    if let Some(at) = actions.iter().rposition(bucket_0) {
                        actions.remove(at);
                    }
                })
            },
        ),
        fault(
            "the wrong chunk is taken for the last",
            |job| job.layout.chunks() > 1,
            |rank| {
                everywhere(rank, |actions| {
                    let of = |wanted| move |a: &Action| matches!(a, Action::ReduceGrads { chunk, .. } if *chunk == wanted);
                    let one = actions.iter().rposition(of(1));
                    if let (Some(one), Some(other)) = (one, actions.iter().rposition(of(0))) {
                        actions.swap(one, other);
                    }
                })
            },
        ),
        fault(
            "a reduction is begun before the last weights are in",
            |_| true,
            |rank| {
                everywhere(rank, |actions| {
                    let reduce = |a: &Action| matches!(a, Action::ReduceGrads { .. });
                    if let Some(at) = actions.iter().rposition(reduce) {
                        let weight = |a: &Action| matches!(a, Action::BackwardWeight { .. });
                        if let Some(before) = actions[..at].iter().rposition(weight) {
                            let action = actions.remove(at);
                            actions.insert(before, action);
                        }
                    }
                })
            },
        ),
    ]
}
