//! What is learnt from: bytes of a text.

/// One sequence: position `i` predicts `tokens[i + 1]`, and counts where `mask[i]`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Sample {
    /// T + 1 tokens.
    pub tokens: Vec<u32>,
    /// T flags: does the prediction made at this position count?
    pub mask: Vec<bool>,
}

impl Sample {
    /// Predictions that count.
    #[must_use]
    pub fn valid(&self) -> usize {
        self.mask.iter().filter(|counts| **counts).count()
    }
}
