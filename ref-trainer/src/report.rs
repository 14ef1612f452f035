//! What a run leaves behind and what it prints.
//!
//! ```text
//! Forecast ---> banner                      before the first message
//! StepReport -> metrics.jsonl, step line    after every step
//! EqualityTable -> table                    at the end, beside loss.svg
//! ```

use std::collections::BTreeMap;
use std::io;
use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::failure::Failure;
use crate::job::Job;

mod banner;
mod console;
mod curve;
mod equality;
pub mod human;
mod metrics;
mod run_dir;
#[cfg(test)]
pub(crate) mod test_dir;

pub use console::{Console, Look};
pub use curve::Curve;
pub use metrics::{MetricsLog, json_line};
pub use run_dir::RunDir;

/// What is known before the first message.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Forecast {
    /// Parameters of the whole model, a tied table counted once.
    pub parameters: u64,
    /// The data in a few words, as in `embedded: Hamlet, 189 KB`.
    pub data: String,
    /// Entropy of single tokens, in nats: the loss of a model that knows only how often each
    /// occurs.
    pub unigram_entropy: Option<f64>,
    /// Bytes on the fullest rank, by category; of activations the most there can be.
    pub memory: BTreeMap<String, u64>,
    /// Bytes all ranks send in a step, by group.
    pub traffic: BTreeMap<String, u64>,
    /// Share of a stage's time in which its schedule gives it nothing to do.
    pub bubble: Option<f64>,
    /// The most microbatches, of a chunk each, whose saved activations a stage holds at once.
    pub held: Option<usize>,
}

/// One step: an object of the metrics file.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct StepReport {
    /// From 1.
    pub step: u64,
    /// Nats per token, over the whole global batch.
    pub loss: f64,
    /// Norm of the whole gradient, before clipping.
    pub grad_norm: f64,
    /// Learning rate of this step.
    pub lr: f64,
    /// Predictions that counted in this step.
    pub tokens: u64,
    /// Those, per second of this step.
    pub tokens_per_s: f64,
    /// Wall time of the step.
    pub step_ms: f64,
    /// Wall time a rank stood still for its peers, mean over ranks, by axis.
    pub comm_wait_ms: BTreeMap<String, f64>,
    /// Share of the step in which a stage had nothing to do, mean over stages; 0 to 1.
    pub bubble: f64,
    /// Highest bytes on the fullest rank, by category.
    pub memory_bytes: BTreeMap<String, u64>,
    /// Bytes all ranks sent in this step, by group.
    pub bytes: BTreeMap<String, u64>,
    /// Loss on text that is never learnt from, on the steps where it is taken.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub held_out: Option<f64>,
}

/// What a comparison came to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Verdict {
    /// The same bits.
    BitEqual,
    /// Within its bound.
    Ok,
    /// Neither.
    Differs,
}

/// One quantity computed in two ways.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct EqualityRow {
    /// The step after which it was compared; none for a whole run.
    pub step: Option<u64>,
    /// What was compared, and where the worst was found.
    pub quantity: String,
    /// Ours, where it is one number.
    pub value: Option<f64>,
    /// Largest difference found.
    pub difference: f64,
    /// Largest difference allowed; 0 where the bits must be the same.
    pub bound: f64,
    /// Whether every bit was the same.
    pub bit_equal: bool,
}

/// The proof at the end of a run.
#[derive(Debug, Clone, PartialEq, Default, Serialize)]
pub struct EqualityTable {
    /// With what we were compared, as in `one device (same seed, same batches)`.
    pub against: String,
    /// The comparisons.
    pub rows: Vec<EqualityRow>,
    /// Bytes a run was to send, by group.
    pub bytes_predicted: BTreeMap<String, u64>,
    /// Bytes it sent.
    pub bytes_counted: BTreeMap<String, u64>,
}

