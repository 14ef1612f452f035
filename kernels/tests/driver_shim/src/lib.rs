//! The driver of an NVIDIA GPU that is not there.
//!
//! ```text
//! launcher (quintet_kernels::cuda) --dlopen--> this --> Emulated: the kernel of that name, compiled
//!        cubin from NVRTC --cuModuleLoadData--> its metadata         for the host, checked
//! ```
//!
//! A launch is refused as the driver refuses it: a parameter block that is not as long as the
//! cubin says, a grid or block beyond the limits, more shared memory than was asked for, no context.
//! What the cubin says of the parameters is compared with what the C++ compiler says (the emulator's
//! table). A fault that the emulator finds becomes `CUDA_ERROR_ILLEGAL_ADDRESS`, and its sentence the
//! text of that error. Nothing here knows of time.
//!
//! `QUINTET_SHIM_ARCH` (80), `QUINTET_SHIM_SEED` (1), `QUINTET_SHIM_DEVICES` (1: of the machine, of which
//! `CUDA_VISIBLE_DEVICES` leaves some) and `QUINTET_SHIM_MEMORY` (bytes, without limit) choose the device.
#![cfg(feature = "whole")]
#![allow(unsafe_code, non_snake_case)]
// C signatures, called by the launcher: cuda.h says what their pointers are.
#![allow(
    clippy::missing_safety_doc,
    clippy::not_unsafe_ptr_arg_deref,
    missing_docs
)]

mod lookup;
mod state;

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::time::{Duration, Instant};

use quintet_kernels::launch::{Arg, Call, Launch, Libraries, Stream};

use state::{Code, Event, Function, INVALID_CONTEXT, INVALID_HANDLE, INVALID_VALUE, Module};
use state::{Shim, code_of, current, read_image, shim};

const USUAL_SHARED: u32 = 48 << 10;

/// Writes `value` where the caller wants it.
unsafe fn give<T>(to: *mut T, value: T) -> Code {
    if to.is_null() {
        return INVALID_VALUE;
    }
    // SAFETY: the caller passes where a T goes.
    unsafe { to.write(value) };
    0
}

