//! Where a job's ranks come from: `--launch`, `--transport`, and a launcher that has started this process.
//!
//! ```text
//! a launcher started this process    one rank of its processes, over --transport
//! --launch processes                 processes, which this one starts
//! --transport shm, unix, tcp         those too (mpi: only where mpirun has started it)
//! else                               threads of this process, over local
//! ```

use quintet_collectives::environment::{Family, Place, Variables};

use super::apply::Told;
use super::words::{Launch, ReductionOrder, Transport};
use crate::failure::Failure;
use crate::job::{DeviceKind, Job, Over, Ranks};
use crate::reach;

/// The place that a launcher has given this process, if one has started it as a rank. One process
/// alone is none unless our own launcher says so: its ranks may be threads.
///
/// # Errors
/// Exit 2 where the environment says half of a place.
pub(super) fn launched(env: &Variables) -> Result<Option<Place>, Failure> {
    let place = Place::parse(env)?;
    let rank = place.world > 1 || place.family == Family::Ours;
    Ok((rank && place.family != Family::Alone).then_some(place))
}

/// What ranks are; `before` is what a saved job says.
///
/// # Errors
/// Exit 2 for words that cannot be meant together, or are not built.
pub(super) fn ranks(
    (launch, transport): (Option<Launch>, Option<Transport>),
    told: Told<'_>,
    before: Ranks,
) -> Result<Ranks, Failure> {
    let asked = match transport {
        None => None,
        Some(word) => Some(over(word)?),
    };
    if let Some(place) = told.launched {
        let threads = launch == Some(Launch::Threads);
        if threads || asked == Some(None) {
            let flag = if threads {
                "--launch threads makes every rank a thread"
            } else {
                "--transport local is for threads"
            };
            return Err(Failure::usage(format!(
                "{flag} of one process, and a launcher has started {} processes; leave it out, or start quintet once",
                place.world
            )));
        }
    }
    if asked == Some(Some(Over::Mpi)) && told.launched.is_none() {
        return Err(Failure::usage(
            "--transport mpi is for ranks that MPI has started: mpirun -n N quintet ... --transport mpi; else use auto, shm, unix or tcp",
        ));
    }
    let before_over = match before {
        Ranks::Processes(over) => Some(over),
        Ranks::Threads => None,
    };
    let processes = match (told.launched, launch, asked) {
        (Some(_), _, _) | (None, Some(Launch::Processes), _) => true,
        (None, Some(Launch::Threads), Some(Some(over))) if over != Over::Auto => {
            return Err(Failure::usage(format!(
                "--transport {} is for processes, and --launch threads makes every rank a thread; use --launch processes, or --transport local",
                over.name()
            )));
        }
        (None, Some(Launch::Threads), _) | (None, None, Some(None)) => false,
        (None, None, Some(Some(Over::Auto)) | None) => before_over.is_some(),
        (None, None, Some(Some(_))) => true,
    };
    if !processes {
        return Ok(Ranks::Threads);
    }
    match asked {
        Some(Some(over)) => Ok(Ranks::Processes(over)),
        Some(None) => Err(Failure::usage(
            "--transport local is for threads, and --launch processes makes every rank a process; use auto, shm, unix or tcp",
        )),
        None => {
            let named = told.env.get("QUINTET_TRANSPORT").map(|name| name.trim());
            let known = Over::ALL
                .into_iter()
                .find(|over| Some(over.name()) == named);
            // A name that is none is refused where ranks meet.
            Ok(Ranks::Processes(known.or(before_over).unwrap_or_default()))
        }
    }
}

/// What a word of `--transport` means between processes; none for `local`, which is for threads.
///
/// # Errors
/// Exit 2 for one that is not built.
pub(super) fn over(word: Transport) -> Result<Option<Over>, Failure> {
    Ok(match word {
        Transport::Local => None,
        // What NCCL does not carry goes as it would without.
        Transport::Auto | Transport::Nccl => Some(Over::Auto),
        Transport::Shm => Some(Over::Shm),
        Transport::Unix => Some(Over::Unix),
        Transport::Tcp => Some(Over::Tcp),
        Transport::Mpi => {
            reach::built_with_mpi()?;
            Some(Over::Mpi)
        }
    })
}

/// Whether NCCL carries what is on the device; `before` is what a saved job says. It needs such a device, and
/// folds in an order of its own.
///
/// # Errors
/// Exit 2 where that cannot be.
pub(super) fn nccl(
    job: &mut Job,
    transport: Option<Transport>,
    order: Option<ReductionOrder>,
) -> Result<(), Failure> {
    job.nccl = transport.map_or(job.nccl, |word| word == Transport::Nccl);
    if !job.nccl {
        return Ok(());
    }
    carries(job.device, order)?;
    job.layout.any_order = true;
    Ok(())
}

/// Whether NCCL can carry what is on this device, and fold it in this order.
///
/// # Errors
/// Exit 2 where it cannot.
pub(super) fn carries(device: DeviceKind, order: Option<ReductionOrder>) -> Result<(), Failure> {
    reach::built()?;
    if device == DeviceKind::Cpu {
        return Err(Failure::usage(
            "--transport nccl moves what lies on a device, and --device cpu is none; use --device emulated (verify, bench), or --transport auto",
        ));
    }
    if order == Some(ReductionOrder::Rank) {
        return Err(Failure::usage(
            "--transport nccl folds in an order that NCCL chooses, and --reduction-order rank asks for another; leave it out, or use --transport auto",
        ));
    }
    Ok(())
}

/// Refuses a layout that has not as many ranks as were started.
///
/// # Errors
/// Exit 2 with both numbers.
pub(super) fn fit(job: &Job, launched: Option<&Place>) -> Result<(), Failure> {
    let world = job.layout.world();
    match launched {
        Some(place) if place.world != world => Err(Failure::usage(format!(
            "the layout has {world} ranks, and the launcher has started {} processes; they must be as many: give --dp, --tp, --pp and --cp whose product is {}, or start {world}",
            place.world, place.world
        ))),
        _ => Ok(()),
    }
}
