//! Streams where the library works on host memory.

use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering},
};

use super::Library;
use crate::{Error, Result, transport::device::Lane};

/// A stream of its own of a library on host memory, which is what an address then is: for tests, and for devices
/// whose memory is the host's.
#[derive(Debug)]
pub struct HostLane {
    library: Arc<Library>,
    stream: u64,
}

impl HostLane {
    /// A stream that nobody else has.
    ///
    /// # Errors
    /// [`Error::Library`] where the library works on the memory of GPUs.
    pub fn new(library: &Arc<Library>) -> Result<Arc<Self>> {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        if !library.on_host() {
            return Err(Error::Library(std::format!(
                "{library:?} works on the memory of GPUs, and this is the host's"
            )));
        }
        Ok(Arc::new(Self {
            library: library.clone(),
            stream: NEXT.fetch_add(1, Ordering::Relaxed),
        }))
    }
}

impl Lane for HostLane {
    fn handle(&self) -> u64 {
        self.stream
    }

    fn enter(&self) -> Result<()> {
        Ok(())
    }

    fn idle(&self) -> Result<bool> {
        Ok(self.library.waiting(self.stream) == 0)
    }
}
