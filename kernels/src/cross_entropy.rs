//! Softmax cross-entropy over a vocabulary that may be cut into shards.
//!
//! ```text
//! max_t    <- maximum of my logits                 then the maximum over shards
//! sum_t    <- sum of exp(logit - max_t)            then the sum over shards
//! target_t <- logit of the label - max_t if mine   then the sum over shards
//! loss_t    = ln(sum_t) - target_t
//! dlogit    = weight_t * (exp(logit - max_t) / sum_t - [label])
//! ```
//!
//! An empty shard leaves minus infinity, 0 and 0. A row whose weight is 0 (a masked token) has
//! loss 0 and gradient 0, whatever its label.

pub mod chunked;
pub mod cpu;
pub mod naive;

use crate::{Backend, Error, Float};

/// The shard of the vocabulary that is here.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CrossEntropySpec {
    /// Rows (tokens).
    pub tokens: usize,
    /// First vocabulary entry of the shard.
    pub first: usize,
    /// Entries in the shard; may be none.
    pub entries: usize,
}

impl CrossEntropySpec {
    /// The entry of the shard that `label` names, if it is here.
    #[must_use]
    pub fn entry(&self, label: i32) -> Option<usize> {
        let entry = usize::try_from(label).ok()?.checked_sub(self.first)?;
        (entry < self.entries).then_some(entry)
    }

    /// Logits of all rows.
    pub(crate) fn len(&self) -> usize {
        self.tokens.saturating_mul(self.entries)
    }
}

/// The steps of cross-entropy on a device.
pub trait CrossEntropy: Backend {
    /// `max[t] = max_v logits[t, v]`, minus infinity for an empty shard.
    ///
    /// # Errors
    /// [`Error::Len`] where a length does not fit.
    fn logit_max<E: Float>(
        &self,
        spec: &CrossEntropySpec,
        logits_tv: Self::Ref<'_, E>,
        max_t: Self::Mut<'_, E::Acc>,
    ) -> Result<(), Error>;

    /// From the maximum over all shards: my sum of exponentials and, where the label is mine, the
    /// label's logit less the maximum (else 0). `stats[t]` and `stats[tokens + t]` in one buffer,
    /// so that one all-reduce carries both.
    ///
    /// # Errors
    /// [`Error::Len`] where a length does not fit.
    fn logit_sums<E: Float>(
        &self,
        spec: &CrossEntropySpec,
        logits_tv: Self::Ref<'_, E>,
        labels_t: Self::Ref<'_, i32>,
        max_t: Self::Ref<'_, E::Acc>,
        stats_2t: Self::Mut<'_, E::Acc>,
    ) -> Result<(), Error>;

    /// Sums that were taken over `here_t`, my own maxima, become those over `max_t`, the maxima over
    /// all shards: what [`CrossEntropy::logit_sums`] gives but for a rounding.
    ///
    /// # Errors
    /// [`Error::Len`] where a length does not fit.
    fn shift_sums<A: Float>(
        &self,
        spec: &CrossEntropySpec,
        labels_t: Self::Ref<'_, i32>,
        here_t: Self::Ref<'_, A>,
        max_t: Self::Ref<'_, A>,
        stats_2t: Self::Mut<'_, A>,
    ) -> Result<(), Error>;

    /// `loss[t] = ln(sum) - target` from the sums over all shards, 0 where `weight[t]` is 0.
    ///
    /// # Errors
    /// [`Error::Len`] where a length does not fit.
    fn token_loss<A: Float>(
        &self,
        stats_2t: Self::Ref<'_, A>,
        weight_t: Self::Ref<'_, A>,
        loss_t: Self::Mut<'_, A>,
    ) -> Result<(), Error>;

    /// Gradient of my logits (overwritten), times `weight[t]`.
    ///
    /// # Errors
    /// [`Error::Len`] where a length does not fit.
    fn logit_backward<E: Float>(
        &self,
        spec: &CrossEntropySpec,
        logits_tv: Self::Ref<'_, E>,
        labels_t: Self::Ref<'_, i32>,
        max_t: Self::Ref<'_, E::Acc>,
        stats_2t: Self::Ref<'_, E::Acc>,
        weight_t: Self::Ref<'_, E::Acc>,
        dlogits_tv: Self::Mut<'_, E>,
    ) -> Result<(), Error>;
}
