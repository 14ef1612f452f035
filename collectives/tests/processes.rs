//! Ranks as processes that are killed, stopped, and go on without each other. This binary starts
//! itself again as each rank.
#![cfg(unix)]

mod common;

use std::ffi::OsStr;
use std::io::{BufRead, BufReader, Read};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use common::Folder;
use quintet_collectives::{Error, ReduceOp, Result, from_env};
use rustix::process::{Pid, Signal, kill_process};

/// A rank: prints `ready`, then what became of it.
#[test]
fn rank() {
    let Ok(role) = std::env::var("TEST_ROLE") else {
        return;
    };
    let outcome = match role.as_str() {
        "work" => work(),
        "rebuild" => rebuild(),
        "wait" => wait(),
        "read" => read(),
        _ => unreachable!(),
    };
    match outcome {
        Ok(text) => println!("\nend: {text}"),
        Err(Error::PeerLost { rank, reason }) => println!("\nend: lost {rank}: {reason}"),
        Err(Error::Timeout { peer, .. }) => println!("\nend: timeout {peer:?}"),
        Err(error) => println!("\nend: {error}"),
    }
}

/// Works until it fails: groups, messages and collectives of all lengths.
fn work() -> Result<String> {
    let process = from_env()?;
    process.run(|comm| {
        let half = comm.split((comm.rank() % 2) as i64, 0)?;
        comm.barrier()?;
        println!("\nready");
        let (world, rank) = (comm.world(), comm.rank());
        let mut shared = comm.alloc::<f32>(300_000)?;
        for turn in 0.. {
            shared.fill(1.0);
            comm.all_reduce(&mut shared, ReduceOp::Sum)?;
            assert!(shared.iter().all(|x| *x == world as f32));
            let mut x = vec![1f32; [1, 1000, 300_000][turn % 3]];
            comm.all_reduce(&mut x, ReduceOp::Sum)?;
            assert!(x.iter().all(|x| *x == world as f32));
            half.barrier()?;
            let mut got = [0f32; 10];
            comm.sendrecv(
                &[1f32; 10],
                (rank + 1) % world,
                &mut got,
                (rank + world - 1) % world,
                4,
            )?;
            comm.broadcast(&mut x, turn % world)?;
            // Lengths at which slices are read where they lie.
            let mut x = vec![rank as f32; 40_000];
            comm.broadcast(&mut x, turn % world)?;
            assert!(x.iter().all(|x| *x == (turn % world) as f32));
            let mut all = vec![0f32; world * 10_000];
            comm.all_gather(&[rank as f32; 10_000], &mut all)?;
            assert!(
                all.iter()
                    .enumerate()
                    .all(|(i, x)| *x == (i / 10_000) as f32)
            );
        }
        Ok(String::from("never"))
    })
}

/// Works until a rank is lost, and again without it.
fn rebuild() -> Result<String> {
    let process = from_env()?;
    let comm = process.communicator()?;
    comm.barrier()?;
    println!("\nready");
    let lost = loop {
        match comm.all_reduce(&mut [1f32; 1000], ReduceOp::Sum) {
            Ok(()) => {}
            Err(Error::PeerLost { rank, .. }) => break rank,
            Err(error) => return Err(error),
        }
    };
    drop(comm);
    let old = process.rank();
    let process = process.rebuild()?;
    process.run(|comm| {
        let mut x = [old as i32];
        comm.all_reduce(&mut x, ReduceOp::Sum)?;
        Ok(format!(
            "without {lost}: {} of {}, {}",
            comm.rank(),
            comm.world(),
            x[0]
        ))
    })
}

/// Barriers with a deadline of a second, until one fails or thirty have passed.
fn wait() -> Result<String> {
    from_env()?.run(|comm| {
        comm.barrier()?;
        println!("\nready");
        let comm = comm.with_deadline(Duration::from_millis(1500));
        for _ in 0..30 {
            comm.barrier()?;
            thread::sleep(Duration::from_millis(50));
        }
        Ok(String::from("fine"))
    })
}

