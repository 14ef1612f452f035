//! Families with a mixture of experts. What only training knows (losses of balance, capacity) is
//! not read from a file: flags say it.

use quintet_parallel_layers::moe::Score;
use quintet_parallel_layers::{Architecture, Positions};
use quintet_planner::config::{ModelConfig, MoeConfig};
use serde_json::{Value, json};

use super::decoder::{self, Decoder};
use super::keys::{Keys, count, either, flag, length, number, only, present, required};
use crate::model_config::{Model, ROPE_THETA};

const MOST_EXPERTS: usize = 1 << 14;
const MOST_WIDTH: usize = 1 << 20;

/// Mixtral: Llama with experts in each block, weighed by the softmax of the chosen.
pub(super) fn mixtral(keys: &Keys) -> Result<Model, String> {
    common(keys)?;
    if number(keys, "router_jitter_noise")?.unwrap_or(0.0) != 0.0 {
        return Err("router_jitter_noise is not 0; routers here have none".into());
    }
    let moe = MoeConfig::new(
        either(keys, ["num_local_experts", "num_experts"], MOST_EXPERTS)?,
        required(keys, "num_experts_per_tok", MOST_EXPERTS)?,
        required(keys, "intermediate_size", MOST_WIDTH)?,
    );
    decoder::read(
        keys,
        Decoder {
            moe: Some(moe),
            window: length(keys, "sliding_window", 1 << 30)?,
            theta: 1e6,
            ..Decoder::LLAMA
        },
    )
}

pub(super) fn mixtral_keys(model: &Model) -> Value {
    let moe = moe(&model.config);
    json!({
        "intermediate_size": moe.ffn,
        "num_local_experts": moe.experts,
        "num_experts_per_tok": moe.topk,
        "sliding_window": model.config.window,
        "output_router_logits": false,
        "router_jitter_noise": 0.0,
    })
}

/// Qwen3-MoE: norms on q and k, blocks without experts first.
pub(super) fn qwen3_moe(keys: &Keys) -> Result<Model, String> {
    common(keys)?;
    decoder::whole_sight(keys)?;
    only(keys, &[("attention_bias", false)])?;
    if let Some(step) = length(keys, "decoder_sparse_step", 1 << 12)?
        && step != 1
    {
        return Err(format!(
            "decoder_sparse_step is {step}; only 1 is computed here: experts in each block after the dense ones"
        ));
    }
    let moe = MoeConfig {
        normalize: flag(keys, "norm_topk_prob")?.unwrap_or(false),
        first_dense: first_dense(keys)?,
        ..MoeConfig::new(
            either(keys, ["num_experts", "num_local_experts"], MOST_EXPERTS)?,
            required(keys, "num_experts_per_tok", MOST_EXPERTS)?,
            required(keys, "moe_intermediate_size", MOST_WIDTH)?,
        )
    };
    let architecture = Architecture {
        qk_norm: true,
        ..Architecture::LLAMA
    };
    decoder::read(
        keys,
        Decoder {
            architecture,
            moe: Some(moe),
            theta: ROPE_THETA,
            ..Decoder::LLAMA
        },
    )
}

pub(super) fn qwen3_moe_keys(model: &Model) -> Value {
    let moe = moe(&model.config);
    let dense: Vec<usize> = (0..moe.first_dense).collect();
    json!({
        "moe_intermediate_size": moe.ffn,
        "num_experts": moe.experts,
        "num_experts_per_tok": moe.topk,
        "norm_topk_prob": moe.normalize,
        "decoder_sparse_step": 1,
        "mlp_only_layers": dense,
        "attention_bias": false,
        "use_sliding_window": false,
        "output_router_logits": false,
    })
}

