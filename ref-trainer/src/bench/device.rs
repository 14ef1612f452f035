//! `quintet bench --transport nccl`: calls on elements that lie on a device, each rank on its own.

use quintet_collectives::bench::{Buffers, Memory};
use quintet_collectives::{Communicator, Error, Order, ReduceOp, Result, Transport};
use quintet_kernels::launch::Launch;
use quintet_kernels::wire::collective;
use quintet_kernels::{Backend, Gpu, Tag};
use quintet_planner::Layout;

use super::{BenchJob, perform};
use crate::crew::{Crew, End, Work};
use crate::data::Corpus;
use crate::failure::{Exit, Failure};
use crate::job::{DeviceKind, Job};
use crate::reach::over_nccl;

/// Lets each rank find its device, as the ranks of a training run do, and measures.
pub(super) fn bench(job: &BenchJob) -> std::result::Result<Exit, Failure> {
    let ranks = Job {
        device: job.device,
        nccl: true,
        ranks: job.transport,
        launched: job.launched,
        layout: Layout {
            dp: job.ranks,
            ..Layout::single()
        },
        ..Job::demo()
    };
    Crew::with(&ranks, &Corpus::built_in(), |crew| {
        let work = Measuring {
            job,
            #[cfg(feature = "cuda")]
            gpus: crew.gpus(),
            #[cfg(feature = "emulated")]
            emulated: crate::shared_device::Devices::default(),
        };
        let exits = crew.go(&work)?.unwrap_or_default();
        Ok(super::exit(exits.first().copied().unwrap_or(0)))
    })
}

/// The ranks' work; what each leaves is how many elements were wrong.
struct Measuring<'a> {
    job: &'a BenchJob,
    #[cfg(feature = "cuda")]
    gpus: crate::gpus::Gpus,
    #[cfg(feature = "emulated")]
    emulated: crate::shared_device::Devices<quintet_kernels::emulated::Emulated>,
}

impl Work for Measuring<'_> {
    type Left = u64;

    fn rank(&self, comm: Communicator<End>) -> std::result::Result<u64, Failure> {
        match self.job.device {
            #[cfg(feature = "emulated")]
            DeviceKind::Emulated => {
                let (gpu, _) = self.emulated.emulated(comm.rank(), None, 1)?;
                self.on(gpu, &comm)
            }
            #[cfg(not(feature = "emulated"))]
            DeviceKind::Emulated => Err(crate::reach::no_emulator()),
            #[cfg(feature = "cuda")]
            DeviceKind::Cuda => self.on(self.gpus.of_rank(comm.rank(), None)?.0, &comm),
            #[cfg(not(feature = "cuda"))]
            DeviceKind::Cuda => Err(crate::precompile::no_cuda()),
            // The command line leaves no other.
            DeviceKind::Cpu => Err(Failure::usage("--transport nccl needs a device")),
        }
    }
}

impl Measuring<'_> {
    fn on<L: Launch>(
        &self,
        gpu: Gpu<L>,
        comm: &Communicator<End>,
    ) -> std::result::Result<u64, Failure> {
        let comm = over_nccl(comm, self.job.device)?;
        let mut memory = OnDevice { gpu, buf: None };
        perform(self.job, comm.with_order(Order::Any), &mut memory)
    }
}

/// A device's memory.
struct OnDevice<L: Launch> {
    gpu: Gpu<L>,
    buf: Option<<Gpu<L> as Backend>::Buf<f32>>,
}

impl<L: Launch, T: Transport + Send + 'static> Memory<T> for OnDevice<L> {
    fn chooses(&self) -> Option<&'static str> {
        Some("nccl")
    }

    fn write(&mut self, buffers: &Buffers) -> Result<()> {
        // Room for two is not needed.
        self.buf = None;
        let there = self.gpu.upload(Tag::Comm, buffers.elements());
        self.buf = Some(there.map_err(|e| failed("write device memory", &e))?);
        Ok(())
    }

    fn call(&mut self, comm: &Communicator<T>, buffers: &mut Buffers) -> Result<()> {
        let Some(buf) = &mut self.buf else {
            return Err(Error::Layout("nothing was written to the device".into()));
        };
        let call = (buffers.shape().clone(), ReduceOp::Sum);
        collective(comm, call, buf, buffers.places())
    }

    fn read(&mut self, buffers: &mut Buffers) -> Result<()> {
        let Some(buf) = &self.buf else {
            return Ok(());
        };
        let back = self.gpu.download(Gpu::whole(buf), buffers.elements_mut());
        back.map_err(|e| failed("read device memory", &e))
    }
}

fn failed(what: &'static str, error: &quintet_kernels::Error) -> Error {
    Error::System {
        what,
        reason: error.to_string(),
    }
}
