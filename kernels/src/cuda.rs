//! NVIDIA GPUs: the driver and NVRTC, looked for at run time, as a [`Launch`].
//!
//! ```text
//! Cuda -> Device -> driver (driver.rs)      streams, memory, launches, one context
//!            +----> Kernels (kernels.rs)    (module, function) -> loaded kernel
//!                      cache (cache.rs)     cubins on disk
//!                      NVRTC (nvrtc.rs)     source.rs -> cubin, when none is kept
//!                      cubin.rs             what a cubin says its kernels take
//! ```
//!
//! A launch looks its kernel up, checks the call against the cubin and gives it to the driver:
//! nothing is allocated on the device and nobody waits. A kernel's first launch compiles it, unless
//! it is kept. What the driver refuses names kernel, grid and arguments; after an error that leaves
//! the device useless, every call answers with it. Launches run late, so a fault inside a kernel is
//! told by a later call: with `QUINTET_CUDA_SYNC=1` each launch is waited for and names itself.
//!
//! Memory comes from the driver's pool in the order of one stream, the handle's home
//! ([`Cuda::at_home`]): what is allocated is there for that stream at once and for another one after
//! an event of it. [`Gpu`](crate::Gpu) keeps to that.

mod cache;
pub mod cubin;
mod device;
mod driver;
mod error;
mod kernels;
mod nvrtc;
mod precompile;
mod source;

use alloc::format;
use alloc::string::String;
use alloc::sync::Arc;
use alloc::vec::Vec;

use cudarc::driver::sys::{CUcontext, CUstream};

use crate::Error;
use crate::launch::{Arch, Call, Launch, Libraries, Stream};

pub use device::CudaEvent;
use device::Device;
pub use error::CudaError;
pub use precompile::{Precompiled, precompile};
pub use source::{CudaModule, modules};

/// An NVIDIA GPU. Clones are the same device.
#[derive(Debug, Clone)]
pub struct Cuda {
    device: Arc<Device>,
    home: Stream,
}

impl Cuda {
    /// Device number `ordinal` of this machine, in its primary context.
    ///
    /// # Errors
    /// [`Error::Cuda`] where there is no driver, no such device, or one that is too old.
    pub fn new(ordinal: usize) -> Result<Self, Error> {
        Self::with_modules(ordinal, &[])
    }

    /// The same with modules beside the crate's own: kernels of others, which include nothing and
    /// are declared by KERNEL (cuda/prelude.cuh).
    ///
    /// # Errors
    /// As [`Cuda::new`].
    pub fn with_modules(ordinal: usize, modules: &'static [CudaModule]) -> Result<Self, Error> {
        let device = Arc::new(Device::primary(ordinal, modules)?);
        let home = Stream(0);
        Ok(Self { device, home })
    }

    /// The device of somebody else's context, for kernels among theirs. Stream number `i` of this
    /// handle is `streams[i]`; further ones are made.
    ///
    /// # Errors
    /// As [`Cuda::new`].
    ///
    /// # Safety
    /// The context and the streams are the driver's, belong together, and live as long as every
    /// clone of this handle.
    pub unsafe fn in_context(context: CUcontext, streams: &[CUstream]) -> Result<Self, Error> {
        // SAFETY: as the caller promises.
        let device = Arc::new(unsafe { Device::foreign(context, streams) }?);
        let home = Stream(0);
        Ok(Self { device, home })
    }

    /// How many devices the driver has.
    ///
    /// # Errors
    /// [`Error::Cuda`] where there is no driver or it has none.
    pub fn count() -> Result<usize, Error> {
        Ok(Device::count(&driver::Driver::load()?)?)
    }

    /// Where device number `ordinal` sits in its machine, as "0000:3b:00.0": the same for whoever sees it,
    /// under whatever number. Nothing of the device is used up.
    ///
    /// # Errors
    /// [`Error::Cuda`] where there is no driver or no such device.
    pub fn bus_id(ordinal: usize) -> Result<String, Error> {
        Ok(Device::bus_id(&driver::Driver::load()?, ordinal)?)
    }

