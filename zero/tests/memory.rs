//! What is held: chunks between steps, and during one no more whole buffers than are said; what is
//! asked for out of order is refused.
#![allow(clippy::unwrap_used)]

mod common;

use common::{ADAMW, ALL, Model, Rank, degrees};
use quintet_collectives::World;
use quintet_kernels::{Backend, Tag};
use quintet_zero::live::IN_FLIGHT;
use quintet_zero::{Error, Partition, ZeroStage, grad_norm};

fn lens(partition: &Partition, of: impl Fn(&Partition, usize) -> core::ops::Range<usize>) -> usize {
    let parts = 0..partition.layout().parts().len();
    parts.map(|part| of(partition, part).len()).sum()
}

#[test]
fn only_chunks_are_at_rest_and_few_buckets_whole() {
    for (within, tie) in [(None, true), (None, false), (Some(2), true)] {
        let model = Model {
            within,
            tie,
            microbatches: 3,
            bucket_bytes: 0,
            blocks: 6,
            ..Model::new(degrees(2, 4, 1, 1, 1))
        };
        for stage in ALL {
            let world = World::new(8).unwrap();
            let held = world.go(|comm| {
                let mut rank = Rank::<f32>::new(model, comm, stage, ADAMW)?;
                let partition = rank.sync.partition().clone();
                let meter = rank.device.meter().clone();
                meter.reset_peak();
                for step in 1..=2 {
                    rank.backward(step, 1.0)?;
                    grad_norm(&rank.device, &[&rank.sync], &rank.groups)?;
                    rank.step(0.01, 1.0)?;
                }
                let elements = |bytes: usize| bytes / size_of::<f32>();
                let now = |tag| elements(meter.now(tag));
                assert_eq!(
                    now(Tag::Param),
                    lens(&partition, Partition::param),
                    "{stage:?}"
                );
                assert_eq!(
                    now(Tag::Grad),
                    lens(&partition, Partition::grad),
                    "{stage:?}"
                );
                assert_eq!(now(Tag::Optimizer), 2 * lens(&partition, Partition::state));
                let layout = partition.layout();
                let bucket = |b: usize| -> usize {
                    layout
                        .parts_of(b)
                        .iter()
                        .map(|&p| layout.parts()[p].len)
                        .sum()
                };
                let largest = (0..layout.buckets().len()).map(bucket).max().unwrap_or(0);
                let tied: usize = layout.tied().map(|p| layout.parts()[p].len).sum();
                let beyond = |tag| elements(meter.peak(tag) - meter.now(tag));
                let (params, grads) = (beyond(Tag::Param), beyond(Tag::Grad));
                let kept = stage.kept();
                let cut = |keep| keep == quintet_zero::Keep::Chunk;
                assert!(params <= if cut(kept.param) { 2 * largest } else { 0 });
                let most = (IN_FLIGHT + 1) * largest + tied;
                assert!(grads <= if cut(kept.grad) { most } else { 0 });
                assert_eq!((params > 0, grads > 0), (cut(kept.param), cut(kept.grad)));
                Ok::<_, Error>(now(Tag::Param))
            });
            assert_eq!(held.unwrap().len(), 8);
        }
    }
}

#[test]
fn order_is_kept() {
    let model = Model {
        bucket_bytes: 0,
        ..Model::new(degrees(1, 2, 1, 1, 1))
    };
    let why = |result: Result<(), Error>| match result {
        Err(Error::Order { why, .. }) => why,
        other => panic!("{other:?}"),
    };
    let went = World::new(2).unwrap().go(|comm| {
        let mut rank = Rank::<f32>::new(model, comm, ZeroStage::Three, ADAMW)?;
        assert_eq!(
            why(rank.params.views(0).map(drop)),
            "its parameters are used without having been gathered"
        );
        assert_eq!(
            why(rank.params.release(0)),
            "its parameters are released without having been gathered"
        );
        rank.backward(1, 1.0)?;
        // Still gathered when the step comes: they would be stale after it.
        rank.params.gather(&rank.groups, 1)?;
        assert_eq!(
            why(rank.step(0.1, 1.0)),
            "parameters are still gathered, and would be stale after it"
        );
        rank.params.release(1)?;
        rank.step(0.1, 1.0)?;
        // Filled again, and not reduced.
        rank.sync.zero()?;
        for bucket in 0..rank.sync.layout().buckets().len() {
            rank.sync.reduce(&rank.groups, bucket)?;
        }
        rank.sync.views_mut(1)?;
        assert_eq!(
            why(rank.sync.finish(&rank.groups)),
            "its gradients have not been reduced"
        );
        assert!(rank.sync.part(0).is_err());
        rank.sync.zero()?;
        assert!(rank.params.gather(&rank.groups, 99).is_err());
        Ok::<_, Error>(())
    });
    went.unwrap();
}
