//! The law of placements: how a value lies on an axis, and what its gradient then is.
//!
//! | placement        | each rank holds                               | its gradient is |
//! |------------------|-----------------------------------------------|-----------------|
//! | `Shard(dim)`     | a part                                        | `Shard(dim)`    |
//! | `Partial`        | a summand                                     | `Replicate`     |
//! | `Replicate`      | the value, and uses it in its own way         | `Partial`       |
//! | `Invariant`      | the value, and uses it as every other rank    | `Invariant`     |
//!
//! The right column is the *dual*. **The backward of a move P -> Q is the move Q* -> P\***;
//! nothing else need be remembered. The moves, with the collective of each:
//!
//! ```text
//! from \ to    Shard          Partial     Replicate    Invariant
//! Shard        a=b none       pad zeros   all-gather   all-gather
//!              a#b all-to-all
//! Partial      reduce-scatter none        all-reduce   all-reduce
//! Replicate    take part      keep first  none         none
//! Invariant    take part      keep first  none         none
//! ```
//!
//! (After torchtitan's and spmd_types' R / I / V / P, and Megatron's f and g, which are
//! Invariant -> Replicate and Partial -> Invariant.)

use alloc::format;
use core::fmt;
use core::ops::Range;

use crate::{Error, chunk::chunk};

/// How the elements of a dim fall to the ranks of an axis.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum IndexMap {
    /// Contiguous runs of whole units (1 for elements, head_dim for heads), earlier ranks taking
    /// the remainder.
    Contiguous {
        /// Elements that must stay together.
        unit: usize,
    },
    /// Rank r holds chunks r and 2*world-1-r of 2*world: causal attention in balance.
    Zigzag,
    /// Counts known only when the step runs (tokens of an expert).
    Ragged,
}

impl IndexMap {
    /// The ranges of a dim of `len` that place `index` of `world` holds, in local order; the
    /// second is empty but for zigzag. `None` for a ragged map, whose counts are data.
    #[must_use]
    pub fn ranges(self, len: usize, world: usize, index: usize) -> Option<[Range<usize>; 2]> {
        match self {
            IndexMap::Contiguous { unit } => {
                let unit = unit.max(1);
                let c = chunk(len / unit, world, index);
                Some([c.start * unit..c.end * unit, 0..0])
            }
            IndexMap::Zigzag => Some([
                chunk(len, 2 * world, index),
                chunk(len, 2 * world, 2 * world - 1 - index),
            ]),
            IndexMap::Ragged => None,
        }
    }
}

/// How a value lies on one axis of the mesh.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Placement {
    /// Each rank holds part of a dim.
    Shard {
        /// The dim that is cut.
        dim: usize,
        /// Who holds which index.
        map: IndexMap,
    },
    /// Each rank holds a summand.
    Partial,
    /// Each rank holds the value and uses it in its own way.
    Replicate,
    /// Each rank holds the value and does the same with it.
    Invariant,
}

impl Placement {
    /// `Shard(dim)` in contiguous runs of single elements.
    #[must_use]
    pub const fn shard(dim: usize) -> Self {
        Placement::Shard {
            dim,
            map: IndexMap::Contiguous { unit: 1 },
        }
    }

    /// `Shard(dim)` in contiguous runs of whole units.
    #[must_use]
    pub const fn shard_units(dim: usize, unit: usize) -> Self {
        Placement::Shard {
            dim,
            map: IndexMap::Contiguous { unit },
        }
    }

    /// The placement of this value's gradient.
    #[must_use]
    pub const fn dual(self) -> Self {
        match self {
            Placement::Partial => Placement::Replicate,
            Placement::Replicate => Placement::Partial,
            same => same,
        }
    }

    /// Whether each rank holds a part of its own.
    #[must_use]
    pub const fn is_shard(self) -> bool {
        matches!(self, Placement::Shard { .. })
    }
}

