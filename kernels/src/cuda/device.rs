//! One device: its context, memory, kernels and health; its streams are in `device/streams.rs`.

mod streams;

use alloc::sync::Arc;
use std::collections::HashMap;
use std::ffi::{c_char, c_int, c_void};
use std::string::String;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::vec::Vec;
use std::{env, format, vec};

use cudarc::driver::sys::{CUcontext, CUdevice, CUstream};

use super::driver::{Code, Driver};
use super::kernels::{Kernel, Kernels};
use super::source::CudaModule;
use super::{CudaError, describe};
use crate::Error;
use crate::launch::{Arg, Call, Stream};

pub use streams::CudaEvent;

/// Numbers of cuda.h.
const MULTIPROCESSORS: c_int = 16;
const MAJOR: c_int = 75;
const MINOR: c_int = 76;
const MEMORY_POOLS: c_int = 115;
const RELEASE_THRESHOLD: c_int = 4;
const OUT_OF_MEMORY: Code = 2;
/// Streams that nobody names have numbers from here on.
const FRESH: u32 = 1 << 20;
const PARAMS_POINTER: *mut c_void = core::ptr::without_provenance_mut(1);
const PARAMS_LEN: *mut c_void = core::ptr::without_provenance_mut(2);
const PARAMS_END: *mut c_void = core::ptr::null_mut();

/// Codes after which a context does no more work (`cudaError` pages: "the process must be
/// terminated and relaunched").
const STICKY: &[Code] = &[
    214, 220, 226, 700, 702, 709, 710, 714, 715, 716, 717, 718, 719, 721,
];

pub(super) struct Device {
    kernels: Kernels,
    state: Mutex<State>,
    context: CUcontext,
    /// Of a primary context: released when dropped.
    primary: Option<CUdevice>,
    name: String,
    arch: u32,
    multiprocessors: u32,
    pools: bool,
    /// Each launch is waited for.
    eager: bool,
    driver: Arc<Driver>,
}

// SAFETY: the driver's handles may be used from any thread, with their context pushed, as `with`
// does.
unsafe impl Send for Device {}
unsafe impl Sync for Device {}

struct State {
    /// By number; the first `foreign` are somebody else's.
    streams: HashMap<u32, CUstream>,
    foreign: u32,
    /// The next stream that nobody has named.
    fresh: u32,
    fault: Option<Error>,
}

impl core::fmt::Debug for Device {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(f, "{} (sm_{})", self.name, self.arch)
    }
}

impl Device {
    pub(super) fn count(driver: &Driver) -> Result<usize, CudaError> {
        let mut count = 0;
        // SAFETY: a number is written.
        let code = unsafe { (driver.device_count)(&raw mut count) };
        match (code, count) {
            (0, 1..) => Ok(count as usize),
            (0, _) => Err(CudaError::NoDevice {
                why: "the driver is there and has none".into(),
            }),
            _ => Err(CudaError::NoDevice {
                why: driver.sentence(code),
            }),
        }
    }

    fn numbered(driver: &Driver, ordinal: usize) -> Result<CUdevice, CudaError> {
        let count = Self::count(driver)?;
        if ordinal >= count {
            let why = format!("number {ordinal} was asked for, and there are {count}, from 0 on");
            return Err(CudaError::NoDevice { why });
        }
        let mut device = 0;
        // SAFETY: a handle is written.
        let code = unsafe { (driver.device_get)(&raw mut device, ordinal as c_int) };
        match code {
            0 => Ok(device),
            _ => Err(refused(driver, "device", ordinal, code)),
        }
    }

    pub(super) fn bus_id(driver: &Driver, ordinal: usize) -> Result<String, CudaError> {
        let device = Self::numbered(driver, ordinal)?;
        let text = written(32, |bytes, most| {
            // SAFETY: at most as many bytes are written, the last a zero.
            unsafe { (driver.device_bus_id)(bytes, most, device) }
        });
        text.map_err(|code| refused(driver, "the bus id of device", ordinal, code))
    }

    pub(super) fn primary(
        ordinal: usize,
        modules: &'static [CudaModule],
    ) -> Result<Self, CudaError> {
        let driver = Driver::load()?;
        let device = Self::numbered(&driver, ordinal)?;
        Self::suits(&driver, device)?;
        let mut context = core::ptr::null_mut();
        // SAFETY: a handle is written.
        let code = unsafe { (driver.context_retain)(&raw mut context, device) };
        if code != 0 {
            return Err(refused(&driver, "the context of device", ordinal, code));
        }
        Self::of(driver, (device, context), Some(device), &[], modules)
    }

