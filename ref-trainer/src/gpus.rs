//! The GPUs that the ranks of this process run on.

use std::sync::{Mutex, PoisonError};

use quintet_kernels::Gpu;
use quintet_kernels::cuda::Cuda;
use quintet_kernels::launch::Stream;

use crate::failure::Failure;

/// Devices, each opened once: the ranks that share one share its compiled kernels too.
#[derive(Debug, Default)]
pub(crate) struct Gpus(Mutex<Vec<Option<Cuda>>>);

impl Gpus {
    /// The device of a rank: rank by rank, and where the devices end from the first again, each
    /// rank on streams of its own.
    ///
    /// # Errors
    /// Exit 2 where there is no driver, device or one that suits; 5 where it has no memory left.
    pub(crate) fn of_rank(&self, rank: usize) -> Result<Gpu<Cuda>, Failure> {
        let mut open = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if open.is_empty() {
            open.resize_with(Cuda::count()?, || None);
        }
        let there = open.len();
        let slot = &mut open[rank % there];
        let cuda = match slot {
            Some(cuda) => cuda.clone(),
            None => slot.insert(Cuda::new(rank % there)?).clone(),
        };
        let first = 2 * (rank / there) as u32;
        let streams = [Stream(first), Stream(first + 1)];
        Ok(Gpu::on(cuda.at_home(streams[0]), streams)?)
    }
}
