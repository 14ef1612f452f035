//! Whether this process is still the one that something was made in, and not a fork of it.
//!
//! A fork has the sockets and the shared memory of its parent but none of its threads: what it sent would be taken
//! for its parent's. On Linux a page that the kernel wipes in a fork tells, by one look; elsewhere the process's
//! number does.
#![allow(unsafe_code)]

/// The process that this was made in.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Birth {
    #[cfg(target_os = "linux")]
    Page(&'static std::sync::atomic::AtomicU64),
    Process(u32),
}

impl Birth {
    pub(crate) fn here() -> Self {
        #[cfg(target_os = "linux")]
        if let Some(page) = page::here() {
            return Self::Page(page);
        }
        Self::Process(std::process::id())
    }

    /// Whether this is another process, a fork of that.
    pub(crate) fn elsewhere(self) -> bool {
        match self {
            #[cfg(target_os = "linux")]
            Self::Page(page) => page.load(std::sync::atomic::Ordering::Relaxed) == 0,
            Self::Process(id) => id != std::process::id(),
        }
    }
}

#[cfg(target_os = "linux")]
mod page {
    use std::sync::{
        Mutex, PoisonError,
        atomic::{AtomicU64, Ordering},
    };

    use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous};

    /// The page of this process, or of one that it is a fork of.
    static LAST: Mutex<Option<&AtomicU64>> = Mutex::new(None);

    /// This process's page; none where the kernel cannot wipe pages.
    pub(super) fn here() -> Option<&'static AtomicU64> {
        let mut last = LAST.lock().unwrap_or_else(PoisonError::into_inner);
        if last.is_none_or(|page| page.load(Ordering::Relaxed) == 0) {
            *last = fresh();
        }
        *last
    }

    fn fresh() -> Option<&'static AtomicU64> {
        let (prot, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE);
        // SAFETY: a fresh mapping of a page, never unmapped and only ever used as one atomic.
        let page = unsafe {
            let page = mmap_anonymous(core::ptr::null_mut(), 4096, prot, flags).ok()?;
            madvise(page, 4096, Advice::LinuxWipeOnFork).ok()?;
            AtomicU64::from_ptr(page.cast())
        };
        page.store(1, Ordering::Relaxed);
        Some(page)
    }
}
