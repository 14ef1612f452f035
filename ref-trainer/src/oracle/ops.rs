//! The operations, each with its backward beside it.
//!
//! A backward takes the gradient of its result, adds the gradient of a weight into `dw` and
//! returns the gradient of its input.

use quintet_planner::config::ModelConfig;

use super::sight::Sight;

/// `y[t,o] = sum_i x[t,i] w[o,i]`.
pub(super) fn linear(x_ti: &[f64], w_oi: &[f64], i: usize, o: usize) -> Vec<f64> {
    let t = x_ti.len() / i;
    let mut y_to = vec![0.0; t * o];
    matmul_add(&mut y_to, x_ti, &transpose(w_oi, o, i), i, o);
    y_to
}

/// `dw[o,i] += sum_t dy[t,o] x[t,i]`, `dx[t,i] = sum_o dy[t,o] w[o,i]`.
pub(super) fn linear_backward(
    dy_to: &[f64],
    x_ti: &[f64],
    w_oi: &[f64],
    dw_oi: &mut [f64],
    i: usize,
    o: usize,
) -> Vec<f64> {
    let t = x_ti.len() / i;
    matmul_add(dw_oi, &transpose(dy_to, t, o), x_ti, t, i);
    let mut dx_ti = vec![0.0; t * i];
    matmul_add(&mut dx_ti, dy_to, w_oi, o, i);
    dx_ti
}

/// `c[m,n] += sum_k a[m,k] b[k,n]`, with n innermost so that every access is to the next element.
fn matmul_add(c_mn: &mut [f64], a_mk: &[f64], b_kn: &[f64], k: usize, n: usize) {
    if k == 0 {
        return;
    }
    for (c_n, a_k) in c_mn.chunks_exact_mut(n).zip(a_mk.chunks_exact(k)) {
        for (a, b_n) in a_k.iter().zip(b_kn.chunks_exact(n)) {
            add_scaled(c_n, *a, b_n);
        }
    }
}

fn transpose(x_rc: &[f64], r: usize, c: usize) -> Vec<f64> {
    let mut x_cr = vec![0.0; r * c];
    for row in 0..r {
        for col in 0..c {
            x_cr[col * r + row] = x_rc[row * c + col];
        }
    }
    x_cr
}

/// `y += x`.
pub(super) fn add(y: &mut [f64], x: &[f64]) {
    add_scaled(y, 1.0, x);
}

/// `y += a x`.
fn add_scaled(y: &mut [f64], a: f64, x: &[f64]) {
    for (y, x) in y.iter_mut().zip(x) {
        *y += a * x;
    }
}

fn dot(x: &[f64], y: &[f64]) -> f64 {
    x.iter().zip(y).map(|(x, y)| x * y).sum()
}

/// `y[t,d] = w[d] x[t,d] r[t]` with `r[t] = 1 / sqrt(mean_d(x[t,d]^2) + eps)`.
pub(super) fn rms_norm(x_td: &[f64], w_d: &[f64], eps: f64) -> Vec<f64> {
    let mut y_td = Vec::with_capacity(x_td.len());
    for x_d in x_td.chunks_exact(w_d.len()) {
        let r = inverse_rms(x_d, eps);
        y_td.extend(x_d.iter().zip(w_d).map(|(x, w)| w * x * r));
    }
    y_td
}

/// With `g = w dy`: `dx = r g - x r^3 mean(g x)`, and `dw[d] += sum_t dy x r`.
pub(super) fn rms_norm_backward(
    dy_td: &[f64],
    x_td: &[f64],
    w_d: &[f64],
    dw_d: &mut [f64],
    eps: f64,
) -> Vec<f64> {
    let d = w_d.len();
    let mut dx_td = Vec::with_capacity(x_td.len());
    for (x_d, dy_d) in x_td.chunks_exact(d).zip(dy_td.chunks_exact(d)) {
        let r = inverse_rms(x_d, eps);
        let g_d: Vec<f64> = w_d.iter().zip(dy_d).map(|(w, dy)| w * dy).collect();
        let pull = r * r * r * dot(&g_d, x_d) / d as f64;
        dx_td.extend(g_d.iter().zip(x_d).map(|(g, x)| r * g - pull * x));
        for ((dw, dy), x) in dw_d.iter_mut().zip(dy_d).zip(x_d) {
            *dw += dy * x * r;
        }
    }
    dx_td
}

fn inverse_rms(x_d: &[f64], eps: f64) -> f64 {
    1.0 / (dot(x_d, x_d) / x_d.len() as f64 + eps).sqrt()
}

/// `y[t,d] = w[d] n[t,d] + b[d]` with `n[t] = (x[t] - mean(x[t])) / sqrt(variance(x[t]) + eps)`.
pub(super) fn layer_norm(x_td: &[f64], w_d: &[f64], b_d: &[f64], eps: f64) -> Vec<f64> {
    let mut y_td = Vec::with_capacity(x_td.len());
    for x_d in x_td.chunks_exact(w_d.len()) {
        let (n_d, _) = standard(x_d, eps);
        y_td.extend(n_d.iter().zip(w_d).zip(b_d).map(|((n, w), b)| w * n + b));
    }
    y_td
}

