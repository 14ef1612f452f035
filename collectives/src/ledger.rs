//! What is known about a parameter, written once.
//!
//! From a [`ParamSpec`] and the mesh everything else is derived: which part of the logical tensor
//! a rank holds, over which ranks its gradient is summed (the factors on which it is `Replicate`
//! at use), on which rank an element counts towards the global norm, its random numbers and its
//! place in a checkpoint (both go by name and logical index).
//!
//! ```text
//! at rest  --- move --->  at use        Invariant -> Replicate   (every rank its own use)
//! gradient <-- dual ----                Partial   -> Invariant   (summed over those ranks)
//! ```

use alloc::string::String;
use alloc::vec::Vec;
use core::ops::Range;

use crate::mesh::{DeviceMesh, Factor};
use crate::placement::{IndexMap, Placement};

/// How a parameter begins.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Init {
    /// Normal with mean 0.
    Normal {
        /// Standard deviation.
        std: f64,
    },
    /// All ones.
    Ones,
    /// All zeros.
    Zeros,
}

/// One parameter: the ledger's line.
#[derive(Debug, Clone, PartialEq)]
pub struct ParamSpec {
    /// Its name, as Hugging Face spells it; unique but for tied copies.
    pub name: String,
    /// Logical shape, outermost dim first.
    pub shape: Vec<usize>,
    /// Placement at use on every axis of its mesh view, factors outer to inner. An axis that is
    /// missing (pp) is one on which ranks hold different parameters.
    pub at_use: Vec<(Factor, Placement)>,
    /// Copies that share a name and a gradient, on several stages; the name of their group.
    pub tie: Option<String>,
    /// How it begins.
    pub init: Init,
    /// Whether weight decay applies.
    pub decay: bool,
}

impl ParamSpec {
    /// Elements of the logical tensor.
    #[must_use]
    pub fn len(&self) -> usize {
        self.shape.iter().product()
    }

    /// Whether the logical tensor has no element.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The part of the logical tensor that `rank` holds at use: one range per dim.
    #[must_use]
    pub fn local_box(&self, mesh: &DeviceMesh, rank: usize) -> Vec<Range<usize>> {
        let mut part: Vec<Range<usize>> = self.shape.iter().map(|&len| 0..len).collect();
        for &(factor, placement) in &self.at_use {
            let Placement::Shard {
                dim,
                map: map @ IndexMap::Contiguous { .. },
            } = placement
            else {
                continue;
            };
            let Some(range) = part.get_mut(dim) else {
                continue;
            };
            let place = mesh.place(rank, factor);
            if let Some([cut, _]) = map.ranges(range.len(), factor.degree, place) {
                *range = range.start + cut.start..range.start + cut.end;
            }
        }
        part
    }

    /// Elements that `rank` holds at use.
    #[must_use]
    pub fn local_len(&self, mesh: &DeviceMesh, rank: usize) -> usize {
        self.local_box(mesh, rank).iter().map(Range::len).product()
    }

    /// The local elements as runs `(local index, logical index, length)`, in local order.
    #[must_use]
    pub fn runs(&self, mesh: &DeviceMesh, rank: usize) -> Vec<(usize, usize, usize)> {
        runs(&self.shape, &self.local_box(mesh, rank))
    }

    /// The factors over which this parameter's gradient is summed: where it is `Replicate` at
    /// use. Those of one place are left out.
    #[must_use]
    pub fn summed_over(&self) -> Vec<Factor> {
        self.factors(|p| p == Placement::Replicate)
    }

    /// Whether `rank` is the one that counts its elements towards the global norm and writes them
    /// into a checkpoint: the first place on every factor on which ranks hold equal elements.
    /// Tied copies on other stages are the caller's to leave out.
    #[must_use]
    pub fn counts_on(&self, mesh: &DeviceMesh, rank: usize) -> bool {
        self.factors(|p| !p.is_shard())
            .iter()
            .all(|&f| mesh.place(rank, f) == 0)
    }

