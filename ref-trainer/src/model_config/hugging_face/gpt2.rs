//! GPT-2: LayerNorm, GELU, learned positions, biases everywhere. The rates of dropout in its file
//! are a matter of training, where `--dropout` says it.

use quintet_parallel_layers::{Architecture, Positions};
use quintet_planner::config::ModelConfig;
use serde_json::{Value, json};

use super::decoder::{divided, model};
use super::keys::{Keys, flag, length, number, only, present, required};
use crate::model_config::{Model, ROPE_THETA};

pub(super) fn read(keys: &Keys) -> Result<Model, String> {
    match present(keys, "activation_function") {
        None => {}
        Some(act) if act == "gelu_new" || act == "gelu_pytorch_tanh" => {}
        Some(act) => {
            return Err(format!(
                "activation_function is {act}; only \"gelu_new\" (GELU's tanh form) is computed here"
            ));
        }
    }
    only(
        keys,
        &[
            ("scale_attn_weights", true),
            ("scale_attn_by_inverse_layer_idx", false),
            ("reorder_and_upcast_attn", false),
            ("add_cross_attention", false),
        ],
    )?;
    let heads = required(keys, "n_head", 1 << 12)?;
    let hidden = required(keys, "n_embd", 1 << 18)?;
    let positions = required(keys, "n_positions", 1 << 24)?;
    let config = ModelConfig {
        vocab: required(keys, "vocab_size", 1 << 24)?,
        hidden,
        layers: required(keys, "n_layer", 1 << 12)?,
        heads,
        kv_heads: heads,
        head_dim: divided(hidden, heads)?,
        ffn: length(keys, "n_inner", 1 << 20)?.unwrap_or(4 * hidden),
        rope_theta: ROPE_THETA,
        norm_eps: number(keys, "layer_norm_epsilon")?.unwrap_or(1e-5),
        tied: flag(keys, "tie_word_embeddings")?.unwrap_or(true),
        moe: None,
        architecture: Architecture::gpt2(positions),
        window: None,
        dropout: 0.0,
    };
    Ok(model(config, positions))
}

pub(super) fn write(model: &Model) -> Value {
    let c = &model.config;
    let positions = match c.architecture.positions {
        Positions::Learned(rows) => rows,
        Positions::Rotary | Positions::PartRotary(_) => model.max_positions,
    };
    json!({
        "vocab_size": c.vocab,
        "n_embd": c.hidden,
        "n_layer": c.layers,
        "n_head": c.heads,
        "n_inner": c.ffn,
        "n_positions": positions,
        "activation_function": "gelu_new",
        "layer_norm_epsilon": c.norm_eps,
        "tie_word_embeddings": c.tied,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
        "resid_pdrop": 0.0,
    })
}
