//! The symbols of NCCL that `quintet-collectives` calls, over threads of one process and host memory: what the
//! tests have instead of GPUs. Told so it works between processes ([`knobs`]: `across`), and on the memory and
//! streams of the stand-in for the driver (`driver`), as NVIDIA's does on its driver's.
//!
//! ```text
//! rank's thread --ncclSend, ...--> group --ncclGroupEnd--> kernel on a stream      put, in progress for a moment
//! any call      --progress-->  kernels at the head of their stream and communicator that match: memory is moved
//! ```
//!
//! It keeps to what nccl.h and NVIDIA's guide promise and no more: communicators never block, collectives of one
//! communicator match in order, sends and receives of two ranks match in order, a kernel waits for those before
//! it on its stream. Folds go in another order than by rank, and 16-bit sums round at each step, so nobody can
//! rely on more than NCCL gives.
//!
//! It is strict: a call on a communicator that is in progress, finalized or gone, out of a group, with a wrong
//! type, root or peer, or from two threads at once, is refused with `ncclInvalidUsage` and written down;
//! ranks that call differently, which with NCCL hang or lose memory, get an error. `quintetNcclOnHostFaults` has what
//! was written down. Tests tell it to misbehave by `quintetNcclOnHostSet` or the variable `QUINTET_NCCL_SHIM`; see
//! [`knobs`].
#![allow(unsafe_code)] // it stands in for a C library

use std::cell::RefCell;
use std::ffi::{CStr, CString, c_char, c_int, c_void};

mod across;
mod driver;
mod fold;
pub mod knobs;
mod perform;
mod state;

use fold::{Fold, Kind};
use state::{Op, State, Verb};

const SUCCESS: c_int = 0;
const CUDA: c_int = 1;
const SYSTEM: c_int = 2;
const ARGUMENT: c_int = 4;
const USAGE: c_int = 5;
const REMOTE: c_int = 6;
const IN_PROGRESS: c_int = 7;

/// An id, as nccl.h has it.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct UniqueId([u8; 128]);

/// The head of `ncclConfig_t`, which every version has.
#[repr(C)]
pub struct Config {
    size: usize,
    magic: u32,
    version: u32,
    blocking: c_int,
}

/// What `ncclComm_t` points to: a number that was given once and never again.
pub type Comm = *mut c_void;

thread_local! {
    /// How deep in groups this thread is, and what it has called in them.
    static GROUP: RefCell<(usize, Vec<Op>)> = const { RefCell::new((0, Vec::new())) };
    static LAST: RefCell<CString> = RefCell::default();
}

/// What went wrong, for `ncclGetLastError`, with its code.
fn wrong(code: c_int, what: String) -> c_int {
    LAST.with(|last| *last.borrow_mut() = CString::new(what).unwrap_or_default());
    code
}

/// Performs a call: told to fail it fails, else `body` says what comes of it.
fn call(name: &str, body: impl FnOnce(&mut State) -> Result<c_int, (c_int, String)>) -> c_int {
    let mut state = state::lock();
    if let Some((code, text)) = state.knobs.fails(name) {
        return wrong(code, text);
    }
    let outcome = body(&mut state);
    outcome.unwrap_or_else(|(code, what)| {
        let what = format!("{name}: {what}");
        if code == USAGE || code == ARGUMENT {
            state.faults.push(what.clone());
        }
        wrong(code, what)
    })
}

type Answer = Result<c_int, (c_int, String)>;

/// Notes an operation in the group of this thread, or performs it as a group of its own.
fn put(name: &'static str, op: impl FnOnce(&mut State) -> Result<Op, (c_int, String)>) -> c_int {
    call(name, |state| {
        let op = op(state)?;
        state.fits(&op)?;
        let depth = GROUP.with(|group| group.borrow().0);
        if depth == 0 {
            return state.launch(vec![op]);
        }
        GROUP.with(|group| group.borrow_mut().1.push(op));
        Ok(SUCCESS)
    })
}

/// The version that it says it is.
///
/// # Safety
/// `version` is null or may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclGetVersion(version: *mut c_int) -> c_int {
    call("ncclGetVersion", |state| {
        if version.is_null() {
            return Err((ARGUMENT, "no place for the version".into()));
        }
        // SAFETY: by contract.
        unsafe { *version = state.knobs.version };
        Ok(SUCCESS)
    })
}

/// The text of a code.
#[unsafe(no_mangle)]
pub extern "C" fn ncclGetErrorString(code: c_int) -> *const c_char {
    let text = match code {
        SUCCESS => c"no error",
        CUDA => c"unhandled cuda error",
        SYSTEM => c"unhandled system error",
        3 => c"internal error",
        ARGUMENT => c"invalid argument",
        USAGE => c"invalid usage",
        REMOTE => c"remote process exited or there was a network error",
        IN_PROGRESS => c"NCCL operation in progress",
        _ => c"unknown result code",
    };
    text.as_ptr()
}

