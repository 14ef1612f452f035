//! Rows by expert: which pair of token and choice stands where, and moving rows there and back.

use alloc::vec;
use alloc::vec::Vec;

use crate::{Backend, Error, Float};

/// Pairs (t, k) ordered by expert and, within an expert, by pair. Pure data.
///
/// ```
/// use quintet_kernels::moe::Permutation;
/// // Three tokens, two choices each; token 1's second choice was dropped.
/// let plan = Permutation::new(&[1, 0, 1, -1, 0, 1], 3);
/// assert_eq!(plan.counts(), [2, 3, 0]);
/// assert_eq!(plan.pairs(), [1, 4, 0, 2, 5]);
/// assert_eq!(plan.rows(), [2, 0, 3, -1, 1, 4]);
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Permutation {
    counts: Vec<usize>,
    pairs: Vec<i32>,
    rows: Vec<i32>,
}

impl Permutation {
    /// From the expert of each pair; a number that is no expert's is a pair that was dropped.
    #[must_use]
    pub fn new(choice: &[i32], experts: usize) -> Self {
        let expert = |choice: i32| usize::try_from(choice).ok().filter(|&e| e < experts);
        let mut counts = vec![0; experts];
        for e in choice.iter().filter_map(|&c| expert(c)) {
            counts[e] += 1;
        }
        let mut next: Vec<usize> = counts
            .iter()
            .scan(0, |at, n| {
                *at += n;
                Some(*at - n)
            })
            .collect();
        let mut pairs = vec![0; counts.iter().sum()];
        let mut rows = vec![-1; choice.len()];
        for (pair, e) in choice.iter().enumerate() {
            if let Some(e) = expert(*e) {
                rows[pair] = next[e] as i32;
                pairs[next[e]] = pair as i32;
                next[e] += 1;
            }
        }
        Self {
            counts,
            pairs,
            rows,
        }
    }

    /// Rows of each expert.
    #[must_use]
    pub fn counts(&self) -> &[usize] {
        &self.counts
    }

    /// The pair of each row.
    #[must_use]
    pub fn pairs(&self) -> &[i32] {
        &self.pairs
    }

    /// The row of each pair; -1 where it was dropped.
    #[must_use]
    pub fn rows(&self) -> &[i32] {
        &self.rows
    }
}

/// Rows that an expert takes of a microbatch: `ceil(tokens * topk * factor / experts)`.
#[must_use]
pub fn capacity(tokens: usize, topk: usize, experts: usize, factor: f64) -> usize {
    libm::ceil((tokens * topk) as f64 * factor / experts.max(1) as f64) as usize
}

/// Sets to -1 every choice that comes after the first `capacity` of its expert, in the order of
/// pairs, and returns how many that were. `choice` is that of the whole microbatch.
pub fn drop_beyond(choice: &mut [i32], experts: usize, capacity: usize) -> usize {
    let mut taken = vec![0; experts];
    let mut dropped = 0;
    for choice in choice {
        let Some(taken) = usize::try_from(*choice).ok().and_then(|e| taken.get_mut(e)) else {
            continue;
        };
        if *taken == capacity {
            *choice = -1;
            dropped += 1;
        } else {
            *taken += 1;
        }
    }
    dropped
}

/// Pairs and rows on a device, and the shape they belong to.
pub struct Combine<'a, B: Backend> {
    /// Tokens.
    pub tokens: usize,
    /// Choices of each.
    pub topk: usize,
    /// Width of a row.
    pub width: usize,
    /// The row of each pair, [`Permutation::rows`].
    pub rows_tk: B::Ref<'a, i32>,
    /// The pair of each row, [`Permutation::pairs`].
    pub pairs_r: B::Ref<'a, i32>,
}

// Not derived: that would ask for `B: Copy`.
impl<B: Backend> Clone for Combine<'_, B> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<B: Backend> Copy for Combine<'_, B> {}

/// Moving rows. An index that names no row stands for a row of zeros.
pub trait Permute: Backend {
    /// `y[r] = x[index[r]]`, rows of `width`.
    ///
    /// # Errors
    /// [`Error::Len`] where `y` has not a row for each index, or `x` no whole number of them.
    fn gather_rows<E: Float>(
        &self,
        width: usize,
        index_r: Self::Ref<'_, i32>,
        x: Self::Ref<'_, E>,
        y: Self::Mut<'_, E>,
    ) -> Result<(), Error>;

    /// `y[t] = sum over k of w[t,k] x[row of (t,k)]`, in order of k, summed in Acc and rounded
    /// once; without weights each counts once. The backward of gathering `x[pairs[r] / topk]` is
    /// this without weights.
    ///
    /// # Errors
    /// [`Error::Len`] where a length does not fit.
    fn combine<E: Float>(
        &self,
        by: Combine<'_, Self>,
        weight_tk: Option<Self::Ref<'_, E::Acc>>,
        x_rd: Self::Ref<'_, E>,
        y_td: Self::Mut<'_, E>,
    ) -> Result<(), Error>;

    /// Gradients of [`Permute::combine`], overwritten: `dx[r] = w[pair of r] dy[its token]` and
    /// `dw[t,k] = <dy[t], x[row of (t,k)]>`, 0 for a pair that was dropped.
    ///
    /// # Errors
    /// As [`Permute::combine`].
    fn combine_backward<E: Float>(
        &self,
        by: Combine<'_, Self>,
        weight_and_x: (Self::Ref<'_, E::Acc>, Self::Ref<'_, E>),
        dy_td: Self::Ref<'_, E>,
        dx_rd: Self::Mut<'_, E>,
        dweight_tk: Self::Mut<'_, E::Acc>,
    ) -> Result<(), Error>;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_expert_takes_all_and_none_takes_none() {
        let plan = Permutation::new(&[2, 2, 2], 4);
        assert_eq!(plan.counts(), [0, 0, 3, 0]);
        assert_eq!(plan.pairs(), [0, 1, 2]);
        let none = Permutation::new(&[-1, 7], 4);
        assert_eq!((none.counts(), none.pairs()), (&[0; 4][..], &[][..]));
        assert_eq!(Permutation::new(&[], 0).rows(), []);
    }

    #[test]
    fn room_is_given_in_the_order_of_pairs() {
        let mut choice = [0, 1, 0, 1, 0, 1, -1, 0];
        assert_eq!(drop_beyond(&mut choice, 2, 2), 3);
        assert_eq!(choice, [0, 1, 0, 1, -1, -1, -1, -1]);
        assert_eq!(capacity(5, 2, 4, 1.0), 3);
        assert_eq!(capacity(4, 2, 4, 1.0), 2);
        assert_eq!(capacity(0, 2, 4, 1.0), 0);
    }
}
