//! The driver on whose device the memory lies and whose streams the kernels are on: NVIDIA's has it from the
//! runtime, the stand-in from the stand-in for the driver (kernels/tests/driver_shim), which it tells what it does.

use std::ffi::c_int;
use std::path::Path;

use libloading::{Library, Symbol};

/// Its functions.
pub(crate) struct Driver(Library);

impl Driver {
    pub(crate) fn open(path: &Path) -> Result<Self, String> {
        // SAFETY: the library that the tests name, which the process has loaded already.
        let library = unsafe { Library::new(path) };
        library.map(Self).map_err(|error| error.to_string())
    }

    fn touch(&self, name: &[u8], stream: usize, at: usize, bytes: usize) -> c_int {
        type Touch = unsafe extern "C" fn(usize, u64, usize) -> c_int;
        // SAFETY: the symbol's type.
        let function: Result<Symbol<'_, Touch>, _> = unsafe { self.0.get(name) };
        // SAFETY: any numbers are answered.
        function.map_or(-1, |function| unsafe { function(stream, at as u64, bytes) })
    }

    /// A kernel of this stream will read there: all that is before it on the stream is done first.
    pub(crate) fn reads(&self, stream: usize, at: usize, bytes: usize) -> c_int {
        self.touch(b"quintetShimLends\0", stream, at, bytes)
    }

    /// A kernel of this stream has written there.
    pub(crate) fn wrote(&self, stream: usize, at: usize, bytes: usize) {
        self.touch(b"quintetShimFilled\0", stream, at, bytes);
    }

    /// Whether one kernel more, or one less, is on this stream.
    pub(crate) fn holds(&self, stream: usize, more: bool) {
        self.touch(b"quintetShimHolds\0", stream, 0, usize::from(more));
    }
}
