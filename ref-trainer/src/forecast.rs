//! What is known of a run before its first message.

use quintet_parallel_layers::pipeline::laws::held;
use quintet_parallel_layers::pipeline::{Durations, StageTime, simulate};
use quintet_planner::memory::activations;
use quintet_planner::model::{flat_layout, mesh};
use quintet_planner::states::fullest;
use quintet_planner::traffic::{row_copy_bytes, total};

use crate::data::{Corpus, Part, Samples, unigram_cross_entropy};
use crate::failure::Failure;
use crate::job::{DataSource, Job};
use crate::rank::schedule;
use crate::report::{Forecast, human};
use crate::verify::{predicted_memory, predicted_ranks, wire_types};

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

/// The job's samples, masked as it says ([`Job::mask`]).
///
/// # Errors
/// Where the text cannot be read, is too short, or holds a byte outside the vocabulary.
pub fn samples(job: &Job) -> Result<Samples, Failure> {
    let corpus = corpus(job)?;
    corpus.fits_vocabulary(job.model.vocab)?;
    Ok(Samples::new(corpus, job.seed, job.batch.seq)?
        .with_mask(job.mask())
        .with_documents(job.pack_documents))
}

/// What will run, in figures.
///
/// # Errors
/// Where the layout cannot be.
pub fn forecast(job: &Job, corpus: &Corpus) -> Result<Forecast, Failure> {
    let mesh = mesh(&job.layout)?;
    let width = job.dtype.acc_bytes();
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
        row_bytes: (job.layout.ep > 1)
            .then(|| row_copy_bytes(&job.model, &job.layout, wire_types(job))),
        ..Forecast::default()
    };
    let (train, held_out) = (corpus.part(Part::Train), corpus.part(Part::HeldOut));
    if !train.is_empty() && !held_out.is_empty() {
        forecast.unigram_entropy = Some(unigram_cross_entropy(train, held_out));
    }
    let kept = activations(&job.model, &job.layout, &job.batch, wire_types(job))?;
    for rank in 0..mesh.world() {
        for chunk in 0..job.layout.chunks() {
            let flat = flat_layout(&job.model, &job.layout, &mesh, rank, chunk, width)?;
            let counted: usize = flat.counted().iter().map(|piece| piece.range.len()).sum();
            forecast.parameters += counted as u64;
        }
        let most = forecast.memory.entry("activations".into()).or_default();
        *most = (*most).max(kept[rank].saved + kept[rank].work);
    }
    let most = fullest(&predicted_memory(job)?).into_iter();
    forecast
        .memory
        .extend(most.map(|(name, bytes)| (name, bytes.peak)));
    if job.layout.pp > 1 {
        let schedule = schedule(job, &mesh, width)?;
        let time = StageTime {
            forward: 1.0,
            backward_input: 1.0,
            backward_weight: 1.0,
        };
        let played = simulate(&schedule, &Durations::equal(job.layout.places(), time, 0.0))?;
        forecast.bubble = Some(played.bubble());
        forecast.held = schedule.all().iter().map(|actions| held(actions)).max();
    }
    Ok(forecast)
}
