//! Cross-entropy: cuda/cross_entropy.cu.

use alloc::format;

use super::{Gpu, GpuMut, GpuRef, THREADS, len, suffix};
use crate::error::need;
use crate::launch::{Arg, Launch};
use crate::{CrossEntropy, CrossEntropySpec, Error, Float};

impl<L: Launch> Gpu<L> {
    /// A block a token.
    fn by_token<E: Float>(
        &self,
        op: &'static str,
        spec: &CrossEntropySpec,
        args: &[Arg],
    ) -> Result<(), Error> {
        let function = format!("{op}_{}", suffix::<E>(op)?);
        let tokens = spec.tokens as u64;
        self.launch(("cross_entropy", &function), tokens, [THREADS, 1, 1], args)
    }
}

impl<L: Launch> CrossEntropy for Gpu<L> {
    fn logit_max<E: Float>(
        &self,
        spec: &CrossEntropySpec,
        logits_tv: GpuRef<'_, L, E>,
        max_t: GpuMut<'_, L, E::Acc>,
    ) -> Result<(), Error> {
        let op = "logit_max";
        need(op, "logits", spec.len(), logits_tv.len)?;
        need(op, "max", spec.tokens, max_t.len)?;
        let args = [
            Arg::Ptr(logits_tv.ptr),
            Arg::Ptr(max_t.ptr),
            len(spec.entries),
        ];
        self.by_token::<E>(op, spec, &args)
    }

    fn logit_sums<E: Float>(
        &self,
        spec: &CrossEntropySpec,
        logits_tv: GpuRef<'_, L, E>,
        labels_t: GpuRef<'_, L, i32>,
        max_t: GpuRef<'_, L, E::Acc>,
        stats_2t: GpuMut<'_, L, E::Acc>,
    ) -> Result<(), Error> {
        let op = "logit_sums";
        need(op, "logits", spec.len(), logits_tv.len)?;
        need(op, "labels", spec.tokens, labels_t.len)?;
        need(op, "max", spec.tokens, max_t.len)?;
        need(op, "stats", spec.tokens.saturating_mul(2), stats_2t.len)?;
        let args = [
            Arg::Ptr(logits_tv.ptr),
            Arg::Ptr(labels_t.ptr),
            Arg::Ptr(max_t.ptr),
            Arg::Ptr(stats_2t.ptr),
            len(spec.first),
            len(spec.entries),
        ];
        self.by_token::<E>(op, spec, &args)
    }

    fn shift_sums<A: Float>(
        &self,
        spec: &CrossEntropySpec,
        labels_t: GpuRef<'_, L, i32>,
        here_t: GpuRef<'_, L, A>,
        max_t: GpuRef<'_, L, A>,
        stats_2t: GpuMut<'_, L, A>,
    ) -> Result<(), Error> {
        let op = "shift_sums";
        need(op, "labels", spec.tokens, labels_t.len)?;
        need(op, "my maxima", spec.tokens, here_t.len)?;
        need(op, "max", spec.tokens, max_t.len)?;
        need(op, "stats", spec.tokens.saturating_mul(2), stats_2t.len)?;
        let function = format!("shift_sums_{}", suffix::<A>(op)?);
        let args = [
            Arg::Ptr(stats_2t.ptr),
            Arg::Ptr(labels_t.ptr),
            Arg::Ptr(here_t.ptr),
            Arg::Ptr(max_t.ptr),
            len(spec.tokens),
            len(spec.first),
            len(spec.entries),
        ];
        self.launch_flat(("cross_entropy", &function), spec.tokens, 1, &args)
    }

    fn token_loss<A: Float>(
        &self,
        stats_2t: GpuRef<'_, L, A>,
        weight_t: GpuRef<'_, L, A>,
        loss_t: GpuMut<'_, L, A>,
    ) -> Result<(), Error> {
        let (op, tokens) = ("token_loss", loss_t.len);
        need(op, "stats", tokens.saturating_mul(2), stats_2t.len)?;
        need(op, "weight", tokens, weight_t.len)?;
        let function = format!("token_loss_{}", suffix::<A>(op)?);
        let args = [
            Arg::Ptr(stats_2t.ptr),
            Arg::Ptr(weight_t.ptr),
            Arg::Ptr(loss_t.ptr),
            len(tokens),
        ];
        self.launch_flat(("cross_entropy", &function), tokens, 1, &args)
    }

    fn logit_backward<E: Float>(
        &self,
        spec: &CrossEntropySpec,
        logits_tv: GpuRef<'_, L, E>,
        labels_t: GpuRef<'_, L, i32>,
        max_t: GpuRef<'_, L, E::Acc>,
        stats_2t: GpuRef<'_, L, E::Acc>,
        weight_t: GpuRef<'_, L, E::Acc>,
        dlogits_tv: GpuMut<'_, L, E>,
    ) -> Result<(), Error> {
        let op = "logit_backward";
        need(op, "logits", spec.len(), logits_tv.len)?;
        need(op, "labels", spec.tokens, labels_t.len)?;
        need(op, "max", spec.tokens, max_t.len)?;
        need(op, "stats", spec.tokens.saturating_mul(2), stats_2t.len)?;
        need(op, "weight", spec.tokens, weight_t.len)?;
        need(op, "dlogits", spec.len(), dlogits_tv.len)?;
        let args = [
            Arg::Ptr(logits_tv.ptr),
            Arg::Ptr(labels_t.ptr),
            Arg::Ptr(max_t.ptr),
            Arg::Ptr(stats_2t.ptr),
            Arg::Ptr(weight_t.ptr),
            Arg::Ptr(dlogits_tv.ptr),
            len(spec.first),
            len(spec.entries),
        ];
        self.by_token::<E>(op, spec, &args)
    }
}
