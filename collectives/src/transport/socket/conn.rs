//! Both directions of one data connection, without waiting.
//!
//! ```text
//! push(frame, payload) -> [ queue ] -> writev(header, payload)      as far as the kernel takes it
//! pull()               <- frames   <- readv(payload, buffer)        large payloads are read in place
//! ```

use std::{
    boxed::Box,
    collections::VecDeque,
    format,
    io::{self, IoSlice, IoSliceMut},
    string::String,
    sync::Mutex,
    vec,
    vec::Vec,
};

use super::{
    frame::{Fault, Frame, HEADER},
    lock,
    stream::Stream,
};

/// Storages between uses: what was sent last is received into next.
#[derive(Debug, Default)]
pub(super) struct Pool(Mutex<Vec<Vec<u64>>>);

impl Pool {
    /// At least `words` long, contents of any value.
    pub(super) fn take(&self, words: usize) -> Vec<u64> {
        let mut spare = lock(&self.0);
        let fits = spare
            .iter()
            .enumerate()
            .filter(|(_, s)| s.capacity() >= words && s.capacity() <= 2 * words + 64);
        let at = fits.min_by_key(|(_, s)| s.capacity()).map(|(at, _)| at);
        match at.map(|at| spare.swap_remove(at)) {
            Some(mut storage) => {
                drop(spare);
                storage.resize(words, 0);
                storage
            }
            None => vec![0; words],
        }
    }

    /// Keeps a storage; of too many the smallest comes back.
    pub(super) fn give(&self, storage: Vec<u64>) -> Option<Vec<u64>> {
        let mut spare = lock(&self.0);
        if storage.capacity() == 0 {
            return None;
        }
        if spare.len() < SPARE {
            spare.push(storage);
            return None;
        }
        let smallest = spare.iter_mut().min_by_key(|s| s.capacity());
        match smallest.filter(|s| s.capacity() < storage.capacity()) {
            Some(smallest) => Some(core::mem::replace(smallest, storage)),
            None => Some(storage),
        }
    }
}

/// Storages kept; more than the messages of one round of a world of this size.
const SPARE: usize = 16;

/// What is on its way out.
#[derive(Debug, Default)]
pub(super) struct Out {
    queue: VecDeque<Parcel>,
    /// Number of the next frame.
    next: u64,
    /// Frames below this number are with the kernel.
    pub(super) done: u64,
    /// The connection takes nothing any more.
    pub(super) broken: bool,
}

#[derive(Debug)]
struct Parcel {
    head: Vec<u8>,
    words: Vec<u64>,
    bytes: usize,
    at: usize,
}

impl Out {
    pub(super) fn is_empty(&self) -> bool {
        self.queue.is_empty()
    }

    /// Queues a frame, numbers it, and writes what can be written; its number.
    pub(super) fn push(
        &mut self,
        mut frame: Frame,
        words: Vec<u64>,
        stream: &Stream,
        pool: &Pool,
    ) -> u64 {
        frame.number = self.next;
        self.next += 1;
        if self.broken {
            self.done = self.next;
            return frame.number;
        }
        let bytes = frame.payload();
        self.queue.push_back(Parcel {
            head: frame.encode(),
            words,
            bytes,
            at: 0,
        });
        self.flush(stream, pool);
        frame.number
    }

    /// [`Out::push`] of a payload that lies elsewhere: what the kernel does not take at once is copied.
    pub(super) fn push_bytes(
        &mut self,
        mut frame: Frame,
        payload: &[u8],
        stream: &Stream,
        pool: &Pool,
    ) -> u64 {
        frame.number = self.next;
        self.next += 1;
        if self.broken {
            self.done = self.next;
            return frame.number;
        }
        let head = frame.encode();
        let (mut at, whole) = (0, head.len() + payload.len());
        while self.queue.is_empty() && at < whole {
            let (a, b) = rest(&head, payload, at);
            match stream.write_vectored(&[IoSlice::new(a), IoSlice::new(b)]) {
                Ok(n) => at += n,
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => break,
                Err(_) => {
                    self.broken = true;
                    self.done = self.next;
                    return frame.number;
                }
            }
        }
        if at == whole {
            self.done += 1;
            return frame.number;
        }
        let (head, payload) = rest(&head, payload, at);
        let mut words = pool.take(payload.len().div_ceil(8));
        bytemuck::cast_slice_mut::<u64, u8>(&mut words)[..payload.len()].copy_from_slice(payload);
        self.queue.push_back(Parcel {
            head: head.to_vec(),
            words,
            bytes: payload.len(),
            at: 0,
        });
        frame.number
    }

    /// Writes what the kernel takes. A broken connection swallows the rest: the reading side and
    /// the control connection say what has become of the peer.
    pub(super) fn flush(&mut self, stream: &Stream, pool: &Pool) {
        while let Some(parcel) = self.queue.front_mut() {
            let (head, payload) = parcel.rest();
            match stream.write_vectored(&[IoSlice::new(head), IoSlice::new(payload)]) {
                Ok(n) => parcel.at += n,
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => return,
                Err(_) => {
                    self.broken = true;
                    self.queue.clear();
                    self.done = self.next;
                    return;
                }
            }
            if parcel.at == parcel.head.len() + parcel.bytes {
                drop(pool.give(core::mem::take(&mut parcel.words)));
                self.queue.pop_front();
                self.done += 1;
            }
        }
    }
}

