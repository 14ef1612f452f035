//! The `quintet` program: the command line in, an exit code out.

use std::io::Write;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use quintet_ref_trainer::bench::bench;
use quintet_ref_trainer::cli::{self, Command};
use quintet_ref_trainer::convert::convert;
use quintet_ref_trainer::data::Samples;
use quintet_ref_trainer::eval::evaluate;
use quintet_ref_trainer::failure::{Exit, Failure, end};
use quintet_ref_trainer::forecast::{corpus, samples};
use quintet_ref_trainer::job::Job;
use quintet_ref_trainer::launch::launch;
use quintet_ref_trainer::plan::plan;
use quintet_ref_trainer::train::train;
use quintet_ref_trainer::verify::verify;

fn main() -> ExitCode {
    let env = |name: &str| std::env::var(name).ok();
    end(cli::parse(std::env::args_os(), env).and_then(perform))
}

fn perform(command: Command) -> Result<Exit, Failure> {
    match command {
        Command::Train(job) => train(&job, &stop_on_interrupt()?),
        Command::Verify { job, json } => prove(&job, &samples(&job)?, json),
        Command::Eval { job, weights, json } => {
            let found = evaluate(&job, &weights, &corpus(&job)?)?;
            cli::print(&if json {
                found.json()?
            } else {
                found.to_string()
            })?;
            Ok(Exit::Fine)
        }
        Command::Bench(job) => bench(&job),
        Command::Launch { ranks, command } => {
            // Any code a rank may end with, not ours alone.
            std::process::exit(launch(ranks, &command)?)
        }
        Command::Convert(job) => cli::print(&convert(&job)?).map(|()| Exit::Fine),
        Command::Plan(question) => cli::print(&plan(&question)?).map(|()| Exit::Fine),
        Command::Print(text) => cli::print(&text).map(|()| Exit::Fine),
    }
}

fn prove(job: &Job, samples: &Samples, json: bool) -> Result<Exit, Failure> {
    let verdict = verify(job, samples)?;
    cli::print(&if json {
        verdict.json()?
    } else {
        verdict.to_string()
    })?;
    Ok(if verdict.ok {
        Exit::Fine
    } else {
        Exit::Mismatch
    })
}

/// The first interrupt, hang-up or request to end asks all ranks to stop after their step; the second ends the program.
fn stop_on_interrupt() -> Result<Arc<AtomicBool>, Failure> {
    let stop = Arc::new(AtomicBool::new(false));
    let asked = stop.clone();
    ctrlc::set_handler(move || {
        let again = asked.swap(true, Ordering::Relaxed);
        let what = if again {
            "stopped"
        } else {
            "stopping after this step; once more stops at once"
        };
        let _ = writeln!(std::io::stderr(), "quintet: {what}");
        if again {
            std::process::exit(i32::from(Exit::Aborted as u8));
        }
    })
    .map_err(|e| Failure::aborted(format!("interrupts cannot be handled: {e}")))?;
    Ok(stop)
}