    /// The same device, where memory is allocated in the order of `stream`: the compute stream of
    /// the one who allocates. Ranks that share a device have one each.
    #[must_use]
    pub fn at_home(&self, stream: Stream) -> Self {
        Self {
            device: self.device.clone(),
            home: stream,
        }
    }

    /// The device's name.
    #[must_use]
    pub fn name(&self) -> &str {
        self.device.name()
    }

    /// A point of `stream` whose time is taken, for [`CudaEvent::ms_since`].
    #[must_use]
    pub fn timed(&self, stream: Stream) -> CudaEvent {
        self.device.timed(stream)
    }

    /// How many kernels this device's handles have had compiled, rather than found.
    #[must_use]
    pub fn compiled(&self) -> usize {
        self.device.kernels().compiled()
    }

    /// What is known of the kernels loaded so far, by name: what they take, and the architecture
    /// that they were compiled for.
    #[must_use]
    pub fn loaded(&self) -> Vec<String> {
        self.device.kernels().loaded()
    }
}

/// A call as errors name it.
fn describe(call: &Call<'_>) -> String {
    let ([gx, gy, gz], [bx, by, bz]) = (call.grid, call.block);
    let args: Vec<String> = call.args.iter().map(|a| format!("{a:?}")).collect();
    format!(
        "{}::{} on {gx} x {gy} x {gz} blocks of {bx} x {by} x {bz} threads with {} bytes of shared memory ({})",
        call.module,
        call.function,
        call.shared,
        args.join(", ")
    )
}

impl Launch for Cuda {
    type Event = CudaEvent;

    fn arch(&self) -> Arch {
        Arch(self.device.arch())
    }

    fn multiprocessors(&self) -> u32 {
        self.device.multiprocessors()
    }

    fn alloc(&self, tag: &'static str, bytes: usize) -> Result<u64, Error> {
        self.device.alloc(self.home, tag, bytes)
    }

    fn free(&self, stream: Stream, ptr: u64) {
        self.device.free(stream, ptr);
    }

    fn launch(&self, stream: Stream, call: &Call<'_>) -> Result<(), Error> {
        self.device.healthy()?;
        let kernel = self.device.kernel(call.module, call.function)?;
        let info = kernel.info();
        call.check(self.arch(), info.max_threads, &info.params)?;
        self.device.launch(stream, &kernel, call)
    }

    fn fill(&self, stream: Stream, ptr: u64, value: u8, bytes: usize) -> Result<(), Error> {
        self.device.fill(stream, ptr, value, bytes)
    }

    fn copy(&self, stream: Stream, src: u64, dst: u64, bytes: usize) -> Result<(), Error> {
        self.device.copy(stream, src, dst, bytes)
    }

    fn upload(&self, stream: Stream, host: &[u8], dst: u64) -> Result<(), Error> {
        self.device.upload(stream, host, dst)
    }

    fn download(&self, stream: Stream, src: u64, host: &mut [u8]) -> Result<(), Error> {
        self.device.download(stream, src, host)
    }

    fn record(&self, stream: Stream) -> CudaEvent {
        self.device.record(stream)
    }

    fn wait(&self, stream: Stream, event: &CudaEvent) {
        self.device.wait(stream, event);
    }

    fn synchronize(&self, stream: Stream) -> Result<(), Error> {
        self.device.synchronize(stream)
    }

    fn libraries(&self) -> Option<&dyn Libraries> {
        Some(self)
    }
}

impl Libraries for Cuda {
    fn fresh_stream(&self) -> Stream {
        self.device.fresh_stream()
    }

    fn stream_handle(&self, stream: Stream) -> u64 {
        self.device.stream_handle(stream)
    }

    fn enter(&self) -> Result<(), Error> {
        self.device.enter()
    }

    fn idle(&self, stream: Stream) -> Result<bool, Error> {
        self.device.idle(stream)
    }

    /// Nothing: what libraries do is on the device's own streams.
    fn lend(&self, _: Stream, _: (u64, usize)) -> Result<(), Error> {
        Ok(())
    }

    fn filled(&self, _: Stream, _: (u64, usize)) -> Result<(), Error> {
        Ok(())
    }
}
