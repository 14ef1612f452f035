//! What a rank did when: spans of time, recorded during a few steps of a run.
//!
//! ```text
//! compute         | step 2                                                    |
//!                 |  count | pipeline                          | norm | optim.. |
//!                 |        | F mb0 | recv F mb1 | F mb1 | B mb0 |              |
//! communication         [all_reduce tp] [send pp -> 4]  [all_gather dp]
//! ```
//!
//! Spans of compute are made by the rank's own thread and nest. Those of communication come from
//! the communicators ([`Observer`]), blocking ones on the same thread, started ones on workers beside
//! it, and may overlap. Without a [`Recorder`] nothing is looked at, timed or kept; with one that is
//! off, an operation costs one load of a flag.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use quintet_collectives::{Observed, Observer};
use quintet_parallel_layers::pipeline::Action;
use serde::de::{Deserializer, Error as _};
use serde::{Deserialize, Serialize};

use crate::groups::label;

/// A name that this program made.
pub type Word = &'static str;

/// What a span is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum What {
    /// A whole step, by number.
    Step(u64),
    /// A part of a step that is no action of the pipeline.
    Phase(#[serde(deserialize_with = "word")] Word),
    /// An action of the pipeline.
    Action(#[serde(with = "ActionDef")] Action),
    /// An operation of a communicator.
    Operation(Operation),
}

/// An operation of a communicator.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Operation {
    /// Its name, as in `all_reduce`, `send`, `recv`.
    #[serde(deserialize_with = "word")]
    pub op: Word,
    /// The axis or group it is counted under.
    #[serde(deserialize_with = "word")]
    pub group: Word,
    /// Of a message the other end, as a global rank.
    pub peer: Option<usize>,
    /// Of a message its tag, of a collective its number in the group.
    pub number: u64,
    /// Payload bytes that this rank sent in it.
    pub bytes: u64,
    /// Whether it was started, and so ran beside the computation.
    pub started: bool,
}

/// A piece of time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Span {
    /// What it is.
    pub what: What,
    /// Begin, in nanoseconds since the recorders' common epoch.
    pub begin: u64,
    /// End, likewise; never before its begin.
    pub end: u64,
}

/// What one rank recorded.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Recording {
    /// In the order in which they ended.
    pub spans: Vec<Span>,
    /// Spans that found no room.
    pub dropped: u64,
}

/// How an action is spelt between processes.
#[derive(Serialize, Deserialize)]
#[serde(remote = "Action")]
#[rustfmt::skip]
enum ActionDef {
    Gather { chunk: usize },
    Release { chunk: usize },
    RecvForward { mb: usize, chunk: usize, from: usize },
    Forward { mb: usize, chunk: usize },
    SendForward { mb: usize, chunk: usize, to: usize },
    RecvBackward { mb: usize, chunk: usize, from: usize },
    BackwardInput { mb: usize, chunk: usize, segment: usize },
    BackwardWeight { mb: usize, chunk: usize, segment: usize },
    SendBackward { mb: usize, chunk: usize, to: usize },
    ReduceGrads { chunk: usize, bucket: usize },
}

/// A name from another process, kept once for good: there are only those that this program has.
fn word<'de, D: Deserializer<'de>>(from: D) -> Result<Word, D::Error> {
    static WORDS: Mutex<BTreeSet<Word>> = Mutex::new(BTreeSet::new());
    let text = String::deserialize(from)?;
    let mut words = WORDS.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(word) = words.get(text.as_str()) {
        return Ok(word);
    }
    if words.len() == WORDS_MOST {
        return Err(D::Error::custom("another rank uses too many names"));
    }
    let word: Word = Box::leak(text.into_boxed_str());
    words.insert(word);
    Ok(word)
}

/// More names than any program of ours has.
const WORDS_MOST: usize = 1000;

/// The most spans that a rank keeps: what a step of a real run has, many times over.
pub const MOST: usize = 1 << 18;

/// Records one rank.
#[derive(Debug)]
pub struct Recorder {
    epoch: Instant,
    on: AtomicBool,
    most: usize,
    kept: Mutex<Recording>,
}

impl Recorder {
    /// A recorder that is off; ranks on one clock take the same `epoch`.
    #[must_use]
    pub fn new(epoch: Instant) -> Arc<Self> {
        Self::with_room(epoch, MOST)
    }

