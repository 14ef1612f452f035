//! The oracle: the same decoder on one device, in f64, with plain loops and no parallel code.
//!
//! Everything else is judged by this file and its neighbours, so they share nothing with the
//! libraries but the model's config and the random numbers, and are meant to be checked by eye.
//!
//! ```text
//! tokens -> embedding -> [ norm -> attention -> + -> norm -> mlp -> + ] x layers -> norm -> head -> loss
//!                        block.rs                            (moe.rs)                  (ops.rs below all)
//! ```
//!
//! Shapes: t token of a sample, d hidden, v vocabulary, h query head, k key/value head, e element
//! of a head, f width of the MLP. Matrices are row-major and lie as in Hugging Face files:
//! `[out, in]`. A gradient is named after its value with `d` before it.

use std::collections::BTreeMap;

use quintet_parallel_layers::Positions;
use quintet_planner::config::ModelConfig;

use crate::data::Sample;
use sight::Sight;

mod block;
mod dense;
mod dropout;
mod init;
mod moe;
mod ops;
mod optim;
mod rounding;
mod sight;
#[cfg(test)]
mod tests;

pub use init::{init, init_random, param_shapes};
pub use optim::{AdamW, Sgd, clip, grad_norm};
pub use rounding::{Rounding, to_bf16};

/// Parameters, gradients or moments, by Hugging Face name; shapes as in [`param_shapes`].
pub type Params = BTreeMap<String, Vec<f64>>;

/// Name of the embedding, and of the head where both share one table.
pub const EMBEDDING: &str = "model.embed_tokens.weight";
/// Name of the table of learned positions.
pub const POSITIONS: &str = "model.embed_positions.weight";
/// Name of the last norm's weight.
pub const FINAL_NORM: &str = "model.norm.weight";
/// Name of the last norm, which its weight and its bias have in front.
const LAST: &str = "model.norm";
/// Name of a head with a table of its own.
pub const HEAD: &str = "lm_head.weight";

/// Arguments that do not fit each other.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum OracleError {
    /// A shape that no model has.
    #[error("oracle: {0}")]
    Config(&'static str),
    /// A parameter, or its gradient, is not there.
    #[error("oracle: no value for parameter {0}")]
    Missing(String),
    /// A parameter has another length than the config gives it.
    #[error("oracle: {name} has {got} elements, the config gives it {expected}")]
    Len {
        /// The parameter.
        name: String,
        /// Elements by the config.
        expected: usize,
        /// Elements found.
        got: usize,
    },
    /// A sample does not hold one token more than it has flags, and as many documents or none.
    #[error(
        "oracle: sample {sample} has {tokens} tokens for {flags} mask flags; it needs one more token than flags"
    )]
    Sample {
        /// Index in the batch.
        sample: usize,
        /// Tokens in it.
        tokens: usize,
        /// Flags in it.
        flags: usize,
    },
    /// A token that the embedding does not know.
    #[error("oracle: token {token} of sample {sample} is outside the vocabulary of {vocab}")]
    Token {
        /// Index in the batch.
        sample: usize,
        /// The token.
        token: u32,
        /// Entries of the vocabulary.
        vocab: usize,
    },
}

/// What routers did in a batch.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Routed {
    /// The loss of balance, unweighted: summed over layers, averaged over microbatches.
    pub aux: f64,
    /// The z-loss, unweighted, likewise.
    pub z: f64,
    /// By layer: choices that fell on each expert.
    pub counts: Vec<Vec<u64>>,
    /// By layer: choices that were dropped.
    pub dropped: Vec<u64>,
    /// By microbatch and layer: the expert of each (token, choice), -1 where it was dropped.
    pub kept: Vec<Vec<Vec<i32>>>,
    /// The least distance between what was chosen and what was not.
    pub margin: f64,
    /// Choices that were ties, and broken otherwise than the oracle would have ([`Ties`]).
    pub ties: u64,
}

/// Choices of experts that a narrower type has made. Where two experts are as good as equal, which
/// one is chosen is a matter of rounding, and all that follows depends on it: there the oracle
/// chooses what was chosen.
#[derive(Debug, Clone, Copy)]
pub struct Ties<'a> {
    /// By microbatch and layer: the experts of each (token, choice).
    pub choices: &'a [Vec<Vec<i32>>],
    /// How far the score of a choice may be below that of the oracle's own.
    pub within: f64,
}

