//! The driver's functions, found in its library when the first device is asked for.
//!
//! Types are cudarc's; the library is ours to load, because a missing one, or a missing function in
//! one, is an answer here and not a panic.

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::path::PathBuf;
use std::string::{String, ToString};
use std::{env, format};

use cudarc::driver::sys::{
    CUcontext, CUdevice, CUdeviceptr, CUevent, CUfunction, CUmemoryPool, CUmodule, CUstream,
};
use libloading::Library;

use super::CudaError;

/// What a function of the driver gives: 0, or a code of `CUresult`.
pub(super) type Code = c_uint;

/// Writes the table of functions and how it is filled.
macro_rules! driver {
    ($($name:ident = $symbol:literal ($($arg:ty),*);)*) => {
        /// The driver.
        pub(super) struct Driver {
            $(pub(super) $name: unsafe extern "C" fn($($arg),*) -> Code,)*
            _library: Library,
        }

        impl Driver {
            fn of(library: Library, path: &str) -> Result<Self, CudaError> {
                $(
                    // SAFETY: the signature is that of cuda.h for this symbol.
                    let $name = *unsafe {
                        library.get::<unsafe extern "C" fn($($arg),*) -> Code>($symbol)
                    }
                    .map_err(|_| CudaError::OldDriver {
                        library: path.to_string(),
                        function: $symbol.to_string(),
                    })?;
                )*
                Ok(Self { $($name,)* _library: library })
            }
        }
    };
}

driver! {
    init = "cuInit" (c_uint);
    device_count = "cuDeviceGetCount" (*mut c_int);
    device_get = "cuDeviceGet" (*mut CUdevice, c_int);
    device_attribute = "cuDeviceGetAttribute" (*mut c_int, c_int, CUdevice);
    device_name = "cuDeviceGetName" (*mut c_char, c_int, CUdevice);
    device_bus_id = "cuDeviceGetPCIBusId" (*mut c_char, c_int, CUdevice);
    context_retain = "cuDevicePrimaryCtxRetain" (*mut CUcontext, CUdevice);
    context_release = "cuDevicePrimaryCtxRelease_v2" (CUdevice);
    context_push = "cuCtxPushCurrent_v2" (CUcontext);
    context_pop = "cuCtxPopCurrent_v2" (*mut CUcontext);
    context_set = "cuCtxSetCurrent" (CUcontext);
    context_device = "cuCtxGetDevice" (*mut CUdevice);
    stream_create = "cuStreamCreate" (*mut CUstream, c_uint);
    stream_destroy = "cuStreamDestroy_v2" (CUstream);
    stream_synchronize = "cuStreamSynchronize" (CUstream);
    stream_query = "cuStreamQuery" (CUstream);
    stream_wait = "cuStreamWaitEvent" (CUstream, CUevent, c_uint);
    event_create = "cuEventCreate" (*mut CUevent, c_uint);
    event_destroy = "cuEventDestroy_v2" (CUevent);
    event_record = "cuEventRecord" (CUevent, CUstream);
    event_elapsed = "cuEventElapsedTime" (*mut f32, CUevent, CUevent);
    alloc = "cuMemAlloc_v2" (*mut CUdeviceptr, usize);
    free = "cuMemFree_v2" (CUdeviceptr);
    alloc_async = "cuMemAllocAsync" (*mut CUdeviceptr, usize, CUstream);
    free_async = "cuMemFreeAsync" (CUdeviceptr, CUstream);
    default_pool = "cuDeviceGetDefaultMemPool" (*mut CUmemoryPool, CUdevice);
    pool_set = "cuMemPoolSetAttribute" (CUmemoryPool, c_int, *mut c_void);
    upload = "cuMemcpyHtoDAsync_v2" (CUdeviceptr, *const c_void, usize, CUstream);
    download = "cuMemcpyDtoHAsync_v2" (*mut c_void, CUdeviceptr, usize, CUstream);
    copy = "cuMemcpyDtoDAsync_v2" (CUdeviceptr, CUdeviceptr, usize, CUstream);
    fill = "cuMemsetD8Async" (CUdeviceptr, u8, usize, CUstream);
    module_load = "cuModuleLoadData" (*mut CUmodule, *const c_void);
    module_unload = "cuModuleUnload" (CUmodule);
    module_function = "cuModuleGetFunction" (*mut CUfunction, CUmodule, *const c_char);
    function_set = "cuFuncSetAttribute" (CUfunction, c_int, c_int);
    launch = "cuLaunchKernel" (
        CUfunction, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, CUstream,
        *mut *mut c_void, *mut *mut c_void
    );
    error_name = "cuGetErrorName" (Code, *mut *const c_char);
    error_string = "cuGetErrorString" (Code, *mut *const c_char);
}

/// What the loader says, which the error itself keeps to its source.
pub(super) fn reason(error: &libloading::Error) -> String {
    let source = core::error::Error::source(error);
    source.map_or_else(|| error.to_string(), ToString::to_string)
}

impl core::fmt::Debug for Driver {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.write_str("Driver")
    }
}

impl Driver {
    /// The driver of this machine: the library that `QUINTET_CUDA_DRIVER` names, or the one that
    /// the loader finds.
    pub(super) fn load() -> Result<Self, CudaError> {
        let names = match env::var_os("QUINTET_CUDA_DRIVER") {
            Some(path) => std::vec![PathBuf::from(path)],
            None if cfg!(windows) => std::vec!["nvcuda.dll".into()],
            None => std::vec!["libcuda.so.1".into(), "libcuda.so".into()],
        };
        let mut why = String::new();
        for name in &names {
            // SAFETY: the driver's library may be loaded by anybody; its initialisers are trusted
            // as the driver itself is.
            match unsafe { Library::new(name) } {
                Ok(library) => {
                    let driver = Self::of(library, &name.display().to_string())?;
                    // SAFETY: no arguments but flags, which must be 0.
                    let code = unsafe { (driver.init)(0) };
                    return match code {
                        0 => Ok(driver),
                        _ => Err(CudaError::NoDevice {
                            why: driver.sentence(code),
                        }),
                    };
                }
                // The first name is the one that installations have.
                Err(error) if why.is_empty() => why = reason(&error),
                Err(_) => {}
            }
        }
        Err(CudaError::NoDriver { why })
    }

    /// What the driver says of a code: its name and its meaning.
    pub(super) fn sentence(&self, code: Code) -> String {
        let ask = |function: unsafe extern "C" fn(Code, *mut *const c_char) -> Code| {
            let mut text = core::ptr::null();
            // SAFETY: `text` is written, to a string that lives as long as the driver.
            match unsafe { function(code, &raw mut text) } {
                0 if !text.is_null() => unsafe { CStr::from_ptr(text) }.to_string_lossy().into(),
                _ => String::new(),
            }
        };
        match (ask(self.error_name), ask(self.error_string)) {
            (name, _) if name.is_empty() => format!("error {code}"),
            (name, text) => format!("{name} ({code}): {text}"),
        }
    }
}
