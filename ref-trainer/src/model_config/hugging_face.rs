//! The keys of a `config.json`, read one by one: taken, defaulted as Hugging Face does, or refused.

use quintet_parallel_layers::Architecture;
use quintet_planner::config::ModelConfig;
use serde_json::{Map, Value, json};

use super::{Model, ROPE_THETA};

/// Sequence length of a config file, where it allows as much.
const SEQ: usize = 1024;
/// Samples in a step where nothing says so.
const GLOBAL_BATCH: usize = 8;
/// What Hugging Face takes for a Llama whose file has no `max_position_embeddings`.
const MAX_POSITIONS: usize = 2048;

/// The keys of a file as a model, or what is wrong with them.
pub(super) fn read(keys: &Map<String, Value>) -> Result<Model, String> {
    is_plain_llama(keys)?;
    let heads = required(keys, "num_attention_heads", 1 << 12)?;
    let hidden = required(keys, "hidden_size", 1 << 18)?;
    let config = ModelConfig {
        vocab: required(keys, "vocab_size", 1 << 24)?,
        hidden,
        layers: required(keys, "num_hidden_layers", 1 << 12)?,
        heads,
        kv_heads: length(keys, "num_key_value_heads", 1 << 12)?.unwrap_or(heads),
        head_dim: match length(keys, "head_dim", 1 << 12)? {
            Some(len) => len,
            None if hidden.is_multiple_of(heads) => hidden / heads,
            None => {
                return Err(format!(
                    "{heads} heads do not divide hidden_size {hidden}; give head_dim"
                ));
            }
        },
        ffn: required(keys, "intermediate_size", 1 << 20)?,
        rope_theta: rope_theta(keys)?,
        norm_eps: number(keys, "rms_norm_eps")?
            .ok_or("rms_norm_eps is missing; a Llama has one, often 1e-5")?,
        tied: flag(keys, "tie_word_embeddings")?,
        architecture: Architecture::LLAMA,
    };
    if !config.heads.is_multiple_of(config.kv_heads) {
        return Err(format!(
            "num_key_value_heads {} does not divide num_attention_heads {heads}",
            config.kv_heads
        ));
    }
    if !config.head_dim.is_multiple_of(2) {
        return Err(format!(
            "head_dim {} is odd; rotary positions pair its elements",
            config.head_dim
        ));
    }
    if !(config.norm_eps > 0.0 && config.norm_eps < 1.0) {
        return Err(format!(
            "rms_norm_eps {} must lie between 0 and 1",
            config.norm_eps
        ));
    }
    if config.rope_theta <= 1.0 {
        return Err(format!("rope_theta {} must be above 1", config.rope_theta));
    }
    let positions = length(keys, "max_position_embeddings", 1 << 30)?;
    let max_positions = positions.unwrap_or(MAX_POSITIONS);
    Ok(Model {
        config,
        seq: max_positions.min(SEQ),
        max_positions,
        global_batch: GLOBAL_BATCH,
    })
}

/// Refuses what other code would compute with these keys and ours would not.
fn is_plain_llama(keys: &Map<String, Value>) -> Result<(), String> {
    let only = "only Llama (model_type \"llama\", LlamaForCausalLM) is computed here";
    let model_type = present(keys, "model_type");
    let architectures = present(keys, "architectures");
    match (model_type, architectures) {
        (None, None) => return Err(format!("neither model_type nor architectures; {only}")),
        (Some(kind), _) if kind != "llama" => return Err(format!("model_type is {kind}; {only}")),
        (_, Some(names)) if *names != json!(["LlamaForCausalLM"]) => {
            return Err(format!("architectures is {names}; {only}"));
        }
        _ => {}
    }
    if let Some(act) = present(keys, "hidden_act")
        && act != "silu"
        && act != "swish"
    {
        return Err(format!(
            "hidden_act is {act}; only \"silu\" is computed here"
        ));
    }
    for key in ["attention_bias", "mlp_bias"] {
        if flag(keys, key)? {
            return Err(format!(
                "{key} is true; matrices have no bias here, so it must be false"
            ));
        }
    }
    if number(keys, "attention_dropout")?.unwrap_or(0.0) != 0.0 {
        return Err("attention_dropout is not 0; dropout is not built yet".into());
    }
    if number(keys, "partial_rotary_factor")?.unwrap_or(1.0) != 1.0 {
        return Err("partial_rotary_factor is not 1; whole heads are rotated here".into());
    }
    for (key, what) in [
        ("sliding_window", "windows are"),
        ("num_local_experts", "experts are"),
        ("num_experts", "experts are"),
        ("n_routed_experts", "experts are"),
    ] {
        if let Some(value) = present(keys, key) {
            return Err(format!("{key} is {value}; {what} not built yet"));
        }
    }
    if present(keys, "quantization_config").is_some() {
        return Err(
            "quantization_config is given; only plain weights are computed with here".into(),
        );
    }
    Ok(())
}

