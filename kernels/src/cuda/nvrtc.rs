//! NVRTC, the run-time compiler: loaded when the first kernel is in no cache.

use std::ffi::{CString, c_char, c_int, c_void};
use std::path::{Path, PathBuf};
use std::string::{String, ToString};
use std::vec::Vec;
use std::{env, format, fs, vec};

use libloading::Library;

use super::CudaError;
use super::driver::reason;
use super::source::{Header, Source};

type Program = *mut c_void;

/// The functions of nvrtc.h that are used.
pub(super) struct Nvrtc {
    version: (u32, u32),
    supported: Vec<u32>,
    create: unsafe extern "C" fn(
        *mut Program,
        *const c_char,
        *const c_char,
        c_int,
        *const *const c_char,
        *const *const c_char,
    ) -> c_int,
    destroy: unsafe extern "C" fn(*mut Program) -> c_int,
    compile: unsafe extern "C" fn(Program, c_int, *const *const c_char) -> c_int,
    cubin: Part,
    log: Part,
    _library: Library,
    _builtins: Vec<Library>,
}

/// How long a text is, and the text.
#[derive(Clone, Copy)]
struct Part {
    len: unsafe extern "C" fn(Program, *mut usize) -> c_int,
    get: unsafe extern "C" fn(Program, *mut c_char) -> c_int,
}

impl core::fmt::Debug for Nvrtc {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(f, "Nvrtc {}.{}", self.version.0, self.version.1)
    }
}

impl Nvrtc {
    /// The library that `QUINTET_NVRTC` names, or the one that the loader finds.
    pub(super) fn load() -> Result<Self, CudaError> {
        let names: Vec<PathBuf> = match env::var_os("QUINTET_NVRTC") {
            Some(path) => vec![path.into()],
            None if cfg!(windows) => ["nvrtc64_130_0.dll", "nvrtc64_120_0.dll"]
                .map(PathBuf::from)
                .into(),
            None => ["libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so"]
                .map(PathBuf::from)
                .into(),
        };
        let mut why = String::new();
        for name in &names {
            let beside = builtins(name);
            // SAFETY: a compiler's library, trusted as whoever installed it.
            match unsafe { Library::new(name) } {
                // SAFETY: the signatures are those of nvrtc.h.
                Ok(library) => return unsafe { Self::of(library, beside) },
                Err(error) if why.is_empty() => why = reason(&error),
                Err(_) => {}
            }
        }
        Err(CudaError::NoNvrtc { why })
    }

    /// # Safety
    /// `library` is NVRTC.
    unsafe fn of(library: Library, builtins: Vec<Library>) -> Result<Self, CudaError> {
        let absent = |error: libloading::Error| CudaError::NoNvrtc {
            why: reason(&error),
        };
        macro_rules! find {
            ($name:literal) => {
                // SAFETY: it is given the type that nvrtc.h declares for this symbol.
                *unsafe { library.get($name) }.map_err(absent)?
            };
        }
        let part = |len: &str, get: &str| -> Result<Part, CudaError> {
            // SAFETY: nvrtc.h declares every pair of a length and a text alike.
            let len = *unsafe { library.get(len.as_bytes()) }.map_err(absent)?;
            let get = *unsafe { library.get(get.as_bytes()) }.map_err(absent)?;
            Ok(Part { len, get })
        };
        let version: unsafe extern "C" fn(*mut c_int, *mut c_int) -> c_int = find!("nvrtcVersion");
        let count: unsafe extern "C" fn(*mut c_int) -> c_int = find!("nvrtcGetNumSupportedArchs");
        let list: unsafe extern "C" fn(*mut c_int) -> c_int = find!("nvrtcGetSupportedArchs");
        let (mut major, mut minor, mut n) = (0, 0, 0);
        // SAFETY: numbers are written to locals; the list has room for as many as were counted.
        let supported = unsafe {
            version(&raw mut major, &raw mut minor);
            count(&raw mut n);
            let mut archs = vec![0; n.max(0) as usize];
            list(archs.as_mut_ptr());
            archs
        };
        Ok(Self {
            version: (major as u32, minor as u32),
            supported: supported.into_iter().map(|a| a as u32).collect(),
            create: find!("nvrtcCreateProgram"),
            destroy: find!("nvrtcDestroyProgram"),
            compile: find!("nvrtcCompileProgram"),
            cubin: part("nvrtcGetCUBINSize", "nvrtcGetCUBIN")?,
            log: part("nvrtcGetProgramLogSize", "nvrtcGetProgramLog")?,
            _library: library,
            _builtins: builtins,
        })
    }

