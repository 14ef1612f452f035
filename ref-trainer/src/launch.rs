//! Ranks of this host as processes: of any program (`quintet launch -n N -- CMD`), or of this one, started
//! again with its own arguments (`--launch processes`).

use std::ffi::OsString;
use std::io::Write;
use std::sync::mpsc::channel;

use quintet_collectives::launch::{Ended, Launch};

use crate::failure::{Exit, Failure, TO_PARENT};

/// Starts this program again with its own arguments, once a rank, prints what they print, and ends
/// when they have ended. What ended the run is said once, whoever found it.
///
/// # Errors
/// The first cause that a rank told; exit 5 for one that was killed.
pub fn again(ranks: usize) -> Result<Exit, Failure> {
    let program = std::env::current_exe()
        .map_err(|e| Failure::usage(format!("this program cannot be started again: {e}")))?;
    let (sender, told) = channel();
    let ended = Launch::new(ranks, program)
        .args(std::env::args_os().skip(1))
        .env(TO_PARENT, "1")
        .bare()
        .signals_wait()
        .listen(move |_, line| match Failure::in_line(line) {
            Some(failure) => sender.send(failure).is_err(),
            None => true,
        })
        .run()?;
    outcome(ended, &told.try_iter().collect::<Vec<_>>())
}

/// How a run ended, from the ends of its ranks and what they told, in the order they told it.
fn outcome(ended: Ended, told: &[Failure]) -> Result<Exit, Failure> {
    let killed = ended.first.zip(ended.signal);
    if let Some((rank, signal)) = killed {
        return Err(Failure {
            lost: Some(rank),
            ..Failure::aborted(format!(
                "rank {rank} was ended by signal {signal}, and the run with it"
            ))
        });
    }
    // Whoever lost a rank that has told why is only a consequence.
    let cause = told.iter().find(|failure| failure.lost.is_none());
    if let Some(failure) = cause.or_else(|| told.first()) {
        return Err(failure.clone());
    }
    match (ended.first, ended.exit) {
        (None, _) if ended.signal.is_some() => Ok(Exit::Aborted),
        (None, _) => Ok(Exit::Fine),
        (Some(rank), code) => code.and_then(Exit::of).ok_or_else(|| {
            Failure::aborted(format!(
                "rank {rank} ended with exit code {}, and the run with it",
                code.unwrap_or_default()
            ))
        }),
    }
}

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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_cause_is_what_is_said() {
        let ended = |first, exit, signal| Ended {
            first,
            exit,
            signal,
        };
        let lost = Failure {
            lost: Some(1),
            ..Failure::aborted("rank 1 was lost")
        };
        let own = Failure::data("no room");
        let told = [lost.clone(), own.clone()];
        assert_eq!(outcome(ended(None, None, None), &[]), Ok(Exit::Fine));
        assert_eq!(
            outcome(ended(Some(0), Some(4), None), &[]),
            Ok(Exit::Mismatch)
        );
        assert_eq!(outcome(ended(None, None, Some(2)), &[]), Ok(Exit::Aborted));
        assert_eq!(outcome(ended(Some(0), Some(5), None), &told), Err(own));
        assert_eq!(
            outcome(ended(Some(0), Some(5), None), &told[..1]),
            Err(lost)
        );
        let killed = outcome(ended(Some(1), None, Some(9)), &told[..1]).unwrap_err();
        assert_eq!((killed.exit, killed.lost), (Exit::Aborted, Some(1)));
        let odd = outcome(ended(Some(3), Some(77), None), &[]).unwrap_err();
        assert!(
            odd.sentence.contains("rank 3 ended with exit code 77"),
            "{odd}"
        );
    }
}
