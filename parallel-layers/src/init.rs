//! How parameters begin: each element a function of (seed, name, logical index), so that every
//! layout begins alike and no rank needs more than its own part.
//!
//! ```text
//! element i = mean + std * Stream::new(seed, name).normal(i)
//!
//!               from the ledger            all at random (for comparisons)
//! Normal{std}   0, std                     matrix [_, in]: 0, 1 / sqrt(in)
//! Ones          1, 0                       vector:         1, 0.1
//! Zeros         0, 0                       vector:         0, 0.1
//! ```
//!
//! The table of an embedding is a matrix like any other: its columns are the inputs of the head
//! it may be tied to.

use alloc::vec::Vec;

use quintet_collectives::{DeviceMesh, Init, ParamSpec};
use quintet_kernels::Float;

use crate::philox::Stream;

/// The elements of `spec` that `rank` holds at use, as training begins.
#[must_use]
pub fn init<T: Float>(spec: &ParamSpec, mesh: &DeviceMesh, rank: usize, seed: u64) -> Vec<T> {
    let (mean, std) = match spec.init {
        Init::Normal { std } => (0.0, std),
        Init::Ones => (1.0, 0.0),
        Init::Zeros => (0.0, 0.0),
    };
    draw(spec, mesh, rank, seed, mean, std)
}

/// As [`init`], but with every parameter at random and of a scale at which every gradient is
/// felt: what a comparison of layouts should begin from.
#[must_use]
pub fn init_random<T: Float>(
    spec: &ParamSpec,
    mesh: &DeviceMesh,
    rank: usize,
    seed: u64,
) -> Vec<T> {
    let (mean, std) = match (spec.shape.as_slice(), spec.init) {
        ([_, inputs], _) => (0.0, 1.0 / libm::sqrt(*inputs as f64)),
        (_, Init::Ones) => (1.0, 0.1),
        _ => (0.0, 0.1),
    };
    draw(spec, mesh, rank, seed, mean, std)
}

fn draw<T: Float>(
    spec: &ParamSpec,
    mesh: &DeviceMesh,
    rank: usize,
    seed: u64,
    mean: f64,
    std: f64,
) -> Vec<T> {
    let stream = Stream::new(seed, &spec.name);
    let mut part = Vec::with_capacity(spec.local_len(mesh, rank));
    for (_, logical, len) in spec.runs(mesh, rank) {
        part.extend((logical..logical + len).map(|i| {
            let noise = if std == 0.0 {
                0.0
            } else {
                std * stream.normal(i as u64)
            };
            T::from_f64(mean + noise)
        }));
    }
    part
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::spec::dense;
    use alloc::vec;
    use quintet_collectives::{Axis, Degrees, Placement};

    #[test]
    fn parts_join_to_the_whole() {
        let one = DeviceMesh::single();
        let four = DeviceMesh::new(Degrees {
            tp: 4,
            ..Default::default()
        })
        .unwrap();
        let spec = |mesh: &DeviceMesh, dim| {
            let on_tp = [(mesh.factor(Axis::Tp), Placement::shard(dim))];
            dense(mesh, "w", &[6, 3], &on_tp, Init::Normal { std: 0.5 })
        };
        let whole: Vec<f64> = init(&spec(&one, 0), &one, 0, 9);
        assert_eq!(whole[4], 0.5 * Stream::new(9, "w").normal(4));
        let rows: Vec<f64> = (0..4)
            .flat_map(|r| init::<f64>(&spec(&four, 0), &four, r, 9))
            .collect();
        assert_eq!(rows, whole);
        let column: Vec<f64> = init(&spec(&four, 1), &four, 1, 9);
        assert_eq!(column, [1, 4, 7, 10, 13, 16].map(|i| whole[i]));
        assert_eq!(init::<f64>(&spec(&four, 1), &four, 3, 9), vec![]);
    }

    #[test]
    fn all_at_random() {
        let one = DeviceMesh::single();
        let norm: Vec<f64> = init_random(&dense(&one, "n", &[2], &[], Init::Ones), &one, 0, 3);
        assert_eq!(norm[1], 1.0 + 0.1 * Stream::new(3, "n").normal(1));
        let matrix = dense(&one, "m", &[2, 4], &[], Init::Normal { std: 1.0 });
        let matrix: Vec<f64> = init_random(&matrix, &one, 0, 3);
        assert_eq!(matrix[7], 0.5 * Stream::new(3, "m").normal(7));
    }
}
