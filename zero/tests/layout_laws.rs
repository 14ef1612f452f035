//! Laws of the layout: pure data, no thread, no device.
#![allow(clippy::unwrap_used)]

mod common;

use std::collections::BTreeMap;

use common::{Model, degrees};
use proptest::prelude::*;
use quintet_collectives::{Axis, Degrees, Placement};
use quintet_zero::{Error, FlatLayout, LayoutSpec, Partition, Tied, ZeroStage};

fn laws(model: &Model) {
    let mesh = model.mesh();
    let mut counted: BTreeMap<String, Vec<u32>> = BTreeMap::new();
    for rank in 0..mesh.world() {
        let (layout, layers) = (model.layout(rank), model.layers(rank));
        // Entries partition the parts.
        for (index, part) in layout.parts().iter().enumerate() {
            let mut at = 0;
            for e in part.entries.iter().map(|&e| &layout.entries()[e]) {
                assert_eq!(
                    (e.part, e.offset, e.len),
                    (index, at, e.spec.local_len(&mesh, rank))
                );
                at += e.len;
            }
            assert_eq!(at, part.len);
            assert_eq!(part.counts().iter().sum::<usize>(), at);
        }
        // Every view of every layer is found; segments are the layers from last to first.
        for (layer, specs) in layers.iter().enumerate() {
            let names: Vec<_> = layout
                .layer(layer)
                .unwrap()
                .iter()
                .map(|&e| &layout.entries()[e].spec)
                .collect();
            assert_eq!(names, specs.iter().collect::<Vec<_>>());
        }
        let backward: Vec<usize> = layout
            .segments()
            .into_iter()
            .flat_map(Iterator::rev)
            .collect();
        assert!(backward.into_iter().eq((0..layers.len()).rev()));
        // An entry lies in the bucket of its first layer, or among the tied.
        for e in layout.entries() {
            let bucket = layout.buckets().iter().find(|b| b.parts.contains(&e.part));
            match bucket {
                Some(b) => assert!(b.layers.contains(&e.layer)),
                None => assert!(layout.tied().contains(&e.part)),
            }
            assert!(
                layers[..e.layer]
                    .iter()
                    .flatten()
                    .all(|s| s.name != e.spec.name)
            );
        }
        for piece in layout.counted() {
            let spec = &layout.entries()[piece.entry].spec;
            let counts = counted
                .entry(spec.name.clone())
                .or_insert(vec![0; spec.len()]);
            piece
                .runs
                .iter()
                .for_each(|&(_, i, n)| counts[i..i + n].iter_mut().for_each(|c| *c += 1));
        }
        same_order_as_peers(model, rank, &layout);
    }
    for rank in 0..mesh.world() {
        for spec in model.layers(rank).iter().flatten() {
            let counts = counted.get(&spec.name).cloned().unwrap_or_default();
            assert_eq!(counts, vec![1; spec.len()], "{} in {model:?}", spec.name);
        }
    }
}

/// All ranks of each group hold the part alike: index, length, and what lies where.
fn same_order_as_peers(model: &Model, rank: usize, layout: &FlatLayout) {
    let names = |l: &FlatLayout, part: usize| -> Vec<(String, usize)> {
        let entries = l.parts()[part].entries.iter().map(|&e| &l.entries()[e]);
        entries.map(|e| (e.spec.name.clone(), e.len)).collect()
    };
    for (index, part) in layout.parts().iter().enumerate() {
        for factors in [&part.shard, &part.across, &part.extra] {
            for peer in layout.mesh().group(rank, factors) {
                let peer = model.layout(peer);
                assert_eq!(
                    (peer.parts()[index].len, &peer.parts()[index].shard),
                    (part.len, &part.shard)
                );
                assert_eq!(names(&peer, index), names(layout, index));
                assert_eq!(peer.segments(), layout.segments());
            }
        }
        for peer in quintet_zero::groups::tie_ranks(layout, part) {
            let peer = model.layout(peer);
            let twin = peer
                .parts()
                .iter()
                .position(|p| (&p.stages, &p.extra) == (&part.stages, &part.extra));
            assert_eq!(names(&peer, twin.unwrap()), names(layout, index));
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, failure_persistence: None, ..Default::default() })]
    #[test]
    fn hold_on_random_meshes(
        (pp, dp, cp, tp) in (1..=3_usize, 1..=3_usize, 1..=2_usize, 1..=4_usize),
        (ep, etp) in (1..=4_usize, 1..=2_usize),
        (hidden, vocab, blocks) in (0..=4_usize, 1..=6_usize, 0..=4_usize),
        (bucket_bytes, tie, within) in (0..400_usize, any::<bool>(), 0..4_usize),
    ) {
        let degrees = if (dp * cp * tp).is_multiple_of(ep * etp) {
            Degrees { pp, dp, cp, tp, ep, etp }
        } else {
            degrees(pp, dp, cp, tp, 1)
        };
        let within = [None, Some(1), Some(cp), Some(dp * cp)][within];
        let model = Model::new(degrees);
        laws(&Model { hidden, vocab, blocks, bucket_bytes, tie, within, ..model });
    }
}

