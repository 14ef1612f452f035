//! Tiles of up to 14 rows by two vectors of 512 bits: 28 sums in registers, two vectors of B and
//! one element of A broadcast, 31 of the 32 registers.
//!
//! Loads and stores of C are masked, so the last columns need no code of their own and every
//! element of every tile is the same chain `sum = fma(a, b, sum)`.

use core::arch::x86_64::*;

use super::Place;

/// Whether this CPU has AVX-512F.
pub(super) fn detected() -> bool {
    #[cfg(feature = "std")]
    return std::arch::is_x86_feature_detected!("avx512f");
    #[cfg(not(feature = "std"))]
    cfg!(target_feature = "avx512f")
}

macro_rules! tiles {
    ($t:ident, $vec:ty, $mask:ty, $lanes:literal, $zero:ident, $set:ident, $load:ident,
     $fma:ident, $add:ident, $load_masked:ident, $store_masked:ident) => {
        pub(super) mod $t {
            use super::*;

            /// See [`super::super::Tile::tile`].
            ///
            /// # Safety
            /// As there.
            pub(in super::super) unsafe fn tile(rows: usize, place: &Place<$t>) {
                // SAFETY: passed on; the number of vectors follows from the width.
                unsafe {
                    match (rows, place.width > $lanes) {
                        (14, true) => sums::<14, 2>(place),
                        (8, true) => sums::<8, 2>(place),
                        (4, true) => sums::<4, 2>(place),
                        (2, true) => sums::<2, 2>(place),
                        (_, true) => sums::<1, 2>(place),
                        (14, false) => sums::<14, 1>(place),
                        (8, false) => sums::<8, 1>(place),
                        (4, false) => sums::<4, 1>(place),
                        (2, false) => sums::<2, 1>(place),
                        (_, false) => sums::<1, 1>(place),
                    }
                }
            }

            /// `ROWS` rows by `VECS` vectors.
            ///
            /// # Safety
            /// As [`tile`], and AVX-512F is there.
            #[target_feature(enable = "avx512f")]
            unsafe fn sums<const ROWS: usize, const VECS: usize>(place: &Place<$t>) {
                let mut sum = [[$zero(); VECS]; ROWS];
                let (mut a, mut b) = (place.a, place.b);
                let mut b_p = [$zero(); VECS];
                for _ in 0..place.depth {
                    for v in 0..VECS {
                        // SAFETY: b has depth * NR elements, NR is two vectors.
                        b_p[v] = unsafe { $load(b.add(v * $lanes)) };
                    }
                    for i in 0..ROWS {
                        // SAFETY: i < rows and p < depth.
                        let a_ip = $set(unsafe { *a.add(i * place.a_row) });
                        for v in 0..VECS {
                            sum[i][v] = $fma(a_ip, b_p[v], sum[i][v]);
                        }
                    }
                    a = a.wrapping_add(place.a_col);
                    b = b.wrapping_add(2 * $lanes);
                }
                for i in 0..ROWS {
                    for v in 0..VECS {
                        let lanes = (place.width - v * $lanes).min($lanes);
                        let mask = (((1_u32 << lanes) - 1) & 0xffff) as $mask;
                        // SAFETY: the mask keeps within `width` columns of row i.
                        unsafe {
                            let c = place.c.add(i * place.c_row + v * $lanes);
                            let mut x = sum[i][v];
                            if place.add {
                                x = $add($load_masked(mask, c), x);
                            }
                            $store_masked(c, mask, x);
                        }
                    }
                }
            }
        }
    };
}
tiles!(
    f32,
    __m512,
    __mmask16,
    16,
    _mm512_setzero_ps,
    _mm512_set1_ps,
    _mm512_loadu_ps,
    _mm512_fmadd_ps,
    _mm512_add_ps,
    _mm512_maskz_loadu_ps,
    _mm512_mask_storeu_ps
);
tiles!(
    f64,
    __m512d,
    __mmask8,
    8,
    _mm512_setzero_pd,
    _mm512_set1_pd,
    _mm512_loadu_pd,
    _mm512_fmadd_pd,
    _mm512_add_pd,
    _mm512_maskz_loadu_pd,
    _mm512_mask_storeu_pd
);

/// Packs 16 or 32 columns of f32 whose k lies side by side, four of k at a time; returns how many
/// of k it has done (0 where the width is another).
pub(super) fn pack_across_f32(
    b: &[f32],
    row: usize,
    width: usize,
    depth: usize,
    panel: &mut [f32],
) -> usize {
    let done = depth / 4 * 4;
    if done == 0 || !width.is_multiple_of(16) || width == 0 || !detected() {
        return 0;
    }
    assert!((width - 1) * row + done <= b.len() && done * 32 <= panel.len() && width <= 32);
    for first in (0..width).step_by(16) {
        // SAFETY: AVX-512F is there; 16 rows of `done` from `first` on end where checked above,
        // as do the 16 columns written in each of `done` lines.
        unsafe {
            let (b, to) = (b.as_ptr().add(first * row), panel.as_mut_ptr().add(first));
            transpose_16(b, row, done, to);
        }
    }
    if width < 32 {
        for line in panel[..done * 32].chunks_exact_mut(32) {
            line[width..].fill(0.0);
        }
    }
    done
}

/// `to[p * 32 + j] = from[j * row + p]` for j < 16 and p < depth, a multiple of 4.
///
/// # Safety
/// AVX-512F is there and the elements named are.
#[target_feature(enable = "avx512f")]
unsafe fn transpose_16(from: *const f32, row: usize, depth: usize, to: *mut f32) {
    for p in (0..depth).step_by(4) {
        let mut x = [_mm512_setzero_ps(); 4];
        for q in 0..4 {
            // Lane l of x[q] holds four of k of row 4 l + q.
            // SAFETY: rows below 16, k below depth.
            unsafe {
                let at = |l: usize| _mm_loadu_ps(from.add((4 * l + q) * row + p));
                let low = _mm512_castps128_ps512(at(0));
                let low = _mm512_insertf32x4::<1>(low, at(1));
                let low = _mm512_insertf32x4::<2>(low, at(2));
                x[q] = _mm512_insertf32x4::<3>(low, at(3));
            }
        }
        // A 4 x 4 transpose within each lane.
        let (a, b) = (
            _mm512_unpacklo_ps(x[0], x[1]),
            _mm512_unpackhi_ps(x[0], x[1]),
        );
        let (c, d) = (
            _mm512_unpacklo_ps(x[2], x[3]),
            _mm512_unpackhi_ps(x[2], x[3]),
        );
        let [a, b, c, d] = [a, b, c, d].map(|v| _mm512_castps_pd(v));
        let lines = [
            _mm512_unpacklo_pd(a, c),
            _mm512_unpackhi_pd(a, c),
            _mm512_unpacklo_pd(b, d),
            _mm512_unpackhi_pd(b, d),
        ];
        for (q, line) in lines.into_iter().enumerate() {
            // SAFETY: 16 columns of a line of 32, k below depth.
            unsafe { _mm512_storeu_ps(to.add((p + q) * 32), _mm512_castpd_ps(line)) };
        }
    }
}
