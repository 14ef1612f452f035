//! What comes in from a connection.

use std::{
    boxed::Box,
    format,
    io::{self, IoSliceMut},
    string::String,
    vec,
    vec::Vec,
};

use super::{
    frame::{Fault, Frame, HEADER},
    pool::Pool,
    stream::Stream,
};
use crate::{DType, transport::Tag};

/// What is on its way in.
#[derive(Debug)]
pub(in super::super) struct In {
    buffer: Box<[u8]>,
    start: usize,
    end: usize,
    part: Option<Part>,
    next: u64,
    /// Nothing more comes.
    pub(in super::super) over: bool,
    /// Bytes that wake a sleeper: never more than are left of the payload that comes now.
    wakes: usize,
}

/// A frame whose payload is not complete.
#[derive(Debug)]
struct Part {
    frame: Frame,
    words: Vec<u64>,
    /// Bytes that are in their place.
    at: usize,
    goes: Goes,
}

/// Where a payload goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Goes {
    /// Into a storage, and then to its group.
    Here,
    /// Where the owner of this group wants it, who alone reads it.
    Along(u64),
    /// The same as soon as he comes to it, which he is about to.
    Later(u64),
    /// Nowhere: who claimed it is gone.
    Away,
}

/// Why nothing more comes.
#[derive(Debug)]
pub(in super::super) enum End {
    /// The stream ended or failed.
    Closed(String),
    /// What came is not what a peer sends.
    Damaged(String),
}

/// Whoever gets what comes.
pub(in super::super) trait Sink {
    /// Whether somebody wants to read the payload of this frame himself.
    fn claims(&mut self, frame: &Frame) -> Option<Claim>;
    /// A frame that is complete.
    fn deliver(&mut self, frame: Frame, words: Vec<u64>);
}

/// A payload that is read by the owner of a group, to where he wants it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in super::super) struct Claim {
    /// The group.
    pub(in super::super) group: u64,
    /// Whether he waits for it already.
    pub(in super::super) wanted: bool,
}

/// Bytes of a long payload for which a sleeper is woken.
const MOUTHFUL: usize = 512 << 10;

/// Small messages and headers are read through a buffer of this length.
const BUFFER: usize = 64 << 10;

impl In {
    pub(in super::super) fn new() -> Self {
        Self {
            buffer: vec![0; BUFFER].into_boxed_slice(),
            start: 0,
            end: 0,
            part: None,
            next: 0,
            over: false,
            wakes: 1,
        }
    }

    /// Somebody is about to sleep until something comes: a long payload need not wake him for every packet.
    pub(in super::super) fn doze(&mut self, stream: &Stream) {
        let bytes = self.left().clamp(1, MOUTHFUL);
        if bytes != self.wakes && stream.wake_from(bytes) {
            self.wakes = bytes;
        }
    }

    /// What has been read makes less do to wake whoever sleeps.
    fn stir(&mut self, stream: &Stream) {
        let most = self.left().max(1);
        if self.wakes > most && stream.wake_from(most) {
            self.wakes = most;
        }
    }

    /// Bytes left to be read of the payload that comes now.
    fn left(&self) -> usize {
        let open = self.part.as_ref();
        let open = open.map_or(0, |part| part.frame.payload() - part.at);
        open.saturating_sub(self.end - self.start)
    }

    /// Who has claimed the payload that comes now.
    pub(in super::super) fn claim(&self) -> Option<Claim> {
        let (group, wanted) = match self.part.as_ref()?.goes {
            Goes::Along(group) => (group, true),
            Goes::Later(group) => (group, false),
            Goes::Here | Goes::Away => return None,
        };
        Some(Claim { group, wanted })
    }

    /// Who claimed what comes now does not want it any more.
    pub(in super::super) fn disclaim(&mut self) {
        if let Some(part) = self.part.as_mut().filter(|p| p.goes != Goes::Here) {
            part.goes = Goes::Away;
        }
    }

    /// The owner of this group is there to read the message, if it is what comes now. One that is not as he expects it
    /// comes whole, and he is told of it as of any other.
    pub(in super::super) fn want(
        &mut self,
        group: u64,
        (tag, dtype, len): (Tag, DType, usize),
        pool: &Pool,
    ) -> bool {
        let Some(part) = self.part.as_mut().filter(|part| part.frame.tag == tag) else {
            return false;
        };
        if part.goes == Goes::Later(group) {
            if (part.frame.dtype, part.frame.len) == (dtype, len as u64) {
                part.goes = Goes::Along(group);
            } else {
                self.store(pool);
                return false;
            }
        }
        part.goes == Goes::Along(group)
    }