    fn with_room(epoch: Instant, most: usize) -> Arc<Self> {
        Arc::new(Self {
            epoch,
            on: AtomicBool::new(false),
            most,
            kept: Mutex::default(),
        })
    }

    /// Whether it records.
    #[must_use]
    pub fn is_on(&self) -> bool {
        self.on.load(Ordering::Relaxed)
    }

    /// Records from now on, or no more.
    pub fn set(&self, on: bool) {
        self.on.store(on, Ordering::Relaxed);
    }

    /// A span from now until the guard is dropped; none where nothing is recorded.
    #[must_use]
    pub fn open(self: &Arc<Self>, what: What) -> Option<Open> {
        self.is_on().then(|| Open {
            recorder: self.clone(),
            what,
            begin: Instant::now(),
        })
    }

    /// Keeps a span, where there is room.
    pub fn keep(&self, what: What, begin: Instant, end: Instant) {
        let since = |t: Instant| t.saturating_duration_since(self.epoch).as_nanos() as u64;
        let (begin, end) = (since(begin), since(end));
        let mut kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        if kept.spans.len() < self.most {
            kept.spans.push(Span { what, begin, end });
        } else {
            kept.dropped += 1;
        }
    }

    /// What was recorded, no longer kept here.
    #[must_use]
    pub fn take(&self) -> Recording {
        std::mem::take(&mut self.kept.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

/// A span that ends when this is dropped.
#[derive(Debug)]
pub struct Open {
    recorder: Arc<Recorder>,
    what: What,
    begin: Instant,
}

impl Drop for Open {
    fn drop(&mut self) {
        self.recorder.keep(self.what, self.begin, Instant::now());
    }
}

impl Observer for Recorder {
    fn over(&self, seen: &Observed<'_>) {
        // A group of one has nobody to speak with.
        if !self.is_on() || seen.error.is_some() || seen.world == 1 {
            return;
        }
        let Some(group) = label(seen.group) else {
            return;
        };
        let operation = Operation {
            op: seen.op,
            group,
            peer: seen.peer,
            number: seen.number,
            bytes: seen.bytes,
            started: seen.started,
        };
        self.keep(What::Operation(operation), seen.began, seen.ended);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn labels_are_those_that_are_counted() {
        for (name, want) in [
            ("tp", Some("tp")),
            ("cp keys", Some("cp")),
            ("edp gradients [Factor]", Some("edp")),
            ("world of training", Some("world")),
            ("report", None),
            ("world", Some("world")),
            ("", None),
        ] {
            assert_eq!(label(name), want, "{name}");
        }
    }

    #[test]
    fn a_recording_goes_to_another_process_and_is_the_same_there() {
        let operation = Operation {
            op: "send",
            group: "pp",
            peer: Some(3),
            number: 9,
            bytes: 1 << 40,
            started: true,
        };
        let (mb, chunk) = (1, 0);
        let segment = 2;
        let all = [
            What::Step(7),
            What::Phase("token count"),
            What::Operation(operation),
            What::Action(Action::BackwardInput { mb, chunk, segment }),
            What::Action(Action::SendForward { mb, chunk, to: 4 }),
        ];
        let spans = all.map(|what| Span {
            what,
            begin: 1,
            end: u64::MAX,
        });
        let recording = Recording {
            spans: spans.to_vec(),
            dropped: 2,
        };
        let text = serde_json::to_string(&recording).unwrap();
        let back: Recording = serde_json::from_str(&text).unwrap();
        assert_eq!(back, recording);
    }

    #[test]
    fn nothing_is_kept_while_off_and_no_more_than_there_is_room_for() {
        let epoch = Instant::now();
        let recorder = Recorder::with_room(epoch, 2);
        assert!(recorder.open(What::Phase("a")).is_none());
        recorder.set(true);
        for name in ["a", "b", "c"] {
            drop(recorder.open(What::Phase(name)));
        }
        // A clock that seems to run backwards makes no span of huge length.
        let kept = recorder.take();
        assert_eq!((kept.spans.len(), kept.dropped), (2, 1));
        assert!(kept.spans.iter().all(|s| s.begin <= s.end));
        let late = epoch + Duration::from_secs(5);
        recorder.keep(What::Step(1), epoch, late);
        assert_eq!(recorder.take().spans[0].end, 5_000_000_000);
        assert_eq!(recorder.take(), Recording::default());
    }
}
