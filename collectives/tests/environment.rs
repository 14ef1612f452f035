//! What each launcher says, as a table: precedence, traps and contradictions (no launcher needed).

use quintet_collectives::Error;
use quintet_collectives::environment::{Family, Meeting, Place, Variables, first_host};

fn variables(text: &str) -> Variables {
    let pairs = text
        .split_whitespace()
        .filter_map(|pair| pair.split_once('='));
    pairs
        .map(|(name, value)| (name.to_string(), value.to_string()))
        .collect()
}

/// `family rank/world local/local where run`
fn said(text: &str) -> String {
    match Place::parse(&variables(text)) {
        Ok(place) => {
            let number = |x: Option<usize>| x.map_or(String::from("?"), |x| x.to_string());
            let at = match &place.meeting {
                Meeting::Nowhere => String::from("nowhere"),
                Meeting::Host { host, ports } if ports.start() == ports.end() => {
                    format!("{host}:{}", ports.start())
                }
                Meeting::Host { host, ports } => {
                    format!("{host}:{}-{}", ports.start(), ports.end())
                }
                Meeting::Store { host, port } => format!("store {host}:{port}"),
                Meeting::Folder(key) => format!("folder {}", key.as_deref().unwrap_or("parent")),
            };
            format!(
                "{:?} {}/{} {}/{} {at} {}",
                place.family,
                place.rank,
                place.world,
                number(place.local_rank),
                number(place.local_world),
                place.run
            )
        }
        Err(error) => error.to_string(),
    }
}

const TORCH: &str = "RANK=3 WORLD_SIZE=4 LOCAL_RANK=1 LOCAL_WORLD_SIZE=2 MASTER_ADDR=n1 MASTER_PORT=41000 TORCHELASTIC_RUN_ID=abc TORCHELASTIC_RESTART_COUNT=2 TORCHELASTIC_USE_AGENT_STORE=True GROUP_RANK=1";
const OMPI: &str = "OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=4 OMPI_COMM_WORLD_LOCAL_RANK=1 OMPI_COMM_WORLD_LOCAL_SIZE=4 PMIX_NAMESPACE=prterun-n1-77@1 PMIX_RANK=1";
const SRUN: &str = "SLURM_PROCID=5 SLURM_STEP_ID=0 SLURM_STEP_NUM_TASKS=6 SLURM_NTASKS=8 SLURM_LOCALID=1 SLURM_NODEID=2 SLURM_STEP_TASKS_PER_NODE=2(x3) SLURM_STEP_NODELIST=n[001-003,7],x SLURM_JOB_NODELIST=n[001-004] SLURM_JOB_ID=4097";

