//! `cuGetProcAddress`: how others than our launcher find the functions, among them Python's
//! cuda-bindings (benches/gpu_check/by_hand.py).

use std::ffi::{CStr, c_char, c_int, c_void};

use crate::*;

const NOT_FOUND_HERE: c_int = 1;

/// Where a function is, by its name without its version.
macro_rules! table {
    ($symbol:expr; $($function:ident)*) => {
        match $symbol {
            $(name if is(name, stringify!($function)) => $function as *const () as *mut c_void,)*
            _ => core::ptr::null_mut(),
        }
    };
}

fn is(asked: &str, function: &str) -> bool {
    asked == function || function.strip_suffix("_v2") == Some(asked)
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuGetProcAddress_v2(
    symbol: *const c_char,
    to: *mut *mut c_void,
    _version: c_int,
    _flags: u64,
    status: *mut c_int,
) -> Code {
    if symbol.is_null() || to.is_null() {
        return INVALID_VALUE;
    }
    // SAFETY: a name with a zero at its end, as cuda.h says.
    let symbol = unsafe { CStr::from_ptr(symbol) }.to_string_lossy();
    let found = table!(&*symbol;
        cuInit cuDriverGetVersion cuDeviceGetCount cuDeviceGet cuDeviceGetName cuDeviceGetAttribute
        cuDevicePrimaryCtxRetain cuDevicePrimaryCtxRelease_v2 cuCtxPushCurrent_v2
        cuCtxPopCurrent_v2 cuCtxSetCurrent cuCtxGetCurrent cuCtxSynchronize cuCtxGetDevice
        cuStreamCreate cuStreamDestroy_v2 cuStreamSynchronize cuStreamQuery cuStreamWaitEvent
        cuEventCreate cuEventDestroy_v2 cuEventRecord cuEventElapsedTime cuMemAlloc_v2
        cuMemAllocAsync cuMemFree_v2 cuMemFreeAsync cuMemGetInfo_v2 cuDeviceGetDefaultMemPool
        cuMemPoolSetAttribute cuMemcpyHtoDAsync_v2 cuMemcpyDtoHAsync_v2 cuMemcpyDtoDAsync_v2
        cuMemsetD8Async cuModuleLoadData cuModuleUnload cuModuleGetFunction cuFuncSetAttribute
        cuLaunchKernel cuGetErrorName cuGetErrorString cuGetProcAddress_v2
    );
    let missing = found.is_null();
    // SAFETY: the caller passes where the two go, or null for the second.
    unsafe {
        to.write(found);
        if !status.is_null() {
            status.write(if missing { NOT_FOUND_HERE } else { 0 });
        }
    }
    if missing { state::NOT_FOUND } else { 0 }
}
