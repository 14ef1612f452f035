//! A folder as a store.

use std::{
    format, fs, io,
    path::{Path, PathBuf},
    string::{String, ToString},
    thread,
    time::{Duration, Instant},
    vec::Vec,
};

use super::{Store, fits, late, sum};
use crate::{Error, Result};

/// A store in a folder that all ranks see. Nothing is removed but by [`Store::delete`]: the folder
/// belongs to one run.
///
/// ```
/// use quintet_collectives::store::{FileStore, Store};
/// use std::time::Duration;
/// let folder = std::env::temp_dir().join(format!("store-{}", std::process::id()));
/// let store = FileStore::new(&folder)?;
/// store.set("a/b", b"x", Duration::from_secs(1))?;
/// assert_eq!(store.wait("a/b", Duration::from_secs(1))?, b"x");
/// assert_eq!(store.add("n", 3, Duration::from_secs(1))?, 3);
/// # std::fs::remove_dir_all(&folder).unwrap();
/// # Ok::<(), quintet_collectives::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct FileStore {
    folder: PathBuf,
}

impl FileStore {
    /// A store in this folder, which is made if it does not exist.
    ///
    /// # Errors
    /// [`Error::Rendezvous`] where it cannot be made.
    pub fn new(folder: impl Into<PathBuf>) -> Result<Self> {
        let folder = folder.into();
        fs::create_dir_all(&folder).map_err(|e| failed(&folder, &e))?;
        Ok(Self { folder })
    }

    fn path(&self, key: &str) -> PathBuf {
        self.folder.join(file_name(key))
    }

    fn read(&self, key: &str) -> Result<Option<Vec<u8>>> {
        let path = self.path(key);
        match fs::read(&path) {
            Ok(value) => Ok(Some(value)),
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(e) => Err(failed(&path, &e)),
        }
    }

    /// Written beside and renamed: a reader sees all of it or none.
    fn write(&self, key: &str, value: &[u8]) -> Result<()> {
        let path = self.path(key);
        let number = getrandom::u64().map_err(|e| Error::System {
            what: "draw a random number",
            reason: e.to_string(),
        })?;
        let beside = self.folder.join(format!(".{number:016x}"));
        let written = fs::write(&beside, value).and_then(|()| fs::rename(&beside, &path));
        written.map_err(|e| {
            // What was begun is of no use to anybody.
            let _ = fs::remove_file(&beside);
            failed(&path, &e)
        })
    }

    /// Runs `body` while nobody else adds or deletes.
    fn locked<R>(&self, timeout: Duration, body: impl FnOnce() -> Result<R>) -> Result<R> {
        let path = self.folder.join(".lock");
        let file = fs::OpenOptions::new()
            .create(true)
            .truncate(false)
            .write(true)
            .open(&path)
            .map_err(|e| failed(&path, &e))?;
        let until = Instant::now() + timeout;
        loop {
            match file.try_lock() {
                Ok(()) => break,
                Err(fs::TryLockError::WouldBlock) if Instant::now() < until => {
                    thread::sleep(Duration::from_millis(2));
                }
                Err(fs::TryLockError::WouldBlock) => {
                    return Err(Error::Rendezvous(format!(
                        "{} was locked for {timeout:?}",
                        path.display()
                    )));
                }
                Err(fs::TryLockError::Error(e)) => return Err(failed(&path, &e)),
            }
        }
        // The lock goes with the file, also after a panic.
        body()
    }
}

impl Store for FileStore {
    fn set(&self, key: &str, value: &[u8], _: Duration) -> Result<()> {
        fits(key, value)?;
        self.write(key, value)
    }

    fn get(&self, key: &str, _: Duration) -> Result<Option<Vec<u8>>> {
        fits(key, &[])?;
        self.read(key)
    }

    fn wait(&self, key: &str, timeout: Duration) -> Result<Vec<u8>> {
        fits(key, &[])?;
        let until = Instant::now() + timeout;
        let mut pause = Duration::from_millis(1);
        loop {
            if let Some(value) = self.read(key)? {
                return Ok(value);
            }
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(late(key, timeout));
            }
            thread::sleep(pause.min(left));
            pause = (pause * 2).min(Duration::from_millis(50));
        }
    }

    fn add(&self, key: &str, delta: i64, timeout: Duration) -> Result<i64> {
        fits(key, &[])?;
        self.locked(timeout, || {
            let sum = sum(key, self.read(key)?.as_deref(), delta)?;
            self.write(key, sum.to_string().as_bytes())?;
            Ok(sum)
        })
    }

    fn delete(&self, key: &str, timeout: Duration) -> Result<bool> {
        fits(key, &[])?;
        let path = self.path(key);
        self.locked(timeout, || match fs::remove_file(&path) {
            Ok(()) => Ok(true),
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(false),
            Err(e) => Err(failed(&path, &e)),
        })
    }
}

fn failed(path: &Path, e: &io::Error) -> Error {
    Error::Rendezvous(format!("the store at {} fails: {e}", path.display()))
}

/// A key as a file name: what is not a letter, a digit or `-` is `_` and two hexadecimal digits. Of
/// a name too long for a file system the rest is told by a digest.
fn file_name(key: &str) -> String {
    use sha2::{Digest, Sha256};
    let mut name = String::from("k");
    for byte in key.bytes() {
        if byte.is_ascii_alphanumeric() || byte == b'-' {
            name.push(char::from(byte));
        } else {
            name += &format!("_{byte:02x}");
        }
    }
    if name.len() > 200 {
        name.truncate(130);
        for byte in Sha256::digest(key.as_bytes()).0 {
            name += &format!("{byte:02x}");
        }
    }
    name
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_differ_where_keys_do() {
        assert_ne!(file_name("a/b"), file_name("a_2fb"));
        assert_ne!(file_name("a/b"), file_name("a.b"));
        let long = "x".repeat(500);
        assert!(file_name(&long).len() < 255);
        assert_ne!(file_name(&long), file_name(&(long.clone() + "y")));
    }
}
