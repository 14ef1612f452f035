//! Kernels by name: found or compiled once, then loaded.

use alloc::sync::Arc;
use core::sync::atomic::{AtomicU32, AtomicUsize, Ordering};
use std::collections::HashMap;
use std::ffi::CString;
use std::format;
use std::string::{String, ToString};
use std::sync::{Mutex, OnceLock, PoisonError};
use std::vec::Vec;

use cudarc::driver::sys::{CUfunction, CUmodule};

use super::CudaError;
use super::cache::{Cache, stem};
use super::cubin::{self, KernelInfo};
use super::driver::{Code, Driver};
use super::nvrtc::Nvrtc;
use super::source::{CudaModule, Source};
use crate::Error;

/// `CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES`
const MAX_DYNAMIC_SHARED: i32 = 8;
/// What a kernel may use without being asked for.
const USUAL_SHARED: u32 = 48 << 10;

/// A loaded kernel.
pub(super) struct Kernel {
    module: CUmodule,
    function: CUfunction,
    info: KernelInfo,
    /// Bytes of dynamic shared memory that it may use.
    shared: AtomicU32,
}

// SAFETY: handles of the driver, which may be used from any thread.
unsafe impl Send for Kernel {}
unsafe impl Sync for Kernel {}

impl core::fmt::Debug for Kernel {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.write_str(&self.info.name)
    }
}

impl Kernel {
    pub(super) fn load(
        names: &Driver,
        driver: &Driver,
        cubin: &[u8],
        function: &str,
    ) -> Result<Self, CudaError> {
        let unusable = |why: String| CudaError::Cubin {
            kernel: function.to_string(),
            why,
        };
        let known = cubin::kernels(cubin)
            .ok_or_else(|| unusable("it is no cubin".into()))?
            .into_iter()
            .find(|k| k.name == function);
        let info = known.ok_or_else(|| unusable("it is another kernel's".into()))?;
        let name = CString::new(function).unwrap_or_default();
        let (mut module, mut found) = (core::ptr::null_mut(), core::ptr::null_mut());
        // SAFETY: the bytes are a whole cubin; handles are written.
        let code = unsafe {
            match (driver.module_load)(&raw mut module, cubin.as_ptr().cast()) {
                0 => (driver.module_function)(&raw mut found, module, name.as_ptr()),
                code => code,
            }
        };
        if code != 0 {
            return Err(unusable(names.sentence(code)));
        }
        Ok(Self {
            module,
            function: found,
            info,
            shared: AtomicU32::new(USUAL_SHARED),
        })
    }

    pub(super) fn info(&self) -> &KernelInfo {
        &self.info
    }

    pub(super) fn function(&self) -> CUfunction {
        self.function
    }

    /// Lets the kernel use `bytes` of dynamic shared memory from now on.
    ///
    /// # Safety
    /// The device's context is current.
    pub(super) unsafe fn allow_shared(&self, driver: &Driver, bytes: u32) -> Code {
        if bytes <= self.shared.load(Ordering::Relaxed) {
            return 0;
        }
        // SAFETY: the function is loaded.
        let code =
            unsafe { (driver.function_set)(self.function, MAX_DYNAMIC_SHARED, bytes as i32) };
        if code == 0 {
            self.shared.fetch_max(bytes, Ordering::Relaxed);
        }
        code
    }
}

type Slot = Arc<Mutex<Option<Arc<Kernel>>>>;

/// The kernels of one device.
pub(super) struct Kernels {
    arch: u32,
    /// Beside the crate's own.
    modules: &'static [CudaModule],
    cache: Cache,
    nvrtc: OnceLock<Result<Nvrtc, CudaError>>,
    loaded: Mutex<HashMap<String, HashMap<String, Slot>>>,
    compiled: AtomicUsize,
}

impl Kernels {
    pub(super) fn new(arch: u32, modules: &'static [CudaModule]) -> Self {
        Self {
            arch,
            modules,
            cache: Cache::from_env(),
            nvrtc: OnceLock::new(),
            loaded: Mutex::default(),
            compiled: AtomicUsize::new(0),
        }
    }

