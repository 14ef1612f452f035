//! A rank's segment: memory that others on this host map too.
//!
//! ```text
//! window (address space)  [ head | directory | areas ................ |      nothing yet      ]
//! file                    [ allocated, page for page ................ ]
//! ```
//!
//! A segment is a `memfd`, which has no name: it is gone with the last process that has it, however
//! that ends. It is sealed against shrinking, so that memory that a peer was told of cannot vanish under it.
//! Where there is no `memfd` it is a file without a name. Either grows by `fallocate`: no room is an error
//! here, and not a signal when the memory is touched. Everybody maps the whole window at once; what is
//! beyond the file is not touched before its owner has allocated it and said so.
#![allow(unsafe_code)]

use core::ptr::NonNull;
use std::{
    format,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    path::Path,
    string::ToString,
    sync::{
        Mutex,
        atomic::{AtomicU64, Ordering},
    },
};

use rustix::{
    fs::{self, FallocateFlags, MemfdFlags, Mode, OFlags, SealFlags},
    io::Errno,
    mm::{self, Advice, MapFlags, MremapFlags, ProtFlags},
};

use super::{
    heap::{Heap, PAGE},
    lock,
    remote::{Mark, Owner},
};
use crate::{Error, Result};

const MAGIC: u64 = u64::from_le_bytes(*b"QNTSHM03");

/// Entries of a directory.
const ENTRIES: usize = 4096;

/// Head and directory.
const FIRST: usize = PAGE + ENTRIES * 16;

/// The file grows by so much.
const STEP: usize = 2 << 20;

/// A mapping of somebody's segment.
#[derive(Debug)]
pub(super) struct Window {
    base: NonNull<u8>,
    len: usize,
}

// SAFETY: an address that stays good as long as the value lives; what lies there is shared by design.
unsafe impl Send for Window {}
// SAFETY: as above.
unsafe impl Sync for Window {}

/// My segment.
#[derive(Debug)]
pub(super) struct Segment {
    window: Window,
    file: OwnedFd,
    /// By which others know this process again.
    _mark: Mark,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    heap: Heap,
    allocated: usize,
}

fn failed(what: &'static str, reason: impl ToString) -> Error {
    Error::System {
        what,
        reason: reason.to_string(),
    }
}

impl Window {
    /// Maps `len` bytes of a segment, of which as many as it has may be touched.
    fn map(file: BorrowedFd<'_>, len: usize) -> Result<Self> {
        let (prot, flags) = (
            ProtFlags::READ | ProtFlags::WRITE,
            MapFlags::SHARED | MapFlags::NORESERVE,
        );
        // SAFETY: a fresh mapping, wherever the kernel has room for it.
        let base = unsafe { mm::mmap(core::ptr::null_mut(), len, prot, flags, file, 0) };
        let base = base.map_err(|e| failed("map a segment", format!("{len} bytes: {e}")))?;
        match NonNull::new(base.cast()) {
            Some(base) => Ok(Self { base, len }),
            None => Err(failed("map a segment", "it was mapped at address 0")),
        }
    }

    /// Somebody else's segment.
    pub(super) fn open(file: &OwnedFd) -> Result<Self> {
        let size = fs::fstat(file)
            .map_err(|e| failed("open a segment", e))?
            .st_size as usize;
        if size < FIRST {
            return Err(failed("open a segment", "it is too short to be one"));
        }
        let head = Self::map(file.as_fd(), PAGE)?;
        let (magic, len) = (
            head.word(0).load(Ordering::Relaxed),
            head.word(16).load(Ordering::Relaxed),
        );
        if magic != MAGIC || !(FIRST as u64..=1 << 44).contains(&len) {
            return Err(failed("open a segment", "it is none of this program's"));
        }
        Self::map(file.as_fd(), len as usize)
    }

    /// The number that only those know who can read the segment.
    pub(super) fn nonce(&self) -> u64 {
        self.word(8).load(Ordering::Relaxed)
    }

    /// Whose segment it is.
    pub(super) fn owner(&self) -> Owner {
        let get = |offset| self.word(offset).load(Ordering::Relaxed);
        Owner {
            process: get(24),
            mark_at: get(32),
            mark: get(40),
        }
    }

    /// An address in the window.
    pub(super) fn at(&self, offset: usize, bytes: usize) -> Option<NonNull<u8>> {
        let end = offset.checked_add(bytes)?;
        // SAFETY: within the window.
        (end <= self.len).then(|| unsafe { self.base.add(offset) })
    }

