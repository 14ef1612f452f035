//! Embedding by the letter, in f64.

use alloc::vec::Vec;

use super::EmbeddingSpec;

/// `y_td`: the table's row for each token, zeros where the shard does not hold it.
#[must_use]
pub fn embedding(spec: &EmbeddingSpec, ids: &[i32], table: &[f64]) -> Vec<f64> {
    let mut y = Vec::new();
    for &id in ids {
        match spec.row(id) {
            Some(row) => y.extend(&table[row * spec.dim..(row + 1) * spec.dim]),
            None => y.resize(y.len() + spec.dim, 0.0),
        }
    }
    y
}

/// Adds each token's `dy` to the table's row.
pub fn embedding_backward(spec: &EmbeddingSpec, ids: &[i32], dy: &[f64], dtable: &mut [f64]) {
    for (t, &id) in ids.iter().enumerate() {
        if let Some(row) = spec.row(id) {
            for d in 0..spec.dim {
                dtable[row * spec.dim + d] += dy[t * spec.dim + d];
            }
        }
    }
}
