//! The command line: arguments in, a judged [`Job`] or one sentence out.
//!
//! ```text
//! arguments -> flags as given (args) -> refuse what is not built -> fill in -> judge -> Command
//!                                       (refuse)                    (apply)    (Job::check)
//! ```

use std::ffi::OsString;
use std::io::{IsTerminal, Write};
use std::path::{Path, PathBuf};

use clap::{Args, CommandFactory, FromArgMatches, Parser, Subcommand};
use quintet_collectives::environment::Variables;
use quintet_planner::config::Batch;

use crate::bench::BenchJob;
use crate::checkpoint::job_of;
use crate::convert::Convert;
use crate::failure::Failure;
use crate::job::{Dtype, Job, OptimizerKind};
use crate::plan::Plan;

mod apply;
mod args;
mod bench;
mod plan;
mod ranks;
mod refuse;
#[cfg(test)]
mod tests;
mod trace;
mod words;

use apply::{Base, Told};

/// What is to be done.
#[derive(Debug, Clone, PartialEq)]
pub enum Command {
    /// Train.
    Train(Job),
    /// Compare a layout with the oracle and the twin, from parameters drawn at random.
    Verify {
        /// Model, layout, batch and optimizer to compare with.
        job: Job,
        /// Print one JSON object.
        json: bool,
    },
    /// Mean loss of a model over a text.
    Eval {
        /// Layout, model, text and sequence length; its optimizer and steps mean nothing.
        job: Job,
        /// Where the parameters are.
        weights: Weights,
        /// Print one JSON object.
        json: bool,
    },
    /// Measure collectives.
    Bench(BenchJob),
    /// Start ranks as processes of a command.
    Launch {
        /// How many.
        ranks: usize,
        /// Program and arguments.
        command: Vec<OsString>,
    },
    /// Choose a layout.
    Plan(Box<Plan>),
    /// Write parameters in the other kind of folder.
    Convert(Convert),
    /// Compile the CUDA kernels.
    Precompile(Precompile),
    /// Help, version or a drawing was asked for: print this on stdout and exit 0.
    Print(String),
}

/// Which CUDA kernels to compile, and where to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Precompile {
    /// Compute capabilities.
    pub archs: Vec<u32>,
    /// Files of kernels; of none, all.
    pub modules: Vec<String>,
    /// The folder to write.
    pub out: PathBuf,
}

/// Where trained parameters are.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Weights {
    /// A folder of Hugging Face's making: `config.json` and safetensors.
    Folder(PathBuf),
    /// A checkpoint of ours.
    Checkpoint(PathBuf),
}

/// Reads the command line and the environment.
///
/// # Errors
/// Exit 2 for what cannot be understood, is not built or cannot be laid out; 3 for a model file
/// that cannot be read.
pub fn parse<I>(arguments: I, env: &Variables) -> Result<Command, Failure>
where
    I: IntoIterator,
    I::Item: Into<OsString>,
{
    let arguments: Vec<OsString> = arguments.into_iter().map(Into::into).collect();
    nameable(&arguments)?;
    let mut command = command();
    let cli = match command
        .try_get_matches_from_mut(arguments)
        .and_then(|matches| Cli::from_arg_matches(&matches))
    {
        Ok(cli) => cli,
        Err(error) if error.use_stderr() => return Err(Failure::usage(sentence(&error))),
        Err(help) => return Ok(Command::Print(painted(&help, env))),
    };
    // A launcher may itself be launched: its ranks are told their own places.
    let place = match cli.subcommand {
        Some(Sub::Launch(_)) => None,
        _ => ranks::launched(env)?,
    };
    let told = Told {
        env,
        launched: place.as_ref(),
    };
    let alone = |subcommand| refuse::several(subcommand, told.launched);
    match cli.subcommand {
        None => apply::job(Base::train(Job::demo()), &cli.job, told).and_then(train),
        Some(Sub::Train(args)) => {
            apply::job(Base::train(Job::default()), &args, told).and_then(train)
        }
        Some(Sub::Verify(args)) => {
            refuse::any_output("verify", &args.job.output)?;
            let job = apply::job(Base::own_batch(Job::verify()), &args.job, told)?;
            if job.dtype != Dtype::F64 && job.optimizer.kind == OptimizerKind::AdamW {
                return Err(Failure::usage(
                    "verify compares AdamW in f64 alone, for in a narrower type the rounding of a gradient near 0 decides a whole step; give --dtype f64 or --optimizer sgd",
                ));
            }
            Ok(Command::Verify {
                job,
                json: args.json,
            })
        }
        Some(Sub::Eval(args)) => eval(&args, told),
        Some(Sub::Plan(args)) => {
            alone("plan")?;
            Ok(Command::Plan(Box::new(args.plan()?)))
        }
        Some(Sub::Bench(args)) => args.job(told).map(Command::Bench),
        Some(Sub::Convert(args)) => {
            alone("convert")?;
            Ok(Command::Convert(Convert {
                from: args.from,
                to: args.to,
            }))
        }
        Some(Sub::Trace(args)) => {
            alone("trace")?;
            match &args.recorder {
                Some(folder) => crate::flight::describe(folder),
                None => trace::describe(&args.schedule()?),
            }
            .map(Command::Print)
        }
        Some(Sub::Launch(args)) => Ok(Command::Launch {
            ranks: args.ranks.get(),
            command: args.command,
        }),
        Some(Sub::Precompile(args)) => {
            alone("precompile")?;
            Ok(Command::Precompile(Precompile {
                archs: args.arch,
                modules: args.modules,
                out: args.out,
            }))
        }
    }
}