impl EqualityRow {
    /// A difference that is not a number is a difference.
    #[must_use]
    pub fn verdict(&self) -> Verdict {
        if self.bit_equal {
            Verdict::BitEqual
        } else if self.difference <= self.bound && self.bound > 0.0 {
            Verdict::Ok
        } else {
            Verdict::Differs
        }
    }
}

impl EqualityTable {
    /// Whether every row holds and the bytes are as predicted.
    #[must_use]
    pub fn holds(&self) -> bool {
        self.bytes_predicted == self.bytes_counted
            && self
                .rows
                .iter()
                .all(|row| row.verdict() != Verdict::Differs)
    }
}

/// A run's folder, metrics file and console, in one hand.
pub struct Reporter {
    run: RunDir,
    metrics: MetricsLog,
    console: Console,
    curve: Curve,
    steps: u64,
    last: u64,
}

impl Reporter {
    /// Makes the run's folder (under `runs/` unless the job names one), opens the metrics file and
    /// prints the banner. `done` is the number of steps that a loaded checkpoint had behind it.
    ///
    /// # Errors
    /// Exit 3 where a file or folder cannot be written.
    pub fn start(job: &Job, forecast: &Forecast, done: u64) -> Result<Self, Failure> {
        let run = RunDir::create(job, Path::new("runs"))?;
        let path = job
            .metrics
            .clone()
            .unwrap_or_else(|| run.file("metrics.jsonl"));
        let metrics = MetricsLog::open(&path, done)?;
        let mut console = Console::new(job, done, Look::of_stdout(), Box::new(io::stdout()));
        console.banner(job, forecast)?;
        let mut curve = Curve {
            title: format!(
                "{}, {}, {}",
                job.model_name,
                banner::degrees(job),
                forecast.data
            ),
            unigram_entropy: forecast.unigram_entropy,
            ..Curve::default()
        };
        for (step, loss, held_out) in metrics.history() {
            curve.add(step, loss, held_out);
        }
        Ok(Self {
            run,
            metrics,
            console,
            curve,
            steps: job.steps,
            last: done,
        })
    }

    /// Records a step and prints it.
    ///
    /// # Errors
    /// Exit 3 where the metrics file or stdout cannot be written.
    pub fn step(&mut self, report: &StepReport) -> Result<(), Failure> {
        self.metrics.append(report)?;
        self.curve.add(report.step, report.loss, report.held_out);
        self.last = report.step;
        self.console.step(report)
    }

    /// Prints a line that is no step, as in `saved checkpoint/step_00000100`.
    ///
    /// # Errors
    /// Exit 3 where stdout cannot be written.
    pub fn note(&mut self, text: &str) -> Result<(), Failure> {
        self.console.note(text)
    }

    /// Where the run leaves its files.
    #[must_use]
    pub fn folder(&self) -> &Path {
        self.run.path()
    }

    /// Draws the curve, prints the table and says where everything is. To be called for a run that
    /// was interrupted too.
    ///
    /// # Errors
    /// Exit 3 where the curve cannot be written, or stdout could not.
    pub fn finish(mut self, table: Option<&EqualityTable>) -> Result<(), Failure> {
        let drawn = self.curve.write(&self.run.file("loss.svg"))?;
        self.console.finish(table)?;
        if table.is_some_and(EqualityTable::holds) {
            self.console
                .note("all ok: the run is what one device computes")?;
        }
        if self.last < self.steps {
            self.console.note(&format!(
                "stopped after step {} of {}",
                self.last, self.steps
            ))?;
        }
        let metrics = self.metrics.path();
        let mut files = vec!["config.json"];
        if metrics.parent() == Some(self.run.path()) {
            files.push("metrics.jsonl");
        }
        if drawn {
            files.push("loss.svg");
        }
        let mut text = format!(
            "wrote {}/{{{}}}",
            self.run.path().display(),
            files.join(", ")
        );
        if metrics.parent() != Some(self.run.path()) {
            text += &format!(" and {}", metrics.display());
        }
        self.console.note(&text)
    }
}
