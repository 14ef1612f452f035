//! The `quintet` program.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use quintet_ref_trainer::job::Job;

fn main() -> std::process::ExitCode {
    let stop = Arc::new(AtomicBool::new(false));
    match quintet_ref_trainer::train::train(&Job::demo(), &stop) {
        Ok(exit) => exit.into(),
        Err(failure) => {
            eprintln!("quintet: {failure}");
            failure.exit.into()
        }
    }
}
