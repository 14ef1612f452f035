//! Every schedule, cut and uncut by the other axes, tied and untied, against the oracle and the
//! twin.

mod common;

use common::{cut, samples_of, small_job, with};
use quintet_collectives::transport::local::World;
use quintet_kernels::Cpu;
use quintet_parallel_layers::pipeline::ScheduleKind;
use quintet_ref_trainer::checkpoint::about;
use quintet_ref_trainer::failure::Failure;
use quintet_ref_trainer::job::Job;
use quintet_ref_trainer::rank::{Begin, Rank};
use quintet_ref_trainer::verify::verify;

/// A job of 8 layers and 12 microbatches a replica.
fn job(kind: ScheduleKind, mesh: (usize, usize, usize), tied: bool) -> Job {
    let mut job = with(&cut(&small_job(), mesh), |l| {
        l.schedule = kind;
        l.virtual_stages = if kind.chunks().is_none() { 2 } else { 1 };
        l.bucket_bytes = 700;
    });
    job.model.layers = 8;
    job.model.tied = tied;
    job.batch.global_batch = 12 * mesh.0;
    job
}

#[test]
fn each_is_what_one_device_computes() {
    for kind in ScheduleKind::ALL {
        for pp in [2, 3, 4] {
            for (dp, tp) in [(1, 1), (2, 1), (1, 2)] {
                for tied in [false, true] {
                    let job = job(kind, (dp, tp, pp), tied);
                    let v = verify(&job, &samples_of(&job)).expect("a proof");
                    let what = format!("{kind} dp {dp} tp {tp} pp {pp} tied {tied}");
                    assert!(v.ok, "{what}: {v:#?}");
                    assert_eq!(v.bytes_predicted, v.bytes_counted, "{what}");
                    let b = v.bit_equal;
                    if dp == 1 && tp == 1 && !tied {
                        let all = b.loss && b.grads && b.grad_norm && b.params;
                        assert!(all, "{what}: {b:?}");
                    }
                }
            }
        }
    }
}

/// Several chunks on one stage: no message, and where first and last chunk meet, one table.
#[test]
fn one_stage_may_hold_the_whole_model_in_chunks() {
    for tied in [false, true] {
        for chunks in [2, 3, 8] {
            let mut job = job(ScheduleKind::Interleaved, (1, 1, 1), tied);
            job.layout.virtual_stages = chunks;
            let v = verify(&job, &samples_of(&job)).expect("a proof");
            assert!(v.ok && v.bytes_counted.is_empty(), "{chunks}: {v:#?}");
        }
    }
}

/// Forward alone, over any number of microbatches: the loss of one rank.
#[test]
fn an_evaluation_is_the_same_under_each() -> Result<(), Failure> {
    let loss = |job: &Job| {
        let samples = samples_of(job);
        let all: Vec<_> = (0..5).map(|m| samples.microbatch(9, m, 1)).collect();
        let found = World::new(job.layout.world())?.go(|comm| {
            let mut rank = Rank::<_, _, f64>::new(job, Cpu::new(1), comm, Begin::Random)?;
            rank.evaluate(&all)
        })?;
        assert!(found.iter().all(|f| *f == found[0]));
        Ok::<_, Failure>(found[0])
    };
    let single = job(ScheduleKind::OneFOneB, (1, 1, 1), true);
    let one = loss(&single)?;
    for kind in ScheduleKind::ALL {
        assert_eq!(loss(&job(kind, (1, 1, 3), true))?, one, "{kind}");
    }
    Ok(())
}

/// A run goes on under another schedule from where it was saved under one.
#[test]
fn a_checkpoint_moves_between_schedules() -> Result<(), Failure> {
    let root = std::path::PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("between-schedules");
    let _ = std::fs::remove_dir_all(&root);
    let from = job(ScheduleKind::DualPipeV, (1, 2, 2), true);
    let params = |job: &Job, load: bool| {
        World::new(job.layout.world())?.go(|comm| {
            let begin = if load { Begin::Init } else { Begin::Random };
            let mut rank = Rank::<_, _, f64>::new(job, Cpu::new(1), comm, begin)?;
            if load {
                rank.load(&root, true)?;
            } else {
                rank.save(&root, &about(rank.job, samples_of(job).corpus(), 1)?)?;
            }
            rank.full_params()
        })
    };
    let saved = params(&from, false)?;
    for kind in ScheduleKind::ALL {
        let to = job(kind, (2, 1, 3), true);
        assert_eq!(params(&to, true)?, vec![saved[0].clone(); 6], "{kind}");
    }
    Ok(())
}
