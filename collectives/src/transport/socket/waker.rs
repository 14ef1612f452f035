//! Ends a poll from another thread.

use std::{
    io::{Read, Write},
    os::{
        fd::{AsFd, BorrowedFd},
        unix::net::UnixStream,
    },
    string::ToString,
};

use crate::{Error, Result};

#[derive(Debug)]
pub(crate) struct Waker {
    ring: UnixStream,
    bell: UnixStream,
}

impl Waker {
    pub(crate) fn new() -> Result<Self> {
        let made = UnixStream::pair().and_then(|(ring, bell)| {
            ring.set_nonblocking(true)?;
            bell.set_nonblocking(true)?;
            Ok(Self { ring, bell })
        });
        made.map_err(|e| Error::System {
            what: "make a pair of sockets",
            reason: e.to_string(),
        })
    }

    pub(crate) fn wake(&self) {
        // Full means that it rings already.
        let _ = (&self.ring).write(&[1]);
    }

    /// Silences it until the next ring.
    pub(crate) fn hush(&self) {
        let mut rings = [0; 64];
        while matches!((&self.bell).read(&mut rings), Ok(n) if n == rings.len()) {}
    }
}

impl AsFd for Waker {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.bell.as_fd()
    }
}
