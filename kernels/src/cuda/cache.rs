//! Compiled kernels on disk.
//!
//! ```text
//! lookup    QUINTET_CUBINS        folders of `precompile`, read only, any compiler's version
//!           QUINTET_CUBIN_CACHE   the cache; else XDG_CACHE_HOME/quintet/cubins, else
//!                                 HOME/.cache/quintet/cubins; `off` for none
//! file      <kernel>-sm_<arch>-<key>-<nvrtc>.cubin    key: the first half of Source::key
//!           line 1  "quintet cubin 1 <bytes> <SHA-256 of the bytes>"     then the bytes
//! publish   a file of this process's own name, synced, renamed over: readers see all or nothing
//! compile   under a lock on <file>.lock, looked up again under it: one process compiles
//! limit     QUINTET_CUBIN_CACHE_BYTES (256 MiB): the files that were used longest ago go
//! ```
//!
//! A file that is not what its first line says counts as none and is written again. Nothing here
//! fails for want of a folder: what can not be kept is compiled each time.

use std::fs::{self, File, OpenOptions};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::string::{String, ToString};
use std::time::SystemTime;
use std::vec::Vec;
use std::{env, format, process};

use sha2::{Digest, Sha256};

use super::source::{Source, hex};

const DEFAULT_LIMIT: u64 = 256 << 20;
const MAGIC: &str = "quintet cubin 1";

/// Where compiled kernels are looked for and kept.
#[derive(Debug, Clone, Default)]
pub(super) struct Cache {
    /// Read only.
    given: Vec<PathBuf>,
    own: Option<PathBuf>,
    limit: u64,
}

/// Of one kernel: its file's name but for the compiler's version.
pub(super) fn stem(source: &Source<'_>) -> String {
    let kernel = source.kernel.unwrap_or(source.module);
    let key = source.key();
    format!("{kernel}-sm_{}-{}", source.arch, &key[..32])
}

impl Cache {
    pub(super) fn from_env() -> Self {
        let folder = |name: &str| {
            env::var_os(name)
                .filter(|v| !v.is_empty())
                .map(PathBuf::from)
        };
        let own = match folder("QUINTET_CUBIN_CACHE") {
            Some(path) if path.as_os_str() == "off" => None,
            Some(path) => Some(path),
            None => folder("XDG_CACHE_HOME")
                .or_else(|| folder("HOME").map(|home| home.join(".cache")))
                .map(|root| root.join("quintet").join("cubins")),
        };
        let given = env::var_os("QUINTET_CUBINS");
        let limit = env::var("QUINTET_CUBIN_CACHE_BYTES");
        Self {
            given: given.iter().flat_map(env::split_paths).collect(),
            own,
            limit: limit
                .ok()
                .and_then(|l| l.trim().parse().ok())
                .unwrap_or(DEFAULT_LIMIT),
        }
    }

    /// Only `folder`, without a limit, as `precompile` writes it.
    pub(super) fn folder(folder: &Path) -> Self {
        Self {
            given: Vec::new(),
            own: Some(folder.into()),
            limit: u64::MAX,
        }
    }

    /// A kept kernel: made by the compiler `version`, or by any where none is given or it was
    /// precompiled.
    pub(super) fn find(&self, stem: &str, version: Option<&str>) -> Option<Vec<u8>> {
        self.given(stem).or_else(|| match version {
            Some(version) => {
                let path = self.own.as_ref()?.join(file_name(stem, version));
                let bytes = read(&path)?;
                touch(&path);
                Some(bytes)
            }
            None => newest(self.own.as_ref()?, stem),
        })
    }

    /// A precompiled kernel.
    pub(super) fn given(&self, stem: &str) -> Option<Vec<u8>> {
        self.given.iter().find_map(|dir| newest(dir, stem))
    }

    /// What is kept, or what `compile` makes; one process at a time compiles a kernel.
    pub(super) fn find_or<E>(
        &self,
        stem: &str,
        version: &str,
        compile: impl FnOnce() -> Result<Vec<u8>, E>,
    ) -> Result<Vec<u8>, E> {
        if let Some(bytes) = self.find(stem, Some(version)) {
            return Ok(bytes);
        }
        let Some(path) = self
            .own
            .as_ref()
            .map(|dir| dir.join(file_name(stem, version)))
        else {
            return compile();
        };
        let lock = lock(&path);
        if lock.is_some()
            && let Some(bytes) = read(&path)
        {
            return Ok(bytes);
        }
        let bytes = compile()?;
        if publish(&path, &bytes).is_ok() {
            self.trim(&path);
        }
        Ok(bytes)
    }

