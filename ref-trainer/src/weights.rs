//! Trained parameters in a folder of safetensors, as Hugging Face lays them out: read and written.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use quintet_planner::config::ModelConfig;
use safetensors::tensor::TensorView;
use safetensors::{Dtype, SafeTensors};

use crate::checkpoint::job_of;
use crate::cli::Weights;
use crate::failure::Failure;
use crate::job::Job;
use crate::model_config::Model;
use crate::oracle::param_shapes;

mod header;
pub mod names;

use names::Experts;

/// Tensors by name, widened to f64.
pub type Tensors = BTreeMap<String, Vec<f64>>;

/// Whether the job's model can take these weights: a flag may change what is computed with a
/// checkpoint's parameters (a window, a capacity), not which there are.
///
/// # Errors
/// Where there are none, or the model has other parameters.
pub fn belong_to(job: &Job, weights: &Weights) -> Result<(), Failure> {
    let Weights::Checkpoint(root) = weights else {
        return Ok(());
    };
    let saved = job_of(root)?.saved;
    let (theirs, ours) = (param_shapes(&saved.model), param_shapes(&job.model));
    let Some((name, shape)) = theirs.iter().chain(&ours).find(|p| {
        // What is in both is in order.
        !(theirs.contains(p) && ours.contains(p))
    }) else {
        return Ok(());
    };
    Err(Failure::usage(format!(
        "the checkpoint in {} holds a model with other parameters than these flags ask for ({name} {shape:?} is in one alone); leave them out",
        root.display()
    )))
}

/// Reads every parameter of the model from the `*.safetensors` files of a folder.
///
/// # Errors
/// Exit 3 with one sentence where a file is missing, torn or foreign, a parameter is missing or
/// has another shape.
pub fn read(folder: &Path, model: &ModelConfig) -> Result<Tensors, Failure> {
    let wanted = Wanted::of(model);
    let mut found: BTreeMap<String, Vec<f64>> = BTreeMap::new();
    for path in files(folder)? {
        let bytes = fs::read(&path).map_err(|e| Failure::file("read", &path, &e))?;
        let torn = |why: String| {
            Failure::data(format!(
                "{} is no whole safetensors file: {why}",
                path.display()
            ))
        };
        header::check(&bytes).map_err(torn)?;
        let file = SafeTensors::deserialize(&bytes).map_err(|e| torn(e.to_string()))?;
        for (name, tensor) in file.iter() {
            if names::beside(model, name) {
                continue;
            }
            let place = || format!("{name} in {}", path.display());
            let canonical = names::canonical(model, name);
            let Some(shape) = wanted.shapes.get(&canonical) else {
                return Err(Failure::data(format!(
                    "{} is no parameter of the model that config.json describes",
                    place()
                )));
            };
            if tensor.shape() != shape {
                return Err(Failure::data(format!(
                    "{} has shape {:?} where the config says {shape:?}",
                    place(),
                    tensor.shape()
                )));
            }
            let values = widen(name, tensor.dtype(), tensor.data())?;
            if found.insert(canonical, values).is_some() {
                return Err(Failure::data(format!("{} is there twice", place())));
            }
        }
    }
    wanted
        .ours(&found)
        .map_err(|why| Failure::data(format!("{why} of {}", folder.display())))
}

/// Writes every parameter into one `model.safetensors` of a folder, as float32, under the names
/// of the model's family, with its `config.json`. The folder appears whole or not at all.
///
/// # Errors
/// Exit 3 where the folder is there already or cannot be written, a parameter is missing, or no
/// family's files hold such a model.
pub fn write(folder: &Path, model: &Model, params: &Tensors) -> Result<(), Failure> {
    if folder.exists() {
        return Err(Failure::data(format!(
            "{} is there already; give the name of a new folder",
            folder.display()
        )));
    }
    let said = |e: crate::model_config::ModelError| Failure::data(e.to_string());
    let (family, config) = (
        model.family().map_err(said)?,
        model.to_json().map_err(said)?,
    );
    let mut tensors: BTreeMap<String, (Vec<usize>, Vec<u8>)> = BTreeMap::new();
    for (name, shape) in param_shapes(&model.config) {
        let values = params
            .get(&name)
            .ok_or_else(|| Failure::data(format!("{name} is not there and cannot be written")))?;
        for stored in names::stored(&model.config, &name, Experts::Alone) {
            let theirs = names::published(family, &stored.name);
            let (_, bytes) = tensors.entry(theirs).or_insert_with(|| {
                let shape = stored.shape(&shape);
                let len = 4 * shape.iter().product::<usize>();
                (shape, vec![0; len])
            });
            for index in stored.range(&shape) {
                let at = 4 * stored.at(&shape, index);
                bytes[at..at + 4].copy_from_slice(&(values[index] as f32).to_le_bytes());
            }
        }
    }
    let views: Result<Vec<_>, _> = tensors
        .iter()
        .map(|(name, (shape, bytes))| {
            Ok((name, TensorView::new(Dtype::F32, shape.clone(), bytes)?))
        })
        .collect();
    let about = [("format".to_string(), "pt".to_string())].into();
    let bytes = views
        .and_then(|views| safetensors::serialize(views, Some(about)))
        .map_err(|e| Failure::data(format!("the parameters cannot be written: {e}")))?;
    let mut beside = folder.as_os_str().to_owned();
    beside.push(format!(".{}.part", std::process::id()));
    let beside = PathBuf::from(beside);
    let put = |name: &str, bytes: &[u8]| {
        let path = beside.join(name);
        fs::write(&path, bytes).map_err(|e| Failure::file("write", &path, &e))
    };
    let done = fs::create_dir_all(&beside)
        .map_err(|e| Failure::file("make", &beside, &e))
        .and_then(|()| put("config.json", config.as_bytes()))
        .and_then(|()| put("model.safetensors", &bytes))
        .and_then(|()| fs::rename(&beside, folder).map_err(|e| Failure::file("make", folder, &e)));
    if done.is_err() {
        // What is half written helps nobody; that it stays, if even this fails, harms nobody.
        let _ = fs::remove_dir_all(&beside);
    }
    done
}