#[test]
fn drawn() {
    let model = Model {
        blocks: 2,
        ..Model::new(degrees(2, 2, 1, 2, 2))
    };
    assert_eq!(model.layout(1).to_string(), include_str!("layout.txt"));
}

fn spec(tied: &[Tied]) -> LayoutSpec<'_> {
    LayoutSpec {
        bucket_bytes: 0,
        element_bytes: 4,
        tied,
        shard_within: None,
    }
}

#[test]
fn what_cannot_be_laid_out_is_said() {
    let mesh = Model::new(degrees(2, 1, 1, 2, 1)).mesh();
    let good = Model::new(degrees(2, 1, 1, 2, 1)).layers(0);
    let said =
        |layers: &[Vec<_>], tied: &[Tied]| match FlatLayout::build(layers, &mesh, 0, &spec(tied)) {
            Err(Error::Param { why, .. }) => why,
            other => panic!("{other:?}"),
        };
    let mut twice = good.clone();
    let copy = twice[1][0].clone();
    twice[1].push(copy);
    assert_eq!(said(&twice, &[]), "layer 1 names it twice");
    let mut shapes = good.clone();
    let mut other = shapes[0][0].clone();
    other.shape[0] += 1;
    shapes[1].push(other);
    assert_eq!(
        said(&shapes, &[]),
        "two layers give it the shapes [5, 3] and [6, 3]"
    );
    for (placement, why) in [
        (
            Placement::Partial,
            "a parameter cannot be a sum still to be taken",
        ),
        (
            Placement::shard(2),
            "Shard(2) cuts a dim that the shape [5, 3] does not have",
        ),
    ] {
        let mut bad = good.clone();
        bad[0][0].at_use[2].1 = placement;
        assert_eq!(said(&bad, &[]), why);
    }
    let mut pp = good.clone();
    pp[0][0]
        .at_use
        .push((mesh.factor(Axis::Pp), Placement::Replicate));
    assert!(said(&pp, &[]).contains("pp has no placement"));
    let tied = [Tied {
        name: "embed".into(),
        stages: vec![1],
    }];
    assert_eq!(
        said(&good, &tied),
        "it is tied on stages {1}, and this is stage 0 of 2"
    );
    let missing = FlatLayout::build(&good, &mesh, 0, &spec(&[])).unwrap();
    assert!(missing.layer(9).is_err());
}

#[test]
fn there_are_four_stages() {
    for stage in 0..=3 {
        assert_eq!(ZeroStage::from_number(stage).unwrap().number(), stage);
    }
    let text = ZeroStage::from_number(4).unwrap_err().to_string();
    assert_eq!(text, "there is no ZeRO stage 4; there are 0 to 3");
}

/// Each element of each part is kept by exactly one rank of each group that shards it.
#[test]
fn chunks_cover_each_part_once_in_each_group() {
    for within in [None, Some(1), Some(2), Some(3), Some(6)] {
        let model = Model {
            within,
            ..Model::new(degrees(1, 6, 1, 2, 4))
        };
        let layouts: Vec<_> = (0..12).map(|rank| model.layout(rank)).collect();
        for (rank, layout) in layouts.iter().enumerate() {
            for (index, part) in layout.parts().iter().enumerate() {
                let group = layout.mesh().group(rank, &part.shard);
                let copies = layout.mesh().group(rank, &part.across);
                let all = layout
                    .mesh()
                    .group(rank, &[&part.shard[..], &part.across].concat());
                assert_eq!(group.len() * copies.len(), all.len());
                let mut kept = vec![0; part.len];
                for &peer in &group {
                    let peer = Partition::new(layouts[peer].clone(), ZeroStage::Three);
                    kept[peer.param(index)].iter_mut().for_each(|n| *n += 1);
                }
                assert!(kept.iter().all(|&n| n == 1), "{within:?} part {index}");
                for &copy in &copies {
                    let peer = Partition::new(layouts[copy].clone(), ZeroStage::Three);
                    let mine = Partition::new(layout.clone(), ZeroStage::Three);
                    assert_eq!(peer.param(index), mine.param(index));
                }
            }
        }
    }
    let odd = Model {
        degrees: degrees(1, 3, 2, 1, 1),
        ..Model::new(degrees(1, 3, 2, 1, 1))
    };
    let refused = FlatLayout::build(
        &odd.layers(0),
        &odd.mesh(),
        0,
        &LayoutSpec {
            shard_within: Some(3),
            ..spec(&[])
        },
    );
    let text = refused.unwrap_err().to_string();
    assert!(
        text.contains("3 neighbours of 6 replicas are no block of cp 2"),
        "{text}"
    );
}
