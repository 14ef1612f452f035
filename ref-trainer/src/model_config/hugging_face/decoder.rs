//! What the rotary families share (RMSNorm, SwiGLU, grouped KV heads), and those without experts.

use quintet_parallel_layers::{Architecture, Positions};
use quintet_planner::config::{ModelConfig, MoeConfig};
use serde_json::{Value, json};

use super::both;
use super::keys::{Keys, flag, length, number, present, required};
use crate::model_config::{Model, ROPE_THETA};

/// Sequence length of a config file, where it allows as much.
const SEQ: usize = 1024;
/// Samples in a step where nothing says so.
const GLOBAL_BATCH: usize = 8;
/// What Hugging Face takes for a Llama whose file has no `max_position_embeddings`.
const MAX_POSITIONS: usize = 2048;

/// What a family adds to the common keys.
pub(super) struct Decoder {
    /// Its norms, MLP and biases; positions are read from the file.
    pub architecture: Architecture,
    /// Its experts.
    pub moe: Option<MoeConfig>,
    /// Tokens that a token sees.
    pub window: Option<usize>,
    /// `rope_theta` where the file has none.
    pub theta: f64,
    /// Share of a head that turns where the file does not say; none where it is always all of it.
    pub turns: Option<f64>,
}

impl Decoder {
    /// A Llama.
    pub(super) const LLAMA: Self = Self {
        architecture: Architecture::LLAMA,
        moe: None,
        window: None,
        theta: ROPE_THETA,
        turns: None,
    };
}

/// A model of a file.
pub(super) fn model(config: ModelConfig, max_positions: usize) -> Model {
    Model {
        config,
        seq: max_positions.min(SEQ),
        max_positions,
        from_file: true,
        global_batch: GLOBAL_BATCH,
    }
}

/// Llama, whose matrices have no bias.
pub(super) fn llama(keys: &Keys) -> Result<Model, String> {
    for key in ["attention_bias", "mlp_bias"] {
        if flag(keys, key)? == Some(true) {
            return Err(format!(
                "{key} is true; a Llama's matrices have no bias here, so it must be false"
            ));
        }
    }
    if let Some(value) = present(keys, "sliding_window") {
        return Err(format!(
            "sliding_window is {value}; a Llama has none, and --window-size sets one"
        ));
    }
    no_experts(keys)?;
    read(keys, Decoder::LLAMA)
}

pub(super) fn llama_keys() -> Value {
    json!({"attention_bias": false, "mlp_bias": false})
}

/// Qwen2: Llama with a bias on q, k and v.
pub(super) fn qwen2(keys: &Keys) -> Result<Model, String> {
    no_experts(keys)?;
    whole_sight(keys)?;
    let architecture = Architecture {
        qkv_bias: true,
        ..Architecture::LLAMA
    };
    read(
        keys,
        Decoder {
            architecture,
            ..Decoder::LLAMA
        },
    )
}

pub(super) fn qwen2_keys() -> Value {
    json!({"use_sliding_window": false})
}

/// Reads the common keys.
pub(super) fn read(keys: &Keys, family: Decoder) -> Result<Model, String> {
    refuse_other_maths(keys)?;
    let heads = required(keys, "num_attention_heads", 1 << 12)?;
    let hidden = required(keys, "hidden_size", 1 << 18)?;
    let head_dim = match length(keys, "head_dim", 1 << 12)? {
        Some(len) => len,
        None => divided(hidden, heads)?,
    };
    let (theta, turns) = rope(keys, &family)?;
    let turning = (head_dim as f64 * turns) as usize;
    let config = ModelConfig {
        vocab: required(keys, "vocab_size", 1 << 24)?,
        hidden,
        layers: required(keys, "num_hidden_layers", 1 << 12)?,
        heads,
        kv_heads: length(keys, "num_key_value_heads", 1 << 12)?.unwrap_or(heads),
        head_dim,
        ffn: required(keys, "intermediate_size", 1 << 20)?,
        rope_theta: theta,
        norm_eps: number(keys, "rms_norm_eps")?
            .ok_or("rms_norm_eps is missing; a model of this kind has one, often 1e-5 or 1e-6")?,
        tied: flag(keys, "tie_word_embeddings")?.unwrap_or(false),
        moe: family.moe,
        architecture: Architecture {
            positions: if turning == head_dim {
                Positions::Rotary
            } else {
                Positions::PartRotary(turning)
            },
            softcap: softcap(keys)?,
            ..family.architecture
        },
        window: family.window,
        dropout: 0.0,
    };
    let positions = length(keys, "max_position_embeddings", 1 << 30)?;
    Ok(model(config, positions.unwrap_or(MAX_POSITIONS)))
}