impl Parcel {
    fn rest(&self) -> (&[u8], &[u8]) {
        let payload = &bytemuck::cast_slice::<u64, u8>(&self.words)[..self.bytes];
        rest(&self.head, payload, self.at)
    }
}

/// What is left of a head and a payload after `at` bytes of both.
fn rest<'a>(head: &'a [u8], payload: &'a [u8], at: usize) -> (&'a [u8], &'a [u8]) {
    match at.checked_sub(head.len()) {
        Some(at) => (&[], &payload[at..]),
        None => (&head[at..], payload),
    }
}

/// What is on its way in.
#[derive(Debug)]
pub(super) struct In {
    buffer: Box<[u8]>,
    start: usize,
    end: usize,
    /// A frame whose payload is not complete.
    part: Option<(Frame, Vec<u64>, usize)>,
    next: u64,
    /// Nothing more comes.
    pub(super) over: bool,
}

/// Why nothing more comes.
#[derive(Debug)]
pub(super) enum End {
    /// The stream ended or failed.
    Closed(String),
    /// What came is not what a peer sends.
    Damaged(String),
}

/// Small messages and headers are read through a buffer of this length.
const BUFFER: usize = 64 << 10;

impl In {
    pub(super) fn new() -> Self {
        Self {
            buffer: vec![0; BUFFER].into_boxed_slice(),
            start: 0,
            end: 0,
            part: None,
            next: 0,
            over: false,
        }
    }

    /// Reads once, or as long as large payloads last, and hands out every complete frame; whether
    /// any bytes came.
    pub(super) fn pull(
        &mut self,
        stream: &Stream,
        pool: &Pool,
        mut sink: impl FnMut(Frame, Vec<u64>),
    ) -> Result<bool, End> {
        let mut moved = false;
        loop {
            let (got, asked) = match self.read(stream) {
                Ok((0, _)) => {
                    self.over = true;
                    return Err(End::Closed(String::from("its connection was closed")));
                }
                Ok(read) => read,
                Err(e) if e.kind() == io::ErrorKind::Interrupted => continue,
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => return Ok(moved),
                Err(e) => {
                    self.over = true;
                    return Err(End::Closed(format!("its connection failed: {e}")));
                }
            };
            moved = true;
            if let Err(fault) = self.parse(pool, &mut sink) {
                self.over = true;
                return Err(End::Damaged(fault));
            }
            if got < asked {
                return Ok(true);
            }
        }
    }

    /// One read: into the payload that is open, then into the buffer.
    fn read(&mut self, stream: &Stream) -> io::Result<(usize, usize)> {
        if self.start == self.end {
            (self.start, self.end) = (0, 0);
        } else if self.start > 0 {
            self.buffer.copy_within(self.start..self.end, 0);
            (self.start, self.end) = (0, self.end - self.start);
        }
        let room = &mut self.buffer[self.end..];
        let asked_here = room.len();
        let Some((frame, words, at)) = &mut self.part else {
            let n = stream.read_vectored(&mut [IoSliceMut::new(room)])?;
            self.end += n;
            return Ok((n, asked_here));
        };
        // An open payload has emptied the buffer.
        let rest = &mut bytemuck::cast_slice_mut::<u64, u8>(words)[*at..frame.payload()];
        let asked = rest.len();
        let n = stream.read_vectored(&mut [IoSliceMut::new(rest), IoSliceMut::new(room)])?;
        let direct = n.min(asked);
        *at += direct;
        self.end += n - direct;
        // A full payload is reason enough to read on; a full buffer too, where that was the limit.
        Ok((n, asked))
    }

    fn parse(&mut self, pool: &Pool, sink: &mut impl FnMut(Frame, Vec<u64>)) -> Result<(), String> {
        loop {
            if let Some((frame, words, at)) = &mut self.part {
                let open = &mut bytemuck::cast_slice_mut::<u64, u8>(words)[*at..frame.payload()];
                let n = open.len().min(self.end - self.start);
                open[..n].copy_from_slice(&self.buffer[self.start..self.start + n]);
                *at += n;
                self.start += n;
                if *at < frame.payload() {
                    return Ok(());
                }
                check_payload(frame, words)?;
            }
            if let Some((frame, words, _)) = self.part.take() {
                sink(frame, words);
            }
            let ready = &self.buffer[self.start..self.end];
            let Some(header) = ready.first_chunk::<HEADER>() else {
                return Ok(());
            };
            let damaged =
                |fault: Fault, n| format!("frame {n} that it sent is damaged: {}", fault.words());
            let extent = Frame::extent(header).map_err(|f| damaged(f, self.next))?;
            if ready.len() < extent {
                return Ok(());
            }
            let frame = Frame::decode(ready).map_err(|f| damaged(f, self.next))?;
            if frame.number != self.next {
                return Err(format!(
                    "it sent frame {} where frame {} was to come",
                    frame.number, self.next
                ));
            }
            self.next += 1;
            self.start += extent;
            let words = pool.take(frame.payload().div_ceil(8));
            self.part = Some((frame, words, 0));
        }
    }
}

fn check_payload(frame: &Frame, words: &[u64]) -> Result<(), String> {
    let Some(expected) = frame.payload_crc else {
        return Ok(());
    };
    let got = crc32c::crc32c(&bytemuck::cast_slice::<u64, u8>(words)[..frame.payload()]);
    if got == expected {
        return Ok(());
    }
    Err(format!(
        "the payload of frame {} that it sent is damaged: CRC32C {got:08x} instead of {expected:08x}",
        frame.number
    ))
}
