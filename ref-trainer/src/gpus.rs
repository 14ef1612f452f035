//! The GPUs that the ranks of this process run on.

use quintet_kernels::Gpu;
use quintet_kernels::cuda::Cuda;
use quintet_kernels::launch::Stream;

use crate::devices::ordinal;
use crate::failure::Failure;
use crate::job::Job;
use crate::shared_device::{Devices, Shared};

/// The GPUs, each opened once.
#[derive(Debug, Default)]
pub(crate) struct Gpus {
    open: Devices<Cuda>,
    /// Of a process that is one rank: its number on its host.
    number: Option<usize>,
}

impl Gpus {
    /// Those of a process that is one rank, with this number on its host, or of one that has all of them.
    pub(crate) fn of(number: Option<usize>) -> Self {
        Self {
            number,
            ..Self::default()
        }
    }

    /// The GPU of a rank, and what ranks that share it speak through: see [`Devices::of_rank`].
    ///
    /// # Errors
    /// Exit 2 where there is no driver, device or one that suits; 5 where it has no memory left.
    pub(crate) fn of_rank(
        &self,
        rank: usize,
        all_here: Option<&Job>,
    ) -> Result<(Gpu<Cuda>, Option<Shared<Cuda>>), Failure> {
        self.open.of_rank(
            self.number.unwrap_or(rank),
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

/// Where the GPU of the rank with this number on its host sits.
///
/// # Errors
/// Exit 2 where there is no driver or no device.
pub(crate) fn bus_id(number: usize) -> Result<String, Failure> {
    Ok(Cuda::bus_id(ordinal(number, Cuda::count()?).0)?)
}
