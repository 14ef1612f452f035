//! How two ranks show each other their segments over a unix socket, and prove that they see them.
//!
//! ```text
//! one    file of its segment -->
//!                                <-- number read in it, file of the other's segment
//! one    number read in that -->
//!                                <-- seen
//! ```
//!
//! The numbers stand in the segments alone. Who answers with the right one has really opened it: that,
//! and nothing that could be counted or configured, makes two ranks ones of the same host.

use core::mem::MaybeUninit;
use std::{format, io, os::fd::OwnedFd, string::String, time::Instant};

use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags,
};

use super::segment::{Segment, Window};
use crate::transport::socket::{
    handshake::{read_exact, write_all},
    stream::Stream,
};

/// The other rank's segment, or why it cannot be had; both ends then say the same.
pub(super) fn swap(
    stream: &Stream,
    mine: &Segment,
    first: bool,
    until: Instant,
) -> Result<Window, String> {
    let broke = |e: io::Error| format!("the exchange of segments broke off: {e}");
    if first {
        give(stream, 0, mine, until).map_err(broke)?;
        let (proof, file) = take(stream, until).map_err(broke)?;
        let theirs = open(file);
        let seen = proof == mine.window().nonce();
        let number = theirs.as_ref().map_or(0, Window::nonce);
        write_all(stream, &number.to_le_bytes(), until).map_err(broke)?;
        let mut verdict = [0];
        read_exact(stream, &mut verdict, until).map_err(broke)?;
        return judge(theirs, seen && verdict == [1]);
    }
    let (_, file) = take(stream, until).map_err(broke)?;
    let theirs = open(file);
    give(
        stream,
        theirs.as_ref().map_or(0, Window::nonce),
        mine,
        until,
    )
    .map_err(broke)?;
    let mut number = [0; 8];
    read_exact(stream, &mut number, until).map_err(broke)?;
    let seen = u64::from_le_bytes(number) == mine.window().nonce() && theirs.is_ok();
    write_all(stream, &[u8::from(seen)], until).map_err(broke)?;
    judge(theirs, seen)
}

fn judge(theirs: Result<Window, String>, seen: bool) -> Result<Window, String> {
    let theirs = theirs?;
    if seen {
        Ok(theirs)
    } else {
        Err(String::from(
            "the other rank does not see this rank's segment",
        ))
    }
}

fn open(file: Option<OwnedFd>) -> Result<Window, String> {
    let file = file.ok_or_else(|| String::from("no segment came with its message"))?;
    Window::open(&file).map_err(|e| format!("{e}"))
}

/// Sends a number and my segment.
fn give(stream: &Stream, number: u64, mine: &Segment, until: Instant) -> io::Result<()> {
    ready(stream, until)?;
    let files = [std::os::fd::AsFd::as_fd(mine.file())];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    control.push(SendAncillaryMessage::ScmRights(&files));
    let bytes = number.to_le_bytes();
    let sent = rustix::net::sendmsg(
        stream,
        &[io::IoSlice::new(&bytes)],
        &mut control,
        SendFlags::NOSIGNAL,
    )?;
    // Eight bytes go at once or not at all on a fresh connection; the rest would follow in order.
    write_all(stream, &bytes[sent..], until)
}

/// Receives a number and the other's segment.
fn take(stream: &Stream, until: Instant) -> io::Result<(u64, Option<OwnedFd>)> {
    ready(stream, until)?;
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let mut bytes = [0; 8];
    let flags = RecvFlags::CMSG_CLOEXEC;
    let got = rustix::net::recvmsg(
        stream,
        &mut [io::IoSliceMut::new(&mut bytes)],
        &mut control,
        flags,
    )?;
    let file = control.drain().find_map(|message| match message {
        RecvAncillaryMessage::ScmRights(mut files) => files.next(),
        _ => None,
    });
    if got.bytes == 0 {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    read_exact(stream, &mut bytes[got.bytes..], until)?;
    Ok((u64::from_le_bytes(bytes), file))
}

fn ready(stream: &Stream, until: Instant) -> io::Result<()> {
    let left = until.saturating_duration_since(Instant::now());
    if left.is_zero() {
        return Err(io::ErrorKind::TimedOut.into());
    }
    stream.set_timeout(left)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::{os::unix::net::UnixStream, thread, time::Duration};

    fn ends() -> (Stream, Stream, Instant) {
        let (one, two) = UnixStream::pair().unwrap();
        let until = Instant::now() + Duration::from_secs(10);
        (Stream::Unix(one), Stream::Unix(two), until)
    }

    fn segment() -> Segment {
        Segment::new(1 << 22, None).unwrap()
    }

    #[test]
    fn both_open_the_others_segment() {
        let (one, two, until) = ends();
        let (a, b) = (segment(), segment());
        let (seen_a, seen_b) = thread::scope(|scope| {
            let other = scope.spawn(|| swap(&two, &b, false, until));
            let mine = swap(&one, &a, true, until);
            (other.join().unwrap().unwrap(), mine.unwrap())
        });
        assert_eq!(seen_a.nonce(), a.window().nonce());
        assert_eq!(seen_b.nonce(), b.window().nonce());
    }

    #[test]
    fn who_cannot_tell_the_number_is_not_on_this_host() {
        let (one, two, until) = ends();
        let (a, b) = (segment(), segment());
        let outcome = thread::scope(|scope| {
            scope.spawn(|| {
                // It has a segment, and guesses what stands in the other.
                take(&two, until).unwrap();
                give(&two, 12345, &b, until).unwrap();
                let mut number = [0; 8];
                read_exact(&two, &mut number, until).unwrap();
                write_all(&two, &[1], until).unwrap();
            });
            swap(&one, &a, true, until)
        });
        assert!(outcome.unwrap_err().contains("does not see"));
    }

    #[test]
    fn what_is_no_segment_is_refused() {
        let (one, two, until) = ends();
        let a = segment();
        thread::scope(|scope| {
            let other = scope.spawn(|| swap(&two, &a, false, until));
            // No file comes with the number.
            write_all(&one, &[7; 8], until).unwrap();
            drop(take(&one, until).unwrap());
            write_all(&one, &[0; 8], until).unwrap();
            assert!(other.join().unwrap().unwrap_err().contains("no segment"));
        });
        let file = rustix::fs::memfd_create("other", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        rustix::fs::ftruncate(&file, 1 << 20).unwrap();
        assert!(Window::open(&file).is_err());
    }
}