    /// Where in the window an address lies.
    pub(super) fn offset(&self, address: *const u8, bytes: usize) -> Option<usize> {
        let offset = (address as usize).checked_sub(self.base.as_ptr() as usize)?;
        (offset.checked_add(bytes)? <= self.len).then_some(offset)
    }

    /// A word of head or directory.
    fn word(&self, offset: usize) -> &AtomicU64 {
        debug_assert!(offset + 8 <= FIRST);
        // SAFETY: in the first bytes of a segment, which are always allocated, aligned, and only ever used
        // as atomics.
        unsafe { AtomicU64::from_ptr(self.base.as_ptr().add(offset).cast()) }
    }

    fn entry(&self, index: usize) -> (&AtomicU64, &AtomicU64) {
        let at = PAGE + index * 16;
        (self.word(at), self.word(at + 8))
    }

    /// Where the owner has put the area of this name.
    pub(super) fn find(&self, name: u64) -> Option<usize> {
        for index in 0..ENTRIES {
            let (id, place) = self.entry(index);
            match place.load(Ordering::Acquire) {
                // Entries are taken from the front.
                0 => return None,
                GONE => {}
                place if id.load(Ordering::Relaxed) == name => return Some(place as usize),
                _ => {}
            }
        }
        None
    }
}

/// The place of an entry that was given up.
const GONE: u64 = u64::MAX;

impl Drop for Window {
    fn drop(&mut self) {
        // SAFETY: mapped above, and whoever uses addresses in it keeps the window.
        let _ = unsafe { mm::munmap(self.base.as_ptr().cast(), self.len) };
    }
}

impl Segment {
    /// A segment with room for `window` bytes; where `folder` is given, or there is no `memfd`, in a file
    /// without a name.
    pub(super) fn new(window: usize, folder: Option<&Path>) -> Result<Self> {
        let file = match folder {
            Some(folder) => nameless(folder)?,
            None => {
                match fs::memfd_create("quintet", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING) {
                    Ok(file) => {
                        let seals = SealFlags::SHRINK | SealFlags::SEAL;
                        fs::fcntl_add_seals(&file, seals)
                            .map_err(|e| failed("seal a segment", e))?;
                        file
                    }
                    Err(_) => nameless(Path::new("/dev/shm"))
                        .or_else(|_| nameless(&std::env::temp_dir()))?,
                }
            }
        };
        let len = window.max(2 * STEP).next_multiple_of(PAGE);
        grow(&file, 0, STEP)?;
        let mark = Mark::new()?;
        let owner = mark.owner();
        let segment = Self {
            window: Window::map(file.as_fd(), len)?,
            file,
            _mark: mark,
            state: Mutex::new(State {
                heap: Heap::new(FIRST, len),
                allocated: STEP,
            }),
        };
        let nonce = crate::transport::socket::random_u64()?;
        let head = [nonce, len as u64, owner.process, owner.mark_at, owner.mark];
        for (index, value) in head.into_iter().enumerate() {
            let word = segment.window.word(8 * (index + 1));
            word.store(value, Ordering::Relaxed);
        }
        segment.window.word(0).store(MAGIC, Ordering::Release);
        Ok(segment)
    }

    pub(super) fn window(&self) -> &Window {
        &self.window
    }

    pub(super) fn file(&self) -> &OwnedFd {
        &self.file
    }

    /// An area of at least `bytes`, all zero.
    pub(super) fn take(&self, bytes: usize) -> Result<usize> {
        let (at, used) = self.reserve(bytes)?;
        if used {
            // SAFETY: allocated, and nobody else's until it is handed out.
            unsafe { self.window.base.as_ptr().add(at).write_bytes(0, bytes) };
        }
        Ok(at)
    }

    /// An area of at least `bytes`, of any contents.
    pub(super) fn take_any(&self, bytes: usize) -> Result<usize> {
        self.reserve(bytes).map(|(at, _)| at)
    }

    fn reserve(&self, bytes: usize) -> Result<(usize, bool)> {
        let mut state = lock(&self.state);
        let full = || {
            let reason = format!("{bytes} bytes of a window of {}", self.window.len);
            failed("allocate shared memory", reason)
        };
        let (at, used) = state.heap.take(bytes).ok_or_else(full)?;
        let end = state.heap.end();
        if end > state.allocated {
            let more = (end - state.allocated).next_multiple_of(STEP);
            let more = more.min(self.window.len - state.allocated);
            if let Err(error) = grow(&self.file, state.allocated, more) {
                let allocated = state.allocated;
                state.heap.give(at);
                state.heap.forget(allocated);
                return Err(error);
            }
            state.allocated += more;
        }
        Ok((at, used))
    }

