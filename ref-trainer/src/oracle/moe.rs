//! A mixture of experts, for all tokens of a microbatch at once: who chose whom decides what is
//! dropped, and what the loss of balance is.
//!
//! ```text
//! score[t,e]   softmax over e of logit[t,e], or the sigmoid of each
//! chosen[t]    the k experts of the largest score + bias; of equals the lower number
//! weight[t,j]  scale score[t,chosen j] [/ sum over j of score]
//! y[t]         sum over j of weight[t,j] mlp of chosen j (x[t]), without what was dropped
//! balance      E sum over e of (share of all choices that fell on e) (mean over t of share[t,e])
//! z            mean over t of log(sum over e of exp(logit[t,e]))^2
//! ```
//!
//! Shapes: t token of the microbatch, d hidden, e expert, f width of an expert.

use quintet_parallel_layers::moe::Score;
use quintet_planner::config::{ModelConfig, MoeConfig};

use super::block;
use super::ops::{add, linear, linear_backward, softmax, swiglu, swiglu_backward};
use super::sight::Sight;
use super::{OracleError, Params, Rounding, gradient, value};

/// Where the tokens of a microbatch went in one layer.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct LayerRouting {
    /// Choices that fell on each expert, those dropped included.
    pub counts: Vec<u64>,
    /// Choices that were dropped.
    pub dropped: u64,
    /// The loss of balance, unweighted.
    pub aux: f64,
    /// The z-loss, unweighted.
    pub z: f64,
    /// The expert of each (token, choice); -1 where it was dropped.
    pub kept: Vec<i32>,
    /// The least distance between what was chosen last and what was not, over tokens.
    pub margin: f64,
    /// Choices that were ties, and broken otherwise than here.
    pub ties: u64,
}

/// What forward leaves for backward.
pub(super) struct Saved {
    x_td: Vec<f64>,
    tokens: Vec<Token>,
    experts: Vec<Expert>,
    shared: Option<Shared>,
    /// How often each expert was chosen.
    counts: Vec<f64>,
}

struct Token {
    logits_e: Vec<f64>,
    score_e: Vec<f64>,
    chosen: Vec<usize>,
    /// Chosen as was told, and not as it would have been.
    tie: bool,
    weight: Vec<f64>,
}

/// What one expert did: for which (token, choice), and the values of its MLP.
struct Expert {
    pairs: Vec<(usize, usize)>,
    mlp: Mlp,
}

struct Mlp {
    x_td: Vec<f64>,
    gate_tf: Vec<f64>,
    up_tf: Vec<f64>,
    act_tf: Vec<f64>,
    y_td: Vec<f64>,
}

struct Shared {
    mlp: Mlp,
    /// The gate's logits; none where there is no gate.
    logit_t: Option<Vec<f64>>,
}

/// Added to a sum that scores are divided by.
const LEAST: f64 = 1e-20;

/// Parameters of the mixture in block `layer`: name and shape.
pub(super) fn params(
    config: &ModelConfig,
    moe: &MoeConfig,
    layer: usize,
) -> Vec<(String, Vec<usize>)> {
    let (d, e, f, s) = (config.hidden, moe.experts, moe.ffn, moe.shared_ffn);
    let mut all = vec![(weight(layer, "mlp.gate"), vec![e, d])];
    if moe.selection_bias {
        all.push((bias(layer), vec![e]));
    }
    all.push((weight(layer, "mlp.experts.gate_proj"), vec![e, f, d]));
    all.push((weight(layer, "mlp.experts.up_proj"), vec![e, f, d]));
    all.push((weight(layer, "mlp.experts.down_proj"), vec![e, d, f]));
    if s > 0 {
        let part = |part: &str| weight(layer, &format!("{}.{part}", shared_name(moe)));
        all.push((part("gate_proj"), vec![s, d]));
        all.push((part("up_proj"), vec![s, d]));
        all.push((part("down_proj"), vec![d, s]));
        if moe.shared_gate {
            all.push((weight(layer, "mlp.shared_expert_gate"), vec![1, d]));
        }
    }
    all
}