    pub(super) fn compiled(&self) -> usize {
        self.compiled.load(Ordering::Relaxed)
    }

    pub(super) fn loaded(&self) -> Vec<String> {
        let map = self.loaded.lock().unwrap_or_else(PoisonError::into_inner);
        let mut lines = Vec::new();
        for (module, kernels) in map.iter() {
            for slot in kernels.values() {
                let kernel = slot.lock().unwrap_or_else(PoisonError::into_inner);
                if let Some(kernel) = kernel.as_ref() {
                    let (info, arch) = (&kernel.info, self.arch);
                    lines.push(format!(
                        "{module}: {} for sm_{arch}, {} arguments, {} bytes of static shared memory, at most {} threads",
                        info.name,
                        info.params.len(),
                        info.shared,
                        info.max_threads
                    ));
                }
            }
        }
        lines.sort();
        lines
    }

    /// The kernel, loaded by `load` where it was not yet. Ranks that ask for one at the same time
    /// wait for each other, not for those who ask for another.
    pub(super) fn get(
        &self,
        (module, function): (&str, &str),
        load: impl FnOnce(&[u8], &str) -> Result<Kernel, CudaError>,
    ) -> Result<Arc<Kernel>, Error> {
        let slot = {
            let mut map = self.loaded.lock().unwrap_or_else(PoisonError::into_inner);
            match map.get(module).and_then(|m| m.get(function)) {
                Some(slot) => slot.clone(),
                None => {
                    let kernels = map.entry(module.to_string()).or_default();
                    kernels.entry(function.to_string()).or_default().clone()
                }
            }
        };
        let mut slot = slot.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(kernel) = slot.as_ref() {
            return Ok(kernel.clone());
        }
        let kernel = Arc::new(load(&self.cubin(module, function)?, function)?);
        Ok(slot.insert(kernel).clone())
    }

    /// A kept cubin, else a compiled one.
    fn cubin(&self, module: &str, function: &str) -> Result<Vec<u8>, Error> {
        let source = |arch| {
            Source::of(module, Some(function), arch, self.modules).ok_or_else(|| Error::NoKernel {
                module: module.to_string(),
                function: function.to_string(),
            })
        };
        // Machine code of the same major architecture and a lower minor one runs too.
        let archs = || (self.arch / 10 * 10..=self.arch).rev();
        for arch in archs() {
            if let Some(bytes) = self.cache.given(&stem(&source(arch)?)) {
                return Ok(bytes);
            }
        }
        let nvrtc = match self.nvrtc.get_or_init(Nvrtc::load) {
            Ok(nvrtc) => nvrtc,
            // What another run left is as good as compiled.
            Err(missing) => {
                for arch in archs() {
                    if let Some(bytes) = self.cache.find(&stem(&source(arch)?), None) {
                        return Ok(bytes);
                    }
                }
                return Err(missing.clone().into());
            }
        };
        let Some(arch) = archs().find(|&arch| nvrtc.knows(arch)) else {
            let (arch, version) = (self.arch, nvrtc.version());
            return Err(CudaError::UnknownArch { arch, version }.into());
        };
        let source = source(arch)?;
        let compile = || {
            self.compiled.fetch_add(1, Ordering::Relaxed);
            nvrtc.compile(&source)
        };
        let version = nvrtc.version();
        let cubin = self.cache.find_or(&stem(&source), &version, compile)?;
        match cubin::kernels(&cubin) {
            // The name was wrong: nothing was compiled.
            Some(kernels) if kernels.is_empty() => Err(Error::NoKernel {
                module: module.to_string(),
                function: function.to_string(),
            }),
            _ => Ok(cubin),
        }
    }

    /// Unloads all.
    pub(super) fn unload(&self, driver: &Driver) {
        let map = self.loaded.lock().unwrap_or_else(PoisonError::into_inner);
        for slot in map.values().flat_map(|m| m.values()) {
            if let Some(kernel) = slot.lock().unwrap_or_else(PoisonError::into_inner).take() {
                // SAFETY: loaded once; nothing runs any more.
                unsafe { (driver.module_unload)(kernel.module) };
            }
        }
    }
}
