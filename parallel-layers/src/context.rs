//! Context parallelism: the tokens of a sequence lie over cp, and attention brings together
//! queries and the keys they see.
//!
//! ```text
//! zigzag, cp 4: 8 pieces of a sequence     rank 0: 0 7   rank 1: 1 6   rank 2: 2 5   rank 3: 3 4
//! cp = outer x ulysses, 2 x 2              outer place 0: pieces 0 1 6 7     place 1: 2 3 4 5
//!
//! ulysses   Shard(token) -- all-to-all --> Shard(head) -- attention --> Shard(head) -- all-to-all
//! outer     queries stay;  ring:        k, v go round, one place a step, and dk, dv with them
//!                          all-gather:  k, v gathered;  dk, dv reduce-scattered
//! ```
//!
//! Early queries see little and late ones much; with one piece of each every rank has the same
//! work (zigzag: Zhu, ring-flash-attention; Llama 3). The pieces of the ranks of one ulysses group
//! make two runs, which are again the zigzag of the outer factor: so the two factors compose, and
//! ulysses alone sees whole sequences in order (Jacobs et al. 2023; Fang and Zhao 2024).
//!
//! What is visible goes by explicit positions and documents, never by where a token lies. A rank
//! knows those of all tokens ([`ContextPlaces`]), for they are functions of the data: none is
//! sent. Every rank issues the same calls whatever is masked.
//!
//! With fewer KV heads than a ulysses group has ranks, neighbours hold the same KV head and their
//! gradients of it are summed on the way home. Gradients of keys and values stay in Acc until all
//! that adds to them has come in.

mod attend;
mod gather;
mod heads;
mod ring;

use alloc::vec::Vec;

use quintet_collectives::IndexMap;
use quintet_kernels::{Backend, Collectives, Rows, Tag, Wire};

use crate::Error;

pub use attend::{ContextSaved, Gradients, backward, forward};

/// The ranks that hold parts of the same sequences, by factor of cp. A factor of one place has no
/// group.
#[derive(Debug)]
pub struct ContextGroups<'a, C> {
    /// The outer factor, over which keys and values come together.
    pub keys: Option<&'a C>,
    /// Over the outer factor keys and values are gathered, instead of going round a ring.
    pub gather: bool,
    /// The inner factor (ulysses), over which tokens are exchanged for heads.
    pub heads: Option<&'a C>,
}

impl<C> Clone for ContextGroups<'_, C> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<C> Copy for ContextGroups<'_, C> {}

impl<C> Default for ContextGroups<'_, C> {
    /// Sequences are not cut.
    fn default() -> Self {
        Self {
            keys: None,
            gather: false,
            heads: None,
        }
    }
}

/// The places in a sequence of `len` tokens that rank `place` of `cp` holds, in the order in which
/// it holds them.
pub fn held(len: usize, cp: usize, place: usize) -> impl Iterator<Item = usize> {
    let pieces = IndexMap::Zigzag.ranges(len, cp.max(1), place);
    pieces.unwrap_or([0..0, 0..0]).into_iter().flatten()
}

/// Where tokens stand, on the device.
pub(crate) struct TokenPlaces<B: Backend> {
    /// Positions in their documents, `[b, tokens]`.
    pub(crate) pos: B::Buf<i32>,
    /// Their documents; `None` where a sequence is one.
    pub(crate) doc: Option<B::Buf<i32>>,
    /// Places in their samples; `None` where positions are that.
    pub(crate) at: Option<B::Buf<i32>>,
}

/// Where all tokens of a microbatch's sequences stand, those of other context parallel ranks too.
pub struct ContextPlaces<B: Backend> {
    /// Of whole sequences.
    in_order: TokenPlaces<B>,
    /// Of the tokens of each place on the outer factor of cp.
    held: Vec<TokenPlaces<B>>,
}

