//! What a CUDA device can not do, each in one sentence.

use std::string::String;

/// Why a CUDA device, or work on one, is not to be had.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CudaError {
    /// The driver's library can not be loaded.
    #[error(
        "there is no NVIDIA driver: {why}; install one, or name its library in QUINTET_CUDA_DRIVER"
    )]
    NoDriver {
        /// What the loader says.
        why: String,
    },
    /// The driver's library lacks a function.
    #[error("{library} has no {function}: a driver for CUDA 11.2 or later is needed")]
    OldDriver {
        /// The library.
        library: String,
        /// The function.
        function: String,
    },
    /// The driver has no such device.
    #[error("there is no CUDA device: {why}")]
    NoDevice {
        /// What the driver says, or what was asked for.
        why: String,
    },
    /// A device too old.
    #[error("{device} is sm_{arch}, and the kernels need sm_80 or later")]
    Arch {
        /// The device's name.
        device: String,
        /// Its compute capability.
        arch: u32,
    },
    /// NVRTC can not be loaded, and is needed.
    #[error(
        "the compiler NVRTC is not there ({why}); install it (pip install nvidia-cuda-nvrtc), name its library in QUINTET_NVRTC, or name a folder of quintet precompile in QUINTET_CUBINS"
    )]
    NoNvrtc {
        /// What the loader says.
        why: String,
    },
    /// The compiler makes no machine code for an architecture.
    #[error(
        "NVRTC {version} makes no code for sm_{arch}; another release of it does, or sm_{arch} is no GPU"
    )]
    UnknownArch {
        /// The architecture.
        arch: u32,
        /// The compiler's release.
        version: String,
    },
    /// A kernel does not compile.
    #[error("{kernel} does not compile for sm_{arch}: {log}")]
    Compile {
        /// The kernel.
        kernel: String,
        /// The architecture.
        arch: u32,
        /// What the compiler says.
        log: String,
    },
    /// A compiled kernel is not what it should be.
    #[error("the compiled {kernel} can not be used: {why}")]
    Cubin {
        /// The kernel.
        kernel: String,
        /// What is wrong.
        why: String,
    },
    /// A file or folder of compiled kernels can not be written.
    #[error("{path} can not be written: {why}")]
    Write {
        /// The file or folder.
        path: String,
        /// What the system says.
        why: String,
    },
    /// The driver refuses, or the device has failed.
    #[error("{what}: {why}")]
    Driver {
        /// What was asked for: of a launch its kernel, grid and arguments.
        what: String,
        /// What the driver says.
        why: String,
        /// Whether the device takes no more work.
        sticky: bool,
    },
}

impl CudaError {
    /// Whether the person who started the program can mend it: what is missing is not there.
    #[must_use]
    pub fn is_missing(&self) -> bool {
        !matches!(
            self,
            Self::Driver { .. } | Self::Compile { .. } | Self::Cubin { .. }
        )
    }
}
