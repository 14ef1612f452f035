//! Faults in code, as texts that replace others: that each still applies, and, where it is asked
//! for, that the general random suite meets each (see `faults/README.md`).

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

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

#[test]
fn each_fault_still_applies() {
    let all = faults();
    assert!(all.len() >= 12, "{} faults", all.len());
    for fault in all {
        let text = fs::read_to_string(root().join(&fault.file)).expect("its file");
        let found = text.matches(&fault.is).count();
        assert_eq!(found, 1, "{} does not apply to {}", fault.name, fault.file);
        assert!(
            fault.is != fault.becomes && fault.says.ends_with('.'),
            "{}",
            fault.name
        );
    }
}

/// The long run: each fault in a copy of the tree, against the general suite.
#[test]
fn each_fault_is_met_by_the_random_suite() {
    let Ok(asked) = std::env::var("QUINTET_FAULTS") else {
        println!("QUINTET_FAULTS=1 plants every fault in a copy of the tree; this takes long");
        return;
    };
    let chosen = |fault: &Fault| asked == "1" || asked.split(',').any(|name| name == fault.name);
    let copy = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("planted");
    let mut table = BTreeMap::new();
    for fault in faults().into_iter().filter(chosen) {
        copy_sources(&root(), &copy);
        let file = copy.join(&fault.file);
        let text = fs::read_to_string(&file).expect("its file");
        fs::write(&file, text.replacen(&fault.is, &fault.becomes, 1)).expect("planted");
        let met = suite(&copy, &fault.suite);
        println!("{:<34} {:<74} {met}", fault.name, fault.says);
        table.insert(fault.name, met);
    }
    assert!(!table.is_empty(), "QUINTET_FAULTS={asked} names no fault");
    let survive: Vec<_> = table
        .iter()
        .filter(|(_, met)| met.starts_with("SURVIVES"))
        .collect();
    assert!(survive.is_empty(), "{survive:?}");
}

/// Runs the general suite in the fault's type in the copy and says what came of it.
fn suite(copy: &Path, name: &str) -> String {
    let run = Command::new(env!("CARGO"))
        .args([
            "test",
            "-p",
            "quintet-ref-trainer",
            "--test",
            "equals_one_device",
        ])
        .args([&format!("{name}_every_layout"), "--", "--nocapture"])
        .env("CARGO_TARGET_DIR", copy.with_file_name("planted-target"))
        .env(
            "QUINTET_CASES",
            std::env::var("QUINTET_CASES").unwrap_or("600".into()),
        )
        .current_dir(copy)
        .output()
        .expect("cargo");
    let (out, err) = (
        String::from_utf8_lossy(&run.stdout),
        String::from_utf8_lossy(&run.stderr),
    );
    assert!(!err.contains("could not compile"), "{err}");
    if run.status.success() {
        return "SURVIVES".into();
    }
    let draws = |line: &str| line.strip_prefix("failed at draw ").map(str::to_string);
    let draw = out.lines().chain(err.lines()).find_map(draws);
    draw.map_or("met".into(), |n| format!("met at draw {n}"))
}

/// Makes `to` a copy of the sources; what has not changed keeps its time, so that little is built
/// again.
fn copy_sources(from: &Path, to: &Path) {
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
            copy_sources(&path, &target);
        } else if fs::read(&path).ok() != fs::read(&target).ok() {
            fs::copy(&path, &target).expect("a copy");
        }
    }
}
