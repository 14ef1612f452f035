//! Streams: work is queued when it is put, and performed when somebody waits.
//!
//! What comes before what is settled when work is put: each piece of work has a vector of how far
//! it has seen every stream. The shadow asks that vector, so a missing event is found whatever
//! order the seed chose. The host's waits are in the vectors too.

use std::boxed::Box;
use std::collections::VecDeque;
use std::string::ToString;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::vec::Vec;
use std::{format, vec};

use super::block::Run;
use super::counters::{Counters, Counting};
use super::fault::{Fault, FaultKind, Party};
use super::fiber::run_block;
use super::kernels::{HostKernel, HostModule, own};
use super::memory::{Memory, Region};
use super::order::Clocks;
use super::rng::Rng;
use super::shadow::{MAX_BLOCKS, MAX_OPS, Now, Objection, Ops, Sets, Stamp, Touch};
use crate::Error;
use crate::launch::{Arch, Arg, Call, Stream};

/// A point of an emulated stream.
#[derive(Debug, Clone)]
pub struct EmulatedEvent {
    happened: Arc<AtomicBool>,
    seen: Vec<u32>,
}

/// A call with its own arguments.
#[derive(Debug)]
pub(super) struct QueuedLaunch {
    kernel: &'static HostKernel,
    grid: [u32; 3],
    block: [u32; 3],
    shared: u32,
    args: Vec<Arg>,
}

impl QueuedLaunch {
    pub(super) fn new(kernel: &'static HostKernel, call: &Call<'_>) -> Self {
        Self {
            kernel,
            grid: call.grid,
            block: call.block,
            shared: call.shared,
            args: call.args.to_vec(),
        }
    }
}

/// What a stream does.
#[derive(Debug)]
pub(super) enum Work {
    Launch(QueuedLaunch),
    Fill(usize, u8, usize),
    Copy(usize, usize, usize),
    Upload(Vec<u8>, usize),
    Free(usize),
    /// A library will read these bytes.
    Lend(usize, usize),
    /// A library has written these bytes.
    Filled(usize, usize),
}

#[derive(Debug)]
enum Item {
    Work { op: u32, seen: Vec<u32>, work: Work },
    Record(Arc<AtomicBool>),
    Wait(Arc<AtomicBool>),
}

#[derive(Debug, Default)]
struct Line {
    items: VecDeque<Item>,
    /// What the next work on this stream has seen.
    seen: Vec<u32>,
    put: u32,
}

/// The device.
pub(super) struct State {
    pub(super) arch: Arch,
    pub(super) memory: Memory,
    pub(super) counting: bool,
    pub(super) counters: Counters,
    pub(super) log: Vec<std::string::String>,
    modules: &'static [HostModule],
    ops: Ops,
    lines: Vec<Line>,
    /// What the host has seen.
    host: Vec<u32>,
    rng: Rng,
    fault: Option<Box<Fault>>,
}

impl State {
    pub(super) fn new(arch: Arch, seed: u64, modules: &'static [HostModule]) -> Self {
        let mut state = Self {
            arch,
            memory: Memory::default(),
            counting: false,
            counters: Counters::default(),
            log: Vec::new(),
            modules,
            ops: Ops::default(),
            lines: Vec::new(),
            host: Vec::new(),
            rng: Rng::new(seed),
            fault: None,
        };
        state.start_ops();
        state
    }

    fn start_ops(&mut self) {
        self.ops.place = vec![(0, 0)];
        self.ops.name = vec!["nobody".into()];
    }