impl fmt::Display for Placement {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Placement::Shard {
                dim,
                map: IndexMap::Contiguous { unit: 1 },
            } => {
                write!(f, "Shard({dim})")
            }
            Placement::Shard {
                dim,
                map: IndexMap::Contiguous { unit },
            } => {
                write!(f, "Shard({dim}, units of {unit})")
            }
            Placement::Shard {
                dim,
                map: IndexMap::Zigzag,
            } => write!(f, "Shard({dim}, zigzag)"),
            Placement::Shard {
                dim,
                map: IndexMap::Ragged,
            } => write!(f, "Shard({dim}, ragged)"),
            Placement::Partial => write!(f, "Partial"),
            Placement::Replicate => write!(f, "Replicate"),
            Placement::Invariant => write!(f, "Invariant"),
        }
    }
}

/// What a move does.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum MoveKind {
    /// Nothing; only the use of the value changes.
    Nothing,
    /// Sum over the axis, everywhere.
    AllReduce,
    /// Parts joined, everywhere.
    AllGather,
    /// Sum over the axis, each rank its part.
    ReduceScatter,
    /// From parts of one dim to parts of another.
    AllToAll,
    /// Each rank takes its part; nothing is sent.
    TakePart,
    /// Each rank puts its part among zeros; nothing is sent.
    PadZeros,
    /// The first rank keeps the value, the others hold zeros; nothing is sent.
    KeepFirst,
}

/// A change of placement on one axis.
///
/// ```
/// use quintet_collectives::placement::{Move, MoveKind, Placement};
/// let g = Move::new(Placement::Partial, Placement::Invariant)?;
/// assert_eq!(g.kind(), MoveKind::AllReduce);
/// assert_eq!(g.backward()?.kind(), MoveKind::Nothing);
/// # Ok::<(), quintet_collectives::Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Move {
    from: Placement,
    to: Placement,
    kind: MoveKind,
}

impl Move {
    /// The move between two placements.
    ///
    /// # Errors
    /// [`Error::Move`] where both are shards of one dim under different index maps, or one is
    /// ragged: that is a permutation, which needs counts.
    pub fn new(from: Placement, to: Placement) -> Result<Self, Error> {
        use Placement::{Invariant, Partial, Replicate, Shard};
        let kind = match (from, to) {
            (a, b) if a == b => MoveKind::Nothing,
            (
                Shard {
                    map: IndexMap::Ragged,
                    ..
                },
                _,
            )
            | (
                _,
                Shard {
                    map: IndexMap::Ragged,
                    ..
                },
            ) => {
                return Err(refused(
                    from,
                    to,
                    "a ragged shard needs its counts: use all_to_all_v",
                ));
            }
            (Shard { dim: a, .. }, Shard { dim: b, .. }) if a == b => {
                return Err(refused(
                    from,
                    to,
                    "one dim under two index maps is a permutation",
                ));
            }
            (Shard { .. }, Shard { .. }) => MoveKind::AllToAll,
            (Shard { .. }, Partial) => MoveKind::PadZeros,
            (Shard { .. }, Replicate | Invariant) => MoveKind::AllGather,
            (Partial, Shard { .. }) => MoveKind::ReduceScatter,
            (Partial, Replicate | Invariant) => MoveKind::AllReduce,
            (Replicate | Invariant, Shard { .. }) => MoveKind::TakePart,
            (Replicate | Invariant, Partial) => MoveKind::KeepFirst,
            (Partial, Partial) | (Replicate | Invariant, Replicate | Invariant) => {
                MoveKind::Nothing
            }
        };
        Ok(Self { from, to, kind })
    }

    /// What the move does.
    #[must_use]
    pub const fn kind(self) -> MoveKind {
        self.kind
    }

    /// Placement before.
    #[must_use]
    pub const fn from(self) -> Placement {
        self.from
    }

    /// Placement after.
    #[must_use]
    pub const fn to(self) -> Placement {
        self.to
    }

    /// What the gradient does: `to* -> from*`.
    ///
    /// # Errors
    /// None for a move that exists; the table is closed under duals.
    pub fn backward(self) -> Result<Self, Error> {
        Self::new(self.to.dual(), self.from.dual())
    }
}

