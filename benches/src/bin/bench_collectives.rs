//! One collective over a range of lengths, as one JSON line each in the form that peers print theirs.
//!
//! `bench-collectives --op all_reduce --ranks 2 --way shm`: ranks are threads (`threads`), or processes with
//! slices of their own (`shm`), buffers they share (`shared`), unix sockets (`unix`) or tcp (`tcp`).
//! Each iteration begins with a barrier; a rank's figure is the median of its iterations, and the slowest rank's
//! counts. Out of place, ranks pinned to the cores in turn. `--triad` first measures what memory
//! gives all ranks together, and each long all_reduce then says which share of that it reached,
//! by 3 bytes touched for each byte of each rank (read the input, write and read no more than the output).

use std::path::PathBuf;
use std::process::{Child, Command, ExitCode};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Instant;

use clap::{Parser, ValueEnum};
use quintet_benches::median;
use quintet_collectives::cost::{Model, Topology};
use quintet_collectives::plan::Hosts;
use quintet_collectives::transport::Transport;
use quintet_collectives::transport::buffer::Buffer;
use quintet_collectives::{Communicator, Error, ReduceOp, Result, World, from_env};
use serde_json::json;

/// One collective beside others', as JSON lines.
#[derive(Parser, Clone)]
struct Args {
    #[arg(long, value_enum, default_value = "all-reduce")]
    op: Op,
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u16).range(1..))]
    ranks: u16,
    #[arg(long, value_enum, default_value = "threads")]
    way: Way,
    /// Lengths in bytes; by default those of the peers.
    #[arg(long, value_delimiter = ',')]
    sizes: Vec<usize>,
    /// Measure the memory's speed first.
    #[arg(long)]
    triad: bool,
    /// Say only how long a cache line takes from one core to the next and back, halved: {"line_ns": ...}.
    #[arg(long)]
    line: bool,
}

#[derive(ValueEnum, Clone, Copy, PartialEq)]
enum Op {
    #[value(alias = "all_reduce")]
    AllReduce,
    #[value(alias = "all_gather")]
    AllGather,
    #[value(alias = "reduce_scatter")]
    ReduceScatter,
    #[value(alias = "all_to_all")]
    AllToAll,
    Broadcast,
}

#[derive(ValueEnum, Clone, Copy, PartialEq)]
enum Way {
    Threads,
    Shm,
    Shared,
    Unix,
    Tcp,
}

const SIZES: [usize; 8] = [
    8,
    1 << 10,
    16 << 10,
    256 << 10,
    1 << 20,
    4 << 20,
    16 << 20,
    64 << 20,
];

/// Where a started process finds the others.
const STORE: &str = "QUINTET_STORE";

fn main() -> ExitCode {
    let mut args = Args::parse();
    if args.sizes.is_empty() {
        args.sizes = SIZES.to_vec();
    }
    if args.line {
        if std::thread::available_parallelism().is_ok_and(|cores| cores.get() < 2) {
            eprintln!("bench-collectives: a line goes between two cores, and there is one");
            return ExitCode::from(2);
        }
        println!("{}", json!({ "line_ns": line().round() }));
        return ExitCode::SUCCESS;
    }
    let ranks = usize::from(args.ranks);
    let outcome = match args.way {
        Way::Threads => World::run(ranks, |comm| rank(&comm, &args)).map(drop),
        _ if std::env::var_os(STORE).is_some() => {
            let topology = Some(Topology::new(Hosts::blocks(ranks, ranks)));
            let one_host = Model {
                topology,
                ..Model::default()
            };
            from_env()
                .and_then(|process| process.run(|comm| rank(&comm.with_model(one_host), &args)))
        }
        _ => processes(&args),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("bench-collectives: {error}");
            ExitCode::from(5)
        }
    }
}

/// Starts this program again, once for each rank.
fn processes(args: &Args) -> Result<()> {
    let system = |what| {
        move |e: std::io::Error| Error::System {
            what,
            reason: e.to_string(),
        }
    };
    let transport = match args.way {
        Way::Tcp => "tcp",
        Way::Unix => "unix",
        _ => "shm",
    };
    let folder: PathBuf =
        std::env::temp_dir().join(format!("quintet-bench-{}", std::process::id()));
    std::fs::create_dir_all(&folder).map_err(system("make a folder"))?;
    let program = std::env::current_exe().map_err(system("find this program"))?;
    let children: Vec<std::io::Result<Child>> = (0..args.ranks)
        .map(|rank| {
            Command::new(&program)
                .args(std::env::args().skip(1))
                .env(STORE, &folder)
                .env("QUINTET_TRANSPORT", transport)
                .env("QUINTET_RANK", rank.to_string())
                .env("QUINTET_WORLD_SIZE", args.ranks.to_string())
                .spawn()
        })
        .collect();
    let mut fine = true;
    for child in children {
        fine &= child
            .and_then(|mut child| child.wait())
            .map_err(system("run a rank"))?
            .success();
    }
    let _ = std::fs::remove_dir_all(&folder);
    if fine {
        Ok(())
    } else {
        Err(Error::System {
            what: "run all ranks",
            reason: "one of them failed".into(),
        })
    }
}

