//! Self-attention with its heads cut over tp: one tensor parallel region.
//!
//! ```text
//! x outside --enter--> Replicate --q,k,v--> Shard(head) --rope--> softmax(q k^T) v --> Shard(head)
//!                                                                 over cp: see [`crate::context`]
//!                                            --o_proj--> Partial --leave--> y outside
//! outside: Invariant, or Shard(t) under sequence parallelism
//! ```
//!
//! A rank holds consecutive query heads and the KV heads they read. With fewer KV heads than
//! ranks, tp = kv x rep: rep neighbours hold the same KV head, each uses it for query heads of
//! its own, and so the gradients of its projections are Partial over rep:
//!
//! ```text
//! 8 query heads, 2 KV heads, tp 4     rank 0: q 0 1, kv 0    rank 2: q 4 5, kv 1
//!                                     rank 1: q 2 3, kv 0    rank 3: q 6 7, kv 1
//! ```

use alloc::vec::Vec;

use quintet_collectives::{Axis, DeviceMesh, ParamSpec};
use quintet_kernels::{
    Attention, AttentionSpec, Collectives, Gemm, Pointwise, Rope, RopeSpec, Scalar, Tag,
};

use crate::block::BlockSpec;
use crate::context::{self, ContextSaved, Gradients};
use crate::linear::{ColumnParallelLinear, RowBackward, RowParallelLinear};
use crate::region::{Region, apply};
use crate::spec::join;
use crate::{Ctx, Error, MicroBatch};

/// Causal self-attention with rotary positions and grouped KV heads.
#[derive(Debug, Clone)]
pub struct SelfAttention {
    q: ColumnParallelLinear,
    k: ColumnParallelLinear,
    v: ColumnParallelLinear,
    o: RowParallelLinear,
    region: Region,
    hidden: usize,
    head_dim: usize,
    theta: f64,
    window: Option<usize>,
}

/// What forward saves. All but x is cut by heads.
#[derive(Debug)]
pub struct AttentionForward<Buf, Stat> {
    /// The input, whole.
    x: Buf,
    /// Output of the softmax.
    o: Buf,
    /// What the softmax's own backward needs.
    inner: ContextSaved<Buf, Stat>,
}

/// What the weights' gradients need.
#[derive(Debug)]
pub struct AttentionWeight<Buf> {
    x: Buf,
    o: Buf,
    dq: Buf,
    dk: Buf,
    dv: Buf,
    /// `None` where it is the gradient that came in.
    dy_whole: Option<Buf>,
}

impl SelfAttention {
    /// The attention of a block; parameters begin with `name`.
    ///
    /// # Errors
    /// [`Error::Layout`] where tp does not divide the heads, or neither of tp and the KV heads
    /// divides the other.
    pub fn new(mesh: &DeviceMesh, name: &str, spec: &BlockSpec) -> Result<Self, Error> {
        let tp = mesh.degree(Axis::Tp);
        let (heads, kv) = (spec.heads, spec.kv_heads);
        if kv == 0 || !heads.is_multiple_of(kv) {
            return Err(Error::Layout(alloc::format!(
                "{kv} KV heads do not divide {heads} heads"
            )));
        }
        if !heads.is_multiple_of(tp) {
            return Err(Error::Layout(alloc::format!(
                "tp={tp} does not divide {heads} heads"
            )));
        }
        if !kv.is_multiple_of(tp) && !tp.is_multiple_of(kv) {
            return Err(Error::Layout(alloc::format!(
                "tp={tp} and {kv} KV heads: one must divide the other"
            )));
        }
        let (d, e) = (spec.hidden, spec.head_dim);
        let column = |part: &str, heads: usize| {
            ColumnParallelLinear::new(mesh, &join(name, part), heads * e, d).units(e)
        };
        let region = Region::new(spec.sequence_parallel)?;
        Ok(Self {
            q: column("q_proj", heads),
            k: column("k_proj", kv).parts(kv.min(tp))?,
            v: column("v_proj", kv).parts(kv.min(tp))?,
            o: RowParallelLinear::new(mesh, &join(name, "o_proj"), d, heads * e, region)
                .units(e)
                .into_residual(spec.layers),
            region,
            hidden: d,
            head_dim: e,
            theta: spec.theta,
            window: spec.window,
        })
    }

    /// q, k, v and o.
    #[must_use]
    pub fn params(&self) -> Vec<ParamSpec> {
        [self.q.params(), self.k.params(), self.v.params()]
            .into_iter()
            .chain([self.o.params()])
            .flatten()
            .collect()
    }

    fn heads(&self, rank: usize) -> (usize, usize) {
        let heads = |cut: &ColumnParallelLinear| cut.local(rank).len() / self.head_dim;
        (heads(&self.q), heads(&self.k))
    }

    fn spec<B: Attention, E: Scalar>(
        &self,
        batch: &MicroBatch<B, E>,
        (heads, kv_heads): (usize, usize),
    ) -> AttentionSpec {
        AttentionSpec {
            batch: batch.sequences,
            queries: batch.positions,
            keys: batch.positions,
            heads,
            kv_heads,
            head_dim: self.head_dim,
            scale: 1.0 / libm::sqrt(self.head_dim as f64),
            causal: true,
            window: self.window,
        }
    }

