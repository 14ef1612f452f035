//! One block while it runs: its threads, what they wait for, and what its memory knows.
//!
//! ```text
//! ready --access, maybe--> ready       a seeded pick of the next thread
//!   |---- barrier, warp instruction -> waiting until the last one comes
//!   '---- return ------------------> done
//! ```
//!
//! The calls of a kernel (`calls.rs`) end in methods here; each answers whether its fiber goes
//! on, waits, or stops for good because a fault was found.

mod access;
mod barrier;
mod copies;
mod warps;

use std::boxed::Box;
use std::ffi::{CStr, c_char};
use std::format;
use std::string::String;
use std::vec::Vec;

use super::counters::Counting;
use super::fault::{Fault, FaultKind, Party, Place};
use super::memory::{Line, Memory, Region, lines, poison};
use super::order::{Clocks, Release};
use super::rng::Rng;
use super::shadow::{Now, Ops, Sets, Stamp};
use super::warp::{In, Instr, LANES, Out};
use crate::launch::Call;

/// What the calling fiber does next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Next {
    /// Go on.
    Go,
    /// Let others run; the scheduler resumes it.
    Pause,
    /// Never resumed.
    Stop,
}

/// A place in the kernel's source. Two numbers, which calls pass in registers: every access has one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Site {
    /// A return address, or a file's name in the kernel's own constants.
    at: usize,
    /// A line of that file; 0 beside a return address.
    line: i32,
}

impl Site {
    /// None that is known.
    pub(super) const UNKNOWN: Self = Self::pc(0);

    pub(super) const fn pc(at: usize) -> Self {
        Self { at, line: 0 }
    }

    pub(super) fn line(file: *const c_char, line: i32) -> Self {
        Self {
            at: file as usize,
            line,
        }
    }

    /// `file:line`, where known. Needs more stack than a fiber has.
    pub(super) fn name(self) -> Option<String> {
        if self.at == 0 {
            return None;
        }
        if self.line == 0 {
            let mut name = None;
            backtrace::resolve(self.at.saturating_sub(1) as *mut _, |symbol| {
                if let (None, Some(file), Some(line)) = (&name, symbol.filename(), symbol.lineno())
                {
                    let file = file.file_name().unwrap_or(file.as_os_str());
                    name = Some(format!("{}:{line}", file.to_string_lossy()));
                }
            });
            return name;
        }
        // SAFETY: the address is that of a string literal of the kernel's file (__builtin_FILE).
        let file = unsafe { CStr::from_ptr(self.at as *const c_char) }.to_string_lossy();
        let file = file.rsplit('/').next().unwrap_or_default();
        Some(format!("{file}:{}", self.line))
    }

    /// Whether both are one place: inlining may give one call of the source several addresses and
    /// file names, not lines.
    pub(super) fn is(self, other: Self) -> bool {
        self == other || self.line != 0 && self.line == other.line
    }

    /// A number that tells places apart.
    fn key(self) -> usize {
        self.at.wrapping_mul(31) ^ self.line as usize
    }
}

/// A fault as it is found, on a fiber's small stack: names are looked up later.
#[derive(Debug)]
pub(super) struct Found {
    pub(super) kind: FaultKind,
    pub(super) thread: usize,
    pub(super) site: Site,
    pub(super) what: String,
    pub(super) place: Option<Place>,
    pub(super) other: Option<Stamp>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Wait {
    None,
    Barrier(usize),
    Warp,
    Done,
}

/// One thread of the block.
#[derive(Debug)]
struct Thread {
    wait: Wait,
    /// Where it waits.
    site: Site,
    /// What a barrier answered.
    answer: i32,
    /// Operands and results of a warp instruction.
    instr: Instr,
    mask: u32,
    input: In,
    output: Out,
    /// The fiber's stack: memory of its own.
    stack: (usize, usize),
    /// `cp.async` groups committed.
    groups: u32,
}

#[derive(Debug, Default, Clone)]
struct Barrier {
    count: usize,
    arrived: Vec<Arrival>,
    /// The threads among them, a bit each, and of each warp the first.
    came: [u32; WARPS],
    first_of: [Option<u16>; WARPS],
    released: Vec<Release>,
    call: i32,
}

#[derive(Debug, Clone, Copy)]
struct Arrival {
    thread: usize,
    /// For the others, or only to let them go on.
    waits: bool,
    value: i32,
    site: Site,
}

/// Warps of the largest block.
const WARPS: usize = 1024 / LANES;

/// What a warp's lanes wait for, so that a lane that comes need not look at each.
#[derive(Debug, Default, Clone, Copy)]
struct Warp {
    /// Lanes that wait at a warp instruction.
    waits: u32,
    /// Lanes that have returned.
    done: u32,
    /// What those that wait came with, while it is the same.
    all: Option<(Instr, u32)>,
}

/// An asynchronous copy that was not waited for yet.
#[derive(Debug)]
struct Copy {
    thread: usize,
    to: usize,
    from: usize,
    bytes: usize,
    from_bytes: usize,
    /// The group it was committed to.
    group: Option<u32>,
    /// Its bytes have moved already.
    moved: bool,
}

/// A launch while it runs, and the block that runs.
pub(super) struct Run<'a> {
    pub(super) memory: &'a mut Memory,
    pub(super) ops: &'a Ops,
    pub(super) op: u32,
    pub(super) call: Call<'a>,
    pub(super) rng: Rng,
    /// What is left of a random word, by which accesses pause; its highest bit ends it.
    pauses: u64,
    pub(super) found: Option<Found>,
    pub(super) counting: Option<Counting>,
    shared_limit: usize,
    arena: Box<[Line]>,
    /// Dynamic shared memory first, then static arrays as they are reached.
    shared: Vec<(SharedKey, Region)>,
    shared_sets: Sets,
    shared_end: usize,
    block: u32,
    block_idx: [u32; 3],
    clocks: Clocks,
    threads: Vec<Thread>,
    warps: [Warp; WARPS],
    current: usize,
    ready: Vec<usize>,
    ready_at: usize,
    barriers: Vec<Barrier>,
    copies: Vec<Copy>,
}

