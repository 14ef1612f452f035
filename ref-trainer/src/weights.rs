//! Trained parameters from a folder of safetensors, as Hugging Face lays them out.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use quintet_planner::config::ModelConfig;
use safetensors::{Dtype, SafeTensors};

use crate::checkpoint::job_of;
use crate::cli::Weights;
use crate::failure::Failure;
use crate::job::Job;
use crate::oracle::param_shapes;

/// Tensors by name, widened to f64.
pub type Tensors = BTreeMap<String, Vec<f64>>;

/// The job with the model that the weights belong to.
///
/// # Errors
/// Where there are none, or the layout cannot hold that model.
pub fn job_for(job: &Job, weights: &Weights) -> Result<Job, Failure> {
    let mut job = job.clone();
    if let Weights::Checkpoint(root) = weights {
        let saved = job_of(root)?.saved;
        (job.model, job.model_name) = (saved.model, saved.model_name);
        job.max_positions = saved.max_positions;
    }
    job.check()?;
    Ok(job)
}

/// Reads every parameter of the model from the `*.safetensors` files of a folder.
///
/// # Errors
/// Exit 3 with one sentence where a file is missing, torn or foreign, a parameter is missing or
/// has another shape.
pub fn read(folder: &Path, model: &ModelConfig) -> Result<Tensors, Failure> {
    let shapes: BTreeMap<String, Vec<usize>> = param_shapes(model).into_iter().collect();
    let mut found = Tensors::new();
    for path in files(folder)? {
        let bytes = fs::read(&path).map_err(|e| Failure::file("read", &path, &e))?;
        let file = SafeTensors::deserialize(&bytes).map_err(|e| {
            Failure::data(format!(
                "{} is no whole safetensors file: {e}",
                path.display()
            ))
        })?;
        for (name, tensor) in file.iter() {
            let Some(shape) = shapes.get(name) else {
                continue;
            };
            if tensor.shape() != shape {
                return Err(Failure::data(format!(
                    "{} in {} has shape {:?} where the config says {shape:?}",
                    name,
                    path.display(),
                    tensor.shape()
                )));
            }
            found.insert(
                name.to_string(),
                widen(name, tensor.dtype(), tensor.data())?,
            );
        }
    }
    match shapes.keys().find(|name| !found.contains_key(*name)) {
        Some(name) => Err(Failure::data(format!(
            "{name} is in no safetensors file of {}",
            folder.display()
        ))),
        None => Ok(found),
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
