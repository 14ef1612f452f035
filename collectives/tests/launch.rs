//! The launcher: output, ends, signals, and that nothing outlives it. This binary starts itself again
//! as the launcher, and as its ranks.
#![cfg(unix)]

mod common;

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Read};
use std::net::TcpListener;
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use quintet_collectives::launch::Launch;
use quintet_collectives::{Error, ReduceOp, from_env};
use rustix::process::{Pid, Signal, kill_process};

/// The launcher, and a rank.
#[test]
fn role() {
    match std::env::var("TEST_ROLE").as_deref() {
        Ok("launch") => {
            let script = std::env::var("TEST_SCRIPT").unwrap();
            let launch = Launch::new(3, "sh")
                .args(["-c", &script])
                .env("TEST_ROLE", "rank")
                .patience(Duration::from_millis(300));
            std::process::exit(launch.run().unwrap().code());
        }
        Ok("rank") => {
            let process = from_env().unwrap();
            println!("\nmet {:?}", process.place().family);
            let outcome = process.run(|comm| {
                let mut x = [comm.rank() as f32 + 1.0];
                comm.all_reduce(&mut x, ReduceOp::Sum)?;
                println!("\nsum {} at {} of {}", x[0], comm.rank(), comm.world());
                if std::env::var_os("TEST_DIES").is_some() {
                    if comm.rank() == 1 {
                        std::process::exit(9);
                    }
                    comm.barrier()?;
                }
                Ok::<(), Error>(())
            });
            if let Err(error) = outcome {
                println!("\n{error}");
                std::process::exit(5);
            }
        }
        _ => {}
    }
}

const ARGS: [&str; 4] = ["role", "--exact", "--nocapture", "--test-threads=1"];

/// A script that is this test as a rank.
fn rank_script() -> String {
    let path = std::env::current_exe().unwrap();
    format!("exec '{}' {}", path.display(), ARGS.join(" "))
}

fn launch(script: &str, variables: &[(&str, &str)]) -> Child {
    Command::new(std::env::current_exe().unwrap())
        .args(ARGS)
        .env("TEST_ROLE", "launch")
        .env("TEST_SCRIPT", script)
        .envs(variables.iter().copied())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap()
}

/// Exit code and all that was printed.
fn end(mut child: Child) -> (Option<i32>, String) {
    let (mut out, mut err) = (String::new(), String::new());
    child
        .stdout
        .take()
        .unwrap()
        .read_to_string(&mut out)
        .unwrap();
    child
        .stderr
        .take()
        .unwrap()
        .read_to_string(&mut err)
        .unwrap();
    (child.wait().unwrap().code(), out + &err)
}

#[test]
fn ranks_meet_and_their_lines_are_prefixed() {
    let (code, text) = end(launch(&rank_script(), &[]));
    assert_eq!(code, Some(0), "{text}");
    for rank in 0..3 {
        assert!(
            text.contains(&format!("[{rank}] sum 6 at {rank} of 3\n")),
            "{text}"
        );
    }
    let (code, text) = end(launch("printf 'no end'; echo oops >&2", &[]));
    assert_eq!(code, Some(0));
    assert!(
        text.contains("[2] no end\n") && text.contains("[0] oops\n"),
        "{text}"
    );
}

#[test]
fn the_first_failure_ends_all_and_is_reported() {
    let begin = Instant::now();
    let script = "[ $QUINTET_RANK = 1 ] && exit 7; sleep 100";
    let (code, _) = end(launch(script, &[]));
    assert_eq!(code, Some(7));
    // One that does not heed the request either.
    let script =
        "[ $QUINTET_RANK = 1 ] && kill -KILL $$; trap '' TERM; sleep 100 & wait; sleep 100";
    let (code, _) = end(launch(script, &[]));
    assert_eq!(code, Some(128 + 9));
    assert!(
        begin.elapsed() < Duration::from_secs(5),
        "{:?}",
        begin.elapsed()
    );
    // The others have the time to say whom they lost.
    let (code, text) = end(launch(&rank_script(), &[("TEST_DIES", "1")]));
    // On a busy machine theirs may be seen at the same moment.
    assert!(matches!(code, Some(5 | 9)), "{code:?}, {text}");
    for rank in [0, 2] {
        assert!(
            text.contains(&format!("[{rank}] rank 1 was lost")),
            "{text}"
        );
    }
    let (code, text) = end(launch("exec /no/such/program", &[]));
    assert_eq!(code, Some(127), "{text}");
}

#[test]
fn signals_are_passed_on() {
    for (signal, name, code) in [(Signal::TERM, "TERM", 143), (Signal::INT, "INT", 130)] {
        let script = format!("trap 'echo got; exit 0' {name}; echo up; sleep 100 & wait");
        let mut child = launch(&script, &[]);
        let mut out = BufReader::new(child.stdout.take().unwrap());
        let mut text = String::new();
        while text.matches("up").count() < 3 {
            assert!(out.read_line(&mut text).unwrap() > 0);
        }
        kill_process(Pid::from_child(&child), signal).unwrap();
        out.read_to_string(&mut text).unwrap();
        assert_eq!(text.matches("] got").count(), 3, "{text}");
        assert_eq!(child.wait().unwrap().code(), Some(code));
    }
}