    /// What was to be read later is read now, into a storage: somebody waits for that, or for what comes behind it.
    pub(in super::super) fn store(&mut self, pool: &Pool) {
        if let Some(part) = &mut self.part
            && let Goes::Later(_) = part.goes
        {
            part.words = pool.take(part.frame.payload().div_ceil(8));
            part.goes = Goes::Here;
        }
    }

    /// Reads once, or as long as large payloads last, and hands out every complete frame; whether
    /// any bytes came.
    pub(in super::super) fn pull(
        &mut self,
        stream: &Stream,
        pool: &Pool,
        sink: &mut impl Sink,
    ) -> Result<bool, End> {
        let mut moved = false;
        loop {
            // A payload that was taken may have left something behind it.
            self.parse(pool, sink)?;
            if self.claim().is_some() {
                return Ok(moved);
            }
            let Some((got, asked)) = self.read(stream)? else {
                return Ok(moved);
            };
            self.stir(stream);
            moved = true;
            if got < asked {
                self.parse(pool, sink)?;
                return Ok(true);
            }
        }
    }

    /// Reads on in the claimed payload, into `room`, as far as it has come; how many bytes.
    pub(in super::super) fn take(
        &mut self,
        stream: &Stream,
        room: &mut [u8],
    ) -> Result<usize, End> {
        let Some(part) = &mut self.part else {
            return Ok(0);
        };
        let left = part.frame.payload() - part.at;
        let asked = room.len().min(left);
        let mut n = asked.min(self.end - self.start);
        room[..n].copy_from_slice(&self.buffer[self.start..self.start + n]);
        self.start += n;
        part.at += n;
        while n < asked {
            // The buffer is empty. What follows the payload goes there.
            (self.start, self.end) = (0, 0);
            let behind = if asked == left {
                &mut self.buffer[..]
            } else {
                &mut []
            };
            let room = &mut room[n..asked];
            let here = room.len();
            let read = once(
                stream,
                &mut [IoSliceMut::new(room), IoSliceMut::new(behind)],
            );
            let got = match read {
                Ok(Some(got)) => got,
                Ok(None) => break,
                // The end is there to be seen again, after these.
                Err(_) if n > 0 => break,
                Err(end) => {
                    self.over = true;
                    return Err(end);
                }
            };
            let direct = got.min(here);
            self.end = got - direct;
            n += direct;
            if let Some(part) = &mut self.part {
                part.at += direct;
            }
            if got < here {
                break;
            }
        }
        if n == left {
            self.part = None;
        }
        self.stir(stream);
        Ok(n)
    }

    /// One read: into the payload that is open, then into the buffer. How much came, and how much could have.
    fn read(&mut self, stream: &Stream) -> Result<Option<(usize, usize)>, End> {
        if self.start == self.end {
            (self.start, self.end) = (0, 0);
        } else if self.start > 0 {
            self.buffer.copy_within(self.start..self.end, 0);
            (self.start, self.end) = (0, self.end - self.start);
        }
        let room = &mut self.buffer[self.end..];
        let asked_here = room.len();
        let part = self.part.as_mut().filter(|part| part.goes == Goes::Here);
        let read = match part {
            None => once(stream, &mut [IoSliceMut::new(room)]).map(|n| {
                let n = n?;
                self.end += n;
                Some((n, asked_here))
            }),
            Some(part) => {
                // An open payload has emptied the buffer.
                let bytes = bytemuck::cast_slice_mut::<u64, u8>(&mut part.words);
                let rest = &mut bytes[part.at..part.frame.payload()];
                let asked = rest.len();
                once(stream, &mut [IoSliceMut::new(rest), IoSliceMut::new(room)]).map(|n| {
                    let n = n?;
                    let direct = n.min(asked);
                    part.at += direct;
                    self.end += n - direct;
                    // A full payload is reason enough to read on; a full buffer too, where that was the limit.
                    Some((n, asked))
                })
            }
        };
        self.over |= read.is_err();
        read
    }

    /// Hands out what is complete, up to a payload that somebody claims.
    fn parse(&mut self, pool: &Pool, sink: &mut impl Sink) -> Result<(), End> {
        let parsed = self.parse_on(pool, sink);
        self.over |= parsed.is_err();
        parsed.map_err(End::Damaged)
    }

