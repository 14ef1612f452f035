//! What is known of a run before its first message.

use quintet_parallel_layers::pipeline::{Durations, Schedule, StageTime, simulate};
use quintet_planner::model::{flat_layout, mesh, segments};
use quintet_planner::traffic::total;

use crate::data::{Corpus, Part, RandomMask, Samples, unigram_cross_entropy};
use crate::failure::Failure;
use crate::job::{DataSource, Dtype, Job, OptimizerKind};
use crate::report::{Forecast, human};
use crate::verify::predicted_ranks;

/// The job's text.
///
/// # Errors
/// Where it cannot be read.
pub fn corpus(job: &Job) -> Result<Corpus, Failure> {
    Ok(match &job.data {
        DataSource::Embedded => Corpus::built_in(),
        DataSource::File(path) => Corpus::open(path)?,
    })
}

/// The job's samples, masked as it says: half of the mask falls on single tokens, half on whole
/// samples, so that some ranks have no valid token at all.
///
/// # Errors
/// Where the text cannot be read, is too short, or holds a byte outside the vocabulary.
pub fn samples(job: &Job) -> Result<Samples, Failure> {
    let corpus = corpus(job)?;
    corpus.fits_vocabulary(job.model.vocab)?;
    let half = job.mask_fraction / 2.0;
    let mask = RandomMask {
        tokens: half,
        samples: half,
    };
    Ok(Samples::new(corpus, job.seed, job.batch.seq)?.with_mask(mask))
}

/// What will run, in figures.
///
/// # Errors
/// Where the layout cannot be.
pub fn forecast(job: &Job, corpus: &Corpus) -> Result<Forecast, Failure> {
    let mesh = mesh(&job.layout)?;
    let width = match job.dtype {
        Dtype::F64 => 8,
        Dtype::F32 => 4,
    };
    let moments = match job.optimizer.kind {
        OptimizerKind::AdamW => 2,
        OptimizerKind::Sgd => 0,
    };
    let mut forecast = Forecast {
        data: format!(
            "{} ({})",
            match &job.data {
                DataSource::Embedded => "Hamlet, built in".into(),
                DataSource::File(path) => path.display().to_string(),
            },
            human::bytes(corpus.part(Part::Whole).len() as u64)
        ),
        traffic: total(&predicted_ranks(job)?),
        ..Forecast::default()
    };
    let (train, held_out) = (corpus.part(Part::Train), corpus.part(Part::HeldOut));
    if !train.is_empty() && !held_out.is_empty() {
        forecast.unigram_entropy = Some(unigram_cross_entropy(train, held_out));
    }
    for rank in 0..mesh.world() {
        let mut categories = [("parameters", 0), ("gradients", 0), ("optimizer", 0)];
        for chunk in 0..job.layout.chunks() {
            let flat = flat_layout(&job.model, &job.layout, &mesh, rank, chunk, width)?;
            let counted: usize = flat.counted().iter().map(|piece| piece.range.len()).sum();
            forecast.parameters += counted as u64;
            let state: usize = match job.layout.zero_stage {
                0 => flat.len(),
                _ => flat
                    .parts()
                    .iter()
                    .map(|part| part.chunk(part.place).len())
                    .sum(),
            };
            for (category, len) in
                categories
                    .iter_mut()
                    .zip([flat.len(), flat.len(), moments * state])
            {
                category.1 += len;
            }
        }
        for (name, len) in categories {
            let most = forecast.memory.entry(name.to_string()).or_default();
            *most = (*most).max((len * width) as u64);
        }
    }
    if job.layout.pp > 1 {
        let mbs = job.batch.microbatches() / job.layout.dp;
        let segments = segments(&job.model, &job.layout, &mesh, width)?;
        let schedule = Schedule::new(job.layout.schedule, job.layout.pp, mbs, &segments)?;
        let time = StageTime {
            forward: 1.0,
            backward_input: 1.0,
            backward_weight: 1.0,
        };
        let played = simulate(&schedule, &Durations::equal(job.layout.places(), time, 0.0))?;
        forecast.bubble = Some(played.bubble());
    }
    Ok(forecast)
}
