//! Self-attention with its heads cut over tp: one tensor parallel region.
//!
//! ```text
//! x outside --enter--> Replicate --q,k,v--> Shard(head) --(norm) rope--> softmax(q k^T) v --> Shard(head)
//!                                                                        over cp: see [`crate::context`]
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

use quintet_collectives::{Axis, DeviceMesh, ParamSpec, Placement};
use quintet_kernels::{
    Attention, AttentionSpec, Backend, Collectives, Float, Gemm, HeadDropout, Norm, Pointwise,
    Rope, RopeSpec, Scalar, Tag,
};

use crate::block::BlockSpec;
use crate::context::{self, ContextSaved, Gradients};
use crate::dropout::{DropoutAt, Site};
use crate::linear::{ColumnParallelLinear, RowBackward, RowParallelLinear};
use crate::norm::{NormKind, Normed, RowNorm, RowStats};
use crate::recompute::Remade;
use crate::region::{Region, apply};
use crate::saved::{runs, runs_mut, weight_bias, weight_bias_mut};
use crate::spec::join;
use crate::{Ctx, Error, MicroBatch};

const NAME: &str = "attention";

/// Causal self-attention with grouped KV heads.
#[derive(Debug, Clone)]
pub struct SelfAttention {
    q: ColumnParallelLinear,
    k: ColumnParallelLinear,
    v: ColumnParallelLinear,
    o: RowParallelLinear,
    /// Of queries and of keys, per head, before they turn.
    qk_norms: Option<[RowNorm; 2]>,
    region: Region,
    hidden: usize,
    head_dim: usize,
    /// Elements of a head that turn.
    rotary: usize,
    theta: f64,
    window: Option<usize>,
    softcap: Option<f64>,
    /// Of the probabilities.
    dropout: DropoutAt,
    /// Parameters of q, k, v, o and of the norms of queries and keys.
    counts: [usize; 6],
}

/// What forward saves. All but x is cut by heads.
#[derive(Debug)]
pub struct AttentionForward<Buf, Stat> {
    /// The input, as it lies outside.
    x: Remade<Buf>,
    /// Output of the softmax.
    o: Buf,
    /// What the softmax's own backward needs.
    inner: ContextSaved<Buf, Stat>,
    /// Queries and keys before their norms, if they have any.
    before: Option<[BeforeNorm<Buf, Stat>; 2]>,
}

impl<Buf, Stat> AttentionForward<Buf, Stat> {
    /// Lets the input go.
    pub(crate) fn let_go(&mut self) {
        self.x.let_go();
    }

    /// Takes the input again, where it was let go.
    pub(crate) fn remake(&mut self, x: impl FnOnce() -> Result<Buf, Error>) -> Result<(), Error> {
        self.x.remake(x)
    }
}

/// What a norm of queries or keys was given, and the statistics of its rows.
#[derive(Debug)]
struct BeforeNorm<Buf, Stat> {
    x: Buf,
    stats: RowStats<Stat>,
}

