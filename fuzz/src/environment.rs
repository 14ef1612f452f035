//! What launchers say.

use quintet_collectives::environment::{Meeting, Place, Variables, first_host};
use quintet_collectives::process::Options;

use crate::bytes::Bytes;

const NAMES: [&str; 34] = [
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "TORCHELASTIC_RUN_ID",
    "TORCHELASTIC_RESTART_COUNT",
    "TORCHELASTIC_USE_AGENT_STORE",
    "OMPI_COMM_WORLD_RANK",
    "OMPI_COMM_WORLD_SIZE",
    "OMPI_COMM_WORLD_LOCAL_SIZE",
    "PMIX_RANK",
    "PMI_RANK",
    "PMI_SIZE",
    "MPI_LOCALNRANKS",
    "SLURM_PROCID",
    "SLURM_STEP_ID",
    "SLURM_NTASKS",
    "SLURM_STEP_NODELIST",
    "SLURM_STEP_TASKS_PER_NODE",
    "SLURM_NODEID",
    "SLURM_JOB_ID",
    "PET_NODE_RANK",
    "PET_NNODES",
    "PET_NPROC_PER_NODE",
    "PET_MASTER_ADDR",
    "JOB_COMPLETION_INDEX",
    "QUINTET_RANK",
    "QUINTET_WORLD_SIZE",
    "QUINTET_MASTER_ADDR",
    "QUINTET_STORE",
    "QUINTET_PORTS",
    "QUINTET_TIMEOUT",
];

const VALUES: [&str; 16] = [
    "0",
    "1",
    "2",
    "3",
    "-1",
    "",
    " 1 ",
    "99999999999",
    "host",
    "[::1]",
    "n[01-3],x",
    "2(x3),1",
    "n[",
    "True",
    "5-4",
    "1e9",
];

/// Any variables: one sentence, or a place that can be; any list of hosts: a name without brackets.
pub fn environment(data: &[u8]) {
    let mut bytes = Bytes(data);
    let mut variables = Variables::new();
    for _ in 0..bytes.below(12) {
        let name = NAMES[bytes.below(NAMES.len())];
        let value = match bytes.below(4) {
            0 => {
                let len = bytes.below(6);
                let raw: Vec<u8> = (0..len).map(|_| bytes.byte()).collect();
                String::from_utf8_lossy(&raw).to_string()
            }
            _ => VALUES[bytes.below(VALUES.len())].to_string(),
        };
        variables.insert(name.to_string(), value);
    }
    match Place::parse(&variables) {
        Err(error) => assert!(!error.to_string().contains('\n'), "{error}"),
        Ok(place) => {
            assert!(place.rank < place.world);
            assert_eq!(place.world == 1, place.meeting == Meeting::Nowhere);
            if let (Some(rank), Some(world)) = (place.local_rank, place.local_world) {
                assert!(rank < world && world <= place.world);
            }
        }
    }
    if let Err(error) = Options::parse(&variables) {
        assert!(!error.to_string().contains('\n'), "{error}");
    }
    if let Some(host) = first_host(&String::from_utf8_lossy(data)) {
        assert!(!host.is_empty() && !host.contains(['[', ']', ',', ' ']));
    }
}
