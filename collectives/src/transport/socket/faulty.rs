//! A connection that goes wrong on purpose; see [`WireFaults`].
//!
//! ```text
//! write(b0 b1 b2 ...)   short: the first few   flipped: one bit of byte k   cut: ends before byte k
//! read(...)             short: into the first few
//! ```

use std::{
    io::{self, IoSlice, IoSliceMut},
    net::Shutdown,
    sync::Mutex,
    vec,
    vec::Vec,
};

use super::{lock, stream::Stream};
use crate::transport::fault::{Dice, WireFaults};

#[derive(Debug)]
pub(crate) struct Faulty {
    pub(super) inner: Stream,
    short: bool,
    cut: Option<u64>,
    flipped: Option<u64>,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    dice: Dice,
    written: u64,
}

impl Faulty {
    /// The connection to global rank `peer`.
    pub(super) fn new(inner: Stream, faults: &WireFaults, peer: usize) -> Self {
        let mine = |at: Option<(usize, u64)>| at.filter(|(to, _)| *to == peer).map(|(_, k)| k);
        Self {
            inner,
            short: faults.short,
            cut: mine(faults.cut),
            flipped: mine(faults.flipped),
            state: Mutex::new(State {
                dice: Dice::new(faults.seed ^ (peer as u64) << 32),
                written: 0,
            }),
        }
    }

    pub(super) fn write_vectored(&self, bufs: &[IoSlice<'_>]) -> io::Result<usize> {
        let mut state = lock(&self.state);
        let start = state.written;
        let mut limit = self.limit(&mut state, bufs.iter().map(|b| b.len()).sum());
        if let Some(cut) = self.cut {
            let left = cut.saturating_sub(start);
            if left == 0 {
                self.inner.shutdown(Shutdown::Both);
                return Err(io::ErrorKind::ConnectionReset.into());
            }
            limit = limit.min(usize::try_from(left).unwrap_or(usize::MAX));
        }
        let mut bytes: Vec<u8> = Vec::with_capacity(limit);
        for buf in bufs {
            let room = limit - bytes.len();
            bytes.extend(&buf[..buf.len().min(room)]);
        }
        let at = self.flipped.and_then(|at| at.checked_sub(start));
        if let Some(byte) = at.and_then(|at| bytes.get_mut(usize::try_from(at).ok()?)) {
            *byte ^= 1;
        }
        let n = self.inner.write_vectored(&[IoSlice::new(&bytes)])?;
        state.written += n as u64;
        Ok(n)
    }

    pub(super) fn read_vectored(&self, bufs: &mut [IoSliceMut<'_>]) -> io::Result<usize> {
        let limit = self.limit(&mut lock(&self.state), bufs.iter().map(|b| b.len()).sum());
        let mut bytes = vec![0; limit];
        let n = self
            .inner
            .read_vectored(&mut [IoSliceMut::new(&mut bytes)])?;
        let mut rest = &bytes[..n];
        for buf in bufs {
            let (head, tail) = rest.split_at(buf.len().min(rest.len()));
            buf[..head.len()].copy_from_slice(head);
            rest = tail;
        }
        Ok(n)
    }

    /// Bytes of `asked` that are moved at most: any number of digits is as likely.
    fn limit(&self, state: &mut State, asked: usize) -> usize {
        if !self.short || asked == 0 {
            return asked;
        }
        let most = 1 << (state.dice.next() % 18);
        (1 + state.dice.next() as usize % most).min(asked)
    }
}
