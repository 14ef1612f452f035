//! What launchers say about this process: its rank, the world, where to meet (`std`; pure).
//!
//! ```text
//! first that speaks    rank                    world                        meets at
//!   ours               QUINTET_RANK            QUINTET_WORLD_SIZE           QUINTET_MASTER_ADDR:PORT
//!   torchrun, plain    RANK                    WORLD_SIZE                   MASTER_ADDR:MASTER_PORT
//!   Open MPI           OMPI_COMM_WORLD_RANK    OMPI_COMM_WORLD_SIZE         a folder of one host
//!   MPICH, Intel       PMI_RANK                PMI_SIZE                     a folder of one host
//!   Slurm              SLURM_PROCID            SLURM_STEP_NUM_TASKS         first host, port by job id
//!   Kubernetes         PET_NODE_RANK, JOB_COMPLETION_INDEX                  PET_MASTER_ADDR, MASTER_ADDR
//!   nobody             0                       1                            nowhere
//! ```
//!
//! All of a place comes from one family; half of one is an error that names what is missing. Every
//! family may be given MASTER_ADDR and MASTER_PORT, since scripts export them. Under torchrun the
//! agent may hold MASTER_PORT itself: rank 0 then takes the first free of the sixteen ports after it.

use std::{
    collections::BTreeMap,
    format,
    ops::RangeInclusive,
    string::{String, ToString},
    vec::Vec,
};

use crate::{Error, Result};

/// Environment variables, by name.
pub type Variables = BTreeMap<String, String>;

/// Who started this process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Family {
    /// `QUINTET_*`: our launcher, or somebody who says it all.
    Ours,
    /// `RANK` and `WORLD_SIZE` with `TORCHELASTIC_*`.
    Torchrun,
    /// `RANK` and `WORLD_SIZE`: by hand, or one process a pod.
    Plain,
    /// `OMPI_*`.
    OpenMpi,
    /// `PMI_*`.
    Hydra,
    /// `SLURM_*`, in a step.
    Slurm,
    /// `PET_*` or `JOB_COMPLETION_INDEX`.
    Kubernetes,
    /// No launcher: a world of one.
    Alone,
}

/// Where the ranks of a run find each other.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Meeting {
    /// There is nobody to meet.
    Nowhere,
    /// Rank 0 serves a store on the first of these ports of this host that is free.
    Host {
        /// Name or address.
        host: String,
        /// The ports that rank 0 may take.
        ports: RangeInclusive<u16>,
    },
    /// Somebody else serves a store there: our launcher.
    Store {
        /// Name or address.
        host: String,
        /// The port.
        port: u16,
    },
    /// A folder of the one host, by a key that all ranks have; none: the parent process.
    Folder(Option<String>),
}

/// A process's place in a run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Place {
    /// Who says so.
    pub family: Family,
    /// My rank.
    pub rank: usize,
    /// Ranks of the run.
    pub world: usize,
    /// My number on this host, where that is known.
    pub local_rank: Option<usize>,
    /// Ranks on this host, where that is known.
    pub local_world: Option<usize>,
    /// Where to meet.
    pub meeting: Meeting,
    /// The run's name: equal on all ranks, another after a restart.
    pub run: String,
}

/// Ports after MASTER_PORT that rank 0 may take instead.
const MORE_PORTS: u16 = 16;

/// The port where no launcher says one: torchrun's.
const PORT: u16 = 29_500;

impl Place {
    /// Reads the place of this process from the environment it was given.
    ///
    /// # Errors
    /// [`Error::Environment`] with the variables that are missing, contradict or make no sense.
    pub fn parse(variables: &Variables) -> Result<Self> {
        let env = Env(variables);
        for family in [ours, torch, open_mpi, hydra, slurm, kubernetes] {
            if let Some(place) = family(&env)? {
                return place.checked(&env);
            }
        }
        Ok(Self {
            family: Family::Alone,
            rank: 0,
            world: 1,
            local_rank: Some(0),
            local_world: Some(1),
            meeting: Meeting::Nowhere,
            run: String::from("alone"),
        })
    }

