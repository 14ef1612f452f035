//! Softmax attention in blocks (FlashAttention, Dao et al. 2022), with grouped KV heads, masks by
//! explicit positions and documents, and the log-sum-exp of each row as a second output.
//!
//! ```text
//! q_bshd  o_bshd      b sequences of s queries, h heads of d      (token-major, as a linear
//! k_bzgd  v_bzgd      b sequences of z keys,    g KV heads of d    layer leaves them)
//! lse_bhs delta_bhs   one number per query and head, in Acc
//! head i reads KV head i / (h / g)
//! key z is visible to query s iff they are of one document, pos[z] <= pos[s] (causal) and
//! pos[s] - pos[z] < window
//! ```
//!
//! Backward needs no score matrix: P is recomputed from q, k and lse, and
//! `delta = rowsum(do * o)` carries the softmax's own derivative. A query that sees no key has
//! output 0, lse minus infinity and gradient 0. KV blocks begin at multiples of the block length
//! in the KV index, so that a row's bits do not depend on the other rows.
//!
//! **Keys in pieces** (ring attention, Liu et al. 2023): [`Attention::attention_step`] is the same
//! kernel, going on from what earlier pieces left in a [`Carry`]. Nothing is normalised or rounded
//! between pieces, so pieces that are cut at block boundaries and come in order give the bits of
//! one call, and the error does not grow with their number. Backward by pieces adds into gradients
//! in Acc, from the lse and delta of the whole row.
//!
//! **Dropout** lets probabilities go after the softmax: `o = (P mask) (v / (1 - share))`, so that lse is
//! what it was, and `delta` still carries the softmax's derivative. What stays is a function of the
//! head and of the places of query and key in their sample ([`crate::dropout`]), drawn by the kernel.

mod cpu;
pub mod naive;

use crate::dropout::Dropout;
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
    /// Hide keys that stand this far before the query or farther; at least 1.
    pub window: Option<usize>,
    /// Scores, once scaled, become `cap tanh(score / cap)` (Gemma 2, Gemma Team 2024); above 0.
    pub softcap: Option<f64>,
    /// Let probabilities go.
    pub dropout: Option<HeadDropout>,
}

/// Dropout of probabilities.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct HeadDropout {
    /// What is let go.
    pub dropout: Dropout,
    /// Number in the model of the first query head of the call.
    pub first_head: usize,
}

/// Where queries and keys stand: what decides who sees whom.
#[derive(Debug, Clone, Copy)]
pub struct Places<R> {
    /// Positions of the queries, `[b, s]`.
    pub q_pos: R,
    /// Positions of the keys, `[b, z]`.
    pub k_pos: R,
    /// Documents of the queries and of the keys, shaped as the positions; `None` where a sequence
    /// is one document.
    pub documents: Option<(R, R)>,
    /// Places of queries and keys in their samples, shaped as the positions, for dropout; `None`
    /// where the positions are that.
    pub at: Option<(R, R)>,
}

impl<R> From<(R, R)> for Places<R> {
    /// Positions of queries and keys of one document.
    fn from((q_pos, k_pos): (R, R)) -> Self {
        Self {
            q_pos,
            k_pos,
            documents: None,
            at: None,
        }
    }
}

