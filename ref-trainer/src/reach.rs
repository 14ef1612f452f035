//! What lies on a device travels through the host, or, where the job says so, by NCCL from where it lies. What is not in
//! every build: NCCL, MPI, the emulator.

#[cfg(feature = "nccl")]
use std::sync::Arc;

#[cfg(feature = "nccl")]
use quintet_collectives::nccl::{Library, Nccl, SHARED_GPUS};
#[cfg(feature = "nccl")]
use quintet_collectives::{Communicator, transport::Transport};

use crate::failure::Failure;
#[cfg(feature = "nccl")]
use crate::job::DeviceKind;
use crate::job::Job;

/// Refuses NCCL in a build without it.
///
/// # Errors
/// Exit 2.
pub fn built() -> Result<(), Failure> {
    if cfg!(feature = "nccl") {
        return Ok(());
    }
    Err(Failure::usage(
        "this quintet was built without NCCL; cargo build --release -p quintet-ref-trainer --features nccl builds one with it (it needs neither CUDA nor NCCL for that)",
    ))
}

/// Refuses MPI in a build without it.
///
/// # Errors
/// Exit 2.
pub fn built_with_mpi() -> Result<(), Failure> {
    if cfg!(feature = "mpi") {
        return Ok(());
    }
    Err(Failure::usage(
        "--transport mpi is not in this quintet, which was built without MPI; cargo build --release -p quintet-ref-trainer --features mpi builds one with it (it needs an MPI with its mpicc, and libclang); others use auto, local, shm, unix or tcp",
    ))
}

/// Refuses the emulator in a build without it.
#[cfg(not(feature = "emulated"))]
pub(crate) fn no_emulator() -> Failure {
    Failure::usage(
        "this quintet was built without the emulator; cargo build --release -p quintet-ref-trainer --features emulated builds one with it (it needs a C++ compiler)",
    )
}

/// The library, where it works on the memory that the job's device computes with: the host's, or a GPU's.
#[cfg(feature = "nccl")]
fn library(device: DeviceKind) -> Result<Arc<Library>, Failure> {
    let library = Library::open()?;
    let emulated = device == DeviceKind::Emulated;
    if emulated && !library.on_host() {
        return Err(Failure::usage(format!(
            "{library:?} works on the memory of GPUs, and what --device emulated computes with is the host's; name the stand-in of the tests in QUINTET_NCCL_LIB, or use --transport auto"
        )));
    }
    if !emulated && library.on_host() {
        return Err(Failure::usage(format!(
            "{library:?} is the stand-in of the tests, which works on the host's memory; leave QUINTET_NCCL_LIB out, or use --device emulated"
        )));
    }
    Ok(library)
}

/// Whether the library that is found lets two ranks have one GPU; a library on host memory knows none.
///
/// # Errors
/// Exit 2 where NCCL is not found, cannot be used, or works on other memory than the job's device.
#[cfg(feature = "nccl")]
pub fn gpus_may_be_shared(job: &Job) -> Result<bool, Failure> {
    let library = library(job.device)?;
    let asked = std::env::var("NCCL_MULTI_RANK_GPU_ENABLE").is_ok_and(|word| word == "1");
    Ok(library.on_host() || asked && library.version() >= SHARED_GPUS)
}

/// The same in a build without NCCL.
///
/// # Errors
/// Exit 2.
#[cfg(not(feature = "nccl"))]
pub fn gpus_may_be_shared(_: &Job) -> Result<bool, Failure> {
    built().map(|()| true)
}

/// The communicator of the same ranks by which collectives are performed where the device's memory lies. Nothing
/// is sent.
///
/// # Errors
/// Exit 2 where NCCL is not found, cannot be used, or works on other memory.
#[cfg(feature = "nccl")]
pub fn over_nccl<T: Transport + Send + 'static>(
    comm: &Communicator<T>,
    device: DeviceKind,
) -> Result<Communicator<Nccl<T>>, Failure> {
    let library = library(device)?;
    Ok(comm.over("nccl", |end| Nccl::new(end, library))?)
}
