//! Table lookup and its adjoint, for a shard of the vocabulary.
//!
//! The shard holds rows `first .. first + rows` of the table. A token outside it reads as zeros:
//! summed over the shards (a `Partial`), each token is found exactly once.

pub mod cpu;
pub mod naive;

use crate::{Backend, Error, Float};

/// The part of the table that is here.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct EmbeddingSpec {
    /// Tokens in the call.
    pub tokens: usize,
    /// First vocabulary entry of the shard.
    pub first: usize,
    /// Entries in the shard; may be none.
    pub rows: usize,
    /// Width of an entry.
    pub dim: usize,
}

impl EmbeddingSpec {
    /// The row of the shard that holds token `id`, if it is here.
    #[must_use]
    pub fn row(&self, id: i32) -> Option<usize> {
        let row = usize::try_from(id).ok()?.checked_sub(self.first)?;
        (row < self.rows).then_some(row)
    }
}

/// Embedding on a device.
pub trait Embedding: Backend {
    /// `y[t] = table[id[t] - first]`, or zeros where the token is not in the shard.
    ///
    /// # Errors
    /// [`Error::Len`] where a length does not fit.
    fn embedding<E: Float>(
        &self,
        spec: &EmbeddingSpec,
        ids_t: Self::Ref<'_, i32>,
        table_vd: Self::Ref<'_, E>,
        y_td: Self::Mut<'_, E>,
    ) -> Result<(), Error>;

    /// `dtable[id[t] - first] += dy[t]` in token order.
    ///
    /// # Errors
    /// [`Error::Len`] where a length does not fit.
    fn embedding_backward<E: Float>(
        &self,
        spec: &EmbeddingSpec,
        ids_t: Self::Ref<'_, i32>,
        dy_td: Self::Ref<'_, E>,
        dtable_vd: Self::Mut<'_, E::Acc>,
    ) -> Result<(), Error>;
}
