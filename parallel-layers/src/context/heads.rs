//! Ulysses: parts of sequences with all heads for whole sequences with some of the heads.
//!
//! ```text
//! [t, heads, e] --pack--> [u][t, w] == all-to-all ==> [u][b, 2, piece] --into order--> [b, tokens, w]
//!                         heads of rank u             tokens of rank u
//! ```
//!
//! Fewer heads than ranks: `ranks / heads` neighbours are sent the same one.

use alloc::vec;

use quintet_collectives::chunk::chunk;
use quintet_kernels::backend::slice_mut;
use quintet_kernels::{Backend, Collectives, Pointwise, Rows, Tag, Wire};

use super::{Cut, alloc};
use crate::Error;

/// An exchange of `tokens` tokens here for heads of width `width`.
#[derive(Clone, Copy)]
pub(super) struct Exchange<'a, C> {
    pub(super) group: &'a C,
    pub(super) sequences: usize,
    /// Tokens here, before.
    pub(super) tokens: usize,
    /// Heads of all ranks together.
    pub(super) heads: usize,
    pub(super) width: usize,
}

/// Heads that each of `ranks` ranks gets of `heads`.
///
/// # Errors
/// [`Error::Layout`] where neither divides the other.
pub(super) fn heads_each(heads: usize, ranks: usize) -> Result<usize, Error> {
    if heads.is_multiple_of(ranks) {
        Ok(heads / ranks)
    } else if heads > 0 && ranks.is_multiple_of(heads) {
        Ok(1)
    } else {
        Err(Error::Layout(alloc::format!(
            "a ulysses group of {ranks} cannot share {heads} heads: one must divide the other"
        )))
    }
}

impl<C> Exchange<'_, C> {
    /// Elements that go to each rank.
    fn part<B: Backend>(&self) -> Result<usize, Error>
    where
        C: Collectives<B>,
    {
        let each = heads_each(self.heads, self.group.world())?;
        Ok(self.tokens * each * self.width)
    }

    /// The first head of rank `rank`.
    fn first(&self, rank: usize, ranks: usize) -> usize {
        // With fewer heads than ranks, chunks of the ranks; else of the heads.
        if self.heads >= ranks {
            chunk(self.heads, ranks, rank).start
        } else {
            rank * self.heads / ranks
        }
    }

    fn rows(&self, each: usize) -> Rows {
        Rows {
            rows: self.tokens,
            width: each * self.width,
            src_step: self.heads * self.width,
            dst_step: each * self.width,
        }
    }

    /// `[t, heads, e]` of my tokens to `[b, tokens, heads here, e]` of all tokens.
    pub(super) fn to_heads<B, T: Wire>(
        &self,
        device: &B,
        x: B::Ref<'_, T>,
    ) -> Result<B::Buf<T>, Error>
    where
        B: Backend,
        C: Collectives<B>,
    {
        let (ranks, part) = (self.group.world(), self.part::<B>()?);
        let rows = self.rows(heads_each(self.heads, ranks)?);
        // It becomes what is given back.
        let mut send = alloc::<B, T>(device, Tag::Activation, ranks * part)?;
        for rank in 0..ranks {
            let from = B::slice(x, self.first(rank, ranks) * self.width..B::len(x));
            let to = slice_mut::<B, T>(B::whole_mut(&mut send), rank * part..(rank + 1) * part);
            device.copy_rows(&rows, from, to)?;
        }
        let mut received = alloc::<B, T>(device, Tag::Comm, ranks * part)?;
        self.all_to_all::<B, T>(B::whole(&send), B::whole_mut(&mut received), part)?;
        let mut y = send;
        let y_all = B::whole_mut(&mut y);
        Cut::new(self.sequences, ranks, part).into_order(device, B::whole(&received), y_all)?;
        Ok(y)
    }

    /// The way back. Copies of one head are summed, in rank order.
    pub(super) fn to_tokens<B, T: Wire + quintet_kernels::Float>(
        &self,
        device: &B,
        y: B::Ref<'_, T>,
    ) -> Result<B::Buf<T>, Error>
    where
        B: Pointwise,
        C: Collectives<B>,
    {
        let (ranks, part) = (self.group.world(), self.part::<B>()?);
        let each = heads_each(self.heads, ranks)?;
        let mut send = alloc::<B, T>(device, Tag::Comm, ranks * part)?;
        let send_all = B::whole_mut(&mut send);
        Cut::new(self.sequences, ranks, part).by_rank(device, y, send_all)?;
        let mut received = alloc::<B, T>(device, Tag::Comm, ranks * part)?;
        self.all_to_all::<B, T>(B::whole(&send), B::whole_mut(&mut received), part)?;
        drop(send);
        let copies = (ranks / self.heads.max(1)).max(1);
        let mut x = alloc::<B, T>(
            device,
            Tag::Activation,
            self.tokens * self.heads * self.width,
        )?;
        let rows = self.rows(each);
        let back = Rows {
            src_step: rows.dst_step,
            dst_step: rows.src_step,
            ..rows
        };
        for rank in (0..ranks).step_by(copies) {
            let all = slice_mut::<B, T>(B::whole_mut(&mut received), rank * part..ranks * part);
            let (mut sum, mut more) = B::split_mut(all, part);
            for _ in 1..copies {
                let (copy, rest) = B::split_mut(more, part);
                device.add::<T>(B::reborrow(&mut sum), B::as_ref(&copy))?;
                more = rest;
            }
            let (len, at) = (B::len(B::whole(&x)), self.first(rank, ranks) * self.width);
            let to = slice_mut::<B, T>(B::whole_mut(&mut x), at..len);
            device.copy_rows(&back, B::as_ref(&sum), to)?;
        }
        Ok(x)
    }

    fn all_to_all<B: Backend, T: Wire>(
        &self,
        send: B::Ref<'_, T>,
        received: B::Mut<'_, T>,
        part: usize,
    ) -> Result<(), Error>
    where
        C: Collectives<B>,
    {
        let counts = vec![part; self.group.world()];
        Ok(self.group.all_to_all(send, &counts, received, &counts)?)
    }
}
