//! What a run leaves behind and what it prints.
//!
//! ```text
//! Forecast ---> banner                      before the first message
//! StepReport -> metrics.jsonl, step line    after every step
//! EqualityTable -> table                    at the end, beside loss.svg
//! ```

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

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
    /// Bytes on the fullest rank, by category.
    pub memory: BTreeMap<String, u64>,
    /// Bytes all ranks send in a step, by group.
    pub traffic: BTreeMap<String, u64>,
    /// Share of a stage's time in which its schedule gives it nothing to do.
    pub bubble: Option<f64>,
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
