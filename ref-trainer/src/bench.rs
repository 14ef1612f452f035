//! `quintet bench`: collectives in the columns of nccl-tests, and constants for choosing plans.
//!
//! ```text
//! quintet bench all_reduce --ranks 4                      threads of this process
//! quintet bench all_reduce --ranks 4 --transport shm      processes, which this one starts
//! mpirun -n 4 quintet bench all_reduce --transport tcp    processes that somebody started
//! mpirun -n 4 quintet bench all_reduce --transport nccl   the same, on the memory of a device each
//! quintet bench kernels                                   times for `quintet plan --times`
//! ```

use std::io::Write;
use std::path::PathBuf;

use quintet_collectives::bench::{Bench, Memory, Row, Slices, Timing, algbw, busbw, calibrate};
use quintet_collectives::cost::{Constants, Model, write};
use quintet_collectives::plan::Operation;
use quintet_collectives::process::from_env_with;
use quintet_collectives::{Communicator, Order, Transport, World};
use serde_json::json;

use crate::choice::saved;
use crate::cli::print;
use crate::failure::{Exit, Failure};
use crate::job::{DeviceKind, Dtype, Ranks};
use crate::launch::again;

#[cfg(all(feature = "nccl", any(feature = "cuda", feature = "emulated")))]
mod device;
mod kernels;

#[cfg(all(feature = "nccl", any(feature = "cuda", feature = "emulated")))]
use device::bench as on_devices;

/// What `quintet bench` is asked for.
#[derive(Debug, Clone, PartialEq)]
pub struct BenchJob {
    /// What is measured, how often.
    pub bench: Bench,
    /// What the ranks are, and what they speak over.
    pub transport: Ranks,
    /// Ranks; where this program starts them, so many.
    pub ranks: usize,
    /// Whose memory the elements lie in; of a device NCCL performs the calls.
    pub device: DeviceKind,
    /// The least and the most bytes, and what they grow by.
    pub sizes: (usize, usize, usize),
    /// The fold order.
    pub order: Order,
    /// Which plan when, as UCC's tuner has it: `all_reduce:0-4k:tree,4k-:ring`.
    pub overrides: String,
    /// Constants that were saved before.
    pub constants: Option<PathBuf>,
    /// Measure constants instead of operations, and save them here beside those of other transports.
    pub calibrate: bool,
    /// Time kernels instead, in a type on so many threads.
    pub kernels: Option<(Dtype, usize)>,
    /// One JSON object a line.
    pub json: bool,
    /// This process is one of several that a launcher has started.
    pub launched: bool,
}

/// Seconds that each part of a calibration takes, about.
const PATIENCE: f64 = 0.2;

/// Measures and prints.
///
/// # Errors
/// Exit 2 for a plan that cannot be, 3 for files of constants, 5 where a rank is lost; 4 where a result was
/// wrong.
pub fn bench(job: &BenchJob) -> Result<Exit, Failure> {
    if let Some((dtype, threads)) = job.kernels {
        return kernels::kernels(dtype, threads);
    }
    if job.device != DeviceKind::Cpu {
        return on_devices(job);
    }
    match job.transport {
        Ranks::Processes(over) if job.launched => {
            from_env_with(|options| options.kind = over.kind())?
                .run(|comm| Ok(exit(perform(job, comm.with_order(job.order), &mut Slices)?)))
        }
        Ranks::Processes(_) => again(job.ranks),
        Ranks::Threads => {
            let wrong = World::new(job.ranks)?
                .go(|comm| perform(job, comm.with_order(job.order), &mut Slices))?;
            Ok(exit(wrong.first().copied().unwrap_or(0)))
        }
    }
}

/// A build that has no device refuses.
#[cfg(not(all(feature = "nccl", any(feature = "cuda", feature = "emulated"))))]
fn on_devices(_: &BenchJob) -> Result<Exit, Failure> {
    crate::reach::built()?;
    Err(Failure::usage(
        "this quintet was built without CUDA; cargo build --release -p quintet-ref-trainer --features cuda,nccl builds one with both (it needs no toolkit)",
    ))
}

/// How it ends where so many elements were wrong.
fn exit(wrong: u64) -> Exit {
    match wrong {
        0 => Exit::Fine,
        _ => Exit::Mismatch,
    }
}

/// A rank's part; rank 0 prints. How many elements were wrong, on all ranks.
fn perform<T: Transport + Send + 'static>(
    job: &BenchJob,
    comm: Communicator<T>,
    memory: &mut dyn Memory<T>,
) -> Result<u64, Failure> {
    let comm = comm.with_model(model(job)?);
    if job.calibrate {
        let found = calibrate(&comm, PATIENCE)?;
        if comm.rank() == 0 {
            keep(job, found)?;
        }
        return Ok(0);
    }
    let say = |text: String| {
        if comm.rank() == 0 {
            print(&text)
        } else {
            Ok(())
        }
    };
    if !job.json {
        say(head(job, comm.world()))?;
    }
    let (mut bytes, most, factor) = job.sizes;
    let mut wrong = 0;
    loop {
        let row = job.bench.measure_in(&comm, bytes, memory)?;
        let forms = [Some(row.apart), row.in_place];
        wrong += forms.iter().flatten().filter_map(|t| t.wrong).sum::<u64>();
        say(if job.json {
            objects(job, comm.world(), &row)
        } else {
            line(job, comm.world(), &row)
        })?;
        match bytes.max(1).checked_mul(factor) {
            Some(next) if next <= most => bytes = next,
            _ => break,
        }
    }
    Ok(wrong)
}