/// With `g = w dy`: `dx = r (g - mean(g) - n mean(g n))`; `dw += sum_t dy n`, `db += sum_t dy`.
pub(super) fn layer_norm_backward(
    dy_td: &[f64],
    x_td: &[f64],
    w_d: &[f64],
    (dw_d, db_d): (&mut [f64], &mut [f64]),
    eps: f64,
) -> Vec<f64> {
    let d = w_d.len();
    let mut dx_td = Vec::with_capacity(x_td.len());
    for (x_d, dy_d) in x_td.chunks_exact(d).zip(dy_td.chunks_exact(d)) {
        let (n_d, r) = standard(x_d, eps);
        let g_d: Vec<f64> = w_d.iter().zip(dy_d).map(|(w, dy)| w * dy).collect();
        let (mean, pull) = (
            g_d.iter().sum::<f64>() / d as f64,
            dot(&g_d, &n_d) / d as f64,
        );
        dx_td.extend(g_d.iter().zip(&n_d).map(|(g, n)| r * (g - mean - n * pull)));
        for ((dw, dy), n) in dw_d.iter_mut().zip(dy_d).zip(&n_d) {
            *dw += dy * n;
        }
        add(db_d, dy_d);
    }
    dx_td
}

/// A row with mean 0 and variance 1 (but for eps), and the factor that made it so.
fn standard(x_d: &[f64], eps: f64) -> (Vec<f64>, f64) {
    let mean = x_d.iter().sum::<f64>() / x_d.len() as f64;
    let centred: Vec<f64> = x_d.iter().map(|x| x - mean).collect();
    let r = inverse_rms(&centred, eps);
    (centred.iter().map(|x| x * r).collect(), r)
}

/// Which way [`rope`] turns.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Turn {
    /// By the angle: forward.
    Forward,
    /// By minus the angle: the transpose of forward, and so its backward.
    Back,
}

/// Rotary positions (Su et al. 2021), halves paired as Llama's files do: of the first r elements
/// of each head, `j` and `j + r/2` are a point of the plane, turned by `position theta^(-2j/r)`.
/// `x_the` is changed in place; token t of it stands at `positions[t]`.
pub(super) fn rope(
    x_the: &mut [f64],
    positions: &[usize],
    (head_dim, rotary): (usize, usize),
    theta: f64,
    turn: Turn,
) {
    let (half, row) = (rotary / 2, x_the.len() / positions.len().max(1));
    for (x_he, position) in x_the.chunks_exact_mut(row.max(1)).zip(positions) {
        for j in 0..half {
            let frequency = theta.powf(-2.0 * j as f64 / rotary as f64);
            let (sin, cos) = (*position as f64 * frequency).sin_cos();
            let sin = if turn == Turn::Forward { sin } else { -sin };
            for x_e in x_he.chunks_exact_mut(head_dim) {
                let (a, b) = (x_e[j], x_e[j + half]);
                x_e[j] = a * cos - b * sin;
                x_e[j + half] = b * cos + a * sin;
            }
        }
    }
}

/// Causal attention: `o[t,h] = sum_s p[h,t,s] v[s,k]` over s from `first[t]` to t, where
/// `p[h,t] = softmax over those s of q[t,h] . k[s,k] / sqrt(e)`, and query head h reads key/value
/// head `k = h / (heads / kv_heads)`. Returns `o_the` and `p_hts` (0 elsewhere).
pub(super) fn attention(
    config: &ModelConfig,
    (sight, site): (&Sight, u32),
    q_the: &[f64],
    k_ske: &[f64],
    v_ske: &[f64],
) -> (Vec<f64>, Vec<f64>) {
    let first = &sight.first;
    let (heads, e) = (config.heads, config.head_dim);
    let tokens = q_the.len() / (heads * e);
    let (mut o_the, mut p_hts) = (vec![0.0; q_the.len()], vec![0.0; heads * tokens * tokens]);
    for h in 0..heads {
        for t in 0..tokens {
            let row = at(t, h, heads, e);
            let p_s = &mut p_hts[(h * tokens + t) * tokens..][first[t]..=t];
            for (s, p) in (first[t]..).zip(p_s.iter_mut()) {
                let score =
                    dot(&q_the[row.clone()], &k_ske[kv_at(config, s, h)]) / (e as f64).sqrt();
                *p = capped(config, score).0;
            }
            softmax(p_s);
            for (s, p) in (first[t]..).zip(p_s.iter()) {
                let p = p * sight.dropout.of_pair(site, h, (t, s));
                add_scaled(&mut o_the[row.clone()], p, &v_ske[kv_at(config, s, h)]);
            }
        }
    }
    (o_the, p_hts)
}

