//! Ranks as processes: the same bits as ranks as threads, and ends that leave nobody behind.
#![cfg(target_os = "linux")]

#[path = "../../collectives/tests/common/hosts.rs"]
mod hosts;

use std::collections::BTreeMap;
use std::fs;
use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use hosts::{ADDRESS, Hosts};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

/// A folder that goes with the value.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Self {
        let path =
            std::env::temp_dir().join(format!("quintet-processes-{name}-{}", std::process::id()));
        fs::create_dir_all(&path).unwrap();
        Self(path)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

fn quintet(at: &Path, line: &str) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_quintet"));
    command
        .args(line.split_whitespace())
        .current_dir(at)
        .env("QUINTET_TIMEOUT", "60")
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    command
}

#[track_caller]
fn fine(output: &Output) -> String {
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{said}");
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// All files under a folder, by path within it.
fn files(folder: &Path) -> BTreeMap<String, Vec<u8>> {
    let mut all = BTreeMap::new();
    for entry in fs::read_dir(folder).unwrap().flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        if entry.path().is_dir() {
            let below = files(&entry.path());
            all.extend(below.into_iter().map(|(n, b)| (format!("{name}/{n}"), b)));
        } else {
            all.insert(name, fs::read(entry.path()).unwrap());
        }
    }
    all
}

/// What of a step does not depend on how fast it was.
fn steps(text: &str) -> Vec<Value> {
    let timed = ["tokens_per_s", "step_ms", "comm_wait_ms", "bubble"];
    let line = |line: &str| {
        let mut step: Value = serde_json::from_str(line).unwrap();
        let object = step.as_object_mut().unwrap();
        object.retain(|key, _| !timed.contains(&key.as_str()));
        step
    };
    text.lines().map(line).collect()
}

const PROBLEM: &str =
    "--seq-length 16 --mbs 1 --gbs 8 --steps 3 --eval-interval 2 --log-format json";

/// What goes wrong between connections goes wrong by chance, so that one run says little: `QUINTET_REPEATS` of them, 4 by
/// default.
#[test]
fn numbers_of_short_runs_do_not_depend_on_chance() {
    let dir = Folder::new("chance");
    let layout = "--model tiny-moe --dp 2 --tp 2 --ep 2 --eval-interval 0";
    let line = |flags: &str| {
        format!(
            "train --seq-length 16 --mbs 1 --gbs 4 --steps 3 --log-format json {layout} {flags}"
        )
    };
    let run = |flags: &str| steps(&fine(&quintet(&dir.0, &line(flags)).output().unwrap()));
    let threads = run("--launch threads");
    assert_eq!(threads.len(), 3);
    let repeats = std::env::var("QUINTET_REPEATS").map_or(4, |n| n.parse().unwrap());
    for repeat in 0..repeats {
        for transport in ["tcp", "unix"] {
            let flags = format!("--launch processes --transport {transport}");
            assert_eq!(run(&flags), threads, "{transport}, run {repeat}");
        }
    }
}

#[test]
fn a_run_over_processes_has_the_bits_of_one_over_threads() {
    let layouts = [
        "--model tiny-moe --dp 2 --tp 2 --ep 4 --zero-stage 2 --dtype f32",
        "--model tiny --pp 2 --cp 2 --zero-stage 3 --dp 1 --dtype bf16",
    ];
    for (number, layout) in layouts.into_iter().enumerate() {
        let dir = Folder::new(&format!("bits{number}"));
        let train = |flags: &str| {
            let line = format!(
                "train {PROBLEM} {layout} {flags} --save ckpt --run-dir run --trace trace.json"
            );
            let _ = fs::remove_dir_all(dir.0.join("ckpt"));
            let text = fine(&quintet(&dir.0, &line).output().unwrap());
            let trace: Value =
                serde_json::from_slice(&fs::read(dir.0.join("trace.json")).unwrap()).unwrap();
            let events = trace["traceEvents"].as_array().unwrap().iter();
            let spans = events.filter(|event| event["ph"] == "X").count();
            (steps(&text), files(&dir.0.join("ckpt")), spans)
        };
        let threads = train("--launch threads");
        assert_eq!(threads.0.len(), 3);
        assert!(threads.1.len() > 8, "{:?}", threads.1.keys());
        for flags in ["--launch processes", "--transport unix", "--transport tcp"] {
            let processes = train(flags);
            assert_eq!(processes.0, threads.0, "{layout} {flags}");
            let names = |files: &BTreeMap<String, Vec<u8>>| -> Vec<String> {
                files.keys().cloned().collect()
            };
            assert_eq!(names(&processes.1), names(&threads.1));
            for (name, bytes) in &processes.1 {
                assert!(*bytes == threads.1[name], "{layout} {flags}: {name}");
            }
            assert_eq!(processes.2, threads.2, "spans of {layout} {flags}");
        }
    }
}

