//! Parameters' lines in the ledger, as the layers of this crate write them.

use alloc::string::{String, ToString};
use alloc::vec::Vec;

use quintet_collectives::{Axis, DeviceMesh, Factor, Init, ParamSpec, Placement};

/// Standard deviation from which matrices begin.
pub const INIT_STD: f64 = 0.02;

/// Where a parameter lies on tp and its factors, outer to inner.
pub(crate) type OnTp = Vec<(Factor, Placement)>;

/// A parameter of the dense view: every replica and every context part uses it in its own way
/// (Replicate over dp and cp), `on_tp` says the rest.
pub(crate) fn dense(
    mesh: &DeviceMesh,
    name: &str,
    shape: &[usize],
    on_tp: &[(Factor, Placement)],
    init: Init,
) -> ParamSpec {
    let mut at_use: Vec<_> = [Axis::Dp, Axis::Cp]
        .map(|axis| (mesh.factor(axis), Placement::Replicate))
        .to_vec();
    at_use.extend_from_slice(on_tp);
    ParamSpec {
        name: name.to_string(),
        shape: shape.to_vec(),
        at_use,
        tie: None,
        init,
        // Matrices decay, norms and biases do not.
        decay: shape.len() > 1,
    }
}

/// `prefix.suffix`.
pub(crate) fn join(prefix: &str, suffix: &str) -> String {
    alloc::format!("{prefix}.{suffix}")
}
