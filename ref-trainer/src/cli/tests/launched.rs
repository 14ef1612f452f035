//! What launchers say beside flags.

use super::*;

fn under(variables: &[(&str, &str)], line: &str) -> Result<Command, Failure> {
    let env = variables
        .iter()
        .map(|(name, value)| (name.to_string(), value.to_string()));
    let words = std::iter::once("quintet").chain(line.split_whitespace());
    parse(words, &env.collect())
}

#[test]
fn ranks_are_what_launch_transport_and_the_launcher_say() {
    use Ranks::{Processes, Threads};
    for (flags, ranks) in [
        ("", Threads),
        ("--launch threads", Threads),
        ("--launch threads --transport auto", Threads),
        ("--transport local", Threads),
        ("--transport auto", Threads),
        ("--launch processes", Processes(Over::Auto)),
        ("--launch processes --transport shm", Processes(Over::Shm)),
        ("--transport unix", Processes(Over::Unix)),
        ("--transport tcp", Processes(Over::Tcp)),
    ] {
        let job = train(&format!("train --dp 2 {flags}"));
        assert_eq!((job.ranks, job.launched), (ranks, false), "{flags}");
        assert_eq!(job.starts_processes(), ranks != Threads);
    }
    let torchrun = |world| [("RANK", "1"), ("WORLD_SIZE", world), ("MASTER_ADDR", "x")];
    let ours = [("QUINTET_RANK", "0"), ("QUINTET_WORLD_SIZE", "1")];
    let said = [("QUINTET_TRANSPORT", "unix"), ("SLURM_PROCID", "1")];
    let srun = [("SLURM_STEP_ID", "0"), ("SLURM_STEP_NUM_TASKS", "2")];
    let srun = [&said[..], &srun, &[("SLURM_STEP_NODELIST", "n1")]].concat();
    for (variables, line, over) in [
        (&torchrun("2")[..], "train --dp 2", Over::Auto),
        (&torchrun("2"), "train --tp 2 --transport tcp", Over::Tcp),
        (
            &torchrun("2"),
            "verify --tp 2 --launch processes",
            Over::Auto,
        ),
        #[cfg(feature = "mpi")]
        (&torchrun("2"), "verify --dp 2 --transport mpi", Over::Mpi),
        // One process that our launcher started is a rank: it must not start itself again.
        (&ours, "train --transport shm", Over::Shm),
        (&srun, "verify --dp 2", Over::Unix),
        (&srun, "train --dp 2 --transport tcp", Over::Tcp),
    ] {
        let Ok(Command::Train(job) | Command::Verify { job, .. }) = under(variables, line) else {
            panic!("{line}: {:?}", under(variables, line));
        };
        assert_eq!((job.ranks, job.launched), (Processes(over), true), "{line}");
        assert!(!job.starts_processes(), "{line}");
    }
    // One process of a launcher is as good as none.
    let Ok(Command::Train(job)) = under(&[("RANK", "0"), ("WORLD_SIZE", "1")], "train --dp 2")
    else {
        panic!();
    };
    assert_eq!((job.ranks, job.launched), (Threads, false));
}

#[test]
fn mpi_is_for_ranks_that_it_has_started_and_builds_that_have_it() {
    let words = if cfg!(feature = "mpi") {
        "mpirun -n N quintet"
    } else {
        "--features mpi"
    };
    for line in ["train --dp 2", "verify", "bench all_reduce", ""] {
        refused(&format!("{line} --transport mpi"), words);
    }
    refused("train --launch processes --transport mpi", words);
}

#[test]
fn a_launcher_is_not_ignored() {
    let two = [
        ("RANK", "1"),
        ("WORLD_SIZE", "2"),
        ("MASTER_ADDR", "10.0.0.1"),
    ];
    for (variables, line, words) in [
        (
            &two[..],
            "train",
            "the layout has 1 ranks, and the launcher has started 2",
        ),
        (&two, "train --dp 4", "start 4"),
        (&two, "verify --dp 2 --launch threads", "leave it out"),
        (&two, "train --dp 2 --transport local", "leave it out"),
        (
            &two,
            "plan --model tiny --gpus 8",
            "plan works in one process",
        ),
        (&two, "trace", "trace works"),
        (&two, "convert a b", "convert works"),
        (&two, "bench all_reduce --transport local", "leave it out"),
        (&two[1..], "train --dp 2", "RANK"),
        (&[("QUINTET_WORLD_SIZE", "4")], "", "QUINTET_RANK"),
        (
            &[],
            "train --launch threads --transport tcp",
            "--launch processes",
        ),
        (
            &[],
            "train --launch processes --transport local",
            "use auto, shm",
        ),
    ] {
        let failure = under(variables, line).expect_err(line);
        assert_eq!(failure.exit, Exit::Usage, "{line}");
        let s = failure.sentence;
        assert!(s.contains(words), "{line}: {s}");
    }
    assert!(under(&[("WORLD_SIZE", "1")], "").is_ok());
    assert!(under(&two, "launch -n 2 -- x").is_ok());
}