/// Prints on stdout what [`Command::Print`] holds. A reader that has gone away is no failure.
///
/// # Errors
/// Exit 3 where stdout cannot be written for another reason.
pub fn print(text: &str) -> Result<(), Failure> {
    let mut out = std::io::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Err(e) if e.kind() != std::io::ErrorKind::BrokenPipe => {
            Err(Failure::data(format!("cannot write to stdout: {e}")))
        }
        _ => Ok(()),
    }
}

/// Refuses what is not UTF-8 before anything is done: a run writes its arguments to a JSON file,
/// which could not name such a path.
fn nameable(arguments: &[OsString]) -> Result<(), Failure> {
    // The program's own name may be anything.
    match arguments
        .iter()
        .skip(1)
        .find(|word| word.to_str().is_none())
    {
        None => Ok(()),
        Some(word) => Err(Failure::usage(format!(
            "the argument {word:?} is not UTF-8, and a run's config.json could not name it; rename the file or folder"
        ))),
    }
}

fn train(job: Job) -> Result<Command, Failure> {
    refuse::train(job.device)?;
    Ok(Command::Train(job))
}

fn eval(args: &EvalArgs, told: Told<'_>) -> Result<Command, Failure> {
    let weights = match (&args.load, &args.model.model) {
        (Some(_), Some(_)) => {
            return Err(Failure::usage(
                "a checkpoint holds its own model; give --load DIR or --model DIR, not both",
            ));
        }
        (Some(dir), None) => Weights::Checkpoint(dir.clone()),
        (None, Some(path)) if Path::new(path).exists() => Weights::Folder(path.into()),
        _ => {
            return Err(Failure::usage(
                "eval needs trained parameters: give --model DIR with config.json and safetensors, or --load DIR of a checkpoint",
            ));
        }
    };
    let mut defaults = Job {
        batch: Batch {
            micro_batch: 1,
            global_batch: 8,
            ..Job::default().batch
        },
        ..Job::default()
    };
    if let Weights::Checkpoint(root) = &weights {
        // Its model first, so that flags say what is to be computed with it.
        let saved = job_of(root)?.saved;
        (defaults.model, defaults.model_name) = (saved.model, saved.model_name);
        defaults.max_positions = saved.max_positions;
        defaults.pack_documents = saved.pack_documents;
        defaults.batch.seq = saved.batch.seq;
    }
    let base = Base::own_batch(defaults);
    let (batch, device) = (&args.batch, &args.device);
    let job = apply::job_without_steps(base, &args.layout, &args.model, batch, device, told)?;
    refuse::eval(job.device)?;
    Ok(Command::Eval {
        job,
        weights,
        json: args.json,
    })
}

#[derive(Debug, Parser)]
#[command(
    name = "quintet",
    version,
    about = "Trains a small language model under any layout, and proves that it computes what one device computes",
    long_about = None,
    after_help = EXAMPLES,
    args_conflicts_with_subcommands = true,
    max_term_width = 110
)]
struct Cli {
    #[command(subcommand)]
    subcommand: Option<Sub>,
    #[command(flatten)]
    job: args::JobArgs,
}

const EXAMPLES: &str = "\
Without a subcommand the demo runs: a tiny mixture of experts on the built-in play, over dp 2 x tp 2 x pp 2 x cp 2 =
16 ranks that share the experts as ep 4, and the proof at the end. Where one degree of a layout is given, those that
are not are 1; where none is, ep gives way to the model.

  quintet                                  the demo
  quintet --model tiny                     the same without experts
  quintet train --tp 2 --pp 2 --steps 100  another layout of the same problem
  quintet verify --tp 4 --zero-stage 1     three steps of it against one device, number by number
  quintet plan --model llama3-70b --gpus 64  which layout, why, at what cost
  quintet --config runs/0001/config.json   that run again

Exit codes: 0 fine; 2 usage or layout; 3 data or checkpoint; 4 verify found a difference; 5 a rank was lost.";

const VERIFY: &str = "\
Where no degree is given the layout is the demo's, dp 2 x tp 2 x pp 2 x cp 2 with ep 4 (less, where the model's
experts want it); where one is given, those that are not are 1.
Exit 0 only where all of it holds, 4 where something differs.";