#[test]
fn what_verify_and_eval_say_is_the_same() {
    let dir = Folder::new("verify");
    for line in [
        "verify --json --dp 2 --tp 2 --zero-stage 1 --model tiny",
        "verify --json --pp 2 --cp 2 --ep 2 --dtype f32",
    ] {
        let said = |flags: &str| {
            let text = fine(
                &quintet(&dir.0, &format!("{line} {flags}"))
                    .output()
                    .unwrap(),
            );
            serde_json::from_str::<Value>(&text).unwrap()
        };
        let threads = said("");
        assert_eq!(threads["ok"], true);
        for flags in ["--transport shm", "--transport tcp"] {
            assert_eq!(said(flags), threads, "{line} {flags}");
        }
    }
    let line = "train --model tiny --steps 1 --save c --quiet --seq-length 16";
    fine(&quintet(&dir.0, line).output().unwrap());
    fs::write(dir.0.join("text"), "to be or not to be, that is ".repeat(9)).unwrap();
    let eval = |flags: &str| {
        let line = format!("eval --load c --data text --seq-length 16 --json {flags}");
        fine(&quintet(&dir.0, &line).output().unwrap())
    };
    assert_eq!(
        eval("--dp 2 --tp 2 --launch processes"),
        eval("--dp 2 --tp 2")
    );
}

/// Starts the ranks as a launcher does, and what each says.
fn by_hand(at: &Path, lines: &[String]) -> Vec<Output> {
    let store = at.join("store");
    let _ = fs::remove_dir_all(&store);
    let start = |(rank, line): (usize, &String)| {
        let mut command = quintet(at, line);
        command
            .env("QUINTET_RANK", rank.to_string())
            .env("QUINTET_WORLD_SIZE", lines.len().to_string())
            .env("QUINTET_STORE", &store);
        command.spawn().unwrap()
    };
    let ranks: Vec<Child> = lines.iter().enumerate().map(start).collect();
    let end = |rank: Child| rank.wait_with_output().unwrap();
    ranks.into_iter().map(end).collect()
}

#[test]
fn ranks_that_a_launcher_started_train_together_and_rank_0_alone_speaks() {
    let dir = Folder::new("launched");
    let line = format!("train {PROBLEM} --model tiny --dp 2 --run-dir run --save ckpt");
    let threads = fine(&quintet(&dir.0, &line).output().unwrap());
    let ends = by_hand(&dir.0, &[line.clone(), line.clone()]);
    assert_eq!(steps(&fine(&ends[0])), steps(&threads));
    assert_eq!(fine(&ends[1]), "");
    assert!(dir.0.join("run/report.html").exists());
    let launch = format!("launch -n 2 -- {} {line}", env!("CARGO_BIN_EXE_quintet"));
    let text = fine(&quintet(&dir.0, &launch).output().unwrap());
    assert!(text.lines().all(|line| line.starts_with("[0] ")), "{text}");
    assert_eq!(steps(&text.replace("[0] ", "")), steps(&threads));
}

#[test]
fn ranks_on_two_hosts_train_as_threads_do() {
    let Some(hosts) = Hosts::new() else {
        return;
    };
    let dir = Folder::new("hosts");
    let line = format!("train {PROBLEM} --model tiny --dp 2 --tp 2 --run-dir run --save ckpt");
    let threads = fine(&quintet(&dir.0, &line).output().unwrap());
    let start = |(rank, host): (usize, usize)| {
        let mut command = hosts.command(host, Path::new(env!("CARGO_BIN_EXE_quintet")));
        command
            .args(line.split_whitespace())
            .current_dir(&dir.0)
            .env("RANK", rank.to_string())
            .env("WORLD_SIZE", "4")
            .env("MASTER_ADDR", ADDRESS[0])
            .env("QUINTET_TIMEOUT", "60")
            .env("QUINTET_HOST", ["a", "b"][host]);
        command.spawn().unwrap()
    };
    let ranks: Vec<Child> = [0, 0, 1, 1].into_iter().enumerate().map(start).collect();
    let mut ends = ranks
        .into_iter()
        .map(|rank| rank.wait_with_output().unwrap());
    assert_eq!(steps(&fine(&ends.next().unwrap())), steps(&threads));
    ends.for_each(|end| assert_eq!(fine(&end), ""));
}

