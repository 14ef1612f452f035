//! The oracle: the same decoder on one device, in f64, with plain loops and no parallel code.
//!
//! Everything else is judged by this file and its four neighbours, so they share nothing with the
//! libraries but the model's config and the random numbers, and are meant to be checked by eye.
//!
//! ```text
//! tokens -> embedding -> [ norm -> attention -> + -> norm -> mlp -> + ] x layers -> norm -> head -> loss
//!                        block.rs                                                      (ops.rs below all)
//! ```
//!
//! Shapes: t token of a sample, d hidden, v vocabulary, h query head, k key/value head, e element
//! of a head, f width of the MLP. Matrices are row-major and lie as in Hugging Face files:
//! `[out, in]`. A gradient is named after its value with `d` before it.

use std::collections::BTreeMap;

use quintet_parallel_layers::Positions;
use quintet_planner::config::ModelConfig;

use crate::data::Sample;

mod block;
mod dense;
mod init;
mod ops;
mod optim;
#[cfg(test)]
mod tests;

pub use init::{init, init_random, param_shapes};
pub use optim::{AdamW, Sgd, clip, grad_norm};

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
    /// A sample does not hold one token more than it has flags.
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
    /// counts. A tied table has one entry, with what it gets as embedding and as head.
    pub grads: Params,
}

/// Forward and backward over a batch, sample after sample.
///
/// # Errors
/// [`OracleError`] where config, parameters and samples do not fit each other.
pub fn step(
    config: &ModelConfig,
    params: &Params,
    samples: &[Sample],
) -> Result<StepResult, OracleError> {
    check(config, params, samples)?;
    let count = samples.iter().map(Sample::valid).sum();
    let scale = if count == 0 { 0.0 } else { 1.0 / count as f64 };
    let (loss_sum, grads) = backward(config, params, samples, scale)?;
    Ok(StepResult {
        loss_sum,
        count,
        loss: mean(loss_sum, count),
        grads,
    })
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
        sum += forward(config, params, sample)?.loss_sum;
    }
    Ok((sum, samples.iter().map(Sample::valid).sum()))
}

fn mean(sum: f64, count: usize) -> f64 {
    if count == 0 { 0.0 } else { sum / count as f64 }
}

/// What a sample's forward leaves for its backward.
struct Forward {
    blocks: Vec<block::Saved>,
    /// The residual stream after the last block.
    x_td: Vec<f64>,
    /// The same after the last norm.
    y_td: Vec<f64>,
    /// Probabilities of the next token.
    p_tv: Vec<f64>,
    loss_sum: f64,
}

fn forward(config: &ModelConfig, params: &Params, sample: &Sample) -> Result<Forward, OracleError> {
    let (d, v) = (config.hidden, config.vocab);
    let inputs = inputs(sample);
    let table_vd = value(params, EMBEDDING)?;
    let mut x_td: Vec<f64> = inputs
        .iter()
        .flat_map(|token| &table_vd[*token as usize * d..][..d])
        .copied()
        .collect();
    if let Positions::Learned(_) = config.architecture.positions {
        ops::add(&mut x_td, &value(params, POSITIONS)?[..inputs.len() * d]);
    }
    let mut blocks = Vec::new();
    for layer in 0..config.layers {
        let (out_td, saved) = block::forward(config, params, layer, &x_td)?;
        blocks.push(saved);
        x_td = out_td;
    }
    let y_td = dense::norm(config, params, LAST, &x_td)?;
    let mut p_tv = ops::linear(&y_td, value(params, head(config))?, d, v);
    let mut loss_sum = 0.0;
    for (t, p_v) in p_tv.chunks_exact_mut(v).enumerate() {
        let target = sample.tokens[t + 1] as usize;
        let logit = p_v[target];
        let log_sum = ops::softmax(p_v);
        if sample.mask[t] {
            loss_sum += log_sum - logit;
        }
    }
    Ok(Forward {
        blocks,
        x_td,
        y_td,
        p_tv,
        loss_sum,
    })
}

/// Sum of the losses of `samples`, and gradients of `scale` times that sum.
fn backward(
    config: &ModelConfig,
    params: &Params,
    samples: &[Sample],
    scale: f64,
) -> Result<(f64, Params), OracleError> {
    let (d, v) = (config.hidden, config.vocab);
    let mut loss_sum = 0.0;
    let mut grads: Params = param_shapes(config)
        .into_iter()
        .map(|(name, shape)| (name, vec![0.0; shape.iter().product()]))
        .collect();
    for sample in samples {
        let saved = forward(config, params, sample)?;
        loss_sum += saved.loss_sum;

        // d loss / d logit = probability - (1 where it is the target)
        let mut dlogits_tv = saved.p_tv;
        for (t, dlogits_v) in dlogits_tv.chunks_exact_mut(v).enumerate() {
            dlogits_v[sample.tokens[t + 1] as usize] -= 1.0;
            let scale = if sample.mask[t] { scale } else { 0.0 };
            dlogits_v.iter_mut().for_each(|g| *g *= scale);
        }
        let head = head(config);
        let dy_td = ops::linear_backward(
            &dlogits_tv,
            &saved.y_td,
            value(params, head)?,
            gradient(&mut grads, head)?,
            d,
            v,
        );
        let mut dx_td =
            dense::norm_backward(config, params, &mut grads, LAST, &dy_td, &saved.x_td)?;
        for (layer, saved) in saved.blocks.iter().enumerate().rev() {
            dx_td = block::backward(config, params, &mut grads, layer, saved, &dx_td)?;
        }
        if let Positions::Learned(_) = config.architecture.positions {
            ops::add(gradient(&mut grads, POSITIONS)?, &dx_td);
        }
        let dtable_vd = gradient(&mut grads, EMBEDDING)?;
        for (token, dx_d) in inputs(sample).iter().zip(dx_td.chunks_exact(d)) {
            ops::add(&mut dtable_vd[*token as usize * d..][..d], dx_d);
        }
    }
    Ok((loss_sum, grads))
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
        if tokens != flags + 1 {
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
