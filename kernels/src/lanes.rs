//! Sums and maxima over one row, in lanes, and how work is cut for the pool.
//!
//! ```text
//! element  0 1 2 .. 15 | 16 17 .. 31 | ..      lane l folds l, l + 16, l + 32, ..
//! lane     0 1 2 .. 15 |  0  1 .. 15 | ..      then lanes l and l + 8, l + 4, l + 2, l + 1
//! ```
//!
//! The order depends on the length of the row alone, so neither threads nor the other rows of a
//! call change a bit, and the inner loop is as many independent chains as vector units can carry.

use crate::{Float, Real};

/// Folds the tuples `(xs[0][i], .., xs[K-1][i])` of equally long slices in the order above.
#[inline(always)]
pub(crate) fn fold<E: Float, const K: usize>(
    xs: [&[E]; K],
    zero: E::Acc,
    step: impl Fn(E::Acc, [E::Acc; K]) -> E::Acc,
    join: impl Fn(E::Acc, E::Acc) -> E::Acc,
) -> E::Acc {
    let len = xs.iter().map(|x| x.len()).min().unwrap_or(0);
    let mut lanes = [zero; LANES];
    for block in 0..len / LANES {
        let at = block * LANES;
        let blocks = xs.map(|x| &x[at..at + LANES]);
        for l in 0..LANES {
            lanes[l] = step(lanes[l], blocks.map(|b| b[l].to_acc()));
        }
    }
    for i in len - len % LANES..len {
        let lane = &mut lanes[i % LANES];
        *lane = step(*lane, xs.map(|x| x[i].to_acc()));
    }
    let mut width = LANES / 2;
    while width > 0 {
        for l in 0..width {
            lanes[l] = join(lanes[l], lanes[l + width]);
        }
        width /= 2;
    }
    lanes[0]
}

/// The sum of `term` over a row.
#[inline(always)]
pub(crate) fn sum<E: Float, const K: usize>(
    xs: [&[E]; K],
    term: impl Fn([E::Acc; K]) -> E::Acc,
) -> E::Acc {
    fold(xs, E::Acc::ZERO, |sum, x| sum + term(x), |a, b| a + b)
}

/// Rows of `dim` elements that make one part of a call cut over rows.
pub(crate) fn rows_per_part(dim: usize) -> usize {
    (GRAIN / dim.max(1)).max(1)
}

/// Columns that make one part of a call that walks all `rows` for each column.
pub(crate) fn columns_per_part(rows: usize) -> usize {
    (GRAIN / rows.max(1)).next_multiple_of(64).max(64)
}

/// Columns `first .. first + len` of a row, as many of them as there are.
#[inline(always)]
pub(crate) fn columns<T>(row: &[T], first: usize, len: usize) -> &[T] {
    let first = first.min(row.len());
    &row[first..row.len().min(first + len)]
}

const LANES: usize = 16;

/// Elements of one part: some microseconds of work, far above the cost of handing it out.
pub(crate) const GRAIN: usize = 1 << 14;

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::vec::Vec;

    #[test]
    fn every_element_is_folded_once() {
        for len in 0..100_usize {
            let x: Vec<f64> = (1..=len).map(|i| i as f64).collect();
            let want = (len * (len + 1)) as f64 / 2.0;
            assert_eq!(sum([&x], |[x]| x), want);
            assert_eq!(sum([&x, &x], |[x, y]| x * y), {
                (len * (len + 1) * (2 * len + 1)) as f64 / 6.0
            });
            let max = fold([&x], f64::NEG_INFINITY, |m, [x]| m.max(x), f64::max);
            assert_eq!(max, x.last().copied().unwrap_or(f64::NEG_INFINITY));
        }
    }
}
