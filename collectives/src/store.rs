//! Where ranks that do not know each other yet leave notes: a small key-value store (`std`).
//!
//! ```text
//! FileStore   a folder all ranks see           one file a key, written beside and renamed
//! TcpStore    one process serves, all connect  (unix)
//! ```
//!
//! Keys are any text up to 1 KiB, values any bytes up to 1 MiB. Every call has its own deadline.

use std::{string::String, time::Duration, vec::Vec};

use crate::{Error, Result};

mod file;
#[cfg(unix)]
mod tcp;

pub use file::FileStore;
#[cfg(unix)]
pub(crate) use tcp::is_request;
#[cfg(unix)]
pub use tcp::{StoreServer, TcpStore};

/// A key-value store that several processes share.
pub trait Store: Send + Sync {
    /// Gives a key a value, whatever it had.
    ///
    /// # Errors
    /// [`Error::Rendezvous`] where the store cannot be reached in time or refuses.
    fn set(&self, key: &str, value: &[u8], timeout: Duration) -> Result<()>;

    /// The value of a key, if it has one now.
    ///
    /// # Errors
    /// Those of [`Store::set`].
    fn get(&self, key: &str, timeout: Duration) -> Result<Option<Vec<u8>>>;

    /// The value of a key, as soon as it has one.
    ///
    /// # Errors
    /// Those of [`Store::set`], also where the key has no value in time.
    fn wait(&self, key: &str, timeout: Duration) -> Result<Vec<u8>>;

    /// Adds to a number kept as decimal text, 0 where there is none; what it is then.
    ///
    /// # Errors
    /// Those of [`Store::set`], also where the value is no number or the sum is none of 64 bits.
    fn add(&self, key: &str, delta: i64, timeout: Duration) -> Result<i64>;

    /// Takes a key away; whether it was there.
    ///
    /// # Errors
    /// Those of [`Store::set`].
    fn delete(&self, key: &str, timeout: Duration) -> Result<bool>;

    /// The address of this host as the store sees it, where it does.
    fn host(&self) -> Option<String> {
        None
    }
}

/// Bytes of the longest key.
pub const MAX_KEY: usize = 1 << 10;

/// Bytes of the longest value.
pub const MAX_VALUE: usize = 1 << 20;

fn fits(key: &str, value: &[u8]) -> Result<()> {
    if key.is_empty() || key.len() > MAX_KEY {
        return Err(Error::Rendezvous(std::format!(
            "a key of a store has 1 to {MAX_KEY} bytes, this one has {}",
            key.len()
        )));
    }
    if value.len() > MAX_VALUE {
        return Err(Error::Rendezvous(std::format!(
            "a value of a store has at most {MAX_VALUE} bytes, that of {key} has {}",
            value.len()
        )));
    }
    Ok(())
}

fn sum(key: &str, old: Option<&[u8]>, delta: i64) -> Result<i64> {
    let number = match old {
        None => Some(0),
        Some(text) => core::str::from_utf8(text)
            .ok()
            .and_then(|text| text.trim().parse::<i64>().ok()),
    };
    let sum = number.and_then(|number| number.checked_add(delta));
    sum.ok_or_else(|| {
        Error::Rendezvous(std::format!(
            "{delta} cannot be added to the value of {key}: it is no number, or too large a one"
        ))
    })
}

fn late(key: &str, timeout: Duration) -> Error {
    Error::Rendezvous(std::format!("key {key} had no value within {timeout:?}"))
}
