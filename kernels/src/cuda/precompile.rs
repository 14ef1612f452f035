//! Cubins of all kernels into a folder, with NVRTC alone: no GPU, no driver.

use core::sync::atomic::{AtomicUsize, Ordering};
use std::fs;
use std::path::Path;
use std::string::{String, ToString};
use std::sync::Mutex;
use std::thread;
use std::vec::Vec;

use super::CudaError;
use super::cache::{Cache, stem};
use super::cubin;
use super::nvrtc::Nvrtc;
use super::source::{Source, modules};
use crate::Error;
use crate::launch::Arch;

/// What [`precompile`] made.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Precompiled {
    /// Kernels in the folder, counted for each architecture.
    pub kernels: usize,
    /// Of these, compiled now.
    pub compiled: usize,
    /// Bytes of machine code.
    pub bytes: u64,
}

/// Puts the machine code of every kernel for `archs` into `out`, for `QUINTET_CUBINS` to name:
/// programs then need no NVRTC. What is there already stays. `wanted(module, kernel)` says which.
///
/// # Errors
/// [`Error::Cuda`] where NVRTC is not there or does not know an architecture, a kernel does not
/// compile, or the folder can not be written.
pub fn precompile(
    archs: &[Arch],
    out: &Path,
    wanted: impl Fn(&str, &str) -> bool,
) -> Result<Precompiled, Error> {
    let nvrtc = Nvrtc::load()?;
    if let Some(arch) = archs.iter().find(|a| !nvrtc.knows(a.0)) {
        let (arch, version) = (arch.0, nvrtc.version());
        return Err(CudaError::UnknownArch { arch, version }.into());
    }
    fs::create_dir_all(out).map_err(|error| CudaError::Write {
        path: out.display().to_string(),
        why: error.to_string(),
    })?;
    let mut jobs = Vec::new();
    for module in modules() {
        for kernel in names(&nvrtc, module, archs)? {
            if wanted(module, &kernel) {
                jobs.extend(archs.iter().map(|arch| (module, kernel.clone(), arch.0)));
            }
        }
    }
    let (next, done) = (AtomicUsize::new(0), Mutex::new(Precompiled::default()));
    let (cache, version) = (Cache::folder(out), nvrtc.version());
    let work = || -> Result<(), CudaError> {
        while let Some((module, kernel, arch)) = jobs.get(next.fetch_add(1, Ordering::Relaxed)) {
            let Some(source) = Source::of(module, Some(kernel), *arch, &[]) else {
                continue;
            };
            let mut compiled = 0;
            let bytes = cache.find_or(&stem(&source), &version, || {
                compiled = 1;
                nvrtc.compile(&source)
            })?;
            if cache.find(&stem(&source), Some(&version)).is_none() {
                return Err(CudaError::Write {
                    path: out.display().to_string(),
                    why: std::format!("the file of {kernel} is not there after it was written"),
                });
            }
            let mut done = done
                .lock()
                .unwrap_or_else(std::sync::PoisonError::into_inner);
            done.kernels += 1;
            done.compiled += compiled;
            done.bytes += bytes.len() as u64;
        }
        Ok(())
    };
    let threads = thread::available_parallelism().map_or(1, usize::from);
    thread::scope(|scope| {
        let workers: Vec<_> = (0..threads).map(|_| scope.spawn(work)).collect();
        let joined = workers.into_iter().map(|w| w.join().unwrap_or(Ok(())));
        joined.collect::<Result<(), CudaError>>()
    })?;
    remove_locks(out);
    let done = done.into_inner();
    Ok(done.unwrap_or_else(std::sync::PoisonError::into_inner))
}

/// The kernels of a module: NVRTC compiles empty ones of their names.
fn names(nvrtc: &Nvrtc, module: &str, archs: &[Arch]) -> Result<Vec<String>, CudaError> {
    let Some(source) = archs
        .first()
        .and_then(|a| Source::of(module, None, a.0, &[]))
    else {
        return Ok(Vec::new());
    };
    let found = cubin::kernels(&nvrtc.compile(&source)?);
    let mut names: Vec<String> = found.into_iter().flatten().map(|k| k.name).collect();
    names.sort();
    Ok(names)
}

/// Nobody compiles into the folder any more.
fn remove_locks(out: &Path) {
    for entry in fs::read_dir(out).into_iter().flatten().flatten() {
        if entry.path().extension().is_some_and(|x| x == "lock") {
            let _ = fs::remove_file(entry.path());
        }
    }
}
