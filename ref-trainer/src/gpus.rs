//! The GPUs that the ranks of this process run on.

use std::sync::{Mutex, PoisonError};

use quintet_kernels::Gpu;
use quintet_kernels::cuda::Cuda;
use quintet_kernels::launch::Stream;

use crate::devices::ordinal;
use crate::failure::Failure;

/// Devices, each opened once: the ranks that share one share its compiled kernels too.
#[derive(Debug, Default)]
pub(crate) struct Gpus {
    open: Mutex<Vec<Option<Cuda>>>,
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

    /// The device of a rank ([`crate::devices`]); where ranks share one, each is on streams of its own.
    ///
    /// # Errors
    /// Exit 2 where there is no driver, device or one that suits; 5 where it has no memory left.
    pub(crate) fn of_rank(&self, rank: usize) -> Result<Gpu<Cuda>, Failure> {
        let mut open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
        if open.is_empty() {
            open.resize_with(Cuda::count()?, || None);
        }
        let (at, round) = ordinal(self.number.unwrap_or(rank), open.len());
        let slot = &mut open[at];
        let cuda = match slot {
            Some(cuda) => cuda.clone(),
            None => slot.insert(Cuda::new(at)?).clone(),
        };
        let first = 2 * round as u32;
        let streams = [Stream(first), Stream(first + 1)];
        Ok(Gpu::on(cuda.at_home(streams[0]), streams)?)
    }
}

/// Where the GPU of the rank with this number on its host sits.
///
/// # Errors
/// Exit 2 where there is no driver or no device.
pub(crate) fn bus_id(number: usize) -> Result<String, Failure> {
    Ok(Cuda::bus_id(ordinal(number, Cuda::count()?).0)?)
}