    pub(super) fn give(&self, at: usize) {
        lock(&self.state).heap.give(at);
    }

    /// Puts an area of mine into the directory.
    pub(super) fn publish(&self, name: u64, at: usize) -> Result<()> {
        // One at a time: only this rank writes its directory.
        let _state = lock(&self.state);
        for index in 0..ENTRIES {
            let (id, place) = self.window.entry(index);
            if matches!(place.load(Ordering::Relaxed), 0 | GONE) {
                id.store(name, Ordering::Relaxed);
                place.store(at as u64, Ordering::Release);
                return Ok(());
            }
        }
        Err(failed(
            "share memory",
            format!("{ENTRIES} groups have some already"),
        ))
    }

    /// Takes an area out of the directory.
    pub(super) fn retract(&self, name: u64, at: usize) {
        let _state = lock(&self.state);
        for index in 0..ENTRIES {
            let (id, place) = self.window.entry(index);
            if place.load(Ordering::Relaxed) == at as u64 && id.load(Ordering::Relaxed) == name {
                place.store(GONE, Ordering::Release);
            }
        }
    }

    /// Makes the pages of an area present now, where the system can.
    pub(super) fn touch(&self, at: usize, bytes: usize) {
        // SAFETY: an area of mine; its contents stay.
        let _ = unsafe {
            let start = self.window.base.as_ptr().add(at).cast();
            mm::madvise(
                start,
                bytes.next_multiple_of(PAGE),
                Advice::LinuxPopulateWrite,
            )
        };
    }

    /// Puts memory of this process alone in the place of an area of mine, with the same contents: what
    /// others write into the segment there is not seen here any more. The area is never used again.
    pub(super) fn part(&self, at: usize) -> Option<(usize, usize)> {
        let state = lock(&self.state);
        let (start, len) = state.heap.around(at)?;
        let address = self.window.base.as_ptr().wrapping_add(start);
        let (prot, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE);
        // SAFETY: a fresh mapping of as many bytes, filled from memory that is allocated, then moved over
        // whole pages of an area that is this rank's alone.
        let parted = unsafe {
            mm::mmap_anonymous(core::ptr::null_mut(), len, prot, flags).and_then(|fresh| {
                crate::transport::direct::copy(address, fresh.cast(), len);
                mm::mremap_fixed(fresh, len, len, MremapFlags::MAYMOVE, address.cast())
            })
        };
        if parted.is_err() {
            // There is no safe way on: somebody may write into memory that the caller believes its own.
            std::process::abort();
        }
        Some((start, len))
    }
}

/// Allocates `bytes` of a file from `start` on.
fn grow(file: &OwnedFd, start: usize, bytes: usize) -> Result<()> {
    let full = |e: Errno| {
        let reason = format!("{bytes} bytes of shared memory: {e}");
        failed("allocate", reason)
    };
    match fs::fallocate(file, FallocateFlags::empty(), start as u64, bytes as u64) {
        Err(Errno::OPNOTSUPP) => {
            // A file system that cannot allocate beforehand is written to.
            let zeros = [0u8; 1 << 16];
            let mut at = 0;
            while at < bytes {
                let piece = &zeros[..zeros.len().min(bytes - at)];
                at += rustix::io::pwrite(file, piece, (start + at) as u64).map_err(full)?;
            }
            Ok(())
        }
        other => other.map_err(full),
    }
}

/// A file that has no name, or has it no longer.
fn nameless(folder: &Path) -> Result<OwnedFd> {
    let flags = OFlags::RDWR | OFlags::CLOEXEC | OFlags::EXCL;
    let mode = Mode::RUSR | Mode::WUSR;
    let why = |e: Errno| {
        failed(
            "make a shared file",
            format!("in {}: {e}", folder.display()),
        )
    };
    match fs::open(folder, flags | OFlags::TMPFILE, mode) {
        Err(Errno::OPNOTSUPP | Errno::ISDIR) => {
            let number = crate::transport::socket::random_u64()?;
            let path = folder.join(format!("quintet-{number:016x}"));
            let file = fs::open(&path, flags | OFlags::CREATE, mode).map_err(why)?;
            fs::unlink(&path).map_err(why)?;
            Ok(file)
        }
        other => other.map_err(why),
    }
}
