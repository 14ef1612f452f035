//! A job: everything a run needs to know, as plain data.
//!
//! The same value comes from the command line, is written to `config.json` of the run folder, and
//! is read back by `--config`: the file reproduces the run.

use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};

use quintet_planner::config::{Batch, Layout, ModelConfig};
use serde::{Deserialize, Serialize};

use crate::data::RandomMask;
use crate::failure::Failure;
use crate::model_config::Model;

mod check;
mod mirror;
mod ranks;
#[cfg(test)]
mod tests;

pub use ranks::{Over, Ranks};

/// Everything a run needs.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Job {
    /// What `--model` said: a preset's name or a path.
    pub model_name: String,
    /// The model itself, so that a job does not depend on a preset or a file staying as it was.
    #[serde(with = "mirror::ModelDef")]
    pub model: ModelConfig,
    /// Tokens that the model's file says it is made for (`max_position_embeddings`), if it has one.
    pub max_positions: Option<usize>,
    /// How a step is cut over ranks.
    #[serde(with = "mirror::LayoutDef")]
    pub layout: Layout,
    /// How much is learnt from in a step.
    #[serde(with = "mirror::BatchDef")]
    pub batch: Batch,
    /// What is learnt from.
    pub data: DataSource,
    /// Documents of a text, which blank lines part, do not see each other.
    pub pack_documents: bool,
    /// Share of positions, drawn by seed, whose prediction does not count; 0 counts all.
    pub mask_fraction: f64,
    /// Share of samples, drawn by seed, none of whose predictions counts; half of `mask_fraction`
    /// falls on whole samples where absent, so that some ranks have no valid token at all.
    pub mask_samples: Option<f64>,
    /// Type of parameters and activations.
    pub dtype: Dtype,
    /// What computes.
    pub device: DeviceKind,
    /// Seed of weights and data order.
    pub seed: u64,
    /// Steps in all, those done before `load` included.
    pub steps: u64,
    /// The optimizer and its schedule.
    pub optimizer: OptimizerOptions,
    /// Held-out loss is taken every so many steps; 0 is never.
    pub eval_interval: u64,
    /// What ranks are.
    pub ranks: Ranks,
    /// Whether NCCL performs collectives where the device's memory lies.
    pub nccl: bool,
    /// This process is one rank of those that a launcher has started; a fact of this process and
    /// not of the job.
    #[serde(skip)]
    pub launched: bool,
    /// Whether ranks that are threads send messages, as between hosts, rather than share memory.
    pub by_messages: bool,
    /// Constants that plans are chosen by, as `bench --calibrate` saves them.
    pub constants: Option<PathBuf>,
    /// Threads each rank computes with.
    pub threads_per_rank: usize,
    /// Folder checkpoints are written to.
    pub save: Option<PathBuf>,
    /// Folder of the checkpoint to go on from.
    pub load: Option<PathBuf>,
    /// A checkpoint every so many steps besides the last; 0 is only the last.
    pub save_interval: u64,
    /// The run's folder; the next free number under `runs/` where absent.
    pub run_dir: Option<PathBuf>,
    /// The metrics file; `metrics.jsonl` in the run's folder where absent.
    pub metrics: Option<PathBuf>,
    /// File for the timeline of every rank, in Chrome's trace event format.
    pub trace: Option<PathBuf>,
    /// Steps behind the run when the recording of its timeline begins; where absent, those of the
    /// checkpoint it goes on from, or none.
    pub profile_step_start: Option<u64>,
    /// Steps behind the run when that recording ends; three later where absent.
    pub profile_step_end: Option<u64>,
    /// The page that shows the run; `report.html` in the run's folder where absent.
    pub report: Option<PathBuf>,
    /// Folder for event files that TensorBoard reads.
    pub tensorboard_dir: Option<PathBuf>,
    /// Where ranks record their last calls, if they do.
    pub recorder: Option<PathBuf>,
    /// How steps are printed.
    pub log_format: LogFormat,
    /// A line every so many steps; 0 chooses about 25 lines a run.
    pub log_interval: u64,
    /// Run the one-device twin too and print the equality table at the end.
    pub prove: bool,
    /// Print no banner and no steps.
    pub quiet: bool,
}

/// What is learnt from.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum DataSource {
    /// The play that is built in.
    #[default]
    Embedded,
    /// The bytes of a file.
    File(PathBuf),
}

