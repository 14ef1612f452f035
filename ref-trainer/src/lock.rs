//! One run at a time writes to a folder.
//!
//! The lock is the operating system's, on a small file in the folder: it ends with the process,
//! however that ends, so there is nothing stale to remove. The file stays.

use std::fs::{File, OpenOptions, TryLockError};
use std::path::Path;

use crate::failure::Failure;

/// Held until dropped.
#[derive(Debug)]
pub struct Lock(#[allow(dead_code)] File);

impl Lock {
    /// Takes a folder that exists; `flag` is the one that named it. Two flags may name the same
    /// folder, so each has a lock of its own.
    ///
    /// # Errors
    /// Exit 3 where another run has it, or it cannot be written to.
    pub fn folder(folder: &Path, flag: &str) -> Result<Self, Failure> {
        let path = folder.join(format!(".{flag}.lock"));
        // Opened for writing: some network file systems lock nothing else.
        let file = OpenOptions::new()
            .create(true)
            .truncate(false)
            .write(true)
            .open(&path);
        let file = file.map_err(|e| Failure::file("write to", folder, &e))?;
        Self::file(file, folder, flag)
    }

    /// Takes an open file; `path` and `flag` stand for it in what is said.
    ///
    /// # Errors
    /// As [`Lock::folder`].
    pub fn file(file: File, path: &Path, flag: &str) -> Result<Self, Failure> {
        match file.try_lock() {
            Err(TryLockError::WouldBlock) => Err(Failure::data(format!(
                "another run is writing to {}; wait for its end or give another --{flag}",
                path.display()
            ))),
            // A file system without locks: as good as it gets.
            Err(TryLockError::Error(_)) | Ok(()) => Ok(Self(file)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::failure::Exit;
    use crate::report::test_dir::TestDir;

    #[test]
    fn the_second_is_refused_until_the_first_is_gone() {
        let dir = TestDir::new("lock");
        let first = Lock::folder(dir.path(), "save").unwrap();
        let refused = Lock::folder(dir.path(), "save").unwrap_err();
        assert_eq!(refused.exit, Exit::Data);
        assert!(refused.sentence.contains("another run") && refused.sentence.contains("--save"));
        let _other_flag = Lock::folder(dir.path(), "run-dir").unwrap();
        drop(first);
        Lock::folder(dir.path(), "save").unwrap();
        assert_eq!(
            Lock::folder(&dir.path().join("no"), "save")
                .unwrap_err()
                .exit,
            Exit::Data
        );
    }
}
