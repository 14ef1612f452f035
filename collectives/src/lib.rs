//! Collectives as checkable plans: groups, meshes, placements, ring, tree, pairwise and direct
//! algorithms, and transports that never hang in silence.
#![no_std]

extern crate alloc;
#[cfg(feature = "std")]
extern crate std;

pub mod chunk;
pub mod element;
pub mod error;
pub mod ledger;
pub mod mesh;
pub mod placement;

pub use element::{Element, ReduceOp};
pub use error::Error;
pub use ledger::{Init, ParamSpec};
pub use mesh::{Axis, Degrees, DeviceMesh, Factor};
pub use placement::{IndexMap, Move, MoveKind, Placement};