    fn parse_on(&mut self, pool: &Pool, sink: &mut impl Sink) -> Result<(), String> {
        loop {
            if let Some(part) = &mut self.part {
                let open = part.frame.payload() - part.at;
                let n = open.min(self.end - self.start);
                match part.goes {
                    Goes::Along(_) | Goes::Later(_) => return Ok(()),
                    Goes::Away => {}
                    Goes::Here => {
                        let bytes = bytemuck::cast_slice_mut::<u64, u8>(&mut part.words);
                        bytes[part.at..part.at + n]
                            .copy_from_slice(&self.buffer[self.start..self.start + n]);
                    }
                }
                part.at += n;
                self.start += n;
                if n < open {
                    return Ok(());
                }
                if part.goes == Goes::Here {
                    check_payload(&part.frame, &part.words)?;
                }
            }
            if let Some(part) = self.part.take().filter(|part| part.goes == Goes::Here) {
                sink.deliver(part.frame, part.words);
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
            let (goes, words) = match sink.claims(&frame) {
                Some(Claim { group, wanted }) if wanted => (Goes::Along(group), Vec::new()),
                Some(Claim { group, .. }) => (Goes::Later(group), Vec::new()),
                None => (Goes::Here, pool.take(frame.payload().div_ceil(8))),
            };
            self.part = Some(Part {
                frame,
                words,
                at: 0,
                goes,
            });
        }
    }
}

/// What one read brings; none where nothing is there.
fn once(stream: &Stream, rooms: &mut [IoSliceMut<'_>]) -> Result<Option<usize>, End> {
    loop {
        match stream.read_vectored(rooms) {
            Ok(0) => return Err(End::Closed(String::from("its connection was closed"))),
            Ok(n) => return Ok(Some(n)),
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => return Ok(None),
            Err(e) => return Err(End::Closed(format!("its connection failed: {e}"))),
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::transport::socket::frame::Kind;
    use std::{io::Write, net::TcpListener, net::TcpStream};

    /// Claims the frames of one length.
    #[derive(Default)]
    struct Hears {
        claims: u64,
        wanted: bool,
        came: Vec<(u64, Vec<u8>)>,
    }

    impl Sink for Hears {
        fn claims(&mut self, frame: &Frame) -> Option<Claim> {
            let wanted = self.wanted;
            (frame.len == self.claims).then_some(Claim { group: 9, wanted })
        }
        fn deliver(&mut self, frame: Frame, words: Vec<u64>) {
            let bytes = &bytemuck::cast_slice::<u64, u8>(&words)[..frame.payload()];
            self.came.push((frame.len, bytes.to_vec()));
        }
    }

    fn frame(number: u64, len: usize) -> Vec<u8> {
        let frame = Frame {
            kind: Kind::Data,
            dtype: DType::U8,
            generation: 0,
            from: 1,
            group: 9,
            tag: Tag::Collective(3),
            number,
            len: len as u64,
            payload_crc: None,
            call: None,
        };
        let mut bytes = frame.encode();
        bytes.extend((0..len).map(|i| (i * 3 + number as usize) as u8));
        bytes
    }

    fn connection() -> (TcpStream, Stream) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let to = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        to.set_nodelay(true).unwrap();
        let stream = Stream::Tcp(listener.accept().unwrap().0);
        stream.set_nonblocking(true).unwrap();
        (to, stream)
    }

    /// Sleeps until something wakes it, as ranks do; whether anything did. `turns` bounds how often.
    fn wakes(stream: &Stream, turns: &mut usize) -> bool {
        use rustix::event::{PollFd, PollFlags, Timespec, poll};
        let time = Timespec {
            tv_sec: 2,
            tv_nsec: 0,
        };
        *turns += 1;
        *turns < 100_000
            && poll(&mut [PollFd::new(stream, PollFlags::IN)], Some(&time)).unwrap() > 0
    }

    const LONG: usize = 300_001;

    /// Three frames, the second of them claimed, written in pieces of every length.
    #[test]
    fn a_claimed_payload_is_left_to_its_claimant() {
        for (piece, wanted) in [
            (1 << 20, true),
            (50_000, true),
            (70_000, false),
            (997, false),
        ] {
            let ((mut to, stream), mut turns) = (connection(), 0);
            let sent: Vec<u8> = [frame(0, 10), frame(1, LONG), frame(2, 20)].concat();
            let writer = std::thread::spawn(move || {
                sent.chunks(piece)
                    .for_each(|piece| to.write_all(piece).unwrap());
                to
            });
            let (pool, mut inn) = (Pool::default(), In::new());
            let mut hears = Hears {
                claims: LONG as u64,
                wanted,
                ..Hears::default()
            };
            let mut taken: Vec<u8> = Vec::new();
            while hears.came.len() < 2 {
                inn.doze(&stream);
                assert!(inn.wakes <= inn.left().max(1) && inn.wakes <= MOUTHFUL);
                assert!(wakes(&stream, &mut turns), "{} of {LONG}", taken.len());
                inn.pull(&stream, &pool, &mut hears).unwrap();
                if inn.claim().is_some() {
                    assert_eq!(hears.came.len(), 1);
                    assert!(!inn.want(9, (Tag::Collective(4), DType::U8, LONG), &pool));
                    assert!(inn.want(9, (Tag::Collective(3), DType::U8, LONG), &pool));
                    let mut room = [0; 40_000];
                    let n = inn.take(&stream, &mut room).unwrap();
                    taken.extend(&room[..n]);
                    assert!(inn.wakes <= inn.left().max(1));
                    inn.pull(&stream, &pool, &mut hears).unwrap();
                }
            }
            assert_eq!(taken, frame(1, LONG)[HEADER..]);
            assert_eq!(hears.came[0], (10, frame(0, 10)[HEADER..].to_vec()));
            assert_eq!(hears.came[1], (20, frame(2, 20)[HEADER..].to_vec()));
            drop(writer.join().unwrap());
        }
    }

    /// What nobody takes any more is passed over, and what is wanted whole after all comes whole.
    #[test]
    fn a_claim_may_be_given_up() {
        let cases = [
            (false, Some(false)),
            (false, Some(true)),
            (true, None),
            (false, None),
        ];
        for (taken, stored) in cases {
            let ((mut to, stream), mut turns) = (connection(), 0);
            let sent: Vec<u8> = [frame(0, LONG), frame(1, 20)].concat();
            let writer = std::thread::spawn(move || {
                to.write_all(&sent).unwrap();
                to
            });
            let (pool, mut inn) = (Pool::default(), In::new());
            let mut hears = Hears {
                claims: LONG as u64,
                wanted: taken,
                ..Hears::default()
            };
            while inn.claim().is_none() {
                assert!(wakes(&stream, &mut turns));
                inn.pull(&stream, &pool, &mut hears).unwrap();
            }
            if taken {
                assert!(inn.take(&stream, &mut [0; 1000]).unwrap() > 0);
            }
            match stored {
                Some(false) => inn.store(&pool),
                // Who expects another length gets this one whole, to be told of it.
                Some(true) => {
                    let other = (Tag::Collective(3), DType::U8, LONG - 1);
                    assert!(!inn.want(9, other, &pool) && inn.claim().is_none());
                }
                None => inn.disclaim(),
            }
            while hears.came.last().is_none_or(|last| last.0 != 20) {
                inn.doze(&stream);
                assert!(wakes(&stream, &mut turns));
                inn.pull(&stream, &pool, &mut hears).unwrap();
            }
            let whole = (LONG as u64, frame(0, LONG)[HEADER..].to_vec());
            assert_eq!(hears.came.contains(&whole), stored.is_some());
            assert_eq!(hears.came.len(), 1 + usize::from(stored.is_some()));
            drop(writer.join().unwrap());
        }
    }

    /// However many bytes a sleeper waits for, the end of the connection wakes him.
    #[test]
    fn an_end_in_the_middle_wakes() {
        let ((mut to, stream), mut turns) = (connection(), 0);
        to.write_all(&frame(0, LONG)[..LONG / 2]).unwrap();
        let (pool, mut inn, mut hears) = (Pool::default(), In::new(), Hears::default());
        while inn.left() == 0 {
            assert!(wakes(&stream, &mut turns));
            inn.pull(&stream, &pool, &mut hears).unwrap();
        }
        while inn.pull(&stream, &pool, &mut hears).unwrap() {}
        inn.doze(&stream);
        assert!(inn.wakes > 1);
        drop(to);
        assert!(wakes(&stream, &mut turns));
        assert!(matches!(
            inn.pull(&stream, &pool, &mut hears),
            Err(End::Closed(_))
        ));
    }
}
