//! Memory of another process, read where it lies: one copy, made by the kernel (Cross Memory Attach; Open MPI and
//! MPICH carry long messages so).
//!
//! ```text
//! owner's segment   [ ... process, where its mark lies, the mark's value ... ]
//! a read            [ the bytes | the mark ]   both of one process image, or it has failed
//! ```
//!
//! Nobody writes into another process's memory. Whether reading is permitted depends on the user, on the containers and on the
//! kernel's settings (Yama's `ptrace_scope`), so each rank tries it and says so with its calls; a group reads this
//! way where all its ranks can. A mark is a number that lies at an address of its owner's: a process that has taken over the
//! number of one that died does not have it there.
#![allow(unsafe_code)]

use std::{boxed::Box, sync::atomic::AtomicU64};

use crate::Result;

/// What others find this process by.
#[derive(Debug)]
pub(super) struct Mark(Box<AtomicU64>);

/// Where a process, and its mark, are.
#[derive(Debug, Clone, Copy)]
pub(super) struct Owner {
    pub(super) process: u64,
    pub(super) mark_at: u64,
    pub(super) mark: u64,
}

impl Mark {
    pub(super) fn new() -> Result<Self> {
        let number = crate::transport::socket::random_u64()?;
        Ok(Self(Box::new(AtomicU64::new(number))))
    }

    /// What others are told; good as long as the mark lives.
    pub(super) fn owner(&self) -> Owner {
        Owner {
            process: u64::from(std::process::id()),
            mark_at: (&raw const *self.0).expose_provenance() as u64,
            mark: self.0.load(std::sync::atomic::Ordering::Relaxed),
        }
    }
}

impl Owner {
    /// Whether its memory can be read.
    pub(super) fn answers(&self) -> bool {
        // SAFETY: no bytes but the mark.
        unsafe { self.read(self.mark_at, core::ptr::NonNull::dangling().as_ptr(), 0) }
    }

    /// Copies `bytes` from an address of that process; false where not all of them could be had, or
    /// it is another process by now. What was copied is then of no meaning.
    ///
    /// # Safety
    /// `to` is writable for `bytes`, and nobody else's.
    pub(super) unsafe fn read(&self, from: u64, to: *mut u8, bytes: usize) -> bool {
        let Ok(process) = libc::pid_t::try_from(self.process) else {
            return false;
        };
        let mut mark = 0u64;
        let here = [
            libc::iovec {
                iov_base: to.cast(),
                iov_len: bytes,
            },
            libc::iovec {
                iov_base: (&raw mut mark).cast(),
                iov_len: size_of::<u64>(),
            },
        ];
        let there = [
            libc::iovec {
                iov_base: core::ptr::with_exposed_provenance_mut(from as usize),
                iov_len: bytes,
            },
            libc::iovec {
                iov_base: core::ptr::with_exposed_provenance_mut(self.mark_at as usize),
                iov_len: size_of::<u64>(),
            },
        ];
        // SAFETY: the kernel writes no more than these two places of this process, of which the caller vouches for
        // one; addresses of the other process it looks at itself.
        let got =
            unsafe { libc::process_vm_readv(process, here.as_ptr(), 2, there.as_ptr(), 2, 0) };
        got >= 0 && got as usize == bytes + size_of::<u64>() && mark == self.mark
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_read_is_of_the_process_with_the_mark() {
        let mark = Mark::new().unwrap();
        let me = mark.owner();
        if !me.answers() {
            // Some containers forbid it even to oneself.
            return;
        }
        let (from, mut to) = ([7u8; 5000], [0u8; 5000]);
        let mut read = |owner: &Owner, at: u64| {
            to.fill(0);
            // SAFETY: a local array.
            let whole = unsafe { owner.read(at, to.as_mut_ptr(), to.len()) };
            whole && to == from
        };
        let at = from.as_ptr().expose_provenance() as u64;
        assert!(read(&me, at));
        // The same process number, and somebody else.
        let other = Owner {
            mark: !me.mark,
            ..me
        };
        assert!(!read(&other, at) && !other.answers());
        // Nothing is mapped there, or not in this process.
        assert!(!read(&me, 4096));
        assert!(!read(
            &Owner {
                process: u64::MAX,
                ..me
            },
            at
        ));
        assert!(!read(
            &Owner {
                process: 1 << 30,
                ..me
            },
            at
        ));
    }
}
