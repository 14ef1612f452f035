//! Kernels compiled for the host: the tables that the build script writes (cuda/table.cuh).

use std::ffi::{CStr, c_char};

/// `EmuKernel` of cuda/table.cuh.
#[derive(Debug)]
#[repr(C)]
pub(super) struct HostKernel {
    name: *const c_char,
    pub(super) call: unsafe extern "C" fn(*mut *mut u64),
    args: u32,
    bytes: *const u32,
    pub(super) max_threads: u32,
}

/// `EmuModule` of cuda/table.cuh.
#[derive(Debug)]
#[repr(C)]
pub struct HostModule {
    name: *const c_char,
    kernels: *const HostKernel,
    count: u32,
}

// SAFETY: tables of constants; nothing in them changes.
unsafe impl Sync for HostKernel {}
unsafe impl Sync for HostModule {}

impl HostKernel {
    pub(super) fn name(&self) -> &'static str {
        name(self.name)
    }

    /// Bytes of each argument.
    pub(super) fn params(&self) -> &'static [u32] {
        // SAFETY: the table has as many entries as the kernel takes arguments.
        unsafe { core::slice::from_raw_parts(self.bytes, self.args as usize) }
    }
}

impl HostModule {
    pub(super) fn name(&self) -> &'static str {
        name(self.name)
    }

    pub(super) fn kernels(&'static self) -> &'static [HostKernel] {
        // SAFETY: the table has `count` entries.
        unsafe { core::slice::from_raw_parts(self.kernels, self.count as usize) }
    }
}

fn name(literal: *const c_char) -> &'static str {
    // SAFETY: a string literal of a generated table.
    unsafe { CStr::from_ptr(literal) }.to_str().unwrap_or("")
}

unsafe extern "C" {
    static quintet_emu_modules: HostModule;
    static quintet_emu_modules_count: u32;
}

/// The crate's own modules.
pub(super) fn own() -> &'static [HostModule] {
    // SAFETY: the build script writes `count` modules in a row.
    unsafe {
        core::slice::from_raw_parts(
            &raw const quintet_emu_modules,
            quintet_emu_modules_count as usize,
        )
    }
}