/// Type of parameters and activations.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Dtype {
    /// 64 bits, the oracle's.
    F64,
    /// 32 bits.
    F32,
    /// 16 bits, with f32 master weights, gradients, moments and sums.
    Bf16,
}

impl Dtype {
    /// As the command line spells it.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Dtype::F64 => "f64",
            Dtype::F32 => "f32",
            Dtype::Bf16 => "bf16",
        }
    }

    /// Bytes of an element of a parameter or an activation.
    #[must_use]
    pub fn bytes(self) -> usize {
        match self {
            Dtype::F64 => 8,
            Dtype::F32 => 4,
            Dtype::Bf16 => 2,
        }
    }

    /// Bytes of an element of what sums are taken in: gradients, moments, statistics, and master
    /// weights where there are any.
    #[must_use]
    pub fn acc_bytes(self) -> usize {
        match self {
            Dtype::F64 => 8,
            Dtype::F32 | Dtype::Bf16 => 4,
        }
    }

    /// Whether the optimizer keeps master weights: parameters are narrower than sums.
    #[must_use]
    pub fn has_masters(self) -> bool {
        self.bytes() < self.acc_bytes()
    }
}

/// What computes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum DeviceKind {
    /// The host's cores.
    #[default]
    Cpu,
    /// The CUDA kernels, run and checked on the host.
    Emulated,
    /// NVIDIA GPUs; ranks beyond their number share them.
    Cuda,
}

/// The rule that turns gradients into steps.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum OptimizerKind {
    /// Adam with decoupled weight decay.
    AdamW,
    /// Plain gradient descent with weight decay.
    Sgd,
}

impl OptimizerKind {
    /// Numbers that the rule remembers for each parameter.
    #[must_use]
    pub fn moments(self) -> usize {
        match self {
            OptimizerKind::AdamW => 2,
            OptimizerKind::Sgd => 0,
        }
    }
}

/// How the learning rate falls after its warm-up.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Decay {
    /// Not at all.
    Constant,
    /// Along a line to `min_lr` at the last step.
    Linear,
    /// Along half a cosine to `min_lr` at the last step.
    Cosine,
}

/// The optimizer and its schedule.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct OptimizerOptions {
    /// The rule.
    pub kind: OptimizerKind,
    /// Highest learning rate.
    pub lr: f64,
    /// Learning rate of the last step, where it decays.
    pub min_lr: f64,
    /// How it falls.
    pub decay: Decay,
    /// Steps on which it rises along a line from 0.
    pub warmup: u64,
    /// Decay of those parameters whose ledger line says so.
    pub weight_decay: f64,
    /// Largest norm of the gradient; 0 is no limit.
    pub clip_grad: f64,
    /// AdamW: decay of the first moment.
    pub beta1: f64,
    /// AdamW: decay of the second moment.
    pub beta2: f64,
    /// AdamW: added to the root of the second moment.
    pub eps: f64,
}

/// How steps are printed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum LogFormat {
    /// Lines for a person.
    Plain,
    /// The lines of Megatron-LM's training log.
    Megatron,
    /// The objects of the metrics file, on stdout.
    Json,
}

impl Default for OptimizerOptions {
    fn default() -> Self {
        Self {
            kind: OptimizerKind::AdamW,
            lr: 2e-3,
            min_lr: 2e-4,
            decay: Decay::Cosine,
            warmup: 30,
            weight_decay: 0.1,
            clip_grad: 1.0,
            beta1: 0.9,
            beta2: 0.95,
            eps: 1e-8,
        }
    }
}

impl Default for Job {
    /// `quintet train` without a flag: the tiny model on one rank.
    fn default() -> Self {
        let tiny = Model::tiny();
        Self {
            model_name: "tiny".into(),
            model: tiny.config,
            max_positions: None,
            layout: Layout::single(),
            batch: Batch {
                seq: tiny.seq,
                micro_batch: 2,
                global_batch: tiny.global_batch,
            },
            data: DataSource::Embedded,
            pack_documents: false,
            mask_fraction: 0.0,
            mask_samples: None,
            dtype: Dtype::F32,
            device: DeviceKind::Cpu,
            seed: 1,
            steps: 300,
            optimizer: OptimizerOptions::default(),
            eval_interval: 50,
            ranks: Ranks::Threads,
            nccl: false,
            launched: false,
            by_messages: false,
            constants: None,
            threads_per_rank: 1,
            save: None,
            load: None,
            save_interval: 0,
            run_dir: None,
            metrics: None,
            trace: None,
            profile_step_start: None,
            profile_step_end: None,
            report: None,
            tensorboard_dir: None,
            recorder: None,
            log_format: LogFormat::Plain,
            log_interval: 0,
            prove: false,
            quiet: false,
        }
    }
}

