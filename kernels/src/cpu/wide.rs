//! Lets plain loops use the widest vectors that the CPU has.
//!
//! ```text
//! wide(#[inline(always)] || loop)  --+-- avx512(loop)     three copies of the loop, each
//!                                    +-- avx2(loop)       compiled for other instructions
//!                                    +-- loop
//! ```
//!
//! All give the same bits: the compiler neither fuses multiply-adds nor reorders sums by itself.
#![allow(unsafe_code)]

/// Calls `work`, compiled for this CPU's vectors. That reaches what is inlined into `work`, and
/// `work` itself only where it is marked `#[inline(always)]`.
#[inline(always)]
pub(crate) fn wide<R>(work: impl FnOnce() -> R) -> R {
    #[cfg(all(target_arch = "x86_64", feature = "std"))]
    {
        use std::arch::is_x86_feature_detected as has;
        if has!("avx512f") && has!("avx512vl") && has!("avx512bw") && has!("avx512dq") {
            // SAFETY: the features were found.
            return unsafe { avx512(work) };
        }
        if has!("avx2") {
            // SAFETY: the feature was found.
            return unsafe { avx2(work) };
        }
    }
    work()
}

/// # Safety
/// The CPU has the features named.
#[cfg(all(target_arch = "x86_64", feature = "std"))]
#[target_feature(enable = "avx512f,avx512vl,avx512bw,avx512dq")]
unsafe fn avx512<R>(work: impl FnOnce() -> R) -> R {
    work()
}

/// # Safety
/// The CPU has the feature named.
#[cfg(all(target_arch = "x86_64", feature = "std"))]
#[target_feature(enable = "avx2")]
unsafe fn avx2<R>(work: impl FnOnce() -> R) -> R {
    work()
}
