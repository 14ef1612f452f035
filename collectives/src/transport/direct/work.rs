//! Duties performed on the memory of all ranks, known by address.
#![allow(unsafe_code)]

use std::vec::Vec;

use super::{
    duty::{Duty, To},
    raw::{self, Fold},
};
use crate::{DType, Element, ReduceOp};

/// Input and output of one rank in one call.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Memory {
    pub(super) input: *const u8,
    pub(super) input_bytes: usize,
    pub(super) output: *mut u8,
    pub(super) output_bytes: usize,
    dtype: DType,
}

// SAFETY: an address is a number; what it leads to is used as the protocol says.
unsafe impl Send for Memory {}

impl Memory {
    /// Where a call's elements lie.
    pub(crate) fn new<E: Element>(
        (input, input_len): (*const E, usize),
        (output, output_len): (*mut E, usize),
    ) -> Self {
        Self {
            input: input.cast(),
            input_bytes: input_len * size_of::<E>(),
            output: output.cast(),
            output_bytes: output_len * size_of::<E>(),
            dtype: E::DTYPE,
        }
    }

    /// Bytes of an element.
    pub(super) fn width(&self) -> usize {
        self.dtype.bytes()
    }
}

/// Inputs and outputs by rank; empty where this rank has no business.
#[derive(Debug)]
pub(super) struct Hands<E> {
    ins: Vec<(*const E, usize)>,
    outs: Vec<(*mut E, usize)>,
}

/// A duty reaches beyond what a rank has shown; its rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Beyond(pub(super) usize);

impl<E: Element> Hands<E> {
    pub(super) fn new(world: usize) -> Self {
        Self {
            ins: Vec::with_capacity(world),
            outs: Vec::with_capacity(world),
        }
    }

    /// The next rank's input and output, in bytes.
    pub(super) fn add(&mut self, input: (*const u8, usize), output: (*mut u8, usize)) {
        self.ins.push((input.0.cast(), input.1 / size_of::<E>()));
        self.outs.push((output.0.cast(), output.1 / size_of::<E>()));
    }

    /// Performs a duty.
    ///
    /// # Safety
    /// What was added is readable and writable as far as it goes, aligned, and as long as this runs nobody
    /// else writes what the duty reads or touches what it writes.
    pub(super) unsafe fn perform(&self, op: ReduceOp, duty: Duty) -> Result<(), Beyond> {
        match duty {
            Duty::Fold { len: 0, .. } | Duty::Copy { len: 0, .. } => Ok(()),
            Duty::Fold { from, len, to } => {
                // Of as many as there mostly are no memory need be allocated.
                let (mut few_ins, mut few_outs) =
                    ([core::ptr::null(); 8], [core::ptr::null_mut(); 8]);
                let (mut many_ins, mut many_outs) = (Vec::new(), Vec::new());
                let n = self.ins.len();
                let ins = room(&mut few_ins, &mut many_ins, n, core::ptr::null());
                for (rank, slot) in ins.iter_mut().enumerate() {
                    *slot = self.input(rank, from, len)?;
                }
                let outs = room(&mut few_outs, &mut many_outs, n, core::ptr::null_mut());
                let mut count = 0;
                let (ranks, at) = match to {
                    To::All(at) => (0..n, at),
                    To::One(rank, at) => (rank..rank + 1, at),
                };
                for rank in ranks {
                    if matches!(to, To::All(_)) && self.outs[rank].1 == 0 {
                        continue;
                    }
                    outs[count] = self.output(rank, at, len)?;
                    count += 1;
                }
                let fold = Fold { op, world: n, len };
                // SAFETY: the bounds were looked at; the rest is the caller's word.
                unsafe { raw::fold(fold, ins, &outs[..count]) };
                Ok(())
            }
            Duty::Copy {
                source,
                from,
                target,
                at,
                len,
            } => {
                let from = self.input(source, from, len)?;
                let to = self.output(target, at, len)?;
                if !core::ptr::eq(from, to) {
                    // SAFETY: as above; two ranks' memory, or one rank's input and output, which lie
                    // apart where they are not the same.
                    unsafe { raw::copy(from.cast(), to.cast(), len * size_of::<E>()) };
                }
                Ok(())
            }
        }
    }

    fn input(&self, rank: usize, from: usize, len: usize) -> Result<*const E, Beyond> {
        let (start, room) = self.ins[rank];
        if from + len > room {
            return Err(Beyond(rank));
        }
        // SAFETY: within what was added.
        Ok(unsafe { start.add(from) })
    }

    fn output(&self, rank: usize, at: usize, len: usize) -> Result<*mut E, Beyond> {
        let (start, room) = self.outs[rank];
        if at + len > room {
            return Err(Beyond(rank));
        }
        // SAFETY: within what was added.
        Ok(unsafe { start.add(at) })
    }
}

fn room<'a, T: Copy>(few: &'a mut [T], many: &'a mut Vec<T>, n: usize, none: T) -> &'a mut [T] {
    if n <= few.len() {
        return &mut few[..n];
    }
    many.resize(n, none);
    many
}
