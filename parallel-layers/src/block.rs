//! A decoder block: two regions, each behind a norm and beside a residual. Which norm and which
//! MLP, the [`Architecture`] says.
//!
//! ```text
//! x ----+-- norm -- attention --(+)-- h --+-- norm -- mlp --(+)-- y
//!       |                        |        |                  |
//!       +------------------------+        +------------------+
//!
//! x, h, y and the norms' outputs: Invariant, or Shard(t) under sequence parallelism
//! ```
//!
//! The first sum and the second norm are one kernel; in backward the gradient that passes beside
//! a region is taken up by the norm before it.

use alloc::format;
use alloc::string::String;
use alloc::vec::Vec;

use quintet_collectives::{DeviceMesh, ParamSpec};
use quintet_kernels::{
    Attention, Collectives, Gemm, GroupedGemm, Norm, Permute, Pointwise, Rope, Router, Scalar,
};

use crate::architecture::Architecture;
use crate::attention::{AttentionForward, AttentionWeight, SelfAttention};
use crate::dropout::{DropoutAt, Site};
use crate::ffn::{Ffn, FfnForward, FfnWeight};
use crate::moe::{MoeSpec, Routing};
use crate::norm::{Normed, RowNorm, RowStats};
use crate::recompute::{Recompute, Remade};
use crate::region::Region;
use crate::saved::{Saved, runs, runs_mut};
use crate::{Ctx, Error, Layer, MicroBatch};

const NAME: &str = "block";

/// Shape of a block.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct BlockSpec {
    /// Width of the residual stream.
    pub hidden: usize,
    /// Query heads; tp divides them.
    pub heads: usize,
    /// Key and value heads; divides `heads`, and of it and tp one divides the other.
    pub kv_heads: usize,
    /// Width of a head; even.
    pub head_dim: usize,
    /// Width of the MLP.
    pub ffn: usize,
    /// Base of the rotary frequencies.
    pub theta: f64,
    /// Added to the variance in norms.
    pub eps: f64,
    /// Blocks in the whole model, for the scale at which o_proj and down_proj begin.
    pub layers: usize,
    /// Values between layers are Shard(token) over tp instead of Invariant.
    pub sequence_parallel: bool,
    /// A mixture of experts in place of the MLP.
    pub moe: Option<MoeSpec>,
    /// A token sees so many tokens, itself the last of them; all before it where absent.
    pub window: Option<usize>,
    /// Norm, MLP, positions, biases.
    pub architecture: Architecture,
}

/// One decoder block.
///
/// ```
/// use quintet_collectives::{Degrees, DeviceMesh};
/// use quintet_parallel_layers::{Architecture, Block, BlockSpec};
/// let mesh = DeviceMesh::new(Degrees { tp: 4, ..Default::default() })?;
/// let block = Block::new(&mesh, 0, &BlockSpec {
///     hidden: 256,
///     heads: 8,
///     kv_heads: 2,
///     head_dim: 32,
///     ffn: 688,
///     theta: 10_000.0,
///     eps: 1e-5,
///     layers: 4,
///     sequence_parallel: false,
///     moe: None,
///     window: None,
///     architecture: Architecture::LLAMA,
/// })?;
/// let k = &block.params()[2];
/// assert_eq!(k.name, "model.layers.0.self_attn.k_proj.weight");
/// // tp = kv 2 x rep 2: rank 3 holds the second KV head, and sums its gradient with rank 2.
/// assert_eq!(k.local_box(&mesh, 3), [32..64, 0..256]);
/// assert_eq!(mesh.group(3, &k.summed_over()), [2, 3]);
/// # Ok::<(), quintet_parallel_layers::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct Block {
    index: usize,
    norm1: RowNorm,
    attention: SelfAttention,
    norm2: RowNorm,
    mlp: Ffn,
    region: Region,
    recompute: Recompute,
    /// Of what attention and MLP give.
    dropouts: [DropoutAt; 2],
    /// Parameters of each of the four.
    counts: [usize; 4],
}

