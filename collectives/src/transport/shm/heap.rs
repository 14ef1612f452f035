//! Which parts of a segment are taken: offsets and lengths only.

use std::collections::BTreeMap;

/// Areas are multiples of a page, so that one can be taken away from others without its neighbours.
pub(super) const PAGE: usize = 4096;

#[derive(Debug)]
pub(super) struct Heap {
    /// Free areas by offset, none beside another.
    free: BTreeMap<usize, usize>,
    /// Taken areas by offset.
    taken: BTreeMap<usize, usize>,
    /// Where the part that was never taken begins.
    end: usize,
    limit: usize,
}

impl Heap {
    pub(super) fn new(start: usize, limit: usize) -> Self {
        Self {
            free: BTreeMap::new(),
            taken: BTreeMap::new(),
            end: start,
            limit,
        }
    }

    /// An area of at least `bytes`, and whether it was taken before.
    pub(super) fn take(&mut self, bytes: usize) -> Option<(usize, bool)> {
        let bytes = bytes.max(1).checked_next_multiple_of(PAGE)?;
        let fits = self.free.iter().filter(|(_, len)| **len >= bytes);
        if let Some((&at, &len)) = fits.min_by_key(|(_, len)| **len) {
            self.free.remove(&at);
            if len > bytes {
                self.free.insert(at + bytes, len - bytes);
            }
            self.taken.insert(at, bytes);
            return Some((at, true));
        }
        let at = self.end;
        let end = at.checked_add(bytes).filter(|&end| end <= self.limit)?;
        self.end = end;
        self.taken.insert(at, bytes);
        Some((at, false))
    }

    /// Gives an area back.
    pub(super) fn give(&mut self, at: usize) {
        let Some(mut len) = self.taken.remove(&at) else {
            return;
        };
        let mut at = at;
        if let Some(next) = self.free.remove(&(at + len)) {
            len += next;
        }
        if let Some((&before, &gap)) = self.free.range(..at).next_back()
            && before + gap == at
        {
            self.free.remove(&before);
            (at, len) = (before, gap + len);
        }
        self.free.insert(at, len);
    }

    /// What lies beyond `end` was never there after all.
    pub(super) fn forget(&mut self, end: usize) {
        if let Some((&at, &len)) = self.free.range(..).next_back()
            && at + len == self.end
            && self.end > end
        {
            self.free.remove(&at);
            if at < end {
                self.free.insert(at, end - at);
            }
            self.end = end.max(at.min(end));
        }
    }

    /// The taken area around an offset.
    pub(super) fn around(&self, at: usize) -> Option<(usize, usize)> {
        let (&start, &len) = self.taken.range(..=at).next_back()?;
        (at < start + len).then_some((start, len))
    }

    /// Where the part that was never taken begins.
    pub(super) fn end(&self) -> usize {
        self.end
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::vec::Vec;

    proptest! {
        #[test]
        fn areas_never_overlap_and_come_back(ops in prop::collection::vec((any::<bool>(), 1usize..40_000), 1..120)) {
            let mut heap = Heap::new(PAGE, 1 << 20);
            let mut held: Vec<(usize, usize)> = Vec::new();
            for (take, n) in ops {
                if take || held.is_empty() {
                    if let Some((at, _)) = heap.take(n) {
                        prop_assert!(at % PAGE == 0 && at >= PAGE && at + n <= 1 << 20);
                        prop_assert!(held.iter().all(|&(o, len)| at + n <= o || o + len <= at));
                        prop_assert_eq!(heap.around(at + n - 1).map(|(o, _)| o), Some(at));
                        held.push((at, n));
                    }
                } else {
                    let (at, _) = held.swap_remove(n % held.len());
                    heap.give(at);
                    prop_assert_eq!(heap.around(at), None);
                }
            }
            for (at, _) in held {
                heap.give(at);
            }
            prop_assert!(heap.free.len() <= 1);
            let all = heap.end - PAGE;
            prop_assert!(all == 0 || heap.take(all) == Some((PAGE, true)));
        }
    }
}
