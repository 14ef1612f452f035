//! Warp instructions: lanes come one by one, the last one computes for all.

use std::format;

use super::super::order::Meeting;
use super::super::shadow::Touch;
use super::super::warp::{matrix_element, mma, shuffle_source, vote};
use super::*;

impl Run<'_> {
    /// The current lane comes to `instr` with its operands.
    pub(in super::super) fn warp(
        &mut self,
        instr: Instr,
        mask: u32,
        input: In,
        site: Site,
    ) -> Next {
        let (warp, lane) = (self.current / LANES, self.current % LANES);
        let mask = mask & self.lanes_of(warp);
        if mask >> lane & 1 == 0 {
            let what = format!("{} with a mask that lacks its own lane", instr.name());
            return self.fail(FaultKind::Mask, site, what);
        }
        if (instr.is_mma() || instr.is_matrix()) && mask != u32::MAX {
            let what = format!("{} by part of a warp", instr.name());
            return self.fail(FaultKind::Mask, site, what);
        }
        let first = warp * LANES;
        let others = self.warps[warp];
        let alike = others.waits == 0 || others.all == Some((instr, mask));
        if (!alike || others.done & mask != 0)
            && let Some((what, other)) = self.disagrees(instr, mask, first)
        {
            let other = Some(self.stamp(other));
            return self.fail_at(FaultKind::Mask, site, what, None, other);
        }
        let missing = mask & !others.waits & !(1 << lane) != 0;
        let thread = &mut self.threads[self.current];
        (thread.instr, thread.mask, thread.input) = (instr, mask, input);
        if missing {
            return self.park(Wait::Warp, site);
        }
        match self.complete(instr, mask, site) {
            Ok(()) => {
                for l in (0..LANES).filter(|l| mask >> l & 1 == 1) {
                    if first + l != self.current {
                        self.wake(first + l);
                    }
                }
                Next::Go
            }
            Err(next) => next,
        }
    }

    /// What is wrong with the current lane's coming, and with whom.
    fn disagrees(&self, instr: Instr, mask: u32, first: usize) -> Option<(String, usize)> {
        let lane = self.current % LANES;
        for l in 0..(self.threads.len() - first).min(LANES) {
            let other = &self.threads[first + l];
            let waits = other.wait == Wait::Warp;
            let named = mask >> l & 1 == 1;
            let agrees = waits && other.instr == instr && other.mask == mask;
            if waits && !agrees && (named || other.mask >> lane & 1 == 1) {
                let what = format!(
                    "{} with mask {mask:#010x} where lane {l} waits at {} with {:#010x}",
                    instr.name(),
                    other.instr.name(),
                    other.mask
                );
                return Some((what, first + l));
            }
            if named && other.wait == Wait::Done {
                let what = format!("{} names lane {l}, which has returned", instr.name());
                return Some((what, first + l));
            }
        }
        None
    }

    fn complete(&mut self, instr: Instr, mask: u32, site: Site) -> Result<(), Next> {
        let first = self.current / LANES * LANES;
        let mut inputs = [[0; 10]; LANES];
        for l in (0..LANES).filter(|l| mask >> l & 1 == 1) {
            inputs[l] = self.threads[first + l].input;
        }
        self.order(instr, mask, site)?;
        if instr.is_matrix() {
            return self.matrix(instr, first, &inputs, site);
        }
        if instr.is_mma() {
            for (l, out) in mma(instr, &inputs).into_iter().enumerate() {
                self.threads[first + l].output = out;
            }
            if let Some(counting) = &mut self.counting {
                counting.mma();
            }
            return Ok(());
        }
        let voted = match instr {
            Instr::SyncWarp => return Ok(()),
            Instr::ShflIdx | Instr::ShflUp | Instr::ShflDown | Instr::ShflXor => 0,
            _ => vote(instr, mask, &inputs),
        };
        for l in (0..LANES).filter(|l| mask >> l & 1 == 1) {
            self.threads[first + l].output[0] = match instr {
                Instr::ShflIdx | Instr::ShflUp | Instr::ShflDown | Instr::ShflXor => {
                    let [value, arg, width, ..] = inputs[l];
                    if !width.is_power_of_two() || width > 32 {
                        let what = format!("{} with width {width}", instr.name());
                        return Err(self.fail(FaultKind::Mask, site, what));
                    }
                    let source = shuffle_source(instr, l, arg, width);
                    if source == l {
                        value
                    } else if mask >> source & 1 == 1 {
                        inputs[source][0]
                    } else {
                        let what = format!(
                            "{} of lane {l} reads lane {source}, which its mask {mask:#010x} lacks",
                            instr.name()
                        );
                        return Err(self.fail(FaultKind::Mask, site, what));
                    }
                }
                _ => voted,
            };
        }
        Ok(())
    }

    /// What the instruction's row of the table says of memory.
    fn order(&mut self, instr: Instr, mask: u32, site: Site) -> Result<(), Next> {
        let rule = match instr {
            Instr::SyncWarp => Meeting::SyncWarp,
            Instr::ShflIdx | Instr::ShflUp | Instr::ShflDown | Instr::ShflXor => Meeting::Shuffle,
            Instr::Ballot | Instr::Any | Instr::All => Meeting::Vote,
            Instr::LdMatrix | Instr::LdMatrixT => Meeting::LdMatrix,
            Instr::StMatrix | Instr::StMatrixT => Meeting::StMatrix,
            _ if instr.is_mma() => Meeting::Mma,
            _ => Meeting::Reduce,
        }
        .rule();
        if !rule.releases {
            // Nothing to acquire either.
            return Ok(());
        }
        let first = self.current / LANES * LANES;
        let lanes = (0..LANES).filter(|l| mask >> l & 1 == 1);
        let met: Vec<usize> = lanes.map(|l| first + l).collect();
        self.clocks.meet(&met, rule).map_err(|()| {
            let what = "more barriers than the emulator counts".into();
            self.fail(FaultKind::Emulator, site, what)
        })
    }

    /// `ldmatrix` and `stmatrix`: lane 8j + r gives row r of matrix j. Operands are the address in
    /// two halves, the number of matrices, and for stores the registers.
    fn matrix(
        &mut self,
        instr: Instr,
        first: usize,
        inputs: &[In; LANES],
        site: Site,
    ) -> Result<(), Next> {
        let n = inputs[0][2] as usize;
        let store = matches!(instr, Instr::StMatrix | Instr::StMatrixT);
        let trans = matches!(instr, Instr::LdMatrixT | Instr::StMatrixT);
        let row = |l: usize| inputs[l][0] as usize | (inputs[l][1] as usize) << 32;
        let arena = self.arena.as_ptr() as usize;
        for j in 0..n {
            for l in 8 * j..8 * j + 8 {
                self.matrix_row(row(l), first + l, store, site)?;
            }
            let rows: Vec<usize> = (8 * j..8 * j + 8).map(|l| row(l) - arena).collect();
            if let Some(counting) = &mut self.counting {
                counting.phase(&rows);
            }
        }
        for l in 0..LANES {
            for j in 0..n {
                for h in 0..2 {
                    let (j, r, c) = matrix_element(trans, l, j, h);
                    let at = (row(8 * j + r) + 2 * c) as *mut u16;
                    // SAFETY: the row's 16 bytes were found in shared memory just above, and are
                    // a multiple of 16.
                    unsafe {
                        if store {
                            at.write((inputs[l][3 + j] >> (16 * h)) as u16);
                        } else {
                            let out = &mut self.threads[first + l].output[j];
                            *out = *out & !(0xffff << (16 * h)) | u32::from(at.read()) << (16 * h);
                        }
                    }
                }
            }
        }
        Ok(())
    }

    /// One row's 16 bytes, touched by the lane that gave its address.
    fn matrix_row(&mut self, at: usize, lane: usize, store: bool, site: Site) -> Result<(), Next> {
        if !at.is_multiple_of(16) {
            let what = format!("matrix row at {at:#x}, no multiple of 16");
            let place = self.nearest(at);
            return Err(self.fail_at(FaultKind::Misaligned, site, what, place, None));
        }
        let touch = if store { Touch::Write } else { Touch::Read };
        if !self.touch(at, 16, touch, site, lane)? {
            let what = "matrix row in memory that is not shared".into();
            let place = self.nearest(at);
            return Err(self.fail_at(FaultKind::OutOfBounds, site, what, place, None));
        }
        Ok(())
    }
}
