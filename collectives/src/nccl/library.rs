//! Finding NCCL, and the symbols taken from it.
//!
//! ```text
//! QUINTET_NCCL_LIB, else   site-packages/nvidia/nccl/lib/libnccl.so.2   (the pip wheel's folder, where one is found)
//!                          libnccl.so.2, libnccl.so                     (where the system looks)
//! found -> ncclGetVersion: 2.14 or newer? -> every symbol there? -> Library, never unloaded
//! ```
//!
//! Types are cudarc's; its loader is not used: it looks for no `libnccl.so.2`, which is all that the wheel and
//! most systems have, and panics where nothing is found. Results come as plain numbers, since a newer
//! library may know more of them than an enum here.

#![allow(unsafe_code)] // to load a library is to trust it

use std::{
    ffi::{CStr, c_char, c_int, c_void},
    format,
    path::{Path, PathBuf},
    string::{String, ToString},
    sync::Arc,
    vec::Vec,
};

use cudarc::nccl::sys::{
    cudaStream_t, ncclComm_t, ncclConfig_t, ncclDataType_t, ncclRedOp_t, ncclUniqueId,
};

use crate::{Error, Result};

/// The oldest version that is taken: the first with communicators that do not block (2.14).
pub const OLDEST: Version = Version(21400);

/// The first version that lets two ranks have one GPU, where `NCCL_MULTI_RANK_GPU_ENABLE=1` asks for it (2.30).
pub const SHARED_GPUS: Version = Version(23000);

/// The variable that names the library.
pub const VARIABLE: &str = "QUINTET_NCCL_LIB";

/// A version as NCCL numbers it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Version(pub i32);

impl core::fmt::Display for Version {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        // Up to 2.8 a major version is a thousand, later ten thousand.
        let unit = if self.0 < 10_000 { 1000 } else { 10_000 };
        let (major, rest) = (self.0 / unit, self.0 % unit);
        write!(f, "{major}.{}.{}", rest / 100, rest % 100)
    }
}

macro_rules! symbols {
    ($($name:ident: fn($($arg:ty),*) -> $out:ty;)*) => {
        /// The functions that are called, by their names in nccl.h.
        #[allow(non_snake_case)]
        pub(super) struct Symbols {
            $(pub(super) $name: unsafe extern "C" fn($($arg),*) -> $out,)*
        }

        impl Symbols {
            /// Their names.
            const NAMES: &'static [&'static str] = &["ncclGetVersion", $(stringify!($name)),*];

            /// All of them, or the name of the first that is not there.
            fn of(library: &libloading::Library) -> Result<Self, &'static str> {
                Ok(Self { $(
                    // SAFETY: the type is that of nccl.h, which has kept it since the oldest version taken.
                    $name: *unsafe { library.get(concat!(stringify!($name), "\0").as_bytes()) }
                        .map_err(|_| stringify!($name))?,
                )* })
            }
        }
    };
}

symbols! {
    ncclGetErrorString: fn(c_int) -> *const c_char;
    ncclGetLastError: fn(ncclComm_t) -> *const c_char;
    ncclGetUniqueId: fn(*mut ncclUniqueId) -> c_int;
    ncclCommInitRankConfig: fn(*mut ncclComm_t, c_int, ncclUniqueId, c_int, *mut ncclConfig_t) -> c_int;
    ncclCommGetAsyncError: fn(ncclComm_t, *mut c_int) -> c_int;
    ncclCommFinalize: fn(ncclComm_t) -> c_int;
    ncclCommDestroy: fn(ncclComm_t) -> c_int;
    ncclCommAbort: fn(ncclComm_t) -> c_int;
    ncclCommCount: fn(ncclComm_t, *mut c_int) -> c_int;
    ncclCommUserRank: fn(ncclComm_t, *mut c_int) -> c_int;
    ncclAllReduce: fn(*const c_void, *mut c_void, usize, ncclDataType_t, ncclRedOp_t, ncclComm_t, cudaStream_t) -> c_int;
    ncclReduceScatter: fn(*const c_void, *mut c_void, usize, ncclDataType_t, ncclRedOp_t, ncclComm_t, cudaStream_t) -> c_int;
    ncclAllGather: fn(*const c_void, *mut c_void, usize, ncclDataType_t, ncclComm_t, cudaStream_t) -> c_int;
    ncclBroadcast: fn(*const c_void, *mut c_void, usize, ncclDataType_t, c_int, ncclComm_t, cudaStream_t) -> c_int;
    ncclReduce: fn(*const c_void, *mut c_void, usize, ncclDataType_t, ncclRedOp_t, c_int, ncclComm_t, cudaStream_t) -> c_int;
    ncclSend: fn(*const c_void, usize, ncclDataType_t, c_int, ncclComm_t, cudaStream_t) -> c_int;
    ncclRecv: fn(*mut c_void, usize, ncclDataType_t, c_int, ncclComm_t, cudaStream_t) -> c_int;
    ncclGroupStart: fn() -> c_int;
    ncclGroupEnd: fn() -> c_int;
}

