//! The activations worked out before a run, beside the bytes that its ranks count.

mod common;

use common::{cut, samples_of, small_job, with};
use quintet_collectives::transport::local::World;
use quintet_kernels::{Backend, Cpu, Scalar, Tag, bf16};
use quintet_parallel_layers::pipeline::ScheduleKind;
use quintet_parallel_layers::{Architecture, Ctx, Recompute};
use quintet_planner::config::{CpComm, Layout};
use quintet_planner::memory::activations;
use quintet_ref_trainer::failure::Failure;
use quintet_ref_trainer::job::{Dtype, Job};
use quintet_ref_trainer::microbatch::upload;
use quintet_ref_trainer::model::{Forward, Lent};
use quintet_ref_trainer::rank::{Begin, Rank};
use quintet_ref_trainer::verify::wire_types;

/// The most that each rank holds of activations in one step.
fn counted(job: &Job) -> Vec<u64> {
    match job.dtype {
        Dtype::F64 => counted_as::<f64>(job),
        Dtype::F32 => counted_as::<f32>(job),
        Dtype::Bf16 => counted_as::<bf16>(job),
    }
}

fn counted_as<E: Scalar>(job: &Job) -> Vec<u64> {
    let samples = samples_of(job);
    let ranks = World::new(job.layout.world()).unwrap().go(|comm| {
        let mut rank = Rank::<_, _, E>::new(job, Cpu::new(1), comm, Begin::Random)?;
        assert_eq!(rank.device.meter().now(Tag::Activation), 0);
        rank.device.meter().reset_peak();
        rank.accumulate(&samples, 1, false)?;
        assert_eq!(rank.device.meter().now(Tag::Activation), 0);
        Ok::<_, Failure>(rank.device.meter().peak(Tag::Activation) as u64)
    });
    ranks.unwrap()
}

/// Where the count lies between what is saved (0) and what is planned with (1), over the ranks.
fn places(job: &Job) -> Vec<f64> {
    within(job, counted(job))
}

fn within(job: &Job, counted: Vec<u64>) -> Vec<f64> {
    let planned = activations(&job.model, &job.layout, &job.batch, wire_types(job)).unwrap();
    let place = |(rank, (counted, plan)): (usize, (u64, _))| {
        let quintet_planner::memory::Activations { saved, work } = plan;
        let within = (saved..=saved + work).contains(&counted);
        assert!(
            within,
            "rank {rank}: {counted} not in {saved} .. {saved} + {work}\n{:?}",
            job.layout
        );
        (counted - saved) as f64 / work as f64
    };
    counted
        .into_iter()
        .zip(planned)
        .enumerate()
        .map(place)
        .collect()
}

fn in_bf16(job: Job) -> Job {
    let dtype = Dtype::Bf16;
    Job { dtype, ..job }
}

#[test]
fn every_rank_holds_what_was_worked_out() {
    let mut seen = Vec::new();
    for mesh in [
        (1, 1, 1),
        (2, 1, 1),
        (1, 2, 1),
        (1, 4, 1),
        (1, 1, 2),
        (1, 1, 4),
        (1, 2, 2),
        (2, 2, 2),
        (1, 4, 2),
    ] {
        for schedule in [ScheduleKind::GPipe, ScheduleKind::OneFOneB] {
            for bucket_bytes in [1, 1 << 20] {
                for sequence_parallel in [false, true] {
                    let job = with(&cut(&small_job(), mesh), |l: &mut Layout| {
                        (l.schedule, l.bucket_bytes) = (schedule, bucket_bytes);
                        l.sequence_parallel = sequence_parallel;
                    });
                    seen.extend(places(&job));
                    // Half the bytes are statistics, whose type is another.
                    places(&in_bf16(job));
                }
            }
        }
    }
    let job = with(&cut(&small_job(), (1, 1, 3)), |l| {
        l.stage_layers = Some(vec![2, 1, 1])
    });
    seen.extend(places(&job));
    let mean = seen.iter().sum::<f64>() / seen.len() as f64;
    let most = seen.iter().fold(0.0_f64, |most, x| most.max(*x));
    println!(
        "{} ranks: of what backward may add, {:.0}% was used on average, {:.0}% at most",
        seen.len(),
        100.0 * mean,
        100.0 * most
    );
    assert!(mean > 0.3, "a bound three times too high is none: {mean}");
}