/// What the weights' gradients need.
#[derive(Debug)]
pub struct AttentionWeight<Buf, Stat> {
    x: Buf,
    o: Buf,
    dq: Buf,
    dk: Buf,
    dv: Buf,
    /// Of queries and keys: what the norm was given, and the gradient of what it gave.
    normed: Option<[(BeforeNorm<Buf, Stat>, Buf); 2]>,
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
        let architecture = spec.architecture;
        let column = |part: &str, heads: usize| {
            let cut = ColumnParallelLinear::new(mesh, &join(name, part), heads * e, d).units(e);
            if architecture.qkv_bias {
                cut.with_bias()
            } else {
                cut
            }
        };
        let region = Region::new(spec.sequence_parallel)?;
        let mut o = RowParallelLinear::new(mesh, &join(name, "o_proj"), d, heads * e, region)
            .units(e)
            .into_residual(spec.layers);
        if architecture.out_bias {
            o = o.with_bias();
        }
        // Each rank of tp uses them on heads of its own.
        let qk_norm = |part: &str| {
            RowNorm::new(mesh, &join(name, part), NormKind::Rms, e, spec.eps)
                .on_tp(Placement::Replicate)
        };
        let mut attention = Self {
            q: column("q_proj", heads),
            k: column("k_proj", kv).parts(kv.min(tp))?,
            v: column("v_proj", kv).parts(kv.min(tp))?,
            o,
            qk_norms: architecture
                .qk_norm
                .then(|| ["q_norm", "k_norm"].map(qk_norm)),
            region,
            hidden: d,
            head_dim: e,
            rotary: architecture.rotary(e),
            theta: spec.theta,
            window: spec.window,
            softcap: architecture.softcap,
            dropout: DropoutAt::new(0.0, Site::Probabilities(0)),
            counts: [0; 6],
        };
        attention.counts = attention.parts().map(|part| part.len());
        Ok(attention)
    }

    /// Lets go of a share of the probabilities in training.
    #[must_use]
    pub(crate) fn dropping(mut self, dropout: DropoutAt) -> Self {
        self.dropout = dropout;
        self
    }

    /// q, k, v and o, each with its bias if it has one; then the norms of queries and keys.
    #[must_use]
    pub fn params(&self) -> Vec<ParamSpec> {
        self.parts().into_iter().flatten().collect()
    }

    fn parts(&self) -> [Vec<ParamSpec>; 6] {
        let [q, k, v] = [&self.q, &self.k, &self.v].map(ColumnParallelLinear::params);
        let [q_norm, k_norm] = match &self.qk_norms {
            Some(norms) => norms.each_ref().map(RowNorm::params),
            None => [Vec::new(), Vec::new()],
        };
        [q, k, v, self.o.params(), q_norm, k_norm]
    }

    fn heads(&self, rank: usize) -> (usize, usize) {
        let heads = |cut: &ColumnParallelLinear| cut.local(rank).len() / self.head_dim;
        (heads(&self.q), heads(&self.k))
    }

    fn spec<B: Attention, C: Collectives<B>, E: Scalar>(
        &self,
        ctx: &Ctx<'_, B, C>,
        batch: &MicroBatch<B, E>,
    ) -> AttentionSpec {
        let (heads, kv_heads) = self.heads(ctx.tp.rank());
        let first_head = self.q.local(ctx.tp.rank()).start / self.head_dim;
        let dropout = self.dropout.of(batch);
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
            softcap: self.softcap,
            dropout: dropout.map(|dropout| HeadDropout {
                dropout,
                first_head,
            }),
        }
    }

    /// Queries and keys through their norms, if they have any: what the norms were given.
    fn normalise<B: Norm, E: Scalar>(
        &self,
        device: &B,
        tokens: usize,
        (heads, kv_heads): (usize, usize),
        params: [&[B::Ref<'_, E>]; 2],
        (q, k): (&mut B::Buf<E>, &mut B::Buf<E>),
    ) -> Result<Before<B, E>, Error> {
        let Some(norms) = &self.qk_norms else {
            return Ok(None);
        };
        let pass = |norm: &RowNorm, heads: usize, params: &[B::Ref<'_, E>], x: &mut B::Buf<E>| {
            let Normed { y, stats } = norm.forward(device, tokens * heads, params, B::whole(x))?;
            let x = core::mem::replace(x, y);
            Ok::<_, Error>(BeforeNorm { x, stats })
        };
        let before_q = pass(&norms[0], heads, params[0], q)?;
        Ok(Some([before_q, pass(&norms[1], kv_heads, params[1], k)?]))
    }

    /// Gradients of queries and keys back through their norms: `dq` and `dk` become those of
    /// what the norms were given.
    fn normalise_back<B: Norm, E: Scalar>(
        &self,
        device: &B,
        params: [&[B::Ref<'_, E>]; 2],
        before: Before<B, E>,
        (dq, dk): (&mut B::Buf<E>, &mut B::Buf<E>),
    ) -> Result<Option<[NormedBack<B, E>; 2]>, Error> {
        let (Some(norms), Some([before_q, before_k])) = (&self.qk_norms, before) else {
            return Ok(None);
        };
        let pass = |norm: &RowNorm,
                    params: &[B::Ref<'_, E>],
                    before: BeforeNorm<B::Buf<E>, B::Buf<E::Acc>>,
                    dy: &mut B::Buf<E>| {
            let rows = B::len(B::whole(dy)) / self.head_dim;
            let input = (B::whole(&before.x), &before.stats);
            let dx = norm.backward_input(device, rows, params, input, B::whole(dy), None)?;
            let dy = core::mem::replace(dy, dx);
            Ok::<_, Error>((before, dy))
        };
        let q = pass(&norms[0], params[0], before_q, dq)?;
        Ok(Some([q, pass(&norms[1], params[1], before_k, dk)?]))
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
        if self.rotary == 0 {
            return Ok(());
        }
        for (heads, x) in [(heads, q), (kv_heads, k)] {
            let spec = RopeSpec {
                rows: batch.tokens(),
                heads,
                head_dim: self.head_dim,
                rotary: self.rotary,
                theta: self.theta,
                inverse,
            };
            device.rope::<E>(&spec, B::whole(&batch.pos_t), B::whole_mut(x))?;
        }
        Ok(())
    }

    /// y outside from x outside, both `[t, d]`; parameters as [`SelfAttention::params`] lists them.
    ///
    /// # Errors
    /// What a kernel or a collective refuses or fails with.
    pub fn forward<B, C: Collectives<B>, E: Scalar>(
        &self,
        ctx: &Ctx<'_, B, C>,
        batch: &MicroBatch<B, E>,
        params: &[B::Ref<'_, E>],
        x_td: B::Buf<E>,
    ) -> Result<(B::Buf<E>, AttentionForward<B::Buf<E>, B::Buf<E::Acc>>), Error>
    where
        B: Gemm + Norm + Rope + Attention + Pointwise,
    {
        let (t, heads) = (batch.tokens(), self.heads(ctx.tp.rank()));
        let [pq, pk, pv, po, norm_q, norm_k] = runs(NAME, params, self.counts)?;
        let whole = self.region.inside(ctx, &x_td, t, self.hidden)?;
        let x = B::whole(whole.as_ref().unwrap_or(&x_td));
        let project = |layer: &ColumnParallelLinear, params: &[B::Ref<'_, E>]| {
            let (w, bias) = weight_bias(NAME, params)?;
            layer.forward(ctx, t, w, bias, x)
        };
        let mut q = project(&self.q, pq)?;
        let mut k = project(&self.k, pk)?;
        let v = project(&self.v, pv)?;
        drop(whole);
        let norms = [norm_q, norm_k];
        let before = self.normalise(ctx.device, t, heads, norms, (&mut q, &mut k))?;
        self.turn(ctx.device, batch, heads, (&mut q, &mut k), false)?;
        let (o, inner) = context::forward(ctx, batch, &self.spec(ctx, batch), [q, k, v])?;
        let (wo, bias) = weight_bias(NAME, po)?;
        let y = self.o.forward(ctx, t, wo, bias, B::whole(&o))?;
        let saved = AttentionForward {
            x: Remade::Here(x_td),
            o,
            inner,
            before,
        };
        Ok((y, saved))
    }

    /// dx outside from dy outside.
    ///
    /// # Errors
    /// As [`SelfAttention::forward`].
    pub fn backward_input<B, C: Collectives<B>, E: Scalar>(
        &self,
        ctx: &Ctx<'_, B, C>,
        batch: &MicroBatch<B, E>,
        params: &[B::Ref<'_, E>],
        saved: AttentionForward<B::Buf<E>, B::Buf<E::Acc>>,
        dy_td: &B::Buf<E>,
    ) -> Result<(B::Buf<E>, AttentionWeight<B::Buf<E>, B::Buf<E::Acc>>), Error>
    where
        B: Gemm + Norm + Rope + Attention + Pointwise,
    {
        let (t, heads) = (batch.tokens(), self.heads(ctx.tp.rank()));
        let dev = ctx.device;
        let [pq, pk, pv, po, norm_q, norm_k] = runs(NAME, params, self.counts)?;
        let AttentionForward {
            x,
            o,
            inner,
            before,
        } = saved;
        let x = x.made(NAME)?;
        let (wo, _) = weight_bias(NAME, po)?;
        let back = self.o.backward_input(ctx, t, wo, dy_td)?;
        let RowBackward { dy_whole, dx: d_o } = back;
        let spec = self.spec(ctx, batch);
        let Gradients { mut dq, mut dk, dv } =
            context::backward(ctx, batch, &spec, inner, &o, d_o)?;
        self.turn(dev, batch, heads, (&mut dq, &mut dk), true)?;
        let norms = [norm_q, norm_k];
        let normed = self.normalise_back(dev, norms, before, (&mut dq, &mut dk))?;
        let mut dx = dev.alloc(Tag::Activation, t * self.hidden)?;
        for (i, (layer, params, dy)) in [(&self.q, pq, &dq), (&self.k, pk, &dk), (&self.v, pv, &dv)]
            .into_iter()
            .enumerate()
        {
            let (w, _) = weight_bias(NAME, params)?;
            layer.backward_input(ctx, t, w, B::whole(dy), B::whole_mut(&mut dx), i > 0)?;
        }
        let dx = apply(ctx, self.region.enter().backward()?, dx, t, self.hidden)?;
        let saved = AttentionWeight {
            x,
            o,
            dq,
            dk,
            dv,
            normed,
            dy_whole,
        };
        Ok((dx, saved))
    }

    /// Adds to the gradients of q, k, v, o; `dy_td` is what backward_input was given.
    ///
    /// # Errors
    /// As [`SelfAttention::forward`].
    pub fn backward_weight<B: Gemm + Norm + Pointwise, C: Collectives<B>, E: Scalar>(
        &self,
        ctx: &Ctx<'_, B, C>,
        batch: &MicroBatch<B, E>,
        saved: AttentionWeight<B::Buf<E>, B::Buf<E::Acc>>,
        dy_td: &B::Buf<E>,
        grads: &mut [B::Mut<'_, E::Acc>],
    ) -> Result<(), Error> {
        let t = batch.tokens();
        let [gq, gk, gv, go, norm_q, norm_k] = runs_mut(NAME, grads, self.counts)?;
        let (o, dy) = (B::whole(&saved.o), B::whole(dy_td));
        let dy_whole = B::whole(saved.dy_whole.as_ref().unwrap_or(dy_td));
        let (go, bias) = weight_bias_mut::<B, E::Acc>(NAME, go)?;
        let bias = bias.map(|bias| (dy, bias));
        self.o
            .backward_weight::<B, C, E>(ctx, t, o, dy_whole, go, bias)?;
        let whole = self.region.inside(ctx, &saved.x, t, self.hidden)?;
        let x = B::whole(whole.as_ref().unwrap_or(&saved.x));
        for (layer, grads, dy) in [
            (&self.q, gq, &saved.dq),
            (&self.k, gk, &saved.dk),
            (&self.v, gv, &saved.dv),
        ] {
            let (dw, db) = weight_bias_mut::<B, E::Acc>(NAME, grads)?;
            layer.backward_weight::<B, C, E>(ctx, t, x, B::whole(dy), dw, db)?;
        }
        if let (Some(norms), Some(normed)) = (&self.qk_norms, &saved.normed) {
            for ((norm, (before, dy)), grads) in norms.iter().zip(normed).zip([norm_q, norm_k]) {
                let rows = B::len(B::whole(dy)) / self.head_dim;
                let input = (B::whole(&before.x), &before.stats);
                norm.backward_weight::<B, E>(ctx.device, rows, input, B::whole(dy), grads)?;
            }
        }
        Ok(())
    }
}

/// What the norms of queries and keys were given.
type Before<B, E> = Option<[BeforeNorm<Buf<B, E>, Buf<B, <E as Float>::Acc>>; 2]>;

/// The same of one of them, and the gradient of what it gave.
type NormedBack<B, E> = (BeforeNorm<Buf<B, E>, Buf<B, <E as Float>::Acc>>, Buf<B, E>);

type Buf<B, T> = <B as Backend>::Buf<T>;
