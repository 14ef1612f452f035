//! Router and rows on slices. The router is a loop over tokens on one thread, so that its sums are
//! in token order; rows are shared among the threads.

use alloc::vec;

use super::{Combine, LEAST_SUM, Permute, Routed, Router, RouterSpec, Score};
use crate::activation::cpu::sigmoid;
use crate::error::need;
use crate::lanes::rows_per_part;
use crate::{Cpu, Error, Float, Real};

impl Router for Cpu {
    fn route<A: Real>(
        &self,
        spec: &RouterSpec,
        logits_te: &[A],
        bias_e: Option<&[A]>,
        out: Routed<'_, Self, A>,
    ) -> Result<(), Error> {
        let Routed {
            choice_tk,
            weight_tk,
            sums_e,
        } = out;
        let lens = [
            ("logits", logits_te.len()),
            ("choice", choice_tk.len()),
            ("weight", weight_tk.len()),
            ("sums", sums_e.len()),
        ];
        spec.check("route", lens)?;
        if let Some(bias) = bias_e {
            need("route", "bias", spec.experts, bias.len())?;
        }
        sums_e.fill(A::ZERO);
        let mut p_e = vec![A::ZERO; spec.experts];
        let outs = choice_tk
            .chunks_mut(spec.topk)
            .zip(weight_tk.chunks_mut(spec.topk));
        for (logits_e, (choice_k, weight_k)) in logits_te.chunks(spec.experts).zip(outs) {
            let z = scores(spec.score, logits_e, &mut p_e);
            choose(&p_e, bias_e, choice_k);
            weigh(spec, &p_e, choice_k, weight_k);
            let by = share_of(spec.score, &p_e);
            for (sum, p) in sums_e.iter_mut().zip(&p_e) {
                *sum += *p / by;
            }
            sums_e[spec.experts] += z * z;
        }
        Ok(())
    }

    fn route_backward<A: Real>(
        &self,
        spec: &RouterSpec,
        logits_te: &[A],
        choice_tk: &[i32],
        (dweight_tk, dsums_e): (&[A], &[A]),
        dlogits_te: &mut [A],
    ) -> Result<(), Error> {
        let lens = [
            ("logits", logits_te.len()),
            ("choice", choice_tk.len()),
            ("dweight", dweight_tk.len()),
            ("dsums", dsums_e.len()),
        ];
        spec.check("route_backward", lens)?;
        need(
            "route_backward",
            "dlogits",
            logits_te.len(),
            dlogits_te.len(),
        )?;
        let (mut p_e, mut dp_e) = (vec![A::ZERO; spec.experts], vec![A::ZERO; spec.experts]);
        let (dq_e, dz) = dsums_e.split_at(spec.experts);
        let ins = logits_te
            .chunks(spec.experts)
            .zip(choice_tk.chunks(spec.topk));
        let ins = ins.zip(dweight_tk.chunks(spec.topk));
        for (((logits_e, choice_k), dweight_k), dlogits_e) in
            ins.zip(dlogits_te.chunks_mut(spec.experts))
        {
            let z = scores(spec.score, logits_e, &mut p_e);
            dshares(spec.score, &p_e, dq_e, &mut dp_e);
            dweigh(spec, &p_e, choice_k, dweight_k, &mut dp_e);
            dscores(spec.score, &p_e, &dp_e, dlogits_e);
            let pull = (dz[0] + dz[0]) * z;
            for (dl, l) in dlogits_e.iter_mut().zip(logits_e) {
                *dl += pull * (*l - z).exp();
            }
        }
        Ok(())
    }
}

/// Scores of a token, and the logarithm of the sum of its exponentials.
fn scores<A: Real>(score: Score, logits_e: &[A], p_e: &mut [A]) -> A {
    let max = logits_e.iter().fold(A::NEG_INFINITY, |m, l| m.max(*l));
    let mut sum = A::ZERO;
    for (p, l) in p_e.iter_mut().zip(logits_e) {
        *p = (*l - max).exp();
        sum += *p;
    }
    for (p, l) in p_e.iter_mut().zip(logits_e) {
        *p = match score {
            Score::Softmax => *p / sum,
            Score::Sigmoid => sigmoid(*l),
        };
    }
    max + sum.ln()
}

