//! How many bytes must have come before a sleeper on a socket is woken.
#![allow(unsafe_code)] // a call of the C library

use std::{ffi::c_int, net::TcpStream, os::fd::AsRawFd};

/// Sleepers on `stream` are woken by its end, by an error, and by so many bytes; less is still there to be read.
pub(super) fn set(stream: &TcpStream, bytes: usize) {
    let value = c_int::try_from(bytes).unwrap_or(c_int::MAX);
    // SAFETY: the descriptor is open as long as the stream is borrowed, and the value is as long as is said.
    let _ = unsafe {
        libc::setsockopt(
            stream.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_RCVLOWAT,
            (&raw const value).cast(),
            size_of::<c_int>() as libc::socklen_t,
        )
    };
}