/// What performs the calls.
fn carrier(job: &BenchJob) -> &'static str {
    match job.device {
        DeviceKind::Cpu => job.transport.transport(),
        DeviceKind::Emulated | DeviceKind::Cuda => "nccl",
    }
}

/// The model that chooses: saved constants where there are some for this transport.
fn model(job: &BenchJob) -> Result<Model, Failure> {
    let name = job.transport.transport();
    // What `auto`, and MPI, take between processes of one host.
    let usual = match name {
        "auto" | "mpi" => "shm",
        own => own,
    };
    let mut within = Constants::of(usual).unwrap_or(Constants::LOCAL);
    if let Some(path) = &job.constants
        && let Some((_, saved)) = saved(path)?.into_iter().find(|(n, _)| n == name)
    {
        within = saved;
    }
    let overrides = job
        .overrides
        .parse()
        .map_err(|e: quintet_collectives::Error| Failure::usage(e.to_string()))?;
    Ok(Model {
        within,
        overrides,
        ..Model::default()
    })
}

/// Prints what was measured and, where a file is named, writes it there beside what is in it.
fn keep(job: &BenchJob, found: Constants) -> Result<(), Failure> {
    let name = job.transport.transport().to_string();
    let text = write(&[(name.clone(), found)]);
    if let Some(path) = &job.constants {
        let mut all = saved(path)?;
        match all.iter_mut().find(|(n, _)| *n == name) {
            Some((_, old)) => *old = found,
            None => all.push((name, found)),
        }
        // Beside it and then in its place, so that nobody reads half a file.
        let beside = path.with_extension("tmp");
        let failed = |e: std::io::Error| Failure::file("write", path, &e);
        let mut file = std::fs::File::create(&beside).map_err(failed)?;
        file.write_all(write(&all).as_bytes()).map_err(failed)?;
        drop(file);
        std::fs::rename(&beside, path).map_err(failed)?;
    }
    print(&text)
}

fn head(job: &BenchJob, world: usize) -> String {
    format!(
        "# {} over {}, {world} ranks, order {}; size in bytes, time in us (p50, then p99), bandwidth in GB/s\n\
         #{:>11} {:>11} {:>5} {:>5} {:>9} {:>9} {:>7} {:>7} {:>6} | {:>9} {:>9} {:>7} {:>7} {:>6} | {:>9}  {}\n",
        job.bench.op,
        carrier(job),
        job.order,
        "size",
        "count",
        "type",
        "redop",
        "time",
        "p99",
        "algbw",
        "busbw",
        "#wrong",
        "in-place",
        "p99",
        "algbw",
        "busbw",
        "#wrong",
        "predicted",
        "plan",
    )
}

fn line(job: &BenchJob, world: usize, row: &Row) -> String {
    let us = |t: std::time::Duration| t.as_secs_f64() * 1e6;
    let op = job.bench.op;
    let redop = if op.folds() { "sum" } else { "none" };
    let form = |timing: Option<Timing>| match timing {
        None => format!("{:>9} {:>9} {:>7} {:>7} {:>6}", "-", "-", "-", "-", "-"),
        Some(t) => format!(
            "{:>9.2} {:>9.2} {:>7.3} {:>7.3} {:>6}",
            us(t.p50),
            us(t.p99),
            algbw(row.bytes, t.p50),
            busbw(op, row.bytes, world, t.p50),
            t.wrong.map_or_else(|| "N/A".into(), |n| n.to_string()),
        ),
    };
    format!(
        " {:>11} {:>11} {:>5} {redop:>5} {} | {} | {:>9}  {}\n",
        row.bytes,
        row.len,
        "f32",
        form(Some(row.apart)),
        form(row.in_place),
        row.predicted
            .map_or_else(|| "-".into(), |t| format!("{:.2}", us(t))),
        row.algorithm,
    )
}

/// One object a form, each on a line.
fn objects(job: &BenchJob, world: usize, row: &Row) -> String {
    let us = |t: std::time::Duration| t.as_secs_f64() * 1e6;
    let object = |timing: Timing, in_place: bool| {
        let object = json!({
            "op": job.bench.op.name(),
            "transport": carrier(job),
            "ranks": world,
            "bytes": row.bytes,
            "in_place": in_place,
            "us": us(timing.p50),
            "p99_us": us(timing.p99),
            "algbw_GBps": algbw(row.bytes, timing.p50),
            "busbw_GBps": busbw(job.bench.op, row.bytes, world, timing.p50),
            "predicted_us": row.predicted.map(us),
            "algorithm": row.algorithm,
            "wrong": timing.wrong,
        });
        format!("{object}\n")
    };
    let mut text = object(row.apart, false);
    if let Some(timing) = row.in_place {
        text += &object(timing, true);
    }
    text
}

/// The operation of this name, if it can be measured.
#[must_use]
pub fn operation(name: &str) -> Option<Operation> {
    let wanted = name.replace('-', "_");
    let mut all = quintet_collectives::bench::OPERATIONS.into_iter();
    all.find(|op| op.name() == wanted)
}
