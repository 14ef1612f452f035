//! The shape that a `config.json` describes, for planning alone: families that this trainer does not
//! compute are planned for too. Keys that say nothing of a shape are known by name; a key that is
//! not known is refused, for it may change the shape.

use std::path::Path;

use quintet_parallel_layers::Architecture;
use quintet_planner::ModelConfig;
use quintet_planner::config::MoeConfig;
use quintet_planner::shape::{Latent, NAMES, Shape};
use serde_json::{Map, Value};

use crate::failure::Failure;
use crate::model_config::Model;

/// Families, by `model_type`.
const FAMILIES: [&str; 7] = [
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "mixtral",
    "qwen3_moe",
    "deepseek_v3",
];

/// Keys that are read, or that say nothing of bytes and operations.
const KNOWN: &[&str] = &[
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "intermediate_size",
    "tie_word_embeddings",
    "max_position_embeddings",
    "attention_bias",
    "model_type",
    "sliding_window",
    "use_sliding_window",
    "max_window_layers",
    "num_local_experts",
    "num_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
    "n_routed_experts",
    "n_shared_experts",
    "first_k_dense_replace",
    "q_lora_rank",
    "kv_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
    "qk_head_dim",
    "decoder_sparse_step",
    "mlp_only_layers",
    "moe_layer_freq",
    "num_nextn_predict_layers",
    // Numbers, not shapes.
    "architectures",
    "hidden_act",
    "rms_norm_eps",
    "rope_theta",
    "rope_scaling",
    "rope_parameters",
    "rope_interleave",
    "attention_dropout",
    "mlp_bias",
    "initializer_range",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
    "unk_token_id",
    "torch_dtype",
    "dtype",
    "transformers_version",
    "use_cache",
    "pretraining_tp",
    "_name_or_path",
    "auto_map",
    "layer_types",
    "norm_topk_prob",
    "output_router_logits",
    "router_aux_loss_coef",
    "router_jitter_noise",
    "scoring_func",
    "topk_method",
    "n_group",
    "topk_group",
    "routed_scaling_factor",
    "aux_loss_alpha",
    "seq_aux",
    "ep_size",
    "quantization_config",
    "partial_rotary_factor",
    "original_max_position_embeddings",
    "is_decoder",
    "is_encoder_decoder",
    "chunk_size_feed_forward",
    "output_attentions",
    "output_hidden_states",
    "return_dict",
    "torchscript",
    "use_bfloat16",
    "add_cross_attention",
    "tokenizer_class",
    "id2label",
    "label2id",
    "problem_type",
    "finetuning_task",
    "task_specific_params",
    "name_or_path",
];

/// A model by name, one of the trainer's presets, or a `config.json` (or its folder).
///
/// # Errors
/// Exit 2 in one sentence.
pub fn read_shape(name: &str) -> Result<Shape, Failure> {
    if let Some(shape) = Shape::named(name) {
        return Ok(shape);
    }
    if ["tiny", "tiny-moe", "bench-s", "bench-m"].contains(&name) {
        let model = Model::named(name)?;
        return Ok(Shape::new(name, model.config, model.max_positions));
    }
    let mut path = Path::new(name).to_path_buf();
    if path.is_dir() {
        path.push("config.json");
    }
    let shown = path.display().to_string();
    let said = |what: String| Failure::usage(format!("model {shown}: {what}"));
    let text = match std::fs::read_to_string(&path) {
        Ok(text) => text,
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => {
            return Err(said(format!(
                "no such name or file; names are {}, and a config.json may be given",
                NAMES.join(", ")
            )));
        }
        Err(e) => return Err(said(format!("cannot be read ({e})"))),
    };
    match serde_json::from_str(&text) {
        Ok(Value::Object(keys)) => Keys(&keys).shape(&shown).map_err(said),
        Ok(_) => Err(said("not a JSON object; a config.json is one".into())),
        Err(e) => Err(said(format!("not JSON ({e})"))),
    }
}

struct Keys<'a>(&'a Map<String, Value>);