    fn checked(mut self, env: &Env<'_>) -> Result<Self> {
        if self.rank >= self.world {
            return Err(Error::Environment(format!(
                "the environment says rank {} of a world of {}: ranks are 0 to {}",
                self.rank,
                self.world,
                self.world.saturating_sub(1)
            )));
        }
        if let (Some(rank), Some(world)) = (self.local_rank, self.local_world)
            && (rank >= world || world > self.world)
        {
            return Err(Error::Environment(format!(
                "the environment says local rank {rank} of {world} on this host, in a world of {}",
                self.world
            )));
        }
        if self.world == 1 {
            self.meeting = Meeting::Nowhere;
        }
        if let Some(run) = env.text("QUINTET_RUN_ID") {
            self.run = format!("{run}/{}", self.run);
        }
        Ok(self)
    }
}

/// The run of [`Family::Ours`] without its `QUINTET_RUN_ID`.
pub(crate) const OURS: &str = "ours";

struct Env<'a>(&'a Variables);

impl Env<'_> {
    /// A variable that is not empty.
    fn text(&self, name: &str) -> Option<&str> {
        let value = self.0.get(name)?.trim();
        (!value.is_empty()).then_some(value)
    }

    fn number(&self, name: &str) -> Result<Option<usize>> {
        let Some(text) = self.text(name) else {
            return Ok(None);
        };
        let number = text.parse().ok().filter(|&n: &usize| n <= MAX_RANKS);
        number
            .map(Some)
            .ok_or_else(|| wrong(name, text, "a whole number"))
    }

    /// A number that must be there since another variable is.
    fn needed(&self, name: &str, because: &str) -> Result<usize> {
        self.number(name)?.ok_or_else(|| {
            Error::Environment(format!(
                "{because} is set, but {name} is not: both must come from the same launcher{}",
                self.others(name)
            ))
        })
    }

    /// What other launchers left in the environment, to be named where it may be the confusion.
    fn others(&self, but: &str) -> String {
        let known = [
            "RANK",
            "WORLD_SIZE",
            "OMPI_COMM_WORLD_SIZE",
            "PMI_SIZE",
            "SLURM_PROCID",
            "SLURM_NTASKS",
            "PET_NNODES",
        ];
        let here: Vec<&str> = known
            .into_iter()
            .filter(|name| *name != but && self.text(name).is_some())
            .collect();
        if here.is_empty() {
            String::new()
        } else {
            format!(" ({} cannot stand in for it)", here.join(", "))
        }
    }

    fn port(&self, name: &str) -> Result<Option<u16>> {
        let Some(text) = self.text(name) else {
            return Ok(None);
        };
        let port = text.parse().ok().filter(|&port: &u16| port > 0);
        port.map(Some)
            .ok_or_else(|| wrong(name, text, "a port, 1 to 65535"))
    }

    /// MASTER_ADDR and MASTER_PORT, or the one of them that is set with the other's default.
    fn master(&self, prefix: &str, default: u16) -> Result<Option<(String, u16)>> {
        let (addr, port) = (
            format!("{prefix}MASTER_ADDR"),
            format!("{prefix}MASTER_PORT"),
        );
        let (host, number) = (self.text(&addr), self.port(&port)?);
        match (host, number) {
            (None, None) => Ok(None),
            (None, Some(_)) => Err(Error::Environment(format!(
                "{port} is set, but {addr} is not"
            ))),
            (Some(host), number) => Ok(Some((bare(host), number.unwrap_or(default)))),
        }
    }
}

/// No world is larger.
const MAX_RANKS: usize = 1 << 24;

/// A value as it may stand in a sentence.
fn shown(text: &str) -> String {
    text.chars().take(60).flat_map(char::escape_debug).collect()
}

fn wrong(name: &str, text: &str, what: &str) -> Error {
    let shown: String = text.chars().take(60).collect();
    Error::Environment(format!("{name} is {shown:?}, which is not {what}"))
}

/// An IPv6 address may come in brackets.
fn bare(host: &str) -> String {
    let inner = host.strip_prefix('[').and_then(|h| h.strip_suffix(']'));
    inner.unwrap_or(host).to_string()
}

fn at(host: String, port: u16, more: u16) -> Meeting {
    Meeting::Host {
        host,
        ports: port..=port.saturating_add(more),
    }
}

