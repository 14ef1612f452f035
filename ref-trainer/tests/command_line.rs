//! The program as a process: what it says, how it ends, and two of it at once.

use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

/// A folder of its own for each test, gone with the value.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("quintet-cli-{name}-{}", std::process::id()));
        std::fs::create_dir_all(&path).unwrap();
        Self(path)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

fn quintet(at: &Path, line: &str) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_quintet"));
    command.current_dir(at).args(line.split_whitespace());
    command.stdin(Stdio::null());
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

fn run(at: &Path, line: &str) -> Output {
    quintet(at, line).output().unwrap()
}

/// Ends with this code and one sentence on stderr, which holds all of `words`.
#[track_caller]
fn refused(output: &Output, code: i32, words: &[&str]) {
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(code), "{said}");
    let last = said.lines().last().unwrap_or_default();
    assert!(last.starts_with("quintet: "), "{said}");
    assert!(!said.contains("panicked"), "{said}");
    for word in words {
        assert!(last.contains(word), "{last}");
    }
}

#[track_caller]
fn fine(output: &Output) -> String {
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{said}");
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// A run that goes on for long, once its first step is done.
fn under_way(at: &Path, line: &str) -> Child {
    let mut child = quintet(at, line).spawn().unwrap();
    let mut first = String::new();
    let stdout = child.stdout.as_mut().unwrap();
    BufReader::new(stdout).read_line(&mut first).unwrap();
    assert!(first.contains("\"step\":1"), "{first}");
    child
}

#[test]
fn two_runs_do_not_write_to_one_folder() {
    let dir = Folder::new("lock");
    let long = "train --steps 1000000 --eval-interval 0 --log-format json --run-dir r --metrics m/x.jsonl --save s";
    let mut first = under_way(&dir.0, long);
    let before = std::fs::read(dir.0.join("r/config.json")).unwrap();
    let short = "train --steps 1 --quiet";
    for (flags, words) in [
        ("--run-dir r", "--run-dir"),
        ("--run-dir ./r/", "--run-dir"),
        ("--save s", "--save"),
        ("--metrics m/x.jsonl", "--metrics"),
    ] {
        let second = run(&dir.0, &format!("{short} {flags}"));
        refused(&second, 3, &["another run", words]);
    }
    fine(&run(&dir.0, &format!("{short} --run-dir r2 --save s2")));
    assert_eq!(std::fs::read(dir.0.join("r/config.json")).unwrap(), before);
    // Killed as hard as can be, it leaves nothing that stands in the way.
    first.kill().unwrap();
    first.wait().unwrap();
    fine(&run(
        &dir.0,
        &format!("{short} --run-dir r --save s --metrics m/x.jsonl"),
    ));
    // One run may use one folder for both.
    fine(&run(&dir.0, &format!("{short} --run-dir r --save r")));
}

#[test]
#[cfg(target_os = "linux")]
fn output_that_is_lost_is_said() {
    let dir = Folder::new("full");
    for line in [
        "train --steps 5 --log-format json",
        "train --steps 5",
        "verify --steps 1 --json",
        "train --help",
    ] {
        let full = std::fs::OpenOptions::new()
            .write(true)
            .open("/dev/full")
            .unwrap();
        let output = quintet(&dir.0, line).stdout(full).output().unwrap();
        refused(&output, 3, &["stdout"]);
    }
}

#[test]
fn a_reader_that_goes_away_ends_nothing() {
    let dir = Folder::new("pipe");
    for format in ["plain", "json"] {
        let line = format!("train --steps 20 --log-format {format} --run-dir {format}");
        let mut child = quintet(&dir.0, &line).spawn().unwrap();
        let mut first = [0];
        child.stdout.take().unwrap().read_exact(&mut first).unwrap();
        let output = child.wait_with_output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(
            output.status.success() && !said.contains("panicked"),
            "{said}"
        );
        let metrics = std::fs::read_to_string(dir.0.join(format).join("metrics.jsonl")).unwrap();
        assert_eq!(metrics.lines().count(), 20);
    }
}

fn config(hidden: u64, layers: u64, vocab: u64) -> String {
    format!(
        r#"{{"model_type": "llama", "hidden_size": {hidden}, "intermediate_size": {hidden}, "num_hidden_layers": {layers},
            "num_attention_heads": 64, "vocab_size": {vocab}, "rms_norm_eps": 1e-5}}"#
    )
}

#[test]
fn a_model_that_no_machine_holds_is_refused_at_once() {
    let dir = Folder::new("absurd");
    let models = [
        (config(1_000_000, 100_000, 1_000_000_000), 3, "hidden_size"),
        (config(1 << 18, 1 << 12, 1 << 24), 2, "memory"),
        (config(1 << 16, 1 << 12, 256), 2, "memory"),
    ];
    for (text, code, words) in models {
        std::fs::write(dir.0.join("config.json"), text).unwrap();
        for line in [
            "train --model config.json",
            "train --model config.json --dp 4 --tp 8 --pp 8 --gbs 64",
            "verify --model config.json --tp 2",
        ] {
            let start = Instant::now();
            let output = run(&dir.0, line);
            let took = start.elapsed();
            refused(&output, code, &[words]);
            assert!(took < Duration::from_secs(1), "{line}: {took:?}");
        }
    }
}

#[test]
fn a_checkpoint_fixes_what_is_learnt_and_not_the_layout() {
    let dir = Folder::new("resume");
    let text: String = (0..400).map(|i| format!("line {i} of a text\n")).collect();
    std::fs::write(dir.0.join("a.txt"), &text).unwrap();
    std::fs::write(dir.0.join("copy.txt"), &text).unwrap();
    std::fs::write(dir.0.join("b.txt"), text.replace("line", "verse")).unwrap();
    let first = "train --data a.txt --seed 5 --dtype f64 --dp 2 --steps 4 --save c --quiet";
    fine(&run(&dir.0, first));
    let on = "train --load c --steps 6 --log-format json --eval-interval 0";
    let losses = |flags: &str| -> Vec<f64> {
        let text = fine(&run(&dir.0, &format!("{on} {flags}")));
        let loss = |line: &str| {
            let step: serde_json::Value = serde_json::from_str(line).unwrap();
            step["loss"].as_f64().unwrap()
        };
        text.lines().map(loss).collect()
    };
    let plain = losses("");
    assert_eq!(plain.len(), 2);
    assert_eq!(losses("--seed 5 --data a.txt"), plain);
    assert_eq!(losses("--data copy.txt"), plain);
    for (a, b) in losses("--tp 2 --pp 2 --zero-stage 1 --dp 2")
        .iter()
        .zip(&plain)
    {
        assert!((a - b).abs() < 1e-9, "{a} {b}");
    }
    let no = |flags: &str| run(&dir.0, &format!("{on} {flags}"));
    refused(&no("--seed 6"), 2, &["--seed 5", "not 6"]);
    refused(&no("--data b.txt"), 2, &["--data a.txt", "not b.txt"]);
    refused(&no("--data embedded"), 2, &["--data a.txt", "not embedded"]);
    std::fs::write(dir.0.join("a.txt"), "changed ".repeat(100)).unwrap();
    refused(&no(""), 3, &["a.txt", "no longer"]);
}
