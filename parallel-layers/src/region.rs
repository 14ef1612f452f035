//! A tensor parallel region: the move in, the move out, and their backwards.
//!
//! ```text
//!                   values between layers        inside             values between layers
//! plain             Invariant   -- enter -->  Replicate .. Partial  -- leave -->  Invariant
//!                               nothing                             all-reduce
//! sequence parallel Shard(t)    -- enter -->  Replicate .. Partial  -- leave -->  Shard(t)
//!                               all-gather                          reduce-scatter
//! ```
//!
//! The gradient takes the dual moves: through `leave` it becomes Replicate, through `enter` it
//! goes from Partial to what lies between layers. Plain, the two are Megatron's f and g
//! (Shoeybi et al. 2019); sequence parallel is Korthikanti et al. 2022.
//!
//! Tokens fall to ranks as [`chunk`](quintet_collectives::chunk::chunk) cuts them: tp need not
//! divide them, and a part may be empty.

use alloc::vec::Vec;

use quintet_collectives::{IndexMap, Move, MoveKind, Placement, ReduceOp};
use quintet_kernels::backend::slice_mut;
use quintet_kernels::{Backend, Collectives, Tag, Wire};

use crate::{Ctx, Error};

/// The two moves of a region.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Region {
    outside: Placement,
    enter: Move,
    leave: Move,
}

impl Region {
    /// The region between values that are Shard(token) over tp, or else Invariant.
    ///
    /// # Errors
    /// None: both moves exist.
    pub fn new(sequence_parallel: bool) -> Result<Self, Error> {
        let outside = if sequence_parallel {
            Placement::shard(0)
        } else {
            Placement::Invariant
        };
        Ok(Self {
            outside,
            enter: Move::new(outside, Placement::Replicate)?,
            leave: Move::new(Placement::Partial, outside)?,
        })
    }

    /// How values between layers lie over tp.
    #[must_use]
    pub const fn outside(&self) -> Placement {
        self.outside
    }

    /// How a parameter that works on values between layers (a norm, the bias of a row-parallel
    /// layer) lies over tp: each rank uses it on its own tokens, or all do the same.
    #[must_use]
    pub const fn outside_param(&self) -> Placement {
        if self.outside.is_shard() {
            Placement::Replicate
        } else {
            Placement::Invariant
        }
    }

    /// The move into the region.
    #[must_use]
    pub const fn enter(&self) -> Move {
        self.enter
    }

    /// The move out of the region.
    #[must_use]
    pub const fn leave(&self) -> Move {
        self.leave
    }

    /// `x`, `[rows, width]` as a whole, as it is inside the region; `None` where it is that already.
    /// What is gathered here is let go once it was multiplied, and gathered again for the gradients
    /// of the weights: a layer keeps its part alone (Korthikanti et al. 2022, 4.2.2).
    ///
    /// # Errors
    /// As [`apply`].
    pub fn inside<B: Backend, C: Collectives<B>, T: Wire>(
        &self,
        ctx: &Ctx<'_, B, C>,
        x: &B::Buf<T>,
        rows: usize,
        width: usize,
    ) -> Result<Option<B::Buf<T>>, Error> {
        apply_to(ctx, self.enter, B::whole(x), rows, width)
    }

    /// Rows of `rows` that this rank holds between layers.
    #[must_use]
    pub fn local_rows<B, C: Collectives<B>>(&self, tp: &C, rows: usize) -> usize
    where
        B: Backend,
    {
        match self.outside {
            Placement::Shard { .. } => {
                quintet_collectives::chunk::chunk_len(rows, tp.world(), tp.rank())
            }
            _ => rows,
        }
    }
}

/// Moves `x`, `[rows, width]` as a whole, over tp. The backward is the same with
/// [`Move::backward`]. A sum is taken in place.
///
/// # Errors
/// [`quintet_collectives::Error::Move`] where a shard is not of dim 0 in contiguous runs;
/// [`quintet_collectives::Error::Len`] where `x` does not have the rows its placement gives this
/// rank; what a collective fails with.
pub fn apply<B: Backend, C: Collectives<B>, T: Wire>(
    ctx: &Ctx<'_, B, C>,
    mv: Move,
    mut x: B::Buf<T>,
    rows: usize,
    width: usize,
) -> Result<B::Buf<T>, Error> {
    match mv.kind() {
        MoveKind::AllReduce => {
            expect("x", rows * width, B::len(B::whole(&x)))?;
            if ctx.tp.world() > 1 {
                ctx.tp.all_reduce(B::whole_mut(&mut x), ReduceOp::Sum)?;
            }
            Ok(x)
        }
        _ => Ok(apply_to(ctx, mv, B::whole(&x), rows, width)?.unwrap_or(x)),
    }
}

