//! The run's folder: what ran, how it went, and a picture of it.

use std::fs;
use std::io::{ErrorKind, Write};
use std::path::{Path, PathBuf};

use crate::failure::Failure;
use crate::job::Job;
use crate::lock::Lock;

/// A folder with `config.json` in it, written to by nobody else until the value is dropped.
#[derive(Debug)]
pub struct RunDir {
    path: PathBuf,
    _lock: Lock,
}

impl RunDir {
    /// Makes the folder that the job names, or `parent/0001` and so on: the first number above
    /// all that are there; then writes `config.json`, from which `--config` repeats the run.
    ///
    /// # Errors
    /// Exit 3 where the folder or the file cannot be written, or another run is at it.
    pub fn create(job: &Job, parent: &Path) -> Result<Self, Failure> {
        let path = match &job.run_dir {
            Some(path) => {
                fs::create_dir_all(path).map_err(|e| Failure::file("make", path, &e))?;
                path.clone()
            }
            None => next_free(parent)?,
        };
        let lock = Lock::folder(&path, "run-dir")?;
        let config = path.join("config.json");
        // A repeated run shall get a folder of its own.
        let repeatable = Job {
            run_dir: None,
            ..job.clone()
        };
        write_whole(&config, repeatable.to_json()?.as_bytes())?;
        Ok(Self { path, _lock: lock })
    }

    /// Where it is.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// A file in it.
    #[must_use]
    pub fn file(&self, name: &str) -> PathBuf {
        self.path.join(name)
    }
}

/// Writes a file beside its place and moves it there, so that nobody ever reads half of it.
///
/// # Errors
/// Exit 3 with the path and what the system said.
pub(crate) fn write_whole(path: &Path, content: &[u8]) -> Result<(), Failure> {
    let partial = partial(path);
    let written = fs::File::create(&partial)
        .and_then(|mut file| file.write_all(content))
        .and_then(|()| fs::rename(&partial, path));
    written.map_err(|e| Failure::file("write", path, &e))
}

/// Where a file is written before it is whole.
pub(crate) fn partial(path: &Path) -> PathBuf {
    let mut name = path.file_name().unwrap_or_default().to_os_string();
    name.push(".partial");
    path.with_file_name(name)
}

fn next_free(parent: &Path) -> Result<PathBuf, Failure> {
    let fail = |e: &std::io::Error| Failure::file("make a folder in", parent, e);
    fs::create_dir_all(parent).map_err(|e| fail(&e))?;
    let taken = fs::read_dir(parent)
        .map_err(|e| fail(&e))?
        .flatten()
        .filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok())
        .max()
        .unwrap_or(0);
    let mut number = u64::from(taken);
    loop {
        number += 1;
        let path = parent.join(format!("{number:04}"));
        match fs::create_dir(&path) {
            // Another run took the number in between.
            Err(e) if e.kind() == ErrorKind::AlreadyExists => {}
            Err(e) => return Err(fail(&e)),
            Ok(()) => return Ok(path),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::test_dir::TestDir;

    #[test]
    fn numbers_go_on_and_the_config_repeats_the_run() {
        let dir = TestDir::new("run_dir");
        let runs = dir.path().join("runs");
        let job = Job::demo();
        assert!(
            RunDir::create(&job, &runs)
                .unwrap()
                .path()
                .ends_with("0001")
        );
        fs::create_dir(runs.join("0007")).unwrap();
        fs::create_dir(runs.join("notes")).unwrap();
        let run = RunDir::create(&job, &runs).unwrap();
        assert!(run.path().ends_with("0008"));
        assert_eq!(Job::read(&run.file("config.json")).unwrap(), job);
    }

    #[test]
    fn a_named_folder_is_used_and_not_repeated() {
        let dir = TestDir::new("run_dir_named");
        let named = dir.path().join("deep/er");
        let job = Job {
            run_dir: Some(named.clone()),
            ..Job::demo()
        };
        let run = RunDir::create(&job, dir.path()).unwrap();
        assert_eq!(run.path(), named);
        assert_eq!(Job::read(&run.file("config.json")).unwrap(), Job::demo());
    }

    #[test]
    fn a_folder_that_cannot_be_is_exit_3() {
        let dir = TestDir::new("run_dir_bad");
        let file = dir.path().join("file");
        fs::write(&file, "x").unwrap();
        for job in [
            Job::demo(),
            Job {
                run_dir: Some(file.join("run")),
                ..Job::demo()
            },
        ] {
            let failure = RunDir::create(&job, &file).unwrap_err();
            assert_eq!(failure.exit, crate::failure::Exit::Data);
        }
    }
}
