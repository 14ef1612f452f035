//! Which plan when: what the communicators of a job choose by, which what is predicted goes by too.

use std::fs;
use std::io::ErrorKind;
use std::path::Path;

use quintet_collectives::cost::{Constants, Model, parse};

use crate::failure::Failure;
use crate::job::Job;

/// The model that chooses plans: with the constants that `quintet bench --calibrate` has saved for the
/// job's transport, where the job names a file, else with those of threads, whatever the transport.
///
/// # Errors
/// Exit 3 for a file that cannot be read, or that has none for the transport.
pub fn choice(job: &Job) -> Result<Model, Failure> {
    let Some(path) = &job.constants else {
        return Ok(Model::default());
    };
    let transport = job.ranks.transport();
    let all = saved(path)?;
    // Between ranks of one host `auto` is shared memory.
    let names = [
        transport,
        if transport == "auto" {
            "shm"
        } else {
            transport
        },
    ];
    let of = |name: &str| all.iter().find(|(n, _)| n == name);
    let found = names.into_iter().find_map(of).ok_or_else(|| {
        Failure::data(format!(
            "{} has no constants of {transport}; quintet bench --calibrate --transport {transport} --constants {} adds them",
            path.display(),
            path.display()
        ))
    })?;
    Ok(Model {
        within: found.1,
        ..Model::default()
    })
}

/// The constants in a file, by transport; none where there is no file.
///
/// # Errors
/// Exit 3 where it cannot be read.
pub fn saved(path: &Path) -> Result<Vec<(String, Constants)>, Failure> {
    match fs::read_to_string(path) {
        Ok(text) => parse(&text).map_err(|e| Failure::data(format!("{}: {e}", path.display()))),
        Err(e) if e.kind() == ErrorKind::NotFound => Ok(Vec::new()),
        Err(e) => Err(Failure::file("read", path, &e)),
    }
}
