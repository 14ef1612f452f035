//! Signals to a launcher, which are for its ranks.

use std::{
    string::ToString,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    vec::Vec,
};

use rustix::process::Signal;

use crate::{Error, Result};

/// Signals that came to this process, to be passed on.
pub(super) struct Signals {
    last: Arc<AtomicUsize>,
    handlers: Vec<signal_hook::SigId>,
}

impl Signals {
    pub(super) fn listen() -> Result<Self> {
        use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
        let last = Arc::new(AtomicUsize::new(0));
        let mut handlers = Vec::new();
        for signal in [SIGHUP, SIGINT, SIGTERM] {
            let handler = signal_hook::flag::register_usize(signal, last.clone(), signal as usize);
            handlers.push(handler.map_err(|e| Error::System {
                what: "handle signals",
                reason: e.to_string(),
            })?);
        }
        Ok(Self { last, handlers })
    }

    pub(super) fn take(&self) -> Option<Signal> {
        let signal = self.last.swap(0, Ordering::AcqRel);
        Signal::from_named_raw(i32::try_from(signal).ok()?)
    }
}

impl Drop for Signals {
    fn drop(&mut self) {
        for handler in self.handlers.drain(..) {
            signal_hook::low_level::unregister(handler);
        }
    }
}