/// What queries have gathered from earlier pieces of the keys, in Acc. Where `sum` is 0 a query
/// has seen nothing, and what the other two hold for it does not matter: a carry begins as zeros
/// in `sum` alone.
#[derive(Debug, Clone, Copy)]
pub struct Carry<V> {
    /// Values, each times `exp(score - max)`, summed: `[b, s, h, d]`.
    pub o_bshd: V,
    /// The largest score: `[b, h, s]`.
    pub max_bhs: V,
    /// The sum of `exp(score - max)`: `[b, h, s]`.
    pub sum_bhs: V,
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
        if self.window == Some(0) {
            let why = "a window of 0 hides every key; the least is 1";
            return Err(Error::Spec { op, why });
        }
        if self
            .softcap
            .is_some_and(|cap| !(cap > 0.0 && cap.is_finite()))
        {
            let why = "a cap of scores must be a number above 0";
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

    /// [`AttentionSpec::lens`], compared with those of q, k, v and the places.
    pub(crate) fn check(
        &self,
        op: &'static str,
        qkv: [usize; 3],
        places: Places<usize>,
    ) -> Result<Lens, Error> {
        let lens = self.lens(op)?;
        need(op, "q", lens.q, qkv[0])?;
        need(op, "k", lens.kv, qkv[1])?;
        need(op, "v", lens.kv, qkv[2])?;
        need(op, "q_pos", lens.q_pos, places.q_pos)?;
        need(op, "k_pos", lens.k_pos, places.k_pos)?;
        if let Some((q_doc, k_doc)) = places.documents {
            need(op, "the queries' documents", lens.q_pos, q_doc)?;
            need(op, "the keys' documents", lens.k_pos, k_doc)?;
        }
        if let Some((q_at, k_at)) = places.at {
            need(op, "the queries' places", lens.q_pos, q_at)?;
            need(op, "the keys' places", lens.k_pos, k_at)?;
        }
        Ok(lens)
    }
}

/// Attention on a device.
pub trait Attention: Backend {
    /// `o, lse <- softmax(scale q k^T + mask) v`.
    ///
    /// # Errors
    /// [`Error::Len`] or [`Error::Spec`] where arguments do not fit.
    fn attention<E: Float>(
        &self,
        spec: &AttentionSpec,
        qkv: (Self::Ref<'_, E>, Self::Ref<'_, E>, Self::Ref<'_, E>),
        places: Places<Self::Ref<'_, i32>>,
        o_bshd: Self::Mut<'_, E>,
        lse_bhs: Self::Mut<'_, E::Acc>,
    ) -> Result<(), Error>;

    /// Lets the queries see one piece of their keys after the pieces that `carry` holds.
    ///
    /// # Errors
    /// As [`Attention::attention`].
    fn attention_step<E: Float>(
        &self,
        spec: &AttentionSpec,
        qkv: (Self::Ref<'_, E>, Self::Ref<'_, E>, Self::Ref<'_, E>),
        places: Places<Self::Ref<'_, i32>>,
        carry: Carry<Self::Mut<'_, E::Acc>>,
    ) -> Result<(), Error>;

    /// `o, lse` of all pieces in `carry`. Of `spec` the keys do not matter.
    ///
    /// # Errors
    /// As [`Attention::attention`].
    fn attention_finish<E: Float>(
        &self,
        spec: &AttentionSpec,
        carry: Carry<Self::Ref<'_, E::Acc>>,
        o_bshd: Self::Mut<'_, E>,
        lse_bhs: Self::Mut<'_, E::Acc>,
    ) -> Result<(), Error>;

    /// `delta[b,h,s] <- sum_d do[b,s,h,d] o[b,s,h,d]`, taken in the order in which backward takes
    /// `do v^T`: of a query that sees one key, whose o is that key's v, both have the same bits,
    /// and the gradient of its score is exactly 0.
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
        places: Places<Self::Ref<'_, i32>>,
        do_bshd: Self::Ref<'_, E>,
        lse_delta: (Self::Ref<'_, E::Acc>, Self::Ref<'_, E::Acc>),
        dqkv: (Self::Mut<'_, E>, Self::Mut<'_, E>, Self::Mut<'_, E>),
    ) -> Result<(), Error>;

    /// The same for one piece of the keys, added in Acc to what is there.
    ///
    /// # Errors
    /// As [`Attention::attention_backward`].
    fn attention_backward_step<E: Float>(
        &self,
        spec: &AttentionSpec,
        qkv: (Self::Ref<'_, E>, Self::Ref<'_, E>, Self::Ref<'_, E>),
        places: Places<Self::Ref<'_, i32>>,
        do_bshd: Self::Ref<'_, E>,
        lse_delta: (Self::Ref<'_, E::Acc>, Self::Ref<'_, E::Acc>),
        dqkv: (
            Self::Mut<'_, E::Acc>,
            Self::Mut<'_, E::Acc>,
            Self::Mut<'_, E::Acc>,
        ),
    ) -> Result<(), Error>;
}