/// Of the stand-in: how many kernels are on a stream.
type OnHost = unsafe extern "C" fn(u64) -> u64;

/// What it answers where it works on a device's memory after all.
const ELSEWHERE: u64 = u64::MAX;

/// NCCL, loaded.
pub struct Library {
    pub(super) symbols: Symbols,
    version: Version,
    path: String,
    on_host: Option<OnHost>,
    /// Never unloaded: it has threads.
    _library: core::mem::ManuallyDrop<libloading::Library>,
}

impl core::fmt::Debug for Library {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(f, "NCCL {} at {}", self.version, self.path)
    }
}

impl Library {
    /// The library that `QUINTET_NCCL_LIB` names, else the first that is found.
    ///
    /// # Errors
    /// [`Error::Library`] where none is found, or the one found cannot be used.
    pub fn open() -> Result<Arc<Self>> {
        let variable = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty());
        let tried = match variable(VARIABLE) {
            Some(path) => std::vec![PathBuf::from(path)],
            None => {
                let roots = ["VIRTUAL_ENV", "CONDA_PREFIX", "HOME"]
                    .map(|name| variable(name).map(PathBuf::from));
                let mut tried = wheels(&roots);
                tried.extend(["libnccl.so.2", "libnccl.so"].map(PathBuf::from));
                tried
            }
        };
        Self::first(&tried)
    }

    /// The first of these that is there. One that is there but cannot be used is an error.
    ///
    /// # Errors
    /// As [`Library::open`].
    pub fn first(tried: &[PathBuf]) -> Result<Arc<Self>> {
        let mut reason = String::new();
        for path in tried {
            // SAFETY: its initialisers run; whoever has it found, or named it, trusts it.
            match unsafe { libloading::Library::new(path) } {
                Ok(library) => return Self::checked(path, library),
                Err(error) if path.exists() => {
                    return Err(Error::Library(format!(
                        "NCCL at {} cannot be loaded: {}",
                        path.display(),
                        said(&error)
                    )));
                }
                Err(error) => reason = said(&error),
            }
        }
        let tried: Vec<String> = tried
            .iter()
            .map(|path| path.display().to_string())
            .collect();
        Err(Error::Library(format!(
            "NCCL is not found as {} ({reason}); pip install nvidia-nccl-cu13 has it, and {VARIABLE} says where it lies",
            tried.join(", ")
        )))
    }

    fn checked(path: &Path, library: libloading::Library) -> Result<Arc<Self>> {
        let unusable = |name: &str| {
            Error::Library(format!(
                "{} is no NCCL that can be used: it has no {name}",
                path.display()
            ))
        };
        // Asked first, since it is age that lets others be missing.
        type Get = unsafe extern "C" fn(*mut c_int) -> c_int;
        let mut number = 0;
        // SAFETY: the function has had this type in every version, and writes one int.
        let code = unsafe {
            let get = library.get::<Get>(b"ncclGetVersion\0");
            get.map_err(|_| unusable("ncclGetVersion"))?(&mut number)
        };
        let version = Version(number);
        if code != 0 || version < OLDEST {
            return Err(Error::Library(format!(
                "NCCL {version} at {} is too old, {OLDEST} or newer is needed; pip install nvidia-nccl-cu13 has it",
                path.display()
            )));
        }
        let symbols = Symbols::of(&library).map_err(unusable)?;
        // SAFETY: nobody but the stand-in has the symbol, and there it has this type.
        let on_host = unsafe { library.get::<OnHost>(b"quintetNcclOnHost\0") };
        let on_host = on_host.ok().map(|symbol| *symbol);
        // SAFETY: any number is answered.
        let on_host = on_host.filter(|waiting| unsafe { waiting(0) } != ELSEWHERE);
        Ok(Arc::new(Self {
            symbols,
            version,
            path: path.display().to_string(),
            on_host,
            _library: core::mem::ManuallyDrop::new(library),
        }))
    }

    /// Its version.
    #[must_use]
    pub fn version(&self) -> Version {
        self.version
    }

    /// Where it was found.
    #[must_use]
    pub fn path(&self) -> &str {
        &self.path
    }

    /// Whether it works on host memory, any number of ranks a device: the stand-in of the tests, which says so by
    /// a symbol of its own.
    #[must_use]
    pub fn on_host(&self) -> bool {
        self.on_host.is_some()
    }

    /// The names of the functions that are taken from it.
    #[must_use]
    pub fn symbols() -> &'static [&'static str] {
        Symbols::NAMES
    }

    /// Kernels that are still on a stream of a library on host memory; none of any other.
    pub(super) fn waiting(&self, stream: u64) -> u64 {
        // SAFETY: any number is answered.
        self.on_host.map_or(0, |waiting| unsafe { waiting(stream) })
    }

    /// A fresh id for ranks to meet by.
    pub(super) fn unique_id(&self) -> Result<ncclUniqueId, Fault> {
        let mut id = ncclUniqueId { internal: [0; 128] };
        // SAFETY: it writes one id.
        let code = unsafe { (self.symbols.ncclGetUniqueId)(&mut id) };
        self.check("ncclGetUniqueId", code, core::ptr::null_mut())
            .map(|_| id)
    }

    /// True for success, false for an operation that goes on, else what the library says.
    pub(super) fn check(
        &self,
        call: &'static str,
        code: c_int,
        comm: ncclComm_t,
    ) -> Result<bool, Fault> {
        match code {
            SUCCESS => return Ok(true),
            IN_PROGRESS => return Ok(false),
            _ => {}
        }
        let text = |pointer: *const c_char| {
            if pointer.is_null() {
                return String::new();
            }
            // SAFETY: NCCL's texts end with a zero and stay until this thread's next call.
            let text = unsafe { CStr::from_ptr(pointer) };
            text.to_string_lossy().trim().to_string()
        };
        // SAFETY: any number is answered.
        let said = text(unsafe { (self.symbols.ncclGetErrorString)(code) });
        // SAFETY: the communicator is a live one or null, which is answered too.
        let last = text(unsafe { (self.symbols.ncclGetLastError)(comm) });
        Err(Fault {
            call,
            code,
            said,
            last,
        })
    }
}

