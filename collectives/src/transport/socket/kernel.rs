//! What the kernel is told and asked of a connection, where only the C library has a call for it: when a sleeper is woken,
//! whether the other end has all, who that is.
#![allow(unsafe_code)]

use std::{
    ffi::c_int,
    net::TcpStream,
    os::{fd::AsRawFd, unix::net::UnixStream},
};

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

/// The user at the other end. Its process may be in a namespace that is not seen from here; the kernel then gives 0 for its
/// number, which is an error to rustix.
pub(super) fn user_of(stream: &UnixStream) -> Option<u32> {
    let mut found = libc::ucred {
        pid: 0,
        uid: u32::MAX,
        gid: u32::MAX,
    };
    let mut len = size_of::<libc::ucred>() as libc::socklen_t;
    // SAFETY: the descriptor is open as long as the stream is borrowed, and the kernel writes no more than `len` bytes.
    let done = unsafe {
        libc::getsockopt(
            stream.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_PEERCRED,
            (&raw mut found).cast(),
            &raw mut len,
        )
    };
    (done == 0 && len as usize == size_of::<libc::ucred>()).then_some(found.uid)
}
