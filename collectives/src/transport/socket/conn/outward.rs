//! What goes out of a connection.

use std::{
    collections::VecDeque,
    io::{self, IoSlice},
    vec::Vec,
};

use super::{frame::Frame, pool::Pool, stream::Stream};

/// What is on its way out.
#[derive(Debug, Default)]
pub(in super::super) struct Out {
    queue: VecDeque<Parcel>,
    /// Number of the next frame.
    next: u64,
    /// Frames below this number are with the kernel.
    pub(in super::super) done: u64,
    /// The connection takes nothing any more.
    pub(in super::super) broken: bool,
}

#[derive(Debug)]
struct Parcel {
    head: Vec<u8>,
    words: Vec<u64>,
    bytes: usize,
    at: usize,
    /// Its payload lies with its owner, who writes it.
    lent: bool,
}

/// How a write ended.
enum Written {
    All,
    /// So far; the kernel takes no more now, or it was enough for one turn.
    Part,
    Broken,
}

impl Out {
    pub(in super::super) fn is_empty(&self) -> bool {
        self.queue.is_empty()
    }

    /// Whether only the owner of the first frame can go on.
    pub(in super::super) fn is_lent(&self) -> bool {
        self.queue.front().is_some_and(|parcel| parcel.lent)
    }

    /// Whether something is left that somebody can write whose own lent frame is `mine`.
    pub(in super::super) fn waits(&self, mine: Option<u64>) -> bool {
        !self.is_empty() && (!self.is_lent() || mine == Some(self.done))
    }

    /// Queues a frame, numbers it, and writes what can be written; its number.
    pub(in super::super) fn push(
        &mut self,
        frame: Frame,
        words: Vec<u64>,
        stream: &Stream,
        pool: &Pool,
    ) -> u64 {
        let bytes = frame.payload();
        let (number, head) = self.number(frame);
        if !self.broken {
            self.queue.push_back(Parcel {
                head,
                words,
                bytes,
                at: 0,
                lent: false,
            });
            self.flush(stream, pool);
        }
        number
    }

    /// [`Out::push`] of a payload that lies elsewhere: what the kernel does not take at once is copied.
    pub(in super::super) fn push_bytes(
        &mut self,
        frame: Frame,
        payload: &[u8],
        stream: &Stream,
        pool: &Pool,
    ) -> u64 {
        let number = self.lend(frame, payload, usize::MAX, stream);
        self.keep(number, payload, pool);
        number
    }

    /// [`Out::push`] of a payload that stays where it lies until [`Out::lend_on`] has written the rest of it, or
    /// [`Out::keep`] has copied that. At most `most` bytes are written now.
    pub(in super::super) fn lend(
        &mut self,
        frame: Frame,
        payload: &[u8],
        most: usize,
        stream: &Stream,
    ) -> u64 {
        let (number, head) = self.number(frame);
        if self.broken {
            return number;
        }
        let first = self.queue.is_empty();
        self.queue.push_back(Parcel {
            head,
            words: Vec::new(),
            bytes: payload.len(),
            at: 0,
            lent: true,
        });
        if first {
            self.write_lent(payload, most, stream);
        }
        number
    }

    /// The bytes of this frame's payload that are with the kernel; none when all is.
    pub(in super::super) fn reached(&self, number: u64) -> Option<usize> {
        let at = number.checked_sub(self.done)?;
        let mine = self.queue.get(at as usize)?;
        Some(mine.at.saturating_sub(mine.head.len()))
    }

    /// Writes on: what is before that frame, then at most `most` bytes of it. The bytes of its payload that are with the
    /// kernel; none when all is.
    pub(in super::super) fn lend_on(
        &mut self,
        number: u64,
        payload: &[u8],
        most: usize,
        (stream, pool): (&Stream, &Pool),
    ) -> Option<usize> {
        self.flush(stream, pool);
        if self.done == number && !self.queue.is_empty() {
            self.write_lent(payload, most, stream);
        }
        if self.done > number {
            self.flush(stream, pool);
        }
        self.reached(number)
    }

    /// Copies what is left of a lent payload, whose owner is not to stay.
    pub(in super::super) fn keep(&mut self, number: u64, payload: &[u8], pool: &Pool) {
        let Some(at) = number.checked_sub(self.done) else {
            return;
        };
        let Some(parcel) = self.queue.get_mut(at as usize).filter(|p| p.lent) else {
            return;
        };
        let (head, payload) = rest(&parcel.head, payload, parcel.at);
        let mut words = pool.take(payload.len().div_ceil(8));
        bytemuck::cast_slice_mut::<u64, u8>(&mut words)[..payload.len()].copy_from_slice(payload);
        *parcel = Parcel {
            head: head.to_vec(),
            words,
            bytes: payload.len(),
            at: 0,
            lent: false,
        };
    }

    /// Writes what the kernel takes, up to what only its owner can write. A broken connection swallows the rest: the
    /// reading side and the control connection say what has become of the peer.
    pub(in super::super) fn flush(&mut self, stream: &Stream, pool: &Pool) {
        while let Some(parcel) = self.queue.front_mut().filter(|parcel| !parcel.lent) {
            let payload = &bytemuck::cast_slice::<u64, u8>(&parcel.words)[..parcel.bytes];
            match write(&parcel.head, payload, &mut parcel.at, usize::MAX, stream) {
                Written::All => {
                    drop(pool.give(core::mem::take(&mut parcel.words)));
                    self.queue.pop_front();
                    self.done += 1;
                }
                Written::Part => return,
                Written::Broken => self.give_up(),
            }
        }
    }

    /// Takes nothing any more.
    pub(in super::super) fn give_up(&mut self) {
        self.broken = true;
        self.queue.clear();
        self.done = self.next;
    }

    fn write_lent(&mut self, payload: &[u8], most: usize, stream: &Stream) {
        let Some(parcel) = self.queue.front_mut() else {
            return;
        };
        match write(&parcel.head, payload, &mut parcel.at, most, stream) {
            Written::All => {
                self.queue.pop_front();
                self.done += 1;
            }
            Written::Part => {}
            Written::Broken => self.give_up(),
        }
    }

    /// The frame's number, and what goes before its payload.
    fn number(&mut self, mut frame: Frame) -> (u64, Vec<u8>) {
        frame.number = self.next;
        self.next += 1;
        if self.broken {
            self.done = self.next;
            return (frame.number, Vec::new());
        }
        (frame.number, frame.encode())
    }
}

/// Writes a head and a payload on from `at`, at most `most` bytes.
fn write(head: &[u8], payload: &[u8], at: &mut usize, most: usize, stream: &Stream) -> Written {
    let whole = head.len() + payload.len();
    let until = whole.min(at.saturating_add(most));
    while *at < until {
        let (head, payload) = rest(head, payload, *at);
        let payload = &payload[..payload.len().min(until - *at - head.len().min(until - *at))];
        match stream.write_vectored(&[IoSlice::new(head), IoSlice::new(payload)]) {
            Ok(n) => *at += n,
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => return Written::Part,
            Err(_) => return Written::Broken,
        }
    }
    if *at < whole {
        Written::Part
    } else {
        Written::All
    }
}

/// What is left of a head and a payload after `at` bytes of both.
fn rest<'a>(head: &'a [u8], payload: &'a [u8], at: usize) -> (&'a [u8], &'a [u8]) {
    match at.checked_sub(head.len()) {
        Some(at) => (&[], &payload[at..]),
        None => (&head[at..], payload),
    }
}
