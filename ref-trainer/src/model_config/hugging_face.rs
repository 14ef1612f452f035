//! The keys of a `config.json`, read one by one: taken, defaulted as Hugging Face does, or refused;
//! and written back.

use quintet_planner::config::ModelConfig;
use serde_json::{Value, json};

use super::{Model, ROPE_THETA};

mod decoder;
mod experts;
mod gpt2;
mod keys;

use keys::{Keys, present};

/// A family of models: those whose files have the same keys and names.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Family {
    /// RMSNorm, SwiGLU, rotary positions, no bias.
    Llama,
    /// Llama with a bias on q, k and v.
    Qwen2,
    /// LayerNorm, GELU, learned positions, biases everywhere.
    Gpt2,
    /// Llama with experts in each block.
    Mixtral,
    /// The same with norms on q and k, and blocks without experts first.
    Qwen3Moe,
    /// A sigmoid router with a bias on the choice, shared experts, heads that turn in part.
    Glm4Moe,
}

impl Family {
    /// Every family that is computed here.
    pub const ALL: [Self; 6] = [
        Self::Llama,
        Self::Qwen2,
        Self::Gpt2,
        Self::Mixtral,
        Self::Qwen3Moe,
        Self::Glm4Moe,
    ];

    /// What `model_type` calls it.
    #[must_use]
    pub fn model_type(self) -> &'static str {
        match self {
            Self::Llama => "llama",
            Self::Qwen2 => "qwen2",
            Self::Gpt2 => "gpt2",
            Self::Mixtral => "mixtral",
            Self::Qwen3Moe => "qwen3_moe",
            Self::Glm4Moe => "glm4_moe",
        }
    }

    /// What `architectures` calls it.
    #[must_use]
    pub fn architecture(self) -> &'static str {
        match self {
            Self::Llama => "LlamaForCausalLM",
            Self::Qwen2 => "Qwen2ForCausalLM",
            Self::Gpt2 => "GPT2LMHeadModel",
            Self::Mixtral => "MixtralForCausalLM",
            Self::Qwen3Moe => "Qwen3MoeForCausalLM",
            Self::Glm4Moe => "Glm4MoeForCausalLM",
        }
    }

    /// The family whose files say all that a model is.
    ///
    /// # Errors
    /// What the family that comes nearest cannot say.
    pub fn of(model: &Model) -> Result<Self, String> {
        let told = told(&model.config);
        let mut nearest: Option<(Self, Vec<&str>)> = None;
        for family in Self::ALL {
            let Value::Object(keys) = family.write(model) else {
                continue;
            };
            let Ok(read) = family.read(&keys) else {
                continue;
            };
            let lost = lost(&told, &read.config);
            if lost.is_empty() {
                return Ok(family);
            }
            if nearest.as_ref().is_none_or(|(_, n)| lost.len() < n.len()) {
                nearest = Some((family, lost));
            }
        }
        Err(match nearest {
            None => String::from("no config.json holds a model of this shape"),
            Some((family, lost)) => format!(
                "no config.json says all that this model is; {} comes nearest, and cannot say {}",
                family.model_type(),
                lost.join(", ")
            ),
        })
    }

    fn read(self, keys: &Keys) -> Result<Model, String> {
        match self {
            Self::Llama => decoder::llama(keys),
            Self::Qwen2 => decoder::qwen2(keys),
            Self::Gpt2 => gpt2::read(keys),
            Self::Mixtral => experts::mixtral(keys),
            Self::Qwen3Moe => experts::qwen3_moe(keys),
            Self::Glm4Moe => experts::glm4_moe(keys),
        }
    }

    /// A model in the keys of this family; what they cannot say is left out.
    fn write(self, model: &Model) -> Value {
        let own = match self {
            Self::Gpt2 => gpt2::write(model),
            Self::Llama => decoder::write(model, decoder::llama_keys()),
            Self::Qwen2 => decoder::write(model, decoder::qwen2_keys()),
            Self::Mixtral => decoder::write(model, experts::mixtral_keys(model)),
            Self::Qwen3Moe => decoder::write(model, experts::qwen3_moe_keys(model)),
            Self::Glm4Moe => decoder::write(model, experts::glm4_moe_keys(model)),
        };
        let names = json!({
            "architectures": [self.architecture()],
            "model_type": self.model_type(),
        });
        both(names, own)
    }
}

