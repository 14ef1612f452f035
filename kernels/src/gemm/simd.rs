//! Packing and the loop over tiles; the tiles themselves are in [`avx512`].
//!
//! Everything below takes slices and checks, once per tile, that what the tile will touch lies
//! inside them; only then pointers are made.
#![allow(unsafe_code)]

#[cfg(target_arch = "x86_64")]
mod avx512;

use core::ops::Range;

use super::Trans;
use crate::Real;

/// Terms that are summed in one chain before the sum is added to C.
pub(crate) const KC: usize = 256;

/// A matrix by its steps: element (i, j) is `data[i * row + j * col]`.
#[derive(Clone, Copy)]
pub(crate) struct Operand<'a, T> {
    data: &'a [T],
    row: usize,
    col: usize,
}

impl<'a, T: Copy> Operand<'a, T> {
    /// `op(data)` with `rows` rows and `cols` columns.
    pub(crate) fn new(data: &'a [T], trans: Trans, rows: usize, cols: usize) -> Self {
        let (row, col) = match trans {
            Trans::N => (cols, 1),
            Trans::T => (1, rows),
        };
        Self { data, row, col }
    }

    /// A matrix inside a larger array: rows `row` apart, columns `col` apart.
    pub(crate) fn strided(data: &'a [T], row: usize, col: usize) -> Self {
        Self { data, row, col }
    }

    /// Element (i, j).
    pub(crate) fn at(&self, i: usize, j: usize) -> T {
        self.data[i * self.row + j * self.col]
    }

    /// The matrix with rows and columns exchanged.
    pub(crate) fn transposed(self) -> Self {
        Self {
            data: self.data,
            row: self.col,
            col: self.row,
        }
    }

    /// The matrix from row `i` and column `j` on.
    pub(crate) fn from(&self, i: usize, j: usize) -> Self {
        Self {
            data: &self.data[i * self.row + j * self.col..],
            ..*self
        }
    }
}

/// What one tile reads and writes: `c[rows, width] (+)= a[rows, depth] b[depth, width]`.
pub(crate) struct Place<T> {
    depth: usize,
    a: *const T,
    a_row: usize,
    a_col: usize,
    /// Packed: `NR` elements for each k.
    b: *const T,
    c: *mut T,
    c_row: usize,
    width: usize,
    add: bool,
}

/// A type with tiles of its own.
pub(crate) trait Tile: Real {
    /// The most rows of a tile.
    const MR: usize;
    /// Columns of a panel of packed B.
    const NR: usize;

    /// Whether this CPU can run [`Tile::tile`].
    fn detected() -> bool;

    /// The most rows, up to `left`, that one tile takes.
    fn height(left: usize) -> usize;

    /// Computes one tile of `rows` rows.
    ///
    /// # Safety
    /// [`Tile::detected`] is true, `rows` came from [`Tile::height`], `1 <= width <= NR`, and the
    /// elements named in [`Place`] are there: a at `i a_row + p a_col` and c at `i c_row + j` for
    /// all i < rows, p < depth, j < width; b for `depth * NR`; c is borrowed mutably.
    unsafe fn tile(rows: usize, place: &Place<Self>);

    /// Packs 'width <= NR' columns whose k lies side by side (`b[j][p]`, `row` apart), as far as
    /// that goes faster than element by element; returns how many of k it has done.
    fn pack_across(b: &[Self], row: usize, width: usize, depth: usize, panel: &mut [Self])
    -> usize;

    /// `matrixmultiply` of this type: `c = a b + beta c`, pointers with (row, column) steps.
    ///
    /// # Safety
    /// All elements that the shape and the steps name are there, and c is borrowed mutably.
    unsafe fn library(
        shape: [usize; 3],
        a: (*const Self, isize, isize),
        b: (*const Self, isize, isize),
        beta: Self,
        c: (*mut Self, isize, isize),
    );
}

