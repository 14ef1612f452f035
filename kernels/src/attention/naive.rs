//! Attention in f64 with the whole score row in memory, as its definition reads.

use alloc::vec;
use alloc::vec::Vec;

use super::AttentionSpec;

/// Inputs of one call, widened to f64.
#[derive(Debug, Clone, Copy)]
pub struct Inputs<'a> {
    /// Queries, `[b, s, h, d]`.
    pub q: &'a [f64],
    /// Keys, `[b, z, g, d]`.
    pub k: &'a [f64],
    /// Values, `[b, z, g, d]`.
    pub v: &'a [f64],
    /// Positions of the queries, `[b, s]`.
    pub q_pos: &'a [i32],
    /// Positions of the keys, `[b, z]`.
    pub k_pos: &'a [i32],
    /// Documents of queries and keys, shaped as the positions.
    pub documents: Option<(&'a [i32], &'a [i32])>,
    /// Places of queries and keys in their samples, where they are not the positions.
    pub at: Option<(&'a [i32], &'a [i32])>,
}

impl Inputs<'_> {
    /// Scores of query (b, s, h) against every key; minus infinity where hidden.
    fn scores(&self, spec: &AttentionSpec, (b, s, h): (usize, usize, usize)) -> Vec<f64> {
        let q = &self.q[q_at(spec, b, s, h)..][..spec.head_dim];
        let score = |z: usize| {
            let k = &self.k[k_at(spec, b, z, h)..][..spec.head_dim];
            match self.sees(spec, b * spec.queries + s, b * spec.keys + z) {
                true => capped(spec, spec.scale * dot(q, k)).0,
                false => f64::NEG_INFINITY,
            }
        };
        (0..spec.keys).map(score).collect()
    }

    /// What is left of the probability of key `z` for query (b, s, h), as a factor.
    fn stays(&self, spec: &AttentionSpec, (b, s, h): (usize, usize, usize), z: usize) -> f64 {
        let Some(of) = spec.dropout else {
            return 1.0;
        };
        let (q, k) = self.at.unwrap_or((self.q_pos, self.k_pos));
        let (row, column) = (q[b * spec.queries + s], k[b * spec.keys + z]);
        let draws = of.dropout.draws(b, of.first_head + h);
        match draws.keeps(row as u32, column as u32) {
            true => of.dropout.scale(),
            false => 0.0,
        }
    }

    /// Whether the query at `s` sees the key at `z`.
    fn sees(&self, spec: &AttentionSpec, s: usize, z: usize) -> bool {
        let before = i64::from(self.q_pos[s]) - i64::from(self.k_pos[z]);
        let causal = !spec.causal || before >= 0;
        let near = spec.window.is_none_or(|w| i128::from(before) < w as i128);
        let document = self.documents.is_none_or(|(q, k)| q[s] == k[z]);
        causal && near && document
    }
}

/// `(o_bshd, lse_bhs)`.
#[must_use]
pub fn forward(spec: &AttentionSpec, x: Inputs<'_>) -> (Vec<f64>, Vec<f64>) {
    let mut o = vec![0.0; x.q.len()];
    let mut lse = vec![f64::NEG_INFINITY; spec.batch * spec.heads * spec.queries];
    for (b, s, h) in rows(spec) {
        let scores = x.scores(spec, (b, s, h));
        let max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        if max == f64::NEG_INFINITY {
            continue;
        }
        let sum: f64 = scores.iter().map(|s| libm::exp(s - max)).sum();
        lse[lse_at(spec, b, s, h)] = max + libm::log(sum);
        for (z, score) in scores.iter().enumerate() {
            let p = libm::exp(score - max) / sum * x.stays(spec, (b, s, h), z);
            for i in 0..spec.head_dim {
                o[q_at(spec, b, s, h) + i] += p * x.v[k_at(spec, b, z, h) + i];
            }
        }
    }
    (o, lse)
}

/// Gradients of q, k and v: the softmax's own derivative, row by row.
#[must_use]
pub fn backward(
    spec: &AttentionSpec,
    x: Inputs<'_>,
    do_bshd: &[f64],
) -> (Vec<f64>, Vec<f64>, Vec<f64>) {
    let (mut dq, mut dk, mut dv) = (
        vec![0.0; x.q.len()],
        vec![0.0; x.k.len()],
        vec![0.0; x.v.len()],
    );
    let (_, lse) = forward(spec, x);
    for (b, s, h) in rows(spec) {
        let scores = x.scores(spec, (b, s, h));
        let lse = lse[lse_at(spec, b, s, h)];
        let seen = |score: f64| score != f64::NEG_INFINITY;
        let p = |score: f64| {
            if seen(score) {
                libm::exp(score - lse)
            } else {
                0.0
            }
        };
        let q_row = q_at(spec, b, s, h);
        let do_ = &do_bshd[q_row..][..spec.head_dim];
        let stays = |z: usize| x.stays(spec, (b, s, h), z);
        let dp = |z: usize| stays(z) * dot(do_, &x.v[k_at(spec, b, z, h)..][..spec.head_dim]);
        let delta: f64 = (0..spec.keys).map(|z| p(scores[z]) * dp(z)).sum();
        for z in 0..spec.keys {
            let k_row = k_at(spec, b, z, h);
            let k = &x.k[k_row..][..spec.head_dim];
            let slope = capped(spec, spec.scale * dot(&x.q[q_row..][..spec.head_dim], k)).1;
            let ds = p(scores[z]) * (dp(z) - delta) * spec.scale * slope;
            for i in 0..spec.head_dim {
                dq[q_row + i] += ds * x.k[k_row + i];
                dk[k_row + i] += ds * x.q[q_row + i];
                dv[k_row + i] += stays(z) * p(scores[z]) * do_[i];
            }
        }
    }
    (dq, dk, dv)
}

/// A scaled score, capped, and the derivative of that.
fn capped(spec: &AttentionSpec, score: f64) -> (f64, f64) {
    let Some(cap) = spec.softcap else {
        return (score, 1.0);
    };
    let part = libm::tanh(score / cap);
    (cap * part, 1.0 - part * part)
}

fn rows(spec: &AttentionSpec) -> impl Iterator<Item = (usize, usize, usize)> {
    let AttentionSpec {
        batch,
        queries,
        heads,
        ..
    } = *spec;
    (0..batch * queries * heads).map(move |i| (i / heads / queries, i / heads % queries, i % heads))
}

fn q_at(spec: &AttentionSpec, b: usize, s: usize, h: usize) -> usize {
    ((b * spec.queries + s) * spec.heads + h) * spec.head_dim
}

/// Of the KV head that query head `h` reads.
fn k_at(spec: &AttentionSpec, b: usize, z: usize, h: usize) -> usize {
    let g = h / (spec.heads / spec.kv_heads);
    ((b * spec.keys + z) * spec.kv_heads + g) * spec.head_dim
}

fn lse_at(spec: &AttentionSpec, b: usize, s: usize, h: usize) -> usize {
    (b * spec.heads + h) * spec.queries + s
}

fn dot(x: &[f64], y: &[f64]) -> f64 {
    x.iter().zip(y).map(|(x, y)| x * y).sum()
}
