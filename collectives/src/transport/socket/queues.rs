//! The kernel's queues of a TCP connection: when they wake a sleeper, and whether the other end has all.
#![allow(unsafe_code)] // two calls of the C library

use std::{ffi::c_int, net::TcpStream, os::fd::AsRawFd};

/// Sleepers on `stream` are woken by its end, by an error, and by so many bytes; less is still there to be read.
pub(super) fn wake_from(stream: &TcpStream, bytes: usize) {
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

/// Whether the kernel still holds what the other end has not acknowledged, the end of the stream counted.
pub(super) fn unacknowledged(stream: &TcpStream) -> bool {
    let mut bytes: c_int = 0;
    // SAFETY: the descriptor is open as long as the stream is borrowed, and SIOCOUTQ (TIOCOUTQ) writes one int.
    let done = unsafe { libc::ioctl(stream.as_raw_fd(), libc::TIOCOUTQ, &raw mut bytes) };
    done == 0 && bytes > 0
}
