//! Meshes, placements and boxes.

use quintet_collectives::ledger::runs as box_runs;
use quintet_collectives::{Axis, Degrees, DeviceMesh, IndexMap, Move, Placement};

use crate::bytes::Bytes;

/// Any degrees: refused in words, or a mesh whose groups partition the world in both views.
pub fn mesh(data: &[u8]) {
    let mut bytes = Bytes(data);
    let degrees = Degrees {
        pp: bytes.below(4),
        dp: bytes.below(4),
        cp: bytes.below(3),
        tp: bytes.below(5),
        ep: bytes.below(9),
        etp: bytes.below(3),
    };
    let Ok(mesh) = DeviceMesh::new(degrees) else {
        return;
    };
    let axes = [
        Axis::Pp,
        Axis::Dp,
        Axis::Cp,
        Axis::Tp,
        Axis::Edp,
        Axis::Ep,
        Axis::Etp,
    ];
    let axis = axes[bytes.below(7)];
    let outer = 1 + bytes.below(mesh.degree(axis));
    let whole = [mesh.factor(axis)];
    let factors = match mesh.split_axis(axis, outer) {
        Ok((o, i)) => vec![o, i],
        Err(_) => whole.to_vec(),
    };
    for rank in 0..mesh.world() {
        let group = mesh.group(rank, &factors);
        assert_eq!(
            group,
            mesh.group(rank, &whole),
            "factors together are the axis"
        );
        assert!(group.contains(&rank));
        for peer in &group {
            assert_eq!(mesh.group(*peer, &factors), group);
        }
    }
}

/// Any two placements: refused in words, or a move that is its backward's backward.
pub fn placement(data: &[u8]) {
    let mut bytes = Bytes(data);
    let mut any = || match bytes.below(7) {
        0 => Placement::Partial,
        1 => Placement::Replicate,
        2 => Placement::Invariant,
        3 => Placement::shard(bytes.below(3)),
        4 => Placement::shard_units(bytes.below(3), bytes.below(5)),
        5 => Placement::Shard {
            dim: bytes.below(3),
            map: IndexMap::Zigzag,
        },
        _ => Placement::Shard {
            dim: bytes.below(3),
            map: IndexMap::Ragged,
        },
    };
    let (from, to) = (any(), any());
    if let Ok(m) = Move::new(from, to) {
        assert_eq!(m.backward().and_then(Move::backward), Ok(m));
    }
}

/// Any box of a small tensor: the runs cover it in order, once.
pub fn runs(data: &[u8]) {
    let mut bytes = Bytes(data);
    let rank = bytes.below(4);
    let shape: Vec<usize> = (0..rank).map(|_| bytes.below(5)).collect();
    let part: Vec<_> = shape
        .iter()
        .map(|&len| {
            let start = bytes.below(len + 1);
            start..start + bytes.below(len - start + 1)
        })
        .collect();
    let mut logical = Vec::new();
    for (local, start, len) in box_runs(&shape, &part) {
        assert_eq!(local, logical.len());
        logical.extend(start..start + len);
    }
    let inside = (0..shape.iter().product::<usize>()).filter(|&index| {
        let mut rest = index;
        shape.iter().zip(&part).rev().all(|(&len, range)| {
            let at = rest % len;
            rest /= len;
            range.contains(&at)
        })
    });
    assert!(inside.eq(logical));
}
