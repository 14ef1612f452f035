//! The named grid of ranks, in two views of the same ranks.
//!
//! ```text
//! dense    world = pp * dp  * cp * tp    rank = ((pp*DP  + dp )*CP + cp)*TP  + tp
//! expert   world = pp * edp * ep * etp   rank = ((pp*EDP + edp)*EP + ep)*ETP + etp
//! ```
//!
//! tp lies innermost, so that its ranks are neighbours. Experts are folded into the ranks of
//! dp x cp x tp: `ep` does **not** multiply the world, edp = dp * cp * tp / (ep * etp).
//!
//! An axis may be **factored**: with 2 KV heads on tp 4, tp = kv 2 x rep 2, and a placement is
//! given per factor. A [`Factor`] is `(index / stride) % degree` of its axis.

use alloc::format;
use alloc::string::String;
use alloc::vec::Vec;
use core::fmt;

use crate::Error;

/// An axis of the mesh. (A *dim* is of a tensor.)
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Axis {
    /// Pipeline stages; in both views.
    Pp,
    /// Data parallel replicas.
    Dp,
    /// Context parallel parts of a sequence.
    Cp,
    /// Tensor parallel parts of a layer.
    Tp,
    /// Replicas of an expert shard.
    Edp,
    /// Shards of the experts.
    Ep,
    /// Tensor parallel parts of an expert.
    Etp,
}

impl Axis {
    /// The axis as flags and reports spell it.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Axis::Pp => "pp",
            Axis::Dp => "dp",
            Axis::Cp => "cp",
            Axis::Tp => "tp",
            Axis::Edp => "edp",
            Axis::Ep => "ep",
            Axis::Etp => "etp",
        }
    }
}

/// A whole axis or a factor of one: `(index on axis / stride) % degree`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Factor {
    /// The axis.
    pub axis: Axis,
    /// Neighbours on this factor are so many apart on the axis.
    pub stride: usize,
    /// Places on this factor.
    pub degree: usize,
}

/// Degrees of a mesh as the user gives them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Degrees {
    /// Pipeline stages.
    pub pp: usize,
    /// Data parallel replicas.
    pub dp: usize,
    /// Context parallel parts.
    pub cp: usize,
    /// Tensor parallel parts.
    pub tp: usize,
    /// Expert shards.
    pub ep: usize,
    /// Tensor parallel parts of an expert.
    pub etp: usize,
}

impl Default for Degrees {
    fn default() -> Self {
        Self {
            pp: 1,
            dp: 1,
            cp: 1,
            tp: 1,
            ep: 1,
            etp: 1,
        }
    }
}

/// The grid of ranks.
///
/// ```
/// use quintet_collectives::mesh::{Axis, Degrees, DeviceMesh};
/// let mesh = DeviceMesh::new(Degrees { dp: 2, tp: 2, pp: 2, ..Default::default() })?;
/// assert_eq!(mesh.world(), 8);
/// assert_eq!(mesh.group(5, &[mesh.factor(Axis::Tp)]), [4, 5]);
/// assert_eq!(mesh.group(5, &[mesh.factor(Axis::Pp)]), [1, 5]);
/// # Ok::<(), quintet_collectives::Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DeviceMesh {
    degrees: Degrees,
    edp: usize,
}

impl DeviceMesh {
    /// Builds both views.
    ///
    /// # Errors
    /// [`Error::Layout`] where a degree is 0, or ep x etp does not divide dp x cp x tp; the
    /// sentence names the nearest valid choices.
    pub fn new(degrees: Degrees) -> Result<Self, Error> {
        let Degrees {
            pp,
            dp,
            cp,
            tp,
            ep,
            etp,
        } = degrees;
        for (name, degree) in [
            ("pp", pp),
            ("dp", dp),
            ("cp", cp),
            ("tp", tp),
            ("ep", ep),
            ("etp", etp),
        ] {
            if degree == 0 {
                return Err(Error::Layout(format!(
                    "{name}=0 means no rank; the least is 1"
                )));
            }
        }
        let folded = dp * cp * tp;
        if !folded.is_multiple_of(ep * etp) {
            let valid: Vec<String> = (1..=folded)
                .filter(|e| folded.is_multiple_of(e * etp))
                .map(|e| format!("{e}"))
                .collect();
            return Err(Error::Layout(format!(
                "ep={ep} x etp={etp} does not divide dp x cp x tp = {folded}; ep may be {}",
                if valid.is_empty() {
                    String::from("none at this etp")
                } else {
                    valid.join(", ")
                }
            )));
        }
        Ok(Self {
            degrees,
            edp: folded / (ep * etp),
        })
    }

    /// A mesh of one rank.
    #[must_use]
    pub fn single() -> Self {
        Self {
            degrees: Degrees::default(),
            edp: 1,
        }
    }

    /// Ranks in all.
    #[must_use]
    pub fn world(&self) -> usize {
        let d = &self.degrees;
        d.pp * d.dp * d.cp * d.tp
    }

    /// Places on an axis.
    #[must_use]
    pub fn degree(&self, axis: Axis) -> usize {
        match axis {
            Axis::Pp => self.degrees.pp,
            Axis::Dp => self.degrees.dp,
            Axis::Cp => self.degrees.cp,
            Axis::Tp => self.degrees.tp,
            Axis::Edp => self.edp,
            Axis::Ep => self.degrees.ep,
            Axis::Etp => self.degrees.etp,
        }
    }

