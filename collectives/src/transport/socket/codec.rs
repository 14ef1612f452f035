//! Calls and errors as bytes, and back, for peers that may send anything.
//!
//! Numbers are little-endian; a text is its length (u32) and its bytes. Reading never panics, never
//! allocates more than the bytes at hand, and gives `None` for what it does not understand.

use std::{
    boxed::Box,
    string::{String, ToString},
    time::Duration,
    vec::Vec,
};

use crate::{
    DType, Error, Order, ReduceOp,
    plan::Operation,
    transport::{Call, Site},
};

const DTYPES: [DType; 10] = DType::ALL;
const OPERATIONS: [Operation; 12] = [
    Operation::AllReduce,
    Operation::ReduceScatter,
    Operation::AllGather,
    Operation::Broadcast,
    Operation::Reduce,
    Operation::Gather,
    Operation::Scatter,
    Operation::AllToAll,
    Operation::AllToAllV,
    Operation::Barrier,
    Operation::Send,
    Operation::Recv,
];
const REDOPS: [ReduceOp; 5] = [
    ReduceOp::Sum,
    ReduceOp::Prod,
    ReduceOp::Min,
    ReduceOp::Max,
    ReduceOp::Avg,
];
const ORDERS: [Order; 2] = [Order::Rank, Order::Any];
const NONE: u8 = 0xff;

/// Bytes of a call without its number.
pub(super) const CALL: usize = 32 + 5 + Site::PATH;

/// Appends numbers and texts.
#[derive(Debug, Default)]
pub(super) struct Writer(pub(super) Vec<u8>);

impl Writer {
    pub(super) fn u8(&mut self, x: u8) {
        self.0.push(x);
    }
    pub(super) fn u32(&mut self, x: u32) {
        self.0.extend(x.to_le_bytes());
    }
    pub(super) fn u64(&mut self, x: u64) {
        self.0.extend(x.to_le_bytes());
    }
    /// A text, or its first part where it is longer than any reader takes.
    pub(super) fn text(&mut self, x: &str) {
        let mut len = x.len().min(MAX_TEXT);
        while !x.is_char_boundary(len) {
            len -= 1;
        }
        self.bytes(&x.as_bytes()[..len]);
    }
    pub(super) fn bytes(&mut self, x: &[u8]) {
        self.u32(x.len() as u32);
        self.0.extend(x);
    }
}

const MAX_TEXT: usize = 16 << 10;

/// Takes numbers and texts off a slice.
#[derive(Debug)]
pub(super) struct Reader<'a>(pub(super) &'a [u8]);

impl<'a> Reader<'a> {
    pub(super) fn take(&mut self, n: usize) -> Option<&'a [u8]> {
        let (head, rest) = self.0.split_at_checked(n)?;
        self.0 = rest;
        Some(head)
    }
    fn array<const N: usize>(&mut self) -> Option<[u8; N]> {
        self.take(N)?.try_into().ok()
    }
    pub(super) fn u8(&mut self) -> Option<u8> {
        self.array::<1>().map(|[x]| x)
    }
    pub(super) fn u32(&mut self) -> Option<u32> {
        self.array().map(u32::from_le_bytes)
    }
    pub(super) fn u64(&mut self) -> Option<u64> {
        self.array().map(u64::from_le_bytes)
    }
    pub(super) fn usize(&mut self) -> Option<usize> {
        usize::try_from(self.u64()?).ok()
    }
    pub(super) fn bytes(&mut self) -> Option<&'a [u8]> {
        let len = self.u32()? as usize;
        self.take(len)
    }
    pub(super) fn text(&mut self) -> Option<String> {
        core::str::from_utf8(self.bytes()?)
            .ok()
            .map(ToString::to_string)
    }
}

pub(super) fn dtype_code(dtype: DType) -> u8 {
    match dtype {
        DType::F64 => 0,
        DType::F32 => 1,
        DType::Bf16 => 2,
        DType::F16 => 3,
        DType::I32 => 4,
        DType::I64 => 5,
        DType::U8 => 6,
        DType::U32 => 7,
        DType::U64 => 8,
        DType::Bool => 9,
    }
}

pub(super) fn dtype(code: u8) -> Option<DType> {
    DTYPES.get(usize::from(code)).copied()
}

