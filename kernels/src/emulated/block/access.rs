//! Loads and stores.

use std::format;

use super::super::shadow::{Objection, Touch};
use super::*;

/// How often a thread is paused before an access: once in so many, a power of two.
const PAUSE: u64 = 16;

impl Run<'_> {
    /// Whether the current thread lets others run before its access.
    pub(in super::super) fn pauses(&mut self, at: usize) -> bool {
        if self.on_stack(at) {
            return false;
        }
        // One random word answers for several accesses.
        if self.pauses <= 1 {
            self.pauses = self.rng.bits() >> 4 | 1 << 60;
        }
        let pauses = self.pauses.is_multiple_of(PAUSE);
        self.pauses /= PAUSE;
        pauses
    }

    fn on_stack(&self, at: usize) -> bool {
        let (low, high) = self.threads[self.current].stack;
        (low..high).contains(&at)
    }

    /// A load or store of the kernel's own code.
    pub(in super::super) fn access(
        &mut self,
        at: usize,
        bytes: usize,
        write: bool,
        align: usize,
        site: Site,
    ) -> Next {
        if self.on_stack(at) || bytes == 0 {
            return Next::Go;
        }
        if !at.is_multiple_of(align.max(1)) {
            let what = format!("{} at {at:#x}, no multiple of {align}", verb(write, bytes));
            let place = self.nearest(at);
            return self.fail_at(FaultKind::Misaligned, site, what, place, None);
        }
        let touch = if write { Touch::Write } else { Touch::Read };
        let shared = match self.touch(at, bytes, touch, site, self.current) {
            Ok(shared) => shared,
            Err(next) => return next,
        };
        if write && !shared && self.overwrites_a_source(at, bytes) {
            let what = format!("{} over the source of a cp.async", verb(true, bytes));
            let place = self.nearest(at);
            return self.fail_at(FaultKind::OnItsWay, site, what, place, None);
        }
        self.count(at, bytes, (shared, write), site);
        Next::Go
    }

    pub(super) fn count(&mut self, at: usize, bytes: usize, kind: (bool, bool), site: Site) {
        let (warp, lane) = (self.current / LANES, self.current % LANES);
        let live = self.lanes_of(warp).count_ones() as usize;
        // Banks count from the start of shared memory.
        let at = if kind.0 {
            at - self.arena.as_ptr() as usize
        } else {
            at
        };
        if let Some(counting) = &mut self.counting {
            counting.access((warp, lane, live), site.key(), (at, bytes), kind);
        }
    }

    /// Checks and records a touch by `thread`; answers whether the memory is shared.
    pub(super) fn touch(
        &mut self,
        at: usize,
        bytes: usize,
        touch: Touch,
        site: Site,
        thread: usize,
    ) -> Result<bool, Next> {
        let write = touch != Touch::Read;
        let now = Now {
            stamp: self.stamp(thread),
            ops: self.ops,
            clocks: &self.clocks,
        };
        let arena = self.arena.as_ptr() as usize;
        let shared = (arena..arena + self.arena.len() * size_of::<Line>()).contains(&at);
        if shared && self.shared_sets.are_many() {
            let shadows = self.shared.iter_mut().map(|(_, r)| &mut r.shadow);
            self.shared_sets.sweep(shadows, false);
        }
        let (region, sets) = if shared {
            let found = self.shared.iter_mut().find(|(_, r)| r.contains(at, bytes));
            match found {
                Some((_, region)) => (region, &mut self.shared_sets),
                None => {
                    let place = self.nearest(at);
                    let what = verb(write, bytes);
                    return Err(self.fail_at(FaultKind::OutOfBounds, site, what, place, None));
                }
            }
        } else {
            match self.memory.find(at, bytes) {
                Ok(found) => found,
                Err((freed, place)) => {
                    let kind = match freed {
                        true => FaultKind::Freed,
                        false => FaultKind::OutOfBounds,
                    };
                    let what = match place {
                        Some(_) => verb(write, bytes),
                        None => format!("{} at {at:#x}, in no allocation", verb(write, bytes)),
                    };
                    return Err(self.fail_at(kind, site, what, place, None));
                }
            }
        };
        let start = at - region.base;
        let range = start..start + bytes;
        let Err((i, objection)) = region.shadow.touch(range, touch, &now, sets, true) else {
            return Ok(shared);
        };
        let place = region.place(region.base + i);
        let (kind, what, other) = self.explain(objection, write, bytes);
        Err(self.fail_at(kind, site, what, Some(place), other))
    }

    fn explain(
        &self,
        objection: Objection,
        write: bool,
        bytes: usize,
    ) -> (FaultKind, String, Option<Stamp>) {
        let race = |other: Stamp| {
            if other.op() != self.op {
                FaultKind::StreamRace
            } else if other.block() != self.block {
                FaultKind::BlockRace
            } else {
                FaultKind::Race
            }
        };
        let what = verb(write, bytes);
        match objection {
            Objection::Unwritten => (FaultKind::Unwritten, what, None),
            Objection::OnItsWay(other) => (FaultKind::OnItsWay, what, Some(other)),
            Objection::Written(other) => {
                let what = format!("{what} of what was written");
                (race(other), what, Some(other))
            }
            Objection::Read(other) => {
                let what = format!("{what} over what was read");
                (race(other), what, Some(other))
            }
        }
    }

    /// The allocation an address belongs to, or lies beside.
    pub(super) fn nearest(&mut self, at: usize) -> Option<Place> {
        let arena = self.arena.as_ptr() as usize;
        if (arena..arena + self.arena.len() * size_of::<Line>()).contains(&at) {
            let below = self.shared.iter().filter(|(_, r)| r.base <= at);
            return below.max_by_key(|(_, r)| r.base).map(|(_, r)| r.place(at));
        }
        match self.memory.find(at, 0) {
            Ok((region, _)) => Some(region.place(at)),
            Err((_, place)) => place,
        }
    }

    /// A static shared array: the block's one of this key.
    pub(in super::super) fn static_shared(
        &mut self,
        key: SharedKey,
        name: &'static str,
        site: Site,
    ) -> Result<usize, Next> {
        if let Some((_, region)) = self.shared.iter().find(|(k, _)| *k == key) {
            return Ok(region.base);
        }
        let bytes = key.2 as usize;
        let used: usize = self.shared.iter().map(|(_, r)| r.bytes).sum();
        let fixed = used - self.call.shared as usize + bytes;
        if fixed > STATIC_LIMIT || used + bytes > self.shared_limit {
            let what = format!(
                "{name} takes shared memory to {} bytes ({fixed} static) where {} ({STATIC_LIMIT} \
                 static) are there",
                used + bytes,
                self.shared_limit
            );
            return Err(self.fail(FaultKind::OutOfBounds, site, what));
        }
        let end = (self.shared_end + key.3 as usize + bytes).next_multiple_of(GAP) + GAP;
        if end > self.arena.len() * size_of::<Line>() - 1024 {
            let what = format!("{name} is one shared array more than the emulator has room for");
            return Err(self.fail(FaultKind::Emulator, site, what));
        }
        Ok(self.add_shared(key, name, bytes))
    }

    pub(super) fn add_shared(&mut self, key: SharedKey, name: &'static str, bytes: usize) -> usize {
        let start = self.shared_end.next_multiple_of((key.3 as usize).max(1));
        let base = self.arena.as_ptr() as usize + start;
        self.shared_end = (start + bytes).next_multiple_of(GAP) + GAP;
        poison(&mut self.arena, start, bytes);
        self.shared.push((key, Region::shared(base, bytes, name)));
        base
    }

    /// Dynamic shared memory; one byte past all arrays where the launch asked for none.
    pub(in super::super) fn dynamic_shared(&self) -> usize {
        match self.call.shared {
            0 => self.arena.as_ptr() as usize + self.arena.len() * size_of::<Line>() - 1024,
            _ => self.arena.as_ptr() as usize,
        }
    }
}

pub(super) fn verb(write: bool, bytes: usize) -> String {
    let verb = if write { "write" } else { "read" };
    format!("{verb} of {bytes} bytes")
}