#[test]
fn launchers_are_understood() {
    for (env, expected) in [
        ("", "Alone 0/1 0/1 nowhere alone".to_string()),
        ("RANK= WORLD_SIZE=", "Alone 0/1 0/1 nowhere alone".into()),
        ("WORLD_SIZE=1", "Alone 0/1 0/1 nowhere alone".into()),
        (
            "RANK=1 WORLD_SIZE=2 MASTER_ADDR=h MASTER_PORT=5",
            "Plain 1/2 ?/? h:5 torch-plain-5-0".into(),
        ),
        (
            "RANK=1 WORLD_SIZE=2 MASTER_ADDR=[::1]",
            "Plain 1/2 ?/? ::1:29500 torch-plain-29500-0".into(),
        ),
        ("RANK=0 WORLD_SIZE=1", "Plain 0/1 ?/? nowhere plain".into()),
        // The agent holds the port: the sixteen after it.
        (
            TORCH,
            "Torchrun 3/4 1/2 n1:41001-41016 torch-abc-41000-2".into(),
        ),
        // No agent store: the port itself first.
        (
            "RANK=0 WORLD_SIZE=2 MASTER_ADDR=h MASTER_PORT=7 TORCHELASTIC_RUN_ID=x",
            "Torchrun 0/2 ?/? h:7-23 torch-x-7-0".into(),
        ),
        (
            OMPI,
            "OpenMpi 1/4 1/4 folder prterun-n1-77@1 ompi-prterun-n1-77@1".into(),
        ),
        (
            "OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=4 OMPI_COMM_WORLD_LOCAL_SIZE=2 MASTER_ADDR=h",
            "OpenMpi 1/4 ?/2 h:29500 ompi-job".into(),
        ),
        (
            "PMI_RANK=1 PMI_SIZE=2 MPI_LOCALRANKID=1 MPI_LOCALNRANKS=2",
            "Hydra 1/2 1/2 folder parent pmi".into(),
        ),
        (SRUN, "Slurm 5/6 1/2 n001:61441-61457 slurm-4097.0-0".into()),
        (
            "SLURM_PROCID=1 SLURM_STEPID=3 SLURM_NTASKS=2 SLURM_NODELIST=node SLURM_JOBID=1 SLURM_RESTART_COUNT=4",
            "Slurm 1/2 ?/? node:61441-61457 slurm-1.3-4".into(),
        ),
        // srun --mpi=pmi2 sets PMI_* too, and --mpi=pmix PMIX_RANK.
        (
            "PMI_RANK=1 PMI_SIZE=2 SLURM_PROCID=1 SLURM_STEP_ID=0 SLURM_NTASKS=2 MASTER_ADDR=h MASTER_PORT=9",
            "Slurm 1/2 ?/? h:9 slurm-0.0-0".into(),
        ),
        (
            "PMIX_RANK=1 SLURM_PROCID=1 SLURM_STEP_ID=0 SLURM_NTASKS=2 MASTER_ADDR=h",
            "Slurm 1/2 ?/? h:61440 slurm-0.0-0".into(),
        ),
        // A batch script with one task is a run of one.
        (
            "SLURM_PROCID=0 SLURM_NTASKS=1",
            "Alone 0/1 0/1 nowhere alone".into(),
        ),
        (
            "PET_NODE_RANK=1 PET_NNODES=2 PET_NPROC_PER_NODE=1 PET_MASTER_ADDR=job-0 PET_MASTER_PORT=29400 JOB_COMPLETION_INDEX=1",
            "Kubernetes 1/2 ?/? job-0:29400 job-plain-0".into(),
        ),
        (
            "JOB_COMPLETION_INDEX=2 WORLD_SIZE=3 MASTER_ADDR=j-0.j JOBSET_NAME=train JOBSET_RESTART_ATTEMPT=1",
            "Kubernetes 2/3 ?/? j-0.j:29500 job-train-1".into(),
        ),
        (
            "JOB_COMPLETION_INDEX=2",
            "Alone 0/1 0/1 nowhere alone".into(),
        ),
        (
            "QUINTET_RANK=0 QUINTET_WORLD_SIZE=2 QUINTET_STORE=/s QUINTET_LOCAL_RANK=0 QUINTET_LOCAL_WORLD_SIZE=2",
            "Ours 0/2 0/2 folder /s ours".into(),
        ),
        (
            "QUINTET_RANK=0 QUINTET_WORLD_SIZE=2 QUINTET_MASTER_ADDR=h QUINTET_MASTER_PORT=3 QUINTET_RUN_ID=r1",
            "Ours 0/2 ?/? h:3 r1/ours".into(),
        ),
        (
            "QUINTET_RANK=1 QUINTET_WORLD_SIZE=2 QUINTET_MASTER_ADDR=h QUINTET_MASTER_PORT=3 QUINTET_MASTER_SERVED=1",
            "Ours 1/2 ?/? store h:3 ours".into(),
        ),
    ] {
        assert_eq!(said(env), expected, "{env}");
    }
}

#[test]
fn the_nearest_launcher_wins() {
    let ours = "QUINTET_RANK=0 QUINTET_WORLD_SIZE=2 QUINTET_STORE=/s";
    for (env, family) in [
        (format!("{ours} {TORCH} {OMPI} {SRUN}"), Family::Ours),
        // torchrun under srun: per worker before per task.
        (format!("{TORCH} {SRUN}"), Family::Torchrun),
        (format!("{TORCH} {OMPI} {SRUN}"), Family::Torchrun),
        // mpirun inside an allocation or a step.
        (format!("{OMPI} {SRUN}"), Family::OpenMpi),
        (format!("{SRUN} JOB_COMPLETION_INDEX=1"), Family::Slurm),
    ] {
        assert_eq!(
            Place::parse(&variables(&env)).unwrap().family,
            family,
            "{env}"
        );
    }
}