/// Gradients of q, k and v. With `dp[s] = do[t] . v[s]`, the softmax gives
/// `dscore[s] = p[s] (dp[s] - sum_s p[s] dp[s])`, times the slope of the cap where scores have one.
pub(super) fn attention_backward(
    config: &ModelConfig,
    (sight, site): (&Sight, u32),
    do_the: &[f64],
    (q_the, k_ske, v_ske): (&[f64], &[f64], &[f64]),
    p_hts: &[f64],
) -> (Vec<f64>, Vec<f64>, Vec<f64>) {
    let (heads, e, first) = (config.heads, config.head_dim, &sight.first);
    let tokens = q_the.len() / (heads * e);
    let mut dq_the = vec![0.0; q_the.len()];
    let (mut dk_ske, mut dv_ske) = (vec![0.0; k_ske.len()], vec![0.0; v_ske.len()]);
    for h in 0..heads {
        for t in 0..tokens {
            let row = at(t, h, heads, e);
            let p_s = &p_hts[(h * tokens + t) * tokens..][first[t]..=t];
            let factors: Vec<f64> = (first[t]..=t)
                .map(|s| sight.dropout.of_pair(site, h, (t, s)))
                .collect();
            let dp_s: Vec<f64> = (first[t]..=t)
                .zip(&factors)
                .map(|(s, f)| f * dot(&do_the[row.clone()], &v_ske[kv_at(config, s, h)]))
                .collect();
            let pull = dot(p_s, &dp_s);
            for (s, (p, dp)) in (first[t]..).zip(p_s.iter().zip(&dp_s)) {
                let kv = kv_at(config, s, h);
                let mut dscore = p * (dp - pull) / (e as f64).sqrt();
                if config.architecture.softcap.is_some() {
                    let score = dot(&q_the[row.clone()], &k_ske[kv.clone()]) / (e as f64).sqrt();
                    dscore *= capped(config, score).1;
                }
                let stays = p * factors[s - first[t]];
                add_scaled(&mut dv_ske[kv.clone()], stays, &do_the[row.clone()]);
                add_scaled(&mut dq_the[row.clone()], dscore, &k_ske[kv.clone()]);
                add_scaled(&mut dk_ske[kv], dscore, &q_the[row.clone()]);
            }
        }
    }
    (dq_the, dk_ske, dv_ske)
}

/// A score as the softmax takes it, and the derivative of that.
fn capped(config: &ModelConfig, score: f64) -> (f64, f64) {
    match config.architecture.softcap {
        None => (score, 1.0),
        Some(cap) => {
            let part = (score / cap).tanh();
            (cap * part, 1.0 - part * part)
        }
    }
}

/// Where head `head` of token `token` lies, among rows of `heads` heads.
fn at(token: usize, head: usize, heads: usize, e: usize) -> std::ops::Range<usize> {
    let first = (token * heads + head) * e;
    first..first + e
}

/// Where token `token` of the key/value head that query head `h` reads lies.
fn kv_at(config: &ModelConfig, token: usize, h: usize) -> std::ops::Range<usize> {
    let k = h / (config.heads / config.kv_heads);
    at(token, k, config.kv_heads, config.head_dim)
}

/// `silu(gate) up`, with `silu(x) = x / (1 + exp(-x))`.
pub(super) fn swiglu(gate_tf: &[f64], up_tf: &[f64]) -> Vec<f64> {
    let pairs = gate_tf.iter().zip(up_tf);
    pairs.map(|(g, u)| g * sigmoid(*g) * u).collect()
}

/// Gradients of gate and up; `silu'(x) = s (1 + x (1 - s))` with `s = sigmoid(x)`.
pub(super) fn swiglu_backward(
    dy_tf: &[f64],
    gate_tf: &[f64],
    up_tf: &[f64],
) -> (Vec<f64>, Vec<f64>) {
    let all = dy_tf.iter().zip(gate_tf).zip(up_tf);
    all.map(|((dy, g), u)| {
        let s = sigmoid(*g);
        (dy * u * s * (1.0 + g * (1.0 - s)), dy * g * s)
    })
    .unzip()
}

/// `0.5 x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3)))`: GELU as GPT-2 has it.
pub(super) fn gelu(x_tf: &[f64]) -> Vec<f64> {
    let one = |x: &f64| 0.5 * x * (1.0 + gelu_argument(*x).tanh());
    x_tf.iter().map(one).collect()
}

/// With `u` the argument of tanh: `gelu' = 0.5 (1 + tanh u) + 0.5 x (1 - tanh^2 u) u'`.
pub(super) fn gelu_backward(dy_tf: &[f64], x_tf: &[f64]) -> Vec<f64> {
    let one = |(dy, x): (&f64, &f64)| {
        let tanh = gelu_argument(*x).tanh();
        let slope = (2.0 / std::f64::consts::PI).sqrt() * (1.0 + 3.0 * 0.044715 * x * x);
        dy * (0.5 * (1.0 + tanh) + 0.5 * x * (1.0 - tanh * tanh) * slope)
    };
    dy_tf.iter().zip(x_tf).map(one).collect()
}

fn gelu_argument(x: f64) -> f64 {
    (2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x * x * x)
}

fn sigmoid(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}

/// Turns scores into probabilities in place, and returns log(sum(exp(score))).
pub(super) fn softmax(scores: &mut [f64]) -> f64 {
    let max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let sum: f64 = scores.iter().map(|s| (s - max).exp()).sum();
    for score in scores.iter_mut() {
        *score = (*score - max).exp() / sum;
    }
    max + sum.ln()
}
