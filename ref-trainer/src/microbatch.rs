//! From samples to what layers read.

use quintet_kernels::{Backend, Float, Scalar, Tag};
use quintet_parallel_layers::MicroBatch;

use crate::data::Sample;
use crate::failure::Failure;

/// Uploads a microbatch; each valid token weighs `weight`, which is 1 / Count of the whole step, and
/// the microbatch itself `share`, which is 1 / microbatches of the whole step.
///
/// # Errors
/// Where the device has no memory for it.
pub fn upload<B: Backend, E: Scalar>(
    device: &B,
    samples: &[Sample],
    (weight, share): (f64, f64),
) -> Result<MicroBatch<B, E>, Failure> {
    let positions = samples.first().map_or(0, |s| s.mask.len());
    let ids = |skip: usize| -> Vec<i32> {
        samples
            .iter()
            .flat_map(|s| s.tokens.iter().skip(skip).take(positions))
            .map(|&t| t as i32)
            .collect()
    };
    let place: Vec<i32> = samples.iter().flat_map(|_| 0..positions as i32).collect();
    let weights: Vec<E::Acc> = samples
        .iter()
        .flat_map(|s| &s.mask)
        .map(|&valid| E::Acc::from_f64(if valid { weight } else { 0.0 }))
        .collect();
    Ok(MicroBatch {
        sequences: samples.len(),
        positions,
        ids_t: device.upload(Tag::Scratch, &ids(0))?,
        pos_t: device.upload(Tag::Scratch, &place)?,
        labels_t: device.upload(Tag::Scratch, &ids(1))?,
        weight_t: device.upload(Tag::Scratch, &weights)?,
        share,
    })
}
