//! Which model: a preset by name, or the `config.json` of a Llama in Hugging Face's keys.
//!
//! A file is taken only where this trainer computes what its keys say; all else is refused by
//! name of the key, for a model that is nearly right has no error message.

use std::io;
use std::path::Path;

use quintet_planner::config::ModelConfig;
use serde_json::{Map, Value, json};

/// A model, and how it is trained where no flag says otherwise.
#[derive(Debug, Clone, PartialEq)]
pub struct Model {
    /// Its shape.
    pub config: ModelConfig,
    /// Tokens predicted per sample, by default.
    pub seq: usize,
    /// Samples in a step, by default.
    pub global_batch: usize,
}

/// Sequence length of a config file, where it allows as much.
const SEQ: usize = 1024;
/// Samples in a step where nothing says so.
const GLOBAL_BATCH: usize = 8;
/// What Hugging Face takes for a Llama whose file has no `max_position_embeddings`.
const MAX_POSITIONS: u64 = 2048;
/// What Hugging Face takes for a Llama whose file has no `rope_theta`.
const ROPE_THETA: f64 = 10_000.0;

/// A model that cannot be had; one sentence for the person who asked for it.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ModelError {
    /// Neither a preset nor a file.
    #[error(
        "model {0}: no such preset or file; --model takes tiny, bench-s, bench-m or the path of a config.json"
    )]
    Unknown(String),
    /// A preset with experts.
    #[error(
        "model tiny-moe: experts are not built yet; use tiny, bench-s, bench-m or the path of a config.json"
    )]
    Experts,
    /// The system refuses to read the file.
    #[error(
        "model {path}: cannot be read ({source}); it must be a config.json readable by this user"
    )]
    Unreadable {
        /// As given.
        path: String,
        /// Why.
        source: io::Error,
    },
    /// Not JSON.
    #[error("model {path}: not JSON ({source}); it must be a config.json with Hugging Face's keys")]
    NotJson {
        /// As given.
        path: String,
        /// Where and why.
        source: serde_json::Error,
    },
    /// JSON, but no model that this trainer computes.
    #[error("model {path}: {what}")]
    Refused {
        /// As given.
        path: String,
        /// Which key, and what would be right.
        what: String,
    },
}

impl Model {
    /// A preset by name, or else the file at that path (in a folder, its `config.json`).
    ///
    /// # Errors
    /// [`ModelError`] where there is neither, or the file holds no model that is computed here.
    pub fn named(name: &str) -> Result<Self, ModelError> {
        match name {
            "tiny" => Ok(tiny()),
            "bench-s" => Ok(bench_s()),
            "bench-m" => Ok(bench_m()),
            "tiny-moe" => Err(ModelError::Experts),
            path => Self::open(path),
        }
    }

    fn open(given: &str) -> Result<Self, ModelError> {
        let mut path = Path::new(given).to_path_buf();
        if path.is_dir() {
            path.push("config.json");
        }
        let shown = path.display().to_string();
        match std::fs::read_to_string(&path) {
            Ok(text) => Self::from_json(&shown, &text),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                Err(ModelError::Unknown(shown))
            }
            Err(source) => Err(ModelError::Unreadable {
                path: shown,
                source,
            }),
        }
    }

    /// The model of a `config.json`; `path` stands for the file in what is said of it.
    ///
    /// # Errors
    /// [`ModelError::NotJson`], [`ModelError::Refused`].
    pub fn from_json(path: &str, text: &str) -> Result<Self, ModelError> {
        let refused = |what| ModelError::Refused {
            path: path.into(),
            what,
        };
        match serde_json::from_str(text) {
            Ok(Value::Object(keys)) => read(&keys).map_err(refused),
            Ok(_) => Err(refused("not a JSON object; a config.json is one".into())),
            Err(source) => Err(ModelError::NotJson {
                path: path.into(),
                source,
            }),
        }
    }

    /// The `config.json` of this model, as Hugging Face reads it; [`Model::from_json`] gives the
    /// same model back, but for `global_batch` and a `seq` above 1024.
    #[must_use]
    pub fn to_json(&self) -> String {
        let c = &self.config;
        let keys = json!({
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
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
            "attention_bias": false,
            "mlp_bias": false,
            "max_position_embeddings": self.seq,
        });
        format!("{keys:#}\n")
    }
}

fn tiny() -> Model {
    Model {
        config: ModelConfig {
            vocab: 256,
            hidden: 64,
            layers: 4,
            heads: 4,
            kv_heads: 2,
            head_dim: 16,
            ffn: 176,
            rope_theta: ROPE_THETA,
            norm_eps: 1e-5,
            tied: true,
        },
        seq: 64,
        global_batch: 16,
    }
}

fn bench_s() -> Model {
    Model {
        config: ModelConfig {
            vocab: 512,
            hidden: 256,
            layers: 4,
            heads: 8,
            kv_heads: 4,
            head_dim: 32,
            ffn: 688,
            rope_theta: ROPE_THETA,
            norm_eps: 1e-5,
            tied: false,
        },
        seq: 256,
        global_batch: 8,
    }
}

fn bench_m() -> Model {
    Model {
        config: ModelConfig {
            vocab: 4096,
            hidden: 512,
            layers: 8,
            heads: 8,
            kv_heads: 4,
            head_dim: 64,
            ffn: 1376,
            rope_theta: ROPE_THETA,
            norm_eps: 1e-5,
            tied: false,
        },
        seq: 512,
        global_batch: 4,
    }
}

/// The keys of a file as a model, or what is wrong with them.
fn read(keys: &Map<String, Value>) -> Result<Model, String> {
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
    Ok(Model {
        config,
        seq: positions.unwrap_or(MAX_POSITIONS as usize).min(SEQ),
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

#[cfg(test)]
#[path = "model_config/tests.rs"]
mod tests;
