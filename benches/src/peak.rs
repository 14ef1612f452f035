//! The most that this CPU multiplies and adds: fused multiply-adds on registers, nothing else.
//!
//! A measured limit, not a data sheet's: clocks fall under wide vectors, and a guest does not
//! know what the host gives it.
#![allow(unsafe_code)]

use std::thread;
use std::time::Instant;

/// f32 operations per second of `threads` threads together (a multiply-add is two), best of a few
/// tries. None where this CPU has no vector instructions that are known here.
#[must_use]
pub fn fma_f32(threads: usize) -> Option<f64> {
    let burn = burner()?;
    let rate = || {
        let start = Instant::now();
        let done = (0..40).map(|_| burn()).sum::<u64>();
        done as f64 / start.elapsed().as_secs_f64()
    };
    rate();
    let tries = (0..5).map(|_| {
        thread::scope(|scope| {
            let all: Vec<_> = (0..threads.max(1)).map(|_| scope.spawn(rate)).collect();
            all.into_iter().filter_map(|t| t.join().ok()).sum::<f64>()
        })
    });
    Some(tries.fold(0.0, f64::max))
}

/// Burns some 0.1 ms and says how many operations that was.
type Burn = fn() -> u64;

#[cfg(target_arch = "x86_64")]
fn burner() -> Option<Burn> {
    if is_x86_feature_detected!("avx512f") {
        // SAFETY: the CPU has what the function needs.
        Some(|| unsafe { x86::avx512() })
    } else if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") {
        // SAFETY: as above.
        Some(|| unsafe { x86::avx2() })
    } else {
        None
    }
}

#[cfg(not(target_arch = "x86_64"))]
fn burner() -> Option<Burn> {
    None
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use core::arch::x86_64::{_mm256_fmadd_ps, _mm256_set1_ps, _mm512_fmadd_ps, _mm512_set1_ps};
    use core::hint::black_box;

    /// More chains than latency times ports, fewer than registers.
    const CHAINS: usize = 12;
    const ROUNDS: u64 = 20_000;

    #[target_feature(enable = "avx512f")]
    pub(super) fn avx512() -> u64 {
        let (half, one) = (_mm512_set1_ps(black_box(0.5)), _mm512_set1_ps(1.0));
        let mut sums = [one; CHAINS];
        for _ in 0..ROUNDS {
            // No closure: one would stand outside of what this function is compiled for.
            for sum in &mut sums {
                *sum = _mm512_fmadd_ps(*sum, half, one);
            }
        }
        black_box(sums);
        2 * 16 * CHAINS as u64 * ROUNDS
    }

    #[target_feature(enable = "avx2,fma")]
    pub(super) fn avx2() -> u64 {
        let (half, one) = (_mm256_set1_ps(black_box(0.5)), _mm256_set1_ps(1.0));
        let mut sums = [one; CHAINS];
        for _ in 0..ROUNDS {
            for sum in &mut sums {
                *sum = _mm256_fmadd_ps(*sum, half, one);
            }
        }
        black_box(sums);
        2 * 8 * CHAINS as u64 * ROUNDS
    }
}