/// A matrix of the mixture.
fn weight(layer: usize, part: &str) -> String {
    format!("{}.weight", block::name(layer, part))
}

/// The bias of the choice.
fn bias(layer: usize) -> String {
    format!("model.layers.{layer}.mlp.gate.e_score_correction_bias")
}

fn shared_name(moe: &MoeConfig) -> &'static str {
    if moe.shared_gate {
        "mlp.shared_expert"
    } else {
        "mlp.shared_experts"
    }
}

/// Moves the bias of each layer by the counts of a whole step: up by the rate where an expert was
/// chosen less often than the mean, down where more often.
pub(super) fn move_bias(
    config: &ModelConfig,
    params: &mut Params,
    counts: &[Vec<u64>],
) -> Result<(), OracleError> {
    let Some(moe) = config.moe.filter(|moe| moe.selection_bias) else {
        return Ok(());
    };
    for (layer, counts) in counts.iter().enumerate().skip(moe.first_dense) {
        let mean = counts.iter().sum::<u64>() as f64 / moe.experts as f64;
        for (bias, count) in gradient(params, &bias(layer))?.iter_mut().zip(counts) {
            if (*count as f64) < mean {
                *bias += moe.bias_update_rate;
            } else if *count as f64 > mean {
                *bias -= moe.bias_update_rate;
            }
        }
    }
    Ok(())
}

/// y from x, all tokens of the microbatch.
pub(super) fn forward(
    config: &ModelConfig,
    moe: &MoeConfig,
    params: &Params,
    (layer, sight): (usize, &Sight),
    x_td: &[f64],
) -> Result<(Vec<f64>, Saved, LayerRouting), OracleError> {
    let rounding = sight.rounding;
    let (d, n) = (config.hidden, moe.experts);
    let mut logits_te = linear(x_td, value(params, &weight(layer, "mlp.gate"))?, d, n);
    let zeros = vec![0.0; n];
    rounding.kept(&mut logits_te);
    let bias_e = if moe.selection_bias {
        value(params, &bias(layer))?
    } else {
        &zeros
    };
    let told = |t: usize| {
        let (layers, within) = sight.ties?;
        Some((
            layers.get(layer)?.get(t * moe.topk..(t + 1) * moe.topk)?,
            within,
        ))
    };
    let tokens: Vec<Token> = logits_te
        .chunks_exact(n)
        .enumerate()
        .map(|(t, l)| choose(moe, l, bias_e, rounding, told(t)))
        .collect();
    let mut routing = statistics(moe, &tokens);
    routing.ties = tokens.iter().filter(|token| token.tie).count() as u64;
    let mut experts = Vec::new();
    let mut y_td = vec![0.0; x_td.len()];
    for e in 0..n {
        let mut pairs = Vec::new();
        for (pair, _) in routing
            .kept
            .iter()
            .enumerate()
            .filter(|(_, k)| **k == e as i32)
        {
            pairs.push((pair / moe.topk, pair % moe.topk));
        }
        let rows = pairs
            .iter()
            .flat_map(|(t, _)| &x_td[t * d..(t + 1) * d])
            .copied()
            .collect();
        let part = |part: &str, len: usize| -> Result<&[f64], OracleError> {
            let all = value(params, &weight(layer, &format!("mlp.experts.{part}")))?;
            Ok(&all[e * len..(e + 1) * len])
        };
        let len = moe.ffn * d;
        let weights = [
            part("gate_proj", len)?,
            part("up_proj", len)?,
            part("down_proj", len)?,
        ];
        let mlp = mlp(rows, weights, (d, moe.ffn), rounding);
        experts.push(Expert { pairs, mlp });
    }
    // In order of choice, as a sum over experts by number would not be.
    for j in 0..moe.topk {
        for expert in &experts {
            for ((t, _), out_d) in expert
                .pairs
                .iter()
                .zip(expert.mlp.y_td.chunks_exact(d))
                .filter(|((_, k), _)| *k == j)
            {
                let w = tokens[*t].weight[j];
                for (y, out) in y_td[t * d..(t + 1) * d].iter_mut().zip(out_d) {
                    *y += w * out;
                }
            }
        }
    }
    rounding.stored(&mut y_td);
    let at = (layer, rounding);
    let shared = shared_forward(config, moe, params, at, x_td, &mut y_td)?;
    let counts = routing.counts.iter().map(|n| *n as f64).collect();
    routing.margin = tokens
        .iter()
        .map(|t| margin(moe, t, bias_e))
        .fold(f64::INFINITY, f64::min);
    let saved = Saved {
        x_td: x_td.to_vec(),
        tokens,
        experts,
        shared,
        counts,
    };
    Ok((y_td, saved, routing))
}

