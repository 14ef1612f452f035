//! What must not change a single bit, and that what does change some is not called equal.
//!
//! ```text
//! against the twin          stages under any schedule and cut, threads per rank
//! against each other        ZeRO 0 and 1, 2 and 3, bucket lengths, room on the transport, run after run,
//!                           what backward computes again
//! not bit-equal, but right  tp, dp, a table tied over stages
//! ```

mod common;

use common::{cut, first_difference, samples_of, small_job, with};
use quintet_collectives::transport::local::World;
use quintet_parallel_layers::moe::Score;
use quintet_parallel_layers::pipeline::ScheduleKind;
use quintet_parallel_layers::{Architecture, Recompute};
use quintet_planner::config::{CpComm, MoeConfig};
use quintet_ref_trainer::data::RandomMask;
use quintet_ref_trainer::job::{Dtype, Job};
use quintet_ref_trainer::rank::Begin;
use quintet_ref_trainer::record::{Step, record, record_on};
use quintet_ref_trainer::verify::{twin_of, verify};

fn steps(job: &Job) -> Vec<Step> {
    record(job, &samples_of(job), Begin::Random)
        .expect("a run")
        .steps
}

/// The job in every type.
fn in_every_type(job: &Job) -> [Job; 3] {
    [Dtype::F64, Dtype::F32, Dtype::Bf16].map(|dtype| Job {
        dtype,
        ..job.clone()
    })
}

fn assert_same(what: &str, a: &[Step], b: &[Step]) {
    assert_eq!(first_difference(a, b, false), None, "{what}");
}

fn assert_same_but_norm(what: &str, a: &[Step], b: &[Step]) {
    assert_eq!(first_difference(a, b, true), None, "{what}");
}

#[test]
fn stages_have_the_twins_bits() {
    for job in in_every_type(&deep_job()) {
        let twin = steps(&twin_of(&job));
        for (pp, uneven) in [(2, false), (2, true), (3, false), (4, false), (4, true)] {
            for schedule in ScheduleKind::ALL {
                let job = with(&cut(&job, (1, 1, pp)), |l| {
                    l.schedule = schedule;
                    l.virtual_stages = if schedule.chunks().is_none() { 2 } else { 1 };
                    // All that is more than one layer a chunk goes to the second.
                    let mut counts = vec![1; l.places()];
                    counts[1] += 8 - l.places();
                    l.stage_layers = uneven.then_some(counts);
                });
                job.check().expect("a layout");
                assert_same(
                    &format!("pp {pp} {schedule:?} {:?}", job.layout.stage_layers),
                    &steps(&job),
                    &twin,
                );
            }
        }
    }
}

/// Layers enough for four stages of two chunks.
fn deep_job() -> Job {
    let mut job = small_job();
    job.model.layers = 8;
    job
}

#[test]
fn schedules_are_equal_where_stages_are_not_alone() {
    for job in in_every_type(&cut(&deep_job(), (2, 2, 2))) {
        for tied in [false, true] {
            let of = |kind| {
                let mut job = with(&job, |l| l.schedule = kind);
                job.model.tied = tied;
                steps(&job)
            };
            let one = of(ScheduleKind::OneFOneB);
            for kind in [ScheduleKind::GPipe, ScheduleKind::ZbH1] {
                assert_same(&format!("{kind} and 1f1b"), &of(kind), &one);
            }
        }
    }
}

#[test]
fn zero_stages_are_equal_even_in_what_clipping_makes() {
    for (mesh, within) in [((2, 1, 1), None), ((4, 1, 1), Some(2)), ((2, 2, 2), None)] {
        for clip in [0.0, 0.3] {
            for mut job in in_every_type(&cut(&small_job(), mesh)) {
                job.optimizer.clip_grad = clip;
                for tied in [false, true] {
                    job.model.tied = tied;
                    zero_stages_are_equal(&job, within);
                }
            }
        }
    }
}