/// Whether a process exists and is no zombie.
fn lives(pid: i32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat"));
    stat.is_ok_and(|stat| {
        !stat
            .rsplit_once(')')
            .is_some_and(|(_, rest)| rest.starts_with(" Z"))
    })
}

#[test]
fn nothing_outlives_a_launcher_that_is_killed() {
    // A shell and its child, which know nothing of this crate.
    let mut child = launch("echo pid $$; sleep 300 & echo pid $!; wait", &[]);
    let mut out = BufReader::new(child.stdout.take().unwrap());
    let mut pids = Vec::new();
    while pids.len() < 6 {
        let mut line = String::new();
        assert!(out.read_line(&mut line).unwrap() > 0);
        pids.extend(
            line.trim()
                .rsplit_once(" pid ")
                .or(line.trim().rsplit_once("pid "))
                .and_then(|(_, pid)| pid.parse::<i32>().ok()),
        );
    }
    assert!(pids.iter().all(|&pid| lives(pid)));
    child.kill().unwrap();
    child.wait().unwrap();
    let until = Instant::now() + Duration::from_secs(3);
    while pids.iter().any(|&pid| lives(pid)) {
        assert!(Instant::now() < until, "{pids:?} live on");
        thread::sleep(Duration::from_millis(10));
    }
}

/// Starts ranks as a launcher does that is not there, and returns what they print.
fn under(variables: &[BTreeMap<&str, String>]) -> Vec<String> {
    let children: Vec<Child> = variables
        .iter()
        .map(|variables| {
            Command::new(std::env::current_exe().unwrap())
                .args(ARGS)
                .env("TEST_ROLE", "rank")
                .env("QUINTET_TIMEOUT", "20")
                .envs(variables)
                .stdout(Stdio::piped())
                .stderr(Stdio::piped())
                .spawn()
                .unwrap()
        })
        .collect();
    children.into_iter().map(|child| end(child).1).collect()
}

fn torch(rank: usize, port: u16, run: &str, restart: &str) -> BTreeMap<&'static str, String> {
    BTreeMap::from([
        ("RANK", rank.to_string()),
        ("LOCAL_RANK", rank.to_string()),
        ("WORLD_SIZE", "2".into()),
        ("LOCAL_WORLD_SIZE", "2".into()),
        ("MASTER_ADDR", "localhost".into()),
        ("MASTER_PORT", port.to_string()),
        ("TORCHELASTIC_RUN_ID", run.into()),
        ("TORCHELASTIC_RESTART_COUNT", restart.into()),
        ("TORCHELASTIC_USE_AGENT_STORE", "True".into()),
    ])
}

/// Two torchruns whose agents hold neighbouring ports, and a restart of the first, all at once.
#[test]
fn torchruns_beside_each_other_and_a_restart() {
    let agents = loop {
        let one = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = one.local_addr().unwrap().port();
        if let Ok(two) = TcpListener::bind(("127.0.0.1", port.saturating_add(1))) {
            break (one, two, port);
        }
    };
    let port = agents.2;
    let ranks: Vec<_> = [(port, "a", "0"), (port + 1, "b", "0"), (port, "a", "1")]
        .into_iter()
        .flat_map(|(port, run, restart)| (0..2).map(move |rank| torch(rank, port, run, restart)))
        .collect();
    for (i, text) in under(&ranks).into_iter().enumerate() {
        assert!(
            text.contains("met Torchrun") && text.contains(&format!("sum 3 at {} of 2", i % 2)),
            "{text}"
        );
    }
}

#[test]
fn mpirun_without_an_address_meets_in_a_folder_that_goes_again() {
    for job in [None, Some("prterun-test-1@1")] {
        let ranks: Vec<_> = (0..3)
            .map(|rank: usize| {
                let mut variables = BTreeMap::from([
                    ("OMPI_COMM_WORLD_RANK", rank.to_string()),
                    ("OMPI_COMM_WORLD_LOCAL_RANK", rank.to_string()),
                    ("OMPI_COMM_WORLD_SIZE", "3".into()),
                    ("OMPI_COMM_WORLD_LOCAL_SIZE", "3".into()),
                ]);
                variables.extend(job.map(|job| ("PMIX_NAMESPACE", job.to_string())));
                variables
            })
            .collect();
        for text in under(&ranks) {
            assert!(
                text.contains("met OpenMpi") && text.contains("sum 6"),
                "{text}"
            );
        }
    }
    let uid = rustix::process::geteuid().as_raw();
    for key in [
        format!("parent-{}", std::process::id()),
        String::from("prterun-test-1-1"),
    ] {
        let folder = std::env::temp_dir().join(format!("quintet-{uid}-{key}"));
        assert!(!folder.exists(), "{}", folder.display());
    }
}