    /// How far apart in rank two neighbours on an axis are.
    fn stride(&self, axis: Axis) -> usize {
        let d = &self.degrees;
        match axis {
            Axis::Tp | Axis::Etp => 1,
            Axis::Cp => d.tp,
            Axis::Dp => d.cp * d.tp,
            Axis::Pp => d.dp * d.cp * d.tp,
            Axis::Ep => d.etp,
            Axis::Edp => d.ep * d.etp,
        }
    }

    /// A rank's place on an axis.
    #[must_use]
    pub fn index(&self, rank: usize, axis: Axis) -> usize {
        rank / self.stride(axis) % self.degree(axis)
    }

    /// A whole axis as a factor.
    #[must_use]
    pub fn factor(&self, axis: Axis) -> Factor {
        Factor {
            axis,
            stride: 1,
            degree: self.degree(axis),
        }
    }

    /// An axis cut in two factors, `outer` places of neighbours-of-neighbours and the rest inner.
    ///
    /// # Errors
    /// [`Error::Layout`] where `outer` does not divide the axis.
    pub fn split_axis(&self, axis: Axis, outer: usize) -> Result<(Factor, Factor), Error> {
        let degree = self.degree(axis);
        if outer == 0 || !degree.is_multiple_of(outer) {
            return Err(Error::Layout(format!(
                "{}={degree} has no factor of {outer}",
                axis.name()
            )));
        }
        let inner = degree / outer;
        Ok((
            Factor {
                axis,
                stride: inner,
                degree: outer,
            },
            Factor {
                axis,
                stride: 1,
                degree: inner,
            },
        ))
    }

    /// A rank's place on a factor.
    #[must_use]
    pub fn place(&self, rank: usize, factor: Factor) -> usize {
        self.index(rank, factor.axis) / factor.stride % factor.degree
    }

    /// The ranks, ascending, that differ from `rank` at most on these factors.
    #[must_use]
    pub fn group(&self, rank: usize, factors: &[Factor]) -> Vec<usize> {
        let mut ranks = alloc::vec![rank];
        for &factor in factors {
            let step = factor.stride * self.stride(factor.axis);
            ranks = ranks
                .iter()
                .flat_map(|&r| {
                    let first = r - self.place(r, factor) * step;
                    (0..factor.degree).map(move |i| first + i * step)
                })
                .collect();
        }
        ranks.sort_unstable();
        ranks.dedup();
        ranks
    }
}

impl fmt::Display for DeviceMesh {
    /// `dp0[pp0: 0 1 | pp1: 4 5] dp1[...]`: which rank sits where, tp and cp innermost.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let d = &self.degrees;
        for dp in 0..d.dp {
            write!(f, "{}dp{dp}[", if dp == 0 { "" } else { "  " })?;
            for pp in 0..d.pp {
                write!(f, "{}pp{pp}:", if pp == 0 { "" } else { " | " })?;
                let inner = d.cp * d.tp;
                for i in 0..inner {
                    write!(f, " {}", (pp * d.dp + dp) * inner + i)?;
                }
            }
            write!(f, "]")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::string::ToString;

    fn mesh(pp: usize, dp: usize, cp: usize, tp: usize, ep: usize) -> DeviceMesh {
        DeviceMesh::new(Degrees {
            pp,
            dp,
            cp,
            tp,
            ep,
            etp: 1,
        })
        .unwrap()
    }

    #[test]
    fn ranks_follow_the_formula_in_both_views() {
        let m = mesh(2, 3, 2, 4, 6);
        for rank in 0..m.world() {
            let at = |axis| m.index(rank, axis);
            let dense = ((at(Axis::Pp) * 3 + at(Axis::Dp)) * 2 + at(Axis::Cp)) * 4 + at(Axis::Tp);
            let edp = m.degree(Axis::Edp);
            let expert = ((at(Axis::Pp) * edp + at(Axis::Edp)) * 6 + at(Axis::Ep)) + at(Axis::Etp);
            assert_eq!((dense, expert), (rank, rank));
        }
    }

    #[test]
    fn groups_partition_the_world() {
        let m = mesh(2, 2, 1, 4, 1);
        let (kv, rep) = m.split_axis(Axis::Tp, 2).unwrap();
        assert_eq!(m.group(5, &[rep]), [4, 5]);
        assert_eq!(m.group(5, &[kv]), [5, 7]);
        assert_eq!(m.group(5, &[m.factor(Axis::Dp), rep]), [0, 1, 4, 5]);
        for factors in [&[m.factor(Axis::Dp)][..], &[kv, m.factor(Axis::Pp)], &[]] {
            for rank in 0..m.world() {
                let group = m.group(rank, factors);
                assert!(group.contains(&rank));
                for &peer in &group {
                    assert_eq!(m.group(peer, factors), group);
                }
            }
        }
    }

    #[test]
    fn experts_fold_and_refuse() {
        assert_eq!(mesh(1, 2, 1, 2, 4).degree(Axis::Edp), 1);
        let error = DeviceMesh::new(Degrees {
            dp: 2,
            tp: 2,
            ep: 3,
            ..Default::default()
        });
        assert!(error.unwrap_err().to_string().contains("ep may be 1, 2, 4"));
    }

    #[test]
    fn printed() {
        assert_eq!(
            mesh(2, 2, 1, 2, 1).to_string(),
            "dp0[pp0: 0 1 | pp1: 4 5]  dp1[pp0: 2 3 | pp1: 6 7]"
        );
    }
}
