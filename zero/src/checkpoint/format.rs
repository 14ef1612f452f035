//! What lies in the files, as plain data: no I/O here.

use std::borrow::ToOwned;
use std::collections::BTreeMap;
use std::format;
use std::string::{String, ToString};
use std::vec::Vec;

use quintet_kernels::Float;
use safetensors::tensor::TensorView;
use safetensors::{Dtype, SafeTensors};
use serde::{Deserialize, Serialize};

/// The word that tells our meta.json from others'.
pub(super) const FORMAT: &str = "quintet-checkpoint";
/// The newest version this crate reads, and the one it writes.
pub(super) const VERSION: u64 = 1;
/// Key of our line in a safetensors header.
const HEADER: &str = "quintet";

/// meta.json.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Meta {
    /// `quintet-checkpoint`.
    pub format: String,
    /// Version of the format.
    pub version: u64,
    /// The step after which it was taken.
    pub step: u64,
    /// The layout it was saved under, for people.
    pub layout: String,
    /// Type of the parameters.
    pub dtype: String,
    /// What the optimizer keeps.
    pub optimizer: OptimizerMeta,
    /// Logical shapes by name.
    pub shapes: BTreeMap<String, Vec<usize>>,
    /// Every file beside this one.
    pub files: Vec<FileMeta>,
    /// The caller's.
    pub user: serde_json::Value,
}

/// What the optimizer keeps.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct OptimizerMeta {
    /// Its rule.
    pub rule: String,
    /// Steps it has taken.
    pub steps: u64,
    /// Kinds of state, such as `exp_avg`.
    pub kinds: Vec<String>,
}

/// One file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileMeta {
    /// Path below the checkpoint's folder, with `/`.
    pub path: String,
    /// Its length.
    pub bytes: u64,
    /// CRC-32 of its bytes.
    pub crc32: u32,
}

/// Our line in a file's header: which file it is, and which logical elements each tensor holds.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Header {
    pub(super) path: String,
    pub(super) step: u64,
    /// By name: runs `(logical index, length)`, in the order of the values.
    pub(super) runs: BTreeMap<String, Vec<(usize, usize)>>,
}

/// The path of a rank's file; `kind` is `model` or `optim`.
pub(super) fn path(kind: &str, rank: usize) -> String {
    format!("{kind}/rank_{rank:05}.safetensors")
}

/// Whether a file of meta.json is one that this version writes.
pub(super) fn is_ours(path: &str) -> bool {
    let rank = |kind| path.strip_prefix(kind)?.strip_suffix(".safetensors");
    let rank = rank("model/rank_").or_else(|| rank("optim/rank_"));
    rank.is_some_and(|r| r.len() >= 5 && r.bytes().all(|b| b.is_ascii_digit()))
}

/// The name of a step's folder.
pub(super) fn folder(step: u64) -> String {
    format!("step_{step:08}")
}

/// Whether `latest` may name it.
pub(super) fn is_folder(name: &str) -> bool {
    let step = name.strip_prefix("step_");
    step.is_some_and(|s| s.len() >= 8 && s.bytes().all(|b| b.is_ascii_digit()))
}

/// meta.json, whose first line holds the checksum of the rest.
pub(super) fn write_meta(meta: &Meta) -> Result<String, String> {
    let text = serde_json::to_string_pretty(meta).map_err(|e| e.to_string())?;
    let rest = text.trim_start_matches(['{', '\n']).to_owned() + "\n";
    Ok(first_line(&rest) + &rest)
}

/// Reads meta.json, or says what is wrong with it.
pub(super) fn read_meta(text: &str) -> Result<Meta, String> {
    let value: serde_json::Value =
        serde_json::from_str(text).map_err(|e| format!("meta.json is torn or not JSON ({e})"))?;
    if value.get("format").and_then(|f| f.as_str()) != Some(FORMAT) {
        return Err("meta.json is not that of a Quintet checkpoint".into());
    }
    match value.get("version").and_then(serde_json::Value::as_u64) {
        Some(VERSION) => {}
        Some(v) if v > VERSION => {
            return Err(format!(
                "its format has version {v}; this program reads up to {VERSION}"
            ));
        }
        _ => return Err("meta.json states no version of its format".into()),
    }
    let rest = text.split_once('\n').map_or("", |(_, rest)| rest);
    if first_line(rest) + rest != text {
        return Err("meta.json has changed since it was written (its crc32 differs)".into());
    }
    serde_json::from_value(value).map_err(|e| format!("meta.json: {e}"))
}

fn first_line(rest: &str) -> String {
    format!(
        "{{ \"crc32\": \"{:08x}\",\n",
        crc32fast::hash(rest.as_bytes())
    )
}

/// The elements of a tensor as safetensors knows their type.
pub(super) fn dtype<T: Float>() -> Result<Dtype, String> {
    match T::NAME {
        "f64" => Ok(Dtype::F64),
        "f32" => Ok(Dtype::F32),
        "bf16" => Ok(Dtype::BF16),
        other => Err(format!("no type in safetensors for {other}")),
    }
}

/// A file: tensors in one dim, and our header.
pub(super) fn write_file(
    header: &Header,
    dtype: Dtype,
    tensors: &[(String, Vec<u8>)],
) -> Result<Vec<u8>, String> {
    let line = serde_json::to_string(header).map_err(|e| e.to_string())?;
    let info = [(HEADER.to_owned(), line)].into_iter().collect();
    let bits = dtype.bitsize();
    let mut views = Vec::new();
    for (name, bytes) in tensors {
        let shape = [bytes.len() * 8 / bits].to_vec();
        let view = TensorView::new(dtype, shape, bytes).map_err(|e| e.to_string())?;
        views.push((name, view));
    }
    safetensors::serialize(views, Some(info)).map_err(|e| e.to_string())
}

/// Reads a file's tensors and our header, or says what is wrong with it.
pub(super) fn read_file(bytes: &[u8]) -> Result<(Header, SafeTensors<'_>), String> {
    let (_, metadata) = SafeTensors::read_metadata(bytes).map_err(|e| e.to_string())?;
    let line = metadata.metadata().as_ref().and_then(|m| m.get(HEADER));
    let line = line.ok_or("it is not a file of a Quintet checkpoint")?;
    let header = serde_json::from_str(line).map_err(|e| format!("its header: {e}"))?;
    let tensors = SafeTensors::deserialize(bytes).map_err(|e| e.to_string())?;
    Ok((header, tensors))
}