impl<B: Backend> ContextPlaces<B> {
    /// Uploads positions and documents of `sequences` whole sequences, `[b, len]`, for an outer
    /// factor of `outer` places.
    ///
    /// # Errors
    /// [`Error::Layout`] where `len` is no multiple of 2 x `outer`, so that pieces would not be of
    /// one length; where the device has no memory.
    pub fn upload(
        device: &B,
        sequences: usize,
        outer: usize,
        pos: &[i32],
        doc: Option<&[i32]>,
    ) -> Result<Self, Error> {
        let len = pos.len() / sequences.max(1);
        if outer == 0 || !len.is_multiple_of(2 * outer) {
            return Err(Error::Layout(alloc::format!(
                "sequences of {len} tokens do not fall into 2 x {outer} equal pieces"
            )));
        }
        let put = |all: &[i32], chosen: &[usize]| {
            let rows = all.chunks_exact(len.max(1));
            let host: Vec<i32> = rows
                .flat_map(|row| chosen.iter().filter_map(|&i| row.get(i).copied()))
                .collect();
            device.upload(Tag::Scratch, &host)
        };
        let places = |chosen: Vec<usize>| -> Result<TokenPlaces<B>, Error> {
            let doc = doc.map(|doc| put(doc, &chosen)).transpose()?;
            let pos = put(pos, &chosen)?;
            let places = || {
                let row = chosen.iter().map(|&i| i as i32);
                let host: Vec<i32> = (0..sequences).flat_map(|_| row.clone()).collect();
                device.upload(Tag::Scratch, &host)
            };
            let at = doc.is_some().then(places).transpose()?;
            Ok(TokenPlaces { pos, doc, at })
        };
        Ok(Self {
            in_order: places((0..len).collect())?,
            held: (0..outer)
                .map(|place| places(held(len, outer, place).collect()))
                .collect::<Result<_, _>>()?,
        })
    }
}

/// How rows of several ranks' parts of sequences make whole sequences.
#[derive(Clone, Copy)]
struct Cut {
    /// Sequences.
    sequences: usize,
    /// Ranks.
    world: usize,
    /// Elements of one piece: half of a rank's part of a sequence.
    piece: usize,
}

impl Cut {
    /// Parts of `part` elements, all sequences together, on each of `world` ranks.
    fn new(sequences: usize, world: usize, part: usize) -> Self {
        let piece = part / sequences.max(1) / 2;
        Self {
            sequences,
            world,
            piece,
        }
    }

    /// `[rank, b, 2, piece]` to `[b, 2 world, piece]`.
    fn into_order<B: Backend, T: Wire>(
        self,
        device: &B,
        parts: B::Ref<'_, T>,
        mut whole: B::Mut<'_, T>,
    ) -> Result<(), Error> {
        for (part, at) in self.pieces() {
            let from = B::slice(parts, part..B::len(parts));
            let len = B::len(B::as_ref(&whole));
            let to = quintet_kernels::backend::slice_mut::<B, T>(B::reborrow(&mut whole), at..len);
            device.copy_rows(&self.rows(2, 2 * self.world), from, to)?;
        }
        Ok(())
    }

    /// The inverse of [`Cut::into_order`].
    fn by_rank<B: Backend, T: Wire>(
        self,
        device: &B,
        whole: B::Ref<'_, T>,
        mut parts: B::Mut<'_, T>,
    ) -> Result<(), Error> {
        for (part, at) in self.pieces() {
            let from = B::slice(whole, at..B::len(whole));
            let len = B::len(B::as_ref(&parts));
            let to =
                quintet_kernels::backend::slice_mut::<B, T>(B::reborrow(&mut parts), part..len);
            device.copy_rows(&self.rows(2 * self.world, 2), from, to)?;
        }
        Ok(())
    }

    /// Runs of a piece, one a sequence.
    fn rows(self, src: usize, dst: usize) -> Rows {
        Rows {
            rows: self.sequences,
            width: self.piece,
            src_step: src * self.piece,
            dst_step: dst * self.piece,
        }
    }

    /// Where each piece of the first sequence begins: among parts, and in the whole.
    fn pieces(self) -> impl Iterator<Item = (usize, usize)> {
        (0..self.world).flat_map(move |rank| {
            let part = rank * self.sequences * 2;
            [(part, rank), (part + 1, 2 * self.world - 1 - rank)]
                .map(|(part, whole)| (part * self.piece, whole * self.piece))
        })
    }
}

/// An uninitialised buffer.
fn alloc<B: Backend, T: Wire>(device: &B, tag: Tag, len: usize) -> Result<B::Buf<T>, Error> {
    Ok(device.alloc(tag, len)?)
}

/// `x` in storage, rounded once.
fn stored<B, E>(device: &B, x: B::Ref<'_, E::Acc>) -> Result<B::Buf<E>, Error>
where
    B: quintet_kernels::Pointwise,
    E: quintet_kernels::Scalar,
{
    let mut y = alloc::<B, E>(device, Tag::Activation, B::len(x))?;
    device.cast::<E::Acc, E>(x, B::whole_mut(&mut y))?;
    Ok(y)
}

/// My place and the places in a group; (0, 1) where there is none.
fn place<B: Backend, C: Collectives<B>>(group: Option<&C>) -> (usize, usize) {
    group.map_or((0, 1), |group| (group.rank(), group.world()))
}