    pub(super) fn kernel(
        &self,
        module: &str,
        function: &str,
    ) -> Result<&'static HostKernel, Error> {
        let of_name = |m: &&HostModule| m.name() == module;
        let found = own().iter().chain(self.modules).find(of_name);
        let mut kernels = found.into_iter().flat_map(|m| m.kernels());
        kernels
            .find(|k| k.name() == function)
            .ok_or_else(|| Error::NoKernel {
                module: module.to_string(),
                function: function.to_string(),
            })
    }

    pub(super) fn module_of(&self, function: &str) -> Option<&'static str> {
        let has = |m: &&'static HostModule| m.kernels().iter().any(|k| k.name() == function);
        own()
            .iter()
            .chain(self.modules)
            .find(has)
            .map(HostModule::name)
    }

    fn line(&mut self, stream: Stream) -> &mut Line {
        let i = stream.0 as usize;
        if self.lines.len() <= i {
            self.lines.resize_with(i + 1, Line::default);
        }
        &mut self.lines[i]
    }

    pub(super) fn fresh_stream(&mut self) -> Stream {
        // The first two are those of compute and communication, named or not.
        let stream = Stream(self.lines.len().max(2) as u32);
        self.line(stream);
        stream
    }

    /// Puts work on a stream.
    pub(super) fn put(&mut self, stream: Stream, work: Work) -> Result<(), Error> {
        self.healthy()?;
        if self.ops.place.len() >= MAX_OPS {
            self.forget()?;
        }
        let host = self.host.clone();
        let line = self.line(stream);
        join(&mut line.seen, &host);
        line.put += 1;
        let (put, i) = (line.put, stream.0 as usize);
        join(&mut line.seen, &vec![0; i + 1]);
        line.seen[i] = put;
        let seen = line.seen.clone();
        let op = self.ops.place.len() as u32;
        self.ops.place.push((stream.0, put));
        self.ops.name.push(match &work {
            Work::Launch(launch) => launch.kernel.name().into(),
            Work::Fill(..) => "fill".into(),
            Work::Copy(..) => "copy".into(),
            Work::Upload(..) => "upload".into(),
            Work::Free(..) => "free".into(),
            Work::Lend(..) => "a library's reading".into(),
            Work::Filled(..) => "a library's writing".into(),
        });
        self.line(stream)
            .items
            .push_back(Item::Work { op, seen, work });
        Ok(())
    }

    /// Performs all and starts to number operations again: stamps have no room for more.
    fn forget(&mut self) -> Result<(), Error> {
        for i in 0..self.lines.len() {
            self.synchronize(Stream(i as u32))?;
        }
        self.memory.forget_stamps();
        self.start_ops();
        Ok(())
    }

    pub(super) fn record(&mut self, stream: Stream) -> EmulatedEvent {
        let host = self.host.clone();
        let line = self.line(stream);
        join(&mut line.seen, &host);
        let happened = Arc::new(AtomicBool::new(false));
        line.items.push_back(Item::Record(happened.clone()));
        EmulatedEvent {
            happened,
            seen: line.seen.clone(),
        }
    }

    pub(super) fn wait(&mut self, stream: Stream, event: &EmulatedEvent) {
        let line = self.line(stream);
        join(&mut line.seen, &event.seen);
        line.items.push_back(Item::Wait(event.happened.clone()));
    }

    /// Performs work until nothing is left on `stream`; other streams go on by the seed.
    pub(super) fn synchronize(&mut self, stream: Stream) -> Result<(), Error> {
        self.healthy()?;
        while !self.line(stream).items.is_empty() {
            let can = |line: &&(usize, &Line)| match line.1.items.front() {
                Some(Item::Wait(event)) => event.load(Ordering::Relaxed),
                Some(_) => true,
                None => false,
            };
            let lines: Vec<_> = self.lines.iter().enumerate().collect();
            let able: Vec<usize> = lines.iter().filter(can).map(|l| l.0).collect();
            if able.is_empty() {
                let what = "streams wait for events that nobody records".to_string();
                return self.fail(self.host_fault(FaultKind::Divergence, 0, what));
            }
            let line = able[self.rng.below(able.len())];
            match self.lines[line].items.pop_front() {
                Some(Item::Record(event)) => event.store(true, Ordering::Relaxed),
                Some(Item::Work { op, seen, work }) => {
                    self.ops.seen = seen;
                    if let Err(fault) = self.perform(op, work) {
                        return self.fail(fault);
                    }
                    self.memory.tidy();
                }
                Some(Item::Wait(_)) | None => {}
            }
        }
        let seen = self.line(stream).seen.clone();
        join(&mut self.host, &seen);
        Ok(())
    }

    pub(super) fn download(
        &mut self,
        stream: Stream,
        src: usize,
        host: &mut [u8],
    ) -> Result<(), Error> {
        self.synchronize(stream)?;
        if host.is_empty() {
            return Ok(());
        }
        self.ops.seen = self.line(stream).seen.clone();
        let op = self.ops.place.len() as u32;
        self.ops.place.push((stream.0, 0));
        self.ops.name.push("download".into());
        let result = self.at(op, src, host.len(), Touch::Read, true);
        // It is over before anything is put next.
        match result {
            Ok(region) => host.copy_from_slice(region.bytes_mut(src, host.len())),
            Err(fault) => return self.fail(fault),
        }
        Ok(())
    }

    fn healthy(&self) -> Result<(), Error> {
        match &self.fault {
            Some(fault) => Err(Error::Fault(fault.clone())),
            None => Ok(()),
        }
    }

    fn fail(&mut self, fault: Box<Fault>) -> Result<(), Error> {
        self.fault = Some(fault.clone());
        Err(Error::Fault(fault))
    }

    fn perform(&mut self, op: u32, work: Work) -> Result<(), Box<Fault>> {
        match work {
            Work::Launch(launch) => self.run(op, launch),
            Work::Fill(at, value, bytes) => {
                let region = self.at(op, at, bytes, Touch::Write, true)?;
                region.bytes_mut(at, bytes).fill(value);
                Ok(())
            }
            Work::Upload(host, at) => {
                let region = self.at(op, at, host.len(), Touch::Write, true)?;
                region.bytes_mut(at, host.len()).copy_from_slice(&host);
                Ok(())
            }
            Work::Copy(src, dst, bytes) => {
                // What is unwritten may be copied, and stays unwritten.
                let region = self.at(op, src, bytes, Touch::Read, false)?;
                let start = src - region.base;
                let written = region.shadow.written(start..start + bytes);
                let data = region.bytes_mut(src, bytes).to_vec();
                let region = self.at(op, dst, bytes, Touch::Write, true)?;
                region.bytes_mut(dst, bytes).copy_from_slice(&data);
                region.shadow.copy_written(dst - region.base, &written);
                Ok(())
            }
            Work::Free(at) => {
                let bytes = match self.memory.find(at, 0) {
                    Ok((region, _)) if region.base == at => region.bytes,
                    _ => {
                        let what = format!("free of {at:#x}, which is no allocation");
                        return Err(self.host_fault(FaultKind::Freed, op, what));
                    }
                };
                self.at(op, at, bytes, Touch::Free, true)?.free();
                Ok(())
            }
            Work::Lend(_, 0) | Work::Filled(_, 0) => Ok(()),
            Work::Lend(at, bytes) => self.at(op, at, bytes, Touch::Read, true).map(drop),
            Work::Filled(at, bytes) => self.at(op, at, bytes, Touch::Write, true).map(drop),
        }
    }

    /// The region of a copy's or fill's range, checked and recorded.
    fn at(
        &mut self,
        op: u32,
        at: usize,
        bytes: usize,
        touch: Touch,
        care_unwritten: bool,
    ) -> Result<&mut Region, Box<Fault>> {
        let clocks = Clocks::new(1);
        let now = Now {
            stamp: Stamp::new(op, 0, 0, clocks.now(0)),
            ops: &self.ops,
            clocks: &clocks,
        };
        let name = |op: u32| self.ops.name[op as usize].to_string();
        let party = |op, block, thread| Party {
            op: name(op),
            block,
            thread,
            site: None,
        };
        let fault = |kind, place, other: Option<Stamp>| {
            Box::new(Fault {
                kind,
                who: party(op, 0, 0),
                what: format!("{bytes} bytes from {at:#x} on"),
                place,
                other: other.map(|s| party(s.op(), s.block(), s.thread())),
            })
        };
        let (region, sets): (&mut Region, &mut Sets) = match self.memory.find(at, bytes) {
            Ok(found) => found,
            Err((true, place)) => return Err(fault(FaultKind::Freed, place, None)),
            Err((false, place)) => return Err(fault(FaultKind::OutOfBounds, place, None)),
        };
        let start = at - region.base;
        let range = start..start + bytes;
        match region
            .shadow
            .touch(range, touch, &now, sets, care_unwritten)
        {
            Ok(()) => Ok(region),
            Err((i, objection)) => {
                let place = Some(region.place(region.base + i));
                Err(match objection {
                    Objection::Unwritten => fault(FaultKind::Unwritten, place, None),
                    Objection::OnItsWay(s) => fault(FaultKind::OnItsWay, place, Some(s)),
                    Objection::Written(s) | Objection::Read(s) => {
                        fault(FaultKind::StreamRace, place, Some(s))
                    }
                })
            }
        }
    }

    fn host_fault(&self, kind: FaultKind, op: u32, what: std::string::String) -> Box<Fault> {
        Box::new(Fault {
            kind,
            who: Party {
                op: self.ops.name[op as usize].to_string(),
                block: 0,
                thread: 0,
                site: None,
            },
            what,
            place: None,
            other: None,
        })
    }

    /// Runs a launch: its blocks in random order.
    fn run(&mut self, op: u32, launch: QueuedLaunch) -> Result<(), Box<Fault>> {
        let call = Call {
            module: "",
            function: launch.kernel.name(),
            grid: launch.grid,
            block: launch.block,
            shared: launch.shared,
            args: &launch.args,
        };
        if call.blocks() > MAX_BLOCKS {
            let what = format!("{} blocks where {MAX_BLOCKS} are emulated", call.blocks());
            return Err(self.host_fault(FaultKind::Emulator, op, what));
        }
        let mut order: Vec<u32> = (0..call.blocks() as u32).collect();
        self.rng.shuffle(&mut order);
        let mut args: Vec<u64> = launch.args.iter().map(Arg::bits).collect();
        let rng = Rng::new(self.rng.bits());
        let limit = self.arch.shared_limit() as usize;
        let no_memory = self.host_fault(FaultKind::Emulator, op, "no memory for a block".into());
        let memory = (&mut self.memory, &self.ops);
        let Some(mut run) = Run::new(memory, op, call, limit, rng) else {
            return Err(no_memory);
        };
        for block in order {
            run.counting = self.counting.then(Counting::default);
            if run_block(&mut run, launch.kernel, &mut args, block).is_err() {
                return Err(no_memory);
            }
            run.finish_block();
            if let Some(fault) = run.fault() {
                return Err(Box::new(fault));
            }
            if let Some(counting) = run.counting.take() {
                self.counters.add(&counting.finish());
            }
        }
        Ok(())
    }
}

fn join(into: &mut Vec<u32>, other: &[u32]) {
    if into.len() < other.len() {
        into.resize(other.len(), 0);
    }
    for (x, y) in into.iter_mut().zip(other) {
        *x = (*x).max(*y);
    }
}