/// A model in the keys of its family.
pub(super) fn write(model: &Model) -> Result<Value, String> {
    Ok(Family::of(model)?.write(model))
}

/// The keys of a file as a model, or what is wrong with them.
pub(super) fn read(keys: &Keys) -> Result<Model, String> {
    let only = || {
        let known = Family::ALL.map(|f| format!("{} ({})", f.model_type(), f.architecture()));
        format!("computed here are {}", known.join(", "))
    };
    let model_type = present(keys, "model_type");
    let architectures = present(keys, "architectures");
    let family = Family::ALL
        .into_iter()
        .find(|f| match (model_type, architectures) {
            (Some(kind), _) => kind == f.model_type(),
            (None, Some(names)) => *names == json!([f.architecture()]),
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
        && *names != json!([family.architecture()])
    {
        return Err(format!(
            "architectures is {names} where model_type is {}; it must be [\"{}\"]",
            family.model_type(),
            family.architecture()
        ));
    }
    if present(keys, "quantization_config").is_some() {
        return Err(
            "quantization_config is given; only plain weights are computed with here".into(),
        );
    }
    let model = family.read(keys)?;
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
    if let Some(moe) = &config.moe
        && moe.topk > moe.experts
    {
        return Err(format!(
            "num_experts_per_tok {} is more than the {} experts",
            moe.topk, moe.experts
        ));
    }
    if let Some(moe) = &config.moe
        && moe.first_dense > config.layers
    {
        return Err(format!(
            "the first {} blocks are dense in a model of {}",
            moe.first_dense, config.layers
        ));
    }
    Ok(())
}

/// What of a model any file could say: the rules of its training are not in it, nor is a width
/// that no block has.
fn told(config: &ModelConfig) -> ModelConfig {
    let mut told = config.clone();
    if let Some(moe) = &mut told.moe {
        (moe.aux_loss, moe.z_loss, moe.bias_update_rate) = (0.0, 0.0, 0.0);
        if moe.first_dense == 0 {
            told.ffn = moe.ffn;
        }
    }
    if told.architecture.rotary(told.head_dim) == 0 {
        told.rope_theta = ROPE_THETA;
    }
    told
}

/// What of a model a file of some family does not say, given what was read back from it.
fn lost(wanted: &ModelConfig, read: &ModelConfig) -> Vec<&'static str> {
    let (read, a) = (told(read), wanted);
    let of = |config: &ModelConfig| config.moe.unwrap_or(super::MoeConfig::new(0, 0, 0));
    let (m, n) = (of(a), of(&read));
    let mut lost: Vec<&str> = [
        ("a window", a.window != read.window),
        ("which experts there are", {
            (m.experts, m.topk, m.ffn) != (n.experts, n.topk, n.ffn)
        }),
        ("how the router scores", {
            (m.score, m.normalize, m.scale, m.selection_bias)
                != (n.score, n.normalize, n.scale, n.selection_bias)
        }),
        (
            "a capacity of experts",
            m.capacity_factor != n.capacity_factor,
        ),
        ("the shared experts", m.shared_ffn != n.shared_ffn),
        (
            "a gate of the shared experts",
            m.shared_gate != n.shared_gate,
        ),
        ("the dense blocks", m.first_dense != n.first_dense),
        (
            "its norms, MLP, positions and biases",
            a.architecture != read.architecture,
        ),
    ]
    .into_iter()
    .filter_map(|(what, lost)| lost.then_some(what))
    .collect();
    if lost.is_empty() && *a != read {
        lost.push("its shape");
    }
    lost
}

/// One object of two.
fn both(mut keys: Value, more: Value) -> Value {
    if let (Value::Object(keys), Value::Object(more)) = (&mut keys, more) {
        keys.extend(more);
    }
    keys
}