/// `rope_theta`, at the top or in `rope_parameters` (as newer files have it); any other way to
/// stretch positions is refused.
fn rope_theta(keys: &Map<String, Value>) -> Result<f64, String> {
    let mut theta = number(keys, "rope_theta")?;
    for nested in ["rope_parameters", "rope_scaling"] {
        let Some(value) = present(keys, nested) else {
            continue;
        };
        let Value::Object(rope) = value else {
            return Err(format!("{nested} is {value}; it must be an object or null"));
        };
        for (key, value) in rope.iter().filter(|(_, value)| !value.is_null()) {
            match key.as_str() {
                "rope_theta" => {}
                "rope_type" | "type" if value == "default" => {}
                "partial_rotary_factor" if value.as_f64() == Some(1.0) => {}
                _ => {
                    return Err(format!(
                        "{nested} has {key} {value}; only unscaled rotary positions (rope_type \"default\") are computed here"
                    ));
                }
            }
        }
        match (theta, number(rope, "rope_theta")?) {
            (Some(outer), Some(inner)) if outer != inner => {
                return Err(format!(
                    "rope_theta is {outer} at the top and {inner} in {nested}; they must agree"
                ));
            }
            (outer, inner) => theta = outer.or(inner),
        }
    }
    Ok(theta.unwrap_or(ROPE_THETA))
}

/// A key's value; null counts as absent, as it does for Hugging Face.
fn present<'a>(keys: &'a Map<String, Value>, key: &str) -> Option<&'a Value> {
    keys.get(key).filter(|value| !value.is_null())
}

/// A whole number in `1..=most`.
fn length(keys: &Map<String, Value>, key: &str, most: usize) -> Result<Option<usize>, String> {
    let Some(value) = present(keys, key) else {
        return Ok(None);
    };
    let len = value.as_u64().and_then(|len| usize::try_from(len).ok());
    match len {
        Some(len) if (1..=most).contains(&len) => Ok(Some(len)),
        _ => Err(format!(
            "{key} is {value}; it must be a whole number from 1 to {most}"
        )),
    }
}

fn required(keys: &Map<String, Value>, key: &str, most: usize) -> Result<usize, String> {
    let missing = || format!("{key} is missing; it must be a whole number from 1 to {most}");
    length(keys, key, most)?.ok_or_else(missing)
}

fn number(keys: &Map<String, Value>, key: &str) -> Result<Option<f64>, String> {
    let Some(value) = present(keys, key) else {
        return Ok(None);
    };
    match value.as_f64().filter(|x| x.is_finite()) {
        Some(x) => Ok(Some(x)),
        None => Err(format!("{key} is {value}; it must be a number")),
    }
}

/// A flag; absent is false.
fn flag(keys: &Map<String, Value>, key: &str) -> Result<bool, String> {
    match present(keys, key) {
        None => Ok(false),
        Some(Value::Bool(set)) => Ok(*set),
        Some(value) => Err(format!("{key} is {value}; it must be true or false")),
    }
}