#[test]
fn ranks_that_were_not_started_alike_say_so() {
    let dir = Folder::new("alike");
    let line = |lr: &str| format!("train {PROBLEM} --model tiny --dp 4 --quiet --lr {lr}");
    let ends = by_hand(&dir.0, &["0.1", "0.1", "0.2", "0.1"].map(line));
    let said: Vec<_> = ends
        .iter()
        .map(|end| (end.status.code(), String::from_utf8_lossy(&end.stderr)))
        .collect();
    for (code, text) in &said {
        assert_eq!(*code, Some(2), "{text}");
        assert!(text.contains("rank 2 was"), "{text}");
        assert_eq!(text.lines().count(), 1, "{text}");
    }
    assert!(
        said[2].1.contains("optimizer.lr 0.2 and rank 0 with 0.1"),
        "{}",
        said[2].1
    );
}

/// The ranks that a parent has started: their numbers and processes.
fn children(parent: &Child) -> BTreeMap<usize, i32> {
    let mut all = BTreeMap::new();
    for entry in fs::read_dir("/proc").unwrap().flatten() {
        let Ok(pid) = entry.file_name().to_string_lossy().parse::<i32>() else {
            continue;
        };
        let stat = fs::read_to_string(entry.path().join("stat")).unwrap_or_default();
        let after = stat.rsplit_once(')').map_or("", |(_, after)| after);
        if after.split_whitespace().nth(1) != Some(&parent.id().to_string()) {
            continue;
        }
        let environ = fs::read(entry.path().join("environ")).unwrap_or_default();
        let variables = environ.split(|byte| *byte == 0);
        let rank = variables.filter_map(|v| v.strip_prefix(b"QUINTET_RANK="));
        for rank in rank {
            all.insert(String::from_utf8_lossy(rank).parse().unwrap(), pid);
        }
    }
    all
}

fn lives(pid: i32) -> bool {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat"));
    stat.is_ok_and(|stat| {
        !stat
            .rsplit_once(')')
            .is_some_and(|(_, rest)| rest.starts_with(" Z"))
    })
}

#[track_caller]
fn all_end(pids: &BTreeMap<usize, i32>) {
    let until = Instant::now() + Duration::from_secs(3);
    while pids.values().any(|&pid| lives(pid)) {
        assert!(Instant::now() < until, "{pids:?} live on");
        thread::sleep(Duration::from_millis(10));
    }
}

/// A run without end that has taken a step, and its ranks.
fn endless(
    at: &Path,
    flags: &str,
) -> (
    Child,
    BufReader<std::process::ChildStdout>,
    BTreeMap<usize, i32>,
) {
    let line = format!(
        "train --model tiny --seq-length 16 --mbs 1 --gbs 4 --steps 1000000 --eval-interval 0 --dp 4 \
         --log-format json --run-dir run {flags}"
    );
    let mut parent = quintet(at, &line).spawn().unwrap();
    let mut out = BufReader::new(parent.stdout.take().unwrap());
    let mut first = String::new();
    assert!(out.read_line(&mut first).unwrap() > 0, "it never began");
    let ranks = children(&parent);
    assert_eq!(ranks.keys().copied().collect::<Vec<_>>(), [0, 1, 2, 3]);
    (parent, out, ranks)
}

/// Exit code and stderr.
fn end(mut parent: Child, mut out: impl Read) -> (Option<i32>, String) {
    let err = parent.stderr.take().unwrap();
    let err = thread::spawn(move || std::io::read_to_string(err).unwrap());
    std::io::copy(&mut out, &mut std::io::sink()).unwrap();
    let code = parent.wait().unwrap().code();
    (code, err.join().unwrap())
}