/// What went wrong last on this thread.
#[unsafe(no_mangle)]
pub extern "C" fn ncclGetLastError(_comm: Comm) -> *const c_char {
    LAST.with(|last| last.borrow().as_ptr())
}

/// A fresh id.
///
/// # Safety
/// `id` is null or may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclGetUniqueId(id: *mut UniqueId) -> c_int {
    call("ncclGetUniqueId", |state| {
        if id.is_null() {
            return Err((ARGUMENT, "no place for the id".into()));
        }
        let mut bytes = [0; 128];
        bytes[..8].copy_from_slice(&state.fresh_id().to_le_bytes());
        // SAFETY: by contract.
        unsafe { *id = UniqueId(bytes) };
        Ok(SUCCESS)
    })
}

/// A rank's communicator, which is in progress until all ranks have come.
///
/// # Safety
/// `comm` may be written; `config` is null or may be read.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommInitRankConfig(
    comm: *mut Comm,
    world: c_int,
    id: UniqueId,
    rank: c_int,
    config: *const Config,
) -> c_int {
    call("ncclCommInitRankConfig", |state| {
        // SAFETY: by contract.
        let config = unsafe { config.as_ref() };
        let config = config.ok_or((
            ARGUMENT,
            "no configuration, and so one that blocks".to_string(),
        ))?;
        let (least, most) = (size_of::<Config>(), 1 << 10);
        if config.magic != 0xcafe_beef
            || !(least..=most).contains(&config.size)
            || config.version > 100_000
        {
            return Err((ARGUMENT, "a configuration that was not initialised".into()));
        }
        if config.blocking != 0 {
            return Err((USAGE, "a communicator that blocks cannot be aborted".into()));
        }
        let (Ok(world), Ok(rank)) = (usize::try_from(world), usize::try_from(rank)) else {
            return Err((ARGUMENT, format!("rank {rank} of {world}")));
        };
        let mut number = [0; 8];
        number.copy_from_slice(&id.0[..8]);
        let made = state.join(u64::from_le_bytes(number), world, rank)?;
        // SAFETY: by contract.
        unsafe { *comm = made as Comm };
        Ok(IN_PROGRESS)
    })
}

/// What became of the communicator's last call.
///
/// # Safety
/// `code` may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommGetAsyncError(comm: Comm, code: *mut c_int) -> c_int {
    call("ncclCommGetAsyncError", |state| {
        let (answer, what) = state.look(comm as usize)?;
        // SAFETY: by contract.
        unsafe { *code = answer };
        if !what.is_empty() {
            wrong(answer, what);
        }
        Ok(SUCCESS)
    })
}

/// Ranks of the communicator.
///
/// # Safety
/// `count` may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommCount(comm: Comm, count: *mut c_int) -> c_int {
    call("ncclCommCount", |state| {
        // SAFETY: by contract.
        unsafe { *count = state.place(comm as usize)?.1 as c_int };
        Ok(SUCCESS)
    })
}

/// My rank in the communicator.
///
/// # Safety
/// `rank` may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommUserRank(comm: Comm, rank: *mut c_int) -> c_int {
    call("ncclCommUserRank", |state| {
        // SAFETY: by contract.
        unsafe { *rank = state.place(comm as usize)?.0 as c_int };
        Ok(SUCCESS)
    })
}

/// Nothing more will be called; in progress until all ranks say so.
#[unsafe(no_mangle)]
pub extern "C" fn ncclCommFinalize(comm: Comm) -> c_int {
    call("ncclCommFinalize", |state| state.finalize(comm as usize))
}

/// The end of a communicator that is finalized.
#[unsafe(no_mangle)]
pub extern "C" fn ncclCommDestroy(comm: Comm) -> c_int {
    call("ncclCommDestroy", |state| state.destroy(comm as usize))
}

/// The end of a communicator, and of what is under way on it.
#[unsafe(no_mangle)]
pub extern "C" fn ncclCommAbort(comm: Comm) -> c_int {
    call("ncclCommAbort", |state| state.abort(comm as usize))
}

/// A group begins.
#[unsafe(no_mangle)]
pub extern "C" fn ncclGroupStart() -> c_int {
    call("ncclGroupStart", |_| {
        GROUP.with(|group| group.borrow_mut().0 += 1);
        Ok(SUCCESS)
    })
}

/// A group ends; the outermost one is performed.
#[unsafe(no_mangle)]
pub extern "C" fn ncclGroupEnd() -> c_int {
    let ops = GROUP.with(|group| {
        let (depth, ops) = &mut *group.borrow_mut();
        *depth = depth.checked_sub(1)?;
        Some(if *depth == 0 {
            std::mem::take(ops)
        } else {
            Vec::new()
        })
    });
    call("ncclGroupEnd", |state| match ops {
        None => Err((USAGE, "no group has begun".into())),
        Some(ops) if ops.is_empty() => Ok(SUCCESS),
        Some(ops) => state.launch(ops),
    })
}