    /// Its release, such as 13.0.
    pub(super) fn version(&self) -> String {
        format!("{}.{}", self.version.0, self.version.1)
    }

    /// Whether it makes machine code for the architecture.
    pub(super) fn knows(&self, arch: u32) -> bool {
        self.supported.contains(&arch)
    }

    /// Compiles to a cubin.
    pub(super) fn compile(&self, source: &Source<'_>) -> Result<Vec<u8>, CudaError> {
        let text = c_string(source.text());
        let name = c_string(&format!("{}.cu", source.module));
        let options: Vec<CString> = source.options().iter().map(|o| c_string(o)).collect();
        let headers: Vec<[CString; 2]> = Header::ALL
            .iter()
            .map(|h| [c_string(h.text), c_string(h.name)])
            .collect();
        let of = |i: usize| -> Vec<_> { headers.iter().map(|h| h[i].as_ptr()).collect() };
        let (texts, names) = (of(0), of(1));
        let flags: Vec<_> = options.iter().map(|o| o.as_ptr()).collect();
        let mut program = core::ptr::null_mut();
        // SAFETY: the strings and lists outlive the calls, and the program is destroyed once.
        unsafe {
            let count = headers.len() as c_int;
            let (texts, names) = (texts.as_ptr(), names.as_ptr());
            let code = (self.create)(
                &raw mut program,
                text.as_ptr(),
                name.as_ptr(),
                count,
                texts,
                names,
            );
            if code != 0 {
                return Err(failed(source, format!("NVRTC error {code}")));
            }
            let code = (self.compile)(program, flags.len() as c_int, flags.as_ptr());
            let bytes = get(program, if code == 0 { self.cubin } else { self.log });
            (self.destroy)(&raw mut program);
            if code != 0 {
                let log = String::from_utf8_lossy(&bytes);
                return Err(failed(source, log.trim_end_matches('\0').to_string()));
            }
            Ok(bytes)
        }
    }
}

/// NVRTC looks for its second library by name alone: from a folder that the loader does not know it
/// is found where it has been loaded before.
fn builtins(library: &Path) -> Vec<Library> {
    let folder = library
        .parent()
        .filter(|dir| dir.components().next().is_some());
    let entries = folder.and_then(|dir| fs::read_dir(dir).ok());
    let named = |path: &PathBuf| {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        name.starts_with("libnvrtc-builtins.so") || name.starts_with("nvrtc-builtins64")
    };
    let paths = entries.into_iter().flatten().flatten().map(|e| e.path());
    // SAFETY: as the library itself.
    let load = |path| unsafe { Library::new(path) }.ok();
    paths.filter(named).filter_map(load).collect()
}

/// # Safety
/// `program` has been compiled by the library that `part` is of.
unsafe fn get(program: Program, part: Part) -> Vec<u8> {
    let mut len = 0;
    // SAFETY: there is room for as many bytes as the library says.
    unsafe {
        (part.len)(program, &raw mut len);
        let mut bytes = vec![0u8; len];
        (part.get)(program, bytes.as_mut_ptr().cast());
        bytes
    }
}

fn failed(source: &Source<'_>, log: String) -> CudaError {
    CudaError::Compile {
        kernel: source.kernel.unwrap_or(source.module).to_string(),
        arch: source.arch,
        log,
    }
}

/// Sources and names hold no zero byte; what follows one would be left out.
fn c_string(text: &str) -> CString {
    let end = text.find('\0').unwrap_or(text.len());
    CString::new(&text[..end]).unwrap_or_default()
}
