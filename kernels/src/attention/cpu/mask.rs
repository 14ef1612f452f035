//! Who sees whom, for a block of queries and a block of keys.

use super::{Block, Call};
use crate::Real;

/// What one block of keys is to one block of queries.
pub(super) struct Mask<'a> {
    q_pos: &'a [i32],
    k_pos: &'a [i32],
    documents: Option<(&'a [i32], &'a [i32])>,
    causal: bool,
    window: Option<usize>,
    /// No query sees a key. Decided from the ranges of positions and documents, so it may be
    /// missed, but is never claimed wrongly.
    pub(super) none: bool,
    /// Each query sees each key; likewise.
    all: bool,
}

impl<'a> Mask<'a> {
    pub(super) fn new<T>(x: &Call<'a, T>, b: usize, queries: Block, keys: Block) -> Self {
        let of_queries = |of: &'a [i32]| &of[b * x.spec.queries + queries.first..][..queries.len];
        let of_keys = |of: &'a [i32]| &of[b * x.spec.keys + keys.first..][..keys.len];
        let (q_pos, k_pos) = (of_queries(x.places.q_pos), of_keys(x.places.k_pos));
        let documents = x.places.documents;
        let documents = documents.map(|(q, k)| (of_queries(q), of_keys(k)));
        let ((q_min, q_max), (k_min, k_max)) = (range(q_pos), range(k_pos));
        let (causal, window) = (x.spec.causal, x.spec.window);
        let (mut none, mut all) = (causal && k_min > q_max, !causal || k_max <= q_min);
        if let Some(window) = window {
            let reach = i64::try_from(window).unwrap_or(i64::MAX);
            none |= i64::from(q_min) - i64::from(k_max) >= reach;
            all &= i64::from(q_max) - i64::from(k_min) < reach;
        }
        if let Some((q, k)) = documents {
            let ((q_min, q_max), (k_min, k_max)) = (range(q), range(k));
            none |= q_max < k_min || k_max < q_min;
            all &= q_min == q_max && k_min == k_max && q_min == k_min;
        }
        Self {
            q_pos,
            k_pos,
            documents,
            causal,
            window,
            none,
            all,
        }
    }

    /// Keys of the block.
    pub(super) fn keys(&self) -> usize {
        self.k_pos.len()
    }

    /// Sets what query `s` does not see to `hidden`.
    #[inline(always)]
    pub(super) fn hide<T: Real>(&self, s: usize, row: &mut [T], hidden: T) {
        if self.all {
            return;
        }
        let (least, most) = self.sight(s);
        if least == i32::MIN {
            for (x, &pos) in row.iter_mut().zip(self.k_pos) {
                *x = if pos <= most { *x } else { hidden };
            }
        } else {
            for (x, &pos) in row.iter_mut().zip(self.k_pos) {
                *x = if least <= pos && pos <= most {
                    *x
                } else {
                    hidden
                };
            }
        }
        if let Some((q, k)) = self.documents {
            for (x, &document) in row.iter_mut().zip(k) {
                *x = if document == q[s] { *x } else { hidden };
            }
        }
    }

    /// The positions, from and to, that query `s` sees.
    #[inline(always)]
    fn sight(&self, s: usize) -> (i32, i32) {
        let pos = self.q_pos[s];
        let most = if self.causal { pos } else { i32::MAX };
        let least = self.window.map_or(i32::MIN, |window| {
            let reach = i64::try_from(window).unwrap_or(i64::MAX);
            let least = i64::from(pos).saturating_sub(reach).saturating_add(1);
            i32::try_from(least).unwrap_or(i32::MIN)
        });
        (least, most)
    }
}

fn range(of: &[i32]) -> (i32, i32) {
    let start = (i32::MAX, i32::MIN);
    of.iter().fold(start, |r, &x| (r.0.min(x), r.1.max(x)))
}