/// How a step is computed: what happens to each value, and what is drawn.
#[derive(Debug, Clone, Copy)]
pub struct Way<'a> {
    /// What happens to each value on the way.
    pub rounding: &'a Rounding,
    /// Choices that are ties, made as told.
    pub ties: Option<Ties<'a>>,
    /// Seed and step that dropout draws by, if the config has any; none outside training.
    pub run: Option<(u64, u64)>,
}

/// Loss and gradients of a batch.
#[derive(Debug, Clone, PartialEq)]
pub struct StepResult {
    /// Cross-entropy summed over the predictions that count, in nats.
    pub loss_sum: f64,
    /// Predictions that count.
    pub count: usize,
    /// `loss_sum / count`; 0 where nothing counts.
    pub loss: f64,
    /// Gradients of `loss`: divided once, by the count of the whole batch. All zero where nothing
    /// counts. A tied table has one entry, with what it gets as embedding and as head. Of a model
    /// with experts, gradients of `loss` and of the losses of balance, weighted.
    pub grads: Params,
    /// What routers did; empty for a model without experts.
    pub routed: Routed,
}

/// Forward and backward over a batch, in microbatches of one sample.
///
/// # Errors
/// [`OracleError`] where config, parameters and samples do not fit each other.
pub fn step(
    config: &ModelConfig,
    params: &Params,
    samples: &[Sample],
) -> Result<StepResult, OracleError> {
    step_in(config, params, samples, 1)
}

/// Forward and backward over a batch, in microbatches of `micro_batch` samples: what routers do is
/// a matter of a whole microbatch.
///
/// # Errors
/// As [`step`].
pub fn step_in(
    config: &ModelConfig,
    params: &Params,
    samples: &[Sample],
    micro_batch: usize,
) -> Result<StepResult, OracleError> {
    step_of(config, params, samples, micro_batch, None)
}

/// The same in training with dropout, if the config has any: its draws are of `run`, a seed and a
/// step.
///
/// # Errors
/// As [`step`].
pub fn step_of(
    config: &ModelConfig,
    params: &Params,
    samples: &[Sample],
    micro_batch: usize,
    run: Option<(u64, u64)>,
) -> Result<StepResult, OracleError> {
    let way = Way {
        rounding: &Rounding::none(),
        ties: None,
        run,
    };
    step_on(config, params, samples, micro_batch, way)
}

/// The same, on a way.
///
/// # Errors
/// As [`step`].
pub fn step_on(
    config: &ModelConfig,
    params: &Params,
    samples: &[Sample],
    micro_batch: usize,
    way: Way<'_>,
) -> Result<StepResult, OracleError> {
    check(config, params, samples)?;
    let count = samples.iter().map(Sample::valid).sum();
    let scale = if count == 0 { 0.0 } else { 1.0 / count as f64 };
    let parts: Vec<&[Sample]> = samples.chunks(micro_batch.max(1)).collect();
    let share = 1.0 / parts.len() as f64;
    let mut grads: Params = param_shapes(config)
        .into_iter()
        .map(|(name, shape)| (name, vec![0.0; shape.iter().product()]))
        .collect();
    let (mut loss_sum, mut routed) = (0.0, Routed::new(config));
    for (microbatch, part) in parts.into_iter().enumerate() {
        let told = way.ties;
        let sight = Sight {
            ties: told
                .and_then(|told| Some((told.choices.get(microbatch)?.as_slice(), told.within))),
            ..Sight::new(part, config.window, way.rounding)
        };
        let first = microbatch * micro_batch.max(1);
        let sight = sight.dropping(config.dropout, way.run, first);
        let saved = forward(config, params, part, &sight)?;
        loss_sum += saved.loss_sum;
        routed.add(&saved.routing, share);
        let weights = (scale, share);
        backward(config, params, (part, &sight), saved, weights, &mut grads)?;
    }
    Ok(StepResult {
        loss_sum,
        count,
        loss: mean(loss_sum, count),
        grads,
        routed,
    })
}

/// Moves the bias of the routers' choice by the counts of a whole step.
///
/// # Errors
/// [`OracleError::Missing`] where there is no such parameter.
pub fn move_bias(
    config: &ModelConfig,
    params: &mut Params,
    routed: &Routed,
) -> Result<(), OracleError> {
    moe::move_bias(config, params, &routed.counts)
}

impl Routed {
    fn new(config: &ModelConfig) -> Self {
        let Some(moe) = &config.moe else {
            return Self::default();
        };
        Self {
            counts: vec![vec![0; moe.experts]; config.layers],
            dropped: vec![0; config.layers],
            margin: f64::INFINITY,
            ..Self::default()
        }
    }

