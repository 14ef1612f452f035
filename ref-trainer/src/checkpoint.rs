//! What the trainer writes into a checkpoint beside the numbers, and what it asks of one.

use std::path::Path;

use serde::{Deserialize, Serialize};

use quintet_planner::config::ModelConfig;
use quintet_zero::checkpoint::{About, find};

use crate::data::{Corpus, Part};
use crate::failure::Failure;
use crate::job::{DataSource, Job, Ranks};

/// What a run writes into a checkpoint of its own, and goes on from.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Origin {
    /// What was trained.
    #[serde(rename = "job")]
    pub saved: Job,
    /// What it was trained on.
    pub text: Fingerprint,
    /// Steps behind it.
    #[serde(skip)]
    pub steps: u64,
}

impl Origin {
    /// What this job becomes where it goes on from here: a run that has taken steps keeps its data
    /// and optimizer, a model that was converted is only that.
    #[must_use]
    pub fn goes_on(self, next: Job) -> Job {
        if self.steps > 0 {
            return self.saved.goes_on(next);
        }
        Job {
            model_name: self.saved.model_name,
            model: self.saved.model,
            max_positions: self.saved.max_positions,
            ..next
        }
    }
}

/// A text, as far as two are told apart.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Fingerprint {
    /// Its length.
    pub bytes: u64,
    /// Its checksum.
    pub crc32: u32,
}

impl Fingerprint {
    /// Of a text.
    #[must_use]
    pub fn of(corpus: &Corpus) -> Self {
        let bytes = corpus.part(Part::Whole);
        Self {
            bytes: bytes.len() as u64,
            crc32: crc32fast::hash(bytes),
        }
    }
}

/// The words that go with a checkpoint: the job, from which a run goes on.
///
/// # Errors
/// Where the job cannot be written as JSON.
pub fn about(job: &Job, corpus: &Corpus, step: u64) -> Result<About, Failure> {
    let l = &job.layout;
    let origin = Origin {
        // What ranks were is none of what was learnt: the same run leaves the same files.
        saved: Job {
            ranks: Ranks::default(),
            constants: None,
            ..job.clone()
        },
        text: Fingerprint::of(corpus),
        steps: step,
    };
    let user = serde_json::to_value(&origin)
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
pub fn job_of(root: &Path) -> Result<Origin, Failure> {
    let (folder, meta) = find(root)?;
    let origin: Origin = serde_json::from_value(meta.user.clone()).map_err(|e| {
        Failure::data(format!(
            "checkpoint {} was not written by this trainer: {e}",
            folder.display()
        ))
    })?;
    Ok(Origin {
        steps: meta.step,
        ..origin
    })
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

/// What of a model must stay: not the rules of its training, and before the first step not what a
/// file cannot say.
fn computed(model: &ModelConfig, begun: bool) -> ModelConfig {
    let mut model = model.clone();
    if let Some(moe) = &mut model.moe {
        (moe.aux_loss, moe.z_loss, moe.bias_update_rate) = (0.0, 0.0, 0.0);
        moe.capacity_factor = moe.capacity_factor.filter(|_| begun);
    }
    model.window = model.window.filter(|_| begun);
    model
}

/// A job's model in a few words.
fn named(job: &Job) -> String {
    let m = &job.model;
    let mut words = String::from(if m.tied { "tied" } else { "untied" });
    if let Some(tokens) = m.window {
        words += &format!(", a window of {tokens}");
    }
    if let Some(moe) = &m.moe {
        words += &format!(", {} of {} experts", moe.topk, moe.experts);
    }
    format!("--model {} ({words})", job.model_name)
}

/// Steps behind a checkpoint that this job goes on from; model, data, mask and seed must be the
/// same, for else neither the parameters nor the place in the data mean anything. Where no step
/// has been taken (a converted model) only the model must.
///
/// # Errors
/// Exit 2 where the job says otherwise, or goes no further than the checkpoint; 3 where the text
/// has changed in its place.
pub fn steps_done(job: &Job, corpus: &Corpus, root: &Path) -> Result<u64, Failure> {
    let origin = job_of(root)?;
    let saved = &origin.saved;
    let other = |was: String, is: String| {
        Failure::usage(format!(
            "the checkpoint in {} was trained with {was}, not {is}; leave that out to go on from it, or leave out --load",
            root.display()
        ))
    };
    let begun = origin.steps > 0;
    if computed(&saved.model, begun) != computed(&job.model, begun) {
        return Err(match (named(saved), named(job)) {
            (was, is) if was == is => other(was, "a model of that name with other flags".into()),
            (was, is) => other(was, is),
        });
    }
    if !begun {
        return Ok(0);
    }
    if saved.seed != job.seed {
        return Err(other(
            format!("--seed {}", saved.seed),
            format!("{}", job.seed),
        ));
    }
    if saved.pack_documents != job.pack_documents {
        let of = |job: &Job| format!("--pack-documents={}", job.pack_documents);
        return Err(other(of(saved), of(job)));
    }
    if saved.mask_fraction != job.mask_fraction {
        let of = |job: &Job| job.mask_fraction.to_string();
        return Err(other(format!("--mask-fraction {}", of(saved)), of(job)));
    }
    if saved.mask() != job.mask() {
        let of = |job: &Job| job.mask().samples.to_string();
        return Err(other(format!("--mask-samples {}", of(saved)), of(job)));
    }
    if origin.text != Fingerprint::of(corpus) {
        let of = |job: &Job| match &job.data {
            DataSource::Embedded => "embedded".to_string(),
            DataSource::File(path) => path.display().to_string(),
        };
        if saved.data == job.data {
            return Err(Failure::data(format!(
                "{} is no longer the text that the checkpoint in {} was trained on; put that back to go on from it",
                of(job),
                root.display()
            )));
        }
        return Err(other(format!("--data {}", of(saved)), of(job)));
    }
    if origin.steps >= job.steps {
        return Err(Failure::usage(format!(
            "the checkpoint in {} has {} steps behind it and --steps is {}; give a larger number",
            root.display(),
            origin.steps,
            job.steps
        )));
    }
    Ok(origin.steps)
}
