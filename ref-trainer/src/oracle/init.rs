//! Which parameters there are, and their first values.

use quintet_parallel_layers::philox::Stream;
use quintet_parallel_layers::{MlpKind, Positions};
use quintet_planner::config::ModelConfig;

use super::block::name;
use super::dense::{Dense, norm_params};
use super::{EMBEDDING, HEAD, LAST, POSITIONS, Params};

/// Every parameter, in the order of the forward pass, with its shape: `[out, in]` of a matrix,
/// `[vocab, hidden]` of a table, one number a feature of a norm or a bias.
#[must_use]
pub fn param_shapes(config: &ModelConfig) -> Vec<(String, Vec<usize>)> {
    let d = config.hidden;
    let mut all = vec![(EMBEDDING.to_owned(), vec![config.vocab, d])];
    if let Positions::Learned(rows) = config.architecture.positions {
        all.push((POSITIONS.to_owned(), vec![rows, d]));
    }
    let norm = |name: &str| {
        let names = norm_params(config, name);
        names.into_iter().map(|name| (name, vec![d]))
    };
    for layer in 0..config.layers {
        let linear = |part: &str| {
            let dense = Dense::of(config, layer, part);
            let bias = dense.bias().map(|bias| (bias, vec![dense.shape()[0]]));
            std::iter::once((dense.weight(), dense.shape().to_vec())).chain(bias)
        };
        all.extend(norm(&name(layer, "input_layernorm")));
        for part in ["q_proj", "k_proj", "v_proj", "o_proj"] {
            all.extend(linear(&format!("self_attn.{part}")));
        }
        if config.architecture.qk_norm {
            let shape = vec![config.head_dim];
            for part in ["q_norm", "k_norm"] {
                let name = name(layer, &format!("self_attn.{part}.weight"));
                all.push((name, shape.clone()));
            }
        }
        all.extend(norm(&name(layer, "post_attention_layernorm")));
        if config.architecture.mlp == MlpKind::SwiGlu {
            all.extend(linear("mlp.gate_proj"));
        }
        all.extend(linear("mlp.up_proj"));
        all.extend(linear("mlp.down_proj"));
    }
    all.extend(norm(LAST));
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
        1 if name.ends_with(".bias") => (0.0, 0.0),
        1 => (1.0, 0.0),
        _ if name.ends_with("o_proj.weight") || name.ends_with("down_proj.weight") => (0.0, small),
        _ => (0.0, std),
    })
}

/// Where a comparison starts: every parameter at random, so that none is special, and of a scale
/// at which every gradient is felt. Norms `1 + 0.1 normal`; biases `0.1 normal`; all else `normal / sqrt(in)`, where
/// the embedding counts as the head it may be tied to, so that logits are of order 1.
#[must_use]
pub fn init_random(config: &ModelConfig, seed: u64) -> Params {
    draw(config, seed, |name, shape| match shape {
        [_, inputs] => (0.0, 1.0 / (*inputs as f64).sqrt()),
        _ if name.ends_with(".bias") => (0.0, 0.1),
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
