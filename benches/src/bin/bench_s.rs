//! Throughput of training, as one JSON line in the form that peers print theirs.
//!
//! `bench-s --ranks 8 --threads 1 --steps 6` trains on 8 ranks (dp 2, tp 2, pp 2) of one thread
//! each and prints tokens per second of the best and of the median step. Two steps before these
//! do not count. `tok_cpu_s_median` is tokens per second of CPU time, all threads together: it moves
//! less where others use the machine too. `--profile` writes to stderr where the time went.

use std::process::ExitCode;

use clap::{Parser, ValueEnum};
use quintet_benches::{median, profile, train::Setup};
use quintet_ref_trainer::failure::{Exit, Failure, end};
use serde_json::json;

/// Throughput of training on this CPU, as one JSON line.
#[derive(Parser)]
struct Args {
    /// The model: bench-s or bench-m.
    #[arg(long, value_enum, ignore_case = true, default_value = "s")]
    config: Config,
    /// Ranks: 1, 2 (dp), 4 (dp, tp) or 8 (dp, tp, pp), each axis 2.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u8).range(1..=8))]
    ranks: u8,
    /// Another layout: dp,tp,pp,cp.
    #[arg(long, value_delimiter = ',', num_args = 1)]
    layout: Option<Vec<usize>>,
    /// What is sharded over dp and cp: 0 nothing, 1 the optimizer, 2 gradients too, 3 parameters too.
    #[arg(long, default_value_t = 0, value_parser = clap::value_parser!(u8).range(..=3))]
    zero_stage: u8,
    /// Threads of each rank.
    #[arg(long, default_value_t = 1)]
    threads: usize,
    /// Steps that count.
    #[arg(long, default_value_t = 6, value_parser = clap::value_parser!(u64).range(1..))]
    steps: u64,
    /// Sequences of a microbatch.
    #[arg(long, default_value_t = 1)]
    micro_batch: usize,
    /// Write to stderr where the time went.
    #[arg(long)]
    profile: bool,
}

#[derive(Clone, Copy, ValueEnum)]
enum Config {
    S,
    M,
}

/// Steps that do not count.
const WARM_UP: u64 = 2;

fn main() -> ExitCode {
    end(run(&Args::parse()).map(|()| Exit::Fine))
}

fn run(args: &Args) -> Result<(), Failure> {
    let layout = match (&args.layout, args.ranks) {
        (Some(given), _) => match given[..] {
            [dp, tp, pp, cp] => [dp, tp, pp, cp],
            _ => return Err(Failure::usage("--layout takes dp,tp,pp,cp as in 2,2,1,1")),
        },
        (None, 1) => [1, 1, 1, 1],
        (None, 2) => [2, 1, 1, 1],
        (None, 4) => [2, 2, 1, 1],
        (None, 8) => [2, 2, 2, 1],
        (None, ranks) => {
            return Err(Failure::usage(format!(
                "--ranks {ranks} names no layout; take 1, 2, 4, 8 or --layout dp,tp,pp,cp"
            )));
        }
    };
    let (model, name) = match args.config {
        Config::S => ("bench-s", "S"),
        Config::M => ("bench-m", "M"),
    };
    let setup = Setup {
        model,
        layout,
        zero_stage: args.zero_stage,
        threads: args.threads,
        micro_batch: args.micro_batch,
    };
    let mut trainer = setup.start(args.profile.then_some(WARM_UP))?;
    trainer.team.run(WARM_UP)?;
    let (mut seconds, mut worked) = (Vec::new(), Vec::new());
    for _ in 0..args.steps {
        let before = profile::process_seconds();
        seconds.push(trainer.team.run(1)?.as_secs_f64());
        worked.push(profile::process_seconds() - before);
    }
    let (tokens, parameters) = (trainer.tokens as f64, trainer.parameters);
    let trace = trainer.end()?;
    let best = seconds.iter().copied().fold(f64::INFINITY, f64::min);
    let all: f64 = seconds.iter().sum();
    let rounded = |x: f64, digits: f64| (x * digits).round() / digits;
    println!(
        "{}",
        json!({
            "peer": "quintet",
            "config": name,
            "dtype": "f32",
            "ranks": layout.iter().product::<usize>(),
            "layout": layout,
            "zero_stage": args.zero_stage,
            "threads": args.threads,
            "params": parameters,
            "tok_s_best": rounded(tokens / best, 10.0),
            "tok_s_median": rounded(tokens / median(seconds), 10.0),
            "tok_cpu_s_median": rounded(tokens / median(worked), 10.0),
            "loss": rounded(trace.loss, 1e4),
        })
    );
    if args.profile {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        eprint!("{}", profile::table(&trace.books, args.steps, all, cores));
    }
    Ok(())
}