/// `ncclSuccess`.
pub(super) const SUCCESS: c_int = 0;
/// `ncclInProgress`.
pub(super) const IN_PROGRESS: c_int = 7;

/// What NCCL answered, with its last words.
#[derive(Debug, Clone)]
pub(super) struct Fault {
    pub(super) call: &'static str,
    pub(super) code: c_int,
    pub(super) said: String,
    pub(super) last: String,
}

/// The libraries of wheels under these roots: a virtual environment, conda's, the user's own.
fn wheels(roots: &[Option<PathBuf>; 3]) -> Vec<PathBuf> {
    let [environment, conda, home] = roots;
    let inside = |root: &Option<PathBuf>, lib: &str| root.as_ref().map(|root| root.join(lib));
    let system = ["/usr/local/lib", "/usr/lib"].map(|path| Some(PathBuf::from(path)));
    let folders = [
        inside(environment, "lib"),
        inside(conda, "lib"),
        inside(home, ".local/lib"),
    ];
    let mut found = Vec::new();
    for lib in folders.into_iter().chain(system).flatten() {
        let entries = std::fs::read_dir(&lib).into_iter().flatten().flatten();
        let mut pythons: Vec<(u32, PathBuf)> = entries
            .filter_map(|entry| {
                let name = entry.file_name();
                let minor = name.to_str()?.strip_prefix("python3.")?.parse().ok()?;
                Some((minor, entry.path()))
            })
            .collect();
        // The newest first.
        pythons.sort_unstable_by(|a, b| b.cmp(a));
        for (_, python) in pythons {
            for packages in ["site-packages", "dist-packages"] {
                let path = python.join(packages).join("nvidia/nccl/lib/libnccl.so.2");
                if path.exists() {
                    found.push(path);
                }
            }
        }
    }
    found
}

/// What the loader says: the reason stands in the error's source.
fn said(error: &libloading::Error) -> String {
    let source = std::error::Error::source(error).map(ToString::to_string);
    source.unwrap_or_else(|| error.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_read_as_people_write_them() {
        let said = |n| Version(n).to_string();
        assert_eq!(
            [said(2708), said(21805), said(23203)],
            ["2.7.8", "2.18.5", "2.32.3"]
        );
        assert!(Version(2708) < OLDEST && OLDEST < Version(21805));
    }

    #[test]
    fn a_wheel_is_found_in_its_environment_the_newest_python_first() {
        let root = std::env::temp_dir().join(format!("quintet-wheel-{}", std::process::id()));
        let lib = |python: &str| {
            root.join("lib")
                .join(python)
                .join("site-packages/nvidia/nccl/lib")
        };
        for python in ["python3.9", "python3.13", "perl5"] {
            std::fs::create_dir_all(lib(python)).unwrap();
            std::fs::write(lib(python).join("libnccl.so.2"), b"").unwrap();
        }
        let found = wheels(&[Some(root.clone()), None, None]);
        let ours: Vec<_> = found
            .iter()
            .filter(|path| path.starts_with(&root))
            .collect();
        std::fs::remove_dir_all(&root).unwrap();
        let at = |python: &str| lib(python).join("libnccl.so.2");
        assert_eq!(ours, [&at("python3.13"), &at("python3.9")]);
    }

    #[test]
    fn what_is_no_library_is_said_so() {
        let here = PathBuf::from(file!());
        let missing = [PathBuf::from("/nowhere/libnccl.so.2")];
        let text = Library::first(&missing).unwrap_err().to_string();
        assert!(
            text.contains("/nowhere/libnccl.so.2") && text.contains(VARIABLE),
            "{text}"
        );
        let here = std::path::Path::new(env!("CARGO_MANIFEST_DIR"))
            .join("..")
            .join(here);
        let text = Library::first(&[here]).unwrap_err().to_string();
        assert!(text.contains("cannot be loaded"), "{text}");
    }
}
