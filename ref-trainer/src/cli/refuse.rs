//! What is known but not built yet: refused in one sentence, never ignored.
//!
//! When a feature comes, its line here goes. Constraints between flags are not judged here but in
//! [`Job::check`](crate::job::Job::check), which every job passes, wherever it came from.

use quintet_collectives::environment::Place;

use super::args::OutputArgs;
use crate::failure::Failure;
use crate::job::DeviceKind;

/// Only `verify` runs on the emulator.
pub(super) fn train(device: DeviceKind) -> Result<(), Failure> {
    match device {
        DeviceKind::Cpu | DeviceKind::Cuda => Ok(()),
        DeviceKind::Emulated => unbuilt("device", "emulated", "verify has it, others use cpu"),
    }
}

pub(super) fn eval(device: DeviceKind) -> Result<(), Failure> {
    match device {
        DeviceKind::Cpu => Ok(()),
        DeviceKind::Emulated => unbuilt("device", "emulated", "verify has it, others use cpu"),
        DeviceKind::Cuda => unbuilt("device", "cuda", "eval uses cpu"),
    }
}

/// `verify` and `eval` leave no files: what asks for some is refused rather than ignored.
pub(super) fn any_output(subcommand: &str, args: &OutputArgs) -> Result<(), Failure> {
    let given = [
        ("eval-interval", args.eval_interval.is_some()),
        ("save", args.save.is_some()),
        ("save-interval", args.save_interval.is_some()),
        ("load", args.load.is_some()),
        ("run-dir", args.run_dir.is_some()),
        ("metrics", args.metrics.is_some()),
        ("recorder", args.recorder.is_some()),
        ("trace", args.trace.is_some()),
        ("profile-step-start", args.profile_step_start.is_some()),
        ("profile-step-end", args.profile_step_end.is_some()),
        ("report", args.report.is_some()),
        ("tensorboard-dir", args.tensorboard_dir.is_some()),
        ("log-format", args.log_format.is_some()),
        ("log-interval", args.log_interval.is_some()),
        ("prove", args.prove.is_some()),
        ("quiet", args.quiet.is_some()),
    ];
    match given.iter().find(|(_, given)| *given) {
        None => Ok(()),
        Some((flag, _)) => Err(Failure::usage(format!(
            "--{flag} belongs to train; {subcommand} draws its own parameters, keeps no files and prints one result"
        ))),
    }
}

/// What works alone, started as one process of several, would do the same several times.
pub(super) fn several(subcommand: &str, launched: Option<&Place>) -> Result<(), Failure> {
    match launched {
        Some(place) if place.world > 1 => Err(Failure::usage(format!(
            "{subcommand} works in one process, and a launcher has started {}; start it once, without the launcher",
            place.world
        ))),
        _ => Ok(()),
    }
}

pub(super) fn unbuilt(flag: &str, value: &str, instead: &str) -> Result<(), Failure> {
    Err(Failure::usage(format!(
        "--{flag} {value} is not built yet; {instead}"
    )))
}