/// 0 and 1, 2 and 3, and all four with one microbatch each; with shards among fewer replicas the
/// sum is taken in two steps, so that stage 0 is left out.
fn zero_stages_are_equal(job: &Job, within: Option<usize>) {
    let of = |job: &Job, stage| {
        let hybrid = within.filter(|_| stage > 0);
        steps(&with(job, |l| {
            (l.zero_stage, l.hybrid_shard_size, l.bucket_bytes) = (stage, hybrid, 700);
        }))
    };
    let what = format!("{:?} within {within:?}", job.layout);
    let whole = within.is_none();
    let one = of(job, 1);
    if whole {
        assert_same(&format!("0 and 1, {what}"), &of(job, 0), &one);
    }
    assert_same(&format!("2 and 3, {what}"), &of(job, 2), &of(job, 3));
    let mut single = job.clone();
    single.batch.global_batch = job.layout.dp * job.batch.micro_batch;
    let one = of(&single, 1);
    for stage in [0, 2, 3].into_iter().skip(usize::from(!whole)) {
        assert_same(&format!("{stage} and 1, {what}"), &of(&single, stage), &one);
    }
}

#[test]
fn bucket_lengths_change_nothing() {
    for job in in_every_type(&cut(&small_job(), (2, 2, 1))) {
        let of = |bytes| steps(&with(&job, |l| l.bucket_bytes = bytes));
        let whole = of(1 << 20);
        for bytes in [1, 700, 5_000] {
            assert_same_but_norm(&format!("{bytes} bytes"), &of(bytes), &whole);
        }
    }
}

/// Every kind of block, every schedule, every way to cut: whole steps, with what routers counted.
#[test]
fn what_is_computed_again_changes_nothing() {
    let moe = MoeConfig {
        score: Score::Sigmoid,
        selection_bias: true,
        aux_loss: 0.1,
        z_loss: 0.01,
        capacity_factor: Some(0.7),
        shared_ffn: 3,
        shared_gate: true,
        first_dense: 1,
        ..MoeConfig::new(4, 2, 5)
    };
    let qk_norm = Architecture {
        qk_norm: true,
        ..Architecture::LLAMA
    };
    let mut places = [(1, 1, 1), (1, 2, 2), (2, 2, 1), (1, 1, 2)]
        .into_iter()
        .cycle();
    let gpt2 = Architecture::gpt2(24);
    let mut architectures = [Architecture::LLAMA, gpt2, qk_norm, gpt2, qk_norm]
        .into_iter()
        .cycle();
    for schedule in ScheduleKind::ALL {
        for (moe, dropout) in [(None, 0.1), (Some(moe), 0.0), (Some(moe), 0.3)] {
            let (dp, tp, pp) = places.next().unwrap_or_default();
            let pp = pp.max(schedule.least_stages());
            let mut job = with(&cut(&small_job(), (dp, tp, pp)), |l| {
                (l.schedule, l.sequence_parallel) = (schedule, dp > 1);
                l.virtual_stages = if schedule.chunks().is_none() { 2 } else { 1 };
                (l.cp, l.zero_stage, l.bucket_bytes) = (3 - dp, 3, 1);
                (l.cp_comm, l.ep) = (CpComm::Ulysses, if moe.is_some() { dp * tp } else { 1 });
            });
            job.model.architecture = architectures.next().unwrap_or(qk_norm);
            (job.model.moe, job.model.dropout) = (moe, dropout);
            (job.batch.seq, job.batch.global_batch, job.steps) = (8, 8, 2);
            recomputes_equal(&job);
        }
    }
}

fn recomputes_equal(job: &Job) {
    for job in in_every_type(job) {
        job.check().expect("a layout");
        let [none, selective, full] =
            Recompute::ALL.map(|mode| steps(&with(&job, |l| l.recompute = mode)));
        for (mode, again) in [("selective", selective), ("full", full)] {
            assert_same(&format!("{mode}, {:?}", job.layout), &again, &none);
            let load = |steps: &[Step]| steps.iter().map(|s| s.load.clone()).collect::<Vec<_>>();
            assert_eq!(load(&again), load(&none), "{mode}, {:?}", job.layout);
        }
    }
}

