//! The steps of cross-entropy on slices; each function does any block of rows.

use super::{CrossEntropy, CrossEntropySpec};
use crate::error::need;
use crate::lanes::{fold, rows_per_part, sum};
use crate::{Cpu, Error, Float, Real};

/// See [`CrossEntropy::logit_max`].
#[inline(always)]
pub fn logit_max<E: Float>(spec: &CrossEntropySpec, logits_tv: &[E], max_t: &mut [E::Acc]) {
    let none = E::Acc::NEG_INFINITY;
    if spec.entries == 0 {
        return max_t.fill(none);
    }
    for (row, max) in logits_tv.chunks_exact(spec.entries).zip(max_t) {
        *max = fold([row], none, |m, [x]| x.max(m), Real::max);
    }
}

/// The two halves of `stats` of [`CrossEntropy::logit_sums`], for a block of rows.
#[inline(always)]
pub fn logit_sums<E: Float>(
    spec: &CrossEntropySpec,
    logits_tv: &[E],
    labels_t: &[i32],
    max_t: &[E::Acc],
    (sum_t, target_t): (&mut [E::Acc], &mut [E::Acc]),
) {
    if spec.entries == 0 {
        sum_t.fill(E::Acc::ZERO);
        return target_t.fill(E::Acc::ZERO);
    }
    let ins = labels_t.iter().zip(max_t);
    let outs = sum_t.iter_mut().zip(target_t);
    let rows = logits_tv.chunks_exact(spec.entries);
    for ((row, (&label, &max)), (s, target)) in rows.zip(ins).zip(outs) {
        *s = sum([row], |[x]| (x - max).exp());
        let mine = spec.entry(label).and_then(|v| row.get(v));
        *target = mine.map_or(E::Acc::ZERO, |x| x.to_acc() - max);
    }
}

/// See [`CrossEntropy::token_loss`].
#[inline(always)]
pub fn token_loss<A: Float>(sum_t: &[A], target_t: &[A], weight_t: &[A], loss_t: &mut [A]) {
    let stats = sum_t.iter().zip(target_t).zip(weight_t);
    for (loss, ((sum, target), weight)) in loss_t.iter_mut().zip(stats) {
        *loss = if weight.to_acc() == A::Acc::ZERO {
            A::zeroed()
        } else {
            A::from_acc(sum.to_acc().ln() - target.to_acc())
        };
    }
}

/// See [`CrossEntropy::logit_backward`].
#[inline(always)]
pub fn logit_backward<E: Float>(
    spec: &CrossEntropySpec,
    logits_tv: &[E],
    labels_t: &[i32],
    max_t: &[E::Acc],
    sum_t: &[E::Acc],
    weight_t: &[E::Acc],
    dlogits_tv: &mut [E],
) {
    let entries = spec.entries.max(1);
    let rows = logits_tv
        .chunks_exact(entries)
        .zip(dlogits_tv.chunks_exact_mut(entries));
    let stats = max_t.iter().zip(sum_t).zip(weight_t);
    for ((row, drow), (&label, ((&max, &sum), &weight))) in rows.zip(labels_t.iter().zip(stats)) {
        if weight == E::Acc::ZERO {
            drow.fill(E::zeroed());
            continue;
        }
        let scale = weight / sum;
        for (d, x) in drow.iter_mut().zip(row) {
            *d = E::from_acc((x.to_acc() - max).exp() * scale);
        }
        if let Some(v) = spec.entry(label)
            && let (Some(d), Some(x)) = (drow.get_mut(v), row.get(v))
        {
            // From the logit again, so that it too is rounded once.
            *d = E::from_acc((x.to_acc() - max).exp() * scale - weight);
        }
    }
}

impl CrossEntropy for Cpu {
    fn logit_max<E: Float>(
        &self,
        spec: &CrossEntropySpec,
        logits_tv: &[E],
        max_t: &mut [E::Acc],
    ) -> Result<(), Error> {
        need("logit_max", "logits", spec.len(), logits_tv.len())?;
        need("logit_max", "max", spec.tokens, max_t.len())?;
        if spec.entries == 0 {
            logit_max(spec, logits_tv, max_t);
            return Ok(());
        }
        let (rows, cut) = parts(spec);
        let items = logits_tv.chunks(cut).zip(max_t.chunks_mut(rows));
        self.for_each(
            items,
            #[inline(always)]
            |_, (logits, max)| logit_max(spec, logits, max),
        );
        Ok(())
    }

