//! `cp.async`: started, committed to groups, done late.
//!
//! A copy's bytes move at once or when its group is waited for, by the seed; either way nobody may
//! touch the destination, or write the source, in between. A group's copies land in any order.

use std::format;

use super::super::order::Meeting;
use super::super::shadow::Touch;
use super::*;

/// A copy moves its bytes at once, once in so many.
const AT_ONCE: usize = 3;

impl Run<'_> {
    pub(in super::super) fn copy(
        &mut self,
        to: usize,
        from: usize,
        bytes: usize,
        from_bytes: i32,
        site: Site,
    ) -> Next {
        let from_bytes = usize::try_from(from_bytes).unwrap_or(usize::MAX);
        if from_bytes > bytes {
            let what = format!("cp.async of {from_bytes} bytes into {bytes}");
            return self.fail(FaultKind::OutOfBounds, site, what);
        }
        for at in [to, from] {
            if !at.is_multiple_of(bytes) {
                let what = format!("cp.async at {at:#x}, no multiple of {bytes}");
                let place = self.nearest(at);
                return self.fail_at(FaultKind::Misaligned, site, what, place, None);
            }
        }
        let thread = self.current;
        if from_bytes > 0 {
            match self.touch(from, from_bytes, Touch::Read, site, thread) {
                Err(next) => return next,
                Ok(shared) => self.count(from, from_bytes, (shared, false), site),
            }
        }
        match self.touch(to, bytes, Touch::Start, site, thread) {
            Err(next) => return next,
            Ok(false) => {
                let what = "cp.async to memory that is not shared".into();
                let place = self.nearest(to);
                return self.fail_at(FaultKind::OutOfBounds, site, what, place, None);
            }
            Ok(true) => self.count(to, bytes, (true, true), site),
        }
        let mut copy = Copy {
            thread,
            to,
            from,
            bytes,
            from_bytes,
            group: None,
            moved: false,
        };
        if self.rng.one_in(AT_ONCE) {
            copy.run();
        }
        self.copies.push(copy);
        Next::Go
    }

    pub(in super::super) fn commit(&mut self) {
        let thread = &mut self.threads[self.current];
        let group = thread.groups;
        thread.groups += 1;
        for copy in &mut self.copies {
            if copy.thread == self.current {
                copy.group.get_or_insert(group);
            }
        }
    }

    /// Lets the current thread's copies land but those of its last `left` groups. The rule of
    /// `cp.async.wait_group`: only the waiting thread sees them, so they are stamped as its own.
    pub(in super::super) fn wait(&mut self, left: u32) -> Next {
        if !Meeting::CpAsyncWait.rule().completes_own {
            return Next::Go;
        }
        let keep = self.threads[self.current].groups.saturating_sub(left);
        let (mut landing, rest) = std::mem::take(&mut self.copies)
            .into_iter()
            .partition::<Vec<_>, _>(|copy| {
                copy.thread == self.current && copy.group.is_some_and(|group| group < keep)
            });
        self.copies = rest;
        self.rng.shuffle(&mut landing);
        for mut copy in landing {
            copy.run();
            let landed = self.touch(copy.to, copy.bytes, Touch::Land, Site::UNKNOWN, copy.thread);
            if let Err(next) = landed {
                return next;
            }
        }
        Next::Go
    }

    /// Whether a global write hits what a copy on its way still has to read.
    pub(super) fn overwrites_a_source(&self, at: usize, bytes: usize) -> bool {
        let hits = |c: &Copy| at < c.from + c.from_bytes && c.from < at + bytes;
        self.copies.iter().any(hits)
    }
}

impl Copy {
    fn run(&mut self) {
        if std::mem::replace(&mut self.moved, true) {
            return;
        }
        // SAFETY: both ranges were found in live regions when the copy started: shared memory
        // lives as long as the run, and no global memory is freed during one. They do not overlap:
        // the destination is shared memory and the shadow refuses copies within it that race.
        unsafe {
            core::ptr::copy(self.from as *const u8, self.to as *mut u8, self.from_bytes);
            let rest = self.bytes - self.from_bytes;
            core::ptr::write_bytes((self.to + self.from_bytes) as *mut u8, 0, rest);
        }
    }
}
