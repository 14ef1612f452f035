//! Embedding on slices. Backward is cut over rows of the table: each part walks all tokens and
//! takes those that are its own, so every row is summed in token order by one thread.

use super::{Embedding, EmbeddingSpec};
use crate::error::need;
use crate::lanes::rows_per_part;
use crate::{Cpu, Error, Float};

/// Rows of `y` for a block of tokens; see [`Embedding::embedding`].
#[inline(always)]
pub fn embedding<E: Float>(spec: &EmbeddingSpec, ids_t: &[i32], table_vd: &[E], y_td: &mut [E]) {
    let dim = spec.dim.max(1);
    for (&id, y) in ids_t.iter().zip(y_td.chunks_exact_mut(dim)) {
        let row = spec.row(id).and_then(|row| {
            let tail = table_vd.get(row * dim..)?;
            tail.get(..dim)
        });
        match row {
            Some(row) => y.copy_from_slice(row),
            None => y.fill(E::zeroed()),
        }
    }
}

/// Adds `dy` of the tokens in the shard to its table; see [`Embedding::embedding_backward`].
#[inline(always)]
pub fn embedding_backward<E: Float>(
    spec: &EmbeddingSpec,
    ids_t: &[i32],
    dy_td: &[E],
    dtable_vd: &mut [E::Acc],
) {
    let dim = spec.dim.max(1);
    for (&id, dy) in ids_t.iter().zip(dy_td.chunks_exact(dim)) {
        let Some(row) = spec.row(id) else { continue };
        let tail = dtable_vd.get_mut(row * dim..).unwrap_or_default();
        for (dtable, dy) in tail.iter_mut().zip(dy) {
            *dtable += dy.to_acc();
        }
    }
}

impl Embedding for Cpu {
    fn embedding<E: Float>(
        &self,
        spec: &EmbeddingSpec,
        ids_t: &[i32],
        table_vd: &[E],
        y_td: &mut [E],
    ) -> Result<(), Error> {
        let op = "embedding";
        need(op, "ids", spec.tokens, ids_t.len())?;
        need(
            op,
            "table",
            spec.rows.saturating_mul(spec.dim),
            table_vd.len(),
        )?;
        need(op, "y", spec.tokens.saturating_mul(spec.dim), y_td.len())?;
        let rows = rows_per_part(spec.dim);
        let items = ids_t
            .chunks(rows)
            .zip(y_td.chunks_mut(rows * spec.dim.max(1)));
        self.for_each(
            items,
            #[inline(always)]
            |_, (ids, y)| embedding(spec, ids, table_vd, y),
        );
        Ok(())
    }

    fn embedding_backward<E: Float>(
        &self,
        spec: &EmbeddingSpec,
        ids_t: &[i32],
        dy_td: &[E],
        dtable_vd: &mut [E::Acc],
    ) -> Result<(), Error> {
        let op = "embedding_backward";
        need(op, "ids", spec.tokens, ids_t.len())?;
        need(op, "dy", spec.tokens.saturating_mul(spec.dim), dy_td.len())?;
        need(
            op,
            "dtable",
            spec.rows.saturating_mul(spec.dim),
            dtable_vd.len(),
        )?;
        // Few parts: each of them reads every token's id.
        let parts = if dy_td.len() < 2 * rows_per_part(1) {
            1
        } else {
            4 * self.threads()
        };
        let rows = spec.rows.div_ceil(parts).max(1);
        let items = dtable_vd.chunks_mut(rows * spec.dim.max(1));
        self.for_each(
            items,
            #[inline(always)]
            |i, dtable| {
                let part = EmbeddingSpec {
                    first: spec.first + i * rows,
                    rows: rows.min(spec.rows - i * rows),
                    ..*spec
                };
                embedding_backward(&part, ids_t, dy_td, dtable);
            },
        );
        Ok(())
    }
}
