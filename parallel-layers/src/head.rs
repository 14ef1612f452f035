//! The head: final norm, linear layer over the vocabulary, loss.
//!
//! ```text
//! x outside -- norm --> outside -- enter --> Replicate -- w^T --> logits Shard(v) --> loss Invariant
//! dx outside <- norm -- outside <- dual --- Partial <-- w ------ dlogits Shard(v) <-- weight
//! outside: Invariant, or Shard(t) under sequence parallelism
//! ```
//!
//! Backward starts here, from the tokens' weights: it is given no gradient.

use alloc::vec::Vec;

use quintet_collectives::{DeviceMesh, ParamSpec};
use quintet_kernels::{Collectives, CrossEntropy, Gemm, Norm, Pointwise, Scalar, Tag};

use crate::embedding::TABLE;
use crate::linear::ColumnParallelLinear;
use crate::loss::{LossForward, VocabParallelCrossEntropy};
use crate::norm::{NormKind, Normed, RowNorm, RowStats};
use crate::region::{Region, apply};
use crate::saved::{Saved, runs, runs_mut, views, views_mut};
use crate::{Ctx, Error, MicroBatch};

const NAME: &str = "head";

/// Shape of the head.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct HeadSpec {
    /// Vocabulary entries.
    pub vocab: usize,
    /// Width of the residual stream.
    pub hidden: usize,
    /// The final norm.
    pub norm: NormKind,
    /// Added to the variance in it.
    pub eps: f64,
    /// The weight is the embedding's table.
    pub tied: bool,
    /// The input is Shard(token) over tp instead of Invariant.
    pub sequence_parallel: bool,
}

/// From the last block's output to the loss of each token.
#[derive(Debug, Clone)]
pub struct Head {
    norm: RowNorm,
    linear: ColumnParallelLinear,
    loss: VocabParallelCrossEntropy,
    region: Region,
    hidden: usize,
}

/// What forward saves.
#[derive(Debug)]
pub struct HeadForward<Buf, Stat> {
    x: Buf,
    stats: RowStats<Stat>,
    /// The norm's output, as it lies outside.
    normed: Buf,
    loss: LossForward<Buf, Stat>,
}

/// What the weights' gradients need.
#[derive(Debug)]
pub struct HeadWeight<Buf, Stat> {
    x: Buf,
    stats: RowStats<Stat>,
    normed: Buf,
    dlogits: Buf,
    dn: Buf,
}

/// What the head keeps between its calls.
pub type HeadSaved<Buf, Stat> = Saved<HeadForward<Buf, Stat>, HeadWeight<Buf, Stat>>;

impl Head {
    /// The head; its weight is `lm_head.weight`, or the embedding's table where tied.
    ///
    /// # Errors
    /// None today.
    pub fn new(mesh: &DeviceMesh, spec: &HeadSpec) -> Result<Self, Error> {
        let region = Region::new(spec.sequence_parallel)?;
        let (v, d) = (spec.vocab, spec.hidden);
        let linear = if spec.tied {
            ColumnParallelLinear::new(mesh, "model.embed_tokens", v, d).tied(TABLE)
        } else {
            ColumnParallelLinear::new(mesh, "lm_head", v, d)
        };
        Ok(Self {
            norm: RowNorm::new(mesh, "model.norm", spec.norm, d, spec.eps)
                .on_tp(region.outside_param()),
            linear,
            loss: VocabParallelCrossEntropy::new(v),
            region,
            hidden: d,
        })
    }

    /// The parameters: those of the final norm, linear weight.
    #[must_use]
    pub fn params(&self) -> Vec<ParamSpec> {
        let mut all = self.norm.params();
        all.extend(self.linear.params());
        all
    }

    /// Parameters of the norm and of the linear layer.
    fn counts(&self) -> [usize; 2] {
        [self.norm.params().len(), 1]
    }

