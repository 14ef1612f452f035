//! The keys of a `config.json`, read one by one: taken, defaulted as Hugging Face does, or refused;
//! and written back.

use quintet_parallel_layers::{Architecture, Positions};
use quintet_planner::config::ModelConfig;
use serde_json::{Map, Value, json};

use super::{Model, ROPE_THETA};

/// Sequence length of a config file, where it allows as much.
const SEQ: usize = 1024;
/// Samples in a step where nothing says so.
const GLOBAL_BATCH: usize = 8;
/// What Hugging Face takes for a Llama whose file has no `max_position_embeddings`.
const MAX_POSITIONS: usize = 2048;

/// A model in the keys of its family.
pub(super) fn write(model: &Model) -> Value {
    let (c, has) = (&model.config, model.config.architecture);
    if let Positions::Learned(positions) = has.positions {
        return json!({
            "architectures": ["GPT2LMHeadModel"],
            "model_type": "gpt2",
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
        });
    }
    let mut keys = json!({
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
    let own = if has.qkv_bias {
        json!({
            "architectures": ["Qwen2ForCausalLM"],
            "model_type": "qwen2",
            "use_sliding_window": false,
        })
    } else {
        json!({
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "attention_bias": false,
            "mlp_bias": false,
        })
    };
    if let (Value::Object(keys), Value::Object(own)) = (&mut keys, own) {
        keys.extend(own);
    }
    keys
}

/// What a file is called by, and who reads it.
struct Family {
    model_type: &'static str,
    architecture: &'static str,
    read: fn(&Map<String, Value>) -> Result<Model, String>,
}

const FAMILIES: [Family; 3] = [
    Family {
        model_type: "llama",
        architecture: "LlamaForCausalLM",
        read: llama,
    },
    Family {
        model_type: "qwen2",
        architecture: "Qwen2ForCausalLM",
        read: qwen2,
    },
    Family {
        model_type: "gpt2",
        architecture: "GPT2LMHeadModel",
        read: gpt2,
    },
];

/// The keys of a file as a model, or what is wrong with them.
pub(super) fn read(keys: &Map<String, Value>) -> Result<Model, String> {
    let only = || {
        let known: Vec<String> = FAMILIES
            .iter()
            .map(|f| format!("{} ({})", f.model_type, f.architecture))
            .collect();
        format!("computed here are {}", known.join(", "))
    };
    let model_type = present(keys, "model_type");
    let architectures = present(keys, "architectures");
    let family = FAMILIES.iter().find(|f| match (model_type, architectures) {
        (Some(kind), _) => kind == f.model_type,
        (None, Some(names)) => *names == json!([f.architecture]),
        (None, None) => false,
    });
    let Some(family) = family else {
        return Err(match (model_type, architectures) {
            (Some(kind), _) => format!("model_type is {kind}; {}", only()),
            (None, Some(names)) => format!("architectures is {names}; {}", only()),
            (None, None) => format!("neither model_type nor architectures; {}", only()),
        });
    };
    if let Some(names) = architectures
        && *names != json!([family.architecture])
    {
        return Err(format!(
            "architectures is {names} where model_type is {}; it must be [\"{}\"]",
            family.model_type, family.architecture
        ));
    }
    if present(keys, "quantization_config").is_some() {
        return Err(
            "quantization_config is given; only plain weights are computed with here".into(),
        );
    }
    let model = (family.read)(keys)?;
    judge(&model.config)?;
    Ok(model)
}

fn judge(config: &ModelConfig) -> Result<(), String> {
    if !config.heads.is_multiple_of(config.kv_heads) {
        return Err(format!(
            "num_key_value_heads {} does not divide num_attention_heads {}",
            config.kv_heads, config.heads
        ));
    }
    let rotary = config.architecture.rotary(config.head_dim);
    if !rotary.is_multiple_of(2) {
        return Err(format!(
            "head_dim {} has {rotary} elements that turn, which is odd; rotary positions pair them",
            config.head_dim
        ));
    }
    if !(config.norm_eps > 0.0 && config.norm_eps < 1.0) {
        return Err(format!(
            "the norm's epsilon {} must lie between 0 and 1",
            config.norm_eps
        ));
    }
    if config.rope_theta <= 1.0 {
        return Err(format!("rope_theta {} must be above 1", config.rope_theta));
    }
    Ok(())
}

fn model(config: ModelConfig, max_positions: usize) -> Model {
    Model {
        config,
        seq: max_positions.min(SEQ),
        max_positions,
        from_file: true,
        global_batch: GLOBAL_BATCH,
    }
}

/// Llama, whose matrices have no bias.
fn llama(keys: &Map<String, Value>) -> Result<Model, String> {
    for key in ["attention_bias", "mlp_bias"] {
        if flag(keys, key)? == Some(true) {
            return Err(format!(
                "{key} is true; a Llama's matrices have no bias here, so it must be false"
            ));
        }
    }
    refuse_window(keys)?;
    rotary_decoder(keys, Architecture::LLAMA)
}

/// Qwen2: Llama with a bias on q, k and v.
fn qwen2(keys: &Map<String, Value>) -> Result<Model, String> {
    // sliding_window may be there and off.
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
    let architecture = Architecture {
        qkv_bias: true,
        ..Architecture::LLAMA
    };
    rotary_decoder(keys, architecture)
}

/// What the rotary families share: RMSNorm, SwiGLU, grouped KV heads.
fn rotary_decoder(keys: &Map<String, Value>, architecture: Architecture) -> Result<Model, String> {
    refuse_other_maths(keys)?;
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
            None => divided(hidden, heads)?,
        },
        ffn: required(keys, "intermediate_size", 1 << 20)?,
        rope_theta: rope_theta(keys)?,
        norm_eps: number(keys, "rms_norm_eps")?
            .ok_or("rms_norm_eps is missing; a model of this kind has one, often 1e-5 or 1e-6")?,
        tied: flag(keys, "tie_word_embeddings")?.unwrap_or(false),
        moe: None,
        architecture,
        window: None,
        dropout: 0.0,
    };
    let positions = length(keys, "max_position_embeddings", 1 << 30)?;
    Ok(model(config, positions.unwrap_or(MAX_POSITIONS)))
}

