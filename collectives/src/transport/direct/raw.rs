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

use core::ops::Range;
use std::sync::OnceLock;

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

/// How the target of a copy is written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Target {
    /// As it comes.
    Caches,
    /// Others have read it since it was written last: the lines are asked for ahead, so that none is waited for.
    Shared,
    /// Nobody reads it soon, and it was not read before: its lines are neither fetched nor kept.
    Memory,
}

/// Whether an output of so many bytes is written past the caches, where its old contents were not just read: it is long,
/// and what all `ranks` of the call read and write does not fit the last cache, as far as the system tells its size.
pub(crate) fn goes_past(bytes: usize, ranks: usize) -> bool {
    is_beyond(last_cache(), bytes, ranks)
}

/// The same of a cache of so many bytes. Inputs count as outputs do, though some operations have shorter or longer ones.
fn is_beyond(cache: usize, bytes: usize, ranks: usize) -> bool {
    const LEAST: usize = 1 << 20;
    bytes >= LEAST && 2 * ranks * bytes >= cache
}

/// Bytes of the third-level cache; 0 where nobody tells.
fn last_cache() -> usize {
    static BYTES: OnceLock<usize> = OnceLock::new();
    *BYTES.get_or_init(|| {
        let told = std::fs::read_to_string("/sys/devices/system/cpu/cpu0/cache/index3/size");
        told.ok().and_then(|text| kib(&text)).unwrap_or(0)
    })
}

/// The bytes that a text such as `32768K` says.
fn kib(text: &str) -> Option<usize> {
    let kib: usize = text.trim().strip_suffix('K')?.parse().ok()?;
    kib.checked_mul(1 << 10)
}

/// Copies `bytes`; the two may not overlap.
///
/// # Safety
/// `from` is readable and `to` writable for `bytes`, and nobody writes the one or looks at the other
/// meanwhile.
pub(crate) unsafe fn copy(from: *const u8, to: *mut u8, bytes: usize) {
    // SAFETY: the caller's word.
    unsafe { copy_into(Target::Caches, from, to, bytes) };
}