    /// Removes the files used longest ago until the limit is kept; never `keep`.
    fn trim(&self, keep: &Path) {
        let Some(entries) = self.own.as_ref().and_then(|dir| fs::read_dir(dir).ok()) else {
            return;
        };
        let mut files: Vec<(SystemTime, u64, PathBuf)> = entries
            .flatten()
            .filter(|e| e.path().extension().is_some_and(|x| x == "cubin"))
            .filter_map(|e| {
                let meta = e.metadata().ok()?;
                Some((meta.modified().ok()?, meta.len(), e.path()))
            })
            .collect();
        files.sort();
        let mut bytes: u64 = files.iter().map(|f| f.1).sum();
        for (_, len, path) in files {
            if bytes <= self.limit {
                break;
            }
            if path != keep && fs::remove_file(&path).is_ok() {
                let _ = fs::remove_file(path.with_extension("lock"));
                bytes -= len;
            }
        }
    }
}

fn file_name(stem: &str, version: &str) -> String {
    format!("{stem}-{version}.cubin")
}

/// Of the files of a stem, that of the newest compiler which is whole.
fn newest(dir: &Path, stem: &str) -> Option<Vec<u8>> {
    let mut found: Vec<(Vec<u32>, PathBuf)> = fs::read_dir(dir)
        .ok()?
        .flatten()
        .filter_map(|entry| {
            let name = entry.file_name().into_string().ok()?;
            let version = name
                .strip_prefix(stem)?
                .strip_prefix('-')?
                .strip_suffix(".cubin")?;
            let numbers = version.split('.').map(|n| n.parse().unwrap_or(0)).collect();
            Some((numbers, entry.path()))
        })
        .collect();
    found.sort();
    found.iter().rev().find_map(|(_, path)| read(path))
}

/// The bytes of a file that is what its first line says.
fn read(path: &Path) -> Option<Vec<u8>> {
    let all = fs::read(path).ok()?;
    let end = all.iter().position(|&b| b == b'\n')?;
    let (line, bytes) = (&all[..end], &all[end + 1..]);
    (line == first_line(bytes).as_bytes()).then(|| bytes.to_vec())
}

fn first_line(bytes: &[u8]) -> String {
    format!("{MAGIC} {} {}", bytes.len(), hex(&Sha256::digest(bytes)))
}

/// That a file was used: what was used last stays longest.
fn touch(path: &Path) {
    if let Ok(file) = OpenOptions::new().append(true).open(path) {
        let _ = file.set_modified(SystemTime::now());
    }
}

/// Held until dropped; none where the folder takes no files.
fn lock(path: &Path) -> Option<File> {
    fs::create_dir_all(path.parent()?).ok()?;
    let file = File::create(path.with_extension("lock")).ok()?;
    file.lock().ok()?;
    Some(file)
}

fn publish(path: &Path, bytes: &[u8]) -> std::io::Result<()> {
    // Threads of one process hold different locks only for different files.
    let own = path.with_extension(process::id().to_string());
    let written = (|| {
        let mut file = File::create(&own)?;
        writeln!(file, "{}", first_line(bytes))?;
        file.write_all(bytes)?;
        file.sync_all()?;
        fs::rename(&own, path)
    })();
    if written.is_err() {
        let _ = fs::remove_file(&own);
    }
    written
}

#[cfg(test)]
mod tests {
    use super::*;
    use core::convert::Infallible;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::time::Duration;
    use std::{thread, vec};

    struct Folder(PathBuf);

    impl Folder {
        fn new(name: &str) -> Self {
            let path = env::temp_dir().join(format!("quintet-cache-{name}-{}", process::id()));
            let _ = fs::remove_dir_all(&path);
            Self(path)
        }

        fn cache(&self, limit: u64) -> Cache {
            Cache {
                given: Vec::new(),
                own: Some(self.0.clone()),
                limit,
            }
        }

