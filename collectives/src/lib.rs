//! Collectives as checkable plans: groups, meshes, placements, nine families of algorithms, a model
//! that chooses among them, and transports that never hang in silence.
//!
//! ```text
//!              plan (pure data)                         perform (a dull loop)
//!
//!   round 0    0 --> 1 --> 2 --> 3 --> 0                Communicator --plan--> Performer
//!   round 1    0 --> 1 --> 2 --> 3 --> 0                                          |
//!   ...        each arrow: a chunk, folded                                    Transport
//!              onto what the next rank has    local (threads), socket (processes, shm), sim, yours
//! ```
//!
//! Read in this order: [`chunk`], [`element`], [`group`], [`order`], [`plan`] (the tables of rounds,
//! bytes and fold orders), [`plan::check`], [`cost`] (which plan when), [`transport`], [`performer`],
//! [`communicator`], [`transport::local`]. For processes: [`environment`], [`store`], [`process`],
//! [`transport::socket`], [`launch`]. What is done in shared memory instead of by messages: [`transport::direct`].
//!
//! # Words
//!
//! * **rank**, **world**: a member of a group and how many there are; **global** ranks are those of
//!   the whole world, and errors name them.
//! * **chunk**: the part of a buffer that belongs to one rank; ragged and empty ones are legal.
//! * **plan**, **round**: what every rank does, in steps; all messages of a round are posted at once.
//! * **fold**: to combine contributions; **partial**: a fold that is not complete.
//! * **piece**: a part of a message that goes through a pipelined plan one round after the last.
//! * **slot**: where a contribution is kept apart until its owner folds it in rank order.
//! * **call**: one rank's next collective; **mismatch**: two ranks whose calls differ.
//! * **run**, **generation**: processes that belong together; how often they were put together anew.
//!
//! # What is not here
//!
//! Devices and streams. Without the feature `std` also threads, clocks, sockets and processes:
//! `Communicator`, `World`, `Pending`, `Process`; plans, checker, performer and simulation remain.
//! Sockets and processes need a unix.
#![no_std]
// Where ranks share memory it is allowed, file by file: ARCHITECTURE, rule 11.
#![deny(unsafe_code)]

extern crate alloc;
#[cfg(feature = "std")]
extern crate std;

#[cfg(feature = "std")]
pub mod bench;
pub mod chunk;
#[cfg(feature = "std")]
pub mod communicator;
pub mod cost;
pub mod element;
#[cfg(feature = "std")]
pub mod environment;
pub mod error;
#[cfg(feature = "std")]
mod forked;
pub mod group;
#[cfg(all(feature = "std", unix))]
pub mod launch;
pub mod ledger;
pub mod mesh;
#[cfg(feature = "nccl")]
pub mod nccl;
pub mod order;
#[cfg(feature = "std")]
pub mod pending;
pub mod performer;
pub mod placement;
pub mod plan;
#[cfg(all(feature = "std", unix))]
pub mod process;
#[cfg(feature = "std")]
pub mod recorder;
#[cfg(feature = "std")]
pub mod store;
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
    communicator::{Communicator, Made, Observed, Observer, Stats},
    pending::{Done, Gate, Pending},
    recorder::Recorder,
    transport::local::{Local, World},
};

#[cfg(all(feature = "std", unix))]
pub use {
    process::{Process, from_env},
    transport::socket::Sockets,
};

#[cfg(all(doctest, feature = "std"))]
#[doc = include_str!("../README.md")]
struct Readme;