#[derive(Debug, Subcommand)]
enum Sub {
    /// Train a model (what runs without a subcommand)
    Train(Box<args::JobArgs>),
    /// Compare a few steps of a layout with one device: losses, gradients, parameters, bytes sent
    Verify(Box<VerifyArgs>),
    /// Mean loss in nats per token of a trained model over a text
    Eval(Box<EvalArgs>),
    /// Which layout for a model on a cluster: memory, traffic by link, bubble, time; ranked, with reasons
    Plan(Box<plan::PlanArgs>),
    /// Measure collectives, in the columns of nccl-tests, or the constants that plans are chosen by
    Bench(bench::BenchArgs),
    /// Write a Hugging Face folder as a checkpoint, or a checkpoint as a Hugging Face folder
    Convert(ConvertArgs),
    /// Draw a pipeline schedule, with its bubble and the activations it holds, or read what ranks recorded
    Trace(trace::TraceArgs),
    /// Start ranks on this host as processes of a command, prefix what they print, end all when one fails
    Launch(LaunchArgs),
    /// Compile the CUDA kernels for GPUs that need not be there, so that programs need no compiler
    Precompile(PrecompileArgs),
}

#[derive(Debug, Args)]
struct VerifyArgs {
    /// Print one JSON object instead of the table
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    job: args::JobArgs,
}

#[derive(Debug, Args)]
struct EvalArgs {
    /// Print one JSON object: loss, tokens
    #[arg(long)]
    json: bool,
    /// Parameters from a checkpoint of ours [default: from the folder that --model names]
    #[arg(long, value_name = "DIR")]
    load: Option<PathBuf>,
    #[command(flatten)]
    layout: args::LayoutArgs,
    #[command(flatten)]
    model: args::ModelArgs,
    #[command(flatten)]
    batch: args::BatchArgs,
    #[command(flatten)]
    device: args::DeviceArgs,
}

#[derive(Debug, Args)]
struct LaunchArgs {
    /// Ranks to start
    #[arg(short = 'n', long = "ranks", value_name = "N")]
    ranks: std::num::NonZeroUsize,
    /// The command, after `--`
    #[arg(last = true, required = true, value_name = "CMD")]
    command: Vec<OsString>,
}

#[derive(Debug, Args)]
struct ConvertArgs {
    /// config.json with safetensors, or a checkpoint of ours
    #[arg(value_name = "FROM")]
    from: PathBuf,
    /// The folder to write, which must not be there yet
    #[arg(value_name = "TO")]
    to: PathBuf,
}

#[derive(Debug, Args)]
struct PrecompileArgs {
    /// Compute capabilities, such as 80,90
    #[arg(long, required = true, value_delimiter = ',', value_name = "CAPABILITIES", value_parser = clap::value_parser!(u32).range(10..1000))]
    arch: Vec<u32>,
    /// Files of kernels, such as gemm_mma,attention_mma [default: all]
    #[arg(long, value_delimiter = ',', value_name = "NAMES")]
    modules: Vec<String>,
    /// The folder to write, for the environment variable QUINTET_CUBINS to name
    #[arg(long, value_name = "DIR")]
    out: PathBuf,
}

fn command() -> clap::Command {
    let output_hidden = |command: clap::Command| {
        command.mut_args(|arg| {
            let of_train = arg.get_help_heading() == Some("Output");
            if of_train { arg.hide(true) } else { arg }
        })
    };
    let negative = |command: clap::Command| {
        // `--dp -1` is a bad number, not an unknown flag.
        command.mut_args(|arg| {
            let valued = arg.get_action().takes_values();
            if valued {
                arg.allow_negative_numbers(true)
            } else {
                arg
            }
        })
    };
    negative(Cli::command())
        .mut_subcommand("train", negative)
        .mut_subcommand("verify", |verify| {
            negative(output_hidden(verify)).after_help(VERIFY)
        })
        .mut_subcommand("eval", negative)
        .mut_subcommand("trace", negative)
        .mut_subcommand("plan", negative)
}

/// Clap's message without its usage block, on one line.
fn sentence(error: &clap::Error) -> String {
    let text = error.render().to_string();
    let text = text.strip_prefix("error: ").unwrap_or(&text);
    let end = ["\n\nUsage:", "\n\nFor more information"]
        .iter()
        .filter_map(|mark| text.find(mark))
        .min()
        .unwrap_or(text.len());
    let words: Vec<&str> = text[..end].split_whitespace().collect();
    let line = words.join(" ").replace(" tip: ", "; ");
    let line: String = line.chars().filter(|c| !c.is_control()).collect();
    format!("{line}; see quintet --help")
}

fn painted(help: &clap::Error, env: &Variables) -> String {
    let plain = env.get("NO_COLOR").is_some_and(|value| !value.is_empty());
    let text = help.render();
    if std::io::stdout().is_terminal() && !plain {
        text.ansi().to_string()
    } else {
        text.to_string()
    }
}
