//! Laws of the embedding.

use quintet_kernels::embedding::naive;
use quintet_kernels::{Embedding, EmbeddingSpec, Float};

use crate::common::*;

fn look_up<B: Embedding, E: Float>(
    device: &B,
    spec: &EmbeddingSpec,
    ids: &[i32],
    table: &[f64],
) -> Vec<f64> {
    let (ids, table) = (up_raw(device, ids), up::<B, E>(device, table));
    let mut y = unset::<B, E>(device, spec.tokens * spec.dim);
    device
        .embedding::<E>(spec, B::whole(&ids), B::whole(&table), B::whole_mut(&mut y))
        .unwrap();
    down::<B, E>(device, &y)
}

fn scatter<B: Embedding, E: Float>(
    device: &B,
    spec: &EmbeddingSpec,
    ids: &[i32],
    dy: &[f64],
    dtable: &[f64],
) -> Vec<f64> {
    let (ids, dy) = (up_raw(device, ids), up::<B, E>(device, dy));
    let mut dtable = up::<B, E::Acc>(device, dtable);
    device
        .embedding_backward::<E>(
            spec,
            B::whole(&ids),
            B::whole(&dy),
            B::whole_mut(&mut dtable),
        )
        .unwrap();
    down::<B, E::Acc>(device, &dtable)
}

/// Tokens drawn from a bit more than the shard holds, some of them negative.
fn cases() -> impl Iterator<Item = (EmbeddingSpec, Vec<i32>, Draw)> {
    [
        (5, 0, 4, 3),
        (9, 10, 7, 16),
        (3, 2, 0, 4),
        (0, 0, 3, 2),
        (700, 100, 333, 70),
    ]
    .into_iter()
    .map(|(tokens, first, rows, dim)| {
        let mut draw = Draw::new(tokens as u64);
        let ids = (0..tokens)
            .map(|_| draw.below(first + rows + 3) as i32 - 1)
            .collect();
        let spec = EmbeddingSpec {
            tokens,
            first,
            rows,
            dim,
        };
        (spec, ids, draw)
    })
}

pub fn looks_up<B: Embedding, E: Float>(device: &B) {
    for (spec, ids, mut draw) in cases() {
        let table = draw.vec::<E>(spec.rows * spec.dim, 2.0);
        let got = look_up::<B, E>(device, &spec, &ids, &table);
        assert_eq!(got, naive::embedding(&spec, &ids, &table));
    }
}

pub fn scatters_in_order<B: Embedding, E: Float>(device: &B) {
    for (spec, ids, mut draw) in cases() {
        // Whole numbers: exact, and so the adjoint of the lookup is met exactly too.
        let (dy, start) = (
            draw.whole(spec.tokens * spec.dim, 8),
            draw.whole(spec.rows * spec.dim, 8),
        );
        let mut want = start.clone();
        naive::embedding_backward(&spec, &ids, &dy, &mut want);
        assert_eq!(scatter::<B, E>(device, &spec, &ids, &dy, &start), want);

        let x = draw.whole(spec.rows * spec.dim, 8);
        let zeros = vec![0.0; start.len()];
        let forth = dot(&look_up::<B, E>(device, &spec, &ids, &x), &dy);
        let back = dot(&x, &scatter::<B, E>(device, &spec, &ids, &dy, &zeros));
        assert_eq!(forth, back);

        // Any numbers, to the bit: each row is summed in token order, in Acc.
        let dy = draw.vec::<E>(spec.tokens * spec.dim, 1.0);
        let mut want: Vec<E::Acc> = vec![<E::Acc as Float>::from_f64(0.0); start.len()];
        for (t, &id) in ids.iter().enumerate() {
            let Some(row) = spec.row(id) else { continue };
            for d in 0..spec.dim {
                want[row * spec.dim + d] += <E::Acc as Float>::from_f64(dy[t * spec.dim + d]);
            }
        }
        let want: Vec<f64> = want.into_iter().map(Float::to_f64).collect();
        assert_eq!(scatter::<B, E>(device, &spec, &ids, &dy, &zeros), want);
    }
}

/// Each token is found in exactly one of the shards, whatever their lengths.
pub fn shards_sum_to_the_whole<B: Embedding, E: Float>(device: &B) {
    let mut draw = Draw::new(11);
    let (tokens, vocab, dim) = (23, 17, 5);
    let ids: Vec<i32> = (0..tokens).map(|_| draw.below(vocab) as i32).collect();
    let table = draw.vec::<E>(vocab * dim, 1.0);
    let dy = draw.vec::<E>(tokens * dim, 1.0);
    let whole = EmbeddingSpec {
        tokens,
        first: 0,
        rows: vocab,
        dim,
    };
    let want = look_up::<B, E>(device, &whole, &ids, &table);
    let zeros = vec![0.0; vocab * dim];
    let want_dtable = scatter::<B, E>(device, &whole, &ids, &dy, &zeros);
    for cuts in [
        vec![0, 17],
        vec![0, 6, 17],
        vec![0, 0, 16, 17],
        vec![0, 4, 4, 9, 17, 17],
    ] {
        let mut sum = vec![0.0; want.len()];
        let mut dtable = Vec::new();
        for shard in cuts.windows(2) {
            let spec = EmbeddingSpec {
                first: shard[0],
                rows: shard[1] - shard[0],
                ..whole
            };
            let mine = &table[shard[0] * dim..shard[1] * dim];
            let y = look_up::<B, E>(device, &spec, &ids, mine);
            sum.iter_mut().zip(y).for_each(|(s, y)| *s += y);
            let zeros = vec![0.0; mine.len()];
            dtable.extend(scatter::<B, E>(device, &spec, &ids, &dy, &zeros));
        }
        assert_eq!(sum, want);
        assert_eq!(dtable, want_dtable);
    }
}
