//! Faults in code, as texts that replace others: that each still applies, and, where it is asked
//! for, that the general random suite meets each (see `faults/README.md`).

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

/// One fault.
struct Fault {
    name: String,
    says: String,
    file: String,
    /// Name of the property that is to meet it.
    suite: String,
    is: String,
    becomes: String,
}

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

fn faults() -> Vec<Fault> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/faults");
    let files = fs::read_dir(&folder).expect("the folder of faults");
    let mut paths: Vec<PathBuf> = files.map(|file| file.expect("a file").path()).collect();
    paths.retain(|path| path.extension().is_some_and(|e| e == "txt"));
    paths.sort();
    paths.iter().map(|path| read(path)).collect()
}

fn read(path: &Path) -> Fault {
    let text = fs::read_to_string(path).expect("a text");
    let name = path.file_stem().expect("a name").to_string_lossy();
    let cut = |from: &str, to: &str| {
        let (_, rest) = text
            .split_once(from)
            .unwrap_or_else(|| panic!("{name}: no {from}"));
        let (part, _) = rest
            .split_once(to)
            .unwrap_or_else(|| panic!("{name}: no {to}"));
        part.to_string()
    };
    Fault {
        says: text.lines().next().unwrap_or_default().to_string(),
        file: cut("file: ", "\n"),
        suite: if text.contains("\nsuite: ") {
            cut("suite: ", "\n")
        } else {
            "in_f64".to_string()
        },
        is: cut("<<<<\n", "====\n"),
        becomes: cut("====\n", ">>>>\n"),
        name: name.to_string(),
    }
}

impl Fault {
    /// What stands in its place: `PLANTED` asks the environment, once.
    fn switched(&self) -> String {
        let on = format!(
            "({{ static ON: std::sync::OnceLock<bool> = std::sync::OnceLock::new(); *ON.get_or_init(|| \
             std::env::var_os(\"QUINTET_PLANTED\").is_some_and(|name| name == \"{}\")) }})",
            self.name
        );
        self.becomes.replace("PLANTED", &on)
    }

    /// Plants it, switched off, in a text.
    fn apply(&self, text: &str) -> String {
        let found = text.matches(&self.is).count();
        assert_eq!(found, 1, "{} does not apply to {}", self.name, self.file);
        text.replacen(&self.is, &self.switched(), 1)
    }
}

#[test]
fn each_fault_still_applies() {
    let all = faults();
    assert!(all.len() >= 40, "{} faults", all.len());
    for fault in &all {
        let text = fs::read_to_string(root().join(&fault.file)).expect("its file");
        fault.apply(&text);
        let switch = fault.becomes.contains("PLANTED") && !fault.is.contains("PLANTED");
        assert!(switch && fault.says.ends_with('.'), "{}", fault.name);
    }
    for file in files(&all) {
        planted(&root(), file, &all);
    }
}

fn files(all: &[Fault]) -> std::collections::BTreeSet<&str> {
    all.iter().map(|fault| fault.file.as_str()).collect()
}

/// A file with all of its faults.
fn planted(root: &Path, file: &str, all: &[Fault]) -> String {
    let text = fs::read_to_string(root.join(file)).expect("a file");
    let here = all.iter().filter(|fault| fault.file == file);
    here.fold(text, |text, fault| fault.apply(&text))
}