#[test]
fn contradictions_are_sentences_that_name_their_variables() {
    for (env, words) in [
        ("RANK=1", &["RANK", "WORLD_SIZE is not"][..]),
        (
            "RANK=1 SLURM_PROCID=1 SLURM_NTASKS=2",
            &["WORLD_SIZE is not", "SLURM_NTASKS"],
        ),
        ("WORLD_SIZE=4", &["WORLD_SIZE is 4", "RANK is not set"]),
        (
            "WORLD_SIZE=2 SLURM_PROCID=1 SLURM_STEP_ID=0",
            &["WORLD_SIZE", "SLURM_PROCID"],
        ),
        (
            "WORLD_SIZE=2 OMPI_COMM_WORLD_RANK=1",
            &["WORLD_SIZE", "OMPI_COMM_WORLD_RANK"],
        ),
        (
            "RANK=2 WORLD_SIZE=2 MASTER_ADDR=h",
            &["rank 2", "world of 2", "0 to 1"],
        ),
        ("RANK=-1 WORLD_SIZE=2", &["RANK is \"-1\"", "whole number"]),
        ("RANK=1 WORLD_SIZE=99999999999999999999", &["WORLD_SIZE"]),
        (
            "RANK=0 WORLD_SIZE=0 MASTER_ADDR=h",
            &["rank 0", "world of 0"],
        ),
        ("RANK=1 WORLD_SIZE=2", &["MASTER_ADDR is not"]),
        (
            "RANK=1 WORLD_SIZE=2 MASTER_PORT=4",
            &["MASTER_PORT is set", "MASTER_ADDR is not"],
        ),
        (
            "RANK=1 WORLD_SIZE=2 MASTER_ADDR=h MASTER_PORT=99999",
            &["MASTER_PORT", "65535"],
        ),
        (
            "RANK=0 WORLD_SIZE=2 LOCAL_RANK=2 LOCAL_WORLD_SIZE=2 MASTER_ADDR=h",
            &["local rank 2"],
        ),
        (
            "RANK=1 WORLD_SIZE=4 PET_NPROC_PER_NODE=2 MASTER_ADDR=h",
            &["PET_NPROC_PER_NODE is 2", "LOCAL_RANK", "torchrun"],
        ),
        ("OMPI_COMM_WORLD_RANK=1", &["OMPI_COMM_WORLD_SIZE is not"]),
        (
            "OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=4 OMPI_COMM_WORLD_LOCAL_SIZE=2",
            &["several hosts", "MASTER_ADDR"],
        ),
        ("PMIX_RANK=1", &["PMIX_RANK", "WORLD_SIZE"]),
        ("PMI_RANK=1", &["PMI_SIZE is not"]),
        (
            "SLURM_PROCID=0 SLURM_NTASKS=8",
            &["SLURM_NTASKS is 8", "srun"],
        ),
        (
            "SLURM_PROCID=0 SLURM_STEP_ID=0 SLURM_NTASKS=2",
            &["SLURM_STEP_NODELIST"],
        ),
        (
            "SLURM_PROCID=0 SLURM_STEP_ID=0 SLURM_NTASKS=2 SLURM_NODELIST=n[a",
            &["list of hosts"],
        ),
        (
            "PET_NODE_RANK=0 PET_NNODES=2 PET_NPROC_PER_NODE=4",
            &["PET_NPROC_PER_NODE is 4", "torchrun"],
        ),
        (
            "PET_NODE_RANK=0 PET_NNODES=2 WORLD_SIZE=3",
            &["PET_NNODES is 2", "WORLD_SIZE is 3"],
        ),
        ("PET_NODE_RANK=0", &["PET_NNODES is not"]),
        ("JOB_COMPLETION_INDEX=0 WORLD_SIZE=2", &["MASTER_ADDR"]),
        ("QUINTET_RANK=0", &["QUINTET_WORLD_SIZE is not"]),
        ("QUINTET_WORLD_SIZE=2", &["QUINTET_RANK is not"]),
        (
            "QUINTET_RANK=0 QUINTET_WORLD_SIZE=2",
            &["QUINTET_MASTER_ADDR", "QUINTET_STORE"],
        ),
    ] {
        let error = Place::parse(&variables(env)).expect_err(env);
        assert!(matches!(error, Error::Environment(_)), "{env}: {error}");
        let text = error.to_string();
        for word in words {
            assert!(text.contains(word), "{env}: {text} lacks {word}");
        }
        assert!(!text.contains('\n'));
    }
}

#[test]
fn whatever_a_value_holds_it_is_one_sentence_that_says_so() {
    for name in ["WORLD_SIZE", "PET_NPROC_PER_NODE", "RANK"] {
        let mut env = variables("PET_NODE_RANK=0");
        if name == "WORLD_SIZE" {
            env.clear();
        }
        env.insert(name.to_string(), format!("a\n{}", "b".repeat(500)));
        let said = Place::parse(&env).unwrap_err().to_string();
        assert!(said.contains("a\\nb") && !said.contains('\n'), "{said}");
        assert!(said.len() < 300, "{said}");
    }
}

#[test]
fn host_lists() {
    for (list, first) in [
        ("a,b", "a"),
        ("n[001-015],x", "n001"),
        ("n[3,5]-ib,x", "n3-ib"),
        ("r[1-2]n[07-9].local", "r1n07.local"),
        ("10.0.0.1", "10.0.0.1"),
    ] {
        assert_eq!(first_host(list).as_deref(), Some(first));
    }
    for list in ["", "n[", "n[]", "n[a-b]", ",x", "a b", "n]1["] {
        assert_eq!(first_host(list), None, "{list}");
    }
}
