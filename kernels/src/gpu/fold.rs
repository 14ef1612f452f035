//! The fold of collectives where the parts lie: cuda/fold.cu.

use alloc::format;
use alloc::string::String;
use alloc::vec::Vec;
use core::any::TypeId;

use super::{Gpu, GpuMut, GpuRef, THREADS, len};
use crate::error::need;
use crate::launch::{Arg, Call, Launch, Stream};
use crate::{Data, Error, bf16};

/// Parts that one launch takes; more go on from its result, but for bf16, whose sum would be
/// rounded in between.
pub const PARTS: usize = 16;

/// How parts become one, from the left; bf16 in f32, rounded once.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fold {
    /// The sum; integers wrap.
    Sum,
    /// The product; integers wrap.
    Prod,
    /// The least; a NaN wins, of equals the left stays.
    Min,
    /// The greatest; likewise.
    Max,
    /// The sum divided by the number of parts; integers towards zero.
    Mean,
}

/// A type that there are fold kernels for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Folded {
    name: &'static str,
    bytes: usize,
}

impl Folded {
    const ALL: [Self; 7] = [
        Self::new("f32", 4),
        Self::new("f64", 8),
        Self::new("bf16", 2),
        Self::new("i32", 4),
        Self::new("u32", 4),
        Self::new("i64", 8),
        Self::new("u64", 8),
    ];

    const fn new(name: &'static str, bytes: usize) -> Self {
        Self { name, bytes }
    }

    /// That of this name, if there is one.
    #[cfg(feature = "wire")]
    pub(crate) fn named(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|t| t.name == name)
    }

    fn of<T: Data>() -> Option<Self> {
        let types = [
            TypeId::of::<f32>(),
            TypeId::of::<f64>(),
            TypeId::of::<bf16>(),
            TypeId::of::<i32>(),
            TypeId::of::<u32>(),
            TypeId::of::<i64>(),
            TypeId::of::<u64>(),
        ];
        let at = types.iter().position(|t| *t == TypeId::of::<T>())?;
        Some(Self::ALL[at])
    }

    /// Whether so many parts can be folded: rounded once.
    pub(crate) fn takes(self, parts: usize) -> bool {
        self.name != "bf16" || parts <= PARTS
    }

    /// Puts `out[i] = parts[0][i] op parts[1][i] ...` on a stream, `n` elements each.
    pub(crate) fn launch<L: Launch>(
        self,
        (launcher, stream): (&L, Stream),
        op: Fold,
        parts: &[u64],
        (out, n): (u64, usize),
    ) -> Result<(), Error> {
        let (Some((&first, rest)), true) = (parts.split_first(), n > 0) else {
            return Ok(());
        };
        let (function, pack) = self.function(parts, out, n);
        let number = match op {
            Fold::Sum | Fold::Mean => 0,
            Fold::Prod => 1,
            Fold::Min => 2,
            Fold::Max => 3,
        };
        let mut from = first;
        let mut launches = rest.chunks(PARTS - 1).peekable();
        // Of one part there is still its copy, and a mean.
        let mut next = launches.next().unwrap_or_default();
        loop {
            let last = launches.peek().is_none();
            let divisor = if last && op == Fold::Mean {
                parts.len()
            } else {
                1
            };
            let read = core::iter::once(from).chain(next.iter().copied());
            let mut args: Vec<Arg> = read.map(Arg::Ptr).collect();
            let ranks = args.len() as i32;
            args.resize(PARTS, Arg::Ptr(from));
            args.extend([Arg::Ptr(out), len(n), Arg::I32(ranks), Arg::I32(number)]);
            args.push(len(divisor));
            let blocks = n.div_ceil(pack).div_ceil(THREADS as usize);
            launcher.launch(
                stream,
                &Call {
                    module: "fold",
                    function: &function,
                    grid: [u32::try_from(blocks).unwrap_or(u32::MAX), 1, 1],
                    block: [THREADS, 1, 1],
                    shared: 0,
                    args: &args,
                },
            )?;
            let Some(more) = launches.next() else {
                return Ok(());
            };
            (from, next) = (out, more);
        }
    }

    /// The kernel, and how many elements a thread of it takes.
    fn function(self, parts: &[u64], out: u64, n: usize) -> (String, usize) {
        let (name, pack) = (self.name, 16 / self.bytes);
        let mut ptrs = parts.iter().chain([&out]);
        let wide = n.is_multiple_of(pack) && ptrs.all(|p| p.is_multiple_of(16));
        match wide {
            true => (format!("fold_{name}_wide"), pack),
            false => (format!("fold_{name}"), 1),
        }
    }
}

impl<L: Launch> Gpu<L> {
    /// `out[i] = parts[0][i] op parts[1][i] op ...`, from the left, rounded once: what a collective
    /// does with the ranks' parts, in f32, f64, bf16, i32, u32, i64 and u64.
    ///
    /// # Errors
    /// [`Error::Len`] where a part is not as long as `out`; [`Error::Spec`] of no parts, of more than
    /// [`PARTS`] in bf16, or of another type.
    pub fn fold<T: Data>(
        &self,
        op: Fold,
        parts: &[GpuRef<'_, L, T>],
        out: GpuMut<'_, L, T>,
    ) -> Result<(), Error> {
        for part in parts {
            need("fold", "a part", out.len, part.len)?;
        }
        let refused = |why| Error::Spec { op: "fold", why };
        let of = Folded::of::<T>().ok_or_else(|| {
            refused("there are kernels for f32, f64, bf16, i32, u32, i64 and u64")
        })?;
        if parts.is_empty() || !of.takes(parts.len()) {
            return Err(refused("it takes 1 part or more, of bf16 16 at most"));
        }
        let ptrs: Vec<u64> = parts.iter().map(|p| p.ptr).collect();
        let stream = self.0.compute();
        of.launch((&self.0.launcher, stream), op, &ptrs, (out.ptr, out.len))
    }
}