    fn factors(&self, keep: impl Fn(Placement) -> bool) -> Vec<Factor> {
        let chosen = self.at_use.iter().filter(|(f, p)| f.degree > 1 && keep(*p));
        chosen.map(|&(factor, _)| factor).collect()
    }
}

/// Runs of a box within a row-major tensor: `(index in the box, index in the tensor, length)`.
#[must_use]
pub fn runs(shape: &[usize], part: &[Range<usize>]) -> Vec<(usize, usize, usize)> {
    if part.iter().any(Range::is_empty) {
        return Vec::new();
    }
    // Dims that are whole from the right join the run of the first dim that is cut.
    let whole = part
        .iter()
        .zip(shape)
        .rev()
        .take_while(|(r, n)| r.len() == **n)
        .count();
    let cut = shape.len().saturating_sub(whole + 1);
    let stride = |dim: usize| shape[dim + 1..].iter().product::<usize>();
    let run = part[cut..].iter().map(Range::len).product();
    let mut starts = alloc::vec![0];
    for dim in 0..cut {
        starts = starts
            .iter()
            .flat_map(|s| part[dim].clone().map(move |i| s + i * stride(dim)))
            .collect();
    }
    let offset = if shape.is_empty() {
        0
    } else {
        part[cut].start * stride(cut)
    };
    starts
        .iter()
        .enumerate()
        .map(|(i, s)| (i * run, s + offset, run))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mesh::{Axis, Degrees};
    use alloc::vec;

    fn spec(shape: &[usize], at_use: Vec<(Factor, Placement)>) -> ParamSpec {
        let init = Init::Zeros;
        ParamSpec {
            name: "w".into(),
            shape: shape.to_vec(),
            at_use,
            tie: None,
            init,
            decay: true,
        }
    }

    #[test]
    fn runs_cover_the_box_in_order() {
        assert_eq!(runs(&[4, 3], &[1..3, 0..3]), [(0, 3, 6)]);
        assert_eq!(runs(&[4, 3], &[1..3, 1..3]), [(0, 4, 2), (2, 7, 2)]);
        assert_eq!(
            runs(&[2, 2, 2], &[0..2, 1..2, 0..2]),
            [(0, 2, 2), (2, 6, 2)]
        );
        assert_eq!(runs(&[5, 1], &[2..2, 0..1]), []);
        assert_eq!(runs(&[], &[]), [(0, 0, 1)]);
        assert_eq!(runs(&[3, 2], &[0..3, 0..2]), [(0, 0, 6)]);
    }

    #[test]
    fn kv_weights_on_more_ranks_than_heads() {
        // 2 KV heads of 4 on tp 4 = kv 2 x rep 2, dp 2.
        let mesh = DeviceMesh::new(Degrees {
            dp: 2,
            tp: 4,
            ..Default::default()
        })
        .unwrap();
        let (kv, rep) = mesh.split_axis(Axis::Tp, 2).unwrap();
        let dp = mesh.factor(Axis::Dp);
        let w = spec(
            &[8, 3],
            vec![
                (dp, Placement::Replicate),
                (kv, Placement::shard_units(0, 4)),
                (rep, Placement::Replicate),
            ],
        );
        assert_eq!(w.local_box(&mesh, 2), [4..8, 0..3]);
        assert_eq!(w.local_box(&mesh, 3), [4..8, 0..3]);
        assert_eq!(w.summed_over(), [dp, rep]);
        let counting: Vec<usize> = (0..8).filter(|&r| w.counts_on(&mesh, r)).collect();
        assert_eq!(counting, [0, 2]);
    }

    #[test]
    fn ragged_vocabulary_with_an_empty_shard() {
        let mesh = DeviceMesh::new(Degrees {
            tp: 4,
            ..Default::default()
        })
        .unwrap();
        let w = spec(&[3, 2], vec![(mesh.factor(Axis::Tp), Placement::shard(0))]);
        let lens: Vec<usize> = (0..4).map(|r| w.local_len(&mesh, r)).collect();
        assert_eq!(lens, [2, 2, 2, 0]);
        assert_eq!(w.runs(&mesh, 3), []);
    }
}