/// Runs `body` where a context is current.
fn within(body: impl FnOnce(&'static Shim) -> Code) -> Code {
    if current() {
        body(shim())
    } else {
        INVALID_CONTEXT
    }
}

fn stream(handle: *mut c_void) -> Stream {
    Stream(handle as usize as u32)
}

#[unsafe(no_mangle)]
pub extern "C" fn cuInit(flags: c_uint) -> Code {
    if flags == 0 { 0 } else { INVALID_VALUE }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDriverGetVersion(version: *mut c_int) -> Code {
    // SAFETY: the caller passes where the answer goes.
    unsafe { give(version, 13_000) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDeviceGetCount(count: *mut c_int) -> Code {
    match shim().devices.len() {
        0 => state::NO_DEVICE,
        // SAFETY: the caller passes where the answer goes.
        n => unsafe { give(count, n as c_int) },
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDeviceGet(device: *mut c_int, ordinal: c_int) -> Code {
    match shim().devices.get(ordinal as usize) {
        // SAFETY: the caller passes where the answer goes.
        Some(_) => unsafe { give(device, ordinal) },
        None => state::INVALID_DEVICE,
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDeviceGetName(name: *mut c_char, len: c_int, _device: c_int) -> Code {
    // SAFETY: the caller passes where the answer goes.
    unsafe { write_text("an emulated GPU", name, len) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDeviceGetPCIBusId(to: *mut c_char, len: c_int, device: c_int) -> Code {
    match shim().devices.get(device as usize) {
        // SAFETY: the caller passes where the answer goes.
        Some(slot) => unsafe { write_text(&format!("0000:{slot:02x}:00.0"), to, len) },
        None => state::INVALID_DEVICE,
    }
}

unsafe fn write_text(text: &str, to: *mut c_char, len: c_int) -> Code {
    if len <= text.len() as c_int {
        return INVALID_VALUE;
    }
    // SAFETY: the caller passes where `len` bytes go.
    unsafe {
        core::ptr::copy_nonoverlapping(text.as_ptr().cast(), to, text.len());
        to.add(text.len()).write(0);
    }
    0
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDeviceGetAttribute(to: *mut c_int, which: c_int, _: c_int) -> Code {
    let arch = shim().arch as c_int;
    let value = match which {
        16 => 2,
        75 => arch / 10,
        76 => arch % 10,
        115 => 1,
        _ => return INVALID_VALUE,
    };
    // SAFETY: the caller passes where the answer goes.
    unsafe { give(to, value) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDevicePrimaryCtxRetain(to: *mut *mut c_void, device: c_int) -> Code {
    // SAFETY: the caller passes where the answer goes.
    unsafe { give(to, core::ptr::without_provenance_mut(device as usize + 1)) }
}

#[unsafe(no_mangle)]
pub extern "C" fn cuDevicePrimaryCtxRelease_v2(_device: c_int) -> Code {
    0
}

#[unsafe(no_mangle)]
pub extern "C" fn cuCtxPushCurrent_v2(context: *mut c_void) -> Code {
    if context.is_null() {
        return INVALID_CONTEXT;
    }
    state::push(context as usize);
    0
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuCtxPopCurrent_v2(to: *mut *mut c_void) -> Code {
    match state::pop() {
        // SAFETY: the caller passes where the answer goes.
        Some(context) => unsafe { give(to, core::ptr::without_provenance_mut(context)) },
        None => INVALID_CONTEXT,
    }
}

#[unsafe(no_mangle)]
pub extern "C" fn cuCtxSetCurrent(context: *mut c_void) -> Code {
    state::pop();
    cuCtxPushCurrent_v2(context)
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuCtxGetCurrent(to: *mut *mut c_void) -> Code {
    // SAFETY: the caller passes where the answer goes.
    unsafe { give(to, core::ptr::without_provenance_mut(state::top())) }
}

#[unsafe(no_mangle)]
pub extern "C" fn cuCtxSynchronize() -> Code {
    within(|shim| {
        let codes = shim.streams().map(|at| {
            let stream = core::ptr::without_provenance_mut(at);
            cuStreamSynchronize(stream)
        });
        codes.fold(0, Code::max)
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuCtxGetDevice(device: *mut c_int) -> Code {
    // SAFETY: the caller passes where the answer goes.
    within(|_| unsafe { give(device, state::current_device()) })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuStreamCreate(to: *mut *mut c_void, _flags: c_uint) -> Code {
    // SAFETY: the caller passes where the answer goes.
    within(|shim| unsafe { give(to, core::ptr::without_provenance_mut(shim.new_stream())) })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuStreamDestroy_v2(_stream: *mut c_void) -> Code {
    within(|_| 0)
}

/// What a library has on the stream goes on by calls of that library alone, which other threads make.
#[unsafe(no_mangle)]
pub extern "C" fn cuStreamSynchronize(handle: *mut c_void) -> Code {
    let until = Instant::now() + Duration::from_secs(60);
    loop {
        let code = cuStreamQuery(handle);
        if code != state::NOT_READY || Instant::now() >= until {
            return code;
        }
        std::thread::sleep(Duration::from_micros(100));
    }
}

/// What is asked after is done, for nothing here runs by itself.
#[unsafe(no_mangle)]
pub extern "C" fn cuStreamQuery(handle: *mut c_void) -> Code {
    within(|shim| {
        let code = code_of(shim.device.synchronize(stream(handle)));
        match code == 0 && shim.held(stream(handle)) {
            true => state::NOT_READY,
            false => code,
        }
    })
}

/// For a library that works on this device, such as the stand-in for NCCL: it is about to read there, in what it
/// puts on this stream. All that is before it is done.
#[unsafe(no_mangle)]
pub extern "C" fn quintetShimLends(handle: *mut c_void, at: u64, bytes: usize) -> Code {
    within(|shim| code_of(shim.device.lend(stream(handle), (at, bytes))))
}

/// It has written there, in what it put on this stream.
#[unsafe(no_mangle)]
pub extern "C" fn quintetShimFilled(handle: *mut c_void, at: u64, bytes: usize) -> Code {
    code_of(shim().device.filled(stream(handle), (at, bytes)))
}

/// It has one more (1) or one less (0) on this stream.
#[unsafe(no_mangle)]
pub extern "C" fn quintetShimHolds(handle: *mut c_void, _at: u64, more: usize) -> Code {
    shim().hold(stream(handle), more > 0);
    0
}

#[unsafe(no_mangle)]
pub extern "C" fn cuStreamWaitEvent(handle: *mut c_void, event: *mut Event, _: c_uint) -> Code {
    within(|shim| {
        // SAFETY: from cuEventCreate, not destroyed.
        let Some(event) = (unsafe { event.as_ref() }) else {
            return INVALID_HANDLE;
        };
        if let Some((point, _)) = &*event.lock() {
            shim.device.wait(stream(handle), point);
        }
        0
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuEventCreate(to: *mut *mut Event, _flags: c_uint) -> Code {
    // SAFETY: the caller passes where the answer goes.
    within(|_| unsafe { give(to, Box::into_raw(Box::default())) })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuEventDestroy_v2(event: *mut Event) -> Code {
    if event.is_null() {
        return INVALID_HANDLE;
    }
    // SAFETY: from cuEventCreate, destroyed once.
    drop(unsafe { Box::from_raw(event) });
    0
}

#[unsafe(no_mangle)]
pub extern "C" fn cuEventRecord(event: *mut Event, handle: *mut c_void) -> Code {
    within(|shim| {
        // SAFETY: from cuEventCreate, not destroyed.
        let Some(event) = (unsafe { event.as_ref() }) else {
            return INVALID_HANDLE;
        };
        *event.lock() = Some((shim.device.record(stream(handle)), Instant::now()));
        0
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuEventElapsedTime(ms: *mut f32, a: *mut Event, b: *mut Event) -> Code {
    // SAFETY: from cuEventCreate, not destroyed.
    let (Some(a), Some(b)) = (unsafe { (a.as_ref(), b.as_ref()) }) else {
        return INVALID_HANDLE;
    };
    match (&*a.lock(), &*b.lock()) {
        (Some(a), Some(b)) => {
            let elapsed = b.1.duration_since(a.1).as_secs_f32() * 1e3;
            // SAFETY: the caller passes where the answer goes.
            unsafe { give(ms, elapsed) }
        }
        _ => INVALID_HANDLE,
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemAlloc_v2(to: *mut u64, bytes: usize) -> Code {
    within(|shim| match shim.alloc(bytes) {
        // SAFETY: the caller passes where the answer goes.
        Ok(ptr) => unsafe { give(to, ptr) },
        Err(code) => code,
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemAllocAsync(to: *mut u64, bytes: usize, _: *mut c_void) -> Code {
    // SAFETY: the caller passes where the answer goes.
    unsafe { cuMemAlloc_v2(to, bytes) }
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemFree_v2(ptr: u64) -> Code {
    cuMemFreeAsync(ptr, core::ptr::null_mut())
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemFreeAsync(ptr: u64, handle: *mut c_void) -> Code {
    within(|shim| {
        shim.device.free(stream(handle), ptr);
        shim.freed(ptr);
        0
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemGetInfo_v2(free: *mut usize, total: *mut usize) -> Code {
    within(|shim| unsafe {
        give(free, shim.left());
        give(total, shim.memory)
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDeviceGetDefaultMemPool(to: *mut *mut c_void, _device: c_int) -> Code {
    // SAFETY: the caller passes where the answer goes.
    unsafe { give(to, core::ptr::without_provenance_mut(1)) }
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemPoolSetAttribute(_: *mut c_void, which: c_int, _: *mut c_void) -> Code {
    if which == 4 { 0 } else { INVALID_VALUE }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemcpyHtoDAsync_v2(
    to: u64,
    from: *const u8,
    bytes: usize,
    handle: *mut c_void,
) -> Code {
    within(|shim| {
        let host = unsafe { core::slice::from_raw_parts(from, bytes) };
        code_of(shim.device.upload(stream(handle), host, to))
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemcpyDtoHAsync_v2(
    to: *mut u8,
    from: u64,
    bytes: usize,
    handle: *mut c_void,
) -> Code {
    within(|shim| {
        let host = unsafe { core::slice::from_raw_parts_mut(to, bytes) };
        code_of(shim.device.download(stream(handle), from, host))
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemcpyDtoDAsync_v2(
    to: u64,
    from: u64,
    bytes: usize,
    handle: *mut c_void,
) -> Code {
    within(|shim| code_of(shim.device.copy(stream(handle), from, to, bytes)))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemsetD8Async(to: u64, value: u8, bytes: usize, handle: *mut c_void) -> Code {
    within(|shim| code_of(shim.device.fill(stream(handle), to, value, bytes)))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuModuleLoadData(to: *mut *mut Module, image: *const u8) -> Code {
    within(|shim| match unsafe { read_image(image) } {
        // SAFETY: the caller passes where the answer goes.
        Some(kernels) => unsafe { give(to, shim.load(kernels)) },
        None => state::INVALID_IMAGE,
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuModuleUnload(module: *mut Module) -> Code {
    match unsafe { module.as_ref() } {
        // Leaked: a function of it that is still launched is told, not a crash.
        Some(module) => module.unload(),
        None => INVALID_HANDLE,
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuModuleGetFunction(
    to: *mut *const Function,
    module: *mut Module,
    name: *const c_char,
) -> Code {
    let (Some(module), name) = (unsafe { (module.as_ref(), CStr::from_ptr(name)) }) else {
        return INVALID_HANDLE;
    };
    match module.function(&name.to_string_lossy()) {
        // SAFETY: the caller passes where the answer goes.
        Some(function) => unsafe { give(to, function) },
        None => state::NOT_FOUND,
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuFuncSetAttribute(f: *const Function, which: c_int, x: c_int) -> Code {
    let Some(function) = (unsafe { f.as_ref() }) else {
        return INVALID_HANDLE;
    };
    let limit = quintet_kernels::launch::Arch(shim().arch).shared_limit();
    if which != 8 || x < 0 || x as u64 + function.info.shared > limit {
        return INVALID_VALUE;
    }
    function.allow(x as u32);
    0
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuLaunchKernel(
    f: *const Function,
    gx: c_uint,
    gy: c_uint,
    gz: c_uint,
    bx: c_uint,
    by: c_uint,
    bz: c_uint,
    shared: c_uint,
    handle: *mut c_void,
    params: *mut *mut c_void,
    extra: *mut *mut c_void,
) -> Code {
    within(|shim| {
        let Some(function) = (unsafe { f.as_ref() }) else {
            return INVALID_HANDLE;
        };
        if !function.is_loaded() || shared > function.allowed().max(USUAL_SHARED) {
            return INVALID_VALUE;
        }
        let args = unsafe {
            match extra.is_null() {
                true => function.args_at(params),
                false => function.args_in(extra),
            }
        };
        let Some(args) = args else {
            return INVALID_VALUE;
        };
        let call = Call {
            module: &function.host_module,
            function: &function.info.name,
            grid: [gx, gy, gz],
            block: [bx, by, bz],
            shared,
            args: &args,
        };
        shim.launch(stream(handle), &call)
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuGetErrorName(code: Code, to: *mut *const c_char) -> Code {
    // SAFETY: the caller passes where the answer goes.
    unsafe { give(to, state::name(code).as_ptr()) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuGetErrorString(code: Code, to: *mut *const c_char) -> Code {
    // SAFETY: the caller passes where the answer goes.
    unsafe { give(to, state::text(code).as_ptr()) }
}

/// An argument of so many bytes.
fn arg(bits: u64, bytes: u32) -> Option<Arg> {
    match bytes {
        4 => Some(Arg::U32(bits as u32)),
        8 => Some(Arg::I64(bits as i64)),
        _ => None,
    }
}