/// What forward saves; `Buf` and `Stat` are buffers of E and of its Acc.
#[derive(Debug)]
pub struct BlockForward<Buf, Stat> {
    x: Buf,
    /// What is told of the routing, once, however often forward runs.
    routing: Option<Routing>,
    inside: Remade<Inside<Buf, Stat>>,
}

/// What forward makes besides its output.
#[derive(Debug)]
struct Inside<Buf, Stat> {
    stats1: RowStats<Stat>,
    attention: AttentionForward<Buf, Stat>,
    h: Buf,
    stats2: RowStats<Stat>,
    mlp: FfnForward<Buf, Stat>,
}

/// What the weights' gradients need.
#[derive(Debug)]
pub struct BlockWeight<Buf, Stat> {
    x: Buf,
    stats1: RowStats<Stat>,
    dn1: Buf,
    attention: AttentionWeight<Buf, Stat>,
    /// Of what attention gave.
    dh: Buf,
    h: Buf,
    stats2: RowStats<Stat>,
    dn2: Buf,
    mlp: FfnWeight<Buf, Stat>,
    /// Of what the MLP gave.
    dy: Buf,
}

impl<Buf, Stat> BlockForward<Buf, Stat> {
    /// Where the mixture of experts sent tokens; none of a dense block.
    #[must_use]
    pub fn routing(&self) -> Option<&Routing> {
        self.routing.as_ref()
    }
}

impl Block {
    /// Block `index` of the model: parameters begin with `model.layers.{index}`.
    ///
    /// # Errors
    /// [`Error::Layout`] where the heads cannot be cut over tp, or the experts over ep.
    pub fn new(mesh: &DeviceMesh, index: usize, spec: &BlockSpec) -> Result<Self, Error> {
        let name = |part: &str| format!("model.layers.{index}.{part}");
        let region = Region::new(spec.sequence_parallel)?;
        let norm = |part: &str| {
            let kind = spec.architecture.norm;
            RowNorm::new(mesh, &name(part), kind, spec.hidden, spec.eps)
                .on_tp(region.outside_param())
        };
        let mut block = Self {
            index,
            norm1: norm("input_layernorm"),
            attention: SelfAttention::new(mesh, &name("self_attn"), spec)?,
            norm2: norm("post_attention_layernorm"),
            mlp: Ffn::new(mesh, &name("mlp"), spec)?,
            region,
            recompute: Recompute::None,
            dropouts: [Site::Attention(index), Site::Mlp(index)].map(|at| DropoutAt::new(0.0, at)),
            counts: [0; 4],
        };
        block.counts = block.parts().map(|part| part.len());
        Ok(block)
    }

    /// The same, of which backward makes again what `mode` says.
    #[must_use]
    pub fn recomputing(mut self, mode: Recompute) -> Self {
        self.recompute = mode;
        self
    }

    /// The same, which in training lets go of a share of its probabilities and of what attention
    /// and MLP give, before the residual.
    #[must_use]
    pub fn dropping(mut self, share: f64) -> Self {
        let at = |site| DropoutAt::new(share, site);
        self.attention = self.attention.dropping(at(Site::Probabilities(self.index)));
        self.dropouts = [Site::Attention(self.index), Site::Mlp(self.index)].map(at);
        self
    }

    /// Its place in the model.
    #[must_use]
    pub fn index(&self) -> usize {
        self.index
    }

    /// The name of the bias on its router's choice, if it has one.
    #[must_use]
    pub fn selection_bias(&self) -> Option<String> {
        match &self.mlp {
            Ffn::SwiGlu(_) | Ffn::Gelu(_) => None,
            Ffn::Moe(moe) => moe.selection_bias(),
        }
    }

    /// The parameters, in the order of forward: norm, attention, norm, MLP.
    #[must_use]
    pub fn params(&self) -> Vec<ParamSpec> {
        self.parts().into_iter().flatten().collect()
    }

