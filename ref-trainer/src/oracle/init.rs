//! Which parameters there are, and their first values.

use quintet_parallel_layers::philox::Stream;
use quintet_planner::config::ModelConfig;

use super::block::name;
use super::{EMBEDDING, FINAL_NORM, HEAD, Params, moe};

/// Every parameter, in the order of the forward pass, with its shape: `[out, in]` of a matrix,
/// `[vocab, hidden]` of a table, `[hidden]` of a norm, `[experts, out, in]` of all experts' matrices.
#[must_use]
pub fn param_shapes(config: &ModelConfig) -> Vec<(String, Vec<usize>)> {
    let (d, f) = (config.hidden, config.ffn);
    let (q_len, kv_len) = (
        config.heads * config.head_dim,
        config.kv_heads * config.head_dim,
    );
    let mut all = vec![(EMBEDDING.to_owned(), vec![config.vocab, d])];
    for layer in 0..config.layers {
        for (part, shape) in [
            ("input_layernorm", vec![d]),
            ("self_attn.q_proj", vec![q_len, d]),
            ("self_attn.k_proj", vec![kv_len, d]),
            ("self_attn.v_proj", vec![kv_len, d]),
            ("self_attn.o_proj", vec![d, q_len]),
            ("post_attention_layernorm", vec![d]),
        ] {
            all.push((name(layer, part), shape));
        }
        if let Some(moe) = config.moe_at(layer) {
            all.extend(moe::params(config, moe, layer));
            continue;
        }
        for (part, shape) in [
            ("mlp.gate_proj", vec![f, d]),
            ("mlp.up_proj", vec![f, d]),
            ("mlp.down_proj", vec![d, f]),
        ] {
            all.push((name(layer, part), shape));
        }
    }
    all.push((FINAL_NORM.to_owned(), vec![d]));
    if !config.tied {
        all.push((HEAD.to_owned(), vec![config.vocab, d]));
    }
    all
}

/// Where training starts: norms 1, biases 0, all else `std * normal`, where the two matrices that write to
/// the residual stream (o_proj, down_proj) take `std / sqrt(2 layers)` (GPT-2's rule). Element
/// `i` is `Stream::new(seed, name).normal(i)` times that, in this order of multiplication.
#[must_use]
pub fn init(config: &ModelConfig, seed: u64, std: f64) -> Params {
    let small = std / (2.0 * config.layers as f64).sqrt();
    draw(config, seed, |name, shape| match shape.len() {
        1 if name.ends_with("bias") => (0.0, 0.0),
        1 => (1.0, 0.0),
        _ if name.ends_with("o_proj.weight") || name.ends_with("down_proj.weight") => (0.0, small),
        _ => (0.0, std),
    })
}

/// Where a comparison starts: every parameter at random, so that none is special, and of a scale
/// at which every gradient is felt. Norms `1 + 0.1 normal`, biases `0.1 normal`; all else `normal / sqrt(in)`, where
/// the embedding counts as the head it may be tied to, so that logits are of order 1.
#[must_use]
pub fn init_random(config: &ModelConfig, seed: u64) -> Params {
    draw(config, seed, |name, shape| match shape {
        [_, .., inputs] => (0.0, 1.0 / (*inputs as f64).sqrt()),
        _ if name.ends_with("bias") => (0.0, 0.1),
        _ => (1.0, 0.1),
    })
}

/// Element i of a parameter = mean + std * normal(i), with (mean, std) by its name and shape.
fn draw(config: &ModelConfig, seed: u64, rule: impl Fn(&str, &[usize]) -> (f64, f64)) -> Params {
    let mut params = Params::new();
    for (name, shape) in param_shapes(config) {
        let (mean, std) = rule(&name, &shape);
        let stream = Stream::new(seed, &name);
        let len: usize = shape.iter().product();
        let values = (0..len as u64).map(|i| mean + std * stream.normal(i));
        params.insert(name, values.collect());
    }
    params
}
