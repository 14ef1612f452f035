//! What would make a layout fit.

use alloc::format;
use alloc::string::String;
use alloc::vec::Vec;

use quintet_parallel_layers::Recompute;

use crate::closed::held::{Held, on_stages};
use crate::closed::pipeline::{fullest, stages};
use crate::search::Request;
use crate::{Batch, Layout};

/// What the fullest rank of a layout holds, where it can be.
#[must_use]
pub fn held(request: &Request, layout: &Layout, batch: &Batch) -> Option<Held> {
    let (shape, job) = (&request.shape, &request.job);
    crate::validate(&shape.config, layout, batch).ok()?;
    let stages = stages(&shape.config, layout, batch.microbatches() / layout.dp).ok()?;
    let types = (job.types, job.moments);
    let each = on_stages(shape, layout, batch, types, &fullest(stages));
    each.into_iter().max_by_key(Held::total)
}

/// What would make a layout that is over memory fit, one change at a time: the change, and the bytes
/// of the fullest rank with it.
#[must_use]
pub fn remedies(request: &Request, layout: &Layout, batch: &Batch) -> Vec<(String, u64)> {
    let mut changes: Vec<(String, Layout, Batch)> = Vec::new();
    let l = layout;
    if l.zero_stage < 3 && l.dp * l.cp > 1 {
        let zero_stage = l.zero_stage + 1;
        let change = format!("zero-stage {zero_stage}");
        changes.push((
            change,
            Layout {
                zero_stage,
                ..l.clone()
            },
            *batch,
        ));
    }
    for recompute in Recompute::ALL {
        if recompute != l.recompute {
            let change = format!("recompute {}", recompute.name());
            changes.push((
                change,
                Layout {
                    recompute,
                    ..l.clone()
                },
                *batch,
            ));
        }
    }
    if !l.sequence_parallel && l.tp > 1 {
        let with = Layout {
            sequence_parallel: true,
            ..l.clone()
        };
        changes.push((String::from("sequence-parallel"), with, *batch));
    }
    if batch.micro_batch > 1 {
        let smaller = Batch {
            micro_batch: 1,
            ..*batch
        };
        changes.push((String::from("micro-batch-size 1"), l.clone(), smaller));
    }
    if l.dp.is_multiple_of(2) {
        let (dp, double) = (l.dp / 2, |n: usize| 2 * n);
        let tp = double(l.tp);
        let pp = double(l.pp);
        changes.push((
            format!("tp {tp}"),
            Layout {
                dp,
                tp,
                ..l.clone()
            },
            *batch,
        ));
        changes.push((
            format!("pp {pp}"),
            Layout {
                dp,
                pp,
                ..l.clone()
            },
            *batch,
        ));
    }
    let now = held(request, layout, batch).map_or(u64::MAX, |held| held.total());
    let of = |(change, layout, batch): (String, Layout, Batch)| {
        held(request, &layout, &batch).map(|held| (change, held.total()))
    };
    let mut all: Vec<(String, u64)> = changes.into_iter().filter_map(of).collect();
    all.retain(|(_, bytes)| *bytes < now);
    all.sort_by_key(|(_, bytes)| *bytes);
    all
}
