//! `quintet launch -n N -- CMD`: the ranks of this host as processes of any program.

use std::ffi::OsString;
use std::io::Write;

use quintet_collectives::launch::Launch;

use crate::failure::Failure;

/// Starts `ranks` processes of `command` and waits for them; the exit code a shell would give.
///
/// # Errors
/// Exit 2 without a command or for one that cannot be started.
pub fn launch(ranks: usize, command: &[OsString]) -> Result<i32, Failure> {
    let Some((program, args)) = command.split_first() else {
        return Err(Failure::usage(
            "launch needs a command: quintet launch -n N -- CMD",
        ));
    };
    let ended = Launch::new(ranks, program)
        .args(args)
        .run()
        .map_err(|error| Failure::usage(error.to_string()))?;
    if let Some(rank) = ended.first {
        let how = match (ended.exit, ended.signal) {
            (Some(code), _) => format!("with exit code {code}"),
            (None, Some(signal)) => format!("by signal {signal}"),
            (None, None) => String::from("for no reason known"),
        };
        // The exit code says it too.
        let _ = writeln!(
            std::io::stderr(),
            "quintet: rank {rank} ended first, {how}; the others were ended"
        );
    }
    Ok(ended.code())
}
