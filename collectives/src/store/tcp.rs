//! One process serves a store, the others connect.
//!
//! ```text
//! request   length (u32)  op (u8)  key  value  milliseconds (u64)
//! answer    length (u32)  status (u8)  value or sentence
//! ```
//!
//! The connection begins with the handshake of the data connections: magic, run, secret.

use std::{
    collections::HashMap,
    format,
    ops::RangeInclusive,
    string::{String, ToString},
    sync::{
        Arc, Condvar, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
    vec,
    vec::Vec,
};

use rustix::event::{PollFd, PollFlags};

use super::{MAX_KEY, MAX_VALUE, Store, fits, late, sum};
use crate::{
    Error, Result,
    transport::socket::{
        handshake::{
            Hello, Identity, OTHER_RUN, PATIENCE, Purpose, Refusal, introduce, read_exact, receive,
            run_digest, write_all,
        },
        stream::{Listener, Stream, attempt},
        waker::Waker,
    },
};

/// The name a store has in a handshake.
const STORE: u32 = u32::MAX;

fn identity(run: &str, secret: &[u8]) -> Identity {
    Identity {
        run: run_digest(run),
        generation: 0,
        world: 0,
        rank: STORE,
        secret: secret.to_vec(),
    }
}

/// What is asked of a store.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Request {
    op: Op,
    key: String,
    value: Vec<u8>,
    timeout: Duration,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Op {
    Set,
    Get,
    Wait,
    Add,
    Delete,
}

const OPS: [Op; 5] = [Op::Set, Op::Get, Op::Wait, Op::Add, Op::Delete];

impl Request {
    fn encode(&self) -> Vec<u8> {
        let mut body = vec![OPS.iter().position(|op| *op == self.op).unwrap_or(0) as u8];
        for part in [self.key.as_bytes(), &self.value] {
            body.extend((part.len() as u32).to_le_bytes());
            body.extend(part);
        }
        body.extend((self.timeout.as_millis() as u64).to_le_bytes());
        body
    }

    /// Reads what `encode` wrote; none for anything else.
    fn decode(body: &[u8]) -> Option<Self> {
        let (op, rest) = body.split_first()?;
        let op = *OPS.get(usize::from(*op))?;
        let (key, rest) = part(rest)?;
        let (value, rest) = part(rest)?;
        let timeout = Duration::from_millis(u64::from_le_bytes(rest.try_into().ok()?));
        let key = core::str::from_utf8(key).ok()?.to_string();
        (!key.is_empty() && key.len() <= MAX_KEY && value.len() <= MAX_VALUE).then(|| Self {
            op,
            key,
            value: value.to_vec(),
            timeout,
        })
    }
}

fn part(bytes: &[u8]) -> Option<(&[u8], &[u8])> {
    let (len, rest) = bytes.split_first_chunk::<4>()?;
    rest.split_at_checked(u32::from_le_bytes(*len) as usize)
}

/// Whether bytes are the body of a request.
pub(crate) fn is_request(body: &[u8]) -> bool {
    Request::decode(body).is_some()
}

const DONE: u8 = 0;
const NOTHING: u8 = 1;
const REFUSED: u8 = 2;

/// Serves a store to the ranks of one run until it is dropped.
#[derive(Debug)]
pub struct StoreServer {
    shared: Arc<Shared>,
    port: u16,
    acceptor: Option<JoinHandle<()>>,
}

#[derive(Debug)]
struct Shared {
    me: Identity,
    table: Mutex<HashMap<String, Vec<u8>>>,
    changed: Condvar,
    clients: AtomicUsize,
    closing: AtomicBool,
    /// Rings when it closes.
    waker: Waker,
}

/// Strangers heard at a time; more are turned away at once.
const GUESTS: usize = 256;

/// How long a server that is dropped waits for those who still ask.
const LINGER: Duration = Duration::from_secs(10);

impl StoreServer {
    /// Listens on the first free port of `ports`: where `host` is a loopback address, only there, else
    /// on every interface.
    ///
    /// # Errors
    /// [`Error::System`] with the address where no port is free.
    pub fn start(ports: RangeInclusive<u16>, host: &str, run: &str, secret: &[u8]) -> Result<Self> {
        let listener = Listener::tcp(ports, host)?;
        let port = listener.port();
        let shared = Arc::new(Shared {
            me: identity(run, secret),
            table: Mutex::default(),
            changed: Condvar::new(),
            clients: AtomicUsize::new(0),
            closing: AtomicBool::new(false),
            waker: Waker::new()?,
        });
        let serving = shared.clone();
        let acceptor = thread::Builder::new()
            .name(String::from("store"))
            .spawn(move || accept(&listener, &serving))
            .map_err(|e| Error::System {
                what: "start a thread",
                reason: e.to_string(),
            })?;
        Ok(Self {
            shared,
            port,
            acceptor: Some(acceptor),
        })
    }

    /// The port it listens on.
    #[must_use]
    pub fn port(&self) -> u16 {
        self.port
    }
}

impl Drop for StoreServer {
    /// Lets the ranks that are connected finish, ten seconds at most.
    fn drop(&mut self) {
        let until = Instant::now() + LINGER;
        while self.shared.clients.load(Ordering::Acquire) > 0 && Instant::now() < until {
            thread::sleep(Duration::from_millis(2));
        }
        self.shared.closing.store(true, Ordering::Release);
        self.shared.changed.notify_all();
        self.shared.waker.wake();
        if let Some(acceptor) = self.acceptor.take() {
            // It has nothing to say.
            let _ = acceptor.join();
        }
    }
}

fn accept(listener: &Listener, shared: &Arc<Shared>) {
    let guests = Arc::new(AtomicUsize::new(0));
    while !shared.closing.load(Ordering::Acquire) {
        let mut fds = [
            PollFd::new(listener, PollFlags::IN),
            PollFd::new(&shared.waker, PollFlags::IN),
        ];
        // Nothing to accept is found out below.
        let _ = rustix::event::poll(&mut fds, None);
        loop {
            let stream = match listener.accept() {
                Ok(Some(stream)) => stream,
                Ok(None) => break,
                Err(_) => {
                    // No descriptor is free, say: the next moment may be better.
                    thread::sleep(Duration::from_millis(20));
                    break;
                }
            };
            if guests.fetch_add(1, Ordering::AcqRel) >= GUESTS {
                guests.fetch_sub(1, Ordering::AcqRel);
                continue;
            }
            let (shared, heard) = (shared.clone(), guests.clone());
            let thread = thread::Builder::new().name(String::from("store client"));
            let spawned = thread.spawn(move || {
                let known = greet(&stream, &shared);
                heard.fetch_sub(1, Ordering::AcqRel);
                if known {
                    serve(&stream, &shared);
                }
            });
            if spawned.is_err() {
                guests.fetch_sub(1, Ordering::AcqRel);
            }
        }
    }
}

/// Whether somebody of this run is at the other end.
fn greet(stream: &Stream, shared: &Shared) -> bool {
    let of_this_run = |hello: &Hello| {
        if hello.run == shared.me.run && hello.purpose == Purpose::Store {
            0
        } else {
            OTHER_RUN
        }
    };
    let by = Instant::now() + PATIENCE;
    receive(stream, &shared.me, by, of_this_run).is_ok()
}

fn serve(stream: &Stream, shared: &Shared) {
    stream.tune();
    shared.clients.fetch_add(1, Ordering::AcqRel);
    // A client that is gone, or that asks for nothing that can be, is served no longer.
    while let Ok(body) = read_block(stream, Instant::now() + IDLE) {
        let Some(request) = Request::decode(&body) else {
            break;
        };
        let (status, value) = shared.answer(request);
        let mut block = vec![status];
        block.extend(value);
        if write_block(stream, &block, Instant::now() + PATIENCE).is_err() {
            break;
        }
    }
    shared.clients.fetch_sub(1, Ordering::AcqRel);
}

/// A client that asks for nothing for so long is gone.
const IDLE: Duration = Duration::from_secs(24 * 3600);

impl Shared {
    fn answer(&self, request: Request) -> (u8, Vec<u8>) {
        let Request {
            op,
            key,
            value,
            timeout,
        } = request;
        let mut table = lock(&self.table);
        let outcome = match op {
            Op::Set => {
                table.insert(key, value);
                (DONE, Vec::new())
            }
            Op::Get => table
                .get(&key)
                .map_or((NOTHING, Vec::new()), |value| (DONE, value.clone())),
            Op::Wait => return self.await_key(table, &key, timeout),
            Op::Add => {
                let delta = core::str::from_utf8(&value)
                    .ok()
                    .and_then(|v| v.parse().ok());
                let old = table.get(&key).map(Vec::as_slice);
                match sum(&key, old, delta.unwrap_or(0)) {
                    Ok(sum) => {
                        let text = sum.to_string().into_bytes();
                        table.insert(key, text.clone());
                        (DONE, text)
                    }
                    Err(error) => (REFUSED, error.to_string().into_bytes()),
                }
            }
            Op::Delete => match table.remove(&key) {
                Some(_) => (DONE, Vec::new()),
                None => (NOTHING, Vec::new()),
            },
        };
        drop(table);
        self.changed.notify_all();
        outcome
    }

    fn await_key(
        &self,
        mut table: MutexGuard<'_, HashMap<String, Vec<u8>>>,
        key: &str,
        timeout: Duration,
    ) -> (u8, Vec<u8>) {
        let until = Instant::now() + timeout.min(IDLE);
        loop {
            if let Some(value) = table.get(key) {
                return (DONE, value.clone());
            }
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() || self.closing.load(Ordering::Acquire) {
                return (NOTHING, Vec::new());
            }
            table = self
                .changed
                .wait_timeout(table, left)
                .unwrap_or_else(PoisonError::into_inner)
                .0;
        }
    }
}

/// A store served by a [`StoreServer`] elsewhere.
#[derive(Debug)]
pub struct TcpStore {
    host: String,
    ports: RangeInclusive<u16>,
    me: Identity,
    /// None after a failure: the next call connects again.
    stream: Mutex<Option<Stream>>,
}

impl TcpStore {
    /// Connects to the server of this run on `host`, at whichever of `ports` it is; all are tried
    /// until it answers. What answers on another port is left alone.
    ///
    /// # Errors
    /// [`Error::Rendezvous`] where no server of this run was found in time, or where it does not
    /// share the secret.
    pub fn connect(
        host: &str,
        ports: RangeInclusive<u16>,
        run: &str,
        secret: &[u8],
        timeout: Duration,
    ) -> Result<Self> {
        let store = Self {
            host: host.to_string(),
            ports,
            me: identity(run, secret),
            stream: Mutex::new(None),
        };
        let found = store.find(Instant::now() + timeout)?;
        *lock(&store.stream) = Some(found);
        Ok(store)
    }

    fn find(&self, until: Instant) -> Result<Stream> {
        let mut pause = Duration::from_millis(5);
        loop {
            let mut errors = Vec::new();
            for port in self.ports.clone() {
                let address = if self.host.contains(':') && !self.host.starts_with('[') {
                    format!("tcp:[{}]:{port}", self.host)
                } else {
                    format!("tcp:{}:{port}", self.host)
                };
                let by = until.min(Instant::now() + PATIENCE);
                let stream = match attempt(&address, by) {
                    Ok(stream) => stream,
                    Err(e) => {
                        errors.push(e);
                        continue;
                    }
                };
                let by = until.min(Instant::now() + Duration::from_secs(1));
                match introduce(&stream, &self.me, STORE, Purpose::Store, by) {
                    Ok(()) => {
                        stream.tune();
                        return Ok(stream);
                    }
                    Err(Refusal::Refused(why)) => {
                        return Err(Error::Rendezvous(format!("store at {address}: {why}")));
                    }
                    Err(Refusal::Stranger(why)) => errors.push(format!("{address}: {why}")),
                }
            }
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(Error::Rendezvous(format!(
                    "no store of this run on {}: {}",
                    self.host,
                    errors.join("; ")
                )));
            }
            // Not all at once: many ranks may be trying.
            let jitter = getrandom::u32().unwrap_or(0) % 32;
            thread::sleep((pause + Duration::from_millis(u64::from(jitter))).min(left));
            pause = (pause * 2).min(Duration::from_millis(500));
        }
    }

    fn ask(&self, op: Op, key: &str, value: &[u8], timeout: Duration) -> Result<(u8, Vec<u8>)> {
        fits(key, value)?;
        let by = Instant::now() + timeout + GRACE;
        let mut stream = lock(&self.stream);
        let connected = match stream.take() {
            Some(stream) => stream,
            None => self.find(by)?,
        };
        let request = Request {
            op,
            key: key.to_string(),
            value: value.to_vec(),
            timeout,
        };
        let answered = write_block(&connected, &request.encode(), by)
            .and_then(|()| read_block(&connected, by));
        let answer = answered.map_err(|e| {
            Error::Rendezvous(format!(
                "the store on {} did not answer for {key}: {e}",
                self.host
            ))
        })?;
        *stream = Some(connected);
        let Some((&status, value)) = answer.split_first() else {
            return Err(Error::Rendezvous(format!(
                "the store on {} gave an empty answer",
                self.host
            )));
        };
        if status == REFUSED {
            return Err(Error::Rendezvous(
                String::from_utf8_lossy(value).to_string(),
            ));
        }
        Ok((status, value.to_vec()))
    }
}