/// The common keys and a family's own, which win.
pub(super) fn write(model: &Model, own: Value) -> Value {
    let c = &model.config;
    let common = json!({
        "vocab_size": c.vocab,
        "hidden_size": c.hidden,
        "num_hidden_layers": c.layers,
        "num_attention_heads": c.heads,
        "num_key_value_heads": c.kv_heads,
        "head_dim": c.head_dim,
        "intermediate_size": c.ffn,
        "hidden_act": "silu",
        "rms_norm_eps": c.norm_eps,
        "rope_theta": c.rope_theta,
        "tie_word_embeddings": c.tied,
        "max_position_embeddings": model.max_positions,
    });
    let capped = match c.architecture.softcap {
        Some(cap) => both(common, json!({SOFTCAP: cap})),
        None => common,
    };
    both(capped, own)
}

/// The cap of attention's scores, as Gemma 2's files have it.
const SOFTCAP: &str = "attn_logit_softcapping";

fn softcap(keys: &Keys) -> Result<Option<f64>, String> {
    match number(keys, SOFTCAP)? {
        Some(cap) if cap <= 0.0 => Err(format!("{SOFTCAP} is {cap}; it must be above 0, or null")),
        cap => Ok(cap),
    }
}

/// Refuses windows and layers of other kinds, which may be there and off.
pub(super) fn whole_sight(keys: &Keys) -> Result<(), String> {
    if flag(keys, "use_sliding_window")? == Some(true) {
        return Err(
            "use_sliding_window is true; here all layers have one window, which --window-size sets"
                .into(),
        );
    }
    if let Some(Value::Array(types)) = present(keys, "layer_types")
        && let Some(other) = types.iter().find(|kind| *kind != "full_attention")
    {
        return Err(format!(
            "layer_types has {other}; only \"full_attention\" is computed here"
        ));
    }
    Ok(())
}

pub(super) fn divided(hidden: usize, heads: usize) -> Result<usize, String> {
    if hidden.is_multiple_of(heads) {
        return Ok(hidden / heads);
    }
    Err(format!(
        "{heads} heads do not divide a width of {hidden}; give head_dim"
    ))
}

fn no_experts(keys: &Keys) -> Result<(), String> {
    for key in ["num_local_experts", "num_experts", "n_routed_experts"] {
        if let Some(value) = present(keys, key) {
            return Err(format!(
                "{key} is {value}; a model of this model_type has no experts (mixtral, qwen3_moe and glm4_moe have)"
            ));
        }
    }
    Ok(())
}

/// Refuses what other code would compute with these keys and ours would not.
fn refuse_other_maths(keys: &Keys) -> Result<(), String> {
    if let Some(act) = present(keys, "hidden_act")
        && act != "silu"
        && act != "swish"
    {
        return Err(format!(
            "hidden_act is {act}; only \"silu\" is computed here"
        ));
    }
    Ok(())
}

/// Base of the frequencies and the share of a head that turns, at the top or in `rope_parameters`
/// (as newer files have them); any other way to stretch positions is refused.
fn rope(keys: &Keys, family: &Decoder) -> Result<(f64, f64), String> {
    const TURNS: &str = "partial_rotary_factor";
    let mut theta = number(keys, "rope_theta")?;
    let mut turns = number(keys, TURNS)?;
    for nested in ["rope_parameters", "rope_scaling"] {
        let Some(value) = present(keys, nested) else {
            continue;
        };
        let Value::Object(rope) = value else {
            return Err(format!("{nested} is {value}; it must be an object or null"));
        };
        for (key, value) in rope.iter().filter(|(_, value)| !value.is_null()) {
            match key.as_str() {
                "rope_theta" | TURNS => {}
                "rope_type" | "type" if value == "default" => {}
                _ => {
                    return Err(format!(
                        "{nested} has {key} {value}; only unscaled rotary positions (rope_type \"default\") are computed here"
                    ));
                }
            }
        }
        for (key, known) in [("rope_theta", &mut theta), (TURNS, &mut turns)] {
            match (*known, number(rope, key)?) {
                (Some(outer), Some(inner)) if outer != inner => {
                    return Err(format!(
                        "{key} is {outer} at the top and {inner} in {nested}; they must agree"
                    ));
                }
                (outer, inner) => *known = outer.or(inner),
            }
        }
    }
    let turns = match (turns, family.turns) {
        (None, usual) => usual.unwrap_or(1.0),
        (Some(share), None) if share != 1.0 => {
            return Err(format!(
                "{TURNS} is {share}; whole heads are rotated in a model of this model_type"
            ));
        }
        (Some(share), _) if !(share > 0.0 && share <= 1.0) => {
            return Err(format!(
                "{TURNS} is {share}; it must be above 0 and at most 1"
            ));
        }
        (Some(share), _) => share,
    };
    Ok((theta.unwrap_or(family.theta), turns))
}