/// Gradient of x; those of the parameters are added into `grads`. `share` is the weight of this
/// microbatch in the losses of balance.
pub(super) fn backward(
    config: &ModelConfig,
    moe: &MoeConfig,
    (params, grads): (&Params, &mut Params),
    (layer, rounding): (usize, &Rounding),
    (saved, share): (&Saved, f64),
    dy_td: &[f64],
) -> Result<Vec<f64>, OracleError> {
    let (d, n, f) = (config.hidden, moe.experts, moe.ffn);
    let mut dx_td = vec![0.0; saved.x_td.len()];
    let mut dweight: Vec<Vec<f64>> = saved
        .tokens
        .iter()
        .map(|t| vec![0.0; t.weight.len()])
        .collect();
    for (e, expert) in saved.experts.iter().enumerate() {
        let mut dout_td = Vec::new();
        for ((t, j), out_d) in expert.pairs.iter().zip(expert.mlp.y_td.chunks_exact(d)) {
            let dy_d = &dy_td[t * d..(t + 1) * d];
            dweight[*t][*j] = dy_d.iter().zip(out_d).map(|(dy, out)| dy * out).sum();
            dout_td.extend(dy_d.iter().map(|dy| saved.tokens[*t].weight[*j] * dy));
        }
        rounding.stored(&mut dout_td);
        let names = ["gate_proj", "up_proj", "down_proj"]
            .map(|part| weight(layer, &format!("mlp.experts.{part}")));
        let at = e * f * d..(e + 1) * f * d;
        let both = (params, &mut *grads);
        let drows = mlp_backward(both, &names, at, &expert.mlp, &dout_td, (d, f), rounding)?;
        for ((t, _), drow_d) in expert.pairs.iter().zip(drows.chunks_exact(d)) {
            add(&mut dx_td[t * d..(t + 1) * d], drow_d);
        }
    }
    let count = saved.tokens.len() as f64;
    let pull_e: Vec<f64> = saved
        .counts
        .iter()
        .map(|c| moe.aux_loss * share * n as f64 * c / (count * moe.topk as f64) / count)
        .collect();
    let pull_z = moe.z_loss * share / count;
    rounding.stored(&mut dx_td);
    dweight
        .iter_mut()
        .for_each(|dweight| rounding.kept(dweight));
    let mut dlogits_te = Vec::new();
    for (token, dweight) in saved.tokens.iter().zip(&dweight) {
        dlogits_te.extend(router_backward(moe, token, dweight, &pull_e, pull_z));
    }
    rounding.kept(&mut dlogits_te);
    let gate = weight(layer, "mlp.gate");
    let (w, dw) = (value(params, &gate)?, gradient(grads, &gate)?);
    add(
        &mut dx_td,
        &linear_backward(&dlogits_te, &saved.x_td, w, dw, d, n),
    );
    rounding.stored(&mut dx_td);
    if let Some(shared) = &saved.shared {
        let dx = shared_backward(
            config,
            moe,
            (params, grads),
            (layer, rounding),
            (shared, &saved.x_td),
            dy_td,
        )?;
        add(&mut dx_td, &dx);
        rounding.stored(&mut dx_td);
    }
    Ok(dx_td)
}

