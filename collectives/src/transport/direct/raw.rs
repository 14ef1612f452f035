//! Copying and folding where the memory is known by address only.
//!
//! ```text
//! fold:  a block of every input -> accumulators on the stack -> the block of every output
//! copy:  eight vectors loaded, then eight stored
//! ```
//!
//! glibc's `memcpy` takes the processor's string instruction for such lengths, which falls to a
//! fraction of its speed where source and destination lie a few bytes apart modulo 4 KiB, as a
//! page-aligned segment and a heap buffer do. Vectors do not care.
//!
//! No slice is made over this memory: while these functions run it belongs to several ranks. The
//! accumulators are this rank's alone.
#![allow(unsafe_code)]

use crate::{Element, ReduceOp, element::finish};

/// Elements folded at a time: the accumulators then stay in the first-level cache.
const BLOCK: usize = 512;

/// The same of a short call, which should not clear so many accumulators first.
const SHORT: usize = 16;

/// Copies as much of `from` as both hold: what shared memory is filled with, for those who measure it.
pub fn copy_bytes(from: &[u8], to: &mut [u8]) {
    let bytes = from.len().min(to.len());
    // SAFETY: within both, one of which is borrowed mutably.
    unsafe { copy(from.as_ptr(), to.as_mut_ptr(), bytes) };
}

/// Copies `bytes`; the two may not overlap.
///
/// # Safety
/// `from` is readable and `to` writable for `bytes`, and nobody writes the one or looks at the other
/// meanwhile.
pub(crate) unsafe fn copy(from: *const u8, to: *mut u8, bytes: usize) {
    #[cfg(target_arch = "x86_64")]
    if std::arch::is_x86_feature_detected!("avx2") {
        // SAFETY: the processor has AVX2; the rest is the caller's word.
        return unsafe { copy_avx2(from, to, bytes) };
    }
    // SAFETY: the caller's word.
    unsafe { copy_plain(from, to, bytes) };
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
unsafe fn copy_avx2(from: *const u8, to: *mut u8, bytes: usize) {
    // SAFETY: the caller's word.
    unsafe { copy_plain(from, to, bytes) };
}

#[inline(always)]
unsafe fn copy_plain(from: *const u8, to: *mut u8, bytes: usize) {
    type Vectors = [[u64; 4]; 8];
    const STEP: usize = size_of::<Vectors>();
    let mut at = 0;
    while at + STEP <= bytes {
        // SAFETY: `at + STEP <= bytes`, and the caller's word for both ranges.
        unsafe {
            let vectors = from.add(at).cast::<Vectors>().read_unaligned();
            to.add(at).cast::<Vectors>().write_unaligned(vectors);
        }
        at += STEP;
    }
    while at + 8 <= bytes {
        // SAFETY: as above, for eight bytes.
        unsafe {
            let word = from.add(at).cast::<u64>().read_unaligned();
            to.add(at).cast::<u64>().write_unaligned(word);
        }
        at += 8;
    }
    while at < bytes {
        // SAFETY: as above, for one byte.
        unsafe { to.add(at).write(from.add(at).read()) };
        at += 1;
    }
}

/// What is folded, and how.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Fold {
    pub(crate) op: ReduceOp,
    /// What an average is divided by.
    pub(crate) world: usize,
    pub(crate) len: usize,
}

