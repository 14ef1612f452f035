//! Mean loss over a text, under any layout.

use quintet_collectives::{Axis, DeviceMesh};

use crate::data::Sample;
use crate::job::Job;

/// The windows of a replica as microbatches of the job's shape: microbatch m goes to replica m mod
/// dp. What is missing to a whole number of microbatches each is filled with masked windows.
#[must_use]
pub fn share(windows: Vec<Sample>, job: &Job, mesh: &DeviceMesh, rank: usize) -> Vec<Vec<Sample>> {
    let (micro, dp) = (job.batch.micro_batch, job.layout.dp);
    let Some(masked) = windows.first().map(|w| Sample {
        tokens: w.tokens.clone(),
        mask: vec![false; w.mask.len()],
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
    all.into_iter().skip(mesh.index(rank, Axis::Dp)).step_by(dp).collect()
}