    /// Turns queries and keys by their positions, or back.
    fn turn<B: Rope, E: Scalar>(
        &self,
        device: &B,
        batch: &MicroBatch<B, E>,
        (heads, kv_heads): (usize, usize),
        (q, k): (&mut B::Buf<E>, &mut B::Buf<E>),
        inverse: bool,
    ) -> Result<(), Error> {
        for (heads, x) in [(heads, q), (kv_heads, k)] {
            let spec = RopeSpec {
                rows: batch.tokens(),
                heads,
                head_dim: self.head_dim,
                theta: self.theta,
                inverse,
            };
            device.rope::<E>(&spec, B::whole(&batch.pos_t), B::whole_mut(x))?;
        }
        Ok(())
    }

    /// y outside from x outside, both `[t, d]`; the weights are q, k, v, o.
    ///
    /// # Errors
    /// What a kernel or a collective refuses or fails with.
    pub fn forward<B: Gemm + Rope + Attention + Pointwise, C: Collectives<B>, E: Scalar>(
        &self,
        ctx: &Ctx<'_, B, C>,
        batch: &MicroBatch<B, E>,
        [wq, wk, wv, wo]: [B::Ref<'_, E>; 4],
        x_td: B::Buf<E>,
    ) -> Result<(B::Buf<E>, AttentionForward<B::Buf<E>, B::Buf<E::Acc>>), Error> {
        let (t, heads) = (batch.tokens(), self.heads(ctx.tp.rank()));
        let x = apply(ctx, self.region.enter(), x_td, t, self.hidden)?;
        let mut q = self.q.forward(ctx, t, wq, None, B::whole(&x))?;
        let mut k = self.k.forward(ctx, t, wk, None, B::whole(&x))?;
        let v = self.v.forward(ctx, t, wv, None, B::whole(&x))?;
        self.turn(ctx.device, batch, heads, (&mut q, &mut k), false)?;
        let (o, inner) = context::forward(ctx, batch, &self.spec(batch, heads), [q, k, v])?;
        let y = self.o.forward(ctx, t, wo, None, B::whole(&o))?;
        let saved = AttentionForward { x, o, inner };
        Ok((y, saved))
    }

    /// dx outside from dy outside.
    ///
    /// # Errors
    /// As [`SelfAttention::forward`].
    pub fn backward_input<B: Gemm + Rope + Attention + Pointwise, C: Collectives<B>, E: Scalar>(
        &self,
        ctx: &Ctx<'_, B, C>,
        batch: &MicroBatch<B, E>,
        [wq, wk, wv, wo]: [B::Ref<'_, E>; 4],
        saved: AttentionForward<B::Buf<E>, B::Buf<E::Acc>>,
        dy_td: &B::Buf<E>,
    ) -> Result<(B::Buf<E>, AttentionWeight<B::Buf<E>>), Error> {
        let (t, heads) = (batch.tokens(), self.heads(ctx.tp.rank()));
        let dev = ctx.device;
        let AttentionForward { x, o, inner } = saved;
        let back = self.o.backward_input(ctx, t, wo, dy_td)?;
        let RowBackward { dy_whole, dx: d_o } = back;
        let spec = self.spec(batch, heads);
        let Gradients { mut dq, mut dk, dv } =
            context::backward(ctx, batch, &spec, inner, &o, d_o)?;
        self.turn(dev, batch, heads, (&mut dq, &mut dk), true)?;
        let mut dx = dev.alloc(Tag::Activation, t * self.hidden)?;
        for (i, (layer, w, dy)) in [(&self.q, wq, &dq), (&self.k, wk, &dk), (&self.v, wv, &dv)]
            .into_iter()
            .enumerate()
        {
            layer.backward_input(ctx, t, w, B::whole(dy), B::whole_mut(&mut dx), i > 0)?;
        }
        let dx = apply(ctx, self.region.enter().backward()?, dx, t, self.hidden)?;
        let saved = AttentionWeight {
            x,
            o,
            dq,
            dk,
            dv,
            dy_whole,
        };
        Ok((dx, saved))
    }

    /// Adds to the gradients of q, k, v, o; `dy_td` is what backward_input was given.
    ///
    /// # Errors
    /// As [`SelfAttention::forward`].
    pub fn backward_weight<B: Gemm + Pointwise, C: Collectives<B>, E: Scalar>(
        &self,
        ctx: &Ctx<'_, B, C>,
        batch: &MicroBatch<B, E>,
        saved: AttentionWeight<B::Buf<E>>,
        dy_td: &B::Buf<E>,
        [gq, gk, gv, go]: [B::Mut<'_, E::Acc>; 4],
    ) -> Result<(), Error> {
        let t = batch.tokens();
        let x = B::whole(&saved.x);
        let dy = B::whole(saved.dy_whole.as_ref().unwrap_or(dy_td));
        self.o
            .backward_weight::<B, C, E>(ctx, t, B::whole(&saved.o), dy, go, None)?;
        self.q
            .backward_weight::<B, C, E>(ctx, t, x, B::whole(&saved.dq), gq, None)?;
        self.k
            .backward_weight::<B, C, E>(ctx, t, x, B::whole(&saved.dk), gk, None)?;
        self.v
            .backward_weight::<B, C, E>(ctx, t, x, B::whole(&saved.dv), gv, None)
    }
}