#[test]
fn what_is_computed_again_is_not_held() {
    for mesh in [(1, 1, 1), (1, 1, 2), (1, 2, 2)] {
        for schedule in ScheduleKind::ALL {
            if mesh.2 < schedule.least_stages() {
                continue;
            }
            for (bucket_bytes, sequence_parallel) in [(1, mesh.1 > 1), (1 << 20, false)] {
                let held = Recompute::ALL.map(|mode| {
                    let mut job = with(&cut(&small_job(), mesh), |l: &mut Layout| {
                        (l.schedule, l.bucket_bytes) = (schedule, bucket_bytes);
                        l.virtual_stages = if schedule.chunks().is_none() { 2 } else { 1 };
                        (l.sequence_parallel, l.recompute) = (sequence_parallel, mode);
                    });
                    (job.batch.global_batch, job.model.dropout) = (6, 0.1);
                    let held = counted(&job);
                    within(&job, held.clone());
                    held
                });
                let [none, selective, full] = held.map(|ranks| ranks.into_iter().max());
                assert!(
                    full <= selective && selective <= none,
                    "{mesh:?} {schedule}"
                );
                // What a segment makes again it holds until its weights have their gradients: a
                // segment of all layers saves little, and so does a schedule that lets them wait.
                let waits = matches!(schedule, ScheduleKind::ZbH1 | ScheduleKind::DualPipeV);
                if bucket_bytes == 1 && !waits {
                    assert!(
                        full < selective && selective < none,
                        "{mesh:?} {schedule} {none:?} {selective:?} {full:?}"
                    );
                }
            }
        }
    }
}

/// To the byte: after the forward of a microbatch on one rank, and before its backward.
#[test]
fn forward_saves_what_was_worked_out() {
    use quintet_planner::config::MoeConfig;
    let moe = MoeConfig {
        shared_ffn: 3,
        shared_gate: true,
        ..MoeConfig::new(1, 1, 5)
    };
    for architecture in [Architecture::LLAMA, Architecture::gpt2(24)] {
        for moe in [None, Some(moe)] {
            for recompute in Recompute::ALL {
                let mut job = with(&small_job(), |l: &mut Layout| l.recompute = recompute);
                job.batch.global_batch = 1;
                (job.model.architecture, job.model.moe) = (architecture, moe);
                let types = wire_types(&job);
                let planned = activations(&job.model, &job.layout, &job.batch, types).unwrap();
                assert_eq!(
                    after_forward(&job),
                    planned[0].saved,
                    "{recompute:?} {:?}",
                    job.model
                );
            }
        }
    }
}

/// Bytes of activations held once the forward of one microbatch has run.
fn after_forward(job: &Job) -> u64 {
    let samples = samples_of(job).microbatch(1, 0, job.batch.micro_batch);
    let ranks = World::new(1).unwrap().go(|comm| {
        let rank = Rank::<_, _, f64>::new(job, Cpu::new(1), comm, Begin::Random)?;
        let batch = upload(&rank.device, &samples, (1.0, 1.0), &rank.seat)?;
        let ctx = Ctx {
            device: &rank.device,
            tp: &rank.groups.tp,
            replica: &rank.groups.replica,
            ep: &rank.groups.ep,
            etp: &rank.groups.etp,
            cp: rank.groups.context(),
        };
        let (own, table) = (&rank.chunks[0].params, None);
        let model = &rank.chunks[0].model;
        let run = 0..model.layers.len();
        let done = model.forward(&ctx, &Lent { own, table }, run, Forward::begin(batch, None))?;
        let saved = done.saved;
        drop((done.output, done.loss_t));
        let held = rank.device.meter().now(Tag::Activation) as u64;
        drop(saved);
        Ok::<_, Failure>(held)
    });
    ranks.unwrap()[0]
}

#[test]
fn every_rank_holds_of_cut_sequences_what_was_worked_out() {
    for (cp, cp_comm, ulysses_degree) in [
        (2, CpComm::Ring, None),
        (3, CpComm::Ring, None),
        (3, CpComm::AllGather, None),
        (2, CpComm::Ulysses, None),
        (4, CpComm::Ulysses, None),
        (4, CpComm::AllGather, Some(2)),
    ] {
        for (tp, pp) in [(1, 1), (1, 2)] {
            let mut job = with(&cut(&small_job(), (1, tp, pp)), |l: &mut Layout| {
                (l.cp, l.cp_comm, l.ulysses_degree) = (cp, cp_comm, ulysses_degree);
            });
            (job.batch.seq, job.batch.global_batch) = (24, 3);
            places(&job);
            places(&in_bf16(job));
        }
    }
}
