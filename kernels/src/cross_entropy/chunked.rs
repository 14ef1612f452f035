//! Linear layer and cross-entropy over a shard of the vocabulary, some tokens at a time: the logits
//! of all tokens are never there at once.
//!
//! ```text
//! x_td  w_vd                        tokens x hidden, entries of my shard x hidden
//!
//! forward, for each chunk of c tokens          logits_cv = x w^T    max, sums over my own max
//!   then, of shards: maximum over shards, shift_sums, sum over shards
//! backward, for each chunk again               logits_cv = x w^T    dlogits_cv
//!                                              dx = dlogits w       dw += dlogits^T x
//! ```
//!
//! Backward makes the logits again, so they cost a third product and no memory. Loss and dx have the
//! bits of the whole logits where the vocabulary is one shard (each row of a product is summed for
//! itself), and dw those of its chunks in order; both are the same each time.

use super::{CrossEntropy, CrossEntropySpec};
use crate::backend::slice_mut;
use crate::error::need;
use crate::{Error, Float, Gemm, GemmSpec, Tag, Trans};

/// A linear layer into a shard of the vocabulary, and its loss.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LinearLossSpec {
    /// Tokens and shard.
    pub loss: CrossEntropySpec,
    /// Width of x.
    pub hidden: usize,
    /// Tokens of which the logits are there at once; at least 1.
    pub chunk: usize,
}

/// Inputs of one call.
#[derive(Debug)]
pub struct Inputs<X, I> {
    /// `[tokens, hidden]`.
    pub x_td: X,
    /// `[entries, hidden]`.
    pub w_vd: X,
    /// `[tokens]`.
    pub labels_t: I,
}

impl<X: Copy, I: Copy> Clone for Inputs<X, I> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<X: Copy, I: Copy> Copy for Inputs<X, I> {}

impl LinearLossSpec {
    fn check(&self, op: &'static str, [x, w, labels]: [usize; 3]) -> Result<(), Error> {
        let CrossEntropySpec {
            tokens, entries, ..
        } = self.loss;
        if self.chunk == 0 {
            let why = "a chunk holds at least 1 token";
            return Err(Error::Spec { op, why });
        }
        need(op, "x", tokens.saturating_mul(self.hidden), x)?;
        need(op, "w", entries.saturating_mul(self.hidden), w)?;
        need(op, "labels", tokens, labels)
    }

    /// First token and tokens of each chunk.
    fn chunks(&self) -> impl Iterator<Item = (usize, usize)> + use<> {
        let (tokens, chunk) = (self.loss.tokens, self.chunk.max(1));
        (0..tokens)
            .step_by(chunk)
            .map(move |first| (first, chunk.min(tokens - first)))
    }

    /// The shard, of so many tokens.
    fn of(&self, tokens: usize) -> CrossEntropySpec {
        CrossEntropySpec {
            tokens,
            ..self.loss
        }
    }
}

/// Each token's largest logit of my shard, and the two halves of [`CrossEntropy::logit_sums`] over that
/// maximum. Of several shards [`CrossEntropy::shift_sums`] makes them sums over the maximum of all.
///
/// # Errors
/// [`Error::Len`] or [`Error::Spec`] where arguments do not fit; [`Error::Memory`] where there is no room
/// for the logits of a chunk.
pub fn linear_sums<B: Gemm + CrossEntropy, E: Float>(
    device: &B,
    spec: &LinearLossSpec,
    x: Inputs<B::Ref<'_, E>, B::Ref<'_, i32>>,
    mut max_t: B::Mut<'_, E::Acc>,
    mut stats_2t: B::Mut<'_, E::Acc>,
) -> Result<(), Error> {
    let op = "linear_sums";
    check::<B, E>(op, spec, x)?;
    let tokens = spec.loss.tokens;
    need(op, "max", tokens, B::len(B::as_ref(&max_t)))?;
    need(op, "stats", 2 * tokens, B::len(B::as_ref(&stats_2t)))?;
    let most = spec.chunk.min(tokens);
    let mut logits = device.alloc::<E>(Tag::Scratch, most * spec.loss.entries)?;
    let mut stats = device.alloc::<E::Acc>(Tag::Scratch, 2 * most)?;
    for (first, len) in spec.chunks() {
        let here = spec.of(len);
        let made = make::<B, E>(device, spec, x, (first, len), &mut logits)?;
        let mut max = slice_mut::<B, E::Acc>(B::reborrow(&mut max_t), first..first + len);
        device.logit_max::<E>(&here, made, B::reborrow(&mut max))?;
        let labels = B::slice(x.labels_t, first..first + len);
        let mut both = slice_mut::<B, E::Acc>(B::whole_mut(&mut stats), 0..2 * len);
        device.logit_sums::<E>(&here, made, labels, B::as_ref(&max), B::reborrow(&mut both))?;
        for half in 0..2 {
            let at = half * tokens + first;
            let to = slice_mut::<B, E::Acc>(B::reborrow(&mut stats_2t), at..at + len);
            device.copy(B::slice(B::as_ref(&both), half * len..(half + 1) * len), to)?;
        }
    }
    Ok(())
}

