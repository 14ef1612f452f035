//! Would the suite notice? Faults of the kinds that users of other frameworks have reported are
//! planted into sound ranks, and each must be caught, by the comparison that is meant for it.
//!
//! Nothing here changes product code: a rank's parts are public, and are rebuilt from a changed
//! ledger, partition, schedule or group before the first step.

mod common;

use std::collections::BTreeSet;

use common::{cut, plant, samples_of, small_job, with};
use quintet_collectives::transport::local::World;
use quintet_collectives::{Axis, Factor, Placement, ProcessGroup};
use quintet_parallel_layers::pipeline::{Action, Reduction, Schedule, ScheduleKind};
use quintet_planner::config::Layout;
use quintet_planner::model::stage_layers;
use quintet_ref_trainer::data::{RandomMask, Samples};
use quintet_ref_trainer::failure::Failure;
use quintet_ref_trainer::job::Job;
use quintet_ref_trainer::oracle::{EMBEDDING, FINAL_NORM};
use quintet_ref_trainer::rank::Begin;
use quintet_ref_trainer::record::{Recorded, record_on};
use quintet_ref_trainer::verify::{Evidence, Verdict, evidence, judge};
use quintet_zero::{ParamStore, Partition, ZeroStage};

type Plant = fn(&mut Recorded<'_, f64>) -> Result<(), Failure>;

/// The comparisons of a proof in which a fault shows; `refused` where the run does not get that
/// far.
fn found(outcome: &Result<Verdict, Failure>) -> BTreeSet<&'static str> {
    let Ok(v) = outcome else {
        return BTreeSet::from(["refused"]);
    };
    let beyond = |value: f64| value >= v.bound;
    let all = [
        ("loss", beyond(v.loss_rel)),
        ("gradients", beyond(v.grad_rel_max)),
        ("norm", beyond(v.grad_norm_rel)),
        ("parameters", beyond(v.param_rel_max)),
        ("copies", !v.copies_differ.is_empty()),
        ("bytes", v.bytes_counted != v.bytes_predicted),
        ("memory", !v.memory_differs.is_empty()),
    ];
    let found: BTreeSet<_> = all
        .into_iter()
        .filter(|(_, seen)| *seen)
        .map(|(name, _)| name)
        .collect();
    assert_eq!(v.ok, found.is_empty(), "{v:#?}");
    found
}

/// Some tokens of some samples do not count, so that replicas have unequal shares.
fn samples(job: &Job) -> Samples {
    samples_of(job).with_mask(RandomMask {
        tokens: 0.3,
        samples: 0.2,
    })
}

fn run(job: &Job, clean: &Evidence, plant: Plant) -> Result<Verdict, Failure> {
    let world = World::new(job.layout.world())?;
    let ours = record_on::<f64>(&world, job, &samples(job), Begin::Random, plant)?;
    Ok(judge(
        job,
        &Evidence {
            ours,
            ..clean.clone()
        },
    ))
}

/// A fault is nothing without `plant`, and with it is seen by each of `by`.
fn caught(what: &str, job: &Job, plant: Plant, by: &[&str]) {
    job.check().expect("a valid job");
    let clean = evidence(job, &samples(job)).expect("a proof");
    assert_eq!(
        found(&Ok(judge(job, &clean))),
        BTreeSet::new(),
        "{what}: nothing is planted yet"
    );
    let outcome = run(job, &clean, plant);
    let seen = found(&outcome);
    let told = outcome.err().map_or(String::new(), |e| format!(": {e}"));
    println!("{what:<60} {seen:?}{told}");
    let missed: Vec<_> = by.iter().filter(|name| !seen.contains(**name)).collect();
    assert!(
        missed.is_empty(),
        "{what}: not seen by {missed:?}, only by {seen:?}"
    );
}

fn job(dp: usize, tp: usize, pp: usize, change: impl FnOnce(&mut Layout)) -> Job {
    with(&cut(&small_job(), (dp, tp, pp)), change)
}

fn place(at_use: &mut [(Factor, Placement)], axis: Axis, from: Placement, to: Placement) {
    for (_, p) in at_use
        .iter_mut()
        .filter(|(f, p)| f.axis == axis && *p == from)
    {
        *p = to;
    }
}

use Placement::{Invariant, Replicate};

#[test]
fn norms_under_sequence_parallelism_that_nobody_sums() {
    let job = job(1, 2, 1, |l| l.sequence_parallel = true);
    let plant: Plant = |rank| {
        plant::ledger(rank, |line| {
            if line.name.contains("norm") {
                place(&mut line.at_use, Axis::Tp, Replicate, Invariant);
            }
        })
    };
    caught(
        "norms under sequence-parallel: not summed",
        &job,
        plant,
        &["gradients", "copies", "bytes"],
    );
}

