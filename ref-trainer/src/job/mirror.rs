//! How the planner's types are spelt in a file; the planner itself knows no file.

use quintet_parallel_layers::moe::Score;
use quintet_parallel_layers::norm::NormKind;
use quintet_parallel_layers::pipeline::ScheduleKind;
use quintet_parallel_layers::{Architecture, MlpKind, Positions, Recompute};
use quintet_planner::config::{Batch, CpComm, Layout, ModelConfig, MoeConfig};
use serde::{Deserialize, Serialize};

#[derive(Serialize, Deserialize)]
#[serde(remote = "ModelConfig", deny_unknown_fields)]
pub(super) struct ModelDef {
    vocab: usize,
    hidden: usize,
    layers: usize,
    heads: usize,
    kv_heads: usize,
    head_dim: usize,
    ffn: usize,
    rope_theta: f64,
    norm_eps: f64,
    tied: bool,
    /// A model that says nothing of experts has none.
    #[serde(default, with = "moe", skip_serializing_if = "Option::is_none")]
    moe: Option<MoeConfig>,
    #[serde(default)]
    window: Option<usize>,
    #[serde(default)]
    dropout: f64,
    #[serde(default = "llama", with = "ArchitectureDef")]
    architecture: Architecture,
}

/// What a file leaves out of a mixture of experts is off.
#[derive(Serialize, Deserialize)]
#[serde(remote = "MoeConfig", deny_unknown_fields)]
struct MoeDef {
    experts: usize,
    topk: usize,
    ffn: usize,
    #[serde(with = "ScoreDef", default)]
    score: Score,
    normalize: bool,
    scale: f64,
    #[serde(default)]
    selection_bias: bool,
    #[serde(default)]
    bias_update_rate: f64,
    #[serde(default)]
    aux_loss: f64,
    #[serde(default)]
    z_loss: f64,
    #[serde(default)]
    capacity_factor: Option<f64>,
    #[serde(default)]
    shared_ffn: usize,
    #[serde(default)]
    shared_gate: bool,
    #[serde(default)]
    first_dense: usize,
}

#[derive(Serialize, Deserialize)]
#[serde(remote = "Score", rename_all = "kebab-case")]
enum ScoreDef {
    Softmax,
    Sigmoid,
}

mod moe {
    use super::{MoeConfig, MoeDef};
    use serde::{Deserialize, Deserializer, Serialize, Serializer};

    #[derive(Serialize, Deserialize)]
    struct Held(#[serde(with = "MoeDef")] MoeConfig);

    pub(super) fn serialize<S: Serializer>(
        moe: &Option<MoeConfig>,
        s: S,
    ) -> Result<S::Ok, S::Error> {
        moe.map(Held).serialize(s)
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(
        d: D,
    ) -> Result<Option<MoeConfig>, D::Error> {
        Ok(Option::<Held>::deserialize(d)?.map(|held| held.0))
    }
}

/// A file that says nothing of it means a Llama.
#[derive(Serialize, Deserialize)]
#[serde(remote = "Architecture", deny_unknown_fields)]
struct ArchitectureDef {
    #[serde(with = "NormKindDef")]
    norm: NormKind,
    #[serde(with = "MlpKindDef")]
    mlp: MlpKind,
    #[serde(with = "PositionsDef")]
    positions: Positions,
    qkv_bias: bool,
    out_bias: bool,
    qk_norm: bool,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    softcap: Option<f64>,
}

fn llama() -> Architecture {
    Architecture::LLAMA
}

#[derive(Serialize, Deserialize)]
#[serde(remote = "NormKind", rename_all = "snake_case")]
enum NormKindDef {
    Rms,
    Layer,
}

#[derive(Serialize, Deserialize)]
#[serde(remote = "MlpKind", rename_all = "snake_case")]
enum MlpKindDef {
    SwiGlu,
    Gelu,
}

#[derive(Serialize, Deserialize)]
#[serde(remote = "Positions", rename_all = "snake_case")]
enum PositionsDef {
    Rotary,
    PartRotary(usize),
    Learned(usize),
}

#[derive(Serialize, Deserialize)]
#[serde(remote = "Batch", deny_unknown_fields)]
pub(super) struct BatchDef {
    seq: usize,
    micro_batch: usize,
    global_batch: usize,
}

/// A degree that a file leaves out is 1, a feature that it leaves out is off.
#[derive(Serialize, Deserialize)]
#[serde(remote = "Layout", deny_unknown_fields)]
pub(super) struct LayoutDef {
    #[serde(default = "one")]
    dp: usize,
    #[serde(default = "one")]
    tp: usize,
    #[serde(default = "one")]
    pp: usize,
    #[serde(default = "one")]
    cp: usize,
    #[serde(default, with = "cp_comm")]
    cp_comm: CpComm,
    #[serde(default)]
    ulysses_degree: Option<usize>,
    #[serde(default = "one")]
    ep: usize,
    #[serde(default = "one")]
    etp: usize,
    #[serde(default)]
    sequence_parallel: bool,
    #[serde(default)]
    zero_stage: u8,
    #[serde(default)]
    hybrid_shard_size: Option<usize>,
    #[serde(default, with = "schedule")]
    schedule: ScheduleKind,
    #[serde(default = "one")]
    virtual_stages: usize,
    #[serde(default)]
    stage_layers: Option<Vec<usize>>,
    #[serde(default = "bucket_bytes")]
    bucket_bytes: usize,
    #[serde(default)]
    any_order: bool,
    #[serde(default, with = "RecomputeDef")]
    recompute: Recompute,
}

#[derive(Serialize, Deserialize)]
#[serde(remote = "Recompute", rename_all = "kebab-case")]
enum RecomputeDef {
    None,
    Selective,
    Full,
}

fn one() -> usize {
    1
}

fn bucket_bytes() -> usize {
    Layout::single().bucket_bytes
}

mod cp_comm {
    use super::CpComm;
    use serde::{Deserialize, Deserializer, Serializer, de::Error};

    pub(super) fn serialize<S: Serializer>(way: &CpComm, s: S) -> Result<S::Ok, S::Error> {
        s.serialize_str(way.name())
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(d: D) -> Result<CpComm, D::Error> {
        let name = String::deserialize(d)?;
        let found = CpComm::ALL.into_iter().find(|way| way.name() == name);
        found.ok_or_else(|| {
            let known = CpComm::ALL.map(CpComm::name).join(", ");
            D::Error::custom(format!("cp_comm {name} is none of {known}"))
        })
    }
}

mod schedule {
    use super::ScheduleKind;
    use serde::{Deserialize, Deserializer, Serializer, de::Error};

    pub(super) fn serialize<S: Serializer>(kind: &ScheduleKind, s: S) -> Result<S::Ok, S::Error> {
        s.serialize_str(kind.name())
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(d: D) -> Result<ScheduleKind, D::Error> {
        let name = String::deserialize(d)?;
        ScheduleKind::ALL
            .into_iter()
            .find(|kind| kind.name() == name)
            .ok_or_else(|| {
                let known = ScheduleKind::ALL.map(ScheduleKind::name).join(", ");
                D::Error::custom(format!("schedule {name} is not known; there are {known}"))
            })
    }
}