/// File, line, bytes and alignment of a static shared array.
type SharedKey = (usize, i32, u32, u32);

/// Space between shared arrays, so that running over one is seen.
const GAP: usize = 128;
/// Static shared memory that ptxas accepts.
const STATIC_LIMIT: usize = 48 * 1024;

impl<'a> Run<'a> {
    /// `None` where the host has no memory for shared memory.
    pub(super) fn new(
        (memory, ops): (&'a mut Memory, &'a Ops),
        op: u32,
        call: Call<'a>,
        shared_limit: usize,
        rng: Rng,
    ) -> Option<Self> {
        let threads = call.threads() as usize;
        Some(Self {
            memory,
            ops,
            op,
            call,
            rng,
            pauses: 0,
            found: None,
            counting: None,
            shared_limit,
            arena: lines(call.shared as usize + 2 * STATIC_LIMIT)?,
            shared: Vec::new(),
            // Few: they stay where the processor finds them soon.
            shared_sets: Sets::with_sweeps(1 << 14),
            shared_end: 0,
            block: 0,
            block_idx: [0; 3],
            clocks: Clocks::new(threads),
            threads: Vec::new(),
            warps: [Warp::default(); WARPS],
            current: 0,
            ready: Vec::new(),
            ready_at: 0,
            barriers: std::vec![Barrier::default(); 16],
            copies: Vec::new(),
        })
    }

    /// Makes block `block` the one that runs; `stacks` are its threads' fibers.
    pub(super) fn start(&mut self, block: u32, stacks: impl Iterator<Item = (usize, usize)>) {
        let [x, y, _] = self.call.grid;
        self.block = block;
        self.block_idx = [block % x, block / x % y, block / x / y];
        self.threads.clear();
        self.threads.extend(stacks.map(|stack| Thread {
            wait: Wait::None,
            site: Site::UNKNOWN,
            answer: 0,
            instr: Instr::SyncWarp,
            mask: 0,
            input: [0; 10],
            output: [0; 4],
            stack,
            groups: 0,
        }));
        self.warps = [Warp::default(); WARPS];
        self.clocks = Clocks::new(self.threads.len());
        self.ready = (0..self.threads.len()).collect();
        self.copies.clear();
        self.barriers.fill(Barrier::default());
        self.shared.clear();
        self.shared_sets.clear();
        self.shared_end = 0;
        if self.call.shared > 0 {
            self.add_shared(
                (0, 0, 0, 0),
                "dynamic shared memory",
                self.call.shared as usize,
            );
        }
    }

    /// The thread to run next: a seeded choice among those that can.
    pub(super) fn pick(&mut self) -> Option<usize> {
        if self.ready.is_empty() {
            return None;
        }
        self.ready_at = self.rng.below(self.ready.len());
        self.current = self.ready[self.ready_at];
        Some(self.current)
    }

    /// The current thread has returned.
    pub(super) fn finish_thread(&mut self) {
        self.threads[self.current].wait = Wait::Done;
        self.warps[self.current / LANES].done |= 1 << (self.current % LANES);
        self.ready.swap_remove(self.ready_at);
    }

    /// After no thread can go on: a fault where some have not returned.
    pub(super) fn finish_block(&mut self) {
        if self.found.is_some() {
            return;
        }
        let stuck = |t: &Thread| t.wait != Wait::Done;
        if let Some(thread) = self.threads.iter().position(stuck) {
            self.stuck(thread);
        } else if let Some(id) = self.barriers.iter().position(|b| !b.arrived.is_empty()) {
            let Barrier { arrived, count, .. } = &self.barriers[id];
            let what = format!(
                "barrier {id} was never met: {} of {count} threads arrived",
                arrived.len()
            );
            let Arrival { thread, site, .. } = arrived[0];
            self.found = Some(Found {
                kind: FaultKind::Divergence,
                thread,
                site,
                what,
                place: None,
                other: None,
            });
        }
    }

