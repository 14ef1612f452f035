//! Dropout between layers: on the embedding's output, on probabilities of attention, and on what
//! attention and MLP give, before the residual.
//!
//! What is let go is keyed by (seed, step, site, sample, head, row, column), see
//! [`quintet_kernels::dropout`]: by the sample's number in the step and the token's place in it, by the
//! head's number in the model. A rank that holds copies draws the same, a rank that holds a part draws
//! its part, and backward, or a forward that runs again, draws what forward drew. A microbatch without
//! keys ([`MicroBatch::drawn`]) lets nothing go: evaluation.

use core::ops::Range;

use quintet_collectives::chunk::chunk;
use quintet_kernels::{Backend, Collectives, Dropout, DropoutSpec, Pointwise, Scalar, Tag};

use crate::region::Region;
use crate::{Ctx, Error, MicroBatch};

/// What the keys of a microbatch's dropout are made of.
pub struct Drawn<B: Backend> {
    /// Of the run.
    pub seed: u64,
    /// Of the run.
    pub step: u64,
    /// Number in the step of the microbatch's first sample.
    pub sample: u64,
    /// Place in its sample of each token here, `[t]`.
    pub at_t: B::Buf<i32>,
}

/// Which activation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Site {
    /// The embedding's output.
    Embedding,
    /// The probabilities of a block's attention.
    Probabilities(usize),
    /// What a block's attention gives.
    Attention(usize),
    /// What a block's MLP gives.
    Mlp(usize),
}

impl Site {
    /// Its number in the key.
    #[must_use]
    pub fn number(self) -> u32 {
        let of = |layer: usize, part: usize| (1 + 3 * layer + part) as u32;
        match self {
            Site::Embedding => 0,
            Site::Probabilities(layer) => of(layer, 0),
            Site::Attention(layer) => of(layer, 1),
            Site::Mlp(layer) => of(layer, 2),
        }
    }
}

/// Dropout at one site.
#[derive(Debug, Clone, Copy)]
pub(crate) struct DropoutAt {
    share: f64,
    site: Site,
}

impl DropoutAt {
    pub(crate) fn new(share: f64, site: Site) -> Self {
        Self { share, site }
    }

    /// What is let go of this microbatch; none where nothing is.
    pub(crate) fn of<B: Backend, E: Scalar>(&self, batch: &MicroBatch<B, E>) -> Option<Dropout> {
        let drawn = batch.drawn.as_ref().filter(|_| self.share > 0.0)?;
        Some(Dropout {
            share: self.share,
            seed: drawn.seed,
            step: drawn.step,
            site: self.site.number(),
            sample: drawn.sample,
        })
    }

    /// On x as it lies outside a region, in place; its width follows from its length.
    pub(crate) fn apply<B: Pointwise, C: Collectives<B>, E: Scalar>(
        &self,
        ctx: &Ctx<'_, B, C>,
        batch: &MicroBatch<B, E>,
        region: &Region,
        x: &mut B::Buf<E>,
    ) -> Result<(), Error> {
        let (Some(dropout), Some(drawn)) = (self.of(batch), &batch.drawn) else {
            return Ok(());
        };
        let here = rows_here::<B, C>(ctx.tp, region, batch.tokens());
        let spec = DropoutSpec {
            dropout,
            first: here.start,
            rows: batch.positions,
            width: B::len(B::whole(x)) / here.len().max(1),
        };
        let at = B::slice(B::whole(&drawn.at_t), here);
        Ok(ctx.device.dropout::<E>(&spec, at, B::whole_mut(x))?)
    }

    /// Gradient of what was given to [`DropoutAt::apply`]; none where it is `dy`.
    pub(crate) fn backward<B: Pointwise, C: Collectives<B>, E: Scalar>(
        &self,
        ctx: &Ctx<'_, B, C>,
        batch: &MicroBatch<B, E>,
        region: &Region,
        dy: &B::Buf<E>,
    ) -> Result<Option<B::Buf<E>>, Error> {
        if self.of(batch).is_none() {
            return Ok(None);
        }
        let mut dx = ctx.device.alloc(Tag::Activation, B::len(B::whole(dy)))?;
        ctx.device.copy(B::whole(dy), B::whole_mut(&mut dx))?;
        self.apply(ctx, batch, region, &mut dx)?;
        Ok(Some(dx))
    }
}

/// The tokens that this rank holds outside a region, among those of the microbatch.
pub(crate) fn rows_here<B: Backend, C: Collectives<B>>(
    tp: &C,
    region: &Region,
    tokens: usize,
) -> Range<usize> {
    if region.outside().is_shard() {
        chunk(tokens, tp.world(), tp.rank())
    } else {
        0..tokens
    }
}
