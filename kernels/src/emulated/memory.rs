//! Device memory: allocations with their shadows, found by address.

use std::boxed::Box;
use std::vec::Vec;

use super::fault::Place;
use super::shadow::{Sets, Shadow};

/// Alignment of what a device allocates.
#[derive(Debug, Clone, Copy)]
#[repr(C, align(1024))]
pub(super) struct Line([u8; 1024]);

/// Bytes that are NaN in every float: what lies in memory nobody has written.
const POISON: Line = Line([0xff; 1024]);

/// Poisoned lines that hold `bytes`, at least one.
pub(super) fn lines(bytes: usize) -> Option<Box<[Line]>> {
    let mut lines = Vec::new();
    let n = bytes.div_ceil(1024).max(1);
    lines.try_reserve_exact(n).ok()?;
    lines.resize(n, POISON);
    Some(lines.into_boxed_slice())
}

/// Poisons `bytes` bytes of lines again, from `start` on.
pub(super) fn poison(lines: &mut [Line], start: usize, bytes: usize) {
    bytes_of(lines)[start..start + bytes].fill(POISON.0[0]);
}

/// Lines as bytes.
fn bytes_of(lines: &mut [Line]) -> &mut [u8] {
    let len = lines.len() * 1024;
    // SAFETY: a Line is 1024 plain bytes without padding.
    unsafe { core::slice::from_raw_parts_mut(lines.as_mut_ptr().cast::<u8>(), len) }
}

/// One allocation, or one array of shared memory.
#[derive(Debug)]
pub(super) struct Region {
    pub(super) base: usize,
    pub(super) bytes: usize,
    pub(super) name: &'static str,
    pub(super) shadow: Shadow,
    pub(super) freed: bool,
    /// Global memory is owned; shared memory lies in the arena of a run.
    data: Option<Box<[Line]>>,
}

impl Region {
    pub(super) fn shared(base: usize, bytes: usize, name: &'static str) -> Self {
        Self {
            base,
            bytes,
            name,
            shadow: Shadow::new(bytes),
            freed: false,
            data: None,
        }
    }

    pub(super) fn contains(&self, at: usize, bytes: usize) -> bool {
        at >= self.base && at - self.base <= self.bytes && bytes <= self.bytes - (at - self.base)
    }

    pub(super) fn place(&self, at: usize) -> Place {
        Place {
            allocation: self.name.into(),
            offset: at as i64 - self.base as i64,
            bytes: self.bytes,
        }
    }

    /// Gives the memory back; the region stays known as freed.
    pub(super) fn free(&mut self) {
        self.freed = true;
        self.data = None;
        self.shadow = Shadow::new(0);
    }

    /// The bytes from `at` on, of global memory.
    pub(super) fn bytes_mut(&mut self, at: usize, len: usize) -> &mut [u8] {
        let start = at - self.base;
        match &mut self.data {
            Some(lines) => &mut bytes_of(lines)[start..start + len],
            None => &mut [],
        }
    }
}

const FOUND: usize = 64;

/// All allocations of a device.
#[derive(Debug)]
pub(super) struct Memory {
    /// By base.
    regions: Vec<Region>,
    /// Where addresses were found last, by some bits of them.
    found: [usize; FOUND],
    pub(super) sets: Sets,
}

impl Default for Memory {
    fn default() -> Self {
        Self {
            regions: Vec::new(),
            found: [0; FOUND],
            sets: Sets::default(),
        }
    }
}

impl Memory {
    /// Allocates, or `None` where the host has not that much.
    pub(super) fn alloc(&mut self, name: &'static str, bytes: usize) -> Option<u64> {
        let data = lines(bytes)?;
        let (base, span) = (data.as_ptr() as usize, data.len() * 1024);
        // The host may give freed memory again: what was known of it ends here.
        self.regions
            .retain(|r| !r.freed || r.base + r.bytes.max(1) <= base || base + span <= r.base);
        let region = Region {
            data: Some(data),
            shadow: Shadow::try_new(bytes)?,
            ..Region::shared(base, 0, name)
        };
        let region = Region { bytes, ..region };
        let at = self.regions.partition_point(|r| r.base < base);
        self.regions.insert(at, region);
        Some(base as u64)
    }

    /// The region that starts last at or before `at`.
    fn index(&mut self, at: usize) -> Option<usize> {
        let fits = |i: usize| {
            let starts = self.regions.get(i).is_some_and(|r| r.base <= at);
            starts && self.regions.get(i + 1).is_none_or(|next| next.base > at)
        };
        let found = &mut self.found[at / 1024 % FOUND];
        if !fits(*found) {
            let after = self.regions.partition_point(|r| r.base <= at);
            *found = after.checked_sub(1)?;
        }
        Some(*found)
    }

    /// The live region that holds `bytes` bytes at `at`, with the sets of readers.
    ///
    /// # Errors
    /// `(freed, nearest place)`.
    pub(super) fn find(
        &mut self,
        at: usize,
        bytes: usize,
    ) -> Result<(&mut Region, &mut Sets), (bool, Option<Place>)> {
        let Some(i) = self.index(at) else {
            return Err((false, None));
        };
        let region = &mut self.regions[i];
        if !region.contains(at, bytes) || region.freed {
            let freed = region.freed && region.contains(at, bytes);
            // An address far from anything tells nothing about the allocation below it.
            let near = at - region.base <= region.bytes + (1 << 20);
            return Err((freed, near.then(|| region.place(at))));
        }
        Ok((region, &mut self.sets))
    }

    /// Forgets who touched what, everywhere.
    pub(super) fn forget_stamps(&mut self) {
        self.sets = Sets::default();
        for region in &mut self.regions {
            region.shadow.forget_stamps();
        }
    }

    /// Shrinks the sets of readers to what later operations need, where there are many.
    pub(super) fn tidy(&mut self) {
        if self.sets.are_many() {
            let shadows = self.regions.iter_mut().map(|r| &mut r.shadow);
            self.sets.sweep(shadows, true);
        }
    }
}
