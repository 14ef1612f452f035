//! Router, permutation and groups of products by the letter, in f64.
//!
//! References for tests: they panic where a slice is too short.

use alloc::vec;
use alloc::vec::Vec;

use super::{GroupedSpec, LEAST_SUM, RouterSpec, Score};

/// choice, weight and sums of [`super::Router::route`].
#[must_use]
pub fn route(
    spec: &RouterSpec,
    logits: &[f64],
    bias: Option<&[f64]>,
) -> (Vec<i32>, Vec<f64>, Vec<f64>) {
    let n = spec.experts;
    let (mut choice, mut weight, mut sums) = (vec![], vec![], vec![0.0; n + 1]);
    for t in 0..spec.tokens {
        let l = &logits[t * n..(t + 1) * n];
        let p = scores(spec, l);
        // Sorting keeps equals in order.
        let mut order: Vec<usize> = (0..n).collect();
        let key = |e: usize| p[e] + bias.map_or(0.0, |b| b[e]);
        order.sort_by(|a, b| key(*b).total_cmp(&key(*a)));
        let chosen = &order[..spec.topk];
        choice.extend(chosen.iter().map(|e| *e as i32));
        weight.extend(weights(spec, &p, chosen));
        for (sum, q) in sums.iter_mut().zip(shares(spec, &p)) {
            *sum += q;
        }
        let z = log_sum(l);
        sums[n] += z * z;
    }
    (choice, weight, sums)
}

/// The scalar whose gradient with respect to the logits is what [`super::Router::route_backward`]
/// computes: `<dweight, weight> + <dsums, sums>` with the choice held.
#[must_use]
pub fn pairing(
    spec: &RouterSpec,
    logits: &[f64],
    choice: &[i32],
    dweight: &[f64],
    dsums: &[f64],
) -> f64 {
    let (n, k) = (spec.experts, spec.topk);
    let mut sum = 0.0;
    for t in 0..spec.tokens {
        let l = &logits[t * n..(t + 1) * n];
        let p = scores(spec, l);
        let chosen: Vec<usize> = choice[t * k..(t + 1) * k]
            .iter()
            .map(|e| *e as usize)
            .collect();
        let weight = weights(spec, &p, &chosen);
        sum += dot(&dweight[t * k..(t + 1) * k], &weight);
        sum += dot(&dsums[..n], &shares(spec, &p));
        sum += dsums[n] * log_sum(l) * log_sum(l);
    }
    sum
}

fn scores(spec: &RouterSpec, l: &[f64]) -> Vec<f64> {
    match spec.score {
        Score::Softmax => l.iter().map(|x| libm::exp(x - log_sum(l))).collect(),
        Score::Sigmoid => l.iter().map(|x| 1.0 / (1.0 + libm::exp(-x))).collect(),
    }
}

fn weights(spec: &RouterSpec, p: &[f64], chosen: &[usize]) -> Vec<f64> {
    let sum: f64 = chosen.iter().map(|e| p[*e]).sum::<f64>() + LEAST_SUM;
    let by = if spec.normalize { sum } else { 1.0 };
    chosen.iter().map(|e| spec.scale * p[*e] / by).collect()
}

fn shares(spec: &RouterSpec, p: &[f64]) -> Vec<f64> {
    let by = match spec.score {
        Score::Softmax => 1.0,
        Score::Sigmoid => p.iter().sum::<f64>() + LEAST_SUM,
    };
    p.iter().map(|p| p / by).collect()
}

fn log_sum(l: &[f64]) -> f64 {
    let max = l.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    max + libm::log(l.iter().map(|x| libm::exp(x - max)).sum::<f64>())
}

fn dot(x: &[f64], y: &[f64]) -> f64 {
    x.iter().zip(y).map(|(x, y)| x * y).sum()
}

/// [`super::Permute::combine`].
#[must_use]
pub fn combine(
    width: usize,
    topk: usize,
    rows: &[i32],
    weight: Option<&[f64]>,
    x: &[f64],
) -> Vec<f64> {
    let mut y = vec![0.0; rows.len() / topk * width];
    for (pair, &row) in rows.iter().enumerate().filter(|(_, row)| **row >= 0) {
        for d in 0..width {
            let w = weight.map_or(1.0, |w| w[pair]);
            y[pair / topk * width + d] += w * x[row as usize * width + d];
        }
    }
    y
}

/// dx and dweight of [`super::Permute::combine_backward`], of `rows_len` rows.
#[must_use]
pub fn combine_backward(
    (width, topk, rows_len): (usize, usize, usize),
    rows: &[i32],
    (weight, x): (&[f64], &[f64]),
    dy: &[f64],
) -> (Vec<f64>, Vec<f64>) {
    let (mut dx, mut dweight) = (vec![0.0; rows_len * width], vec![0.0; rows.len()]);
    for (pair, &row) in rows.iter().enumerate().filter(|(_, row)| **row >= 0) {
        for d in 0..width {
            let dy = dy[pair / topk * width + d];
            dx[row as usize * width + d] = weight[pair] * dy;
            dweight[pair] += dy * x[row as usize * width + d];
        }
    }
    (dx, dweight)
}

/// `y[r, n] = sum over k of x[r, k] w[group of r][n, k]`.
#[must_use]
pub fn grouped(spec: &GroupedSpec<'_>, x: &[f64], w: &[f64]) -> Vec<f64> {
    let (n, k) = (spec.n, spec.k);
    let mut y = vec![];
    for (r, g) in groups(spec).into_iter().enumerate() {
        for j in 0..n {
            let w = &w[(g * n + j) * k..][..k];
            y.push(dot(&x[r * k..(r + 1) * k], w));
        }
    }
    y
}

/// dx and dw of [`grouped`].
#[must_use]
pub fn grouped_backward(
    spec: &GroupedSpec<'_>,
    x: &[f64],
    w: &[f64],
    dy: &[f64],
) -> (Vec<f64>, Vec<f64>) {
    let (n, k) = (spec.n, spec.k);
    let (mut dx, mut dw) = (vec![0.0; x.len()], vec![0.0; w.len()]);
    for (r, g) in groups(spec).into_iter().enumerate() {
        for j in 0..n {
            for i in 0..k {
                dx[r * k + i] += dy[r * n + j] * w[(g * n + j) * k + i];
                dw[(g * n + j) * k + i] += dy[r * n + j] * x[r * k + i];
            }
        }
    }
    (dx, dw)
}

/// The group of each row.
fn groups(spec: &GroupedSpec<'_>) -> Vec<usize> {
    let each = spec.counts.iter().enumerate();
    each.flat_map(|(g, rows)| core::iter::repeat_n(g, *rows))
        .collect()
}