/// Gradients of `sum over t of weight[t] loss[t]`: my shard's part of that of x (overwritten), and of w
/// (added in Acc), from the maximum and the sums over all shards.
///
/// # Errors
/// As [`linear_sums`].
pub fn linear_backward<B: Gemm + CrossEntropy, E: Float>(
    device: &B,
    spec: &LinearLossSpec,
    x: Inputs<B::Ref<'_, E>, B::Ref<'_, i32>>,
    (max_t, stats_2t, weight_t): (B::Ref<'_, E::Acc>, B::Ref<'_, E::Acc>, B::Ref<'_, E::Acc>),
    mut dx_td: B::Mut<'_, E>,
    mut dw_vd: B::Mut<'_, E::Acc>,
) -> Result<(), Error> {
    let op = "linear_backward";
    check::<B, E>(op, spec, x)?;
    let (
        CrossEntropySpec {
            tokens, entries, ..
        },
        hidden,
    ) = (spec.loss, spec.hidden);
    need(op, "max", tokens, B::len(max_t))?;
    need(op, "stats", 2 * tokens, B::len(stats_2t))?;
    need(op, "weight", tokens, B::len(weight_t))?;
    need(op, "dx", tokens * hidden, B::len(B::as_ref(&dx_td)))?;
    need(op, "dw", entries * hidden, B::len(B::as_ref(&dw_vd)))?;
    let most = spec.chunk.min(tokens);
    let mut logits = device.alloc::<E>(Tag::Scratch, most * entries)?;
    let mut dlogits = device.alloc::<E>(Tag::Scratch, most * entries)?;
    let mut stats = device.alloc::<E::Acc>(Tag::Scratch, 2 * most)?;
    for (first, len) in spec.chunks() {
        let part = first..first + len;
        let made = make::<B, E>(device, spec, x, (first, len), &mut logits)?;
        for half in 0..2 {
            let at = half * tokens + first;
            let to = slice_mut::<B, E::Acc>(B::whole_mut(&mut stats), half * len..(half + 1) * len);
            device.copy(B::slice(stats_2t, at..at + len), to)?;
        }
        let mut d = slice_mut::<B, E>(B::whole_mut(&mut dlogits), 0..len * entries);
        device.logit_backward::<E>(
            &spec.of(len),
            made,
            B::slice(x.labels_t, part.clone()),
            B::slice(max_t, part.clone()),
            B::slice(B::whole(&stats), 0..2 * len),
            B::slice(weight_t, part.clone()),
            B::reborrow(&mut d),
        )?;
        let rows = part.start * hidden..part.end * hidden;
        let dx = slice_mut::<B, E>(B::reborrow(&mut dx_td), rows.clone());
        let to_x = GemmSpec::new(len, hidden, entries, Trans::N, Trans::N);
        device.gemm::<E, E>(&to_x, B::as_ref(&d), x.w_vd, None, None, dx)?;
        let to_w = GemmSpec::new(entries, hidden, len, Trans::T, Trans::N).accumulate();
        let rows = B::slice(x.x_td, rows);
        let dw = B::reborrow(&mut dw_vd);
        device.gemm::<E, E::Acc>(&to_w, B::as_ref(&d), rows, None, None, dw)?;
    }
    Ok(())
}

fn check<B: Gemm, E: Float>(
    op: &'static str,
    spec: &LinearLossSpec,
    x: Inputs<B::Ref<'_, E>, B::Ref<'_, i32>>,
) -> Result<(), Error> {
    spec.check(op, [B::len(x.x_td), B::len(x.w_vd), B::len(x.labels_t)])
}

/// The logits of `len` tokens from `first` on.
fn make<'a, B: Gemm, E: Float>(
    device: &B,
    spec: &LinearLossSpec,
    x: Inputs<B::Ref<'_, E>, B::Ref<'_, i32>>,
    (first, len): (usize, usize),
    logits: &'a mut B::Buf<E>,
) -> Result<B::Ref<'a, E>, Error> {
    let (entries, hidden) = (spec.loss.entries, spec.hidden);
    let rows = B::slice(x.x_td, first * hidden..(first + len) * hidden);
    let product = GemmSpec::new(len, entries, hidden, Trans::N, Trans::T);
    let room = slice_mut::<B, E>(B::whole_mut(logits), 0..len * entries);
    device.gemm::<E, E>(&product, rows, x.w_vd, None, None, room)?;
    Ok(B::slice(B::whole(logits), 0..len * entries))
}
