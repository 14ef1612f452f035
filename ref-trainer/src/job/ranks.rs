//! What the ranks of a job are, and what carries messages between them.

use quintet_collectives::transport::socket::Kind;
use serde::{Deserialize, Serialize};

/// What the ranks of a job are.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Ranks {
    /// Threads of this process.
    #[default]
    Threads,
    /// Processes, one a rank.
    Processes(Over),
}

/// What processes speak over.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Over {
    /// Shared memory where two ranks can open each other's, tcp between all others.
    #[default]
    Auto,
    /// Shared memory of one host.
    Shm,
    /// Unix sockets of one host.
    Unix,
    /// TCP.
    Tcp,
    /// MPI, which has started them.
    Mpi,
}

impl Ranks {
    /// What carries messages, as `--transport` and files of constants have it.
    #[must_use]
    pub const fn transport(self) -> &'static str {
        match self {
            Self::Threads => "local",
            Self::Processes(over) => over.name(),
        }
    }
}

impl Over {
    /// All of them.
    pub const ALL: [Self; 5] = [Self::Auto, Self::Shm, Self::Unix, Self::Tcp, Self::Mpi];

    /// The word of `--transport` and `QUINTET_TRANSPORT`.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::Shm => "shm",
            Self::Unix => "unix",
            Self::Tcp => "tcp",
            Self::Mpi => "mpi",
        }
    }

    /// What ranks meet by.
    #[must_use]
    pub const fn kind(self) -> Kind {
        match self {
            Self::Auto => Kind::Auto,
            Self::Shm => Kind::Shm,
            Self::Unix => Kind::Unix,
            Self::Tcp => Kind::Tcp,
            Self::Mpi => Kind::Mpi,
        }
    }
}