fn ours(env: &Env<'_>) -> Result<Option<Place>> {
    let Some(rank) = env.number("QUINTET_RANK")? else {
        if env.text("QUINTET_WORLD_SIZE").is_some() {
            env.needed("QUINTET_RANK", "QUINTET_WORLD_SIZE")?;
        }
        return Ok(None);
    };
    let world = env.needed("QUINTET_WORLD_SIZE", "QUINTET_RANK")?;
    let meeting = match (env.text("QUINTET_STORE"), env.master("QUINTET_", PORT)?) {
        (Some(folder), _) => Meeting::Folder(Some(folder.to_string())),
        (None, Some((host, port))) if env.text("QUINTET_MASTER_SERVED").is_some() => {
            Meeting::Store { host, port }
        }
        (None, Some((host, port))) => at(host, port, 0),
        (None, None) if world == 1 => Meeting::Nowhere,
        (None, None) => {
            return Err(Error::Environment(String::from(
                "QUINTET_RANK is set, but neither QUINTET_MASTER_ADDR nor QUINTET_STORE says where to meet",
            )));
        }
    };
    Ok(Some(Place {
        family: Family::Ours,
        rank,
        world,
        local_rank: env.number("QUINTET_LOCAL_RANK")?,
        local_world: env.number("QUINTET_LOCAL_WORLD_SIZE")?,
        meeting,
        run: String::from(OURS),
    }))
}

fn torch(env: &Env<'_>) -> Result<Option<Place>> {
    let Some(rank) = env.number("RANK")? else {
        let of_another = ["OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID"];
        let other = of_another.into_iter().find(|name| env.text(name).is_some());
        // A world without a rank belongs to nobody, but for an indexed job's, read further below.
        return match (env.text("WORLD_SIZE"), other) {
            (Some(_), Some(other)) => Err(Error::Environment(format!(
                "WORLD_SIZE is set without RANK, and {other} is set: a place must come from one launcher; unset WORLD_SIZE or set RANK too"
            ))),
            _ => Ok(None),
        };
    };
    let world = env.needed("WORLD_SIZE", "RANK")?;
    let local_rank = env.number("LOCAL_RANK")?;
    let per_node = env.text("PET_NPROC_PER_NODE");
    if local_rank.is_none() && per_node.is_some_and(|n| n != "1") {
        return Err(Error::Environment(format!(
            "PET_NPROC_PER_NODE is {}, but LOCAL_RANK is not set: RANK is then the pod's and not the process's; start through torchrun --no-python",
            shown(per_node.unwrap_or_default())
        )));
    }
    let elastic = env.text("TORCHELASTIC_RUN_ID");
    let agent = env.text("TORCHELASTIC_USE_AGENT_STORE") == Some("True");
    let Some((host, port)) = env.master("", PORT)? else {
        if world > 1 {
            return Err(Error::Environment(String::from(
                "RANK and WORLD_SIZE are set, but MASTER_ADDR is not: it is the host of rank 0",
            )));
        }
        return Ok(Some(Place {
            family: Family::Plain,
            rank,
            world,
            local_rank,
            local_world: env.number("LOCAL_WORLD_SIZE")?,
            meeting: Meeting::Nowhere,
            run: String::from("plain"),
        }));
    };
    let (family, first, more) = match (elastic, agent) {
        (Some(_), true) => (Family::Torchrun, port.saturating_add(1), MORE_PORTS - 1),
        (Some(_), false) => (Family::Torchrun, port, MORE_PORTS),
        (None, _) => (Family::Plain, port, 0),
    };
    let restart = env.text("TORCHELASTIC_RESTART_COUNT").unwrap_or("0");
    Ok(Some(Place {
        family,
        rank,
        world,
        local_rank,
        local_world: env.number("LOCAL_WORLD_SIZE")?,
        meeting: at(host, first, more),
        run: format!("torch-{}-{port}-{restart}", elastic.unwrap_or("plain")),
    }))
}

/// A launcher that names no address: MASTER_ADDR, or a folder where all ranks are on one host.
fn mpi_meeting(
    env: &Env<'_>,
    name: &str,
    world: usize,
    local_world: Option<usize>,
    key: Option<String>,
) -> Result<Meeting> {
    if let Some((host, port)) = env.master("", PORT)? {
        return Ok(at(host, port, 0));
    }
    if local_world == Some(world) {
        return Ok(Meeting::Folder(key));
    }
    Err(Error::Environment(format!(
        "{name} starts {world} ranks on several hosts and names no address: pass MASTER_ADDR, the host of rank 0, to all of them"
    )))
}