macro_rules! collective {
    ($(#[$doc:meta])* $name:ident ($($before:ident: $type:ty),*) $len:ident, $verb:expr) => {
        $(#[$doc])*
        ///
        /// # Safety
        /// The addresses are host memory as long as the counts say, until the stream is idle.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name(
            from: *const c_void,
            to: *mut c_void,
            $len: usize,
            kind: c_int,
            $($before: $type,)*
            comm: Comm,
            stream: *mut c_void,
        ) -> c_int {
            put(stringify!($name), |state| {
                let verb = $verb;
                let verb: Verb = verb(state)?;
                let kind = Kind::of(kind).ok_or((ARGUMENT, format!("type {kind}")))?;
                let (comm, stream) = (comm as usize, stream as usize);
                Ok(Op { comm, verb, kind, len: $len, from: from as usize, to: to as usize, stream, done: false })
            })
        }
    };
}

fn redop(code: c_int) -> Result<Fold, (c_int, String)> {
    Fold::of(code).ok_or((ARGUMENT, format!("operation {code}")))
}

fn root(code: c_int) -> Result<usize, (c_int, String)> {
    usize::try_from(code).map_err(|_| (ARGUMENT, format!("root {code}")))
}

collective!(
    /// Everybody's fold to everybody.
    ncclAllReduce(fold: c_int) len, |_: &mut State| redop(fold).map(Verb::AllReduce)
);
collective!(
    /// Chunk r of the fold to rank r.
    ncclReduceScatter(fold: c_int) len, |_: &mut State| redop(fold).map(Verb::ReduceScatter)
);
collective!(
    /// Everybody's input to everybody.
    ncclAllGather() len, |_: &mut State| Ok(Verb::AllGather)
);
collective!(
    /// The root's input to everybody.
    ncclBroadcast(at: c_int) len, |_: &mut State| root(at).map(Verb::Broadcast)
);
collective!(
    /// Everybody's fold to the root.
    ncclReduce(fold: c_int, at: c_int) len, |_: &mut State| Ok(Verb::Reduce(redop(fold)?, root(at)?))
);

/// A message to a peer.
///
/// # Safety
/// As of the collectives.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclSend(
    from: *const c_void,
    len: usize,
    kind: c_int,
    peer: c_int,
    comm: Comm,
    stream: *mut c_void,
) -> c_int {
    put("ncclSend", |_| {
        let kind = Kind::of(kind).ok_or((ARGUMENT, format!("type {kind}")))?;
        let (comm, verb, stream) = (comm as usize, Verb::Send(root(peer)?), stream as usize);
        Ok(Op {
            comm,
            verb,
            kind,
            len,
            from: from as usize,
            to: 0,
            stream,
            done: false,
        })
    })
}

/// A message from a peer.
///
/// # Safety
/// As of the collectives.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclRecv(
    to: *mut c_void,
    len: usize,
    kind: c_int,
    peer: c_int,
    comm: Comm,
    stream: *mut c_void,
) -> c_int {
    put("ncclRecv", |_| {
        let kind = Kind::of(kind).ok_or((ARGUMENT, format!("type {kind}")))?;
        let (comm, verb, stream) = (comm as usize, Verb::Recv(root(peer)?), stream as usize);
        Ok(Op {
            comm,
            verb,
            kind,
            len,
            from: 0,
            to: to as usize,
            stream,
            done: false,
        })
    })
}

/// That memory is the host's: how many kernels are still on a stream. Told of a driver, whose they then are, it
/// answers that it is not.
#[unsafe(no_mangle)]
pub extern "C" fn quintetNcclOnHost(stream: u64) -> u64 {
    let mut state = state::lock();
    if state.knobs.driver.is_some() {
        return u64::MAX;
    }
    state.progress();
    state.waiting(stream as usize) as u64
}

/// Tells it to misbehave, as the variable does; false for words that mean nothing.
///
/// # Safety
/// `words` is a text that ends with a zero.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn quintetNcclOnHostSet(words: *const c_char) -> bool {
    // SAFETY: by contract.
    let words = unsafe { CStr::from_ptr(words) }.to_string_lossy();
    state::lock().knobs.set(&words)
}

/// Kernels put on any stream so far.
#[unsafe(no_mangle)]
pub extern "C" fn quintetNcclOnHostPut() -> u64 {
    state::lock().put
}

/// Communicators that are neither destroyed nor aborted.
#[unsafe(no_mangle)]
pub extern "C" fn quintetNcclOnHostLive() -> u64 {
    state::lock().live() as u64
}

/// What was called wrongly so far, a line each; gives as many bytes as fit and says how many there are.
///
/// # Safety
/// `room` bytes at `text` may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn quintetNcclOnHostFaults(text: *mut u8, room: usize) -> usize {
    let faults = state::lock().faults.join("\n");
    let fit = faults.len().min(room);
    // SAFETY: by contract.
    unsafe { std::ptr::copy_nonoverlapping(faults.as_ptr(), text, fit) };
    faults.len()
}
