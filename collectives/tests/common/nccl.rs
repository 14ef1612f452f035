//! The stand-in for NCCL, and calls on it with slices.
#![allow(unsafe_code)] // it works on addresses

use std::ffi::CString;
use std::path::PathBuf;
use std::sync::{Arc, OnceLock};

use quintet_collectives::nccl::{HostLane, Library, Nccl};
use quintet_collectives::plan::CollectiveShape as Shape;
use quintet_collectives::transport::Transport;
use quintet_collectives::transport::device::Span;
use quintet_collectives::{Communicator, Element, ReduceOp, Result};

/// Where cargo has put it: it is built with this test.
pub fn path() -> PathBuf {
    let test = std::env::current_exe().unwrap();
    test.with_file_name("libquintet_nccl_shim.so")
}

/// The one that behaves.
pub fn library() -> Arc<Library> {
    static LIBRARY: OnceLock<Arc<Library>> = OnceLock::new();
    LIBRARY
        .get_or_init(|| Library::first(&[path()]).unwrap())
        .clone()
}

/// A copy of it with a state of its own, which may be told to misbehave.
pub struct Told {
    folder: PathBuf,
    raw: libloading::Library,
}

impl Told {
    pub fn new(name: &str) -> Self {
        let folder =
            std::env::temp_dir().join(format!("quintet-nccl-{}-{name}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        std::fs::copy(path(), folder.join("libnccl.so.2")).unwrap();
        // SAFETY: it is this workspace's own.
        let raw = unsafe { libloading::Library::new(folder.join("libnccl.so.2")) }.unwrap();
        Self { folder, raw }
    }

    pub fn path(&self) -> PathBuf {
        self.folder.join("libnccl.so.2")
    }

    pub fn library(&self) -> Arc<Library> {
        Library::first(&[self.path()]).unwrap()
    }

    pub fn set(&self, words: &str) {
        let words = CString::new(words).unwrap();
        type Set = unsafe extern "C" fn(*const std::ffi::c_char) -> bool;
        // SAFETY: the symbol's type.
        assert!(unsafe { self.raw.get::<Set>(b"quintetNcclOnHostSet\0").unwrap()(words.as_ptr()) });
    }

    /// Kernels put on any stream so far.
    pub fn put(&self) -> u64 {
        type Put = unsafe extern "C" fn() -> u64;
        // SAFETY: the symbol's type.
        unsafe { self.raw.get::<Put>(b"quintetNcclOnHostPut\0").unwrap()() }
    }

    /// Communicators neither destroyed nor aborted.
    pub fn live(&self) -> u64 {
        type Live = unsafe extern "C" fn() -> u64;
        // SAFETY: the symbol's type.
        unsafe { self.raw.get::<Live>(b"quintetNcclOnHostLive\0").unwrap()() }
    }

    /// What was called wrongly.
    pub fn faults(&self) -> String {
        type Faults = unsafe extern "C" fn(*mut u8, usize) -> usize;
        let mut text = vec![0; 1 << 16];
        // SAFETY: the symbol's type, and as much room as is said.
        let len = unsafe {
            self.raw
                .get::<Faults>(b"quintetNcclOnHostFaults\0")
                .unwrap()(text.as_mut_ptr(), text.len())
        };
        text.truncate(len);
        String::from_utf8(text).unwrap()
    }
}

impl Drop for Told {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.folder);
    }
}

pub fn span<E: Element>(slice: &[E]) -> Span {
    // SAFETY: the tests keep their slices until the call is over.
    unsafe { Span::new::<E>(slice.as_ptr() as u64, slice.len()) }
}

/// A collective on slices.
pub fn call<E: Element, T: Transport + Send + 'static>(
    comm: &Communicator<Nccl<T>>,
    library: &Arc<Library>,
    shape: Shape,
    redop: ReduceOp,
    input: &[E],
    output: &mut [E],
) -> Result<()> {
    comm.on_device(
        shape,
        redop,
        [span(input), span(output)],
        HostLane::new(library)?,
    )
}

/// The same in place: where in `buffer` the input and the output lie.
pub fn call_within<E: Element, T: Transport + Send + 'static>(
    comm: &Communicator<Nccl<T>>,
    library: &Arc<Library>,
    shape: Shape,
    redop: ReduceOp,
    buffer: &mut [E],
    [input, output]: [std::ops::Range<usize>; 2],
) -> Result<()> {
    let all = span(buffer);
    comm.on_device(
        shape,
        redop,
        [all.part(input), all.part(output)],
        HostLane::new(library)?,
    )
}
