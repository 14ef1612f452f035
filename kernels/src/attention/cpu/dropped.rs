//! Which probabilities are let go, for one head.

use super::{Block, Call};
use crate::Real;
use crate::dropout::Draws;

/// The draws of one head of one sequence.
pub(super) struct Dropped<'a> {
    draws: Draws,
    /// Places of the sequence's queries and keys in their sample.
    q_at: &'a [i32],
    k_at: &'a [i32],
}

impl<'a> Dropped<'a> {
    pub(super) fn new<T>(x: &Call<'a, T>, b: usize, h: usize) -> Option<Self> {
        let of = x.spec.dropout?;
        let (q, k) = x.places.at.unwrap_or((x.places.q_pos, x.places.k_pos));
        Some(Self {
            draws: of.dropout.draws(b, of.first_head + h),
            q_at: &q[b * x.spec.queries..][..x.spec.queries],
            k_at: &k[b * x.spec.keys..][..x.spec.keys],
        })
    }

    /// Calls `each` for the keys of a block that query `s` sees, those with p > 0, with whether they
    /// stay.
    fn visit<T: Real>(
        &self,
        s: usize,
        z: Block,
        p: &mut [T],
        mut each: impl FnMut(usize, bool, &mut T),
    ) {
        let mut stays = self.draws.row(self.q_at[s] as u32);
        for (i, (p, &at)) in p.iter_mut().zip(&self.k_at[z.first..]).enumerate() {
            if *p > T::ZERO {
                each(i, stays.keeps(at as u32), p);
            }
        }
    }

    /// Lets go of the probabilities of query `s`.
    pub(super) fn hide<T: Real>(&self, s: usize, z: Block, p: &mut [T]) {
        self.visit(s, z, p, |_, stays, p| {
            if !stays {
                *p = T::ZERO;
            }
        });
    }

    /// The same, once `ds`, the gradients of what stayed, have become those of the scores.
    pub(super) fn differentiate<T: Real>(
        &self,
        (s, z): (usize, Block),
        p: &mut [T],
        ds: &mut [T],
        (scale, delta): (T, T),
    ) {
        // Of what is not seen p is 0, and so is this.
        for (ds, &p) in ds.iter_mut().zip(p.iter()) {
            *ds = if p > T::ZERO { *ds } else { T::ZERO };
        }
        self.visit(s, z, p, |i, stays, p| {
            let dp = if stays { ds[i] } else { T::ZERO };
            ds[i] = *p * scale * (dp - delta);
            if !stays {
                *p = T::ZERO;
            }
        });
    }
}
