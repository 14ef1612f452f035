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
    /// A collective failed.
    #[cfg(feature = "wire")]
    #[error(transparent)]
    Collective(#[from] quintet_collectives::Error),
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
