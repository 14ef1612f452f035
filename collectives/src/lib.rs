//! Collectives as checkable plans: groups, meshes, placements, ring, tree, pairwise and direct
//! algorithms, and transports that never hang in silence.
#![no_std]
#![forbid(unsafe_code)]

extern crate alloc;
#[cfg(feature = "std")]
extern crate std;

pub mod chunk;
#[cfg(feature = "std")]
pub mod communicator;
pub mod element;
pub mod error;
pub mod group;
pub mod ledger;
pub mod mesh;
pub mod order;
#[cfg(feature = "std")]
pub mod pending;
pub mod performer;
pub mod placement;
pub mod plan;
pub mod transport;

pub use element::{DType, Element, ReduceOp};
pub use error::{Error, Result};
pub use group::ProcessGroup;
pub use ledger::{Init, ParamSpec};
pub use mesh::{Axis, Degrees, DeviceMesh, Factor};
pub use order::{Algorithm, Order, choose};
pub use placement::{IndexMap, Move, MoveKind, Placement};
pub use plan::{CollectiveShape, Plan};
pub use transport::Transport;
#[cfg(feature = "std")]
pub use {
    communicator::{Communicator, Stats},
    pending::{Done, Gate, Pending},
    transport::local::{Local, World},
};