fn open_mpi(env: &Env<'_>) -> Result<Option<Place>> {
    let Some(rank) = env.number("OMPI_COMM_WORLD_RANK")? else {
        return Ok(None);
    };
    let world = env.needed("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK")?;
    let local_world = env.number("OMPI_COMM_WORLD_LOCAL_SIZE")?;
    let job = ["PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"];
    let key = job.into_iter().find_map(|name| env.text(name));
    Ok(Some(Place {
        family: Family::OpenMpi,
        rank,
        world,
        local_rank: env.number("OMPI_COMM_WORLD_LOCAL_RANK")?,
        local_world,
        meeting: mpi_meeting(env, "mpirun", world, local_world, key.map(String::from))?,
        run: format!("ompi-{}", key.unwrap_or("job")),
    }))
}

fn hydra(env: &Env<'_>) -> Result<Option<Place>> {
    let Some(rank) = env.number("PMI_RANK")? else {
        // PMIx without Open MPI says no world: Slurm, which starts it so, says it itself.
        if env.text("PMIX_RANK").is_some() && env.text("SLURM_PROCID").is_none() {
            return Err(Error::Environment(String::from(
                "PMIX_RANK is set, but no variable says how many ranks there are: set RANK, WORLD_SIZE and MASTER_ADDR",
            )));
        }
        return Ok(None);
    };
    // Slurm's own PMI sets these too, and knows more.
    if env.text("SLURM_PROCID").is_some() && slurm_step(env).is_some() {
        return Ok(None);
    }
    let world = env.needed("PMI_SIZE", "PMI_RANK")?;
    let local_world = env.number("MPI_LOCALNRANKS")?;
    let key = env.text("PMI_ID_JOB").map(String::from);
    Ok(Some(Place {
        family: Family::Hydra,
        rank,
        world,
        local_rank: env.number("MPI_LOCALRANKID")?,
        local_world,
        meeting: mpi_meeting(env, "mpiexec", world, local_world, key)?,
        run: String::from("pmi"),
    }))
}

fn slurm_step<'a>(env: &'a Env<'_>) -> Option<&'a str> {
    env.text("SLURM_STEP_ID")
        .or_else(|| env.text("SLURM_STEPID"))
}

fn slurm(env: &Env<'_>) -> Result<Option<Place>> {
    let Some(rank) = env.number("SLURM_PROCID")? else {
        return Ok(None);
    };
    let Some(step) = slurm_step(env) else {
        // A batch script, not a step: SLURM_PROCID is 0 in everything it starts.
        return match env.number("SLURM_NTASKS")? {
            Some(tasks) if tasks > 1 => Err(Error::Environment(format!(
                "SLURM_NTASKS is {tasks}, but SLURM_STEP_ID is not set: start the program with srun, or set RANK and WORLD_SIZE"
            ))),
            _ => Ok(None),
        };
    };
    // A step may be smaller than its job.
    let world = match env.number("SLURM_STEP_NUM_TASKS")? {
        Some(tasks) => tasks,
        None => env.needed("SLURM_NTASKS", "SLURM_PROCID")?,
    };
    let job = env
        .text("SLURM_JOB_ID")
        .or_else(|| env.text("SLURM_JOBID"))
        .unwrap_or("0");
    let number: u64 = job
        .parse()
        .map_err(|_| wrong("SLURM_JOB_ID", job, "a number"))?;
    // As JAX has it: ports above those that systems give away.
    let port = (number % 4096) as u16 + 61_440;
    let meeting = match env.master("", port)? {
        Some((host, port)) => at(host, port, 0),
        None => {
            let name = [
                "SLURM_STEP_NODELIST",
                "SLURM_JOB_NODELIST",
                "SLURM_NODELIST",
            ];
            let list = name.into_iter().find_map(|name| env.text(name));
            let list = list.ok_or_else(|| {
                Error::Environment(String::from(
                    "SLURM_PROCID is set, but neither SLURM_STEP_NODELIST nor MASTER_ADDR says where rank 0 is",
                ))
            })?;
            let host = first_host(list)
                .ok_or_else(|| wrong("SLURM_STEP_NODELIST", list, "a list of hosts"))?;
            at(host, port.min(u16::MAX - MORE_PORTS), MORE_PORTS)
        }
    };
    let restart = env.text("SLURM_RESTART_COUNT").unwrap_or("0");
    Ok(Some(Place {
        family: Family::Slurm,
        rank,
        world,
        local_rank: env.number("SLURM_LOCALID")?,
        local_world: tasks_here(env)?,
        meeting,
        run: format!("slurm-{job}.{step}-{restart}"),
    }))
}