#[test]
fn a_killed_rank_ends_the_run_with_one_sentence_that_names_it() {
    for (victim, flags) in [
        (2, "--transport shm"),
        (0, "--transport tcp"),
        (3, "--transport unix"),
    ] {
        let dir = Folder::new(&format!("killed{victim}"));
        let (parent, out, ranks) = endless(&dir.0, flags);
        let begin = Instant::now();
        kill_process(Pid::from_raw(ranks[&victim]).unwrap(), Signal::KILL).unwrap();
        let (code, said) = end(parent, out);
        assert_eq!(code, Some(5), "{said}");
        let sentence = format!("quintet: rank {victim} was ended by signal 9, and the run with it");
        let spoken: Vec<&str> = said.lines().filter(|l| l.starts_with("quintet")).collect();
        assert_eq!(spoken, [sentence], "{flags}");
        assert!(
            begin.elapsed() < Duration::from_secs(5),
            "{:?}",
            begin.elapsed()
        );
        all_end(&ranks);
    }
}

#[test]
fn no_rank_outlives_what_started_it() {
    let dir = Folder::new("orphans");
    let (mut parent, _out, ranks) = endless(&dir.0, "--launch processes");
    parent.kill().unwrap();
    parent.wait().unwrap();
    all_end(&ranks);
}

#[test]
fn an_interrupt_ends_the_run_after_its_step() {
    let dir = Folder::new("interrupt");
    let (parent, mut out, ranks) = endless(&dir.0, "--launch processes --save ckpt");
    kill_process(Pid::from_child(&parent), Signal::INT).unwrap();
    let mut text = String::new();
    out.read_to_string(&mut text).unwrap();
    let (code, said) = end(parent, out);
    assert_eq!(code, Some(5), "{said}");
    assert_eq!(
        said.matches("stopping after this step").count(),
        1,
        "{said}"
    );
    all_end(&ranks);
    assert!(dir.0.join("ckpt/latest").exists());
    assert!(dir.0.join("run/report.html").exists());
}

#[test]
fn a_failure_is_said_once_whoever_finds_it() {
    let dir = Folder::new("failure");
    fs::write(dir.0.join("file"), "no folder").unwrap();
    let line = "train --model tiny --steps 2 --dp 2 --launch processes";
    for (flags, code, words) in [
        // Found by rank 0 while the others wait for it.
        ("--run-dir file/run", 3, "cannot make"),
        // Found by every rank alike.
        (
            "--lr 1e300 --optimizer sgd --clip-grad 0 --lr-warmup-iters 0 --run-dir r",
            5,
            "not finite",
        ),
        ("--data missing --run-dir r", 3, "missing"),
    ] {
        let output = quintet(&dir.0, &format!("{line} {flags}"))
            .output()
            .unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(code), "{flags}: {said}");
        assert!(said.contains(words), "{flags}: {said}");
        assert_eq!(said.lines().count(), 1, "{flags}: {said}");
    }
}

#[test]
fn measured_constants_choose_the_plans_and_what_is_predicted() {
    let dir = Folder::new("constants");
    // What `bench --calibrate` writes, of a machine on which each message costs a second and bytes
    // nothing: fewest rounds win.
    let curve = "1000:1e-15 100000:1e-15 -:1e-15";
    let section =
        |name: &str| format!("[{name}]\nlatency 1e0\noverhead 1e-9\nsend {curve}\nfold {curve}\n");
    fs::write(dir.0.join("c"), section("local") + &section("shm")).unwrap();
    let line = "verify --json --dp 4 --model tiny --reduction-order any --optimizer sgd";
    let said = |flags: &str| {
        let output = quintet(&dir.0, &format!("{line} {flags}"))
            .output()
            .unwrap();
        serde_json::from_str::<Value>(&fine(&output)).unwrap()
    };
    let (usual, chosen) = (said(""), said("--constants c"));
    assert_eq!((&usual["ok"], &chosen["ok"]), (&true.into(), &true.into()));
    assert_eq!(chosen["bytes_predicted"], chosen["bytes_counted"]);
    assert_ne!(chosen["bytes_predicted"], usual["bytes_predicted"]);
    assert_eq!(said("--constants c --launch processes"), chosen);
    let refused = quintet(&dir.0, &format!("{line} --constants c --transport unix"))
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert_eq!(refused.status.code(), Some(3), "{said}");
    assert!(
        said.contains("no constants of unix") && said.lines().count() == 1,
        "{said}"
    );
}