fn dscores<A: Real>(score: Score, p_e: &[A], dp_e: &[A], dlogits_e: &mut [A]) {
    let pull = match score {
        Score::Softmax => dot(p_e, dp_e),
        Score::Sigmoid => A::ZERO,
    };
    for ((dl, p), dp) in dlogits_e.iter_mut().zip(p_e).zip(dp_e) {
        *dl = match score {
            Score::Softmax => *p * (*dp - pull),
            Score::Sigmoid => *dp * *p * (A::ONE - *p),
        };
    }
}

/// The best of those not yet chosen, again and again; of equals the first.
fn choose<A: Real>(p_e: &[A], bias_e: Option<&[A]>, choice_k: &mut [i32]) {
    for k in 0..choice_k.len() {
        let mut best: Option<(usize, A)> = None;
        for (e, p) in p_e.iter().enumerate() {
            let key = *p + bias_e.map_or(A::ZERO, |b| b[e]);
            let taken = choice_k[..k].contains(&(e as i32));
            if !taken && best.is_none_or(|(_, most)| key > most) {
                best = Some((e, key));
            }
        }
        choice_k[k] = best.map_or(0, |(e, _)| e as i32);
    }
}

fn of<A: Real>(p_e: &[A], e: i32) -> A {
    let found = usize::try_from(e).ok().and_then(|e| p_e.get(e));
    found.copied().unwrap_or(A::ZERO)
}

/// What the weights of a choice are divided by.
fn sum_of<A: Real>(spec: &RouterSpec, p_e: &[A], choice_k: &[i32]) -> A {
    if !spec.normalize {
        return A::ONE;
    }
    let sum = choice_k.iter().fold(A::ZERO, |sum, e| sum + of(p_e, *e));
    sum + A::from_f64(LEAST_SUM)
}

fn weigh<A: Real>(spec: &RouterSpec, p_e: &[A], choice_k: &[i32], weight_k: &mut [A]) {
    let (scale, sum) = (A::from_f64(spec.scale), sum_of(spec, p_e, choice_k));
    for (w, e) in weight_k.iter_mut().zip(choice_k) {
        *w = scale * of(p_e, *e) / sum;
    }
}

/// Adds to dp: `dp[e of k] += scale (dw[k] - [sum over j of dw[j] p[e of j] / sum]) / sum`.
fn dweigh<A: Real>(
    spec: &RouterSpec,
    p_e: &[A],
    choice_k: &[i32],
    dweight_k: &[A],
    dp_e: &mut [A],
) {
    let (scale, sum) = (A::from_f64(spec.scale), sum_of(spec, p_e, choice_k));
    let mut pull = A::ZERO;
    if spec.normalize {
        for (e, dw) in choice_k.iter().zip(dweight_k) {
            pull += *dw * of(p_e, *e) / sum;
        }
    }
    for (e, dw) in choice_k.iter().zip(dweight_k) {
        if let Some(dp) = usize::try_from(*e).ok().and_then(|e| dp_e.get_mut(e)) {
            *dp += scale * (*dw - pull) / sum;
        }
    }
}

/// What scores are divided by to be shares.
fn share_of<A: Real>(score: Score, p_e: &[A]) -> A {
    match score {
        Score::Softmax => A::ONE,
        Score::Sigmoid => p_e.iter().fold(A::ZERO, |sum, p| sum + *p) + A::from_f64(LEAST_SUM),
    }
}

/// Overwrites dp with the gradient through the shares.
fn dshares<A: Real>(score: Score, p_e: &[A], dq_e: &[A], dp_e: &mut [A]) {
    let by = share_of(score, p_e);
    let pull = match score {
        Score::Softmax => A::ZERO,
        Score::Sigmoid => dot(p_e, dq_e) / by,
    };
    for (dp, dq) in dp_e.iter_mut().zip(dq_e) {
        *dp = (*dq - pull) / by;
    }
}

fn dot<A: Real>(x: &[A], y: &[A]) -> A {
    x.iter().zip(y).fold(A::ZERO, |sum, (x, y)| sum + *x * *y)
}

/// A row by its number.
fn row<E>(x: &[E], width: usize, index: i32) -> Option<&[E]> {
    let first = usize::try_from(index).ok()?.checked_mul(width)?;
    x.get(first..first.checked_add(width)?)
}

impl Permute for Cpu {
    fn gather_rows<E: Float>(
        &self,
        width: usize,
        index_r: &[i32],
        x: &[E],
        y: &mut [E],
    ) -> Result<(), Error> {
        let op = "gather_rows";
        need(op, "y", index_r.len().saturating_mul(width), y.len())?;
        need(op, "x", x.len() / width.max(1) * width, x.len())?;
        let rows = rows_per_part(width);
        let parts = index_r.chunks(rows).zip(y.chunks_mut(rows * width.max(1)));
        self.for_each(parts, |_, (index_r, y)| {
            for (&index, y) in index_r.iter().zip(y.chunks_exact_mut(width.max(1))) {
                match row(x, width, index) {
                    Some(x) => y.copy_from_slice(x),
                    None => y.fill(E::zeroed()),
                }
            }
        });
        Ok(())
    }

