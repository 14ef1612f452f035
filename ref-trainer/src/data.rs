//! What is learnt from: the bytes of a text, a token each.
//!
//! ```text
//! text   |------------------- train, 90 % -------------------|--- held out ---|
//!             [sample 2 of step 0]    [sample 0 of step 1]    [win 0][win 1]..
//! ```
//!
//! Training samples are T + 1 tokens at an offset that is a function of (seed, step, sample), so
//! any rank can compute any token, under any layout. Evaluation goes through a text in
//! consecutive windows of T + 1 tokens.

use std::fs;
use std::io;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use quintet_parallel_layers::philox::Stream;

mod error;

pub use error::{DataError, Part};

/// The text that is learnt from where none is given (its origin: assets/SOURCE.md).
const BUILT_IN: &[u8] = include_bytes!("../assets/hamlet.md");

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

    /// Every prediction counts.
    fn of(bytes: &[u8]) -> Self {
        Self {
            tokens: bytes.iter().map(|byte| u32::from(*byte)).collect(),
            mask: vec![true; bytes.len().saturating_sub(1)],
        }
    }
}

/// A text, of at least one byte.
#[derive(Debug, Clone)]
pub struct Corpus {
    path: String,
    bytes: Arc<[u8]>,
}

impl Corpus {
    /// The text that comes with the trainer.
    #[must_use]
    pub fn built_in() -> Self {
        Self {
            path: "(built-in)".into(),
            bytes: BUILT_IN.into(),
        }
    }

    /// The bytes of a file.
    ///
    /// # Errors
    /// [`DataError`] where it is missing, no regular file, unreadable or empty.
    pub fn open(path: &Path) -> Result<Self, DataError> {
        let shown = path.display().to_string();
        let refused = |source: io::Error| match source.kind() {
            io::ErrorKind::NotFound => DataError::Missing {
                path: shown.clone(),
            },
            _ => DataError::Unreadable {
                path: shown.clone(),
                source,
            },
        };
        if !fs::metadata(path).map_err(refused)?.is_file() {
            return Err(DataError::NotAFile { path: shown });
        }
        Self::from_bytes(&shown, &fs::read(path).map_err(refused)?)
    }

    /// Bytes that are here already; `name` stands for the path in what is said of them.
    ///
    /// # Errors
    /// [`DataError::Empty`].
    pub fn from_bytes(name: &str, bytes: &[u8]) -> Result<Self, DataError> {
        if bytes.is_empty() {
            return Err(DataError::Empty { path: name.into() });
        }
        Ok(Self {
            path: name.into(),
            bytes: bytes.into(),
        })
    }

    /// The file as it was given.
    #[must_use]
    pub fn path(&self) -> &str {
        &self.path
    }

    /// The bytes of a part.
    #[must_use]
    pub fn part(&self, part: Part) -> &[u8] {
        &self.bytes[self.range(part)]
    }

    /// Where a part lies.
    #[must_use]
    pub fn range(&self, part: Part) -> Range<usize> {
        let len = self.bytes.len();
        let cut = len - len / 10;
        match part {
            Part::Train => 0..cut,
            Part::HeldOut => cut..len,
            Part::Whole => 0..len,
        }
    }

    /// Refuses a text with a byte that is no token of a vocabulary of `vocab` entries.
    ///
    /// # Errors
    /// [`DataError::OutsideVocabulary`] with the first such byte.
    pub fn fits_vocabulary(&self, vocab: usize) -> Result<(), DataError> {
        let outside = |byte: &u8| usize::from(*byte) >= vocab;
        match self.bytes.iter().position(outside) {
            None => Ok(()),
            Some(offset) => Err(DataError::OutsideVocabulary {
                path: self.path.clone(),
                byte: self.bytes[offset],
                offset,
                vocab,
            }),
        }
    }

    /// Consecutive windows of `seq + 1` tokens that do not overlap, from the start of a part; what
    /// is left at its end is not used. All predictions count.
    ///
    /// # Errors
    /// [`DataError::TooShort`] where not one fits.
    pub fn windows(
        &self,
        part: Part,
        seq: usize,
    ) -> Result<impl ExactSizeIterator<Item = Sample> + '_, DataError> {
        self.fits(part, seq)?;
        let windows = self.part(part).chunks_exact(seq + 1);
        Ok(windows.map(Sample::of))
    }

    /// Does a part hold a window of `seq + 1` tokens?
    fn fits(&self, part: Part, seq: usize) -> Result<(), DataError> {
        let (have, need) = (self.part(part).len(), seq.saturating_add(1));
        if have >= need {
            return Ok(());
        }
        Err(DataError::TooShort {
            path: self.path.clone(),
            part,
            have,
            need,
            seq,
        })
    }
}

/// How much of a batch does not count: for tests of ranks with uneven or no valid tokens.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct RandomMask {
    /// Probability that a prediction is masked.
    pub tokens: f64,
    /// Probability that a sample is masked as a whole.
    pub samples: f64,
}

/// The training samples of a text under a seed.
#[derive(Debug, Clone)]
pub struct Samples {
    corpus: Corpus,
    seed: u64,
    seq: usize,
    mask: RandomMask,
    /// These, in every step, instead of any of the text.
    given: Vec<Sample>,
}