impl Job {
    /// `quintet` without a word: a mixture of experts cut five ways over 16 ranks, with the proof at
    /// the end.
    #[must_use]
    pub fn demo() -> Self {
        Self {
            model_name: "tiny-moe".into(),
            model: Model::tiny_moe().config,
            layout: Layout {
                dp: 2,
                tp: 2,
                pp: 2,
                cp: 2,
                ep: 4,
                ..Layout::single()
            },
            prove: true,
            ..Self::default()
        }
    }

    /// `quintet verify` without a flag: three steps of SGD on a short batch in f64, of the model and
    /// the layout of the demo.
    #[must_use]
    pub fn verify() -> Self {
        Self {
            prove: false,
            batch: Batch {
                seq: 32,
                micro_batch: 1,
                global_batch: 8,
            },
            dtype: Dtype::F64,
            steps: 3,
            optimizer: OptimizerOptions {
                kind: OptimizerKind::Sgd,
                lr: 0.1,
                min_lr: 0.0,
                decay: Decay::Constant,
                warmup: 0,
                weight_decay: 0.0,
                clip_grad: 0.0,
                ..OptimizerOptions::default()
            },
            eval_interval: 0,
            ..Self::demo()
        }
    }

    /// This job gone on with: what is learnt, from what and how, with the layout, the steps and the
    /// output of `next`.
    #[must_use]
    pub fn goes_on(self, next: Self) -> Self {
        Self {
            model_name: self.model_name,
            model: self.model,
            max_positions: self.max_positions,
            batch: self.batch,
            data: self.data,
            pack_documents: self.pack_documents,
            mask_fraction: self.mask_fraction,
            mask_samples: self.mask_samples,
            dtype: self.dtype,
            seed: self.seed,
            optimizer: self.optimizer,
            ..next
        }
    }

    /// Whether this process is to start the ranks as processes, and is none of them.
    #[must_use]
    pub fn starts_processes(&self) -> bool {
        matches!(self.ranks, Ranks::Processes(_)) && !self.launched
    }

    /// What of its samples does not count.
    #[must_use]
    pub fn mask(&self) -> RandomMask {
        let half = self.mask_fraction / 2.0;
        let (tokens, samples) = match self.mask_samples {
            Some(samples) => (self.mask_fraction, samples),
            None => (half, half),
        };
        RandomMask { tokens, samples }
    }

    /// The steps whose timeline is recorded, of a run that has `done` steps behind it.
    #[must_use]
    pub fn recorded_steps(&self, done: u64) -> RangeInclusive<u64> {
        let start = self.profile_step_start.unwrap_or(done).max(done);
        let end = self.profile_step_end.unwrap_or(start.saturating_add(3));
        start.saturating_add(1)..=end
    }

    /// Judges the whole job: bounds of every number first, then the layout.
    ///
    /// # Errors
    /// Exit 2 with the first thing that is wrong.
    pub fn check(&self) -> Result<(), Failure> {
        check::check(self)
    }

    /// Reads a job back.
    ///
    /// # Errors
    /// Exit 2 where the file cannot be read or is no job.
    pub fn read(path: &Path) -> Result<Self, Failure> {
        let text = std::fs::read_to_string(path)
            .map_err(|e| Failure::usage(format!("cannot read --config {}: {e}", path.display())))?;
        Self::from_json(&text).map_err(|e| {
            Failure::usage(format!("--config {} is no saved job: {e}", path.display()))
        })
    }

    /// Reads the text of a `config.json`. What it leaves out takes its default.
    ///
    /// # Errors
    /// What is wrong and where, from the parser.
    pub fn from_json(text: &str) -> Result<Self, serde_json::Error> {
        if !text.trim_start().starts_with('{') {
            // Serde would take a list for the fields in order, an empty one for all defaults.
            return Err(serde::de::Error::custom("it must be an object"));
        }
        serde_json::from_str(text)
    }

    /// The text of `config.json`.
    ///
    /// # Errors
    /// Exit 3 where a path is not UTF-8, which JSON cannot say.
    pub fn to_json(&self) -> Result<String, Failure> {
        serde_json::to_string_pretty(self)
            .map(|text| text + "\n")
            .map_err(|e| Failure::data(format!("the job cannot be written as JSON: {e}")))
    }
}
