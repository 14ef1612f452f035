//! The calls of nccl.h that an operation is.

#![allow(unsafe_code)] // calls of a C library

use std::{ffi::c_int, vec::Vec};

use cudarc::nccl::sys::{cudaStream_t, ncclComm_t, ncclDataType_t, ncclRedOp_t};

use super::{
    library::{Fault, Library, Symbols},
    line::Comm,
};
use crate::{
    DType, ReduceOp,
    plan::CollectiveShape as Shape,
    transport::device::{Job, Span},
};

/// A communicator and the stream that calls are put on.
pub(super) struct Place<'a> {
    symbols: &'a Symbols,
    library: &'a Library,
    comm: ncclComm_t,
    stream: cudaStream_t,
}

/// A call of nccl.h on spans that are as long as what it reads and writes.
#[derive(Clone, Copy)]
pub(super) enum Part {
    AllReduce([Span; 2], ReduceOp),
    /// This many elements of the fold to each rank.
    ReduceScatter([Span; 2], ReduceOp, usize),
    /// This many elements of each rank to everybody.
    AllGather([Span; 2], usize),
    /// The root's input to everybody's output; others' input is not looked at.
    Broadcast([Span; 2], usize),
    /// Everybody's input to the root's output; others' output is not looked at.
    Reduce([Span; 2], ReduceOp, usize),
    Send(Span, usize),
    Recv(Span, usize),
}

impl<'a> Place<'a> {
    pub(super) fn new(comm: &'a Comm, library: &'a Library, stream: u64) -> Self {
        Self {
            symbols: &library.symbols,
            library,
            comm: comm.raw(),
            stream: stream as usize as cudaStream_t,
        }
    }

    fn check(&self, call: &'static str, code: c_int) -> Result<(), Fault> {
        self.library.check(call, code, self.comm).map(drop)
    }

    /// Puts a collective on the stream. Lengths were checked against its shape.
    pub(super) fn collective(&self, job: &Job, me: usize) -> Result<(), Fault> {
        let Job {
            shape,
            redop,
            input,
            output,
            ..
        } = job;
        let (redop, input, output) = (*redop, *input, *output);
        let even = |counts: &[usize]| counts.windows(2).all(|pair| pair[0] == pair[1]);
        let starts = |counts: &[usize]| -> Vec<(usize, core::ops::Range<usize>)> {
            let mut at = 0;
            let ranges = counts.iter().enumerate().map(|(rank, &count)| {
                at += count;
                (rank, at - count..at)
            });
            ranges.collect()
        };
        let apart = |of: Span, counts: &[usize], part: fn(Span, usize) -> Part| -> Vec<Part> {
            let parts = starts(counts).into_iter();
            parts
                .map(|(rank, range)| part(of.part(range), rank))
                .collect()
        };
        let both = [input, output];
        match shape {
            Shape::AllReduce { .. } => self.part(Part::AllReduce(both, redop)),
            Shape::ReduceScatter { counts } if even(counts) => {
                self.part(Part::ReduceScatter(both, redop, counts[0]))
            }
            Shape::ReduceScatter { counts } => {
                let parts = starts(counts).into_iter().map(|(root, range)| {
                    // Elsewhere than at its root the output is not looked at.
                    let output = if root == me {
                        output
                    } else {
                        output.part(0..0)
                    };
                    Part::Reduce([input.part(range), output], redop, root)
                });
                self.group(&parts.collect::<Vec<_>>())
            }
            Shape::AllGather { counts } if even(counts) => {
                self.part(Part::AllGather(both, counts[0]))
            }
            Shape::AllGather { counts } => {
                let parts = starts(counts).into_iter().map(|(root, range)| {
                    let part = output.part(range);
                    let input = if root == me { input } else { part };
                    Part::Broadcast([input, part], root)
                });
                self.group(&parts.collect::<Vec<_>>())
            }
            Shape::Broadcast { root, .. } => {
                let input = if *root == me { input } else { output };
                self.group(&[Part::Broadcast([input, output], *root)])
            }
            Shape::Reduce { root, .. } => self.group(&[Part::Reduce(both, redop, *root)]),
            Shape::Gather { counts, root } => {
                let mut parts = std::vec![Part::Send(input, *root)];
                if *root == me {
                    parts.extend(apart(output, counts, Part::Recv));
                }
                self.group(&parts)
            }
            Shape::Scatter { counts, root } => {
                let mut parts = std::vec![Part::Recv(output, *root)];
                if *root == me {
                    parts.extend(apart(input, counts, Part::Send));
                }
                self.group(&parts)
            }
            Shape::AllToAll { len } => {
                let counts = std::vec![*len; output.len().checked_div(*len).unwrap_or(0)];
                let mut parts = apart(input, &counts, Part::Send);
                parts.extend(apart(output, &counts, Part::Recv));
                self.group(&parts)
            }
            Shape::AllToAllV { send, recv } => {
                let mut parts = apart(input, send, Part::Send);
                parts.extend(apart(output, recv, Part::Recv));
                self.group(&parts)
            }
            Shape::Barrier => Ok(()),
        }
    }

    /// Puts several calls on the stream as one; those of no elements, which nobody waits for, are left out.
    pub(super) fn group(&self, parts: &[Part]) -> Result<(), Fault> {
        let s = self.symbols;
        // SAFETY: no arguments; the group is ended below, whatever happens in between.
        self.check("ncclGroupStart", unsafe { (s.ncclGroupStart)() })?;
        let mut parts = parts.iter().filter(|part| !part.is_empty());
        let outcome = parts.try_for_each(|part| self.part(*part));
        // SAFETY: no arguments; this thread has begun the group above.
        let end = self.check("ncclGroupEnd", unsafe { (s.ncclGroupEnd)() });
        outcome.and(end)
    }

