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

/// A call of a group.
#[derive(Clone, Copy)]
pub(super) enum Part {
    Send(Span, usize),
    Recv(Span, usize),
    /// The root's input to everybody's output.
    Broadcast([Span; 2], usize),
    /// Everybody's input to the root's output.
    Reduce([Span; 2], ReduceOp, usize),
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
        let (from, to) = (pointer(input).cast_const(), pointer(output));
        let (dtype, fold) = (data_type(output.dtype()), red_op(output.dtype(), redop));
        let s = self.symbols;
        // SAFETY: of every call below. The communicator is live and settled, the addresses are of spans whose
        // maker promised that they are this device's memory until the operation is over, and they are as
        // long as the shape, and so the count given here, says.
        match shape {
            Shape::AllReduce { len } => self.check("ncclAllReduce", unsafe {
                (s.ncclAllReduce)(from, to, *len, dtype, fold, self.comm, self.stream)
            }),
            Shape::ReduceScatter { counts } if even(counts) => {
                self.check("ncclReduceScatter", unsafe {
                    (s.ncclReduceScatter)(from, to, counts[0], dtype, fold, self.comm, self.stream)
                })
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
            Shape::AllGather { counts } if even(counts) => self.check("ncclAllGather", unsafe {
                (s.ncclAllGather)(from, to, counts[0], dtype, self.comm, self.stream)
            }),
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
            Shape::Reduce { root, .. } => {
                self.group(&[Part::Reduce([input, output], redop, *root)])
            }
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
        // SAFETY: no arguments; the end follows below whatever happens.
        self.check("ncclGroupStart", unsafe { (s.ncclGroupStart)() })?;
        let parts = parts.iter().map(|part| self.part(*part));
        let outcome = parts.collect::<Result<Vec<()>, Fault>>();
        // SAFETY: as above.
        let end = self.check("ncclGroupEnd", unsafe { (s.ncclGroupEnd)() });
        outcome.and(end)
    }

    fn part(&self, part: Part) -> Result<(), Fault> {
        let (comm, stream, s) = (self.comm, self.stream, self.symbols);
        // SAFETY: of every call below, as in `collective`.
        match part {
            Part::Send(span, _)
            | Part::Recv(span, _)
            | Part::Broadcast([_, span], _)
            | Part::Reduce([span, _], ..)
                if span.is_empty() =>
            {
                Ok(())
            }
            Part::Send(span, peer) => self.check("ncclSend", unsafe {
                let dtype = data_type(span.dtype());
                (s.ncclSend)(
                    pointer(span),
                    span.len(),
                    dtype,
                    peer as c_int,
                    comm,
                    stream,
                )
            }),
            Part::Recv(span, peer) => self.check("ncclRecv", unsafe {
                let dtype = data_type(span.dtype());
                (s.ncclRecv)(
                    pointer(span),
                    span.len(),
                    dtype,
                    peer as c_int,
                    comm,
                    stream,
                )
            }),
            Part::Broadcast([input, output], root) => self.check("ncclBroadcast", unsafe {
                let (from, dtype) = (pointer(input).cast_const(), data_type(output.dtype()));
                (s.ncclBroadcast)(
                    from,
                    pointer(output),
                    output.len(),
                    dtype,
                    root as c_int,
                    comm,
                    stream,
                )
            }),
            Part::Reduce([input, output], redop, root) => self.check("ncclReduce", unsafe {
                let (from, dtype) = (pointer(input).cast_const(), data_type(input.dtype()));
                let (to, fold) = (pointer(output), red_op(input.dtype(), redop));
                (s.ncclReduce)(
                    from,
                    to,
                    input.len(),
                    dtype,
                    fold,
                    root as c_int,
                    comm,
                    stream,
                )
            }),
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

fn data_type(dtype: DType) -> ncclDataType_t {
    match dtype {
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
fn red_op(dtype: DType, redop: ReduceOp) -> ncclRedOp_t {
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
