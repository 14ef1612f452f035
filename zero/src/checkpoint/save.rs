//! Writing: every rank its elements, rank 0 the folder.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::string::{String, ToString};
use std::vec::Vec;
use std::{format, vec};

use quintet_kernels::{Collectives, Float, Optimizer, Scalar};
use serde::{Deserialize, Serialize};

use super::format::{self as form, FileMeta, Header, Meta, OptimizerMeta};
use super::{About, Saved, agree, below, cannot};
use crate::{Error, Groups, Piece, groups};

/// What a rank has written.
#[derive(Serialize, Deserialize)]
struct Report {
    files: Vec<FileMeta>,
    shapes: BTreeMap<String, Vec<usize>>,
}

/// Writes `ROOT/step_XXXXXXXX` from all ranks together and lets `latest` name it. `chunks` are
/// those of this rank.
///
/// # Errors
/// [`Error::Checkpoint`], the same on all ranks, where one of them cannot write; what was there
/// before is then still there.
pub fn save<B: Optimizer, C: Collectives<B>, E: Scalar>(
    root: &Path,
    device: &B,
    groups: &impl Groups<C>,
    chunks: &[Saved<'_, B, E>],
    about: &About,
) -> Result<PathBuf, Error> {
    let Some(first) = chunks.first() else {
        return Err(Error::Checkpoint("there is nothing to save".into()));
    };
    let world = groups::world(groups, first.params.layout())?;
    let rank = world.rank();
    let temporary = root.join(format!(".{}.tmp", form::folder(about.step)));
    agree(
        device,
        world,
        if rank == 0 {
            prepare(&temporary)
        } else {
            Ok(())
        },
    )?;
    let reports = agree(
        device,
        world,
        write(&temporary, device, rank, chunks, about.step),
    )?;
    let optimizer = OptimizerMeta {
        rule: first.optimizer.rule().name().into(),
        steps: first.optimizer.steps(),
        kinds: first
            .optimizer
            .kinds()
            .into_iter()
            .map(String::from)
            .collect(),
    };
    let meta = |reports: Vec<Report>| Meta {
        format: form::FORMAT.into(),
        version: form::VERSION,
        step: about.step,
        layout: about.layout.clone(),
        dtype: E::NAME.into(),
        optimizer,
        shapes: reports.iter().flat_map(|r| r.shapes.clone()).collect(),
        files: reports.into_iter().flat_map(|r| r.files).collect(),
        user: about.user.clone(),
    };
    let folder = root.join(form::folder(about.step));
    let published = if rank == 0 {
        publish(root, &temporary, &folder, &meta(reports))
    } else {
        Ok(())
    };
    agree(device, world, published)?;
    Ok(folder)
}

/// An empty folder to write in; what a save that was cut short has left is removed.
fn prepare(temporary: &Path) -> Result<(), Error> {
    if temporary.exists() {
        fs::remove_dir_all(temporary).map_err(|e| cannot("remove", temporary, e))?;
    }
    for kind in ["model", "optim"] {
        let folder = temporary.join(kind);
        fs::create_dir_all(&folder).map_err(|e| cannot("create", &folder, e))?;
    }
    Ok(())
}

/// Writes this rank's two files.
fn write<B: Optimizer, E: Scalar>(
    folder: &Path,
    device: &B,
    rank: usize,
    chunks: &[Saved<'_, B, E>],
    step: u64,
) -> Result<Report, Error> {
    let mut shapes = BTreeMap::new();
    let mut runs = BTreeMap::new();
    let (mut model, mut optim) = (Vec::new(), Vec::new());
    for Saved { params, optimizer } in chunks {
        let layout = params.layout();
        for entry in layout.entries() {
            shapes.insert(entry.spec.name.clone(), entry.spec.shape.clone());
        }
        for piece in layout.counted() {
            let name = &layout.entries()[piece.entry].spec.name;
            runs.insert(name.clone(), logical(&piece));
            let mut host = vec![E::from_f64(0.0); piece.range.len()];
            let held = params.part(piece.part)?.cut(piece.range.clone())?;
            device.download(held, &mut host)?;
            model.push((name.clone(), bytemuck::cast_slice(&host).to_vec()));
            for (index, kind) in optimizer.kinds().into_iter().enumerate() {
                let mut host = vec![E::Acc::from_f64(0.0); piece.range.len()];
                optimizer.read_state(index, piece.part, &piece.range, &mut host)?;
                optim.push((
                    format!("{kind}/{name}"),
                    bytemuck::cast_slice(&host).to_vec(),
                ));
            }
        }
    }
    let mut files = Vec::new();
    let kinds = [
        ("model", form::dtype::<E>(), model),
        ("optim", form::dtype::<E::Acc>(), optim),
    ];
    for (kind, dtype, tensors) in kinds {
        let path = form::path(kind, rank);
        let header = Header {
            path: path.clone(),
            step,
            runs: runs.clone(),
        };
        let full = below(folder, &path);
        let bytes = dtype.and_then(|dtype| form::write_file(&header, dtype, &tensors));
        let bytes = bytes.map_err(|e| cannot("write", &full, e))?;
        write_synced(&full, &bytes)?;
        let crc32 = crc32fast::hash(&bytes);
        files.push(FileMeta {
            path,
            bytes: bytes.len() as u64,
            crc32,
        });
    }
    Ok(Report { files, shapes })
}

fn logical(piece: &Piece) -> Vec<(usize, usize)> {
    piece
        .runs
        .iter()
        .map(|&(_, logical, len)| (logical, len))
        .collect()
}

/// Puts the finished folder in its place; `latest` follows.
fn publish(root: &Path, temporary: &Path, folder: &Path, meta: &Meta) -> Result<(), Error> {
    let path = temporary.join("meta.json");
    let text = form::write_meta(meta).map_err(|e| cannot("write", &path, e))?;
    write_synced(&path, text.as_bytes())?;
    for kind in ["model", "optim", ""] {
        sync_folder(&temporary.join(kind))?;
    }
    // A folder cannot be renamed onto one that is not empty: an old one steps aside first.
    let old = root.join(format!(".{}.old", form::folder(meta.step)));
    if folder.exists() {
        if old.exists() {
            fs::remove_dir_all(&old).map_err(|e| cannot("remove", &old, e))?;
        }
        fs::rename(folder, &old).map_err(|e| cannot("move aside", folder, e))?;
    }
    fs::rename(temporary, folder).map_err(|e| cannot("rename", temporary, e))?;
    let (next, latest) = (root.join(".latest.tmp"), root.join("latest"));
    write_synced(&next, (form::folder(meta.step) + "\n").as_bytes())?;
    fs::rename(&next, &latest).map_err(|e| cannot("rename", &next, e))?;
    sync_folder(root)?;
    if old.exists() {
        fs::remove_dir_all(&old).map_err(|e| cannot("remove", &old, e))?;
    }
    Ok(())
}

fn write_synced(path: &Path, bytes: &[u8]) -> Result<(), Error> {
    let written = File::create(path).and_then(|mut file| {
        file.write_all(bytes)?;
        file.sync_all()
    });
    written.map_err(|e| cannot("write", path, e.to_string()))
}

/// Makes the names in a folder last; only Unix opens folders.
fn sync_folder(folder: &Path) -> Result<(), Error> {
    if !cfg!(unix) {
        return Ok(());
    }
    let synced = File::open(folder).and_then(|f| f.sync_all());
    synced.map_err(|e| cannot("sync", folder, e))
}