/// Broadcasts what is long enough to be read where it lies.
fn read() -> Result<String> {
    let process = from_env()?;
    let comm = process.communicator()?;
    println!("\nready");
    let is = |rank: usize| {
        (0..40_000)
            .map(|i| (i + 50_000 * rank) as f32)
            .collect::<Vec<_>>()
    };
    let mut x = is(comm.rank());
    comm.broadcast(&mut x, 1)?;
    assert!(x == is(1));
    Ok(format!("read {}", process.seat().moved().read))
}

/// A started rank, its output read as far as `ready`.
struct Rank {
    child: Child,
    output: BufReader<ChildStdout>,
}

impl Rank {
    fn start(role: &str, transport: &str, rank: usize, world: usize, store: &Folder) -> Child {
        Self::start_by(&[], role, transport, (rank, world), store)
    }

    /// A program and its words may stand before the rank's own.
    fn start_by(
        before: &[&str],
        role: &str,
        transport: &str,
        (rank, world): (usize, usize),
        store: &Folder,
    ) -> Child {
        let own = std::env::current_exe().unwrap();
        let mut words = before.iter().map(OsStr::new).chain([own.as_os_str()]);
        Command::new(words.next().unwrap())
            .args(words)
            .args(["rank", "--exact", "--nocapture", "--test-threads=1"])
            .env("TEST_ROLE", role)
            .env("QUINTET_TRANSPORT", transport)
            .env("QUINTET_RANK", rank.to_string())
            .env("QUINTET_WORLD_SIZE", world.to_string())
            .env("QUINTET_STORE", &store.0)
            .env("QUINTET_TIMEOUT", "20")
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .unwrap()
    }

    fn ready(mut child: Child) -> Self {
        let mut output = BufReader::new(child.stdout.take().unwrap());
        let mut line = String::new();
        while line.trim() != "ready" {
            line.clear();
            assert!(
                output.read_line(&mut line).unwrap() > 0,
                "a rank never began"
            );
        }
        Self { child, output }
    }

    fn signal(&self, signal: Signal) {
        let pid = Pid::from_child(&self.child);
        kill_process(pid, signal).unwrap();
    }

    /// What it said at its end.
    fn end(mut self) -> String {
        let mut text = String::new();
        self.output.read_to_string(&mut text).unwrap();
        self.child.wait().unwrap();
        let line = text.lines().find_map(|line| line.strip_prefix("end: "));
        line.unwrap_or("nothing").to_string()
    }
}

fn start(role: &str, transport: &str, world: usize, store: &Folder) -> Vec<Rank> {
    let children: Vec<Child> = (0..world)
        .map(|rank| Rank::start(role, transport, rank, world, store))
        .collect();
    children.into_iter().map(Rank::ready).collect()
}

/// A few draws that differ from run to run; printed where they matter.
fn draw(bound: usize) -> usize {
    let mut bytes = [0; 8];
    getrandom::fill(&mut bytes).unwrap();
    (u64::from_le_bytes(bytes) % bound as u64) as usize
}

/// Where the system lets a process read its sibling's memory; else it goes by stages.
#[cfg(target_os = "linux")]
#[test]
fn processes_read_each_others_memory() {
    let store = Folder::new();
    let ends: Vec<String> = start("read", "shm", 3, &store)
        .into_iter()
        .map(Rank::end)
        .collect();
    let yama = std::fs::read_to_string("/proc/sys/kernel/yama/ptrace_scope");
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let filtered = !status.contains("Seccomp:\t0");
    if yama.is_ok_and(|scope| scope.trim() != "0") || filtered {
        assert!(ends.iter().all(|end| end.starts_with("read ")), "{ends:?}");
        return;
    }
    assert_eq!(ends, ["read 160000", "read 0", "read 160000"]);
}