    /// # Safety
    /// As [`super::Cuda::in_context`].
    pub(super) unsafe fn foreign(
        context: CUcontext,
        streams: &[CUstream],
    ) -> Result<Self, CudaError> {
        let driver = Driver::load()?;
        let (mut device, mut popped) = (0, core::ptr::null_mut());
        // SAFETY: the context lives; it is popped again.
        let code = unsafe {
            (driver.context_push)(context);
            let code = (driver.context_device)(&raw mut device);
            (driver.context_pop)(&raw mut popped);
            code
        };
        if code != 0 {
            return Err(CudaError::NoDevice {
                why: driver.sentence(code),
            });
        }
        Self::suits(&driver, device)?;
        Self::of(driver, (device, context), None, streams, &[])
    }

    /// Refuses what the kernels can not run on; gives name and compute capability.
    fn suits(driver: &Driver, device: CUdevice) -> Result<(String, u32), CudaError> {
        let arch = attribute(driver, device, MAJOR) * 10 + attribute(driver, device, MINOR);
        let name = written(256, |bytes, most| {
            // SAFETY: at most as many bytes are written, the last a zero.
            unsafe { (driver.device_name)(bytes, most, device) }
        });
        let name = name.unwrap_or_default();
        match arch {
            80.. => Ok((name, arch)),
            _ => Err(CudaError::Arch { device: name, arch }),
        }
    }

    fn of(
        driver: Driver,
        (device, context): (CUdevice, CUcontext),
        primary: Option<CUdevice>,
        streams: &[CUstream],
        modules: &'static [CudaModule],
    ) -> Result<Self, CudaError> {
        let (name, arch) = Self::suits(&driver, device)?;
        let pools = attribute(&driver, device, MEMORY_POOLS) == 1;
        if pools {
            let (mut pool, mut all) = (core::ptr::null_mut(), u64::MAX);
            // What was freed stays for the next allocation, also past a wait. A driver that will
            // not has it slower.
            // SAFETY: a handle is written, then a number read.
            unsafe {
                if (driver.default_pool)(&raw mut pool, device) == 0 {
                    (driver.pool_set)(pool, RELEASE_THRESHOLD, (&raw mut all).cast());
                }
            }
        }
        let given = streams.iter().enumerate();
        let state = State {
            streams: given.map(|(i, &s)| (i as u32, s)).collect(),
            foreign: streams.len() as u32,
            fresh: FRESH,
            fault: None,
        };
        let driver = Arc::new(driver);
        Ok(Self {
            kernels: Kernels::new(arch, modules),
            state: Mutex::new(state),
            context,
            primary,
            name,
            arch,
            multiprocessors: attribute(&driver, device, MULTIPROCESSORS),
            pools,
            eager: env::var_os("QUINTET_CUDA_SYNC").is_some_and(|v| v == "1"),
            driver,
        })
    }

    pub(super) fn name(&self) -> &str {
        &self.name
    }

    pub(super) fn arch(&self) -> u32 {
        self.arch
    }

    pub(super) fn multiprocessors(&self) -> u32 {
        self.multiprocessors
    }

