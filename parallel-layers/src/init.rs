//! How parameters begin: each element a function of (seed, name, logical index), so that every
//! layout begins alike and no rank needs more than its own part.
//!
//! ```text
//! element i = mean + std * Stream::new(seed, name).normal(i)
//!
//!               from the ledger            all at random (for comparisons)
//! Normal{std}   0, std                     matrix [.., in]: 0, 1 / sqrt(in)
//! Ones          1, 0                       vector:         1, 0.1
//! Zeros         0, 0                       vector:         0, 0.1
//! ```
//!
//! One matrix an expert is stacked as `[experts, out, in]`. The table of an embedding is a matrix like any other: its columns are the inputs of the head
//! it may be tied to.

use alloc::vec::Vec;

use quintet_collectives::{DeviceMesh, Init, ParamSpec};
use quintet_kernels::Float;

use crate::philox::Stream;

/// Element `index` of the logical tensor, as training begins.
#[must_use]
pub fn init_value(spec: &ParamSpec, seed: u64, index: usize) -> f64 {
    let (mean, std) = match spec.init {
        Init::Normal { std } => (0.0, std),
        Init::Ones => (1.0, 0.0),
        Init::Zeros => (0.0, 0.0),
    };
    if std == 0.0 {
        return mean;
    }
    mean + std * Stream::new(seed, &spec.name).normal(index as u64)
}

/// As [`init_value`], but with every parameter at random and of a scale at which every gradient
/// is felt: what a comparison of layouts should begin from.
#[must_use]
pub fn init_random(spec: &ParamSpec, seed: u64, index: usize) -> f64 {
    let (mean, std) = match (spec.shape.as_slice(), spec.init) {
        ([_, .., inputs], _) => (0.0, 1.0 / libm::sqrt(*inputs as f64)),
        (_, Init::Ones) => (1.0, 0.1),
        _ => (0.0, 0.1),
    };
    mean + std * Stream::new(seed, &spec.name).normal(index as u64)
}

/// The elements that `rank` holds at use, each a function of its logical index.
#[must_use]
pub fn local<T: Float>(
    spec: &ParamSpec,
    mesh: &DeviceMesh,
    rank: usize,
    value: impl Fn(usize) -> f64,
) -> Vec<T> {
    spec.runs(mesh, rank)
        .into_iter()
        .flat_map(|(_, logical, len)| logical..logical + len)
        .map(|index| T::from_f64(value(index)))
        .collect()
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
        let part = |spec: &ParamSpec, mesh: &DeviceMesh, rank| {
            local::<f64>(spec, mesh, rank, |i| init_value(spec, 9, i))
        };
        let whole: Vec<f64> = part(&spec(&one, 0), &one, 0);
        assert_eq!(whole[4], 0.5 * Stream::new(9, "w").normal(4));
        let rows: Vec<f64> = (0..4)
            .flat_map(|r| part(&spec(&four, 0), &four, r))
            .collect();
        assert_eq!(rows, whole);
        let column: Vec<f64> = part(&spec(&four, 1), &four, 1);
        assert_eq!(column, [1, 4, 7, 10, 13, 16].map(|i| whole[i]));
        assert_eq!(part(&spec(&four, 1), &four, 3), vec![]);
    }

    #[test]
    fn all_at_random() {
        let one = DeviceMesh::single();
        let norm = dense(&one, "n", &[2], &[], Init::Ones);
        assert_eq!(
            init_random(&norm, 3, 1),
            1.0 + 0.1 * Stream::new(3, "n").normal(1)
        );
        assert_eq!(init_value(&norm, 3, 1), 1.0);
        let matrix = dense(&one, "m", &[2, 4], &[], Init::Normal { std: 1.0 });
        assert_eq!(
            init_random(&matrix, 3, 7),
            0.5 * Stream::new(3, "m").normal(7)
        );
        let stacked = dense(&one, "s", &[2, 3, 16], &[], Init::Normal { std: 1.0 });
        assert_eq!(
            init_random(&stacked, 3, 40),
            0.25 * Stream::new(3, "s").normal(40)
        );
    }
}
