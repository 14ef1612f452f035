//! Mean loss over a text, under any layout.

use std::fmt;
use std::marker::PhantomData;

use quintet_collectives::{Axis, Communicator, DeviceMesh};
use quintet_kernels::{Cpu, Scalar, bf16};
use serde::Serialize;

use crate::cli::Weights;
use crate::crew::{Crew, End, Work};
use crate::data::{Corpus, Part, Sample};
use crate::failure::Failure;
use crate::job::{Dtype, Job};
use crate::rank::{Begin, Rank};
use crate::room::has_room;
use crate::weights::{self, Tensors};

/// What an evaluation found.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Evaluation {
    /// Mean loss in nats per token.
    pub loss: f64,
    /// Tokens predicted.
    pub tokens: u64,
}

impl Evaluation {
    /// One JSON object on a line.
    ///
    /// # Errors
    /// Where the loss is no number.
    pub fn json(&self) -> Result<String, Failure> {
        serde_json::to_string(self)
            .map(|text| text + "\n")
            .map_err(|e| Failure::data(format!("the result cannot be written as JSON: {e}")))
    }
}

impl fmt::Display for Evaluation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "loss {:.5} nats per token over {} tokens",
            self.loss, self.tokens
        )
    }
}

/// Mean loss of trained parameters over a text's consecutive, non-overlapping windows of T + 1
/// tokens, under the job's layout.
///
/// # Errors
/// Where text or parameters cannot be read, or a rank fails.
pub fn evaluate(job: &Job, weights: &Weights, corpus: &Corpus) -> Result<Evaluation, Failure> {
    let found = evaluate_in(&Crew::threads(job)?, job, weights, corpus)?;
    found.ok_or_else(|| Failure::aborted("rank 0 left no result"))
}

/// [`evaluate`] wherever the ranks are; a result where rank 0 is.
///
/// # Errors
/// As [`evaluate`].
pub fn evaluate_in(
    crew: &Crew,
    job: &Job,
    weights: &Weights,
    corpus: &Corpus,
) -> Result<Option<Evaluation>, Failure> {
    job.check()?;
    weights::belong_to(job, weights)?;
    has_room(job)?;
    corpus.fits_vocabulary(job.model.vocab)?;
    let windows: Vec<Sample> = corpus
        .windows(Part::Whole, job.batch.seq, job.pack_documents)?
        .collect();
    match job.dtype {
        Dtype::F64 => Evaluating::<f64>::of(crew, job, weights, windows),
        Dtype::F32 => Evaluating::<f32>::of(crew, job, weights, windows),
        Dtype::Bf16 => Evaluating::<bf16>::of(crew, job, weights, windows),
    }
}

/// The work of [`evaluate_in`].
struct Evaluating<'a, E> {
    job: &'a Job,
    weights: &'a Weights,
    folder: Option<Tensors>,
    windows: Vec<Sample>,
    dtype: PhantomData<fn() -> E>,
}

impl<'a, E: Scalar> Evaluating<'a, E> {
    fn of(
        crew: &Crew,
        job: &'a Job,
        weights: &'a Weights,
        windows: Vec<Sample>,
    ) -> Result<Option<Evaluation>, Failure> {
        let folder = match weights {
            Weights::Folder(path) => Some(weights::read(path, &job.model)?),
            Weights::Checkpoint(_) => None,
        };
        let work = Self {
            job,
            weights,
            folder,
            windows,
            dtype: PhantomData,
        };
        let Some(found) = crew.go(&work)? else {
            return Ok(None);
        };
        let (loss, tokens) = found.first().copied().unwrap_or_default();
        let loss = loss / tokens;
        if !loss.is_finite() {
            return Err(Failure::aborted(format!(
                "the loss is {loss}: the parameters are not finite"
            )));
        }
        Ok(Some(Evaluation {
            loss,
            tokens: tokens as u64,
        }))
    }
}

impl<E: Scalar> Work for Evaluating<'_, E> {
    /// Sum of losses and tokens, the same on all ranks; rank 0's is not told.
    type Left = (f64, f64);

    fn rank(&self, comm: Communicator<End>) -> Result<(f64, f64), Failure> {
        let job = self.job;
        let device = Cpu::new(job.threads_per_rank);
        let mut rank = Rank::<_, _, E>::new(job, device, comm, Begin::Init)?;
        match (self.weights, &self.folder) {
            (Weights::Checkpoint(root), _) => rank.load(root, false)?,
            (Weights::Folder(_), tensors) => rank.fill_with(|entry, index| {
                let tensor = tensors.as_ref().and_then(|all| all.get(&entry.spec.name));
                tensor
                    .and_then(|t| t.get(index))
                    .copied()
                    .unwrap_or(f64::NAN)
            })?,
        }
        let mine = share(self.windows.clone(), job, &rank.mesh, rank.rank);
        let (loss, tokens) = rank.evaluate(&mine)?;
        // JSON has no number for what is none; rank 0 finds it itself.
        Ok(if rank.rank == 0 {
            (loss, tokens)
        } else {
            (0.0, tokens)
        })
    }
}

/// The windows of a replica as microbatches of the job's shape: microbatch m goes to replica m mod
/// dp. What is missing to a whole number of microbatches each is filled with masked windows.
#[must_use]
pub fn share(windows: Vec<Sample>, job: &Job, mesh: &DeviceMesh, rank: usize) -> Vec<Vec<Sample>> {
    let (micro, dp) = (job.batch.micro_batch, job.layout.dp);
    let Some(masked) = windows.first().map(|w| Sample {
        tokens: w.tokens.clone(),
        mask: vec![false; w.mask.len()],
        documents: w.documents.clone(),
    }) else {
        return Vec::new();
    };
    let mut all: Vec<Vec<Sample>> = windows.chunks(micro).map(<[Sample]>::to_vec).collect();
    if let Some(last) = all.last_mut() {
        last.resize(micro, masked.clone());
    }
    while !all.len().is_multiple_of(dp) {
        all.push(vec![masked.clone(); micro]);
    }
    all.into_iter()
        .skip(mesh.index(rank, Axis::Dp))
        .step_by(dp)
        .collect()
}
