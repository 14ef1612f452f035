//! What the trainer writes into a checkpoint beside the numbers, and what it asks of one.

use std::path::Path;

use quintet_zero::checkpoint::{About, find};

use crate::failure::Failure;
use crate::job::Job;

/// The words that go with a checkpoint: the job, from which a run goes on.
///
/// # Errors
/// Where the job cannot be written as JSON.
pub fn about(job: &Job, step: u64) -> Result<About, Failure> {
    let l = &job.layout;
    let text = job.to_json()?;
    let user = serde_json::from_str(&text)
        .map_err(|e| Failure::data(format!("the job cannot be written as JSON: {e}")))?;
    Ok(About {
        step,
        layout: format!("dp {} tp {} pp {} zero {}", l.dp, l.tp, l.pp, l.zero_stage),
        user,
    })
}

/// The job that a checkpoint was taken from.
///
/// # Errors
/// Where there is no checkpoint, or it is not this trainer's.
pub fn job_of(root: &Path) -> Result<(Job, u64), Failure> {
    let (folder, meta) = find(root)?;
    let job: Job = serde_json::from_value(meta.user.clone()).map_err(|e| {
        Failure::data(format!(
            "checkpoint {} was not written by this trainer: {e}",
            folder.display()
        ))
    })?;
    Ok((job, meta.step))
}

/// Finds out before the first step whether checkpoints can be written to `root`.
///
/// # Errors
/// Exit 3 where they cannot.
pub fn probe(root: &Path) -> Result<(), Failure> {
    std::fs::create_dir_all(root).map_err(|e| Failure::file("make", root, &e))?;
    let trial = root.join(format!(".trial.{}", std::process::id()));
    std::fs::write(&trial, b"").map_err(|e| Failure::file("write to", root, &e))?;
    std::fs::remove_file(&trial).map_err(|e| Failure::file("write to", root, &e))
}

/// Steps behind a checkpoint that this job goes on from; the model, data and seed must be its own.
///
/// # Errors
/// Where it is another model's, or has gone further than the job goes.
pub fn steps_done(job: &Job, root: &Path) -> Result<u64, Failure> {
    let (saved, step) = job_of(root)?;
    if saved.model != job.model {
        return Err(Failure::data(format!(
            "the checkpoint in {} is of another model than --model {} asks for: it was trained with {} (tied table: {})",
            root.display(),
            job.model_name,
            saved.model_name,
            saved.model.tied
        )));
    }
    if step >= job.steps {
        return Err(Failure::usage(format!(
            "the checkpoint in {} has {step} steps behind it and --steps is {}; give a larger number",
            root.display(),
            job.steps
        )));
    }
    Ok(step)
}