/// What an answer may take beyond the time the server was given.
const GRACE: Duration = Duration::from_secs(2);

impl Store for TcpStore {
    fn set(&self, key: &str, value: &[u8], timeout: Duration) -> Result<()> {
        self.ask(Op::Set, key, value, timeout).map(drop)
    }

    fn get(&self, key: &str, timeout: Duration) -> Result<Option<Vec<u8>>> {
        let (status, value) = self.ask(Op::Get, key, &[], timeout)?;
        Ok((status == DONE).then_some(value))
    }

    fn wait(&self, key: &str, timeout: Duration) -> Result<Vec<u8>> {
        let (status, value) = self.ask(Op::Wait, key, &[], timeout)?;
        if status == DONE {
            Ok(value)
        } else {
            Err(late(key, timeout))
        }
    }

    fn add(&self, key: &str, delta: i64, timeout: Duration) -> Result<i64> {
        let (_, value) = self.ask(Op::Add, key, delta.to_string().as_bytes(), timeout)?;
        let number = core::str::from_utf8(&value)
            .ok()
            .and_then(|v| v.parse().ok());
        number
            .ok_or_else(|| Error::Rendezvous(format!("the store's answer for {key} is no number")))
    }

    fn delete(&self, key: &str, timeout: Duration) -> Result<bool> {
        let (status, _) = self.ask(Op::Delete, key, &[], timeout)?;
        Ok(status == DONE)
    }