impl Keys<'_> {
    fn get(&self, key: &str) -> Option<&Value> {
        self.0.get(key).filter(|value| !value.is_null())
    }

    fn maybe(&self, key: &str) -> Result<Option<usize>, String> {
        let Some(value) = self.get(key) else {
            return Ok(None);
        };
        match value.as_u64().and_then(|n| usize::try_from(n).ok()) {
            Some(n @ 0..=0x4000_0000) => Ok(Some(n)),
            _ => Err(format!("{key} is {value}; it must be a whole number")),
        }
    }

    fn need(&self, key: &str) -> Result<usize, String> {
        match self.maybe(key)? {
            Some(0) => Err(format!("{key} is 0; it must be at least 1")),
            Some(n) => Ok(n),
            None => Err(format!("{key} is missing; it must be a whole number")),
        }
    }

    fn flag(&self, key: &str, default: bool) -> Result<bool, String> {
        match self.get(key) {
            None => Ok(default),
            Some(Value::Bool(set)) => Ok(*set),
            Some(value) => Err(format!("{key} is {value}; it must be true or false")),
        }
    }

    fn shape(&self, name: &str) -> Result<Shape, String> {
        let kind = match self.get("model_type") {
            Some(Value::String(kind)) => kind.as_str(),
            Some(value) => return Err(format!("model_type is {value}; it must be a string")),
            None => {
                return Err(format!(
                    "model_type is missing; planned for are {}",
                    FAMILIES.join(", ")
                ));
            }
        };
        if !FAMILIES.contains(&kind) {
            return Err(format!(
                "model_type is {kind:?}; planned for are {}",
                FAMILIES.join(", ")
            ));
        }
        if let Some(key) = self.0.keys().find(|key| !KNOWN.contains(&key.as_str())) {
            return Err(format!(
                "{key} is a key that is not known here, and it may change the shape; remove it, or correct it"
            ));
        }
        self.plain()?;
        let (hidden, heads) = (self.need("hidden_size")?, self.need("num_attention_heads")?);
        let latent = self.latent(kind)?;
        let head_dim = match (latent, self.maybe("head_dim")?) {
            (Some(latent), _) => latent.mean_dim(),
            (None, Some(0)) => return Err("head_dim is 0; it must be at least 1".into()),
            (None, Some(len)) => len,
            (None, None) if hidden.is_multiple_of(heads) => hidden / heads,
            (None, None) => {
                return Err(format!(
                    "{heads} heads do not divide {hidden}; give head_dim"
                ));
            }
        };
        let kv_heads = match latent {
            Some(_) => heads,
            None => self.maybe("num_key_value_heads")?.unwrap_or(heads),
        };
        if kv_heads == 0 || !heads.is_multiple_of(kv_heads) {
            return Err(format!(
                "num_key_value_heads {kv_heads} does not divide num_attention_heads {heads}"
            ));
        }
        let sliding = self.flag("use_sliding_window", kind == "mistral" || kind == "mixtral")?;
        let config = ModelConfig {
            vocab: self.need("vocab_size")?,
            hidden,
            layers: self.need("num_hidden_layers")?,
            heads,
            kv_heads,
            head_dim,
            ffn: self.need("intermediate_size")?,
            rope_theta: 10_000.0,
            norm_eps: 1e-5,
            tied: self.flag("tie_word_embeddings", false)?,
            moe: self.experts(kind)?,
            window: self.maybe("sliding_window")?.filter(|_| sliding),
            dropout: 0.0,
            architecture: Architecture {
                qkv_bias: self.flag("attention_bias", kind == "qwen2")?,
                qk_norm: kind.starts_with("qwen3"),
                ..Architecture::LLAMA
            },
        };
        Ok(Shape {
            name: name.into(),
            config,
            latent,
            max_positions: self.maybe("max_position_embeddings")?.unwrap_or(2048),
        })
    }

    /// Refuses keys of which one value alone is planned for.
    ///
    /// # Errors
    /// The key that has another.
    fn plain(&self) -> Result<(), String> {
        if self.flag("mlp_bias", false)? {
            return Err("mlp_bias is true; MLPs are planned for without biases".into());
        }
        let list = |key: &str| match self.get(key) {
            None => Ok(&[][..]),
            Some(Value::Array(all)) => Ok(all.as_slice()),
            Some(value) => Err(format!("{key} is {value}; it must be a list")),
        };
        if let Some(layer) = list("mlp_only_layers")?.first() {
            return Err(format!(
                "mlp_only_layers names layer {layer}; every layer after the first dense ones has experts here"
            ));
        }
        let kinds = list("layer_types")?;
        if let Some(other) = kinds.iter().find(|kind| Some(*kind) != kinds.first()) {
            return Err(format!(
                "layer_types has {} and {other}; all layers are planned for alike",
                kinds[0]
            ));
        }
        Ok(())
    }

    fn latent(&self, kind: &str) -> Result<Option<Latent>, String> {
        if kind != "deepseek_v3" {
            return Ok(None);
        }
        Ok(Some(Latent {
            q_rank: self.maybe("q_lora_rank")?,
            kv_rank: self.need("kv_lora_rank")?,
            nope_dim: self.need("qk_nope_head_dim")?,
            rope_dim: self.need("qk_rope_head_dim")?,
            value_dim: self.need("v_head_dim")?,
        }))
    }

    fn experts(&self, kind: &str) -> Result<Option<MoeConfig>, String> {
        let (experts, width) = match kind {
            "mixtral" => (
                self.need("num_local_experts")?,
                self.need("intermediate_size")?,
            ),
            "qwen3_moe" => (
                self.need("num_experts")?,
                self.need("moe_intermediate_size")?,
            ),
            "deepseek_v3" => (
                self.need("n_routed_experts")?,
                self.need("moe_intermediate_size")?,
            ),
            _ => return Ok(None),
        };
        let every = ["decoder_sparse_step", "moe_layer_freq"];
        for key in every {
            if self.maybe(key)?.unwrap_or(1) != 1 {
                return Err(format!(
                    "{key} is not 1; every layer after the first dense ones has experts here"
                ));
            }
        }
        let topk = self.need("num_experts_per_tok")?;
        if topk > experts {
            return Err(format!(
                "num_experts_per_tok {topk} is more than the {experts} experts"
            ));
        }
        let mut moe = MoeConfig::new(experts, topk, width);
        if kind == "deepseek_v3" {
            moe.selection_bias = true;
            moe.shared_ffn = self.maybe("n_shared_experts")?.unwrap_or(0) * width;
            moe.first_dense = self.maybe("first_k_dense_replace")?.unwrap_or(0);
        }
        Ok(Some(moe))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(change: impl FnOnce(&mut Map<String, Value>)) -> Result<Shape, String> {
        let text = r#"{"model_type": "deepseek_v3", "vocab_size": 129280, "hidden_size": 7168,
            "num_hidden_layers": 61, "num_attention_heads": 128, "num_key_value_heads": 128,
            "intermediate_size": 18432, "moe_intermediate_size": 2048, "n_routed_experts": 256,
            "num_experts_per_tok": 8, "n_shared_experts": 1, "first_k_dense_replace": 3,
            "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64, "v_head_dim": 128, "max_position_embeddings": 163840,
            "n_group": 8, "topk_group": 4, "torch_dtype": "bfloat16"}"#;
        let Ok(Value::Object(mut keys)) = serde_json::from_str(text) else {
            return Err("no object".into());
        };
        change(&mut keys);
        Keys(&keys).shape("it")
    }

    #[test]
    fn a_file_is_the_model_of_that_name() {
        let (read, named) = (read(|_| ()).unwrap(), Shape::named("deepseek-v3").unwrap());
        assert_eq!(read.parameters(), named.parameters());
        assert_eq!(read.latent, named.latent);
        assert_eq!(read.active(), named.active());
    }

    #[test]
    fn what_is_missing_or_unknown_is_named() {
        for (key, value, said) in [
            ("kv_lora_rank", Value::Null, "kv_lora_rank is missing"),
            (
                "hiden_size",
                Value::from(3),
                "hiden_size is a key that is not known",
            ),
            ("model_type", Value::from("bert"), "planned for are llama"),
            ("num_hidden_layers", Value::from(0), "at least 1"),
            ("num_hidden_layers", Value::from(-1), "whole number"),
            ("moe_layer_freq", Value::from(2), "moe_layer_freq is not 1"),
            ("mlp_bias", Value::from(true), "without biases"),
            ("mlp_only_layers", Value::from(vec![3]), "names layer 3"),
            (
                "layer_types",
                Value::from(vec!["full_attention", "sliding_attention"]),
                "planned for alike",
            ),
            ("num_experts_per_tok", Value::from(257), "more than the 256"),
        ] {
            let error = read(|keys| drop(keys.insert(key.into(), value))).unwrap_err();
            assert!(error.contains(said), "{error}");
        }
    }
}
