//! Which model: a preset by name, or the `config.json` of a Llama, Qwen2, GPT-2, Mixtral, Qwen3-MoE
//! or Glm4Moe in Hugging Face's keys.
//!
//! A file is taken only where this trainer computes what its keys say; all else is refused by
//! name of the key, for a model that is nearly right has no error message.

use std::io;
use std::path::Path;

use quintet_parallel_layers::Architecture;
use quintet_planner::config::{ModelConfig, MoeConfig};
use serde_json::Value;

mod hugging_face;

pub use hugging_face::Family;

/// A model, and how it is trained where no flag says otherwise.
#[derive(Debug, Clone, PartialEq)]
pub struct Model {
    /// Its shape.
    pub config: ModelConfig,
    /// Tokens predicted per sample, by default.
    pub seq: usize,
    /// Tokens it is made for at most (`max_position_embeddings`). A preset is trained from nothing,
    /// so that for it any number is as good.
    pub max_positions: usize,
    /// It comes from a file, where `max_positions` is meant.
    pub from_file: bool,
    /// Samples in a step, by default.
    pub global_batch: usize,
}

/// What Hugging Face takes for a Llama whose file has no `rope_theta`.
const ROPE_THETA: f64 = 10_000.0;

/// A model that cannot be had; one sentence for the person who asked for it.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ModelError {
    /// Neither a preset nor a file.
    #[error(
        "model {0}: no such preset or file; --model takes tiny, tiny-moe, bench-s, bench-m or the path of a config.json"
    )]
    Unknown(String),
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
    /// A model that no family's keys describe.
    #[error("{0}")]
    Unsaid(String),
}

impl Model {
    /// A preset by name, or else the file at that path (in a folder, its `config.json`).
    ///
    /// # Errors
    /// [`ModelError`] where there is neither, or the file holds no model that is computed here.
    pub fn named(name: &str) -> Result<Self, ModelError> {
        match name {
            "tiny" => Ok(Self::tiny()),
            "bench-s" => Ok(bench_s()),
            "bench-m" => Ok(bench_m()),
            "tiny-moe" => Ok(Self::tiny_moe()),
            path => Self::open(path),
        }
    }

    /// The model of the demo.
    #[must_use]
    pub fn tiny() -> Self {
        Self {
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
                moe: None,
                window: None,
                dropout: 0.0,
                architecture: Architecture::LLAMA,
            },
            seq: 64,
            max_positions: 64,
            from_file: false,
            global_batch: 16,
        }
    }

    /// The same with eight experts, of which a token goes to two that together are as wide as the
    /// MLP they stand for.
    #[must_use]
    pub fn tiny_moe() -> Self {
        let mut model = Self::tiny();
        let ffn = model.config.ffn / 2;
        model.config.moe = Some(MoeConfig {
            aux_loss: 0.01,
            ..MoeConfig::new(8, 2, ffn)
        });
        model
    }

    fn open(given: &str) -> Result<Self, ModelError> {
        let mut path = Path::new(given).to_path_buf();
        if path.is_dir() {
            path.push("config.json");
        }
        let shown = path.display().to_string();
        if path.exists() && !path.is_file() {
            let source = io::Error::other("it is no regular file");
            return Err(ModelError::Unreadable {
                path: shown,
                source,
            });
        }
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
            Ok(Value::Object(keys)) => hugging_face::read(&keys).map_err(refused),
            Ok(_) => Err(refused("not a JSON object; a config.json is one".into())),
            Err(source) => Err(ModelError::NotJson {
                path: path.into(),
                source,
            }),
        }
    }

    /// The `config.json` of this model, as Hugging Face reads it; [`Model::from_json`] gives back a
    /// model that computes the same. Rules of training (losses of balance, the pace of a router's
    /// bias) are not in it.
    ///
    /// # Errors
    /// [`ModelError::Unsaid`] where no family's keys say all that this model is.
    pub fn to_json(&self) -> Result<String, ModelError> {
        let keys = hugging_face::write(self).map_err(ModelError::Unsaid)?;
        Ok(format!("{keys:#}\n"))
    }

    /// The family whose files this model is written as.
    ///
    /// # Errors
    /// As [`Model::to_json`].
    pub fn family(&self) -> Result<Family, ModelError> {
        Family::of(self).map_err(ModelError::Unsaid)
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
            moe: None,
            window: None,
            dropout: 0.0,
            architecture: Architecture::LLAMA,
        },
        seq: 256,
        max_positions: 256,
        from_file: false,
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
            moe: None,
            window: None,
            dropout: 0.0,
            architecture: Architecture::LLAMA,
        },
        seq: 512,
        max_positions: 512,
        from_file: false,
        global_batch: 4,
    }
}

#[cfg(test)]
mod tests;
