//! What the driver remembers.

use std::cell::RefCell;
use std::collections::HashMap;
use std::ffi::{CStr, CString, c_int, c_void};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

use quintet_kernels::Error;
use quintet_kernels::cuda::cubin::{self, KernelInfo};
use quintet_kernels::emulated::{Emulated, EmulatedEvent, HostModule};
use quintet_kernels::launch::{Arch, Arg, Call, Launch, Limit, Stream};

use crate::arg;

pub(crate) type Code = u32;
pub(crate) const INVALID_VALUE: Code = 1;
const OUT_OF_MEMORY: Code = 2;
pub(crate) const NO_DEVICE: Code = 100;
pub(crate) const INVALID_DEVICE: Code = 101;
pub(crate) const INVALID_IMAGE: Code = 200;
pub(crate) const INVALID_CONTEXT: Code = 201;
pub(crate) const INVALID_HANDLE: Code = 400;
pub(crate) const NOT_FOUND: Code = 500;
pub(crate) const NOT_READY: Code = 600;
const ILLEGAL_ADDRESS: Code = 700;
const OUT_OF_RESOURCES: Code = 701;

pub(crate) struct Shim {
    pub(crate) device: Emulated,
    pub(crate) arch: u32,
    /// By number: where each sits in the machine.
    pub(crate) devices: Vec<u64>,
    pub(crate) memory: usize,
    allocated: Mutex<HashMap<u64, usize>>,
    streams: AtomicUsize,
    /// How much of libraries is on each stream.
    held: Mutex<HashMap<Stream, usize>>,
    /// What the last refused launch was refused for, and the fault.
    why: Mutex<CString>,
}

unsafe extern "C" {
    static quintet_emu_planted: HostModule;
    static quintet_emu_planted_count: u32;
}

/// The kernels of the emulator's tests; the crate's own are known anyway.
fn planted() -> &'static [HostModule] {
    let count = &raw const quintet_emu_planted_count;
    // SAFETY: the build script of quintet-kernels writes that many modules in a row.
    unsafe { core::slice::from_raw_parts(&raw const quintet_emu_planted, *count as usize) }
}

/// The one driver of the process.
pub(crate) fn shim() -> &'static Shim {
    static SHIM: OnceLock<Shim> = OnceLock::new();
    SHIM.get_or_init(|| {
        let from_env = |name: &str| std::env::var(name).ok()?.parse::<u64>().ok();
        let arch = from_env("QUINTET_SHIM_ARCH").unwrap_or(80) as u32;
        let seed = from_env("QUINTET_SHIM_SEED").unwrap_or(1);
        Shim {
            device: Emulated::with_modules(Arch(arch), seed, planted()),
            arch,
            devices: visible(from_env("QUINTET_SHIM_DEVICES").unwrap_or(1)),
            memory: from_env("QUINTET_SHIM_MEMORY").unwrap_or(1 << 40) as usize,
            allocated: Mutex::default(),
            streams: AtomicUsize::new(0),
            held: Mutex::default(),
            why: Mutex::default(),
        }
    })
}