/// Packs columns `cols` of B, `ks` deep, into one panel; columns it has not are zeros.
pub(super) fn pack<T: Tile>(
    b: &Operand<'_, T>,
    ks: Range<usize>,
    cols: Range<usize>,
    panel: &mut [T],
) {
    let (depth, width) = (ks.len(), cols.len());
    let b = b.from(ks.start, cols.start);
    if b.col == 1 {
        for (p, line) in panel.chunks_exact_mut(T::NR).enumerate() {
            line[..width].copy_from_slice(&b.data[p * b.row..][..width]);
            line[width..].fill(T::ZERO);
        }
        return;
    }
    let done = match b.row {
        1 => T::pack_across(b.data, b.col, width, depth, panel),
        _ => 0,
    };
    for (p, line) in panel.chunks_exact_mut(T::NR).enumerate().skip(done) {
        for (j, x) in line[..width].iter_mut().enumerate() {
            *x = b.at(p, j);
        }
        line[width..].fill(T::ZERO);
    }
}

/// A `k x n` matrix made ready to stand on the right of small products.
#[derive(Clone, Copy)]
pub(crate) struct Right<'a, T> {
    b: Operand<'a, T>,
    k: usize,
    n: usize,
    panels: &'a [T],
}

impl<'a, T: Tile> Right<'a, T> {
    /// Elements of working memory that [`Right::new`] needs.
    pub(crate) fn room(k: usize, n: usize) -> usize {
        k * n.next_multiple_of(T::NR)
    }

    /// Packs `b` into `room`, of [`Right::room`] elements.
    pub(crate) fn new(b: Operand<'a, T>, k: usize, n: usize, room: &'a mut [T]) -> Self {
        if T::detected() && k > 0 {
            for (i, panel) in room.chunks_exact_mut(k * T::NR).enumerate() {
                let first = i * T::NR;
                pack(&b, 0..k, first..n.min(first + T::NR), panel);
            }
        }
        Self {
            b,
            k,
            n,
            panels: room,
        }
    }

    /// `c (+)= a b` for as many rows as the contiguous `c` has.
    pub(crate) fn times(&self, a: &Operand<'_, T>, c: &mut [T], add: bool) {
        if self.k == 0 || !T::detected() {
            portable(a, &self.b, (self.k, self.n), c, add);
        } else {
            rows(a, self.panels, 0..self.k, 0..self.n, c, self.n, add);
        }
    }
}

/// `c[:, cols] (+)= a[:, ks] packed` for as many rows as c has; c has `n` columns, and `packed`
/// holds panels of `ks.len() * NR` elements.
pub(super) fn rows<T: Tile>(
    a: &Operand<'_, T>,
    packed: &[T],
    ks: Range<usize>,
    cols: Range<usize>,
    c: &mut [T],
    n: usize,
    add: bool,
) {
    assert!(T::detected(), "asked for tiles that this CPU has not");
    let rows = c.len() / n;
    for start in ks.clone().step_by(KC) {
        let depth = KC.min(ks.end - start);
        let add = add || start > ks.start;
        let panels = packed.chunks_exact(ks.len() * T::NR);
        for (first, panel) in cols.clone().step_by(T::NR).zip(panels) {
            let panel = &panel[(start - ks.start) * T::NR..];
            let width = T::NR.min(cols.end - first);
            let mut i = 0;
            while i < rows {
                let height = T::height(rows - i);
                let a = a.from(i, start);
                let c = &mut c[i * n + first..];
                let a_last = (height - 1) * a.row + (depth - 1) * a.col;
                assert!(a_last < a.data.len() && depth * T::NR <= panel.len());
                assert!((height - 1) * n + width <= c.len() && width > 0);
                let place = Place {
                    depth,
                    a: a.data.as_ptr(),
                    a_row: a.row,
                    a_col: a.col,
                    b: panel.as_ptr(),
                    c: c.as_mut_ptr(),
                    c_row: n,
                    width,
                    add,
                };
                // SAFETY: detected above; the largest offsets into a, b and c are the ones just
                // checked, and `c` is a mutable borrow that lasts until after the call.
                unsafe { T::tile(height, &place) };
                i += height;
            }
        }
    }
}