    fn combine<E: Float>(
        &self,
        by: Combine<'_, Self>,
        weight_tk: Option<&[E::Acc]>,
        x_rd: &[E],
        y_td: &mut [E],
    ) -> Result<(), Error> {
        let weights = weight_tk.map_or(by.rows_tk.len(), <[E::Acc]>::len);
        check(by, "combine", [weights, x_rd.len(), y_td.len()])?;
        let (width, topk, tokens) = (by.width.max(1), by.topk.max(1), rows_per_part(by.width));
        let parts = by
            .rows_tk
            .chunks(tokens * topk)
            .zip(y_td.chunks_mut(tokens * width));
        self.for_each(parts, |part, (rows_tk, y_td)| {
            let mut sum_d = vec![E::Acc::ZERO; width];
            for (t, (rows_k, y_d)) in rows_tk
                .chunks(topk)
                .zip(y_td.chunks_exact_mut(width))
                .enumerate()
            {
                sum_d.fill(E::Acc::ZERO);
                for (k, &index) in rows_k.iter().enumerate() {
                    let Some(x_d) = row(x_rd, width, index) else {
                        continue;
                    };
                    let pair = (part * tokens + t) * topk + k;
                    let weight = weight_tk.map_or(E::Acc::ONE, |w| w[pair]);
                    for (sum, x) in sum_d.iter_mut().zip(x_d) {
                        *sum += weight * x.to_acc();
                    }
                }
                for (y, sum) in y_d.iter_mut().zip(&sum_d) {
                    *y = E::from_acc(*sum);
                }
            }
        });
        Ok(())
    }

    fn combine_backward<E: Float>(
        &self,
        by: Combine<'_, Self>,
        (weight_tk, x_rd): (&[E::Acc], &[E]),
        dy_td: &[E],
        dx_rd: &mut [E],
        dweight_tk: &mut [E::Acc],
    ) -> Result<(), Error> {
        let op = "combine_backward";
        check(by, op, [weight_tk.len(), x_rd.len(), dy_td.len()])?;
        need(op, "dx", x_rd.len(), dx_rd.len())?;
        need(op, "dweight", weight_tk.len(), dweight_tk.len())?;
        let (width, topk, rows) = (by.width.max(1), by.topk.max(1), rows_per_part(by.width));
        let parts = by.pairs_r.chunks(rows).zip(dx_rd.chunks_mut(rows * width));
        self.for_each(parts, |_, (pairs_r, dx_rd)| {
            for (&pair, dx_d) in pairs_r.iter().zip(dx_rd.chunks_exact_mut(width)) {
                let weight = of(weight_tk, pair);
                let Some(dy_d) = row(dy_td, width, pair / topk as i32) else {
                    dx_d.fill(E::zeroed());
                    continue;
                };
                for (dx, dy) in dx_d.iter_mut().zip(dy_d) {
                    *dx = E::from_acc(weight * dy.to_acc());
                }
            }
        });
        let parts = by.rows_tk.chunks(rows).zip(dweight_tk.chunks_mut(rows));
        self.for_each(parts, |part, (rows_tk, dweight_tk)| {
            for (i, (&index, dweight)) in rows_tk.iter().zip(dweight_tk).enumerate() {
                let token = (part * rows + i) / topk;
                let (x, dy) = (row(x_rd, width, index), row(dy_td, width, token as i32));
                let pairs = x.into_iter().flatten().zip(dy.into_iter().flatten());
                *dweight = pairs.fold(E::Acc::ZERO, |sum, (x, dy)| sum + x.to_acc() * dy.to_acc());
            }
        });
        Ok(())
    }
}

fn check(by: Combine<'_, Cpu>, op: &'static str, lens: [usize; 3]) -> Result<(), Error> {
    let pairs = by.tokens.saturating_mul(by.topk);
    need(op, "rows", pairs, by.rows_tk.len())?;
    need(op, "weight", pairs, lens[0])?;
    need(op, "x", by.pairs_r.len().saturating_mul(by.width), lens[1])?;
    need(op, "y", by.tokens.saturating_mul(by.width), lens[2])
}