    /// `loss[t]` of each token, on every rank, from x outside.
    ///
    /// # Errors
    /// What a kernel or a collective refuses or fails with.
    pub fn forward<B: Gemm + Norm + CrossEntropy, C: Collectives<B>, E: Scalar>(
        &self,
        ctx: &Ctx<'_, B, C>,
        batch: &MicroBatch<B, E>,
        params: &[B::Ref<'_, E>],
        x_td: B::Buf<E>,
    ) -> Result<(B::Buf<E::Acc>, HeadSaved<B::Buf<E>, B::Buf<E::Acc>>), Error> {
        let [pn, pw] = runs(NAME, params, self.counts())?;
        let &[w] = views(NAME, pw)?;
        let (x, t) = (x_td, batch.tokens());
        let rows = self.region.local_rows::<B, C>(ctx.tp, t);
        let Normed { y, stats } = self.norm.forward(ctx.device, rows, pn, B::whole(&x))?;
        let whole = self.region.inside(ctx, &y, t, self.hidden)?;
        let inside = B::whole(whole.as_ref().unwrap_or(&y));
        let logits = self.linear.forward(ctx, t, w, None, inside)?;
        drop(whole);
        let (loss_t, loss) = self.loss.forward(ctx, batch, logits)?;
        let saved = HeadForward {
            x,
            stats,
            normed: y,
            loss,
        };
        Ok((loss_t, Saved::Forward(saved)))
    }

    /// Gradient of x of `sum over t of weight[t] loss[t]`.
    ///
    /// # Errors
    /// As [`Head::forward`].
    pub fn backward_input<B: Gemm + Norm + CrossEntropy, C: Collectives<B>, E: Scalar>(
        &self,
        ctx: &Ctx<'_, B, C>,
        batch: &MicroBatch<B, E>,
        params: &[B::Ref<'_, E>],
        saved: &mut HeadSaved<B::Buf<E>, B::Buf<E::Acc>>,
    ) -> Result<B::Buf<E>, Error> {
        let [pn, pw] = runs(NAME, params, self.counts())?;
        let &[w] = views(NAME, pw)?;
        let (dev, t) = (ctx.device, batch.tokens());
        let rows = self.region.local_rows::<B, C>(ctx.tp, t);
        let HeadForward {
            x,
            stats,
            normed,
            loss,
        } = saved.take_forward(NAME)?;
        let dlogits = self.loss.backward(ctx, batch, loss)?;
        let mut dn = dev.alloc(Tag::Activation, t * self.hidden)?;
        let (dy, dx) = (B::whole(&dlogits), B::whole_mut(&mut dn));
        self.linear.backward_input(ctx, t, w, dy, dx, false)?;
        let dn = apply(ctx, self.region.enter().backward()?, dn, t, self.hidden)?;
        let input = (B::whole(&x), &stats);
        let dx = self
            .norm
            .backward_input(dev, rows, pn, input, B::whole(&dn), None)?;
        *saved = Saved::Weight(HeadWeight {
            x,
            stats,
            normed,
            dlogits,
            dn,
        });
        Ok(dx)
    }

    /// Adds to the gradients of the norm and the linear weight.
    ///
    /// # Errors
    /// As [`Head::forward`], and [`Error::Order`] before [`Head::backward_input`].
    pub fn backward_weight<B: Gemm + Norm + Pointwise, C: Collectives<B>, E: Scalar>(
        &self,
        ctx: &Ctx<'_, B, C>,
        batch: &MicroBatch<B, E>,
        saved: HeadSaved<B::Buf<E>, B::Buf<E::Acc>>,
        grads: &mut [B::Mut<'_, E::Acc>],
    ) -> Result<(), Error> {
        let [gn, gw] = runs_mut(NAME, grads, self.counts())?;
        let [gw]: &mut [_; 1] = views_mut(NAME, gw)?;
        let s = saved.into_weight(NAME)?;
        let t = batch.tokens();
        let whole = self.region.inside(ctx, &s.normed, t, self.hidden)?;
        let normed = B::whole(whole.as_ref().unwrap_or(&s.normed));
        let dlogits = B::whole(&s.dlogits);
        self.linear
            .backward_weight::<B, C, E>(ctx, t, normed, dlogits, B::reborrow(gw), None)?;
        let rows = self.region.local_rows::<B, C>(ctx.tp, t);
        let input = (B::whole(&s.x), &s.stats);
        self.norm
            .backward_weight::<B, E>(ctx.device, rows, input, B::whole(&s.dn), gn)
    }
}