    fn stuck(&mut self, thread: usize) {
        let waits = &self.threads[thread];
        let group: Vec<usize> = match waits.wait {
            Wait::Warp => {
                let first = thread / LANES * LANES;
                let named = |l: &usize| waits.mask >> l & 1 == 1;
                (0..LANES).filter(named).map(|l| first + l).collect()
            }
            _ => (0..self.threads.len()).collect(),
        };
        let at_same = |t: &&usize| {
            let other = &self.threads[**t];
            other.wait == waits.wait && (waits.wait != Wait::Warp || other.instr == waits.instr)
        };
        let missing: Vec<usize> = group.iter().filter(|t| !at_same(t)).copied().collect();
        let returned = missing
            .iter()
            .filter(|&&t| self.threads[t].wait == Wait::Done)
            .count();
        let name = match waits.wait {
            Wait::Warp => waits.instr.name().into(),
            Wait::Barrier(id) => format!("barrier {id}"),
            _ => "nothing".into(),
        };
        let what = format!(
            "waits at {name} for ever: {} of {} threads do not come ({returned} have returned), \
             the first is {}",
            missing.len(),
            group.len(),
            missing.first().copied().unwrap_or(thread)
        );
        self.found = Some(Found {
            kind: FaultKind::Divergence,
            thread,
            site: waits.site,
            what,
            place: None,
            other: missing
                .first()
                .map(|&t| Stamp::new(self.op, self.block, t, 0)),
        });
    }

    /// Threads of warp `warp` that exist, as a mask.
    fn lanes_of(&self, warp: usize) -> u32 {
        let n = (self.threads.len() - warp * LANES).min(LANES);
        (u64::from(u32::MAX) >> (LANES - n)) as u32
    }

    /// Records a fault of the current thread.
    fn fail(&mut self, kind: FaultKind, site: Site, what: String) -> Next {
        self.fail_at(kind, site, what, None, None)
    }

    fn fail_at(
        &mut self,
        kind: FaultKind,
        site: Site,
        what: String,
        place: Option<Place>,
        other: Option<Stamp>,
    ) -> Next {
        if self.found.is_none() {
            self.found = Some(Found {
                kind,
                thread: self.current,
                site,
                what,
                place,
                other,
            });
        }
        Next::Stop
    }

    pub(super) fn trap(&mut self, site: Site) -> Next {
        self.fail(FaultKind::Trap, site, "__trap".into())
    }

    /// Takes the current thread from those that can run.
    fn park(&mut self, wait: Wait, site: Site) -> Next {
        self.ready.swap_remove(self.ready_at);
        let thread = &mut self.threads[self.current];
        (thread.wait, thread.site) = (wait, site);
        if wait == Wait::Warp {
            let came = Some((thread.instr, thread.mask));
            let warp = &mut self.warps[self.current / LANES];
            if warp.waits == 0 {
                warp.all = came;
            } else if warp.all != came {
                warp.all = None;
            }
            warp.waits |= 1 << (self.current % LANES);
        }
        Next::Pause
    }

    fn wake(&mut self, thread: usize) {
        self.warps[thread / LANES].waits &= !(1 << (thread % LANES));
        self.threads[thread].wait = Wait::None;
        self.ready.push(thread);
    }

    /// threadIdx, blockIdx, blockDim, gridDim.
    pub(super) fn triple(&self, which: i32) -> [u32; 3] {
        match which {
            0 => {
                let [x, y, _] = self.call.block;
                let t = self.current as u32;
                [t % x, t / x % y, t / x / y]
            }
            1 => self.block_idx,
            2 => self.call.block,
            _ => self.call.grid,
        }
    }

    pub(super) fn output(&self) -> Out {
        self.threads[self.current].output
    }

    pub(super) fn answer(&self) -> i32 {
        self.threads[self.current].answer
    }

    /// The fault with its names.
    pub(super) fn fault(&mut self) -> Option<Fault> {
        let found = self.found.take()?;
        let party = |block, thread, site: Site, op: u32| Party {
            op: self.ops.name[op as usize].as_ref().into(),
            block,
            thread,
            site: site.name(),
        };
        Some(Fault {
            kind: found.kind,
            who: party(self.block, found.thread, found.site, self.op),
            what: found.what,
            place: found.place,
            other: found
                .other
                .map(|s| party(s.block(), s.thread(), Site::UNKNOWN, s.op())),
        })
    }

    fn stamp(&self, thread: usize) -> Stamp {
        Stamp::new(self.op, self.block, thread, self.clocks.now(thread))
    }
}