fn operation_code(operation: Operation) -> u8 {
    match operation {
        Operation::AllReduce => 0,
        Operation::ReduceScatter => 1,
        Operation::AllGather => 2,
        Operation::Broadcast => 3,
        Operation::Reduce => 4,
        Operation::Gather => 5,
        Operation::Scatter => 6,
        Operation::AllToAll => 7,
        Operation::AllToAllV => 8,
        Operation::Barrier => 9,
        Operation::Send => 10,
        Operation::Recv => 11,
    }
}

fn redop_code(redop: Option<ReduceOp>) -> u8 {
    match redop {
        Some(ReduceOp::Sum) => 0,
        Some(ReduceOp::Prod) => 1,
        Some(ReduceOp::Min) => 2,
        Some(ReduceOp::Max) => 3,
        Some(ReduceOp::Avg) => 4,
        None => NONE,
    }
}

fn order_code(order: Order) -> u8 {
    match order {
        Order::Rank => 0,
        Order::Any => 1,
    }
}

/// A call without its number, always [`CALL`] bytes.
pub(super) fn put_call(w: &mut Writer, call: &Call) {
    w.u8(operation_code(call.operation));
    w.u8(dtype_code(call.dtype));
    w.u8(redop_code(call.redop));
    w.u8(order_code(call.order));
    w.u32(call.root.map_or(u32::MAX, |root| root as u32));
    w.u64(call.len as u64);
    w.u64(call.counts);
    w.u64(0);
    let path = call.site.as_ref().map_or("", Site::path);
    w.u32(call.site.map_or(0, |site| site.line()));
    w.u8(if call.site.is_some() {
        path.len() as u8
    } else {
        NONE
    });
    let at = w.0.len();
    w.0.extend(path.as_bytes());
    w.0.resize(at + Site::PATH, 0);
}

pub(super) fn get_call(r: &mut Reader<'_>, sequence: u64) -> Option<Call> {
    let operation = *OPERATIONS.get(usize::from(r.u8()?))?;
    let dtype = dtype(r.u8()?)?;
    let redop = match r.u8()? {
        NONE => None,
        code => Some(*REDOPS.get(usize::from(code))?),
    };
    let order = *ORDERS.get(usize::from(r.u8()?))?;
    let root = match r.u32()? {
        u32::MAX => None,
        root => Some(root as usize),
    };
    let (len, counts) = (r.usize()?, r.u64()?);
    r.u64()?;
    let (line, path_len) = (r.u32()?, r.u8()?);
    let path = r.take(Site::PATH)?;
    let site = match path_len {
        NONE => None,
        n => {
            let path = core::str::from_utf8(path.get(..usize::from(n))?).ok()?;
            Some(Site::new(path, line))
        }
    };
    Some(Call {
        sequence,
        operation,
        dtype,
        len,
        counts,
        root,
        redop,
        order,
        site,
    })
}

/// An error for another rank. What only this rank can have caused goes as its sentence.
pub(super) fn put_error(w: &mut Writer, error: &Error) {
    match error {
        Error::Aborted { rank } => {
            w.u8(0);
            w.u64(*rank as u64);
        }
        Error::PeerLost { rank, reason } => {
            w.u8(1);
            w.u64(*rank as u64);
            w.text(reason);
        }
        Error::Panicked { rank, message } => {
            w.u8(2);
            w.u64(*rank as u64);
            w.text(message);
        }
        Error::Mismatch {
            group,
            sequence,
            first,
            first_call,
            second,
            second_call,
        } => {
            w.u8(3);
            w.text(group);
            w.u64(*sequence);
            w.u64(*first as u64);
            put_call(w, first_call);
            w.u64(*second as u64);
            put_call(w, second_call);
        }
        Error::Message {
            group,
            rank,
            peer,
            op,
            expected,
            got,
        } => {
            w.u8(4);
            w.text(group);
            w.u64(*rank as u64);
            w.u64(*peer as u64);
            w.text(op);
            w.text(expected);
            w.text(got);
        }
        Error::Timeout {
            group,
            rank,
            op,
            sequence,
            peer,
            what,
            waited,
        } => {
            w.u8(5);
            w.text(group);
            w.u64(*rank as u64);
            w.text(op);
            w.u64(*sequence);
            w.u64(peer.map_or(u64::MAX, |peer| peer as u64));
            w.text(what);
            w.u64(waited.as_nanos() as u64);
        }
        other => {
            w.u8(6);
            w.text(&other.to_string());
        }
    }
}

