//! Types and folds by the numbers of nccl.h, on raw bytes.

use std::ffi::c_int;

use half::{bf16, f16};

/// The types that the tests use.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    U8,
    I32,
    U32,
    I64,
    U64,
    F16,
    F32,
    F64,
    Bf16,
}

impl Kind {
    pub(crate) fn of(code: c_int) -> Option<Self> {
        Some(match code {
            1 => Self::U8,
            2 => Self::I32,
            3 => Self::U32,
            4 => Self::I64,
            5 => Self::U64,
            6 => Self::F16,
            7 => Self::F32,
            8 => Self::F64,
            9 => Self::Bf16,
            _ => return None,
        })
    }

    pub(crate) fn bytes(self) -> usize {
        match self {
            Self::U8 => 1,
            Self::F16 | Self::Bf16 => 2,
            Self::I32 | Self::U32 | Self::F32 => 4,
            Self::I64 | Self::U64 | Self::F64 => 8,
        }
    }
}

/// The folds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Fold {
    Sum,
    Prod,
    Max,
    Min,
    Avg,
}

impl Fold {
    pub(crate) fn of(code: c_int) -> Option<Self> {
        [Self::Sum, Self::Prod, Self::Max, Self::Min, Self::Avg]
            .get(usize::try_from(code).ok()?)
            .copied()
    }
}

/// The fold of all `inputs`, which are as long as each other: from the last rank to the first.
pub(crate) fn fold(kind: Kind, op: Fold, inputs: &[Vec<u8>]) -> Vec<u8> {
    match kind {
        Kind::U8 => whole(
            op,
            inputs,
            u8::from_le_bytes,
            u8::to_le_bytes,
            u8::wrapping_add,
            u8::wrapping_mul,
            |a, n| a / n as u8,
        ),
        Kind::I32 => whole(
            op,
            inputs,
            i32::from_le_bytes,
            i32::to_le_bytes,
            i32::wrapping_add,
            i32::wrapping_mul,
            |a, n| a / n as i32,
        ),
        Kind::I64 => whole(
            op,
            inputs,
            i64::from_le_bytes,
            i64::to_le_bytes,
            i64::wrapping_add,
            i64::wrapping_mul,
            |a, n| a / n as i64,
        ),
        Kind::U32 => whole(
            op,
            inputs,
            u32::from_le_bytes,
            u32::to_le_bytes,
            u32::wrapping_add,
            u32::wrapping_mul,
            |a, n| a / n as u32,
        ),
        Kind::U64 => whole(
            op,
            inputs,
            u64::from_le_bytes,
            u64::to_le_bytes,
            u64::wrapping_add,
            u64::wrapping_mul,
            |a, n| a / n as u64,
        ),
        Kind::F32 => float(
            op,
            inputs,
            |b| f64::from(f32::from_le_bytes(b)),
            |x| (x as f32).to_le_bytes(),
        ),
        Kind::F64 => float(op, inputs, f64::from_le_bytes, f64::to_le_bytes),
        Kind::F16 => float(
            op,
            inputs,
            |b| f16::from_le_bytes(b).to_f64(),
            |x| f16::from_f64(x).to_le_bytes(),
        ),
        Kind::Bf16 => float(
            op,
            inputs,
            |b| bf16::from_le_bytes(b).to_f64(),
            |x| bf16::from_f64(x).to_le_bytes(),
        ),
    }
}

fn whole<T: Copy + Ord, const N: usize>(
    op: Fold,
    inputs: &[Vec<u8>],
    read: impl Fn([u8; N]) -> T,
    write: impl Fn(T) -> [u8; N],
    add: impl Fn(T, T) -> T,
    mul: impl Fn(T, T) -> T,
    div: impl Fn(T, usize) -> T,
) -> Vec<u8> {
    each(inputs, |parts: &mut dyn Iterator<Item = [u8; N]>| {
        let folded = parts.map(&read).reduce(|a, b| match op {
            Fold::Sum | Fold::Avg => add(a, b),
            Fold::Prod => mul(a, b),
            Fold::Max => a.max(b),
            Fold::Min => a.min(b),
        });
        folded.map(|x| {
            write(if op == Fold::Avg {
                div(x, inputs.len())
            } else {
                x
            })
        })
    })
}

/// Each step is rounded to the type; a mean is scaled before it is summed; a NaN loses.
fn float<const N: usize>(
    op: Fold,
    inputs: &[Vec<u8>],
    read: impl Fn([u8; N]) -> f64,
    write: impl Fn(f64) -> [u8; N],
) -> Vec<u8> {
    let scale = if op == Fold::Avg {
        1.0 / inputs.len() as f64
    } else {
        1.0
    };
    let rounded = |x: f64| read(write(x));
    each(inputs, |parts: &mut dyn Iterator<Item = [u8; N]>| {
        let folded = parts.map(|b| rounded(read(b) * scale)).reduce(|a, b| {
            rounded(match op {
                Fold::Sum | Fold::Avg => a + b,
                Fold::Prod => a * b,
                Fold::Max => a.max(b),
                Fold::Min => a.min(b),
            })
        });
        folded.map(&write)
    })
}

fn each<const N: usize>(
    inputs: &[Vec<u8>],
    fold: impl Fn(&mut dyn Iterator<Item = [u8; N]>) -> Option<[u8; N]>,
) -> Vec<u8> {
    let len = inputs.first().map_or(0, Vec::len) / N;
    let mut out = Vec::with_capacity(len * N);
    for i in 0..len {
        let part = |input: &Vec<u8>| {
            let mut bytes = [0; N];
            bytes.copy_from_slice(&input[i * N..(i + 1) * N]);
            bytes
        };
        out.extend(fold(&mut inputs.iter().rev().map(part)).unwrap_or([0; N]));
    }
    out
}
