//! A communicator's line to the flight recorder, and what one call writes there.

use std::{
    string::String,
    sync::{Arc, OnceLock},
    vec::Vec,
};

use super::act::Report;
use crate::{
    Result,
    recorder::{Recorder, Subject},
};

/// The recorder of a communicator, if it has one, and the group's name and members (global) there.
#[derive(Debug, Default)]
pub(super) struct Log(OnceLock<(Arc<Recorder>, String, Vec<usize>)>);

/// A call that is being recorded, or nothing.
#[derive(Debug)]
pub(super) struct Note {
    call: Option<(Arc<Recorder>, u64)>,
    begun: bool,
}

impl Log {
    /// Records from now on; the first recorder stays.
    pub(super) fn open(&self, recorder: Arc<Recorder>, name: &str, ranks: &[usize]) {
        let _ = self.0.set((recorder, String::from(name), ranks.to_vec()));
    }

    /// The recorder, for those who inherit.
    pub(super) fn recorder(&self) -> Option<&Arc<Recorder>> {
        self.0.get().map(|(recorder, ..)| recorder)
    }

    /// A call is made; its peer is a place in the group.
    pub(super) fn note(&self, subject: Subject) -> Note {
        let call = self.0.get().map(|(recorder, name, ranks)| {
            let peer = subject.peer.map(|(place, tag)| (ranks[place], tag));
            let number = recorder.queued(name, ranks, &Subject { peer, ..subject });
            (Arc::clone(recorder), number)
        });
        Note { call, begun: false }
    }
}

impl Note {
    /// The call was polled for the first time, or again.
    pub(super) fn begun(&mut self, report: impl FnOnce() -> Report) {
        if let (Some((recorder, number)), false) = (&self.call, self.begun) {
            let report = report();
            recorder.begun(*number, report.called.then_some(report.sequence));
            self.begun = true;
        }
    }

    /// The call is over.
    pub(super) fn over(self, outcome: &Result<()>) {
        if let Some((recorder, number)) = self.call {
            recorder.over(number, outcome.as_ref().err());
        }
    }
}
