//! What is said of a text that cannot be used.

use std::fmt;
use std::io;

/// A text that cannot be learnt from; one sentence for the person who gave it.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DataError {
    /// There is no such file.
    #[error("data {path}: there is no such file; --data takes any text or binary file")]
    Missing {
        /// As given.
        path: String,
    },
    /// A folder, a device, a pipe.
    #[error("data {path}: not a regular file; --data takes one file, read byte by byte")]
    NotAFile {
        /// As given.
        path: String,
    },
    /// The system refuses to read it.
    #[error("data {path}: cannot be read ({source}); it must be readable by this user")]
    Unreadable {
        /// As given.
        path: String,
        /// Why.
        source: io::Error,
    },
    /// No byte in it.
    #[error("data {path}: the file is empty; it must hold at least one sequence")]
    Empty {
        /// As given.
        path: String,
    },
    /// A part does not hold one window.
    #[error(
        "data {path}: {part} has {have} bytes, a sequence of {seq} tokens needs {need}; use a longer text or a shorter --seq-length"
    )]
    TooShort {
        /// As given.
        path: String,
        /// Which bytes of it.
        part: Part,
        /// Bytes there.
        have: usize,
        /// Bytes of a window.
        need: usize,
        /// Predictions of a window.
        seq: usize,
    },
    /// A byte that the model has no token for.
    #[error(
        "data {path}: byte {byte} at offset {offset} is outside the model's vocabulary of {vocab}; use a vocabulary of 256 or more"
    )]
    OutsideVocabulary {
        /// As given.
        path: String,
        /// The byte.
        byte: u8,
        /// Where it first occurs.
        offset: usize,
        /// Entries of the vocabulary.
        vocab: usize,
    },
}

/// A part of a text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Part {
    /// The first 90 %, which training samples come from.
    Train,
    /// The last 10 %, which training never sees.
    HeldOut,
    /// All of it.
    Whole,
}

impl fmt::Display for Part {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Train => "its training part (the first 90 %)",
            Self::HeldOut => "its held-out part (the last 10 %)",
            Self::Whole => "it",
        })
    }
}