#[test]
fn norms_that_are_summed_though_every_rank_has_the_whole() {
    let plant: Plant = |rank| {
        plant::ledger(rank, |line| {
            if line.name == FINAL_NORM {
                place(&mut line.at_use, Axis::Tp, Invariant, Replicate);
            }
        })
    };
    // Twice the gradient on both ranks: their copies agree, only a reference can tell.
    caught(
        "a norm without sequence-parallel: summed",
        &job(1, 2, 1, |_| ()),
        plant,
        &["gradients", "norm"],
    );
}

#[test]
fn shared_kv_heads_that_nobody_sums() {
    let plant: Plant = |rank| {
        plant::ledger(rank, |line| {
            if line.name.contains("k_proj") || line.name.contains("v_proj") {
                place(&mut line.at_use, Axis::Tp, Replicate, Invariant);
            }
        })
    };
    caught(
        "2 KV heads on tp 4: copies not summed",
        &job(1, 4, 1, |_| ()),
        plant,
        &["gradients", "copies"],
    );
}

#[test]
fn replicas_that_nobody_sums() {
    let plant: Plant = |rank| {
        plant::ledger(rank, |line| {
            place(&mut line.at_use, Axis::Dp, Replicate, Invariant)
        })
    };
    caught(
        "replicas: nothing summed",
        &job(2, 1, 1, |_| ()),
        plant,
        &["gradients", "copies", "bytes"],
    );
}

#[test]
fn one_parameter_that_the_sum_over_replicas_forgets() {
    let plant: Plant = |rank| {
        plant::ledger(rank, |line| {
            if line.name.ends_with("1.mlp.up_proj.weight") {
                place(&mut line.at_use, Axis::Dp, Replicate, Invariant);
            }
        })
    };
    let job = job(2, 2, 2, |l| l.zero_stage = 1);
    caught(
        "replicas: one parameter not summed",
        &job,
        plant,
        &["gradients", "copies", "bytes"],
    );
}

#[test]
fn a_tied_table_whose_copies_are_strangers() {
    let mut job = job(1, 1, 2, |_| ());
    job.model.tied = true;
    caught(
        "a tied table: copies not summed",
        &job,
        plant::untie,
        &["refused"],
    );
}

#[test]
fn norms_that_decay() {
    let mut job = job(2, 1, 1, |_| ());
    job.optimizer.weight_decay = 0.1;
    let plant: Plant = |rank| plant::ledger(rank, |line| line.decay = true);
    caught("weight decay of norms", &job, plant, &["parameters"]);
}

#[test]
fn a_mean_of_the_means_of_replicas() {
    let plant: Plant = |rank| {
        let alone = ProcessGroup::new(vec![rank.rank], rank.rank)?;
        rank.groups.data = rank.groups.world.subgroup(&alone, "alone")?;
        Ok(())
    };
    caught(
        "each replica divides by its own count",
        &job(2, 1, 1, |_| ()),
        plant,
        &["gradients", "loss", "bytes"],
    );
}

#[test]
fn a_microbatch_that_is_left_out() {
    let plant: Plant = |rank| {
        let s = &rank.schedule;
        let segments = vec![1; s.stages()];
        rank.schedule = Schedule::new(s.kind(), s.stages(), s.microbatches() - 1, &segments)?;
        rank.actions = rank.schedule.actions(rank.stage_index());
        Ok(())
    };
    caught(
        "the last microbatch is not run",
        &job(1, 1, 2, |_| ()),
        plant,
        &["gradients", "loss", "bytes"],
    );
}

#[test]
fn a_bucket_whose_reduction_is_left_out() {
    // One segment less in the schedule: its bucket is never asked for.
    let plant: Plant = |rank| {
        let s = &rank.schedule;
        let segments = vec![rank.chunks[0].segments.len() - 1; s.stages()];
        rank.schedule = Schedule::new(s.kind(), s.stages(), s.microbatches(), &segments)?;
        rank.actions = rank.schedule.actions(rank.stage_index());
        Ok(())
    };
    caught(
        "a bucket is not reduced",
        &job(2, 1, 1, |l| l.bucket_bytes = 1),
        plant,
        &["refused"],
    );
}

#[test]
fn a_reduction_that_only_one_rank_starts() {
    // Rank 0 cuts its gradients into other buckets than its replica does.
    let plant: Plant = |rank| {
        let first = rank.rank == 0;
        plant::ledger(rank, |line| {
            if first && line.name == FINAL_NORM {
                place(&mut line.at_use, Axis::Dp, Replicate, Invariant);
            }
        })
    };
    caught(
        "replicas issue different sums",
        &job(2, 1, 1, |_| ()),
        plant,
        &["refused"],
    );
}