/// The devices that the process sees, in its order: of a list what comes before the first that is not there.
fn visible(there: u64) -> Vec<u64> {
    let Ok(list) = std::env::var("CUDA_VISIBLE_DEVICES") else {
        return (0..there).collect();
    };
    let numbers = list.split(',').map(|number| number.trim().parse());
    numbers
        .map_while(|number| number.ok().filter(|slot| *slot < there))
        .collect()
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

thread_local! {
    static CONTEXTS: RefCell<Vec<usize>> = const { RefCell::new(Vec::new()) };
}

pub(crate) fn push(context: usize) {
    CONTEXTS.with_borrow_mut(|stack| stack.push(context));
}

pub(crate) fn pop() -> Option<usize> {
    CONTEXTS.with_borrow_mut(Vec::pop)
}

/// Whether the thread has a context.
pub(crate) fn current() -> bool {
    CONTEXTS.with_borrow(|stack| !stack.is_empty())
}

/// The thread's context; 0 where it has none.
pub(crate) fn top() -> usize {
    CONTEXTS.with_borrow(|stack| stack.last().copied().unwrap_or(0))
}

/// The device of the thread's context: contexts are numbered from 1.
pub(crate) fn current_device() -> c_int {
    (top() as c_int - 1).max(0)
}

/// What the driver answers where the emulator gave this.
pub(crate) fn code_of(result: Result<(), Error>) -> Code {
    let Err(error) = result else { return 0 };
    let code = match &error {
        Error::Memory { .. } => OUT_OF_MEMORY,
        Error::Limit {
            limit: Limit::LaunchBounds,
            ..
        } => OUT_OF_RESOURCES,
        Error::Fault(_) => ILLEGAL_ADDRESS,
        _ => INVALID_VALUE,
    };
    *lock(&shim().why) = CString::new(error.to_string()).unwrap_or_default();
    code
}

impl Shim {
    pub(crate) fn new_stream(&self) -> usize {
        // 0 is the driver's default stream.
        1 + self.streams.fetch_add(1, Ordering::Relaxed)
    }

    /// The default one and all that were made.
    pub(crate) fn streams(&self) -> impl Iterator<Item = usize> {
        0..=self.streams.load(Ordering::Relaxed)
    }

    /// Whether something of a library is on the stream.
    pub(crate) fn held(&self, stream: Stream) -> bool {
        lock(&self.held).get(&stream).is_some_and(|held| *held > 0)
    }

    pub(crate) fn hold(&self, stream: Stream, more: bool) {
        let mut all = lock(&self.held);
        let held = all.entry(stream).or_default();
        *held = if more {
            *held + 1
        } else {
            held.saturating_sub(1)
        };
    }

    pub(crate) fn left(&self) -> usize {
        let used: usize = lock(&self.allocated).values().sum();
        self.memory.saturating_sub(used)
    }

    pub(crate) fn alloc(&self, bytes: usize) -> Result<u64, Code> {
        if bytes == 0 {
            return Err(INVALID_VALUE);
        }
        if bytes > self.left() {
            return Err(OUT_OF_MEMORY);
        }
        match self.device.alloc("device memory", bytes) {
            Ok(ptr) => {
                lock(&self.allocated).insert(ptr, bytes);
                Ok(ptr)
            }
            Err(error) => Err(code_of(Err(error))),
        }
    }

    pub(crate) fn freed(&self, ptr: u64) {
        lock(&self.allocated).remove(&ptr);
    }

    /// A module of these kernels; lives as long as the process.
    pub(crate) fn load(&self, kernels: Vec<KernelInfo>) -> *mut Module {
        let functions = kernels.into_iter().map(|info| Function {
            host_module: self.device.module_of(&info.name).unwrap_or_default().into(),
            info,
            allowed: AtomicU32::new(0),
            loaded: AtomicBool::new(true),
        });
        let functions = functions.map(|f| &*Box::leak(Box::new(f))).collect();
        Box::into_raw(Box::new(Module { functions }))
    }

    pub(crate) fn launch(&self, stream: Stream, call: &Call<'_>) -> Code {
        code_of(self.device.launch(stream, call))
    }
}

#[derive(Debug, Default)]
pub struct Event(Mutex<Option<(EmulatedEvent, std::time::Instant)>>);

impl Event {
    pub(crate) fn lock(&self) -> MutexGuard<'_, Option<(EmulatedEvent, std::time::Instant)>> {
        lock(&self.0)
    }
}

pub struct Module {
    functions: Vec<&'static Function>,
}

impl Module {
    pub(crate) fn function(&self, name: &str) -> Option<*const Function> {
        let found = self.functions.iter().find(|f| f.info.name == name)?;
        Some(&raw const **found)
    }

    pub(crate) fn unload(&self) -> Code {
        for function in &self.functions {
            function.loaded.store(false, Ordering::Relaxed);
        }
        0
    }
}

/// A kernel of a loaded cubin.
pub struct Function {
    pub(crate) info: KernelInfo,
    /// The emulator's file of that kernel.
    pub(crate) host_module: String,
    allowed: AtomicU32,
    loaded: AtomicBool,
}

impl Function {
    pub(crate) fn allow(&self, bytes: u32) {
        self.allowed.store(bytes, Ordering::Relaxed);
    }

    pub(crate) fn allowed(&self) -> u32 {
        self.allowed.load(Ordering::Relaxed)
    }

    pub(crate) fn is_loaded(&self) -> bool {
        self.loaded.load(Ordering::Relaxed)
    }

    fn args(&self, read: impl Fn(usize) -> u64) -> Option<Vec<Arg>> {
        (0..self.info.params.len())
            .map(|i| arg(read(i), self.info.params[i]))
            .collect()
    }

