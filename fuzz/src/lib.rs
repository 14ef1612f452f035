//! Fuzz bodies: each is an ordinary function over bytes that must not panic and whose laws must
//! hold for any input. `cargo test -p quintet-fuzz` runs them over the kept corpus and a few
//! thousand seeded inputs; the targets of `fuzz/` beside this crate have libFuzzer look for more.

mod bytes;
mod environment;
mod layout;
mod mesh;
mod plans;
mod wire;

pub use environment::environment;
pub use layout::layout;
pub use mesh::{mesh, placement, runs};
pub use plans::{constants, overrides, plans, ragged};
pub use wire::{frames, rendezvous};

/// A body by name.
pub type Body = fn(&[u8]);

/// All bodies.
pub const BODIES: [(&str, Body); 11] = [
    ("mesh", mesh),
    ("placement", placement),
    ("runs", runs),
    ("layout", layout),
    ("frames", frames),
    ("rendezvous", rendezvous),
    ("environment", environment),
    ("plans", plans),
    ("ragged", ragged),
    ("overrides", overrides),
    ("constants", constants),
];