    /// Adds a microbatch.
    fn add(&mut self, layers: &[moe::LayerRouting], share: f64) {
        if self.counts.is_empty() {
            return;
        }
        for (layer, routing) in layers.iter().enumerate() {
            self.aux += share * routing.aux;
            self.z += share * routing.z;
            self.dropped[layer] += routing.dropped;
            self.ties += routing.ties;
            for (sum, n) in self.counts[layer].iter_mut().zip(&routing.counts) {
                *sum += n;
            }
            if !routing.kept.is_empty() {
                self.margin = self.margin.min(routing.margin);
            }
        }
        let kept = layers.iter().map(|routing| routing.kept.clone());
        self.kept.push(kept.collect());
    }
}

/// Cross-entropy of a batch without gradients: its sum in nats, and over how many predictions.
///
/// # Errors
/// As [`step`].
pub fn forward_loss(
    config: &ModelConfig,
    params: &Params,
    samples: &[Sample],
) -> Result<(f64, usize), OracleError> {
    check(config, params, samples)?;
    let mut sum = 0.0;
    for sample in samples {
        let part = std::slice::from_ref(sample);
        let rounding = Rounding::none();
        let sight = Sight::new(part, config.window, &rounding);
        sum += forward(config, params, part, &sight)?.loss_sum;
    }
    Ok((sum, samples.iter().map(Sample::valid).sum()))
}

fn mean(sum: f64, count: usize) -> f64 {
    if count == 0 { 0.0 } else { sum / count as f64 }
}

/// What the forward of a microbatch leaves for its backward.
struct Forward {
    blocks: Vec<block::Saved>,
    routing: Vec<moe::LayerRouting>,
    /// The residual stream after the last block.
    x_td: Vec<f64>,
    /// The same after the last norm.
    y_td: Vec<f64>,
    /// Probabilities of the next token.
    p_tv: Vec<f64>,
    loss_sum: f64,
}

fn forward(
    config: &ModelConfig,
    params: &Params,
    samples: &[Sample],
    sight: &Sight,
) -> Result<Forward, OracleError> {
    let (d, v) = (config.hidden, config.vocab);
    let table_vd = value(params, EMBEDDING)?;
    let mut x_td: Vec<f64> = samples
        .iter()
        .flat_map(inputs)
        .flat_map(|token| &table_vd[*token as usize * d..][..d])
        .copied()
        .collect();
    if let Positions::Learned(_) = config.architecture.positions {
        let rows_pd = value(params, POSITIONS)?;
        for (x_d, position) in x_td.chunks_exact_mut(d).zip(&sight.positions) {
            ops::add(x_d, &rows_pd[position * d..][..d]);
        }
    }
    sight.dropout.apply(dropout::EMBEDDING, &mut x_td, d);
    sight.rounding.stored(&mut x_td);
    let (mut blocks, mut routing) = (Vec::new(), Vec::new());
    for layer in 0..config.layers {
        let (out_td, saved, routed) = block::forward(config, params, layer, sight, &x_td)?;
        blocks.push(saved);
        routing.push(routed);
        x_td = out_td;
    }
    let mut y_td = dense::norm(config, params, LAST, &x_td)?;
    sight.rounding.stored(&mut y_td);
    let mut p_tv = ops::linear(&y_td, value(params, head(config))?, d, v);
    sight.rounding.stored(&mut p_tv);
    let mut loss_sum = 0.0;
    for (p_v, (target, valid)) in p_tv.chunks_exact_mut(v).zip(targets(samples)) {
        let logit = p_v[target];
        let log_sum = ops::softmax(p_v);
        if valid {
            loss_sum += log_sum - logit;
        }
    }
    Ok(Forward {
        blocks,
        routing,
        x_td,
        y_td,
        p_tv,
        loss_sum,
    })
}

