//! Many views of several buffers at once, without `unsafe`: each buffer is cut from left to right.

use alloc::vec::Vec;
use core::ops::Range;

use quintet_kernels::{Backend, Data};

/// Mutable views of `ranges` (buffer, range), which must not overlap, in their order; `None`
/// stands where there is no such buffer.
pub(crate) fn views_mut<'a, B: Backend, T: Data>(
    buffers: impl Iterator<Item = (usize, Option<&'a mut B::Buf<T>>)>,
    ranges: &[(usize, Range<usize>)],
) -> Vec<Option<B::Mut<'a, T>>> {
    let mut views: Vec<Option<B::Mut<'a, T>>> = ranges.iter().map(|_| None).collect();
    for (index, buffer) in buffers {
        let mut wanted: Vec<usize> = (0..ranges.len())
            .filter(|&i| ranges[i].0 == index)
            .collect();
        let Some(buffer) = buffer.filter(|_| !wanted.is_empty()) else {
            continue;
        };
        wanted.sort_unstable_by_key(|&i| (ranges[i].1.start, ranges[i].1.end));
        let (mut rest, mut at) = (B::whole_mut(buffer), 0);
        for i in wanted {
            let range = &ranges[i].1;
            let (_, tail) = B::split_mut(rest, range.start.saturating_sub(at));
            let (view, tail) = B::split_mut(tail, range.len());
            (rest, at) = (tail, range.end);
            views[i] = Some(view);
        }
    }
    views
}

#[cfg(test)]
mod tests {
    use super::*;
    use quintet_kernels::{Cpu, Tag};

    #[test]
    fn views_come_in_the_order_asked_for_whatever_lies_between() {
        let cpu = Cpu::new(1);
        let mut buffers: Vec<_> = [[0, 1, 2, 3], [4, 5, 6, 7]]
            .iter()
            .map(|host| cpu.upload(Tag::Scratch, host).ok())
            .collect();
        let ranges = [(1, 2..4), (0, 3..4), (0, 0..0), (0, 0..2), (2, 0..1)];
        let whole = buffers.iter_mut().map(Option::as_mut).enumerate();
        let views = views_mut::<Cpu, i32>(whole, &ranges);
        let seen: Vec<Option<&[i32]>> = views.iter().map(|v| v.as_deref()).collect();
        let want: [Option<&[i32]>; 5] = [Some(&[6, 7]), Some(&[3]), Some(&[]), Some(&[0, 1]), None];
        assert_eq!(seen, want);
    }
}
