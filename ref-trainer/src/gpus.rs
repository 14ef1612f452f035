//! The GPUs that the ranks of this process run on.

use quintet_kernels::Gpu;
use quintet_kernels::cuda::Cuda;
use quintet_kernels::launch::Stream;

use crate::failure::Failure;
use crate::job::Job;
use crate::shared_device::{Devices, Shared};

/// The GPUs, each opened once.
#[derive(Debug, Default)]
pub(crate) struct Gpus(Devices<Cuda>);

impl Gpus {
    /// The GPU of a rank, and what ranks that share it speak through: see [`Devices::of_rank`].
    ///
    /// # Errors
    /// Exit 2 where there is no driver, device or one that suits; 5 where it has no memory left.
    pub(crate) fn of_rank(
        &self,
        rank: usize,
        all_here: Option<&Job>,
    ) -> Result<(Gpu<Cuda>, Option<Shared<Cuda>>), Failure> {
        self.0.of_rank(
            rank,
            all_here,
            || Ok(Cuda::count()?),
            |ordinal| Ok(Cuda::new(ordinal)?),
            |cuda, first| {
                let streams = [Stream(first), Stream(first + 1)];
                (cuda.at_home(streams[0]), streams)
            },
        )
    }
}