fn rank<T: Transport + Send + 'static>(comm: &Communicator<T>, args: &Args) -> Result<()> {
    pin(comm.rank());
    let memory = if args.triad { Some(triad(comm)?) } else { None };
    for &bytes in &args.sizes {
        let n = comm.world();
        let len = (bytes / 4).max(n) / n * n;
        let bytes = len * 4;
        let seconds = measure(comm, args, len)?;
        let mut slowest = [seconds];
        comm.all_reduce(&mut slowest, ReduceOp::Max)?;
        let [seconds] = slowest;
        if comm.rank() != 0 {
            continue;
        }
        let mut line = json!({
            "peer": "quintet", "way": name(args.way), "op": name(args.op), "ranks": n, "bytes": bytes,
            "us": (seconds * 1e9).round() / 1e3,
            "algbw_GBps": (bytes as f64 / seconds * 1e-6).round() / 1e3,
        });
        if let Some(memory) = memory {
            line["triad_GBps"] = json!((memory * 1e-6).round() / 1e3);
            if args.op == Op::AllReduce {
                let bound = (3 * n * bytes) as f64 / memory;
                line["of_memory"] = json!((bound / seconds * 1e3).round() / 1e3);
            }
        }
        println!("{line}");
    }
    Ok(())
}

fn name(value: impl ValueEnum) -> String {
    let name = value.to_possible_value();
    name.map_or_else(String::new, |name| name.get_name().replace('-', "_"))
}

fn measure<T: Transport + Send + 'static>(
    comm: &Communicator<T>,
    args: &Args,
    len: usize,
) -> Result<f64> {
    let make = |len: usize| -> Result<Memory> {
        let mut memory = match args.way {
            Way::Shared => Memory::Shared(comm.alloc(len)?),
            _ => Memory::Own(vec![0.0; len]),
        };
        memory
            .slice()
            .iter_mut()
            .enumerate()
            .for_each(|(i, x)| *x = (i % 7) as f32);
        Ok(memory)
    };
    let n = comm.world();
    let (mut x, mut y) = (make(len)?, make(len)?);
    let (x, y) = (x.slice(), y.slice());
    let mut go = || match args.op {
        Op::AllReduce => comm.all_reduce_into(x, y, ReduceOp::Sum),
        Op::AllGather => comm.all_gather(&x[..len / n], y),
        Op::ReduceScatter => comm.reduce_scatter(x, &mut y[..len / n], ReduceOp::Sum),
        Op::AllToAll => comm.all_to_all(x, y),
        Op::Broadcast => comm.broadcast(x, 0),
    };
    let times = match len * 4 {
        0..=16384 => 400,
        16385..=1048576 => 60,
        _ => 12,
    };
    let mut seconds = Vec::with_capacity(times);
    for turn in 0..times + 5 {
        comm.barrier()?;
        let start = Instant::now();
        go()?;
        let took = start.elapsed().as_secs_f64();
        if turn >= 5 {
            seconds.push(took);
        }
    }
    Ok(median(seconds))
}

enum Memory {
    Own(Vec<f32>),
    Shared(Buffer<f32>),
}

impl Memory {
    fn slice(&mut self) -> &mut [f32] {
        match self {
            Self::Own(x) => x,
            Self::Shared(x) => x,
        }
    }
}

/// Bytes a second of `a = b + s c` by all ranks at once: the best of a few passes over far more
/// than the caches hold.
fn triad<T: Transport + Send + 'static>(comm: &Communicator<T>) -> Result<f64> {
    let len = 16 << 20;
    let (mut a, b, c) = (vec![0f32; len], vec![1f32; len], vec![2f32; len]);
    let mut best = f64::INFINITY;
    for _ in 0..5 {
        comm.barrier()?;
        let start = Instant::now();
        for ((a, b), c) in a.iter_mut().zip(&b).zip(&c) {
            *a = b + 3.0 * c;
        }
        std::hint::black_box(&mut a);
        let mut took = [start.elapsed().as_secs_f64()];
        comm.all_reduce(&mut took, ReduceOp::Max)?;
        best = best.min(took[0]);
    }
    Ok((comm.world() * 3 * 4 * len) as f64 / best)
}

/// Nanoseconds that a cache line takes from core to core: the least of a few goes. The host of a virtual machine may
/// move its cores nearer or farther while it runs, and all that two ranks exchange with them.
fn line() -> f64 {
    const TURNS: u32 = 500;
    let ball = AtomicU32::new(0);
    let wait_for = |turn| {
        while ball.load(Ordering::Acquire) != turn {
            std::hint::spin_loop();
        }
    };
    let goes = 0..20;
    std::thread::scope(|scope| {
        scope.spawn(|| {
            pin(1);
            for turn in 0..TURNS * goes.end {
                wait_for(2 * turn + 1);
                ball.store(2 * turn + 2, Ordering::Release);
            }
        });
        pin(0);
        goes.clone()
            .map(|go| {
                let start = Instant::now();
                for turn in go * TURNS..(go + 1) * TURNS {
                    ball.store(2 * turn + 1, Ordering::Release);
                    wait_for(2 * turn + 2);
                }
                start.elapsed().as_secs_f64() * 1e9 / f64::from(2 * TURNS)
            })
            .fold(f64::INFINITY, f64::min)
    })
}

/// Keeps this thread on one core.
fn pin(rank: usize) {
    #[cfg(target_os = "linux")]
    {
        use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
        if let Ok(may) = sched_getaffinity(None) {
            let cores: Vec<usize> = (0..CpuSet::MAX_CPU).filter(|&c| may.is_set(c)).collect();
            let mut one = CpuSet::new();
            one.set(cores[rank % cores.len().max(1)]);
            // Without it the figures scatter more.
            let _ = sched_setaffinity(None, &one);
        }
    }
    #[cfg(not(target_os = "linux"))]
    let _ = rank;
}
