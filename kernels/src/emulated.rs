//! A GPU on the host that checks what kernels do: the same `.cu` sources, compiled as C++.
//!
//! ```text
//! launch, copy, free -> queues, one a stream   performed late, in a seeded order that keeps only
//!                          |                   stream and event order (`queue.rs`)
//!                       blocks in random order -> a fiber a thread (`fiber.rs`, `block.rs`)
//!                          |                       loads and stores by the compiler's callbacks
//!                       shadow (`shadow.rs`)       who wrote and read each byte, and when
//! ```
//!
//! A fault ends the launch that met it; from then on the device answers every call with it, as a
//! GPU does after a sticky error. The same seed gives the same run.
//!
//! The device is as strict as the PTX ISA, which is stricter than any GPU in places: a thread that
//! has returned counts as missing at barriers and in masks, and `__syncwarp` is the only warp
//! instruction that orders memory ([`order::RULES`]). It knows nothing of speed, caches, or the
//! rounding inside tensor cores, and blocks run one after another, so flags passed between blocks
//! of one launch are not modelled (they are reported as races). A thread's own variables are its
//! stack and are not checked; a stack that runs over its 64 KiB ends the process.

mod block;
mod calls;
mod counters;
mod fault;
mod fiber;
mod kernels;
mod memory;
pub mod order;
mod queue;
mod rng;
mod shadow;
mod warp;

use alloc::string::{String, ToString};
use alloc::sync::Arc;
use alloc::vec::Vec;
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::Error;
use crate::launch::{Arch, Call, Launch, Libraries, Stream};

pub use counters::Counters;
pub use fault::{Fault, FaultKind, Party, Place};
pub use kernels::HostModule;
pub use queue::EmulatedEvent;

use queue::{State, Work};

/// An emulated GPU. Clones are the same device.
#[derive(Clone)]
pub struct Emulated(Arc<Mutex<State>>);

impl core::fmt::Debug for Emulated {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.write_str("Emulated")
    }
}

impl Emulated {
    /// A device of compute capability `arch` whose choices follow `seed`.
    #[must_use]
    pub fn new(arch: Arch, seed: u64) -> Self {
        Self::with_modules(arch, seed, &[])
    }

    /// The same with modules beside the crate's own: kernels of other crates, compiled as the
    /// build script of this one does.
    #[must_use]
    pub fn with_modules(arch: Arch, seed: u64, modules: &'static [HostModule]) -> Self {
        Self(Arc::new(Mutex::new(State::new(arch, seed, modules))))
    }

    /// Counts sectors and bank conflicts too (it takes time), from now on.
    pub fn count_accesses(&self) {
        self.state().counting = true;
    }

    /// What launches did since the last call.
    #[must_use]
    pub fn take_counters(&self) -> Counters {
        core::mem::take(&mut self.state().counters)
    }

    /// The functions that were launched since the last call, in the order they were queued.
    #[must_use]
    pub fn take_log(&self) -> Vec<String> {
        core::mem::take(&mut self.state().log)
    }

    /// The module that has a kernel of that name.
    #[must_use]
    pub fn module_of(&self, function: &str) -> Option<&'static str> {
        self.state().module_of(function)
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Launch for Emulated {
    type Event = EmulatedEvent;

    fn arch(&self) -> Arch {
        self.state().arch
    }

    /// Few, so that small products too come in large tiles.
    fn multiprocessors(&self) -> u32 {
        2
    }

    fn alloc(&self, tag: &'static str, bytes: usize) -> Result<u64, Error> {
        let mut state = self.state();
        state
            .memory
            .alloc(tag, bytes)
            .ok_or(Error::Memory { bytes, tag })
    }

    fn free(&self, stream: Stream, ptr: u64) {
        // After a fault nothing is freed; nothing runs any more either.
        let _ = self.state().put(stream, Work::Free(ptr as usize));
    }

    fn launch(&self, stream: Stream, call: &Call<'_>) -> Result<(), Error> {
        let mut state = self.state();
        let kernel = state.kernel(call.module, call.function)?;
        call.check(state.arch, kernel.max_threads, kernel.params())?;
        state.log.push(call.function.to_string());
        let launch = queue::QueuedLaunch::new(kernel, call);
        state.put(stream, Work::Launch(launch))
    }

    fn fill(&self, stream: Stream, ptr: u64, value: u8, bytes: usize) -> Result<(), Error> {
        let work = Work::Fill(ptr as usize, value, bytes);
        self.state().put(stream, work)
    }

    fn copy(&self, stream: Stream, src: u64, dst: u64, bytes: usize) -> Result<(), Error> {
        let work = Work::Copy(src as usize, dst as usize, bytes);
        self.state().put(stream, work)
    }

    fn upload(&self, stream: Stream, host: &[u8], dst: u64) -> Result<(), Error> {
        let work = Work::Upload(host.to_vec(), dst as usize);
        self.state().put(stream, work)
    }

    fn download(&self, stream: Stream, src: u64, host: &mut [u8]) -> Result<(), Error> {
        self.state().download(stream, src as usize, host)
    }

    fn record(&self, stream: Stream) -> EmulatedEvent {
        self.state().record(stream)
    }

    fn wait(&self, stream: Stream, event: &EmulatedEvent) {
        self.state().wait(stream, event);
    }

    fn synchronize(&self, stream: Stream) -> Result<(), Error> {
        self.state().synchronize(stream)
    }

    fn libraries(&self) -> Option<&dyn Libraries> {
        Some(self)
    }
}

impl Libraries for Emulated {
    fn fresh_stream(&self) -> Stream {
        self.state().fresh_stream()
    }

    /// Where the device lies on the host, and the stream's number: no other device lies there.
    fn stream_handle(&self, stream: Stream) -> u64 {
        Arc::as_ptr(&self.0) as u64 + u64::from(stream.0)
    }

    fn enter(&self) -> Result<(), Error> {
        Ok(())
    }

    fn idle(&self, stream: Stream) -> Result<bool, Error> {
        // Work is done when somebody waits for it, so this is the time.
        self.synchronize(stream).map(|()| true)
    }

    /// Does all that comes before on the stream, since a library works on the memory as it lies.
    fn lend(&self, stream: Stream, (ptr, bytes): (u64, usize)) -> Result<(), Error> {
        let mut state = self.state();
        state.put(stream, Work::Lend(ptr as usize, bytes))?;
        state.synchronize(stream)
    }

    fn filled(&self, stream: Stream, (ptr, bytes): (u64, usize)) -> Result<(), Error> {
        self.state().put(stream, Work::Filled(ptr as usize, bytes))
    }
}