    fn logit_sums<E: Float>(
        &self,
        spec: &CrossEntropySpec,
        logits_tv: &[E],
        labels_t: &[i32],
        max_t: &[E::Acc],
        stats_2t: &mut [E::Acc],
    ) -> Result<(), Error> {
        let op = "logit_sums";
        need(op, "logits", spec.len(), logits_tv.len())?;
        need(op, "labels", spec.tokens, labels_t.len())?;
        need(op, "max", spec.tokens, max_t.len())?;
        need(op, "stats", spec.tokens.saturating_mul(2), stats_2t.len())?;
        let (sum, target) = stats_2t.split_at_mut(spec.tokens);
        if spec.entries == 0 {
            logit_sums(spec, logits_tv, labels_t, max_t, (sum, target));
            return Ok(());
        }
        let (rows, cut) = parts(spec);
        let ins = labels_t.chunks(rows).zip(max_t.chunks(rows));
        let outs = sum.chunks_mut(rows).zip(target.chunks_mut(rows));
        let items = logits_tv.chunks(cut).zip(ins).zip(outs);
        self.for_each(
            items,
            #[inline(always)]
            |_, ((logits, (labels, max)), stats)| {
                logit_sums(spec, logits, labels, max, stats);
            },
        );
        Ok(())
    }

    fn shift_sums<A: Float>(
        &self,
        spec: &CrossEntropySpec,
        labels_t: &[i32],
        here_t: &[A],
        max_t: &[A],
        stats_2t: &mut [A],
    ) -> Result<(), Error> {
        let op = "shift_sums";
        need(op, "labels", spec.tokens, labels_t.len())?;
        need(op, "my maxima", spec.tokens, here_t.len())?;
        need(op, "max", spec.tokens, max_t.len())?;
        need(op, "stats", spec.tokens.saturating_mul(2), stats_2t.len())?;
        let (sums, targets) = stats_2t.split_at_mut(spec.tokens);
        let maxima = here_t.iter().zip(max_t).zip(labels_t);
        for (((here, max), &label), (sum, target)) in maxima.zip(sums.iter_mut().zip(targets)) {
            let (here, max) = (here.to_acc(), max.to_acc());
            // Of two that are alike, minus infinity too, nothing moves.
            if here == max {
                continue;
            }
            *sum = A::from_acc(sum.to_acc() * (here - max).exp());
            if spec.entry(label).is_some() {
                *target = A::from_acc(target.to_acc() + (here - max));
            }
        }
        Ok(())
    }

    fn token_loss<A: Float>(
        &self,
        stats_2t: &[A],
        weight_t: &[A],
        loss_t: &mut [A],
    ) -> Result<(), Error> {
        let tokens = loss_t.len();
        need("token_loss", "weight", tokens, weight_t.len())?;
        need(
            "token_loss",
            "stats",
            tokens.saturating_mul(2),
            stats_2t.len(),
        )?;
        let (sum, target) = stats_2t.split_at(tokens);
        token_loss(sum, target, weight_t, loss_t);
        Ok(())
    }

    fn logit_backward<E: Float>(
        &self,
        spec: &CrossEntropySpec,
        logits_tv: &[E],
        labels_t: &[i32],
        max_t: &[E::Acc],
        stats_2t: &[E::Acc],
        weight_t: &[E::Acc],
        dlogits_tv: &mut [E],
    ) -> Result<(), Error> {
        let op = "logit_backward";
        need(op, "logits", spec.len(), logits_tv.len())?;
        need(op, "labels", spec.tokens, labels_t.len())?;
        need(op, "max", spec.tokens, max_t.len())?;
        need(op, "stats", spec.tokens.saturating_mul(2), stats_2t.len())?;
        need(op, "weight", spec.tokens, weight_t.len())?;
        need(op, "dlogits", spec.len(), dlogits_tv.len())?;
        let (rows, cut) = parts(spec);
        let sums = &stats_2t[..spec.tokens];
        let stats = max_t.chunks(rows).zip(sums.chunks(rows));
        let ins = labels_t.chunks(rows).zip(stats).zip(weight_t.chunks(rows));
        let logits = logits_tv.chunks(cut).zip(dlogits_tv.chunks_mut(cut));
        self.for_each(
            logits.zip(ins),
            #[inline(always)]
            |_, ((x, dx), ((labels, (max, sum)), w))| {
                logit_backward(spec, x, labels, max, sum, w, dx);
            },
        );
        Ok(())
    }
}

/// Rows and elements of one part of a call.
#[inline(always)]
fn parts(spec: &CrossEntropySpec) -> (usize, usize) {
    let rows = rows_per_part(spec.entries);
    (rows, rows * spec.entries.max(1))
}