/// The long run: every fault in one copy of the tree, each switched on in turn against the general
/// suite.
#[test]
fn each_fault_is_met_by_the_random_suite() {
    let Ok(asked) = std::env::var("QUINTET_FAULTS") else {
        println!("QUINTET_FAULTS=1 plants every fault in a copy of the tree; this takes long");
        return;
    };
    let all = faults();
    let copy = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("planted");
    // What has not changed keeps its time, so that little is built again.
    copy_sources(&root(), &copy, &|path| {
        let file = path.strip_prefix(root()).ok()?.to_str()?;
        let has = files(&all).contains(file);
        has.then(|| planted(&root(), file, &all))
    });
    let program = build(&copy);
    let suites: std::collections::BTreeSet<&str> = all.iter().map(|f| f.suite.as_str()).collect();
    for suite in suites {
        let (sound, _) = run(&program, suite, "none");
        assert_eq!(
            sound, "SURVIVES",
            "with no fault switched on the suite {suite} holds"
        );
    }
    let mut survive = Vec::new();
    println!(
        "{:<34} {:<78} {:>6}  met at",
        "fault", "what goes wrong", "s"
    );
    for fault in &all {
        if asked != "1" && !asked.split(',').any(|name| name == fault.name) {
            continue;
        }
        let (met, seconds) = run(&program, &fault.suite, &fault.name);
        println!(
            "{:<34} {:<78} {seconds:>6.0}  {met}",
            fault.name, fault.says
        );
        if met == "SURVIVES" {
            survive.push(&fault.name);
        }
    }
    assert!(survive.is_empty(), "{survive:?}");
}

/// Builds the general suite of the copy; its program.
fn build(copy: &Path) -> PathBuf {
    let mut cargo = Command::new(env!("CARGO"));
    cargo.args([
        "test",
        "-p",
        "quintet-ref-trainer",
        "--test",
        "equals_one_device",
        "--no-run",
    ]);
    if let Ok(more) = std::env::var("QUINTET_FAULTS_CARGO") {
        cargo.args(more.split_whitespace());
    }
    let run = cargo
        .env("CARGO_TARGET_DIR", copy.with_file_name("planted-target"))
        .current_dir(copy)
        .output()
        .expect("cargo");
    let err = String::from_utf8_lossy(&run.stderr);
    assert!(run.status.success(), "{err}");
    // "Executable tests/equals_one_device.rs (/path/to/it)"
    let line = err.lines().find(|l| l.contains("equals_one_device.rs ("));
    let path = line
        .and_then(|l| l.rsplit_once('('))
        .map(|(_, path)| path.trim_end_matches(')'));
    PathBuf::from(path.unwrap_or_else(|| panic!("no program: {err}")))
}

/// Runs the general suite in a type, as `in_f64`, with one fault switched on; what came of it, and how
/// long it took.
fn run(program: &Path, suite: &str, fault: &str) -> (String, f64) {
    let begun = Instant::now();
    let run = Command::new(program)
        .args([&format!("{suite}_every_layout"), "--nocapture"])
        .env("QUINTET_PLANTED", fault)
        .env("QUINTET_SHRINK", "0")
        .output()
        .expect("the suite");
    let seconds = begun.elapsed().as_secs_f64();
    if run.status.success() {
        return ("SURVIVES".into(), seconds);
    }
    let (out, err) = (
        String::from_utf8_lossy(&run.stdout),
        String::from_utf8_lossy(&run.stderr),
    );
    let first = out.lines().find_map(|l| l.strip_prefix("draw "));
    let first = first.map(|l| l.chars().take(110).collect());
    (first.unwrap_or_else(|| format!("no draw: {err}")), seconds)
}

/// Makes `to` a copy of the sources, those texts changed that `change` changes.
fn copy_sources(from: &Path, to: &Path, change: &dyn Fn(&Path) -> Option<String>) {
    fs::create_dir_all(to).expect("a folder");
    for entry in fs::read_dir(from).expect("a folder") {
        let entry = entry.expect("an entry");
        let (name, path) = (entry.file_name(), entry.path());
        let hidden = name.to_string_lossy().starts_with('.');
        if hidden || name == "target" || name == "runs" {
            continue;
        }
        let target = to.join(&name);
        if path.is_dir() {
            copy_sources(&path, &target, change);
            continue;
        }
        let bytes = fs::read(&path).expect("a file");
        let bytes = change(&path).map_or(bytes, String::into_bytes);
        if fs::read(&target).ok().as_ref() != Some(&bytes) {
            fs::write(&target, bytes).expect("a copy");
        }
    }
}