    fn host(&self) -> Option<String> {
        let stream = lock(&self.stream);
        stream
            .as_ref()
            .and_then(Stream::local_ip)
            .map(|ip| ip.to_string())
    }
}

fn read_block(stream: &Stream, until: Instant) -> std::io::Result<Vec<u8>> {
    let mut len = [0; 4];
    read_exact(stream, &mut len, until)?;
    let len = u32::from_le_bytes(len) as usize;
    if len > MAX_KEY + MAX_VALUE + 64 {
        return Err(std::io::Error::other("a block longer than any"));
    }
    let mut body = vec![0; len];
    read_exact(stream, &mut body, until)?;
    Ok(body)
}

fn write_block(stream: &Stream, body: &[u8], until: Instant) -> std::io::Result<()> {
    let mut block = (body.len() as u32).to_le_bytes().to_vec();
    block.extend(body);
    write_all(stream, &block, until)
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn requests_come_back_and_noise_does_not_panic(
            key in "[a-z/]{1,30}", value: Vec<u8>, op in 0usize..5, noise: Vec<u8>,
        ) {
            let timeout = Duration::from_millis(70);
            let request = Request { op: OPS[op], key, value, timeout };
            prop_assert_eq!(Request::decode(&request.encode()), Some(request));
            let _ = Request::decode(&noise);
        }
    }
}