/// `c (+)= a b` for as many rows as c has, by `matrixmultiply`.
pub(super) fn portable<T: Tile>(
    a: &Operand<'_, T>,
    b: &Operand<'_, T>,
    (k, n): (usize, usize),
    c: &mut [T],
    add: bool,
) {
    let m = c.len() / n;
    if m == 0 || k == 0 {
        return;
    }
    assert!((m - 1) * a.row + (k - 1) * a.col < a.data.len());
    assert!((k - 1) * b.row + (n - 1) * b.col < b.data.len());
    let beta = if add { T::ONE } else { T::ZERO };
    let steps = |x: &Operand<'_, T>| (x.data.as_ptr(), x.row as isize, x.col as isize);
    // SAFETY: the last elements of a and b are the ones checked above, c has m * n elements; a
    // slice is never longer than isize::MAX bytes, so no step that stays inside one wraps.
    unsafe {
        T::library(
            [m, k, n],
            steps(a),
            steps(b),
            beta,
            (c.as_mut_ptr(), n as isize, 1),
        );
    }
}

/// What every type shares: the library call, and tiles only where the architecture has them.
macro_rules! tile {
    ($t:ident, $mr:expr, $nr:expr, $library:ident, $across:expr) => {
        impl Tile for $t {
            const MR: usize = $mr;
            const NR: usize = $nr;

            fn detected() -> bool {
                #[cfg(target_arch = "x86_64")]
                return avx512::detected();
                #[cfg(not(target_arch = "x86_64"))]
                false
            }

            fn height(left: usize) -> usize {
                [Self::MR, 8, 4, 2]
                    .into_iter()
                    .find(|&h| h <= left)
                    .unwrap_or(1)
            }

            unsafe fn tile(rows: usize, place: &Place<$t>) {
                #[cfg(target_arch = "x86_64")]
                // SAFETY: passed on.
                unsafe {
                    avx512::$t::tile(rows, place);
                }
                #[cfg(not(target_arch = "x86_64"))]
                let _ = (rows, place);
            }

            fn pack_across(
                b: &[$t],
                row: usize,
                width: usize,
                depth: usize,
                panel: &mut [$t],
            ) -> usize {
                let across: fn(&[$t], usize, usize, usize, &mut [$t]) -> usize = $across;
                across(b, row, width, depth, panel)
            }

            unsafe fn library(
                [m, k, n]: [usize; 3],
                a: (*const $t, isize, isize),
                b: (*const $t, isize, isize),
                beta: $t,
                c: (*mut $t, isize, isize),
            ) {
                // SAFETY: passed on.
                unsafe {
                    matrixmultiply::$library(
                        m, k, n, 1.0, a.0, a.1, a.2, b.0, b.1, b.2, beta, c.0, c.1, c.2,
                    );
                }
            }
        }
    };
}
#[cfg(target_arch = "x86_64")]
tile!(f32, 14, 32, sgemm, avx512::pack_across_f32);
#[cfg(not(target_arch = "x86_64"))]
tile!(f32, 14, 32, sgemm, |_, _, _, _, _| 0);
tile!(f64, 14, 16, dgemm, |_, _, _, _, _| 0);

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::vec;
    use alloc::vec::Vec;

    /// The library's path, whatever this CPU has: right, and its bits too do not depend on how
    /// rows and columns are cut.
    #[test]
    fn portable_keeps_the_laws() {
        let (m, n, k) = (29, 41, 300);
        let a: Vec<f32> = (0..m * k).map(|i| libm::sinf(i as f32)).collect();
        let b: Vec<f32> = (0..k * n).map(|i| libm::cosf(i as f32)).collect();
        for b_form in [Trans::N, Trans::T] {
            let (a, b) = (
                Operand::new(&a, Trans::N, m, k),
                Operand::new(&b, b_form, k, n),
            );
            let mut whole = vec![1.0; m * n];
            portable(&a, &b, (k, n), &mut whole, true);
            let want = |i: usize, j: usize| {
                let term = |p| f64::from(a.at(i, p)) * f64::from(b.at(p, j));
                1.0 + (0..k).map(term).sum::<f64>()
            };
            for (i, j) in [(0, 0), (28, 40), (13, 7)] {
                assert!((f64::from(whole[i * n + j]) - want(i, j)).abs() < 1e-4);
            }
            for first in 0..17 {
                let (rows, cols) = (first..m - first / 2, first..n - first);
                let mut part = vec![1.0; rows.len() * cols.len()];
                let (a, b) = (a.from(first, 0), b.from(0, first));
                portable(&a, &b, (k, cols.len()), &mut part, true);
                for (row, i) in part.chunks(cols.len()).zip(rows) {
                    assert_eq!(row, &whole[i * n..][cols.clone()]);
                }
            }
        }
    }
}
