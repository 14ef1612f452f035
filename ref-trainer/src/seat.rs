//! Which tokens of each sequence a rank holds.

use quintet_collectives::{Axis, DeviceMesh};
use quintet_parallel_layers::context::held;
use quintet_planner::Layout;

use crate::data::Sample;

/// A rank's place on cp.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Seat {
    /// Context parallel ranks.
    pub cp: usize,
    /// Which of them this is.
    pub place: usize,
    /// Places on the outer factor of cp.
    pub outer: usize,
}

impl Seat {
    /// The seat of `rank`.
    #[must_use]
    pub fn new(layout: &Layout, mesh: &DeviceMesh, rank: usize) -> Self {
        Self {
            cp: layout.cp,
            place: mesh.index(rank, Axis::Cp),
            outer: layout.cp_outer(),
        }
    }

    /// The places in a sequence of `len` tokens whose tokens are here.
    pub fn held(&self, len: usize) -> impl Iterator<Item = usize> {
        // Uncut, a sequence need not fall into two pieces.
        let pieces = (self.cp > 1).then(|| held(len, self.cp, self.place));
        let whole = (self.cp == 1).then_some(0..len);
        pieces
            .into_iter()
            .flatten()
            .chain(whole.into_iter().flatten())
    }

    /// Predictions of a sample that count and are made here.
    #[must_use]
    pub fn valid(&self, sample: &Sample) -> usize {
        self.held(sample.mask.len())
            .filter(|&t| sample.mask[t])
            .count()
    }
}