/// The left fold of `ins` in their order, rounded once, into every one of `outs`. An output may be
/// one of the inputs.
///
/// # Safety
/// Each input is readable and each output writable for `len` elements, aligned, and nobody else
/// writes the ones or touches the others meanwhile.
pub(crate) unsafe fn fold<E: Element>(fold: Fold, ins: &[*const E], outs: &[*mut E]) {
    #[cfg(target_arch = "x86_64")]
    if std::arch::is_x86_feature_detected!("avx2") {
        // SAFETY: the processor has AVX2; the rest is the caller's word.
        return unsafe { fold_avx2(fold, ins, outs) };
    }
    // SAFETY: the caller's word.
    unsafe { fold_plain(fold, ins, outs) };
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
unsafe fn fold_avx2<E: Element>(fold: Fold, ins: &[*const E], outs: &[*mut E]) {
    // SAFETY: the caller's word.
    unsafe { fold_plain(fold, ins, outs) };
}

#[inline(always)]
unsafe fn fold_plain<E: Element>(fold: Fold, ins: &[*const E], outs: &[*mut E]) {
    // SAFETY: the caller's word.
    unsafe {
        if fold.len <= SHORT {
            by_blocks::<E, SHORT>(fold, ins, outs);
        } else {
            by_blocks::<E, BLOCK>(fold, ins, outs);
        }
    }
}

#[inline(always)]
unsafe fn by_blocks<E: Element, const N: usize>(fold: Fold, ins: &[*const E], outs: &[*mut E]) {
    let mut wide = [<E::Wide as bytemuck::Zeroable>::zeroed(); N];
    let mut block = [E::zeroed(); N];
    let mut at = 0;
    while at < fold.len {
        let n = N.min(fold.len - at);
        let (wide, block) = (&mut wide[..n], &mut block[..n]);
        // SAFETY: `at + n <= len`, and the caller's word for every pointer.
        unsafe {
            match ins {
                [] => return,
                [one] => widen(wide, one.add(at)),
                [one, two, rest @ ..] => {
                    pair(fold.op, wide, one.add(at), two.add(at));
                    rest.iter().for_each(|x| onto(fold.op, wide, x.add(at)));
                }
            }
        }
        finish(fold.op, fold.world, block, wide);
        for out in outs {
            // SAFETY: as above.
            unsafe { spread(block, out.add(at)) };
        }
        at += n;
    }
}

#[inline(always)]
unsafe fn widen<E: Element>(wide: &mut [E::Wide], x: *const E) {
    for (i, wide) in wide.iter_mut().enumerate() {
        // SAFETY: the caller's word for as many elements as there are accumulators.
        *wide = unsafe { x.add(i).read() }.widen();
    }
}

#[inline(always)]
unsafe fn each<E: Element>(
    wide: &mut [E::Wide],
    x: *const E,
    f: impl Fn(E::Wide, E::Wide) -> E::Wide,
) {
    for (i, wide) in wide.iter_mut().enumerate() {
        // SAFETY: the caller's word for as many elements as there are accumulators.
        *wide = f(*wide, unsafe { x.add(i).read() }.widen());
    }
}

#[inline(always)]
unsafe fn onto<E: Element>(op: ReduceOp, wide: &mut [E::Wide], x: *const E) {
    // SAFETY: the caller's word.
    unsafe {
        match op {
            ReduceOp::Sum | ReduceOp::Avg => each(wide, x, Element::add),
            ReduceOp::Prod => each(wide, x, Element::mul),
            ReduceOp::Min => each(wide, x, Element::lesser),
            ReduceOp::Max => each(wide, x, Element::greater),
        }
    }
}

#[inline(always)]
unsafe fn pair<E: Element>(op: ReduceOp, wide: &mut [E::Wide], one: *const E, two: *const E) {
    // SAFETY: the caller's word.
    unsafe {
        match op {
            ReduceOp::Sum | ReduceOp::Avg => both(wide, one, two, Element::add),
            ReduceOp::Prod => both(wide, one, two, Element::mul),
            ReduceOp::Min => both(wide, one, two, Element::lesser),
            ReduceOp::Max => both(wide, one, two, Element::greater),
        }
    }
}

#[inline(always)]
unsafe fn both<E: Element>(
    wide: &mut [E::Wide],
    one: *const E,
    two: *const E,
    f: impl Fn(E::Wide, E::Wide) -> E::Wide,
) {
    for (i, wide) in wide.iter_mut().enumerate() {
        // SAFETY: the caller's word for as many elements as there are accumulators.
        *wide = unsafe { f(one.add(i).read().widen(), two.add(i).read().widen()) };
    }
}

#[inline(always)]
unsafe fn spread<E: Element>(block: &[E], out: *mut E) {
    for (i, x) in block.iter().enumerate() {
        // SAFETY: the caller's word for as many elements as the block holds.
        unsafe { out.add(i).write(*x) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::element::fold_ranks;
    use half::bf16;
    use proptest::prelude::*;
    use std::{vec, vec::Vec};

    proptest! {
        #[test]
        fn any_offset_and_length_is_copied(from in 0usize..70, to in 0usize..70, len in 0usize..900) {
            let source: Vec<u8> = (0..1000).map(|i| i as u8).collect();
            let mut target = vec![0xff; 1000];
            // SAFETY: both ranges lie in their vectors.
            unsafe { copy(source.as_ptr().add(from), target.as_mut_ptr().add(to), len) };
            prop_assert_eq!(&target[to..to + len], &source[from..from + len]);
            prop_assert!(target[..to].iter().chain(&target[to + len..]).all(|&x| x == 0xff));
        }

        #[test]
        fn a_fold_is_that_of_a_serial_loop(world in 1usize..6, len in 0usize..1500, op in 0usize..5) {
            let op = [ReduceOp::Sum, ReduceOp::Prod, ReduceOp::Min, ReduceOp::Max, ReduceOp::Avg][op];
            let parts: Vec<Vec<bf16>> = (0..world)
                .map(|r| (0..len).map(|i| bf16::from_f32(((i * 7 + r * 3) % 13) as f32 - 4.5)).collect())
                .collect();
            let mut expected = vec![bf16::ZERO; len];
            fold_ranks(
                op, world, len, &mut (&parts, &mut expected),
                |c, k, at, n| &c.0[k][at..at + n],
                |c, at, n| &mut c.1[at..at + n],
            );
            let mut ours = parts.clone();
            let ins: Vec<*const bf16> = ours.iter().map(|x| x.as_ptr()).collect();
            let outs: Vec<*mut bf16> = ours.iter_mut().map(|x| x.as_mut_ptr()).collect();
            // SAFETY: every vector holds `len` elements and nobody else has it.
            unsafe { fold(Fold { op, world, len }, &ins, &outs) };
            prop_assert!(ours.iter().all(|x| *x == expected));
        }
    }
}
