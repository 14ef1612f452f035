//! Checkpoints by logical name and logical index: saved under one layout, loaded under any other.
//!
//! ```text
//! ROOT/latest                                names the newest step
//! ROOT/step_00000100/meta.json               version, step, shapes, files with lengths and crc32
//!                   /model/rank_00000.safetensors    the elements that rank 0 counts, and which
//!                   /optim/rank_00000.safetensors    exp_avg/NAME, exp_avg_sq/NAME, master/NAME
//! ```
//!
//! Over all ranks each logical element is written once. A folder appears under its name only when
//! all of it is on disk: it is written beside, synced, and renamed; then `latest` is renamed onto.
//! Loading checks everything (files, checksums, shapes, that every element is there once) on all
//! ranks before anything changes on any. Numbers are little-endian, as safetensors has them.
//!
//! Every rank sees one filesystem.

mod format;
mod load;
mod save;
mod staging;

use std::path::{Path, PathBuf};
use std::string::String;
use std::vec::Vec;

use quintet_kernels::{Backend, Collectives, Optimizer, Scalar};

use crate::{Error, ParamStore, ShardedOptimizer, bytes};

pub use format::{FileMeta, Meta, OptimizerMeta};
pub use load::{find, load};
pub use save::save;

/// A chunk to save.
pub struct Saved<'a, B: Optimizer, E: Scalar> {
    /// Its parameters.
    pub params: &'a ParamStore<B, E>,
    /// Its optimizer.
    pub optimizer: &'a ShardedOptimizer<B, E>,
}

/// A chunk to load into.
pub struct Target<'a, B: Optimizer, E: Scalar> {
    /// Its parameters.
    pub params: &'a mut ParamStore<B, E>,
    /// Its optimizer; without one only the model is read.
    pub optimizer: Option<&'a mut ShardedOptimizer<B, E>>,
}

/// What a checkpoint holds beside parameters and state.
#[derive(Debug, Clone, PartialEq)]
pub struct About {
    /// The step after which it is taken.
    pub step: u64,
    /// The layout in words, for people.
    pub layout: String,
    /// The caller's: data position, learning rate, seed, configuration.
    pub user: serde_json::Value,
}

/// Hears how it went on every rank: all reports, or one error that is the same on all ranks.
fn agree<B: Backend, C: Collectives<B>, T: serde::Serialize + serde::de::DeserializeOwned>(
    device: &B,
    world: &C,
    mine: Result<T, Error>,
) -> Result<Vec<T>, Error> {
    let mine = mine.map_err(|e| std::format!("{e}"));
    let text = serde_json::to_vec(&mine).unwrap_or_default();
    let texts = bytes::all_gather(device, world, &text)?;
    let mut reports = Vec::new();
    for (rank, text) in texts.iter().enumerate() {
        let report: Result<T, String> =
            serde_json::from_slice(text).map_err(|_| Error::Message { rank })?;
        reports.push(report.map_err(|why| Error::Checkpoint(std::format!("{why} (rank {rank})")))?);
    }
    Ok(reports)
}

/// `cannot WHAT PATH: WHY`.
fn cannot(what: &str, path: &Path, why: impl core::fmt::Display) -> Error {
    Error::Checkpoint(std::format!("cannot {what} {}: {why}", path.display()))
}

/// `checkpoint PATH: WHY`.
fn refused(path: &Path, why: impl core::fmt::Display) -> Error {
    Error::Checkpoint(std::format!("checkpoint {}: {why}", path.display()))
}

/// A path below a folder, from its parts.
fn below(folder: &Path, name: &str) -> PathBuf {
    name.split('/')
        .fold(folder.to_path_buf(), |path, part| path.join(part))
}