/// Adds the gradients of `scale` times the sum of the losses of a microbatch, and of `share` times
/// its weighted losses of balance.
fn backward(
    config: &ModelConfig,
    params: &Params,
    (samples, sight): (&[Sample], &Sight),
    saved: Forward,
    (scale, share): (f64, f64),
    grads: &mut Params,
) -> Result<(), OracleError> {
    let (d, v) = (config.hidden, config.vocab);
    // d loss / d logit = probability - (1 where it is the target)
    let mut dlogits_tv = saved.p_tv;
    for (dlogits_v, (target, valid)) in dlogits_tv.chunks_exact_mut(v).zip(targets(samples)) {
        dlogits_v[target] -= 1.0;
        let scale = if valid { scale } else { 0.0 };
        dlogits_v.iter_mut().for_each(|g| *g *= scale);
    }
    sight.rounding.stored(&mut dlogits_tv);
    let head = head(config);
    let mut dy_td = ops::linear_backward(
        &dlogits_tv,
        &saved.y_td,
        value(params, head)?,
        gradient(grads, head)?,
        d,
        v,
    );
    sight.rounding.stored(&mut dy_td);
    let mut dx_td = dense::norm_backward(config, params, grads, LAST, &dy_td, &saved.x_td)?;
    sight.rounding.stored(&mut dx_td);
    for (layer, saved) in saved.blocks.iter().enumerate().rev() {
        let both = (params, &mut *grads);
        dx_td = block::backward(config, both, layer, (sight, share), saved, &dx_td)?;
    }
    sight.dropout.apply(dropout::EMBEDDING, &mut dx_td, d);
    if let Positions::Learned(_) = config.architecture.positions {
        let drows_pd = gradient(grads, POSITIONS)?;
        for (dx_d, position) in dx_td.chunks_exact(d).zip(&sight.positions) {
            ops::add(&mut drows_pd[position * d..][..d], dx_d);
        }
    }
    let dtable_vd = gradient(grads, EMBEDDING)?;
    for (token, dx_d) in samples.iter().flat_map(inputs).zip(dx_td.chunks_exact(d)) {
        ops::add(&mut dtable_vd[*token as usize * d..][..d], dx_d);
    }
    Ok(())
}

/// What each position predicts, and whether it counts.
fn targets(samples: &[Sample]) -> impl Iterator<Item = (usize, bool)> + '_ {
    let of = |s: &'_ Sample| -> Vec<(usize, bool)> {
        let next = s.tokens[1..].iter().map(|token| *token as usize);
        next.zip(s.mask.iter().copied()).collect()
    };
    samples.iter().flat_map(of)
}

/// The tokens that predictions are made from: all but the last.
fn inputs(sample: &Sample) -> &[u32] {
    &sample.tokens[..sample.mask.len()]
}

fn head(config: &ModelConfig) -> &'static str {
    if config.tied { EMBEDDING } else { HEAD }
}

fn value<'a>(params: &'a Params, name: &str) -> Result<&'a [f64], OracleError> {
    let found = params.get(name).map(Vec::as_slice);
    found.ok_or_else(|| OracleError::Missing(name.into()))
}

fn gradient<'a>(grads: &'a mut Params, name: &str) -> Result<&'a mut [f64], OracleError> {
    let found = grads.get_mut(name).map(Vec::as_mut_slice);
    found.ok_or_else(|| OracleError::Missing(name.into()))
}

/// After this, no index below can be out of bounds.
fn check(config: &ModelConfig, params: &Params, samples: &[Sample]) -> Result<(), OracleError> {
    let lens = [
        config.vocab,
        config.hidden,
        config.heads,
        config.kv_heads,
        config.head_dim,
        config.ffn,
    ];
    if lens.contains(&0) {
        return Err(OracleError::Config("every length must be at least 1"));
    }
    let rotary = config.architecture.rotary(config.head_dim);
    if !config.heads.is_multiple_of(config.kv_heads) || !rotary.is_multiple_of(2) {
        return Err(OracleError::Config(
            "KV heads must divide heads, and an even number of a head's elements turn",
        ));
    }
    if let Some(moe) = &config.moe
        && (moe.topk == 0 || moe.topk > moe.experts || moe.ffn == 0)
    {
        return Err(OracleError::Config(
            "a token goes to at least one expert and at most to all, and each has a width",
        ));
    }
    for (name, shape) in param_shapes(config) {
        let (expected, got) = (shape.iter().product(), value(params, &name)?.len());
        if got != expected {
            return Err(OracleError::Len {
                name,
                expected,
                got,
            });
        }
    }
    for (index, sample) in samples.iter().enumerate() {
        let (tokens, flags) = (sample.tokens.len(), sample.mask.len());
        let documents = sample.documents.len();
        if tokens != flags + 1 || (documents != 0 && documents != flags) {
            return Err(OracleError::Sample {
                sample: index,
                tokens,
                flags,
            });
        }
        if let Positions::Learned(rows) = config.architecture.positions
            && flags > rows
        {
            return Err(OracleError::Config(
                "a sample is longer than the table of learned positions",
            ));
        }
        if let Some(token) = sample.tokens.iter().find(|t| **t as usize >= config.vocab) {
            return Err(OracleError::Token {
                sample: index,
                token: *token,
                vocab: config.vocab,
            });
        }
    }
    Ok(())
}