    /// Puts one call on the stream. The communicator is live and settled, as whoever made this place saw, and so
    /// is the stream, which its lane keeps. Spans are memory of the device until the operation is over: who made
    /// them promised it ([`Span::new`]), and an operation that ends early aborts the communicator first.
    fn part(&self, part: Part) -> Result<(), Fault> {
        let (comm, stream, s) = (self.comm, self.stream, self.symbols);
        match part {
            Part::AllReduce([input, output], redop) => {
                let (dtype, fold) = (data_type(output), red_op(output, redop));
                let (from, to, len) = (pointer(input), pointer(output), output.len());
                // SAFETY: `len` elements are read and written; the shape has made both spans as long.
                let code = unsafe { (s.ncclAllReduce)(from, to, len, dtype, fold, comm, stream) };
                self.check("ncclAllReduce", code)
            }
            Part::ReduceScatter([input, output], redop, each) => {
                let (dtype, fold) = (data_type(output), red_op(output, redop));
                let (from, to) = (pointer(input), pointer(output));
                // SAFETY: `each` elements a rank are read and `each` written; all counts of the shape are `each`,
                // the input is their sum, the output this rank's.
                let code =
                    unsafe { (s.ncclReduceScatter)(from, to, each, dtype, fold, comm, stream) };
                self.check("ncclReduceScatter", code)
            }
            Part::AllGather([input, output], each) => {
                let (from, to, dtype) = (pointer(input), pointer(output), data_type(output));
                // SAFETY: `each` elements are read and `each` a rank written; all counts of the shape are `each`,
                // the input is this rank's, the output their sum.
                let code = unsafe { (s.ncclAllGather)(from, to, each, dtype, comm, stream) };
                self.check("ncclAllGather", code)
            }
            Part::Broadcast([input, output], root) => {
                let (from, to, len) = (pointer(input), pointer(output), output.len());
                let (dtype, root) = (data_type(output), root as c_int);
                // SAFETY: `len` elements are written, and read at the root alone, whose input is as long.
                let code = unsafe { (s.ncclBroadcast)(from, to, len, dtype, root, comm, stream) };
                self.check("ncclBroadcast", code)
            }
            Part::Reduce([input, output], redop, root) => {
                let (dtype, fold) = (data_type(input), red_op(input, redop));
                let (from, to, len) = (pointer(input), pointer(output), input.len());
                let root = root as c_int;
                // SAFETY: `len` elements are read, and written at the root alone, whose output is as long.
                let code =
                    unsafe { (s.ncclReduce)(from, to, len, dtype, fold, root, comm, stream) };
                self.check("ncclReduce", code)
            }
            Part::Send(span, peer) => {
                let (from, len, dtype) = (pointer(span), span.len(), data_type(span));
                // SAFETY: the span's own elements are read.
                let code = unsafe { (s.ncclSend)(from, len, dtype, peer as c_int, comm, stream) };
                self.check("ncclSend", code)
            }
            Part::Recv(span, peer) => {
                let (to, len, dtype) = (pointer(span), span.len(), data_type(span));
                // SAFETY: the span's own elements are written; both ends have compared lengths.
                let code = unsafe { (s.ncclRecv)(to, len, dtype, peer as c_int, comm, stream) };
                self.check("ncclRecv", code)
            }
        }
    }
}

impl Part {
    fn is_empty(&self) -> bool {
        match self {
            Part::Send(span, _) | Part::Recv(span, _) | Part::Reduce([span, _], ..) => {
                span.is_empty()
            }
            Part::AllReduce([_, span], _)
            | Part::ReduceScatter([_, span], ..)
            | Part::AllGather([_, span], _)
            | Part::Broadcast([_, span], _) => span.is_empty(),
        }
    }
}

/// The span's address; null for no elements.
fn pointer(span: Span) -> *mut core::ffi::c_void {
    if span.is_empty() {
        return core::ptr::null_mut();
    }
    span.address() as usize as *mut core::ffi::c_void
}

fn data_type(span: Span) -> ncclDataType_t {
    match span.dtype() {
        DType::F64 => ncclDataType_t::ncclFloat64,
        DType::F32 => ncclDataType_t::ncclFloat32,
        DType::Bf16 => ncclDataType_t::ncclBfloat16,
        DType::F16 => ncclDataType_t::ncclFloat16,
        DType::I32 => ncclDataType_t::ncclInt32,
        DType::I64 => ncclDataType_t::ncclInt64,
        DType::U8 | DType::Bool => ncclDataType_t::ncclUint8,
        DType::U32 => ncclDataType_t::ncclUint32,
        DType::U64 => ncclDataType_t::ncclUint64,
    }
}

/// Truths are bytes here, of which the extremes are "all" and "any", however many there are.
fn red_op(span: Span, redop: ReduceOp) -> ncclRedOp_t {
    let dtype = span.dtype();
    match redop {
        ReduceOp::Prod | ReduceOp::Min if dtype == DType::Bool => ncclRedOp_t::ncclMin,
        _ if dtype == DType::Bool => ncclRedOp_t::ncclMax,
        ReduceOp::Sum => ncclRedOp_t::ncclSum,
        ReduceOp::Prod => ncclRedOp_t::ncclProd,
        ReduceOp::Min => ncclRedOp_t::ncclMin,
        ReduceOp::Max => ncclRedOp_t::ncclMax,
        ReduceOp::Avg => ncclRedOp_t::ncclAvg,
    }
}