#[test]
fn owners_that_step_on_what_they_do_not_own() {
    let job = job(2, 1, 1, |l| l.zero_stage = 1);
    let plant: Plant = |rank| plant::stages(rank, ZeroStage::One, ZeroStage::Ddp);
    caught(
        "gradients scattered, optimizer whole",
        &job,
        plant,
        &["parameters", "copies", "bytes"],
    );
}

#[test]
fn a_sum_that_is_right_but_sent_twice() {
    let job = job(2, 1, 1, |l| l.zero_stage = 1);
    let plant: Plant = |rank| plant::stages(rank, ZeroStage::Ddp, ZeroStage::One);
    caught(
        "gradients whole, optimizer scattered",
        &job,
        plant,
        &["bytes"],
    );
}

#[test]
fn gradients_that_are_reduced_twice() {
    let plant: Plant = |rank| {
        let each = rank
            .schedule
            .clone()
            .with_reduction(Reduction::EachMicrobatch);
        rank.actions = each.actions(rank.stage_index());
        Ok(())
    };
    let job = job(2, 1, 1, |l| l.zero_stage = 1);
    caught(
        "sums of two microbatches, each sent",
        &job,
        plant,
        &["refused"],
    );
}

#[test]
fn microbatches_whose_reduction_is_left_out() {
    let plant: Plant = |rank| {
        let once = rank.schedule.clone().with_reduction(Reduction::Once);
        rank.actions = once.actions(rank.stage_index());
        Ok(())
    };
    // The sum is right: it is only taken later, of whole gradients that should have gone.
    let job = job(2, 1, 1, |l| l.zero_stage = 2);
    let by = ["bytes", "memory"];
    caught("zero 2: reduced once a step", &job, plant, &by);
}

#[test]
fn a_microbatch_whose_reduction_is_left_out() {
    let plant: Plant = |rank| {
        let first: fn(&Action) -> bool = |a| matches!(a, Action::ReduceGrads { bucket: 0, .. });
        plant::actions(rank, 0, |actions| {
            if let Some(at) = actions.iter().position(first) {
                actions.remove(at);
            }
        });
        Ok(())
    };
    // Its gradient waits for the next microbatch's: the sum is right, and one sum less is sent.
    let job = job(2, 1, 1, |l| (l.zero_stage, l.bucket_bytes) = (2, 1));
    caught("zero 2: one reduction left out", &job, plant, &["bytes"]);
    let plant: Plant = |rank| {
        plant::actions(rank, 0, |actions| {
            let last = |a: &Action| matches!(a, Action::ReduceGrads { bucket: 0, .. });
            if let Some(at) = actions.iter().rposition(last) {
                actions.remove(at);
            }
        });
        Ok(())
    };
    caught(
        "zero 2: the last reduction left out",
        &job,
        plant,
        &["refused"],
    );
}

#[test]
fn parameters_that_are_gathered_once_and_kept() {
    let plant: Plant = |rank| {
        for chunk in &mut rank.chunks {
            for bucket in 0..chunk.segments.len() {
                chunk.params.gather(&rank.groups, bucket)?;
            }
        }
        Ok(())
    };
    let job = job(2, 1, 2, |l| l.zero_stage = 3);
    caught("zero 3: kept over a step", &job, plant, &["refused"]);
}

#[test]
fn chunks_that_are_whole_beside_chunks_that_are_not() {
    let plant: Plant = |rank| {
        for chunk in &mut rank.chunks {
            let whole = Partition::new(chunk.params.layout().clone(), ZeroStage::Two);
            chunk.params = ParamStore::zeros(&rank.device, &whole)?;
        }
        plant::set(rank, |_, _, was| was)
    };
    let job = job(2, 2, 1, |l| l.zero_stage = 3);
    // Nothing is gathered before use nor after the step: replicas drift apart.
    let by = ["parameters", "copies", "bytes", "memory"];
    caught("zero 3: parameters whole", &job, plant, &by);
}

#[test]
fn shards_among_other_replicas_than_is_said() {
    let plant: Plant = |rank| plant::sharded_within(rank, None);
    let mut job = job(4, 1, 1, |l| {
        (l.zero_stage, l.hybrid_shard_size) = (3, Some(2));
    });
    job.batch.global_batch = 16;
    let by = ["bytes", "memory"];
    caught("hybrid: shards among all replicas", &job, plant, &by);
}

