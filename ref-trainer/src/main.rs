//! The `quintet` program: the command line in, an exit code out.

use std::io::Write;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use quintet_collectives::process::environment;
use quintet_ref_trainer::bench::bench;
use quintet_ref_trainer::cli::{self, Command};
use quintet_ref_trainer::convert::convert;
use quintet_ref_trainer::crew::Crew;
use quintet_ref_trainer::data::Samples;
use quintet_ref_trainer::eval::evaluate_in;
use quintet_ref_trainer::failure::{Exit, Failure, TO_PARENT, end};
use quintet_ref_trainer::forecast::{corpus, samples};
use quintet_ref_trainer::job::Job;
use quintet_ref_trainer::launch::{again, launch};
use quintet_ref_trainer::plan::plan;
use quintet_ref_trainer::precompile::precompile;
use quintet_ref_trainer::train::train;
use quintet_ref_trainer::verify::verify_in;

fn main() -> ExitCode {
    end(cli::parse(std::env::args_os(), &environment()).and_then(perform))
}

fn perform(command: Command) -> Result<Exit, Failure> {
    match command {
        // Started again by itself, this program is each of the ranks.
        Command::Train(job) | Command::Verify { job, .. } | Command::Eval { job, .. }
            if job.starts_processes() =>
        {
            again(job.layout.world())
        }
        Command::Train(job) => train(&job, &stop_on_interrupt()?),
        Command::Verify { job, json } => prove(&job, &samples(&job)?, json),
        Command::Eval { job, weights, json } => {
            let text = corpus(&job)?;
            let found = Crew::with(&job, &text, |crew| evaluate_in(crew, &job, &weights, &text))?;
            // Where rank 0 is not, nothing is said.
            if let Some(found) = found {
                cli::print(&if json {
                    found.json()?
                } else {
                    found.to_string()
                })?;
            }
            Ok(Exit::Fine)
        }
        Command::Bench(job) => bench(&job),
        Command::Launch { ranks, command } => {
            // Any code a rank may end with, not ours alone.
            std::process::exit(launch(ranks, &command)?)
        }
        Command::Convert(job) => cli::print(&convert(&job)?).map(|()| Exit::Fine),
        Command::Precompile(asked) => cli::print(&precompile(&asked)?).map(|()| Exit::Fine),
        Command::Plan(question) => cli::print(&plan(&question)?).map(|()| Exit::Fine),
        Command::Print(text) => cli::print(&text).map(|()| Exit::Fine),
    }
}

fn prove(job: &Job, samples: &Samples, json: bool) -> Result<Exit, Failure> {
    let verdict = Crew::with(job, samples.corpus(), |crew| verify_in(crew, job, samples))?;
    let Some(verdict) = verdict else {
        return Ok(Exit::Fine);
    };
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
        if !of_many() {
            let _ = writeln!(std::io::stderr(), "quintet: {what}");
        }
        if again {
            std::process::exit(i32::from(Exit::Aborted as u8));
        }
    })
    .map_err(|e| Failure::aborted(format!("interrupts cannot be handled: {e}")))?;
    Ok(stop)
}

/// Whether another rank says for this one what is said of all.
fn of_many() -> bool {
    std::env::var_os(TO_PARENT).is_some()
        && std::env::var_os("QUINTET_RANK").is_some_and(|rank| rank != "0")
}
