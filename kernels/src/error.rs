//! The one error of this crate.

/// What can go wrong in an op or on a device.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// An argument's length does not fit the spec.
    #[error("{op}: {what} holds {got} elements where {expected} are needed")]
    Len {
        /// The op called.
        op: &'static str,
        /// Which argument.
        what: &'static str,
        /// Elements needed.
        expected: usize,
        /// Elements given.
        got: usize,
    },
    /// A spec that has no meaning.
    #[error("{op}: {why}")]
    Spec {
        /// The op called.
        op: &'static str,
        /// What is wrong and what would be right.
        why: &'static str,
    },
    /// Memory could not be had.
    #[error(
        "{bytes} bytes for {tag} could not be allocated; a smaller model, more ranks or --zero-stage 1 needs less"
    )]
    Memory {
        /// Bytes asked for.
        bytes: usize,
        /// The allocation's tag.
        tag: &'static str,
    },
    /// A launch that no driver would take.
    #[cfg(feature = "gpu")]
    #[error("{kernel}: {got} {limit} where {least} to {most} are allowed")]
    Limit {
        /// The kernel.
        kernel: alloc::string::String,
        /// What is exceeded.
        limit: crate::launch::Limit,
        /// The least allowed.
        least: u64,
        /// The most allowed.
        most: u64,
        /// What the call says.
        got: u64,
    },
    /// A launch's arguments are not the kernel's.
    #[cfg(feature = "gpu")]
    #[error("{kernel}: {got} {what} where the kernel takes {expected}")]
    Arguments {
        /// The kernel.
        kernel: alloc::string::String,
        /// What differs.
        what: &'static str,
        /// What the kernel takes.
        expected: usize,
        /// What the call gives.
        got: usize,
    },
    /// There is no such kernel.
    #[cfg(feature = "gpu")]
    #[error("module {module} has no kernel {function}")]
    NoKernel {
        /// The module asked.
        module: alloc::string::String,
        /// The function sought.
        function: alloc::string::String,
    },
    /// A kernel or copy did what it must not; the device takes no more work.
    #[cfg(feature = "emulated")]
    #[error("{0}")]
    Fault(alloc::boxed::Box<crate::emulated::Fault>),
    /// A CUDA device is not there, or does not do what it was asked.
    #[cfg(feature = "cuda")]
    #[error("{0}")]
    Cuda(alloc::boxed::Box<crate::cuda::CudaError>),
    /// A collective failed.
    #[cfg(feature = "wire")]
    #[error(transparent)]
    Collective(#[from] quintet_collectives::Error),
}

#[cfg(feature = "cuda")]
impl From<crate::cuda::CudaError> for Error {
    fn from(error: crate::cuda::CudaError) -> Self {
        Self::Cuda(alloc::boxed::Box::new(error))
    }
}

/// Refuses an argument whose length is not what the spec needs.
pub(crate) fn need(
    op: &'static str,
    what: &'static str,
    expected: usize,
    got: usize,
) -> Result<(), Error> {
    if expected == got {
        Ok(())
    } else {
        Err(Error::Len {
            op,
            what,
            expected,
            got,
        })
    }
}