#[test]
fn a_replica_that_begins_with_other_weights() {
    let plant: Plant = |rank| {
        let off = if rank.rank == 1 { 1.0 + 1e-6 } else { 1.0 };
        plant::set(
            rank,
            |name, _, was| if name == EMBEDDING { was * off } else { was },
        )
    };
    caught(
        "a replica begins 1e-6 off",
        &job(2, 1, 1, |_| ()),
        plant,
        &["gradients", "loss", "copies"],
    );
}

#[test]
fn a_stage_of_another_model() {
    let plant: Plant = |rank| {
        let mut model = rank.job.model.clone();
        model.rope_theta *= 1.0 + 1e-4;
        if rank.stage_index() == 1 {
            let layers = stage_layers(&model, &rank.job.layout, &rank.mesh, 1, 0)?;
            rank.chunks[0].model.layers = layers;
        }
        Ok(())
    };
    caught(
        "a stage turns positions by another base",
        &job(1, 1, 2, |_| ()),
        plant,
        &["gradients", "loss"],
    );
}

/// Two stages of two chunks.
fn chunked(kind: ScheduleKind, dp: usize, tied: bool) -> Job {
    let mut job = job(dp, 1, 2, |l| {
        l.schedule = kind;
        l.virtual_stages = if kind == ScheduleKind::Interleaved {
            2
        } else {
            1
        };
    });
    job.model.tied = tied;
    job
}

fn place_of(actions: &[Action], wanted: impl Fn(&Action) -> bool) -> usize {
    actions.iter().position(wanted).expect("such an action")
}

#[test]
fn the_wrong_chunk_is_taken_for_the_last() {
    // The gradients of a chunk are reduced when another has had its last microbatch.
    let plant: Plant = |rank| {
        plant::actions(rank, 1, |actions| {
            let reduces = |wanted| move |a: &Action| matches!(a, Action::ReduceGrads { chunk, .. } if *chunk == wanted);
            let (one, other) = (place_of(actions, reduces(1)), place_of(actions, reduces(0)));
            actions.swap(one, other);
        });
        Ok(())
    };
    for kind in [ScheduleKind::Interleaved, ScheduleKind::DualPipeV] {
        caught(
            "the wrong chunk last for the gradient sum",
            &chunked(kind, 2, false),
            plant,
            &["refused"],
        );
    }
}

#[test]
fn a_table_that_two_chunks_of_a_stage_both_count() {
    caught(
        "a table on the ends of a V: two copies",
        &chunked(ScheduleKind::DualPipeV, 1, true),
        plant::lend_nothing,
        &["refused"],
    );
}

#[test]
fn a_table_on_the_ends_of_the_pipeline_whose_copies_are_strangers() {
    caught(
        "a tied table, interleaved: copies not summed",
        &chunked(ScheduleKind::Interleaved, 1, true),
        plant::untie,
        &["refused"],
    );
}

#[test]
fn weights_taken_with_another_microbatchs_activations() {
    let plant: Plant = |rank| {
        plant::actions(rank, 1, |actions| {
            let first = |a: &Action| matches!(a, Action::BackwardWeight { mb: 0, .. });
            let at = place_of(actions, first);
            if let Action::BackwardWeight { mb, .. } = &mut actions[at] {
                *mb = 1;
            }
        });
        Ok(())
    };
    caught(
        "W of microbatch 0 with what 1 has saved",
        &job(1, 1, 2, |l| l.schedule = ScheduleKind::ZbH1),
        plant,
        &["refused"],
    );
}

#[test]
fn two_activations_that_change_places() {
    let plant: Plant = |rank| {
        plant::actions(rank, 0, |actions| {
            let sends = |wanted| move |a: &Action| matches!(a, Action::SendForward { mb, .. } if *mb == wanted);
            let (one, other) = (place_of(actions, sends(0)), place_of(actions, sends(1)));
            actions.swap(one, other);
        });
        Ok(())
    };
    caught(
        "a swapped pair of sends",
        &job(1, 1, 2, |l| l.schedule = ScheduleKind::ZbH1),
        plant,
        &["refused"],
    );
}

#[test]
fn a_v_whose_turning_chunks_lie_the_other_way_round() {
    // As a looped stage would have them: the weights of each are those of the other's layers.
    let plant: Plant = |rank| {
        if rank.stage_index() == 1 {
            rank.chunks.swap(0, 1);
        }
        Ok(())
    };
    caught(
        "the chunks of a stage change places",
        &chunked(ScheduleKind::DualPipeV, 1, false),
        plant,
        &["gradients", "loss"],
    );
}
