//! The metrics file: one JSON object a step, each on a line that is whole or not there.

use std::fs::{self, File, OpenOptions};
use std::io::{ErrorKind, Write};
use std::path::{Path, PathBuf};

use super::StepReport;
use super::run_dir::write_whole;
use crate::failure::Failure;
use crate::lock::Lock;

/// Appends steps to a file.
#[derive(Debug)]
pub struct MetricsLog {
    path: PathBuf,
    file: File,
    _lock: Option<Lock>,
}

impl MetricsLog {
    /// Opens the file for a run that has done `done` steps: lines of later steps, which it will
    /// write again, are dropped, and so is half a line. With `done` 0 the file starts anew.
    ///
    /// # Errors
    /// Exit 3 where the file cannot be read or written, or another run writes to it.
    pub fn open(path: &Path, done: u64) -> Result<Self, Failure> {
        if let Some(parent) = path.parent() {
            fs::create_dir_all(parent).map_err(|e| Failure::file("make", parent, &e))?;
        }
        let open = || {
            let file = OpenOptions::new().append(true).open(path);
            file.map_err(|e| Failure::file("open", path, &e))
        };
        // A pipe or a device takes lines too, but nothing can be dropped from it.
        let regular = !path.exists() || path.is_file();
        if regular {
            // Nobody else may be at the file that is replaced, nor come to the one that replaces it.
            let _old = match path.exists() {
                true => Some(Lock::file(open()?, path, "metrics")?),
                false => None,
            };
            write_whole(path, kept(path, done)?.as_bytes())?;
        }
        let file = open()?;
        let again = || {
            file.try_clone()
                .map_err(|e| Failure::file("open", path, &e))
        };
        let lock = match regular {
            true => Some(Lock::file(again()?, path, "metrics")?),
            false => None,
        };
        Ok(Self {
            path: path.to_path_buf(),
            file,
            _lock: lock,
        })
    }

    /// Writes a step, in one piece: whatever ends the run, the file stays valid.
    ///
    /// # Errors
    /// Exit 3 where it cannot be written.
    pub fn append(&mut self, report: &StepReport) -> Result<(), Failure> {
        let line = json_line(report)?;
        self.file
            .write_all(line.as_bytes())
            .map_err(|e| Failure::file("write", &self.path, &e))
    }

    /// The step of every line there is; one whose loss was no number is left out.
    #[must_use]
    pub fn history(&self) -> Vec<StepReport> {
        let text = if self.path.is_file() {
            fs::read_to_string(&self.path)
        } else {
            Ok(String::new())
        };
        let lines = text.unwrap_or_default();
        let step = |line: &str| serde_json::from_str(line).ok();
        lines.lines().filter_map(step).collect()
    }

    /// Where it is.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }
}

/// A step as one line of JSON. A loss that is no number is `null`.
///
/// # Errors
/// None that a [`StepReport`] can cause; exit 3 where JSON refuses it all the same.
pub fn json_line(report: &StepReport) -> Result<String, Failure> {
    serde_json::to_string(report)
        .map(|line| line + "\n")
        .map_err(|e| {
            Failure::data(format!(
                "step {} cannot be written as JSON: {e}",
                report.step
            ))
        })
}

fn kept(path: &Path, done: u64) -> Result<String, Failure> {
    if done == 0 {
        return Ok(String::new());
    }
    let text = match fs::read_to_string(path) {
        Ok(text) => text,
        Err(e) if e.kind() == ErrorKind::NotFound => String::new(),
        Err(e) => return Err(Failure::file("read", path, &e)),
    };
    let step_of = |line: &str| {
        serde_json::from_str::<serde_json::Value>(line)
            .ok()?
            .get("step")?
            .as_u64()
    };
    let lines = text
        .lines()
        .filter(|line| step_of(line).is_some_and(|step| step <= done));
    Ok(lines.flat_map(|line| [line, "\n"]).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::test_dir::TestDir;

    fn step(step: u64) -> StepReport {
        StepReport {
            step,
            loss: 2.5,
            comm_wait_ms: [("tp".to_string(), 1.5)].into(),
            memory_bytes: [("parameters".to_string(), 4096)].into(),
            bytes: [("dp".to_string(), 7)].into(),
            ..StepReport::default()
        }
    }

    fn steps(path: &Path) -> Vec<u64> {
        let text = fs::read_to_string(path).unwrap();
        assert!(text.is_empty() || text.ends_with('\n'));
        text.lines()
            .map(|line| serde_json::from_str::<StepReport>(line).unwrap().step)
            .collect()
    }

    #[test]
    fn keys_are_the_contract() {
        let line = json_line(&step(3)).unwrap();
        let keys = [
            "step",
            "loss",
            "grad_norm",
            "lr",
            "tokens",
            "tokens_per_s",
            "step_ms",
            "comm_wait_ms",
            "bubble",
            "memory_bytes",
            "bytes",
        ];
        let object: serde_json::Map<String, serde_json::Value> =
            serde_json::from_str(&line).unwrap();
        let mut found: Vec<&str> = object.keys().map(String::as_str).collect();
        let mut wanted = keys.to_vec();
        found.sort_unstable();
        wanted.sort_unstable();
        assert_eq!(found, wanted);
        assert_eq!(object["comm_wait_ms"]["tp"], 1.5);
        let lost = json_line(&StepReport {
            loss: f64::NAN,
            held_out: Some(2.0),
            ..step(1)
        })
        .unwrap();
        assert!(lost.contains(r#""loss":null"#) && lost.contains(r#""held_out":2.0"#));
    }

    #[test]
    fn a_resumed_run_goes_on_where_its_checkpoint_was() {
        let dir = TestDir::new("metrics");
        let path = dir.path().join("sub/m.jsonl");
        let mut log = MetricsLog::open(&path, 0).unwrap();
        for s in 1..=5 {
            log.append(&step(s)).unwrap();
        }
        assert_eq!(steps(&path), [1, 2, 3, 4, 5]);
        fs::write(
            &path,
            fs::read_to_string(&path).unwrap() + r#"{"step": 6, "lo"#,
        )
        .unwrap();
        let refused = MetricsLog::open(&path, 3).unwrap_err();
        assert!(refused.sentence.contains("another run"), "{refused}");
        drop(log);
        let mut log = MetricsLog::open(&path, 3).unwrap();
        log.append(&step(4)).unwrap();
        assert_eq!(steps(&path), [1, 2, 3, 4]);
        assert_eq!(log.history().last(), Some(&step(4)));
        drop(log);
        let _ = MetricsLog::open(&path, 0).unwrap();
        assert!(steps(&path).is_empty());
        let _ = MetricsLog::open(&dir.path().join("new.jsonl"), 9).unwrap();
    }
}
