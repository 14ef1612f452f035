//! Devices that ranks of this process share, and what their communicators do about it.

use std::sync::{Mutex, PoisonError};

use quintet_collectives::{Communicator, transport::Transport};
use quintet_kernels::Gpu;
use quintet_kernels::launch::{Launch, Stream};
use quintet_kernels::wire::{Board, RANKS, SameDevice};

use crate::devices::ordinal;
use crate::failure::Failure;
use crate::job::Job;

/// A device with what its ranks speak through.
pub(crate) type Shared<L> = (L, Board<L>);

/// Devices, each opened once: the ranks that share one share its compiled kernels too.
#[derive(Debug)]
pub(crate) struct Devices<L: Launch>(Mutex<Vec<Option<Shared<L>>>>);

impl<L: Launch> Default for Devices<L> {
    fn default() -> Self {
        Self(Mutex::default())
    }
}

impl<L: Launch> Devices<L> {
    /// The device of the rank with this number among as many as `count` says ([`crate::devices`]), made by
    /// `open` when first asked for, each rank on streams of its own that `streams` gives. Beside it what the ranks speak through, where all of them are threads here and share
    /// one device.
    ///
    /// # Errors
    /// Those of `count` and `open`; exit 5 where a device has no memory left.
    pub(crate) fn of_rank(
        &self,
        number: usize,
        all_here: Option<&Job>,
        count: impl FnOnce() -> Result<usize, Failure>,
        open: impl FnOnce(usize) -> Result<L, Failure>,
        streams: impl FnOnce(&L, u32) -> (L, [Stream; 2]),
    ) -> Result<(Gpu<L>, Option<Shared<L>>), Failure> {
        let mut slots = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if slots.is_empty() {
            slots.resize_with(count()?, || None);
        }
        let there = slots.len();
        let (at, round) = ordinal(number, there);
        let slot = &mut slots[at];
        let (device, board) = match slot {
            Some(shared) => shared.clone(),
            None => slot.insert((open(at)?, Board::default())).clone(),
        };
        let (home, streams) = streams(&device, 2 * round as u32);
        let one = all_here.is_some_and(|job| {
            let world = job.layout.world();
            !job.by_messages && world <= RANKS && (there == 1 || world == 1)
        });
        Ok((Gpu::on(home, streams)?, one.then_some((device, board))))
    }
}

#[cfg(feature = "emulated")]
impl Devices<quintet_kernels::emulated::Emulated> {
    /// The emulated device, which all ranks here share, for the one with this number. Its choices follow the seed of whoever
    /// asks first.
    ///
    /// # Errors
    /// Those of [`Devices::of_rank`].
    pub(crate) fn emulated(
        &self,
        number: usize,
        all_here: Option<&Job>,
        seed: u64,
    ) -> Result<
        (
            Gpu<quintet_kernels::emulated::Emulated>,
            Option<Shared<quintet_kernels::emulated::Emulated>>,
        ),
        Failure,
    > {
        use quintet_kernels::emulated::Emulated;
        use quintet_kernels::launch::{Arch, Libraries};
        let open = |_| Ok(Emulated::new(Arch(80), seed));
        self.of_rank(
            number,
            all_here,
            || Ok(1),
            open,
            |device, _| {
                let streams = [device.fresh_stream(), device.fresh_stream()];
                (device.clone(), streams)
            },
        )
    }
}

/// The communicator of the same ranks by which collectives are performed on the device that they share,
/// or, where there is none, through the host. Nothing is sent.
///
/// # Errors
/// Those of [`Communicator::over`].
pub(crate) fn reaching<L: Launch, T: Transport + Send + 'static>(
    comm: &Communicator<T>,
    shared: Option<Shared<L>>,
) -> Result<Communicator<SameDevice<L, T>>, Failure> {
    Ok(comm.over("device", |end| SameDevice::new(end, shared))?)
}