pub(super) fn get_error(r: &mut Reader<'_>) -> Option<Error> {
    Some(match r.u8()? {
        0 => Error::Aborted { rank: r.usize()? },
        1 => Error::PeerLost {
            rank: r.usize()?,
            reason: r.text()?,
        },
        2 => Error::Panicked {
            rank: r.usize()?,
            message: r.text()?,
        },
        3 => {
            let (group, sequence) = (r.text()?, r.u64()?);
            Error::Mismatch {
                group,
                sequence,
                first: r.usize()?,
                first_call: Box::new(get_call(r, sequence)?),
                second: r.usize()?,
                second_call: Box::new(get_call(r, sequence)?),
            }
        }
        4 => Error::Message {
            group: r.text()?,
            rank: r.usize()?,
            peer: r.usize()?,
            op: op(&r.text()?),
            expected: r.text()?,
            got: r.text()?,
        },
        5 => Error::Timeout {
            group: r.text()?,
            rank: r.usize()?,
            op: op(&r.text()?),
            sequence: r.u64()?,
            peer: Some(r.u64()?)
                .filter(|&p| p != u64::MAX)
                .map(|p| p as usize),
            what: r.text()?,
            waited: Duration::from_nanos(r.u64()?),
        },
        6 => Error::Gate(r.text()?),
        _ => return None,
    })
}

/// The name of an operation as this program has it.
fn op(text: &str) -> &'static str {
    let names = OPERATIONS.map(Operation::name);
    let known = names.into_iter().chain(["sendrecv"]);
    known
        .into_iter()
        .find(|name| *name == text)
        .unwrap_or("an operation")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_are_places_in_their_tables() {
        for (i, x) in DTYPES.into_iter().enumerate() {
            assert_eq!(usize::from(dtype_code(x)), i);
        }
        for (i, x) in OPERATIONS.into_iter().enumerate() {
            assert_eq!(usize::from(operation_code(x)), i);
        }
        for (i, x) in REDOPS.into_iter().enumerate() {
            assert_eq!(usize::from(redop_code(Some(x))), i);
        }
        for (i, x) in ORDERS.into_iter().enumerate() {
            assert_eq!(usize::from(order_code(x)), i);
        }
    }

    fn call() -> Call {
        Call {
            sequence: 9,
            operation: Operation::Reduce,
            dtype: DType::Bf16,
            len: 77,
            counts: 5,
            root: Some(3),
            redop: Some(ReduceOp::Max),
            order: Order::Any,
            site: Some(Site::new("src/a.rs", 12)),
        }
    }

    #[test]
    fn errors_come_back() {
        let group = String::from("tp");
        let errors = [
            Error::Aborted { rank: 3 },
            Error::PeerLost {
                rank: 1,
                reason: "gone".into(),
            },
            Error::Panicked {
                rank: 1,
                message: "oh".into(),
            },
            Error::Mismatch {
                group: group.clone(),
                sequence: 9,
                first: 0,
                first_call: Box::new(call()),
                second: 1,
                second_call: Box::new(Call {
                    site: None,
                    ..call()
                }),
            },
            Error::Message {
                group: group.clone(),
                rank: 1,
                peer: 2,
                op: "recv",
                expected: "a".into(),
                got: "b".into(),
            },
            Error::Timeout {
                group,
                rank: 1,
                op: "all_reduce",
                sequence: 4,
                peer: None,
                what: "x".into(),
                waited: Duration::from_millis(7),
            },
        ];
        for error in errors {
            let mut w = Writer::default();
            put_error(&mut w, &error);
            for cut in 0..w.0.len() {
                assert_eq!(get_error(&mut Reader(&w.0[..cut])), None);
            }
            let back = get_error(&mut Reader(&w.0)).unwrap();
            assert_eq!(
                (back.to_string(), &back),
                (error.to_string(), &error),
                "sites included"
            );
        }
    }
}
