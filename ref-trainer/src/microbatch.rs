//! From samples to what layers read.

use quintet_kernels::{Backend, Float, Scalar, Tag};
use quintet_parallel_layers::{ContextPlaces, Drawn, MicroBatch};

use crate::data::Sample;
use crate::failure::Failure;
use crate::seat::Seat;

/// Uploads the tokens of a microbatch that `seat` holds; each valid one weighs `weight`, which is
/// 1 / Count of the whole step, and the microbatch itself `share`, which is 1 / microbatches of the
/// whole step.
///
/// # Errors
/// Where the device has no memory for it.
pub fn upload<B: Backend, E: Scalar>(
    device: &B,
    samples: &[Sample],
    (weight, share): (f64, f64),
    seat: &Seat,
) -> Result<MicroBatch<B, E>, Failure> {
    let len = samples.first().map_or(0, |s| s.mask.len());
    let held: Vec<usize> = seat.held(len).collect();
    let here = |value: &dyn Fn(&Sample, usize) -> i32| -> Vec<i32> {
        let of = |s| held.iter().map(move |&t| value(s, t));
        samples.iter().flat_map(of).collect()
    };
    let token = |skip: usize| here(&|s: &Sample, t| s.tokens[t + skip] as i32);
    let weights: Vec<E::Acc> = samples
        .iter()
        .flat_map(|s| held.iter().map(|&t| s.mask[t]))
        .map(|valid| E::Acc::from_f64(if valid { weight } else { 0.0 }))
        .collect();
    let positions: Vec<i32> = samples.iter().flat_map(Sample::positions).collect();
    let documents: Vec<i32> = samples.iter().flat_map(|s| s.documents.clone()).collect();
    let documents = (!documents.is_empty()).then_some(&documents[..]);
    let all = |whole: &[i32]| -> Vec<i32> {
        let rows = whole.chunks_exact(len.max(1));
        rows.flat_map(|row| held.iter().map(|&t| row[t])).collect()
    };
    let put = |host: &[i32]| device.upload(Tag::Scratch, host);
    Ok(MicroBatch {
        sequences: samples.len(),
        positions: held.len(),
        ids_t: put(&token(0))?,
        pos_t: put(&all(&positions))?,
        doc_t: documents.map(|of| put(&all(of))).transpose()?,
        context: if seat.cp > 1 {
            let outer = seat.outer;
            let places =
                ContextPlaces::upload(device, samples.len(), outer, &positions, documents)?;
            Some(places)
        } else {
            None
        },
        labels_t: put(&token(1))?,
        weight_t: device.upload(Tag::Scratch, &weights)?,
        share,
        drawn: None,
    })
}

/// What keys the dropout of a step.
#[derive(Debug, Clone, Copy)]
pub struct DropoutKey {
    /// Of the job.
    pub seed: u64,
    /// Of the job.
    pub step: u64,
    /// Number in the step of the first microbatch of this replica.
    pub first: usize,
}

impl DropoutKey {
    /// The keys of the replica's microbatch `mb`, of whose samples `seat` holds some tokens.
    ///
    /// # Errors
    /// Where the device has no memory for it.
    pub fn upload<B: Backend>(
        &self,
        device: &B,
        mb: usize,
        samples: &[Sample],
        seat: &Seat,
    ) -> Result<Drawn<B>, Failure> {
        let places = |s: &Sample| seat.held(s.mask.len()).map(|t| t as i32);
        let of = |s: &Sample| places(s).collect::<Vec<_>>();
        let at: Vec<i32> = samples.iter().flat_map(of).collect();
        Ok(Drawn {
            seed: self.seed,
            step: self.step,
            sample: ((self.first + mb) * samples.len()) as u64,
            at_t: device.upload(Tag::Scratch, &at)?,
        })
    }
}