/// The same, with the target written as `into` says.
///
/// # Safety
/// That of [`copy`].
pub(crate) unsafe fn copy_into(into: Target, from: *const u8, to: *mut u8, bytes: usize) {
    #[cfg(target_arch = "x86_64")]
    if bytes >= VECTORS && std::arch::is_x86_feature_detected!("avx2") {
        // SAFETY: the processor has AVX2; the rest is the caller's word.
        unsafe {
            match into {
                Target::Caches => copy_avx2(from, to, bytes),
                Target::Shared => ahead(from, to, bytes),
                Target::Memory => {
                    past(from, to, bytes);
                    fence();
                }
            }
        }
        return;
    }
    let _ = into;
    // SAFETY: the caller's word.
    unsafe { copy_plain(from, to, bytes) };
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
unsafe fn copy_avx2(from: *const u8, to: *mut u8, bytes: usize) {
    // A vector that is written across the end of a line costs two.
    let head = to.align_offset(LINE).min(bytes);
    // SAFETY: the caller's word, for two parts of both.
    unsafe {
        copy_plain(from, to, head);
        copy_plain(from.add(head), to.add(head), bytes - head);
    }
}

/// How far ahead of its writing a line is asked for.
#[cfg(target_arch = "x86_64")]
const AHEAD: usize = 512;

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
unsafe fn ahead(from: *const u8, to: *mut u8, bytes: usize) {
    let mut at = to.align_offset(LINE).min(bytes);
    // SAFETY: the caller's word.
    unsafe { copy_plain(from, to, at) };
    while at + VECTORS <= bytes {
        ask(to.wrapping_add(at + AHEAD), VECTORS);
        // SAFETY: `at + VECTORS <= bytes`, and the caller's word.
        unsafe { copy_plain(from.add(at), to.add(at), VECTORS) };
        at += VECTORS;
    }
    // SAFETY: the rest of both.
    unsafe { copy_plain(from.add(at), to.add(at), bytes - at) };
}

/// Asks for the lines from `at` on, to write them. What lies there, if anything, is not touched.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
fn ask(at: *mut u8, bytes: usize) {
    for line in 0..bytes / 64 {
        let at = at.wrapping_add(64 * line);
        // SAFETY: a hint, which reads and writes nothing and faults nowhere.
        unsafe {
            core::arch::asm!("prefetchw [{}]", in(reg) at, options(nostack, preserves_flags));
        }
    }
}

/// Bytes of a cache line.
#[cfg(target_arch = "x86_64")]
const LINE: usize = 64;

/// Writes past the caches; what was written so is there for others after a [`fence`].
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
unsafe fn past(from: *const u8, to: *mut u8, bytes: usize) {
    use core::arch::x86_64::{
        __m256i, _mm256_loadu_si256, _mm256_setzero_si256, _mm256_stream_si256,
    };
    const WIDTH: usize = size_of::<__m256i>();
    // A line that is written so in part only costs more than any other.
    let head = to.align_offset(LINE).min(bytes);
    // SAFETY: within both, which the caller vouches for; the target is aligned after the head.
    unsafe {
        copy_plain(from, to, head);
        let mut at = head;
        while at + 8 * WIDTH <= bytes {
            let mut vectors = [_mm256_setzero_si256(); 8];
            for (i, vector) in vectors.iter_mut().enumerate() {
                *vector = _mm256_loadu_si256(from.add(at + i * WIDTH).cast());
            }
            for (i, vector) in vectors.into_iter().enumerate() {
                _mm256_stream_si256(to.add(at + i * WIDTH).cast(), vector);
            }
            at += 8 * WIDTH;
        }
        copy_plain(from.add(at), to.add(at), bytes - at);
    }
}

/// What was written past the caches is there before what this rank says next.
#[cfg(target_arch = "x86_64")]
fn fence() {
    // SAFETY: every x86-64 has it.
    unsafe { core::arch::x86_64::_mm_sfence() };
}

type Vectors = [[u64; 4]; 8];

/// Bytes moved at a time.
const VECTORS: usize = size_of::<Vectors>();

#[inline(always)]
unsafe fn copy_plain(from: *const u8, to: *mut u8, bytes: usize) {
    let mut at = 0;
    while at + VECTORS <= bytes {
        // SAFETY: `at + VECTORS <= bytes`, and the caller's word for both ranges.
        unsafe {
            let vectors = from.add(at).cast::<Vectors>().read_unaligned();
            to.add(at).cast::<Vectors>().write_unaligned(vectors);
        }
        at += VECTORS;
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

/// An output, and how it is written.
pub(crate) type Out<E> = (*mut E, Target);

/// The left fold of `ins` in their order, rounded once, into every one of `outs`. An output may be
/// one of the inputs.
///
/// # Safety
/// Each input is readable and each output writable for `len` elements, aligned, and nobody else
/// writes the ones or touches the others meanwhile.
pub(crate) unsafe fn fold<E: Element>(fold: Fold, ins: &[*const E], outs: &[Out<E>]) {
    #[cfg(target_arch = "x86_64")]
    if std::arch::is_x86_feature_detected!("avx2") {
        // SAFETY: the processor has AVX2; the rest is the caller's word.
        unsafe { fold_avx2(fold, ins, outs) };
        if outs.iter().any(|out| out.1 == Target::Memory) {
            fence();
        }
        return;
    }
    // SAFETY: the caller's word.
    unsafe { fold_plain(fold, ins, outs) };
}

/// The fold of two, the first on the left, into a third that nobody reads soon.
pub(crate) fn fold_two<E: Element>(op: ReduceOp, ins: [&[E]; 2], out: &mut [E]) {
    let len = out.len().min(ins[0].len()).min(ins[1].len());
    let of = Fold { op, world: 2, len };
    let out = (out.as_mut_ptr(), Target::Memory);
    // SAFETY: all three are that long, and the output is borrowed mutably.
    unsafe { fold(of, &ins.map(<[E]>::as_ptr), &[out]) };
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
unsafe fn fold_avx2<E: Element>(fold: Fold, ins: &[*const E], outs: &[Out<E>]) {
    // SAFETY: the caller's word.
    unsafe {
        if fold.len <= SHORT {
            return fold_plain(fold, ins, outs);
        }
        // Blocks begin where a line of an output does: of one past the caches, if there is one.
        let first = outs.iter().find(|out| out.1 == Target::Memory);
        let first = first.or(outs.first());
        let lead = first.map_or(0, |out| out.0.align_offset(LINE).min(fold.len));
        by_blocks::<E, SHORT>(fold, 0..lead, ins, outs, |block, out, _| spread(block, out));
        by_blocks::<E, BLOCK>(fold, lead..fold.len, ins, outs, |block, out, into| {
            let (from, to, bytes) = (block.as_ptr().cast(), out.cast::<u8>(), size_of_val(block));
            match into {
                Target::Memory if to.align_offset(LINE) == 0 => past(from, to, bytes),
                Target::Shared => ahead(from, to, bytes),
                Target::Caches | Target::Memory => copy_plain(from, to, bytes),
            }
        });
    }
}

#[inline(always)]
unsafe fn fold_plain<E: Element>(fold: Fold, ins: &[*const E], outs: &[Out<E>]) {
    // SAFETY: the caller's word.
    unsafe {
        let all = 0..fold.len;
        if fold.len <= SHORT {
            by_blocks::<E, SHORT>(fold, all, ins, outs, |block, out, _| spread(block, out));
        } else {
            by_blocks::<E, BLOCK>(fold, all, ins, outs, |block, out, _| spread(block, out));
        }
    }
}

#[inline(always)]
unsafe fn by_blocks<E: Element, const N: usize>(
    fold: Fold,
    part: Range<usize>,
    ins: &[*const E],
    outs: &[Out<E>],
    write: impl Fn(&[E], *mut E, Target),
) {
    let mut wide = [<E::Wide as bytemuck::Zeroable>::zeroed(); N];
    let mut block = [E::zeroed(); N];
    let mut at = part.start;
    while at < part.end {
        let n = N.min(part.end - at);
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
        for &(out, into) in outs {
            // SAFETY: as above.
            write(block, unsafe { out.add(at) }, into);
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

    #[test]
    fn what_fits_the_last_cache_is_not_written_past_it() {
        let mib = 1 << 20;
        // Of two ranks each reads and writes as much.
        assert!(is_beyond(32 * mib, 8 * mib, 2));
        assert!(!is_beyond(32 * mib, 8 * mib - 1, 2));
        assert!(is_beyond(32 * mib, 4 * mib, 4));
        // A cache that nobody tells of, and lengths that are never worth it.
        assert!(is_beyond(0, mib, 2));
        assert!(!is_beyond(0, mib - 1, 1 << 20));
        assert_eq!(kib("32768K\n"), Some(32 << 20));
        assert_eq!((kib("32M"), kib(""), kib("K")), (None, None, None));
    }

    proptest! {
        #[test]
        fn any_offset_and_length_is_copied(from in 0usize..70, to in 0usize..70, len in 0usize..900) {
            let source: Vec<u8> = (0..1000).map(|i| i as u8).collect();
            let mut target = vec![0xff; 1000];
            for into in [Target::Caches, Target::Shared, Target::Memory] {
                target.fill(0xff);
                // SAFETY: both ranges lie in their vectors.
                unsafe { copy_into(into, source.as_ptr().add(from), target.as_mut_ptr().add(to), len) };
                prop_assert_eq!(&target[to..to + len], &source[from..from + len]);
                prop_assert!(target[..to].iter().chain(&target[to + len..]).all(|&x| x == 0xff));
            }
        }

        #[test]
        fn a_fold_is_that_of_a_serial_loop(world in 1usize..6, len in 0usize..1500, op in 0usize..5, how in 0usize..3) {
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
            let how = [Target::Caches, Target::Shared, Target::Memory][how];
            let outs: Vec<Out<bf16>> = ours.iter_mut().map(|x| (x.as_mut_ptr(), how)).collect();
            // SAFETY: every vector holds `len` elements and nobody else has it.
            unsafe { fold(Fold { op, world, len }, &ins, &outs) };
            prop_assert!(ours.iter().all(|x| *x == expected));
        }
    }
}