/// Glm4Moe: a sigmoid router with a bias on the choice, shared experts, dense blocks first, biases
/// on q, k and v, heads that turn in part.
pub(super) fn glm4_moe(keys: &Keys) -> Result<Model, String> {
    common(keys)?;
    for key in ["n_group", "topk_group"] {
        if let Some(groups) = length(keys, key, MOST_EXPERTS)?
            && groups != 1
        {
            return Err(format!(
                "{key} is {groups}; experts are chosen from all here, so it must be 1"
            ));
        }
    }
    let width = required(keys, "moe_intermediate_size", MOST_WIDTH)?;
    let shared = required(keys, "n_shared_experts", 1 << 10)?;
    let moe = MoeConfig {
        score: Score::Sigmoid,
        normalize: flag(keys, "norm_topk_prob")?.unwrap_or(true),
        scale: number(keys, "routed_scaling_factor")?.unwrap_or(1.0),
        selection_bias: true,
        shared_ffn: shared * width,
        first_dense: count(keys, "first_k_dense_replace", 1 << 12)?.unwrap_or(1),
        ..MoeConfig::new(
            either(
                keys,
                ["n_routed_experts", "num_local_experts"],
                MOST_EXPERTS,
            )?,
            required(keys, "num_experts_per_tok", MOST_EXPERTS)?,
            width,
        )
    };
    if !(0.0..=1e6).contains(&moe.scale) {
        return Err(format!(
            "routed_scaling_factor is {}; it must be from 0 to 1000000",
            moe.scale
        ));
    }
    let architecture = Architecture {
        qkv_bias: flag(keys, "attention_bias")?.unwrap_or(false),
        qk_norm: flag(keys, "use_qk_norm")?.unwrap_or(false),
        ..Architecture::LLAMA
    };
    decoder::read(
        keys,
        Decoder {
            architecture,
            moe: Some(moe),
            theta: ROPE_THETA,
            turns: Some(0.5),
            ..Decoder::LLAMA
        },
    )
}

pub(super) fn glm4_moe_keys(model: &Model) -> Value {
    let (c, moe) = (&model.config, moe(&model.config));
    json!({
        "moe_intermediate_size": moe.ffn,
        "n_routed_experts": moe.experts,
        "num_experts_per_tok": moe.topk,
        "n_shared_experts": moe.shared_ffn / moe.ffn.max(1),
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": moe.first_dense,
        "norm_topk_prob": moe.normalize,
        "routed_scaling_factor": moe.scale,
        "attention_bias": c.architecture.qkv_bias,
        "use_qk_norm": c.architecture.qk_norm,
        "partial_rotary_factor": turns(c),
        "num_nextn_predict_layers": 0,
        "output_router_logits": false,
    })
}

/// The share of a head that turns, from which the number of its elements comes back.
fn turns(config: &ModelConfig) -> f64 {
    let (len, turning) = match config.architecture.positions {
        Positions::PartRotary(dims) => (config.head_dim, dims),
        Positions::Rotary | Positions::Learned(_) => (1, 1),
    };
    let share = turning as f64 / len as f64;
    if ((len as f64 * share) as usize) < turning {
        share.next_up()
    } else {
        share
    }
}

fn moe(config: &ModelConfig) -> MoeConfig {
    config.moe.unwrap_or(MoeConfig::new(0, 0, 0))
}

/// What Hugging Face would take from its own defaults, which differ from family to family, must be
/// in the file; its loss of balance is another than ours.
fn common(keys: &Keys) -> Result<(), String> {
    required(keys, "num_key_value_heads", 1 << 12)?;
    required(keys, "num_experts_per_tok", MOST_EXPERTS)?;
    if flag(keys, "output_router_logits")? == Some(true) {
        return Err(
            "output_router_logits is true, which adds a loss of balance; that is a matter of training here, where --moe-aux-loss-coeff says it"
                .into(),
        );
    }
    Ok(())
}

/// `mlp_only_layers` as the number of blocks before the first with experts.
fn first_dense(keys: &Keys) -> Result<usize, String> {
    let Some(value) = present(keys, "mlp_only_layers") else {
        return Ok(0);
    };
    let layers = value.as_array().map_or(&[][..], Vec::as_slice);
    let mut dense: Vec<Option<u64>> = layers.iter().map(Value::as_u64).collect();
    dense.sort_unstable();
    dense.dedup();
    let first = (0..).map(Some).take(dense.len());
    if !value.is_array() || !dense.iter().copied().eq(first) {
        return Err(format!(
            "mlp_only_layers is {value}; it must list the first blocks, as in [0, 1]: only those can be dense here"
        ));
    }
    Ok(dense.len())
}
