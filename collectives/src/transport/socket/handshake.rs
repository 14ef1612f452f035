//! Who is at the other end: magic, run, generation, ranks, and proof of a shared secret.
//!
//! ```text
//! connector                                              acceptor
//!   Hello   run, generation, world, from, to, kind, nonce -->
//!                                             <-- Reply   status, nonce, HMAC(secret, "a", all so far)
//!   Proof   HMAC(secret, "c", all so far) -->
//!                                             <-- status
//! ```
//!
//! HMAC-SHA256, compared in constant time; the secret itself never travels. Without a secret the key
//! is empty and this only shows that both ends belong to the same run. It keeps out whoever lacks
//! the secret; it does not encrypt, and somebody who can change packets on their way may do so.

use std::{
    format,
    io::{self, IoSliceMut},
    string::String,
    time::{Duration, Instant},
    vec::Vec,
};

use hmac::{Hmac, KeyInit, Mac};
use sha2::{Digest, Sha256};

use super::{
    codec::{Reader, Writer},
    stream::Stream,
};

const HELLO_MAGIC: [u8; 4] = *b"QNTH";
const REPLY_MAGIC: [u8; 4] = *b"QNTR";
const VERSION: u32 = 1;
const NONCE: usize = 32;
const RUN: usize = 16;
/// Bytes of a hello.
pub(crate) const HELLO: usize = 4 + 4 + RUN + 4 * 4 + 1 + NONCE + 4;
const REPLY: usize = 4 + 1 + NONCE + 32;

/// How long a stranger may take for a handshake.
pub(crate) const PATIENCE: Duration = Duration::from_secs(5);

/// What a connection is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Purpose {
    Data,
    Control,
    Store,
}

/// What both ends must agree on.
#[derive(Debug, Clone)]
pub(crate) struct Identity {
    pub(crate) run: [u8; RUN],
    pub(crate) generation: u32,
    pub(crate) world: u32,
    pub(crate) rank: u32,
    pub(crate) secret: Vec<u8>,
}

/// The first thing a connector says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Hello {
    pub(crate) run: [u8; RUN],
    pub(crate) generation: u32,
    pub(crate) world: u32,
    pub(crate) from: u32,
    pub(crate) to: u32,
    pub(crate) purpose: Purpose,
    nonce: [u8; NONCE],
}

/// Why a handshake came to nothing.
#[derive(Debug)]
pub(crate) enum Refusal {
    /// The other end is no peer of this run, or no peer at all.
    Stranger(String),
    /// It is of this run and says no, or has another secret.
    Refused(String),
}

/// A run's name as it travels.
pub(crate) fn run_digest(run: &str) -> [u8; RUN] {
    let hash = Sha256::digest(run.as_bytes()).0;
    core::array::from_fn(|i| hash[i])
}

impl Hello {
    fn encode(&self) -> Vec<u8> {
        let mut w = Writer::default();
        w.0.extend(HELLO_MAGIC);
        w.u32(VERSION);
        w.0.extend(self.run);
        w.u32(self.generation);
        w.u32(self.world);
        w.u32(self.from);
        w.u32(self.to);
        w.u8(match self.purpose {
            Purpose::Data => 0,
            Purpose::Control => 1,
            Purpose::Store => 2,
        });
        w.0.extend(self.nonce);
        w.u32(crc32c::crc32c(&w.0));
        w.0
    }

    pub(crate) fn decode(bytes: &[u8; HELLO]) -> Option<Self> {
        let (fields, crc) = bytes.split_at(HELLO - 4);
        if fields[..4] != HELLO_MAGIC || crc32c::crc32c(fields).to_le_bytes() != *crc {
            return None;
        }
        let mut r = Reader(&fields[4..]);
        if r.u32()? != VERSION {
            return None;
        }
        let run = r.take(RUN)?.try_into().ok()?;
        let (generation, world, from, to) = (r.u32()?, r.u32()?, r.u32()?, r.u32()?);
        let purpose = match r.u8()? {
            0 => Purpose::Data,
            1 => Purpose::Control,
            2 => Purpose::Store,
            _ => return None,
        };
        let nonce = r.take(NONCE)?.try_into().ok()?;
        Some(Self {
            run,
            generation,
            world,
            from,
            to,
            purpose,
            nonce,
        })
    }
}

