//! Cross-entropy with the vocabulary cut over tp; no rank sees all logits.
//!
//! ```text
//! logits Shard(v) -- my maximum ------> all-reduce max --> Invariant
//!                 -- my sums [2, t] --> Partial -- all-reduce --> Invariant
//!                 -- ln(sum) - target --> loss[t]   Invariant
//! dlogits Shard(v) <-- weight (softmax - label) -- nothing is sent
//! ```
//!
//! No gradient passes through the maximum, which cancels: its collective stands outside the law
//! of placements. The two sums travel as one message.

use quintet_collectives::ReduceOp;
use quintet_collectives::chunk::chunk;
use quintet_kernels::{Collectives, CrossEntropy, CrossEntropySpec, Scalar, Tag};

use crate::{Ctx, Error, MicroBatch};

/// The loss of each token.
#[derive(Debug, Clone, Copy)]
pub struct VocabParallelCrossEntropy {
    vocab: usize,
}

/// What the loss saves: my logits and each token's maximum and sums.
#[derive(Debug)]
pub struct LossForward<Buf, Stat> {
    logits_tv: Buf,
    max_t: Stat,
    stats_2t: Stat,
}

impl VocabParallelCrossEntropy {
    /// Over a vocabulary of `vocab` entries.
    #[must_use]
    pub const fn new(vocab: usize) -> Self {
        Self { vocab }
    }

    fn spec(&self, tokens: usize, world: usize, rank: usize) -> CrossEntropySpec {
        let here = chunk(self.vocab, world, rank);
        CrossEntropySpec {
            tokens,
            first: here.start,
            entries: here.len(),
        }
    }

    /// `loss[t]` in nats, 0 where the token's weight is 0; the weight is not applied to it.
    ///
    /// # Errors
    /// What a kernel or a collective refuses or fails with.
    pub fn forward<B: CrossEntropy, C: Collectives<B>, E: Scalar>(
        &self,
        ctx: &Ctx<'_, B, C>,
        batch: &MicroBatch<B, E>,
        logits_tv: B::Buf<E>,
    ) -> Result<(B::Buf<E::Acc>, LossForward<B::Buf<E>, B::Buf<E::Acc>>), Error> {
        let (dev, t, world) = (ctx.device, batch.tokens(), ctx.tp.world());
        let spec = self.spec(t, world, ctx.tp.rank());
        let (logits, labels) = (B::whole(&logits_tv), B::whole(&batch.labels_t));
        let mut max_t = dev.alloc(Tag::Activation, t)?;
        let mut stats_2t = dev.alloc(Tag::Activation, 2 * t)?;
        let mut loss_t = dev.alloc(Tag::Activation, t)?;
        dev.logit_max::<E>(&spec, logits, B::whole_mut(&mut max_t))?;
        if world > 1 {
            ctx.tp
                .all_reduce::<E::Acc>(B::whole_mut(&mut max_t), ReduceOp::Max)?;
        }
        let (max, stats) = (B::whole(&max_t), B::whole_mut(&mut stats_2t));
        dev.logit_sums::<E>(&spec, logits, labels, max, stats)?;
        if world > 1 {
            ctx.tp
                .all_reduce::<E::Acc>(B::whole_mut(&mut stats_2t), ReduceOp::Sum)?;
        }
        let (stats, weight) = (B::whole(&stats_2t), B::whole(&batch.weight_t));
        dev.token_loss::<E::Acc>(stats, weight, B::whole_mut(&mut loss_t))?;
        let saved = LossForward {
            logits_tv,
            max_t,
            stats_2t,
        };
        Ok((loss_t, saved))
    }

    /// Gradient of my logits of `sum over t of weight[t] loss[t]`.
    ///
    /// # Errors
    /// As [`VocabParallelCrossEntropy::forward`].
    pub fn backward<B: CrossEntropy, C: Collectives<B>, E: Scalar>(
        &self,
        ctx: &Ctx<'_, B, C>,
        batch: &MicroBatch<B, E>,
        saved: LossForward<B::Buf<E>, B::Buf<E::Acc>>,
    ) -> Result<B::Buf<E>, Error> {
        let spec = self.spec(batch.tokens(), ctx.tp.world(), ctx.tp.rank());
        let mut dlogits = ctx
            .device
            .alloc(Tag::Activation, spec.tokens * spec.entries)?;
        ctx.device.logit_backward::<E>(
            &spec,
            B::whole(&saved.logits_tv),
            B::whole(&batch.labels_t),
            B::whole(&saved.max_t),
            B::whole(&saved.stats_2t),
            B::whole(&batch.weight_t),
            B::whole_mut(&mut dlogits),
        )?;
        Ok(dlogits)
    }
}
