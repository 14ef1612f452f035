//! Duties performed on the memory of all ranks, known by address.
#![allow(unsafe_code)]

use std::vec::Vec;

use super::{
    duty::{Duty, To},
    raw::{self, Fold, Target},
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
    ins: Few<(*const E, usize)>,
    outs: Few<(*mut E, usize)>,
}

/// A list that needs no allocation while it is as short as it mostly is.
#[derive(Debug)]
struct Few<T> {
    few: [T; 8],
    len: usize,
    /// All of them, where they are more.
    many: Vec<T>,
}

impl<T: Copy> Few<T> {
    fn new(most: usize, none: T) -> Self {
        Self {
            few: [none; 8],
            len: 0,
            many: Vec::with_capacity(if most > 8 { most } else { 0 }),
        }
    }

    fn push(&mut self, item: T) {
        if self.many.capacity() > 0 {
            self.many.push(item);
        } else {
            self.few[self.len] = item;
            self.len += 1;
        }
    }

    fn all(&self) -> &[T] {
        if self.many.capacity() > 0 {
            &self.many
        } else {
            &self.few[..self.len]
        }
    }
}

/// A duty reaches beyond what a rank has shown; its rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Beyond(pub(super) usize);

impl<E: Element> Hands<E> {
    pub(super) fn new(world: usize) -> Self {
        Self {
            ins: Few::new(world, (core::ptr::null(), 0)),
            outs: Few::new(world, (core::ptr::null_mut(), 0)),
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
                let n = self.ins.all().len();
                let mut ins = Few::new(n, core::ptr::null());
                let mut outs = Few::new(n, (core::ptr::null_mut(), Target::Caches));
                for rank in 0..n {
                    ins.push(self.input(rank, from, len)?);
                }
                let (ranks, at) = match to {
                    To::All(at) => (0..n, at),
                    To::One(rank, at) => (rank..rank + 1, at),
                };
                for rank in ranks {
                    if matches!(to, To::One(..)) || self.outs.all()[rank].1 > 0 {
                        outs.push((self.output(rank, at, len)?, self.target(rank)));
                    }
                }
                let fold = Fold { op, world: n, len };
                // SAFETY: the bounds were looked at; the rest is the caller's word.
                unsafe { raw::fold(fold, ins.all(), outs.all()) };
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
                    unsafe {
                        raw::copy_into(
                            self.target(target),
                            from.cast(),
                            to.cast(),
                            len * size_of::<E>(),
                        )
                    };
                }
                Ok(())
            }
        }
    }

    /// How a rank's output is written.
    fn target(&self, rank: usize) -> Target {
        let (output, len) = self.outs.all()[rank];
        let apart = !core::ptr::eq(self.ins.all()[rank].0, output);
        if apart && raw::goes_past(len * size_of::<E>(), self.ins.all().len()) {
            Target::Memory
        } else {
            Target::Caches
        }
    }

    fn input(&self, rank: usize, from: usize, len: usize) -> Result<*const E, Beyond> {
        let (start, room) = self.ins.all()[rank];
        if from + len > room {
            return Err(Beyond(rank));
        }
        // SAFETY: within what was added.
        Ok(unsafe { start.add(from) })
    }

    fn output(&self, rank: usize, at: usize, len: usize) -> Result<*mut E, Beyond> {
        let (start, room) = self.outs.all()[rank];
        if at + len > room {
            return Err(Beyond(rank));
        }
        // SAFETY: within what was added.
        Ok(unsafe { start.add(at) })
    }
}