    /// Arguments from pointers to them: as many as the cubin says, of the lengths it says.
    pub(crate) unsafe fn args_at(&self, params: *mut *mut c_void) -> Option<Vec<Arg>> {
        if params.is_null() && !self.info.params.is_empty() {
            return None;
        }
        self.args(|i| {
            let mut bits = [0u8; 8];
            let bytes = (self.info.params[i] as usize).min(8);
            // SAFETY: cuLaunchKernel's own contract.
            unsafe {
                let from: *const u8 = (*params.add(i)).cast();
                core::ptr::copy_nonoverlapping(from, bits.as_mut_ptr(), bytes);
            }
            u64::from_le_bytes(bits)
        })
    }

    /// Arguments from a block whose length is given: it must be the cubin's.
    pub(crate) unsafe fn args_in(&self, extra: *mut *mut c_void) -> Option<Vec<Arg>> {
        let (mut block, mut len) = (core::ptr::null::<u8>(), None);
        let mut at = extra;
        // SAFETY: pairs of a key and a pointer up to a null, as cuda.h says.
        unsafe {
            while !(*at).is_null() {
                match *at as usize {
                    1 => block = (*at.add(1)).cast(),
                    2 => len = Some(*(*at.add(1)).cast::<usize>()),
                    _ => return None,
                }
                at = at.add(2);
            }
        }
        let (offsets, params) = (&self.info.offsets, &self.info.params);
        let end = offsets.iter().zip(params).map(|(o, p)| (o + p) as usize);
        if len != Some(end.max().unwrap_or(0)) || block.is_null() {
            let why = format!("{}: a parameter block of {len:?} bytes", self.info.name);
            *lock(&shim().why) = CString::new(why).unwrap_or_default();
            return None;
        }
        self.args(|i| {
            let mut bits = [0u8; 8];
            let (at, bytes) = (offsets[i] as usize, (params[i] as usize).min(8));
            // SAFETY: within the block.
            unsafe { core::ptr::copy_nonoverlapping(block.add(at), bits.as_mut_ptr(), bytes) };
            u64::from_le_bytes(bits)
        })
    }
}

/// The kernels of a cubin in memory, whose length its own headers give.
///
/// # Safety
/// `image` points to a whole file.
pub(crate) unsafe fn read_image(image: *const u8) -> Option<Vec<KernelInfo>> {
    // SAFETY: an ELF header has 64 bytes, and says where its tables lie.
    let number = |at: usize, bytes: usize| unsafe {
        let field = core::slice::from_raw_parts(image.add(at), bytes);
        field.iter().rev().fold(0u64, |n, &b| n << 8 | u64::from(b)) as usize
    };
    if number(0, 4) != 0x464c_457f {
        return None;
    }
    let (sections, each, count) = (number(40, 8), number(58, 2), number(60, 2));
    let mut end = (sections + each * count).max(number(32, 8) + number(54, 2) * number(56, 2));
    for i in 0..count {
        let header = sections + i * each;
        if number(header + 4, 4) != 8 {
            end = end.max(number(header + 24, 8) + number(header + 32, 8));
        }
    }
    // SAFETY: the file reaches as far as its last table or section.
    cubin::kernels(unsafe { core::slice::from_raw_parts(image, end) })
}

pub(crate) fn name(code: Code) -> &'static CStr {
    match code {
        0 => c"CUDA_SUCCESS",
        INVALID_VALUE => c"CUDA_ERROR_INVALID_VALUE",
        OUT_OF_MEMORY => c"CUDA_ERROR_OUT_OF_MEMORY",
        NO_DEVICE => c"CUDA_ERROR_NO_DEVICE",
        INVALID_DEVICE => c"CUDA_ERROR_INVALID_DEVICE",
        INVALID_IMAGE => c"CUDA_ERROR_INVALID_IMAGE",
        INVALID_CONTEXT => c"CUDA_ERROR_INVALID_CONTEXT",
        INVALID_HANDLE => c"CUDA_ERROR_INVALID_HANDLE",
        NOT_FOUND => c"CUDA_ERROR_NOT_FOUND",
        ILLEGAL_ADDRESS => c"CUDA_ERROR_ILLEGAL_ADDRESS",
        OUT_OF_RESOURCES => c"CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES",
        _ => c"CUDA_ERROR_UNKNOWN",
    }
}

/// What happened last, of codes that have a reason of their own; lives as long as the process.
pub(crate) fn text(code: Code) -> &'static CStr {
    match code {
        NO_DEVICE => c"no CUDA-capable device is detected",
        INVALID_VALUE | ILLEGAL_ADDRESS | OUT_OF_RESOURCES => {
            Box::leak(lock(&shim().why).clone().into_boxed_c_str())
        }
        _ => c"",
    }
}