    fn parts(&self) -> [Vec<ParamSpec>; 4] {
        let (norm1, norm2) = (self.norm1.params(), self.norm2.params());
        [norm1, self.attention.params(), norm2, self.mlp.params()]
    }

    /// y from x, and all else that is made on the way.
    fn run<B, C, E>(
        &self,
        ctx: &Ctx<'_, B, C>,
        batch: &MicroBatch<B, E>,
        params: &[B::Ref<'_, E>],
        x: &B::Buf<E>,
    ) -> Result<(B::Buf<E>, Inside<B::Buf<E>, B::Buf<E::Acc>>), Error>
    where
        B: Gemm + Norm + Rope + Attention + Pointwise + GroupedGemm + Router + Permute,
        C: Collectives<B>,
        E: Scalar,
    {
        let ([p1, pa, p2, pm], dev) = (runs(NAME, params, self.counts)?, ctx.device);
        let rows = self.region.local_rows::<B, C>(ctx.tp, batch.tokens());
        let Normed {
            y: n1,
            stats: stats1,
        } = self.norm1.forward(dev, rows, p1, B::whole(x))?;
        let (mut a, attention) = self.attention.forward(ctx, batch, pa, n1)?;
        self.dropouts[0].apply(ctx, batch, &self.region, &mut a)?;
        let (h, normed) = self
            .norm2
            .forward_residual(dev, rows, p2, B::whole(&a), B::whole(x))?;
        drop(a);
        let (mut y, mlp) = self.mlp.forward(ctx, batch, pm, normed.y)?;
        self.dropouts[1].apply(ctx, batch, &self.region, &mut y)?;
        dev.add::<E>(B::whole_mut(&mut y), B::whole(&h))?;
        let inside = Inside {
            stats1,
            attention,
            h,
            stats2: normed.stats,
            mlp,
        };
        Ok((y, inside))
    }

    /// Makes again what is gone: all from the input, or the cheap from what was kept.
    fn remade<B, C, E>(
        &self,
        ctx: &Ctx<'_, B, C>,
        batch: &MicroBatch<B, E>,
        params: &[B::Ref<'_, E>],
        x: &B::Buf<E>,
        inside: Remade<Inside<B::Buf<E>, B::Buf<E::Acc>>>,
    ) -> Result<Inside<B::Buf<E>, B::Buf<E::Acc>>, Error>
    where
        B: Gemm + Norm + Rope + Attention + Pointwise + GroupedGemm + Router + Permute,
        C: Collectives<B>,
        E: Scalar,
    {
        let mut all = match inside {
            Remade::Gone => return Ok(self.run(ctx, batch, params, x)?.1),
            Remade::Here(all) => all,
        };
        let ([p1, _, p2, _], dev) = (runs(NAME, params, self.counts)?, ctx.device);
        let rows = self.region.local_rows::<B, C>(ctx.tp, batch.tokens());
        let h = &all.h;
        let normed2 = || Ok(self.norm2.forward(dev, rows, p2, B::whole(h))?.y);
        self.mlp.remake(ctx, batch, &mut all.mlp, normed2)?;
        let normed1 = || Ok(self.norm1.forward(dev, rows, p1, B::whole(x))?.y);
        all.attention.remake(normed1)?;
        Ok(all)
    }
}

impl<B, C, E> Layer<B, C, E> for Block
where
    B: Gemm + Norm + Rope + Attention + Pointwise + GroupedGemm + Router + Permute,
    C: Collectives<B>,
    E: Scalar,
{
    type Saved =
        Saved<BlockForward<B::Buf<E>, B::Buf<E::Acc>>, BlockWeight<B::Buf<E>, B::Buf<E::Acc>>>;

    fn params(&self) -> Vec<ParamSpec> {
        Block::params(self)
    }

    fn forward(
        &self,
        ctx: &Ctx<'_, B, C>,
        batch: &MicroBatch<B, E>,
        params: &[B::Ref<'_, E>],
        x_td: B::Buf<E>,
    ) -> Result<(B::Buf<E>, Self::Saved), Error> {
        let (y, mut inside) = self.run(ctx, batch, params, &x_td)?;
        let routing = inside.mlp.routing().cloned();
        let inside = match self.recompute {
            Recompute::None => Remade::Here(inside),
            Recompute::Selective => {
                inside.attention.let_go();
                inside.mlp.let_go();
                Remade::Here(inside)
            }
            Recompute::Full => Remade::Gone,
        };
        let saved = BlockForward {
            x: x_td,
            routing,
            inside,
        };
        Ok((y, Saved::Forward(saved)))
    }

    fn backward_input(
        &self,
        ctx: &Ctx<'_, B, C>,
        batch: &MicroBatch<B, E>,
        params: &[B::Ref<'_, E>],
        saved: &mut Self::Saved,
        dy_td: B::Buf<E>,
    ) -> Result<B::Buf<E>, Error> {
        let [p1, pa, p2, pm] = runs(NAME, params, self.counts)?;
        let (dy, dev) = (dy_td, ctx.device);
        let rows = self.region.local_rows::<B, C>(ctx.tp, batch.tokens());
        let BlockForward { x, inside, .. } = saved.take_forward(NAME)?;
        let Inside {
            stats1,
            attention,
            h,
            stats2,
            mlp,
        } = self.remade(ctx, batch, params, &x, inside)?;
        let given = self.dropouts[1].backward(ctx, batch, &self.region, &dy)?;
        let of_mlp = given.as_ref().unwrap_or(&dy);
        let (dn2, mlp) = self.mlp.backward_input(ctx, batch, pm, mlp, of_mlp)?;
        let hidden = (B::whole(&h), &stats2);
        let (dn, beside) = (B::whole(&dn2), Some(B::whole(&dy)));
        let dh = self
            .norm2
            .backward_input(dev, rows, p2, hidden, dn, beside)?;
        let dy = given.unwrap_or(dy);
        let given = self.dropouts[0].backward(ctx, batch, &self.region, &dh)?;
        let of_attention = given.as_ref().unwrap_or(&dh);
        let (dn1, attention) =
            self.attention
                .backward_input(ctx, batch, pa, attention, of_attention)?;
        let input = (B::whole(&x), &stats1);
        let (dn, beside) = (B::whole(&dn1), Some(B::whole(&dh)));
        let dx = self
            .norm1
            .backward_input(dev, rows, p1, input, dn, beside)?;
        let dh = given.unwrap_or(dh);
        *saved = Saved::Weight(BlockWeight {
            x,
            stats1,
            dn1,
            attention,
            dh,
            h,
            stats2,
            dn2,
            mlp,
            dy,
        });
        Ok(dx)
    }

    fn backward_weight(
        &self,
        ctx: &Ctx<'_, B, C>,
        batch: &MicroBatch<B, E>,
        saved: Self::Saved,
        grads: &mut [B::Mut<'_, E::Acc>],
    ) -> Result<(), Error> {
        let [g1, ga, g2, gm] = runs_mut(NAME, grads, self.counts)?;
        let dev = ctx.device;
        let rows = self.region.local_rows::<B, C>(ctx.tp, batch.tokens());
        let s = saved.into_weight(NAME)?;
        self.mlp.backward_weight(ctx, batch, s.mlp, &s.dy, gm)?;
        let hidden = (B::whole(&s.h), &s.stats2);
        self.norm2
            .backward_weight::<B, E>(dev, rows, hidden, B::whole(&s.dn2), g2)?;
        self.attention
            .backward_weight(ctx, batch, s.attention, &s.dh, ga)?;
        let input = (B::whole(&s.x), &s.stats1);
        self.norm1
            .backward_weight::<B, E>(dev, rows, input, B::whole(&s.dn1), g1)
    }
}