fn choose(
    moe: &MoeConfig,
    logits_e: &[f64],
    bias_e: &[f64],
    rounding: &Rounding,
    told: Option<(&[i32], f64)>,
) -> Token {
    let mut score_e = match moe.score {
        Score::Softmax => {
            let mut p = logits_e.to_vec();
            softmax(&mut p);
            p
        }
        Score::Sigmoid => logits_e.iter().map(|l| 1.0 / (1.0 + (-l).exp())).collect(),
    };
    rounding.kept(&mut score_e);
    let mut left: Vec<usize> = (0..moe.experts).collect();
    let mut chosen = Vec::new();
    for _ in 0..moe.topk {
        let mut best = 0;
        for i in 1..left.len() {
            if score_e[left[i]] + bias_e[left[i]] > score_e[left[best]] + bias_e[left[best]] {
                best = i;
            }
        }
        chosen.push(left.remove(best));
    }
    let key = |e: usize| score_e[e] + bias_e[e];
    let as_good = |told: &[i32], within: f64| {
        let mut left: Vec<usize> = (0..moe.experts).collect();
        told.iter().all(|&e| {
            let best = left
                .iter()
                .map(|&e| key(e))
                .fold(f64::NEG_INFINITY, f64::max);
            let at = left.iter().position(|&l| l as i32 == e);
            at.is_some_and(|at| best - key(left.remove(at)) <= within)
        })
    };
    let mut tie = false;
    if let Some((told, within)) = told
        && as_good(told, within)
    {
        let told: Vec<usize> = told.iter().map(|&e| e as usize).collect();
        tie = told != chosen;
        chosen = told;
    }
    let by = divisor(moe, &score_e, &chosen);
    let mut weight: Vec<f64> = chosen
        .iter()
        .map(|e| moe.scale * score_e[*e] / by)
        .collect();
    rounding.kept(&mut weight);
    Token {
        logits_e: logits_e.to_vec(),
        score_e,
        chosen,
        tie,
        weight,
    }
}

/// What the weights of a token are divided by.
fn divisor(moe: &MoeConfig, score_e: &[f64], chosen: &[usize]) -> f64 {
    if moe.normalize {
        chosen.iter().map(|e| score_e[*e]).sum::<f64>() + LEAST
    } else {
        1.0
    }
}

/// What scores are divided by to be shares of one.
fn whole(moe: &MoeConfig, score_e: &[f64]) -> f64 {
    match moe.score {
        Score::Softmax => 1.0,
        Score::Sigmoid => score_e.iter().sum::<f64>() + LEAST,
    }
}

/// Distance of the last choice from the best that was not chosen: of logits where they alone
/// decide, else of what is compared.
fn margin(moe: &MoeConfig, token: &Token, bias_e: &[f64]) -> f64 {
    let key = |e: usize| {
        if moe.selection_bias {
            token.score_e[e] + bias_e[e]
        } else {
            token.logits_e[e]
        }
    };
    let last = token
        .chosen
        .iter()
        .map(|e| key(*e))
        .fold(f64::INFINITY, f64::min);
    let others = (0..moe.experts).filter(|e| !token.chosen.contains(e));
    last - others.map(key).fold(f64::NEG_INFINITY, f64::max)
}

