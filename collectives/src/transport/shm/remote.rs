//! Memory of another process, read where it lies: one copy, made by the kernel (Cross Memory Attach; Open MPI and
//! MPICH carry long messages so).
//!
//! ```text
//! owner's segment   [ ... process, where its mark lies, the mark's value ... ]
//! a read            [ the bytes | the mark ]   both of one process image, or it has failed
//! ```
//!
//! Nobody writes into another process's memory. Whether reading is permitted depends on the user, on the containers and
//! on the kernel's settings (Yama's `ptrace_scope`), so each rank tries it and says so with its calls; a group reads
//! this way where all its ranks can.
//!
//! A process's number may name another process: one that has taken over the number of one that died, or whatever has
//! that number in the reader's own namespace of processes, be it the reader itself. A mark tells: 64 random bits at an
//! address of its owner's, read in the same call as the bytes, hence from the same process. Only a fork would have it
//! too, so it lies on a page that the kernel wipes in forks. Who does not see another rank's process so reads nothing
//! of it.
#![allow(unsafe_code)]

use core::ptr::NonNull;

use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous, munmap};

use crate::{Error, Result};

/// Bytes of a page, or of a part of one.
const PAGE: usize = 4096;

/// What others find this process by.
#[derive(Debug)]
pub(super) struct Mark {
    page: NonNull<u64>,
    number: u64,
}

// SAFETY: the page is written before anybody has the value, and never again.
unsafe impl Send for Mark {}
// SAFETY: as above.
unsafe impl Sync for Mark {}

/// Where a process, and its mark, are.
#[derive(Debug, Clone, Copy)]
pub(super) struct Owner {
    pub(super) process: u64,
    pub(super) mark_at: u64,
    pub(super) mark: u64,
}

impl Mark {
    pub(super) fn new() -> Result<Self> {
        // In a fork the page reads as 0.
        let number = crate::transport::socket::random_u64()?.max(1);
        let failed = |e: rustix::io::Errno| Error::System {
            what: "map a page",
            reason: std::string::ToString::to_string(&e),
        };
        let (prot, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE);
        // SAFETY: a fresh mapping, unmapped only with the value.
        let page = unsafe {
            let page = mmap_anonymous(core::ptr::null_mut(), PAGE, prot, flags).map_err(failed)?;
            // Linux before 4.14 cannot, and then a fork is taken for its parent.
            let _ = madvise(page, PAGE, Advice::LinuxWipeOnFork);
            page.cast::<u64>().write(number);
            page
        };
        let page = NonNull::new(page.cast()).ok_or(failed(rustix::io::Errno::NOMEM))?;
        Ok(Self { page, number })
    }

    /// What others are told; good as long as the mark lives.
    pub(super) fn owner(&self) -> Owner {
        Owner {
            process: u64::from(std::process::id()),
            mark_at: self.page.as_ptr().expose_provenance() as u64,
            mark: self.number,
        }
    }
}

impl Drop for Mark {
    fn drop(&mut self) {
        // SAFETY: mapped for this value alone, which nobody has any more.
        let _ = unsafe { munmap(self.page.as_ptr().cast(), PAGE) };
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

    /// It has all that its parent has at the same addresses, but for the mark.
    #[test]
    fn a_fork_is_not_taken_for_its_parent() {
        let mark = Mark::new().unwrap();
        let me = mark.owner();
        if !me.answers() {
            return;
        }
        // SAFETY: the child calls nothing but what a handler of signals may.
        let child = unsafe { libc::fork() };
        if child == 0 {
            loop {
                // SAFETY: it waits to be ended.
                unsafe { libc::pause() };
            }
        }
        assert!(child > 0);
        let fork = Owner {
            process: child as u64,
            ..me
        };
        let wiped = Owner { mark: 0, ..fork };
        let answers = (fork.answers(), wiped.answers());
        // SAFETY: a child of this process, which nobody has waited for.
        unsafe {
            libc::kill(child, libc::SIGKILL);
            libc::waitpid(child, core::ptr::null_mut(), 0);
        }
        // Its memory could be read, and its mark was not there.
        assert_eq!(answers, (false, true));
        assert!(me.answers());
    }
}