/// `2(x3),1` and SLURM_NODEID: how many tasks this node has.
fn tasks_here(env: &Env<'_>) -> Result<Option<usize>> {
    let (Some(text), Some(node)) = (
        env.text("SLURM_STEP_TASKS_PER_NODE"),
        env.number("SLURM_NODEID")?,
    ) else {
        return Ok(None);
    };
    let malformed = || wrong("SLURM_STEP_TASKS_PER_NODE", text, "like 2(x3),1");
    let mut before = 0usize;
    for part in text.split(',') {
        let (tasks, times) = match part.split_once("(x") {
            Some((tasks, times)) => (tasks, times.strip_suffix(')').ok_or_else(malformed)?),
            None => (part, "1"),
        };
        let tasks: usize = tasks.parse().map_err(|_| malformed())?;
        let times: usize = times.parse().map_err(|_| malformed())?;
        before = before.saturating_add(times);
        if node < before {
            return Ok(Some(tasks));
        }
    }
    Ok(None)
}

/// The first host of a list like `n[001-015,20]-ib,x`.
#[must_use]
pub fn first_host(list: &str) -> Option<String> {
    let mut depth = 0;
    let end = list.find(|c| {
        depth += i32::from(c == '[') - i32::from(c == ']');
        c == ',' && depth == 0
    });
    let mut rest = list[..end.unwrap_or(list.len())].trim();
    let mut host = String::new();
    while let Some((before, inside)) = rest.split_once('[') {
        let (range, after) = inside.split_once(']')?;
        let first = range.split([',', '-']).next()?;
        if first.is_empty() || !first.bytes().all(|b| b.is_ascii_digit()) {
            return None;
        }
        host += before;
        host += first;
        rest = after;
    }
    host += rest;
    let fine = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '.' | '_' | ':');
    (!host.is_empty() && host.chars().all(fine)).then_some(host)
}

fn kubernetes(env: &Env<'_>) -> Result<Option<Place>> {
    let rank = match env.number("PET_NODE_RANK")? {
        Some(rank) => Some(rank),
        None => env.number("JOB_COMPLETION_INDEX")?,
    };
    let Some(rank) = rank else {
        return match env.text("WORLD_SIZE") {
            Some(world) if world != "1" => Err(Error::Environment(format!(
                "WORLD_SIZE is {}, but RANK is not set{}",
                shown(world),
                env.others("WORLD_SIZE")
            ))),
            _ => Ok(None),
        };
    };
    if env.text("PET_NODE_RANK").is_some()
        && let Some(per_node) = env.text("PET_NPROC_PER_NODE").filter(|n| *n != "1")
    {
        return Err(Error::Environment(format!(
            "PET_NPROC_PER_NODE is {}, but nothing says which of them this process is: start through torchrun --no-python",
            shown(per_node)
        )));
    }
    let world = match (env.number("PET_NNODES")?, env.number("WORLD_SIZE")?) {
        (Some(nodes), Some(world)) if nodes != world => {
            return Err(Error::Environment(format!(
                "PET_NNODES is {nodes}, but WORLD_SIZE is {world}"
            )));
        }
        (Some(world), _) | (None, Some(world)) => world,
        // An indexed job that says nothing more may be many jobs of one process.
        (None, None) if env.text("PET_NODE_RANK").is_none() => return Ok(None),
        (None, None) => env.needed("PET_NNODES", "PET_NODE_RANK")?,
    };
    let master = match env.master("PET_", PORT)? {
        Some(master) => Some(master),
        None => env.master("", PORT)?,
    };
    let meeting = match master {
        Some((host, port)) => at(host, port, 0),
        None if world == 1 => Meeting::Nowhere,
        None => {
            return Err(Error::Environment(String::from(
                "the job's index is set, but neither PET_MASTER_ADDR nor MASTER_ADDR says where rank 0 is",
            )));
        }
    };
    let run = ["JOBSET_NAME", "PET_RDZV_ID", "JOB_NAME"];
    let run = run.into_iter().find_map(|name| env.text(name));
    Ok(Some(Place {
        family: Family::Kubernetes,
        rank,
        world,
        local_rank: None,
        local_world: None,
        meeting,
        run: format!(
            "job-{}-{}",
            run.unwrap_or("plain"),
            env.text("JOBSET_RESTART_ATTEMPT").unwrap_or("0")
        ),
    }))
}