fn refused(from: Placement, to: Placement, reason: &'static str) -> Error {
    Error::Move {
        from: format!("{from}"),
        to: format!("{to}"),
        reason,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::vec;
    use alloc::vec::Vec;

    const LEN: usize = 6;

    fn all() -> [Placement; 5] {
        use Placement::{Invariant, Partial, Replicate};
        [
            Placement::shard(0),
            Placement::shard(1),
            Partial,
            Replicate,
            Invariant,
        ]
    }

    #[test]
    fn every_pair_has_a_move_and_the_backward_of_the_backward_is_the_move() {
        for from in all() {
            for to in all() {
                let m = Move::new(from, to).unwrap();
                assert_eq!(
                    m.backward().unwrap().backward().unwrap(),
                    m,
                    "{from} -> {to}"
                );
            }
        }
    }

    #[test]
    fn permutations_are_refused() {
        let zigzag = Placement::Shard {
            dim: 0,
            map: IndexMap::Zigzag,
        };
        let ragged = Placement::Shard {
            dim: 0,
            map: IndexMap::Ragged,
        };
        assert!(Move::new(Placement::shard(0), zigzag).is_err());
        assert!(Move::new(ragged, Placement::Replicate).is_err());
    }

    /// A vector of six elements spread over ranks, one dim.
    type Ranks = Vec<Vec<i64>>;

    fn part(world: usize, rank: usize) -> Range<usize> {
        chunk(LEN, world, rank)
    }

    fn apply(m: Move, x: &Ranks) -> Ranks {
        let world = x.len();
        let sum = || {
            (0..LEN)
                .map(|i| x.iter().map(|v| v[i]).sum())
                .collect::<Vec<i64>>()
        };
        let joined = || x.concat();
        (0..world)
            .map(|rank| match m.kind() {
                MoveKind::Nothing => x[rank].clone(),
                MoveKind::AllReduce => sum(),
                MoveKind::AllGather => joined(),
                MoveKind::ReduceScatter => sum()[part(world, rank)].to_vec(),
                MoveKind::TakePart => x[rank][part(world, rank)].to_vec(),
                MoveKind::PadZeros => {
                    let mut v = vec![0; LEN];
                    v[part(world, rank)].copy_from_slice(&x[rank]);
                    v
                }
                MoveKind::KeepFirst if rank == 0 => x[0].clone(),
                MoveKind::KeepFirst => vec![0; LEN],
                MoveKind::AllToAll => unreachable!("one dim only"),
            })
            .collect()
    }

    /// Spreads a logical vector; a Partial gets arbitrary summands.
    fn spread(p: Placement, logical: &[i64], world: usize) -> Ranks {
        (0..world)
            .map(|rank| match p {
                Placement::Shard { .. } => logical[part(world, rank)].to_vec(),
                Placement::Partial => (0..LEN as i64)
                    .map(|i| {
                        let noise = |r: usize| (r as i64 + 1) * (i - 2);
                        let rest: i64 = (1..world).map(noise).sum();
                        if rank == 0 {
                            logical[i as usize] - rest
                        } else {
                            noise(rank)
                        }
                    })
                    .collect(),
                _ => logical.to_vec(),
            })
            .collect()
    }

    fn logical(p: Placement, x: &Ranks) -> Vec<i64> {
        match p {
            Placement::Shard { .. } => x.concat(),
            Placement::Partial => (0..LEN).map(|i| x.iter().map(|v| v[i]).sum()).collect(),
            _ => {
                assert!(x.iter().all(|v| *v == x[0]));
                x[0].clone()
            }
        }
    }

    /// Forward keeps the logical value, and so does backward: on logical vectors both are the
    /// identity, hence adjoint. The content lies in the duals being the right ones.
    #[test]
    fn moves_and_their_backwards_keep_the_logical_value() {
        let (x, y) = ([3, -1, 4, 1, -5, 9], [2, 7, -1, 8, 2, -8]);
        for world in 1..=5 {
            for from in all() {
                for to in all() {
                    if from == Placement::shard(1) || to == Placement::shard(1) {
                        continue;
                    }
                    let m = Move::new(from, to).unwrap();
                    assert_eq!(logical(to, &apply(m, &spread(from, &x, world))), x);
                    let back = m.backward().unwrap();
                    let dy = spread(to.dual(), &y, world);
                    assert_eq!(logical(from.dual(), &apply(back, &dy)), y, "{from} -> {to}");
                }
            }
        }
    }
}