        fn names(&self) -> Vec<String> {
            let mut names: Vec<String> = fs::read_dir(&self.0)
                .unwrap()
                .map(|e| e.unwrap().file_name().into_string().unwrap())
                .filter(|n| n.ends_with(".cubin"))
                .collect();
            names.sort();
            names
        }
    }

    impl Drop for Folder {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    fn make(cache: &Cache, stem: &str, bytes: &[u8], compiled: &AtomicUsize) -> Vec<u8> {
        let compile = || {
            compiled.fetch_add(1, Ordering::SeqCst);
            thread::sleep(Duration::from_millis(30));
            Ok::<_, Infallible>(bytes.to_vec())
        };
        let Ok(found) = cache.find_or(stem, "13.0", compile);
        found
    }

    #[test]
    fn sixteen_ranks_compile_once() {
        let folder = Folder::new("once");
        let compiled = AtomicUsize::new(0);
        thread::scope(|scope| {
            for _ in 0..16 {
                // A cache each, as processes have.
                scope.spawn(|| {
                    assert_eq!(
                        make(&folder.cache(1 << 20), "k", b"code", &compiled),
                        b"code"
                    )
                });
            }
        });
        assert_eq!(compiled.into_inner(), 1);
    }

    #[test]
    fn a_spoilt_entry_is_none_and_is_written_again() {
        let folder = Folder::new("spoilt");
        let (cache, compiled) = (folder.cache(1 << 20), AtomicUsize::new(0));
        make(&cache, "k", b"code", &compiled);
        let path = folder.0.join("k-13.0.cubin");
        let whole = fs::read(&path).unwrap();
        let mut flipped = whole.clone();
        *flipped.last_mut().unwrap() ^= 1;
        for (i, spoilt) in [&flipped[..], &whole[..whole.len() - 1], b"", b"\n"]
            .iter()
            .enumerate()
        {
            fs::write(&path, spoilt).unwrap();
            assert_eq!(cache.find("k", Some("13.0")), None);
            assert_eq!(make(&cache, "k", b"code", &compiled), b"code");
            assert_eq!(compiled.load(Ordering::SeqCst), i + 2);
            assert_eq!(fs::read(&path).unwrap(), whole);
        }
    }

    #[test]
    fn another_compilers_kernel_serves_only_where_there_is_none() {
        let folder = Folder::new("version");
        let cache = folder.cache(1 << 20);
        for version in ["12.9", "13.0", "9.9"] {
            let Ok(_) = cache.find_or("k", version, || {
                Ok::<_, Infallible>(version.as_bytes().to_vec())
            });
        }
        assert_eq!(cache.find("k", Some("12.9")).unwrap(), b"12.9");
        assert_eq!(cache.find("k", Some("13.1")), None);
        assert_eq!(
            cache.find("k", None).unwrap(),
            b"13.0",
            "the newest, by number"
        );
        assert_eq!(cache.find("other", None), None);
        let given = Cache {
            given: vec![folder.0.clone()],
            ..Cache::default()
        };
        assert_eq!(given.find("k", Some("13.1")).unwrap(), b"13.0");
    }

    #[test]
    fn the_limit_lets_go_of_what_was_used_longest_ago() {
        let folder = Folder::new("limit");
        let compiled = AtomicUsize::new(0);
        let (cache, code) = (folder.cache(2500), [7u8; 1000]);
        let pause = || thread::sleep(Duration::from_millis(20));
        make(&cache, "a", &code, &compiled);
        pause();
        make(&cache, "b", &code, &compiled);
        pause();
        assert!(
            cache.find("a", Some("13.0")).is_some(),
            "used: b is older now"
        );
        pause();
        make(&cache, "c", &code, &compiled);
        assert_eq!(folder.names(), ["a-13.0.cubin", "c-13.0.cubin"]);
    }

    #[test]
    fn a_folder_that_takes_no_files_is_no_failure() {
        let folder = Folder::new("file");
        fs::write(&folder.0, "a file where a folder should be").unwrap();
        let (cache, compiled) = (folder.cache(1 << 20), AtomicUsize::new(0));
        for n in 1..3 {
            assert_eq!(make(&cache, "k", b"code", &compiled), b"code");
            assert_eq!(compiled.load(Ordering::SeqCst), n);
        }
        fs::remove_file(&folder.0).unwrap();
    }
}
