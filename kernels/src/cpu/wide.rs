//! Lets plain loops use the widest vectors that the CPU has.
#![allow(unsafe_code)]

/// Calls `work` from a function compiled with AVX-512 where the CPU has it, so that loops inlined
/// into it are vectorised for it. The results are the same bits: the compiler fuses no
/// multiply-adds and reorders no sums by itself.
#[inline(always)]
pub(crate) fn wide<R>(work: impl FnOnce() -> R) -> R {
    #[cfg(all(target_arch = "x86_64", feature = "std"))]
    if std::arch::is_x86_feature_detected!("avx512f")
        && std::arch::is_x86_feature_detected!("avx512dq")
    {
        // SAFETY: both features were found.
        return unsafe { avx512(work) };
    }
    work()
}

/// # Safety
/// The CPU has the features named.
#[cfg(all(target_arch = "x86_64", feature = "std"))]
#[target_feature(enable = "avx512f,avx512dq")]
unsafe fn avx512<R>(work: impl FnOnce() -> R) -> R {
    work()
}
