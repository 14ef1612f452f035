//! Softmax attention in blocks (FlashAttention, Dao et al. 2022), with grouped KV heads, causal
//! masking by explicit positions, and the log-sum-exp of each row as a second output.
//!
//! ```text
//! q_bshd  o_bshd      b sequences of s queries, h heads of d      (token-major, as a linear
//! k_bzgd  v_bzgd      b sequences of z keys,    g KV heads of d    layer leaves them)
//! lse_bhs delta_bhs   one number per query and head, in Acc
//! head i reads KV head i / (h / g);  key z is visible to query s iff pos[z] <= pos[s]
//! ```
//!
//! Backward needs no score matrix: P is recomputed from q, k and lse, and
//! `delta = rowsum(do * o)` carries the softmax's own derivative. A query that sees no key has
//! output 0, lse minus infinity and gradient 0. KV blocks begin at multiples of the block length
//! in the KV index, so that a row's bits do not depend on the other rows.

mod cpu;
pub mod naive;

use crate::error::need;
use crate::{Backend, Error, Float};

/// Shape of one attention call.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AttentionSpec {
    /// Sequences.
    pub batch: usize,
    /// Queries per sequence.
    pub queries: usize,
    /// Keys per sequence.
    pub keys: usize,
    /// Query heads; a multiple of `kv_heads`.
    pub heads: usize,
    /// Key and value heads.
    pub kv_heads: usize,
    /// Width of a head.
    pub head_dim: usize,
    /// Factor on the scores, usually 1 / sqrt(head_dim).
    pub scale: f64,
    /// Hide keys whose position is above the query's.
    pub causal: bool,
}

/// Elements of each argument.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Lens {
    pub(crate) q: usize,
    pub(crate) kv: usize,
    pub(crate) lse: usize,
    pub(crate) q_pos: usize,
    pub(crate) k_pos: usize,
}

impl AttentionSpec {
    /// The lengths that arguments must have; refuses a spec without meaning.
    pub(crate) fn lens(&self, op: &'static str) -> Result<Lens, Error> {
        if self.kv_heads == 0 || !self.heads.is_multiple_of(self.kv_heads) {
            let why = "heads must be a multiple of kv_heads, and kv_heads at least 1";
            return Err(Error::Spec { op, why });
        }
        if self.head_dim == 0 {
            let why = "head_dim must be at least 1";
            return Err(Error::Spec { op, why });
        }
        let product = |factors: &[usize]| {
            let why = "the shape describes arrays longer than memory";
            factors
                .iter()
                .try_fold(1_usize, |len, &f| len.checked_mul(f))
                .ok_or(Error::Spec { op, why })
        };
        Ok(Lens {
            q: product(&[self.batch, self.queries, self.heads, self.head_dim])?,
            kv: product(&[self.batch, self.keys, self.kv_heads, self.head_dim])?,
            lse: product(&[self.batch, self.heads, self.queries])?,
            q_pos: product(&[self.batch, self.queries])?,
            k_pos: product(&[self.batch, self.keys])?,
        })
    }

    /// [`AttentionSpec::lens`], compared with those of q, k, v and the positions.
    pub(crate) fn check(
        &self,
        op: &'static str,
        qkv: [usize; 3],
        pos: [usize; 2],
    ) -> Result<Lens, Error> {
        let lens = self.lens(op)?;
        need(op, "q", lens.q, qkv[0])?;
        need(op, "k", lens.kv, qkv[1])?;
        need(op, "v", lens.kv, qkv[2])?;
        need(op, "q_pos", lens.q_pos, pos[0])?;
        need(op, "k_pos", lens.k_pos, pos[1])?;
        Ok(lens)
    }
}

/// Attention on a device. Positions: `q_pos[b, s]`, `k_pos[b, z]`.
pub trait Attention: Backend {
    /// `o, lse <- softmax(scale q k^T + mask) v`.
    ///
    /// # Errors
    /// [`Error::Len`] or [`Error::Spec`] where arguments do not fit.
    fn attention<E: Float>(
        &self,
        spec: &AttentionSpec,
        qkv: (Self::Ref<'_, E>, Self::Ref<'_, E>, Self::Ref<'_, E>),
        pos: (Self::Ref<'_, i32>, Self::Ref<'_, i32>),
        o_bshd: Self::Mut<'_, E>,
        lse_bhs: Self::Mut<'_, E::Acc>,
    ) -> Result<(), Error>;

    /// `delta[b,h,s] <- sum_d do[b,s,h,d] o[b,s,h,d]`.
    ///
    /// # Errors
    /// [`Error::Len`] where a length does not fit.
    fn attention_delta<E: Float>(
        &self,
        spec: &AttentionSpec,
        do_bshd: Self::Ref<'_, E>,
        o_bshd: Self::Ref<'_, E>,
        delta_bhs: Self::Mut<'_, E::Acc>,
    ) -> Result<(), Error>;

    /// Gradients of q, k, v (overwritten), from the global `lse` and `delta` of each row.
    ///
    /// # Errors
    /// [`Error::Len`] or [`Error::Spec`] where arguments do not fit.
    fn attention_backward<E: Float>(
        &self,
        spec: &AttentionSpec,
        qkv: (Self::Ref<'_, E>, Self::Ref<'_, E>, Self::Ref<'_, E>),
        pos: (Self::Ref<'_, i32>, Self::Ref<'_, i32>),
        do_bshd: Self::Ref<'_, E>,
        lse_delta: (Self::Ref<'_, E::Acc>, Self::Ref<'_, E::Acc>),
        dqkv: (Self::Mut<'_, E>, Self::Mut<'_, E>, Self::Mut<'_, E>),
    ) -> Result<(), Error>;
}
