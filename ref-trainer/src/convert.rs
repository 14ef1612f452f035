//! Parameters from one kind of folder to the other.
//!
//! ```text
//! Hugging Face's: config.json, *.safetensors   <-->   a checkpoint of ours, step 0
//! ```
//!
//! A checkpoint made here is one that no step has been taken from: `train --load` begins with it,
//! under any layout. The other way writes float32, from a checkpoint of any layout.

use std::path::{Path, PathBuf};

use quintet_collectives::transport::local::World;
use quintet_kernels::{Cpu, Scalar, bf16};
use quintet_planner::config::{Batch, Layout};
use quintet_zero::Full;
use quintet_zero::checkpoint::find;

use crate::checkpoint::{about, job_of, probe};
use crate::failure::Failure;
use crate::forecast::corpus;
use crate::job::{Dtype, Job};
use crate::model_config::Model;
use crate::rank::{Begin, Rank};
use crate::weights;

/// What is to be converted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Convert {
    /// The folder that is read.
    pub from: PathBuf,
    /// The folder that is written; it must not be there yet.
    pub to: PathBuf,
}

/// Reads one kind of folder and writes the other; says in one line what was done.
///
/// # Errors
/// Exit 3 where the source is neither, torn or foreign, or the other folder is there already.
pub fn convert(job: &Convert) -> Result<String, Failure> {
    let Convert { from, to } = job;
    if to.exists() {
        return Err(Failure::data(format!(
            "{} is there already; give the name of a new folder",
            to.display()
        )));
    }
    if from.join("config.json").is_file() {
        let count = to_checkpoint(from, to)?;
        return Ok(format!(
            "{count} parameters of {} are now a checkpoint in {}; go on with: quintet train --model {} --load {} --save DIR\n",
            from.display(),
            to.display(),
            from.display(),
            to.display()
        ));
    }
    if let Err(torn) = find(from) {
        // A checkpoint that is torn says where.
        if from.join("latest").is_file() {
            return Err(torn.into());
        }
        return Err(Failure::data(format!(
            "{} holds neither config.json with safetensors nor a checkpoint",
            from.display()
        )));
    }
    let count = to_hugging_face(from, to)?;
    Ok(format!(
        "{count} parameters of the checkpoint in {} are now {} and model.safetensors beside it\n",
        from.display(),
        to.join("config.json").display()
    ))
}

fn to_checkpoint(from: &Path, to: &Path) -> Result<usize, Failure> {
    let name = from.display().to_string();
    let model = Model::named(&name).map_err(|e| Failure::data(e.to_string()))?;
    let tensors = weights::read(from, &model.config)?;
    let job = Job {
        model_name: name,
        layout: Layout::single(),
        batch: Batch {
            seq: model.seq,
            micro_batch: 1,
            global_batch: model.global_batch,
        },
        max_positions: Some(model.max_positions),
        model: model.config,
        dtype: Dtype::F32,
        ..Job::default()
    };
    probe(to)?;
    let counts = World::new(1)?.go(|comm| {
        let mut rank = Rank::<_, _, f32>::new(&job, Cpu::new(1), comm, Begin::Init)?;
        rank.fill_with(|entry, index| tensors[&entry.spec.name][index])?;
        rank.save(to, &about(&job, &corpus(&job)?, 0)?)?;
        Ok::<usize, Failure>(tensors.values().map(Vec::len).sum())
    })?;
    Ok(counts.into_iter().sum())
}

fn to_hugging_face(from: &Path, to: &Path) -> Result<usize, Failure> {
    let job = Job {
        layout: Layout::single(),
        ..job_of(from)?.saved
    };
    let model = Model {
        seq: job.batch.seq,
        max_positions: job.max_positions.unwrap_or(job.batch.seq),
        from_file: true,
        global_batch: job.batch.global_batch,
        config: job.model.clone(),
    };
    let params = match job.dtype {
        Dtype::F64 => loaded::<f64>(&job, from)?,
        Dtype::F32 => loaded::<f32>(&job, from)?,
        Dtype::Bf16 => loaded::<bf16>(&job, from)?,
    };
    weights::write(to, &model, &params)?;
    Ok(params.values().map(Vec::len).sum())
}

/// Every parameter of a checkpoint; its master weight where it has one.
fn loaded<E: Scalar>(job: &Job, root: &Path) -> Result<Full, Failure> {
    let mut all = World::new(1)?.go(|comm| {
        let mut rank = Rank::<_, _, E>::new(job, Cpu::new(1), comm, Begin::Init)?;
        rank.load(root, job.dtype.has_masters())?;
        rank.full_weights()
    })?;
    Ok(all.pop().unwrap_or_default())
}
