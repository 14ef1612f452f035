//! Reading: everything is checked on all ranks before anything changes on any.
//!
//! ```text
//! find -> meta.json -> per file: length, crc32, header, tensors -> staging on the host
//!      -> every element there once -> upload beside -> all ranks agree -> swap
//! ```

use std::collections::BTreeSet;
use std::format;
use std::path::{Path, PathBuf};
use std::string::String;
use std::vec::Vec;

use quintet_kernels::{Collectives, Optimizer, Scalar};

use super::format::{self as form, Meta};
use super::staging::{Cover, Staging, Uploaded, len};
use super::{Target, agree, below, cannot, refused};
use crate::{Error, Groups, groups};

/// The newest checkpoint of `root`, or `root` itself where it is one; and its meta.json.
///
/// # Errors
/// [`Error::Checkpoint`] where there is none, or its meta.json is torn, foreign or newer.
pub fn find(root: &Path) -> Result<(PathBuf, Meta), Error> {
    let mut folder = root.to_path_buf();
    if !root.join("meta.json").exists() {
        let latest = root.join("latest");
        let name = text(&latest).map_err(|e| match e.kind() {
            std::io::ErrorKind::NotFound => refused(
                root,
                "there is neither `latest` nor meta.json in this folder",
            ),
            _ => cannot("read", &latest, e),
        })?;
        let name = name.strip_suffix('\n').filter(|n| form::is_folder(n));
        folder = root.join(name.ok_or_else(|| refused(root, "`latest` names no step"))?);
    }
    let path = folder.join("meta.json");
    let text = text(&path).map_err(|e| cannot("read", &path, e))?;
    let meta = form::read_meta(&text).map_err(|e| refused(&folder, e))?;
    Ok((folder, meta))
}

/// The length of a regular file; a pipe or a device would be read for ever.
fn length(path: &Path) -> std::io::Result<u64> {
    let found = std::fs::metadata(path)?;
    if found.is_file() {
        return Ok(found.len());
    }
    Err(std::io::Error::other("it is no regular file"))
}

/// The text of a regular file of a length that names and headers have.
fn text(path: &Path) -> std::io::Result<String> {
    if length(path)? > LONGEST_TEXT {
        return Err(std::io::Error::other("it is far too long"));
    }
    std::fs::read_to_string(path)
}

/// Far more than the meta.json of any model takes.
const LONGEST_TEXT: u64 = 1 << 30;