    pub(super) fn kernels(&self) -> &Kernels {
        &self.kernels
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What made the device useless, if something did.
    pub(super) fn healthy(&self) -> Result<(), Error> {
        match &self.state().fault {
            Some(error) => Err(error.clone()),
            None => Ok(()),
        }
    }

    /// Calls the driver with this device's context current, as it is nobody else's business which
    /// one the thread had before.
    fn with<T>(&self, call: impl FnOnce(&Driver) -> T) -> T {
        let mut popped = core::ptr::null_mut();
        // SAFETY: the context lives as long as this; pushed and popped in pairs.
        unsafe {
            (self.driver.context_push)(self.context);
            let result = call(&self.driver);
            (self.driver.context_pop)(&raw mut popped);
            result
        }
    }

    /// An error for `code`, kept where it is sticky.
    fn outcome(&self, code: Code, what: impl FnOnce() -> String) -> Result<(), Error> {
        if code == 0 {
            return Ok(());
        }
        let sticky = STICKY.contains(&code);
        let error = Error::from(CudaError::Driver {
            what: what(),
            why: self.driver.sentence(code),
            sticky,
        });
        if sticky {
            self.state().fault.get_or_insert_with(|| error.clone());
        }
        Err(error)
    }

    pub(super) fn alloc(
        &self,
        home: Stream,
        tag: &'static str,
        bytes: usize,
    ) -> Result<u64, Error> {
        self.healthy()?;
        let stream = self.stream(home)?;
        let mut ptr = 0;
        // SAFETY: an address is written.
        let code = self.with(|d| unsafe {
            match self.pools {
                true => (d.alloc_async)(&raw mut ptr, bytes.max(1), stream),
                false => (d.alloc)(&raw mut ptr, bytes.max(1)),
            }
        });
        match code {
            OUT_OF_MEMORY => Err(Error::Memory { bytes, tag }),
            _ => {
                self.outcome(code, || format!("{bytes} bytes for {tag}"))?;
                Ok(ptr)
            }
        }
    }

    pub(super) fn free(&self, stream: Stream, ptr: u64) {
        let Ok(stream) = self.stream(stream) else {
            return;
        };
        // SAFETY: from `alloc`, freed once. Without pools the driver itself waits for the device.
        let code = self.with(|d| unsafe {
            match self.pools {
                true => (d.free_async)(ptr, stream),
                false => (d.free)(ptr),
            }
        });
        // Told by the next call, where it is sticky.
        let _ = self.outcome(code, || format!("the free of {ptr:#x}"));
    }

    pub(super) fn kernel(&self, module: &str, function: &str) -> Result<Arc<Kernel>, Error> {
        self.kernels.get((module, function), |cubin, function| {
            self.with(|d| Kernel::load(&self.driver, d, cubin, function))
        })
    }

    /// Gives a checked call to the driver.
    pub(super) fn launch(
        &self,
        stream: Stream,
        kernel: &Kernel,
        call: &Call<'_>,
    ) -> Result<(), Error> {
        let queue = self.stream(stream)?;
        let mut params = parameter_block(call.args, &kernel.info().offsets);
        let mut len = params.len();
        let mut extra = [
            PARAMS_POINTER,
            params.as_mut_ptr().cast(),
            PARAMS_LEN,
            (&raw mut len).cast(),
            PARAMS_END,
        ];
        let ([gx, gy, gz], [bx, by, bz]) = (call.grid, call.block);
        let code = self.with(|d| {
            // SAFETY: the block is laid out as the kernel's cubin says, and is copied by the call.
            unsafe {
                let ready = kernel.allow_shared(d, call.shared);
                if ready != 0 {
                    return ready;
                }
                let (none, extra) = (core::ptr::null_mut(), extra.as_mut_ptr());
                let function = kernel.function();
                let shared = call.shared;
                (d.launch)(function, gx, gy, gz, bx, by, bz, shared, queue, none, extra)
            }
        });
        self.outcome(code, || describe(call))?;
        if self.eager {
            // SAFETY: a stream of this device.
            let code = self.with(|d| unsafe { (d.stream_synchronize)(queue) });
            self.outcome(code, || describe(call))?;
        }
        Ok(())
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        let state = self.state.get_mut().unwrap_or_else(PoisonError::into_inner);
        let foreign = state.foreign;
        let own: Vec<CUstream> = state
            .streams
            .iter()
            .filter(|(n, _)| **n >= foreign)
            .map(|(_, s)| *s)
            .collect();
        self.with(|d| {
            for stream in own {
                // SAFETY: made here; what is on it still runs to its end.
                unsafe {
                    (d.stream_synchronize)(stream);
                    (d.stream_destroy)(stream);
                }
            }
            self.kernels.unload(d);
        });
        if let Some(device) = self.primary {
            // SAFETY: retained once.
            unsafe { (self.driver.context_release)(device) };
        }
    }
}

/// What the driver answers to who asks for a device by number.
fn refused(driver: &Driver, what: &str, ordinal: usize, code: Code) -> CudaError {
    CudaError::NoDevice {
        why: format!("{what} {ordinal}: {}", driver.sentence(code)),
    }
}

/// The text that `write` puts where there is room for `most` bytes, or its code.
fn written(most: usize, write: impl FnOnce(*mut c_char, c_int) -> Code) -> Result<String, Code> {
    let mut bytes = vec![0u8; most];
    match write(bytes.as_mut_ptr().cast(), most as c_int) {
        0 => {
            let end = bytes.iter().position(|&b| b == 0).unwrap_or(0);
            Ok(String::from_utf8_lossy(&bytes[..end]).into_owned())
        }
        code => Err(code),
    }
}

fn attribute(driver: &Driver, device: CUdevice, which: c_int) -> u32 {
    let mut value = 0;
    // SAFETY: a number is written; an unknown attribute leaves it.
    unsafe { (driver.device_attribute)(&raw mut value, which, device) };
    value.max(0) as u32
}

/// Arguments as a kernel finds them; where its cubin says where, else each at a multiple of its
/// bytes.
fn parameter_block(args: &[Arg], offsets: &[u32]) -> Vec<u8> {
    let mut block = Vec::new();
    for (i, arg) in args.iter().enumerate() {
        let bytes = arg.bytes();
        let at = match offsets.get(i) {
            Some(&at) => at as usize,
            None => block.len().next_multiple_of(bytes),
        };
        block.resize(at, 0);
        block.extend_from_slice(&arg.bits().to_le_bytes()[..bytes]);
    }
    block
}