/// In namespaces of their own all ranks are process 1: each finds itself by the number that another tells.
#[cfg(target_os = "linux")]
#[test]
fn ranks_that_do_not_see_each_others_processes_share_memory_and_read_nothing() {
    let before: Vec<&str> = "unshare --pid --fork --kill-child setarch -R"
        .split(' ')
        .collect();
    let able = Command::new(before[0])
        .args(&before[1..])
        .arg("true")
        .output();
    if !able.is_ok_and(|done| done.status.success()) {
        println!("skipped: this needs root, pid namespaces, `unshare` and `setarch`");
        return;
    }
    for apart in [[true; 3], [false, true, false], [true, false, false]] {
        let store = Folder::new();
        let ranks: Vec<Child> = apart
            .iter()
            .enumerate()
            .map(|(rank, &apart)| {
                let before = if apart { &before[..] } else { &[] };
                Rank::start_by(before, "read", "shm", (rank, 3), &store)
            })
            .collect();
        let ends = ranks.into_iter().map(|rank| Rank::ready(rank).end());
        assert_eq!(ends.collect::<Vec<_>>(), ["read 0"; 3], "{apart:?}");
    }
}

#[test]
fn whoever_is_killed_is_named_by_every_survivor() {
    // Twenty over each; a long run sets another number.
    let times: usize = std::env::var("QUINTET_KILLS").map_or(20, |n| n.parse().unwrap());
    for turn in 0..TRANSPORTS.len() * times {
        let transport = TRANSPORTS[turn % TRANSPORTS.len()];
        let world = [2, 5, 3, 8, 4][turn / TRANSPORTS.len() % 5];
        // Rank 0, whose end is seen by no special path, has its turns too.
        let victim = if turn < 2 * TRANSPORTS.len() {
            0
        } else {
            draw(world)
        };
        let moment = Duration::from_micros(draw(30_000) as u64);
        let store = Folder::new();
        let mut ranks = start("work", transport, world, &store);
        thread::sleep(moment);
        let mut killed = ranks.remove(victim);
        let begin = Instant::now();
        killed.child.kill().unwrap();
        for rank in ranks {
            let end = rank.end();
            assert!(
                end.starts_with(&format!("lost {victim}: ")),
                "{transport}, rank {victim} of {world} killed after {moment:?}: {end}"
            );
        }
        let took = begin.elapsed();
        assert!(took < Duration::from_secs(2), "{took:?}");
        killed.child.wait().unwrap();
        assert_eq!(named_segments(), 0, "{transport}");
    }
}

/// Shared memory that still has a name, which would outlive a crash.
fn named_segments() -> usize {
    let Ok(entries) = std::fs::read_dir("/dev/shm") else {
        return 0;
    };
    let names = entries.flatten().map(|entry| entry.file_name());
    names
        .filter(|name| name.to_string_lossy().contains("quintet"))
        .count()
}

/// Between processes.
const TRANSPORTS: &[&str] = if cfg!(target_os = "linux") {
    &["tcp", "unix", "shm"]
} else {
    &["tcp", "unix"]
};

#[test]
fn survivors_rebuild_and_go_on() {
    for (transport, victim) in TRANSPORTS.iter().zip([2, 0, 1]) {
        let store = Folder::new();
        let mut ranks = start("rebuild", transport, 4, &store);
        thread::sleep(Duration::from_millis(20));
        let mut killed = ranks.remove(victim);
        killed.child.kill().unwrap();
        let sum = 6 - victim;
        for (rank, survivor) in ranks.into_iter().enumerate() {
            let expected = format!("without {victim}: {rank} of 3, {sum}");
            assert_eq!(survivor.end(), expected);
        }
        killed.child.wait().unwrap();
    }
}

#[test]
fn a_stopped_rank_is_waited_for_until_the_deadline_and_then_named() {
    for transport in TRANSPORTS {
        let store = Folder::new();
        let ranks = start("wait", transport, 3, &store);
        ranks[1].signal(Signal::STOP);
        thread::sleep(Duration::from_millis(700));
        ranks[1].signal(Signal::CONT);
        for rank in ranks {
            assert_eq!(rank.end(), "fine");
        }
        let store = Folder::new();
        let mut ranks = start("wait", transport, 3, &store);
        let stopped = ranks.remove(1);
        stopped.signal(Signal::STOP);
        for rank in ranks {
            assert_eq!(rank.end(), "timeout Some(1)");
        }
        stopped.signal(Signal::CONT);
        stopped.end();
    }
}