/// Loads the newest checkpoint of `root`, or `root` itself where it is one, into this rank's
/// chunks, on all ranks together; saved under any layout.
///
/// # Errors
/// [`Error::Checkpoint`] with one sentence, the same on all ranks; nothing is changed then.
pub fn load<B: Optimizer, C: Collectives<B>, E: Scalar>(
    root: &Path,
    device: &B,
    groups: &impl Groups<C>,
    chunks: &mut [Target<'_, B, E>],
) -> Result<Meta, Error> {
    let Some(first) = chunks.first() else {
        return Err(Error::Checkpoint("there is nothing to load into".into()));
    };
    let layout = first.params.layout().clone();
    let world = groups::world(groups, &layout)?;
    let (read, error) = match read(root, device, chunks) {
        Ok(read) => (Some(read), None),
        Err(error) => (None, Some(error)),
    };
    let names: BTreeSet<&String> = chunks
        .iter()
        .flat_map(|c| c.params.layout().entries())
        .map(|e| &e.spec.name)
        .collect();
    let mine: BTreeSet<String> = names.into_iter().cloned().collect();
    let all = agree(device, world, error.map_or(Ok(mine), Err))?;
    let Some(Read {
        folder,
        meta,
        chunks: loaded,
    }) = read
    else {
        return Err(refused(root, "it was not read"));
    };
    let known: BTreeSet<&String> = all.iter().flatten().collect();
    if let Some(name) = meta.shapes.keys().find(|n| !known.contains(n)) {
        return Err(refused(
            &folder,
            format!("it holds {name}, which this model has not"),
        ));
    }
    for (chunk, (params, state)) in chunks.iter_mut().zip(loaded) {
        chunk.params.replace(params);
        if let (Some(optimizer), Some(state)) = (&mut chunk.optimizer, state) {
            optimizer.replace(meta.optimizer.steps, state);
        }
    }
    Ok(meta)
}

/// A checkpoint on the device, beside what is there.
struct Read<B: Optimizer, E: Scalar> {
    folder: PathBuf,
    meta: Meta,
    chunks: Vec<Uploaded<B, E>>,
}

fn read<B: Optimizer, E: Scalar>(
    root: &Path,
    device: &B,
    chunks: &[Target<'_, B, E>],
) -> Result<Read<B, E>, Error> {
    let (folder, meta) = find(root)?;
    let with_state = chunks.iter().any(|c| c.optimizer.is_some());
    fits(&meta, chunks).map_err(|e| refused(&folder, e))?;
    let mut staging = Staging::new(chunks);
    let mut cover = Cover::default();
    for file in &meta.files {
        if !form::is_ours(&file.path) {
            return Err(refused(
                &folder,
                format!("it lists the foreign file {}", file.path),
            ));
        }
        if !with_state && file.path.starts_with("optim/") {
            continue;
        }
        let path = below(&folder, &file.path);
        let got = length(&path).map_err(|e| cannot("read", &path, e))?;
        let bytes = if got == file.bytes {
            std::fs::read(&path)
        } else {
            Ok(Vec::new())
        };
        let bytes = bytes.map_err(|e| cannot("read", &path, e))?;
        if bytes.len() as u64 != file.bytes {
            let want = file.bytes;
            return Err(refused(
                &path,
                format!("torn: {got} bytes where {want} were written"),
            ));
        }
        if crc32fast::hash(&bytes) != file.crc32 {
            return Err(refused(
                &path,
                "changed since it was written (its crc32 differs)",
            ));
        }
        take(&meta, &file.path, &bytes, &mut staging, &mut cover).map_err(|e| refused(&path, e))?;
    }
    cover
        .complete(&meta, with_state)
        .map_err(|e| refused(&folder, e))?;
    let chunks = staging.upload(device)?;
    Ok(Read {
        folder,
        meta,
        chunks,
    })
}

/// Whether the checkpoint is of this model, type and rule.
fn fits<B: Optimizer, E: Scalar>(meta: &Meta, chunks: &[Target<'_, B, E>]) -> Result<(), String> {
    if meta.dtype != E::NAME {
        return Err(format!(
            "its parameters are {}, this run's are {}",
            meta.dtype,
            E::NAME
        ));
    }
    for Target { params, optimizer } in chunks {
        for entry in params.layout().entries() {
            let (name, shape) = (&entry.spec.name, &entry.spec.shape);
            match meta.shapes.get(name) {
                Some(saved) if saved == shape => {}
                Some(saved) => {
                    return Err(format!(
                        "{name} has shape {saved:?}, this model's {shape:?}"
                    ));
                }
                None => return Err(format!("it lacks {name}")),
            }
        }
        if let Some(o) = optimizer {
            let (saved, kinds) = (&meta.optimizer, o.kinds());
            if saved.rule != o.rule().name() || saved.kinds != kinds {
                let (rule, here) = (&saved.rule, o.rule().name());
                return Err(format!(
                    "its optimizer is {rule} with {:?}, this run's {here} with {kinds:?}",
                    saved.kinds
                ));
            }
        }
    }
    Ok(())
}

/// Takes what is needed of one file.
fn take<E: Scalar>(
    meta: &Meta,
    path: &str,
    bytes: &[u8],
    staging: &mut Staging<E>,
    cover: &mut Cover,
) -> Result<(), String> {
    let (header, tensors) = form::read_file(bytes)?;
    if header.path != path || header.step != meta.step {
        return Err(format!(
            "it was written as {} of step {}",
            header.path, header.step
        ));
    }
    let model = path.starts_with("model/");
    for (tensor, view) in tensors.iter() {
        let (kind, name) = match tensor.split_once('/') {
            _ if model => (None, tensor),
            Some((kind, name)) => (meta.optimizer.kinds.iter().position(|k| k == kind), name),
            None => (None, tensor),
        };
        if !model && kind.is_none() {
            return Err(format!("{tensor} is no state of {}", meta.optimizer.rule));
        }
        let len = meta.shapes.get(name).and_then(|s| len(s));
        let len = len.ok_or_else(|| format!("{name} is not among the shapes of meta.json"))?;
        let runs = header
            .runs
            .get(name)
            .ok_or_else(|| format!("no runs for {name}"))?;
        let inside = |&(start, n): &(usize, usize)| start.checked_add(n).is_some_and(|e| e <= len);
        if !runs.iter().all(inside) {
            return Err(format!("a run of {name} ends beyond its {len} elements"));
        }
        let held = runs
            .iter()
            .try_fold(0_usize, |sum, (_, n)| sum.checked_add(*n))
            .unwrap_or(0);
        if view.shape() != [held] {
            return Err(format!(
                "{tensor} has {:?} elements, its runs {held}",
                view.shape()
            ));
        }
        let dtype = if model {
            form::dtype::<E>()
        } else {
            form::dtype::<E::Acc>()
        }?;
        if view.dtype() != dtype {
            return Err(format!(
                "{tensor} is {:?} where {dtype:?} is stated",
                view.dtype()
            ));
        }
        cover.add(kind, name, runs);
        staging.put(kind, name, runs, view.data(), dtype);
    }
    Ok(())
}
