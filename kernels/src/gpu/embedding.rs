//! Table lookup: cuda/embedding.cu.

use alloc::format;

use super::{Gpu, GpuMut, GpuRef, THREADS, len, packed, suffix};
use crate::error::need;
use crate::launch::{Arg, Launch};
use crate::{Embedding, EmbeddingSpec, Error, Float};

impl<L: Launch> Embedding for Gpu<L> {
    fn embedding<E: Float>(
        &self,
        spec: &EmbeddingSpec,
        ids_t: GpuRef<'_, L, i32>,
        table_vd: GpuRef<'_, L, E>,
        y_td: GpuMut<'_, L, E>,
    ) -> Result<(), Error> {
        let op = "embedding";
        check(
            op,
            spec,
            ids_t.len,
            ("table", table_vd.len),
            ("y", y_td.len),
        )?;
        let (function, _) = packed::<E>(op, op, &[table_vd.ptr, y_td.ptr], spec.dim)?;
        let args = [
            Arg::Ptr(ids_t.ptr),
            Arg::Ptr(table_vd.ptr),
            Arg::Ptr(y_td.ptr),
            len(spec.first),
            len(spec.rows),
            len(spec.dim),
        ];
        let tokens = spec.tokens as u64;
        self.launch((op, &function), tokens, [THREADS, 1, 1], &args)
    }

    fn embedding_backward<E: Float>(
        &self,
        spec: &EmbeddingSpec,
        ids_t: GpuRef<'_, L, i32>,
        dy_td: GpuRef<'_, L, E>,
        dtable_vd: GpuMut<'_, L, E::Acc>,
    ) -> Result<(), Error> {
        let op = "embedding_backward";
        check(
            op,
            spec,
            ids_t.len,
            ("dtable", dtable_vd.len),
            ("dy", dy_td.len),
        )?;
        let function = format!("embedding_backward_{}", suffix::<E>(op)?);
        let args = [
            Arg::Ptr(ids_t.ptr),
            Arg::Ptr(dy_td.ptr),
            Arg::Ptr(dtable_vd.ptr),
            len(spec.tokens),
            len(spec.first),
            len(spec.rows),
            len(spec.dim),
        ];
        let tokens = spec.tokens as u64;
        self.launch(("embedding", &function), tokens, [THREADS, 1, 1], &args)
    }
}

fn check(
    op: &'static str,
    spec: &EmbeddingSpec,
    ids: usize,
    (table_name, table): (&'static str, usize),
    (rows_name, rows): (&'static str, usize),
) -> Result<(), Error> {
    need(op, "ids", spec.tokens, ids)?;
    need(op, table_name, spec.rows.saturating_mul(spec.dim), table)?;
    need(op, rows_name, spec.tokens.saturating_mul(spec.dim), rows)
}