/// As [`apply`], from a view. `None` where the move leaves this rank's elements as they are.
///
/// # Errors
/// As [`apply`].
pub fn apply_to<B: Backend, C: Collectives<B>, T: Wire>(
    ctx: &Ctx<'_, B, C>,
    mv: Move,
    x: B::Ref<'_, T>,
    rows: usize,
    width: usize,
) -> Result<Option<B::Buf<T>>, Error> {
    let (world, rank) = (ctx.tp.world(), ctx.tp.rank());
    let whole = rows * width;
    let kind = mv.kind();
    let counts = counts(mv, rows, width, world)?;
    let mine = counts.get(rank).copied().unwrap_or(whole);
    let from = if mv.from().is_shard() { mine } else { whole };
    expect("x", from, B::len(x))?;
    if kind == MoveKind::Nothing || world == 1 || (kind == MoveKind::KeepFirst && rank == 0) {
        return Ok(None);
    }
    let to = if mv.to().is_shard() { mine } else { whole };
    let mut y = match kind {
        MoveKind::PadZeros | MoveKind::KeepFirst => ctx.device.zeros(Tag::Activation, to)?,
        _ => ctx.device.alloc(Tag::Activation, to)?,
    };
    fill(ctx, kind, x, &counts, B::whole_mut(&mut y))?;
    Ok(Some(y))
}

/// Performs a move that changes this rank's elements, from one buffer to another.
fn fill<B: Backend, C: Collectives<B>, T: Wire>(
    ctx: &Ctx<'_, B, C>,
    kind: MoveKind,
    x: B::Ref<'_, T>,
    counts: &[usize],
    mut y: B::Mut<'_, T>,
) -> Result<(), Error> {
    let rank = ctx.tp.rank();
    let first: usize = counts.iter().take(rank).sum();
    let mine = first..first + counts.get(rank).copied().unwrap_or(0);
    match kind {
        MoveKind::AllReduce => {
            ctx.device.copy(x, B::reborrow(&mut y))?;
            ctx.tp.all_reduce(y, ReduceOp::Sum)?;
        }
        MoveKind::AllGather => ctx.tp.all_gather(x, counts, y)?,
        MoveKind::ReduceScatter => ctx.tp.reduce_scatter(x, counts, y, ReduceOp::Sum)?,
        MoveKind::TakePart => ctx.device.copy(B::slice(x, mine), y)?,
        MoveKind::PadZeros => ctx.device.copy(x, slice_mut::<B, T>(y, mine))?,
        // Nothing to write; of KeepFirst the zeros are left. All-to-all was refused.
        MoveKind::Nothing | MoveKind::KeepFirst | MoveKind::AllToAll => {}
    }
    Ok(())
}

/// Elements per rank of the side that is a shard; empty where neither is.
fn counts(mv: Move, rows: usize, width: usize, world: usize) -> Result<Vec<usize>, Error> {
    let shard = if mv.from().is_shard() {
        mv.from()
    } else {
        mv.to()
    };
    match shard {
        Placement::Shard {
            dim: 0,
            map: map @ IndexMap::Contiguous { .. },
        } if mv.kind() != MoveKind::AllToAll => Ok((0..world)
            .filter_map(|r| map.ranges(rows, world, r))
            .map(|[part, _]| part.len() * width)
            .collect()),
        Placement::Shard { .. } => Err(quintet_collectives::Error::Move {
            from: alloc::format!("{}", mv.from()),
            to: alloc::format!("{}", mv.to()),
            reason: "a region is cut along tokens, dim 0, in contiguous runs",
        }
        .into()),
        _ => Ok(Vec::new()),
    }
}

fn expect(what: &'static str, expected: usize, got: usize) -> Result<(), Error> {
    if expected == got {
        return Ok(());
    }
    Err(quintet_collectives::Error::Len {
        op: "region move",
        what,
        expected,
        got,
    }
    .into())
}