/// GPT-2: LayerNorm, GELU, learned positions, biases everywhere. The rates of dropout in its file
/// are a matter of training, where `--dropout` says it.
fn gpt2(keys: &Map<String, Value>) -> Result<Model, String> {
    match present(keys, "activation_function") {
        None => {}
        Some(act) if act == "gelu_new" || act == "gelu_pytorch_tanh" => {}
        Some(act) => {
            return Err(format!(
                "activation_function is {act}; only \"gelu_new\" (GELU's tanh form) is computed here"
            ));
        }
    }
    for (key, only) in [
        ("scale_attn_weights", true),
        ("scale_attn_by_inverse_layer_idx", false),
        ("reorder_and_upcast_attn", false),
        ("add_cross_attention", false),
    ] {
        if let Some(set) = flag(keys, key)?
            && set != only
        {
            return Err(format!("{key} is {set}; only {only} is computed here"));
        }
    }
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

fn divided(hidden: usize, heads: usize) -> Result<usize, String> {
    if hidden.is_multiple_of(heads) {
        return Ok(hidden / heads);
    }
    Err(format!(
        "{heads} heads do not divide a width of {hidden}; give head_dim"
    ))
}

fn refuse_window(keys: &Map<String, Value>) -> Result<(), String> {
    match present(keys, "sliding_window") {
        None => Ok(()),
        Some(value) => Err(format!(
            "sliding_window is {value}; a Llama has none, and --window-size sets one"
        )),
    }
}

/// Refuses what other code would compute with these keys and ours would not. Rates of dropout are a
/// matter of training, where `--dropout` says it.
fn refuse_other_maths(keys: &Map<String, Value>) -> Result<(), String> {
    if let Some(act) = present(keys, "hidden_act")
        && act != "silu"
        && act != "swish"
    {
        return Err(format!(
            "hidden_act is {act}; only \"silu\" is computed here"
        ));
    }
    if number(keys, "partial_rotary_factor")?.unwrap_or(1.0) != 1.0 {
        return Err("partial_rotary_factor is not 1; whole heads are rotated here".into());
    }
    for key in ["num_local_experts", "num_experts", "n_routed_experts"] {
        if let Some(value) = present(keys, key) {
            return Err(format!("{key} is {value}; experts are not built yet"));
        }
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

/// A flag, where it is there.
fn flag(keys: &Map<String, Value>, key: &str) -> Result<Option<bool>, String> {
    match present(keys, key) {
        None => Ok(None),
        Some(Value::Bool(set)) => Ok(Some(*set)),
        Some(value) => Err(format!("{key} is {value}; it must be true or false")),
    }
}
