//! What a run leaves behind and what it prints.
//!
//! ```text
//! Forecast ---> banner                      before the first message
//! StepReport -> metrics.jsonl, step line    after every step
//! EqualityTable -> table                    at the end, beside loss.svg
//! Seen, by rank -> report.html, trace       at the end: spans, memory, bytes from rank to rank
//! ```

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::failure::Failure;
use crate::job::Job;
use run_dir::{partial, write_whole};

mod banner;
mod console;
mod curve;
mod equality;
pub mod human;
mod megatron;
mod metrics;
pub mod page;
mod run_dir;
mod tensorboard;
#[cfg(test)]
pub(crate) mod test_dir;
pub mod timeline;
pub mod trace;

pub use console::{Console, Look};
pub use curve::Curve;
pub use metrics::{MetricsLog, json_line};
pub use page::{History, Seen};
pub use run_dir::RunDir;
pub use tensorboard::EventFile;

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
    /// Bytes all ranks send in a step, by group; what the routers decide not included.
    pub traffic: BTreeMap<String, u64>,
    /// Bytes for each row that leaves its rank for an expert, there and back, forward and backward.
    pub row_bytes: Option<u64>,
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
    /// What the routers did, of a model with experts.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub experts: Option<ExpertReport>,
}

/// What the routers of a step did.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct ExpertReport {
    /// Loss of balance, unweighted: summed over layers, averaged over microbatches; 0 where it has
    /// no weight.
    pub aux_loss: f64,
    /// z-loss, likewise.
    pub z_loss: f64,
    /// The largest share of an expert over its fair share, in the most uneven layer: 1 where all is
    /// even.
    pub imbalance: f64,
    /// Share of all choices that found no room.
    pub dropped: f64,
    /// By layer: how often each expert was chosen.
    pub load: Vec<Vec<u64>>,
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

/// The loss of a proven step, in three ways.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Losses {
    /// The step.
    pub step: u64,
    /// The run's.
    pub ours: f64,
    /// The twin's: these crates on one rank, from the same state.
    pub twin: f64,
    /// The oracle's: plain f64, from the same state.
    pub oracle: f64,
}

/// The proof at the end of a run.
#[derive(Debug, Clone, PartialEq, Default, Serialize)]
pub struct EqualityTable {
    /// With what we were compared, as in `one device (same seed, same batches)`.
    pub against: String,
    /// The comparisons.
    pub rows: Vec<EqualityRow>,
    /// The losses among them.
    pub losses: Vec<Losses>,
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
    events: Option<EventFile>,
    history: History,
    forecast: Forecast,
    job: Job,
    done: u64,
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
        let mut history = History::default();
        for report in metrics.history() {
            curve.add(report.step, report.loss, report.held_out);
            history.add(&report);
        }
        // What is written at the end is known to be writable at the start.
        let named = [&job.report, &job.trace];
        named
            .into_iter()
            .flatten()
            .try_for_each(|path| probe(path))?;
        let events = job.tensorboard_dir.as_deref();
        let events = events.map(|dir| EventFile::create(dir, job.layout.world(), done));
        Ok(Self {
            run,
            metrics,
            console,
            curve,
            events: events.transpose()?,
            history,
            forecast: forecast.clone(),
            job: job.clone(),
            done,
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
        self.history.add(report);
        if let Some(events) = &mut self.events {
            events.append(report)?;
        }
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

    /// Draws the curve, writes the page and the trace, prints the table and says where everything is.
    /// `seen` is what ranks saw, in rank order; empty where the run failed. To be called for a run
    /// that was interrupted too.
    ///
    /// # Errors
    /// Exit 3 where a file cannot be written, or stdout could not.
    pub fn finish(mut self, table: Option<&EqualityTable>, seen: &[Seen]) -> Result<(), Failure> {
        let mut files = vec!["config.json"];
        let mut elsewhere: Vec<PathBuf> = Vec::new();
        let metrics = self.metrics.path();
        if metrics.parent() == Some(self.run.path()) {
            files.push("metrics.jsonl");
        } else {
            elsewhere.push(metrics.to_path_buf());
        }
        if self.curve.write(&self.run.file("loss.svg"))? {
            files.push("loss.svg");
        }
        let page = self.page(table, seen)?;
        match &self.job.report {
            Some(path) => {
                write_named(path, &page)?;
                elsewhere.push(path.clone());
            }
            None => {
                write_whole(&self.run.file("report.html"), page.as_bytes())?;
                files.push("report.html");
            }
        }
        if let Some(path) = &self.job.trace {
            write_named(path, &self.trace(seen)?)?;
            elsewhere.push(path.clone());
        }
        elsewhere.extend(
            self.events
                .as_ref()
                .map(|events| events.path().to_path_buf()),
        );
        self.console.finish(table)?;
        if table.is_some_and(EqualityTable::holds) {
            self.console
                .note("all ok: the run is what one device computes")?;
        }
        if self.last < self.job.steps {
            self.console.note(&format!(
                "stopped after step {} of {}",
                self.last, self.job.steps
            ))?;
        }
        let mut text = format!(
            "wrote {}/{{{}}}",
            self.run.path().display(),
            files.join(", ")
        );
        for path in elsewhere {
            text += &format!(" and {}", path.display());
        }
        self.console.note(&text)
    }

    fn page(&self, table: Option<&EqualityTable>, seen: &[Seen]) -> Result<String, Failure> {
        let done = self.last - self.done;
        page::page(
            &self.job,
            &self.forecast,
            &self.history,
            (seen, done),
            table,
        )
    }

    fn trace(&self, seen: &[Seen]) -> Result<String, Failure> {
        let recordings: Vec<_> = seen.iter().map(|seen| seen.recording.clone()).collect();
        let places = page::places(&self.job)?.into_iter();
        let first = page::first_microbatches(&self.job)?;
        let ranks: Vec<_> = places
            .zip(first)
            .map(|(place, first_microbatch)| trace::RankName {
                place,
                first_microbatch,
            })
            .collect();
        let about = [
            ("quintet", env!("CARGO_PKG_VERSION").to_string()),
            ("model", self.job.model_name.clone()),
            ("layout", banner::degrees(&self.job)),
        ];
        trace::chrome(&timeline::Timeline::new(&recordings), &ranks, &about)
    }
}

/// Writes a file that a flag names: whole or not at all, but for a pipe or device, which stays one.
pub(crate) fn write_named(path: &Path, text: &str) -> Result<(), Failure> {
    if is_device(path) {
        return std::fs::write(path, text).map_err(|e| Failure::file("write", path, &e));
    }
    write_whole(path, text.as_bytes())
}

fn is_device(path: &Path) -> bool {
    path.exists() && !path.is_file() && !path.is_dir()
}

/// Makes the folder of a file that a flag names and refuses what cannot be written there.
pub(crate) fn probe(path: &Path) -> Result<(), Failure> {
    if let Some(parent) = path.parent() {
        std::fs::create_dir_all(parent).map_err(|e| Failure::file("make", parent, &e))?;
    }
    let fail = |e: &io::Error| Failure::file("write", path, e);
    if path.is_dir() {
        return Err(fail(&io::ErrorKind::IsADirectory.into()));
    }
    if is_device(path) {
        return Ok(());
    }
    let beside = partial(path);
    let probed = std::fs::File::create(&beside).and_then(|_| std::fs::remove_file(&beside));
    probed.map_err(|e| fail(&e))
}