fn statistics(moe: &MoeConfig, tokens: &[Token]) -> LayerRouting {
    let (n, k, count) = (moe.experts, moe.topk, tokens.len() as f64);
    let room = moe
        .capacity_factor
        .map(|c| ((tokens.len() * k) as f64 * c / n as f64).ceil());
    let mut routing = LayerRouting {
        counts: vec![0; n],
        ..LayerRouting::default()
    };
    let mut share_e = vec![0.0; n];
    for token in tokens {
        for e in &token.chosen {
            let full = room.is_some_and(|room| routing.counts[*e] as f64 >= room);
            routing.counts[*e] += 1;
            routing.dropped += u64::from(full);
            routing.kept.push(if full { -1 } else { *e as i32 });
        }
        let by = whole(moe, &token.score_e);
        add(
            &mut share_e,
            &token.score_e.iter().map(|s| s / by).collect::<Vec<f64>>(),
        );
        let z = log_sum(&token.logits_e);
        routing.z += z * z / count;
    }
    for (chosen, share) in routing.counts.iter().zip(share_e) {
        routing.aux += n as f64 * (*chosen as f64 / (count * k as f64)) * (share / count);
    }
    if moe.aux_loss == 0.0 {
        routing.aux = 0.0;
    }
    if moe.z_loss == 0.0 {
        routing.z = 0.0;
    }
    routing
}

fn log_sum(logits_e: &[f64]) -> f64 {
    softmax(&mut logits_e.to_vec())
}

/// Gradient of a token's logits.
fn router_backward(
    moe: &MoeConfig,
    token: &Token,
    dweight: &[f64],
    pull_e: &[f64],
    pull_z: f64,
) -> Vec<f64> {
    let p = &token.score_e;
    let mut dscore_e = vec![0.0; moe.experts];
    let by = divisor(moe, p, &token.chosen);
    for (j, e) in token.chosen.iter().enumerate() {
        dscore_e[*e] += moe.scale * dweight[j] / by;
        if moe.normalize {
            // Each weight also falls as the sum grows.
            for (i, _) in token.chosen.iter().enumerate() {
                dscore_e[*e] -= dweight[i] * token.weight[i] / by;
            }
        }
    }
    let by = whole(moe, p);
    for e in 0..moe.experts {
        dscore_e[e] += pull_e[e] / by;
        if moe.score == Score::Sigmoid {
            dscore_e[e] -= p.iter().zip(pull_e).map(|(p, g)| g * p / by).sum::<f64>() / by;
        }
    }
    let mut probability_e = token.logits_e.clone();
    let z = softmax(&mut probability_e);
    let mean: f64 = p.iter().zip(&dscore_e).map(|(p, d)| p * d).sum();
    (0..moe.experts)
        .map(|e| {
            let through = match moe.score {
                Score::Softmax => p[e] * (dscore_e[e] - mean),
                Score::Sigmoid => p[e] * (1.0 - p[e]) * dscore_e[e],
            };
            through + 2.0 * pull_z * z * probability_e[e]
        })
        .collect()
}

fn mlp(
    x_td: Vec<f64>,
    [gate, up, down]: [&[f64]; 3],
    (d, f): (usize, usize),
    rounding: &Rounding,
) -> Mlp {
    let mut gate_tf = linear(&x_td, gate, d, f);
    let mut up_tf = linear(&x_td, up, d, f);
    rounding.stored(&mut gate_tf);
    rounding.stored(&mut up_tf);
    let mut act_tf = swiglu(&gate_tf, &up_tf);
    rounding.stored(&mut act_tf);
    let mut y_td = linear(&act_tf, down, f, d);
    rounding.stored(&mut y_td);
    Mlp {
        x_td,
        gate_tf,
        up_tf,
        act_tf,
        y_td,
    }
}

/// Gradient of the input; `at` is where the matrices lie in their parameters.
fn mlp_backward(
    (params, grads): (&Params, &mut Params),
    [gate, up, down]: &[String; 3],
    at: std::ops::Range<usize>,
    saved: &Mlp,
    dy_td: &[f64],
    (d, f): (usize, usize),
    rounding: &Rounding,
) -> Result<Vec<f64>, OracleError> {
    let mut back = |name: &String, dy: &[f64], x: &[f64], i: usize, o: usize| {
        let w = &value(params, name)?[at.clone()];
        let dw = &mut gradient(grads, name)?[at.clone()];
        let mut dx = linear_backward(dy, x, w, dw, i, o);
        rounding.stored(&mut dx);
        Ok::<_, OracleError>(dx)
    };
    let dact_tf = back(down, dy_td, &saved.act_tf, f, d)?;
    let (mut dgate_tf, mut dup_tf) = swiglu_backward(&dact_tf, &saved.gate_tf, &saved.up_tf);
    rounding.stored(&mut dgate_tf);
    rounding.stored(&mut dup_tf);
    let mut dx_td = back(gate, &dgate_tf, &saved.x_td, d, f)?;
    add(&mut dx_td, &back(up, &dup_tf, &saved.x_td, d, f)?);
    Ok(dx_td)
}