/// Introduces this rank to `to` over a fresh connection.
pub(crate) fn introduce(
    stream: &Stream,
    me: &Identity,
    to: u32,
    purpose: Purpose,
    until: Instant,
) -> Result<(), Refusal> {
    let hello = Hello {
        run: me.run,
        generation: me.generation,
        world: me.world,
        from: me.rank,
        to,
        purpose,
        nonce: nonce()?,
    };
    let mut said = hello.encode();
    write_all(stream, &said, until)?;
    let mut reply = [0; REPLY];
    read_exact(stream, &mut reply, until)?;
    if reply[..4] != REPLY_MAGIC {
        return Err(Refusal::Stranger(String::from(
            "it does not answer as a peer",
        )));
    }
    status(reply[4])?;
    said.extend(&reply[..5 + NONCE]);
    mac(me, b'a', &said)
        .verify_slice(&reply[5 + NONCE..])
        .map_err(|_| Refusal::Refused(String::from("it does not know the secret of this run")))?;
    write_all(stream, &mac(me, b'c', &said).finalize().into_bytes(), until)?;
    let mut last = [0];
    read_exact(stream, &mut last, until)?;
    status(last[0])
}

/// Hears who connected; `judge` says 0 or why not ([`status`]).
pub(crate) fn receive(
    stream: &Stream,
    me: &Identity,
    until: Instant,
    judge: impl Fn(&Hello) -> u8,
) -> Result<Hello, Refusal> {
    let mut said = [0; HELLO];
    read_exact(stream, &mut said, until)?;
    let hello = Hello::decode(&said)
        .ok_or_else(|| Refusal::Stranger(String::from("it does not begin as a peer")))?;
    let code = judge(&hello);
    let mut said = said.to_vec();
    said.extend(REPLY_MAGIC);
    said.push(code);
    said.extend(nonce()?);
    let mut reply = said[HELLO..].to_vec();
    reply.extend(&*mac(me, b'a', &said).finalize().into_bytes());
    write_all(stream, &reply, until)?;
    status(code)?;
    let mut proof = [0; 32];
    read_exact(stream, &mut proof, until)?;
    let known = mac(me, b'c', &said).verify_slice(&proof).is_ok();
    write_all(stream, &[if known { 0 } else { SECRET }], until)?;
    if known {
        Ok(hello)
    } else {
        Err(Refusal::Refused(format!(
            "rank {} does not know the secret of this run",
            hello.from
        )))
    }
}

pub(crate) const OTHER_RUN: u8 = 1;
pub(crate) const OTHER_GENERATION: u8 = 2;
pub(crate) const OTHER_WORLD: u8 = 3;
pub(crate) const OTHER_RANK: u8 = 4;
pub(crate) const SECRET: u8 = 5;
pub(crate) const TAKEN: u8 = 6;

fn status(code: u8) -> Result<(), Refusal> {
    let refused = |words: &str| Err(Refusal::Refused(String::from(words)));
    match code {
        0 => Ok(()),
        OTHER_RUN => Err(Refusal::Stranger(String::from("it belongs to another run"))),
        OTHER_GENERATION => refused("it is of another generation of this run"),
        OTHER_WORLD => refused("it counts another number of ranks"),
        OTHER_RANK => refused("it is another rank"),
        SECRET => refused("it says that this rank does not know the secret of the run"),
        TAKEN => refused("another process has this rank's place"),
        _ => Err(Refusal::Stranger(String::from(
            "it does not answer as a peer",
        ))),
    }
}

impl From<io::Error> for Refusal {
    fn from(e: io::Error) -> Self {
        Self::Stranger(format!("the handshake broke off: {e}"))
    }
}

fn mac(me: &Identity, role: u8, said: &[u8]) -> Hmac<Sha256> {
    // Any key length will do for HMAC; the type has an error for other functions.
    let mut mac = Hmac::<Sha256>::new_from_slice(&me.secret)
        .unwrap_or_else(|_| Hmac::<Sha256>::new(&Default::default()));
    mac.update(&[role]);
    mac.update(said);
    mac
}

fn nonce() -> Result<[u8; NONCE], Refusal> {
    let mut nonce = [0; NONCE];
    getrandom::fill(&mut nonce)
        .map_err(|e| Refusal::Refused(format!("there are no random numbers: {e}")))?;
    Ok(nonce)
}

/// All of `buf` before `until`, however slowly the bytes drip.
pub(crate) fn read_exact(stream: &Stream, buf: &mut [u8], until: Instant) -> io::Result<()> {
    let mut at = 0;
    while at < buf.len() {
        let left = until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(io::ErrorKind::TimedOut.into());
        }
        stream.set_timeout(left)?;
        match stream.read_vectored(&mut [IoSliceMut::new(&mut buf[at..])]) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(n) => at += n,
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(e) => return Err(e),
        }
    }
    Ok(())
}

/// All of `buf` before `until`.
pub(crate) fn write_all(stream: &Stream, buf: &[u8], until: Instant) -> io::Result<()> {
    let left = until.saturating_duration_since(Instant::now());
    if left.is_zero() {
        return Err(io::ErrorKind::TimedOut.into());
    }
    stream.set_timeout(left)?;
    stream.write_all(buf)
}