/// What the files of a model may hold: each parameter in one of its spellings.
struct Wanted<'a> {
    model: &'a ModelConfig,
    /// By the newest name.
    shapes: BTreeMap<String, Vec<usize>>,
}

impl<'a> Wanted<'a> {
    fn of(model: &'a ModelConfig) -> Self {
        let mut shapes = BTreeMap::new();
        for (name, ours) in param_shapes(model) {
            for experts in [Experts::Alone, Experts::Fused] {
                for stored in names::stored(model, &name, experts) {
                    let shape = stored.shape(&ours);
                    shapes.insert(stored.name, shape);
                }
            }
        }
        Self { model, shapes }
    }

    /// Our parameters from the files' tensors, of which each is there once and none is missing.
    fn ours(&self, found: &BTreeMap<String, Vec<f64>>) -> Result<Tensors, String> {
        let mut all = Tensors::new();
        for (name, shape) in param_shapes(self.model) {
            let lies = |experts| names::stored(self.model, &name, experts);
            let (alone, fused) = (lies(Experts::Alone), lies(Experts::Fused));
            let there = |stored: &&names::Stored| found.contains_key(&stored.name);
            let (one, other) = (alone.iter().find(there), fused.iter().find(there));
            let parts = match (one, other) {
                (Some(one), Some(other)) if one != other => {
                    return Err(format!(
                        "{} and {} are the same and both are in the files",
                        one.name, other.name
                    ));
                }
                (None, Some(_)) => fused,
                _ => alone,
            };
            let mut values = vec![f64::NAN; shape.iter().product()];
            for stored in parts {
                let Some(tensor) = found.get(&stored.name) else {
                    return Err(format!("{} is in no safetensors file", stored.name));
                };
                for index in stored.range(&shape) {
                    values[index] = tensor[stored.at(&shape, index)];
                }
            }
            all.insert(name, values);
        }
        Ok(all)
    }
}

fn files(folder: &Path) -> Result<Vec<PathBuf>, Failure> {
    let folder = if folder.is_file() {
        folder.parent().unwrap_or(folder)
    } else {
        folder
    };
    let listed = fs::read_dir(folder).map_err(|e| Failure::file("list", folder, &e))?;
    let mut files: Vec<PathBuf> = listed
        .flatten()
        .map(|entry| entry.path())
        .filter(|path| path.is_file() && path.extension().is_some_and(|e| e == "safetensors"))
        .collect();
    files.sort();
    if files.is_empty() {
        return Err(Failure::data(format!(
            "{} holds no safetensors file",
            folder.display()
        )));
    }
    Ok(files)
}

fn widen(name: &str, dtype: Dtype, data: &[u8]) -> Result<Vec<f64>, Failure> {
    fn each<const N: usize>(data: &[u8], one: impl Fn([u8; N]) -> f64) -> Vec<f64> {
        data.as_chunks::<N>()
            .0
            .iter()
            .map(|bytes| one(*bytes))
            .collect()
    }
    Ok(match dtype {
        Dtype::F64 => each(data, f64::from_le_bytes),
        Dtype::F32 => each(data, |b| f64::from(f32::from_le_bytes(b))),
        Dtype::BF16 => each(data, |b: [u8; 2]| {
            f64::from(f32::from_le_bytes([0, 0, b[0], b[1]]))
        }),
        other => {
            return Err(Failure::data(format!(
                "{name} is stored as {other:?}; F64, F32 and BF16 are read"
            )));
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::job::Job;

    #[test]
    fn bf16_is_the_upper_half_of_f32() -> Result<(), Failure> {
        assert_eq!(
            widen("x", Dtype::BF16, &[0x80, 0x3F, 0x00, 0xC0])?,
            [1.0, -2.0]
        );
        assert!(widen("x", Dtype::I8, &[1]).is_err());
        Ok(())
    }

    #[test]
    fn what_is_not_there_is_a_sentence() {
        let none = read(Path::new("no/such/folder"), &Job::default().model);
        assert!(none.is_err_and(|f| f.sentence.contains("no/such/folder")));
    }
}