impl Samples {
    /// Samples of `seq` predictions, all of which count.
    ///
    /// # Errors
    /// [`DataError::TooShort`] where the training part does not hold one.
    pub fn new(corpus: Corpus, seed: u64, seq: usize) -> Result<Self, DataError> {
        corpus.fits(Part::Train, seq)?;
        Ok(Self {
            corpus,
            seed,
            seq,
            mask: RandomMask::default(),
            given: Vec::new(),
        })
    }

    /// The same samples in every step: number `index` is the one at `index` modulo their count.
    /// For comparisons with numbers from elsewhere.
    #[must_use]
    pub fn given(given: Vec<Sample>) -> Self {
        Self {
            corpus: Corpus::built_in(),
            seed: 0,
            seq: given.first().map_or(0, |sample| sample.mask.len()),
            mask: RandomMask::default(),
            given,
        }
    }

    /// The same with a random loss mask.
    #[must_use]
    pub fn with_mask(self, mask: RandomMask) -> Self {
        Self { mask, ..self }
    }

    /// The text.
    #[must_use]
    pub fn corpus(&self) -> &Corpus {
        &self.corpus
    }

    /// Sample `index` of the global batch of step `step`; both below 2^32.
    #[must_use]
    pub fn sample(&self, step: u64, index: u64) -> Sample {
        if !self.given.is_empty() {
            return self.given[index as usize % self.given.len()].clone();
        }
        let train = self.corpus.part(Part::Train);
        let mut sample = Sample::of(&train[self.offset(step, index)..][..=self.seq]);
        for (position, counts) in sample.mask.iter_mut().enumerate() {
            *counts = self.counts(step, index, position);
        }
        sample
    }

    /// Token `position` (up to and including T) of a sample, without the rest of it.
    #[must_use]
    pub fn token(&self, step: u64, index: u64, position: usize) -> Option<u32> {
        if !self.given.is_empty() {
            return self.sample(step, index).tokens.get(position).copied();
        }
        let train = self.corpus.part(Part::Train);
        let window = &train[self.offset(step, index)..][..=self.seq];
        window.get(position).map(|byte| u32::from(*byte))
    }

    /// Does the prediction made at `position` of a sample count?
    #[must_use]
    pub fn counts(&self, step: u64, index: u64, position: usize) -> bool {
        if !self.given.is_empty() {
            let sample = self.sample(step, index);
            return sample.mask.get(position).copied().unwrap_or(false);
        }
        if self.mask.samples <= 0.0 && self.mask.tokens <= 0.0 {
            return true;
        }
        let whole = Stream::new(self.seed, "data.mask.sample").uniform(key(step, index));
        let stream = Stream::new(self.seed, &format!("data.mask.token.{step}"));
        whole >= self.mask.samples
            && stream.uniform(key(index, position as u64)) >= self.mask.tokens
    }

    /// Samples `m * micro_batch ..` of a step: microbatch `m`, the same under every layout.
    #[must_use]
    pub fn microbatch(&self, step: u64, m: u64, micro_batch: usize) -> Vec<Sample> {
        let first = m * micro_batch as u64;
        let all = first..first + micro_batch as u64;
        all.map(|index| self.sample(step, index)).collect()
    }

    /// The global batch of a step: `len` samples.
    #[must_use]
    pub fn batch(&self, step: u64, len: usize) -> Vec<Sample> {
        self.microbatch(step, 0, len)
    }

    /// Where a sample starts: uniform over all places where one fits.
    fn offset(&self, step: u64, index: u64) -> usize {
        let places = self.corpus.part(Part::Train).len() - self.seq;
        let stream = Stream::new(self.seed, "data.offset");
        stream.below(key(step, index), places as u64) as usize
    }
}

/// Two numbers below 2^32 as one.
fn key(high: u64, low: u64) -> u64 {
    high << 32 | low & 0xFFFF_FFFF
}

/// Entropy of the bytes of a text as such, in nats per byte; 0 for no bytes. What a model that
/// knows the frequencies of this very text, and nothing else, would lose.
#[must_use]
pub fn unigram_entropy(bytes: &[u8]) -> f64 {
    let len = bytes.len() as f64;
    let shares = histogram(bytes).into_iter().filter(|n| *n > 0);
    shares
        .map(|n| -(n as f64 / len) * (n as f64 / len).ln())
        .sum()
}

/// What a model that knows the frequencies of `train` and nothing else loses on `text`, in nats
/// per byte. One is added to every count, so that no byte is impossible.
#[must_use]
pub fn unigram_cross_entropy(train: &[u8], text: &[u8]) -> f64 {
    let counts = histogram(train);
    let total = train.len() as f64 + counts.len() as f64;
    let losses = text
        .iter()
        .map(|byte| -((counts[usize::from(*byte)] as f64 + 1.0) / total).ln());
    losses.sum::<f64>() / text.len().max(1) as f64
}

fn histogram(bytes: &[u8]) -> [u64; 256] {
    let mut counts = [0; 256];
    for byte in bytes {
        counts[usize::from(*byte)] += 1;
    }
    counts
}

#[cfg(test)]
mod tests;
