//! Is there room for a job on this machine? Asked before anything is built, and answered from a
//! handful of products, so that a model of any size is refused at once.

use quintet_collectives::environment::Place;
use quintet_collectives::process::environment;
use quintet_planner::memory::microbatch;
use quintet_planner::model::parameters;

use crate::failure::Failure;
use crate::job::{Job, OptimizerKind};
use crate::report::human::{bytes, count};

/// Refuses a job that cannot fit in this machine's memory: all of its ranks, or those that a launcher
/// has started here.
///
/// # Errors
/// Exit 2 where the least that it needs is more than there is.
pub fn has_room(job: &Job) -> Result<(), Failure> {
    let world = job.layout.world();
    let here = if job.launched {
        // A launcher that does not say how many of them are here has this one here.
        Place::parse(&environment())?.local_world.unwrap_or(1)
    } else {
        world
    };
    let share = least(job) / world.max(1) as u128;
    fits(job, share.saturating_mul(here as u128), memory())
}

/// Bytes over all ranks that a step cannot do without: each replica (of what ZeRO shards, each group
/// that does so) has its parameters, gradients and optimizer state, and what forward saves of one
/// microbatch. What several ranks of a replica hold a copy of is counted once.
fn least(job: &Job) -> u128 {
    let replicas = job.layout.dp as u128;
    let (width, acc) = (job.dtype.bytes() as u128, job.dtype.acc_bytes() as u128);
    let within = job.layout.hybrid_shard_size.unwrap_or(job.layout.dp);
    let groups = replicas / (within as u128).clamp(1, replicas);
    let from = |stage| match job.layout.zero_stage >= stage {
        true => groups,
        false => replicas,
    };
    let kept = job.optimizer.kind.moments() + usize::from(job.dtype.has_masters());
    let each = width * from(3) + acc * (from(2) + kept as u128 * from(1));
    let state = parameters(&job.model).saturating_mul(each);
    let tokens = job.batch.micro_batch.saturating_mul(job.batch.seq);
    microbatch(&job.model, tokens, job.layout.recompute)
        .saturating_mul(replicas)
        .saturating_mul(width)
        .saturating_add(state)
}

fn fits(job: &Job, need: u128, have: u64) -> Result<(), Failure> {
    if need <= u128::from(have) {
        return Ok(());
    }
    let need = bytes(u64::try_from(need).unwrap_or(u64::MAX));
    let model = count(u64::try_from(parameters(&job.model)).unwrap_or(u64::MAX));
    let sharded =
        job.layout.dp == 1 || job.layout.zero_stage > 0 || job.optimizer.kind == OptimizerKind::Sgd;
    let fewer = match (job.layout.dp > 1, sharded) {
        (false, _) => "",
        (true, true) => " or a smaller --dp",
        (true, false) => ", a smaller --dp or --zero-stage 1",
    };
    Err(Failure::usage(format!(
        "{} has {model} parameters and needs {need} of memory, and this machine has {}; use a smaller model or batch{fewer}",
        job.model_name,
        bytes(have)
    )))
}

/// Bytes of memory and swap that this process may use at most. Where the system does not say, as
/// much as no machine has.
fn memory() -> u64 {
    let machine = machine().unwrap_or(1 << 50);
    match group_limit() {
        Some(limit) => machine.min(limit),
        None => machine,
    }
}

#[cfg(any(target_os = "linux", target_os = "android"))]
fn machine() -> Option<u64> {
    let info = rustix::system::sysinfo();
    let units = (info.totalram as u64).saturating_add(info.totalswap as u64);
    Some(units.saturating_mul(u64::from(info.mem_unit)))
}

#[cfg(not(any(target_os = "linux", target_os = "android")))]
fn machine() -> Option<u64> {
    None
}

/// What the control group of a container allows, where there is one.
fn group_limit() -> Option<u64> {
    let text = std::fs::read_to_string("/sys/fs/cgroup/memory.max").ok()?;
    text.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use super::*;
    use crate::failure::Exit;

    #[test]
    fn the_least_is_below_what_a_forecast_counts() -> Result<(), Failure> {
        for (dp, tp, pp, zero_stage) in [(1, 1, 1, 0), (2, 2, 2, 0), (4, 1, 2, 1)] {
            let mut job = Job::default();
            (job.layout.dp, job.layout.tp, job.layout.pp) = (dp, tp, pp);
            job.layout.zero_stage = zero_stage;
            let all = crate::forecast::forecast(&job, &crate::data::Corpus::built_in())?;
            let fullest: u64 = all.memory.values().sum();
            let most = u128::from(fullest) * job.layout.world() as u128;
            assert!(least(&job) <= most, "{} {most}", least(&job));
            // On one rank nothing is held twice: what is left is the work of backward.
            assert!(job.layout.world() > 1 || least(&job) * 2 > most);
        }
        Ok(())
    }

    #[test]
    fn what_cannot_fit_is_refused_at_once() {
        let mut job = Job::demo();
        let m = &mut job.model;
        (m.hidden, m.layers, m.vocab) = (1_000_000, 60_000, 1 << 24);
        (m.ffn, m.head_dim, m.heads, m.kv_heads) = (1 << 20, 1 << 10, 1 << 10, 1 << 10);
        let start = Instant::now();
        for refused in [
            has_room(&job),
            crate::train::train(&job, &Default::default()).map(drop),
        ] {
            let failure = refused.expect_err("there is no such machine");
            assert_eq!(failure.exit, Exit::Usage);
            let s = failure.sentence;
            assert!(
                s.contains("memory") && s.contains("EB") && s.contains("--zero-stage 1"),
                "{s}"
            );
        }
        assert!(start.elapsed() < Duration::from_secs(1));
    }

    #[test]
    fn so_is_a_batch() {
        let mut job = Job::default();
        (job.batch.micro_batch, job.batch.global_batch) = (1 << 24, 1 << 24);
        let failure = has_room(&job).expect_err("there is no such machine");
        assert!(failure.sentence.contains("a smaller model or batch"));
        job.batch.seq = 1 << 24;
        job.model.ffn = 1 << 20;
        assert!(has_room(&job).is_err());
    }

    #[test]
    fn the_border_is_where_it_is_said_to_be() {
        let job = Job::default();
        assert!(fits(&job, 100, 100).is_ok());
        let s = fits(&job, 101, 100)
            .expect_err("more than there is")
            .sentence;
        assert!(
            s.contains("101 B") && s.contains("100 B") && !s.contains("--dp"),
            "{s}"
        );
        assert!(memory() > 1 << 20, "this machine runs this test");
    }
}