/// Adds what the shared experts make, weighed by the gate if there is one.
fn shared_forward(
    config: &ModelConfig,
    moe: &MoeConfig,
    params: &Params,
    (layer, rounding): (usize, &Rounding),
    x_td: &[f64],
    y_td: &mut [f64],
) -> Result<Option<Shared>, OracleError> {
    if moe.shared_ffn == 0 {
        return Ok(None);
    }
    let (d, f) = (config.hidden, moe.shared_ffn);
    let part = |part: &str| {
        value(
            params,
            &weight(layer, &format!("{}.{part}", shared_name(moe))),
        )
    };
    let weights = [part("gate_proj")?, part("up_proj")?, part("down_proj")?];
    let mlp = mlp(x_td.to_vec(), weights, (d, f), rounding);
    let logit_t = if moe.shared_gate {
        let w = value(params, &weight(layer, "mlp.shared_expert_gate"))?;
        let mut logit_t = linear(x_td, w, d, 1);
        rounding.kept(&mut logit_t);
        Some(logit_t)
    } else {
        None
    };
    for (t, (y_d, out_d)) in y_td
        .chunks_exact_mut(d)
        .zip(mlp.y_td.chunks_exact(d))
        .enumerate()
    {
        let g = logit_t
            .as_ref()
            .map_or(1.0, |l| 1.0 / (1.0 + (-l[t]).exp()));
        for (y, out) in y_d.iter_mut().zip(out_d) {
            *y += g * out;
        }
    }
    rounding.stored(y_td);
    Ok(Some(Shared { mlp, logit_t }))
}

fn shared_backward(
    config: &ModelConfig,
    moe: &MoeConfig,
    (params, grads): (&Params, &mut Params),
    (layer, rounding): (usize, &Rounding),
    (saved, x_td): (&Shared, &[f64]),
    dy_td: &[f64],
) -> Result<Vec<f64>, OracleError> {
    let (d, f) = (config.hidden, moe.shared_ffn);
    let (mut dout_td, mut dlogit_t) = (Vec::new(), Vec::new());
    for (t, (dy_d, out_d)) in dy_td
        .chunks_exact(d)
        .zip(saved.mlp.y_td.chunks_exact(d))
        .enumerate()
    {
        let g = saved
            .logit_t
            .as_ref()
            .map_or(1.0, |l| 1.0 / (1.0 + (-l[t]).exp()));
        let dg: f64 = dy_d.iter().zip(out_d).map(|(dy, out)| dy * out).sum();
        dlogit_t.push(dg * g * (1.0 - g));
        dout_td.extend(dy_d.iter().map(|dy| g * dy));
    }
    rounding.stored(&mut dout_td);
    rounding.kept(&mut dlogit_t);
    let names = ["gate_proj", "up_proj", "down_proj"]
        .map(|part| weight(layer, &format!("{}.{part}", shared_name(moe))));
    let both = (params, &mut *grads);
    let at = 0..f * d;
    let mut dx_td = mlp_backward(both, &names, at, &saved.mlp, &dout_td, (d, f), rounding)?;
    if saved.logit_t.is_some() {
        let gate = weight(layer, "mlp.shared_expert_gate");
        let (w, dw) = (value(params, &gate)?, gradient(grads, &gate)?);
        add(&mut dx_td, &linear_backward(&dlogit_t, x_td, w, dw, d, 1));
    }
    Ok(dx_td)
}