#[test]
fn threads_per_rank_change_nothing() {
    // Wide enough that kernels do split their work.
    let mut job = cut(&small_job(), (1, 2, 1));
    (job.model.hidden, job.model.ffn, job.batch.seq) = (64, 176, 48);
    (job.batch.global_batch, job.steps) = (2, 1);
    for job in in_every_type(&job) {
        let of = |threads| {
            steps(&Job {
                threads_per_rank: threads,
                ..job.clone()
            })
        };
        let one = of(1);
        for threads in [2, 3] {
            assert_same(&format!("{threads} threads"), &of(threads), &one);
        }
    }
}

#[test]
fn a_run_repeats_itself() {
    for any_order in [false, true] {
        let job = with(&cut(&small_job(), (2, 2, 2)), |l| {
            (l.any_order, l.sequence_parallel, l.zero_stage) = (any_order, true, 1);
        });
        let first = steps(&job);
        for _ in 0..3 {
            assert_same(&format!("any order {any_order}"), &steps(&job), &first);
        }
    }
}

/// With room for one message every sender waits for its receiver, with much room none does: other
/// arrival times, the same bits.
#[test]
fn room_on_the_transport_changes_nothing() {
    let job = with(&cut(&small_job(), (2, 2, 2)), |l| l.bucket_bytes = 700);
    let on = |bytes| {
        let world = World::with_buffer(8, bytes).expect("a world");
        let run = record_on::<f64>(&world, &job, &samples_of(&job), Begin::Random, |_| Ok(()));
        run.expect("a run").steps
    };
    let roomy = on(64 << 20);
    for bytes in [1, 200] {
        assert_same(&format!("{bytes} bytes"), &on(bytes), &roomy);
    }
}

/// The control: these layouts are right, and not bit-equal; a comparison that calls them so sees
/// nothing.
#[test]
fn cuts_that_change_the_order_of_sums_are_not_called_equal() {
    let mut tied = cut(&small_job(), (1, 1, 2));
    tied.model.tied = true;
    let (tp, dp) = (cut(&small_job(), (1, 2, 1)), cut(&small_job(), (4, 1, 1)));
    for (what, job) in [("tp 2", tp), ("dp 4", dp), ("tied over stages", tied)] {
        let verdict = verify(&job, &samples_of(&job)).expect("a proof");
        assert!(verdict.ok, "{what}: {verdict:#?}");
        assert!(
            !verdict.bit_equal.grads && !verdict.bit_equal.params,
            "{what}: {verdict:#?}"
        );
    }
}

#[test]
fn what_changes_the_problem_changes_bits() {
    let job = small_job();
    let base = steps(&job);
    let seed = Job {
        seed: job.seed + 1,
        ..job.clone()
    };
    let mut lr = job.clone();
    lr.optimizer.lr *= 1.0 + f64::EPSILON;
    let mut micro = job.clone();
    micro.batch.micro_batch = 2;
    for (what, job, first) in [
        ("seed", seed, "loss of step 1"),
        ("lr", lr, "parameters of step 1"),
        ("micro batch", micro, "loss of step 1"),
    ] {
        let found = first_difference(&steps(&job), &base, false);
        assert!(found.is_some(), "{what} changed nothing");
        if what != "micro batch" {
            assert_eq!(found.as_deref(), Some(first), "{what}");
        }
    }
    let mask = RandomMask {
        tokens: 0.5,
        samples: 0.0,
    };
    let masked = record(&job, &samples_of(&job).with_mask(mask), Begin::Random).expect("a run");
    assert!(first_difference(&masked.steps, &base, false).is_some());
}
