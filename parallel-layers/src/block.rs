//! A Llama decoder block (Touvron et al. 2023): two regions, each behind a norm and beside a
//! residual.
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
use alloc::vec::Vec;

use quintet_collectives::{DeviceMesh, ParamSpec};
use quintet_kernels::{Attention, Collectives, Gemm, Norm, Pointwise, Rope, Scalar};

use crate::attention::{AttentionForward, AttentionWeight, SelfAttention};
use crate::mlp::{MlpForward, MlpWeight, SwiGluMlp};
use crate::norm::{Normed, RmsNorm};
use crate::region::Region;
use crate::saved::{Saved, views, views_mut};
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
    /// Added to the variance in RMSNorm.
    pub eps: f64,
    /// Blocks in the whole model, for the scale at which o_proj and down_proj begin.
    pub layers: usize,
    /// Values between layers are Shard(token) over tp instead of Invariant.
    pub sequence_parallel: bool,
    /// A token sees so many tokens, itself the last of them; all before it where absent.
    pub window: Option<usize>,
}

/// One decoder block.
///
/// ```
/// use quintet_collectives::{Degrees, DeviceMesh};
/// use quintet_parallel_layers::{Block, BlockSpec};
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
///     window: None,
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
    norm1: RmsNorm,
    attention: SelfAttention,
    norm2: RmsNorm,
    mlp: SwiGluMlp,
    region: Region,
}

/// What forward saves; `Buf` and `Stat` are buffers of E and of its Acc.
#[derive(Debug)]
pub struct BlockForward<Buf, Stat> {
    x: Buf,
    rstd1: Stat,
    attention: AttentionForward<Buf, Stat>,
    h: Buf,
    rstd2: Stat,
    mlp: MlpForward<Buf>,
}

/// What the weights' gradients need.
#[derive(Debug)]
pub struct BlockWeight<Buf, Stat> {
    x: Buf,
    rstd1: Stat,
    dn1: Buf,
    attention: AttentionWeight<Buf>,
    dh: Buf,
    h: Buf,
    rstd2: Stat,
    dn2: Buf,
    mlp: MlpWeight<Buf>,
    dy: Buf,
}

impl Block {
    /// Block `index` of the model: parameters begin with `model.layers.{index}`.
    ///
    /// # Errors
    /// [`Error::Layout`] where the heads cannot be cut over tp.
    pub fn new(mesh: &DeviceMesh, index: usize, spec: &BlockSpec) -> Result<Self, Error> {
        let name = |part: &str| format!("model.layers.{index}.{part}");
        let region = Region::new(spec.sequence_parallel)?;
        let norm = |part: &str| RmsNorm::new(mesh, &name(part), spec.hidden, spec.eps, region);
        Ok(Self {
            norm1: norm("input_layernorm"),
            attention: SelfAttention::new(mesh, &name("self_attn"), spec)?,
            norm2: norm("post_attention_layernorm"),
            mlp: SwiGluMlp::new(mesh, &name("mlp"), spec)?,
            region,
        })
    }

    /// The parameters: norm, q, k, v, o, norm, gate, up, down.
    #[must_use]
    pub fn params(&self) -> Vec<ParamSpec> {
        let mut all = Vec::from([self.norm1.param()]);
        all.extend(self.attention.params());
        all.push(self.norm2.param());
        all.extend(self.mlp.params());
        all
    }
}

impl<B, C, E> Layer<B, C, E> for Block
where
    B: Gemm + Norm + Rope + Attention + Pointwise,
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
        let &[w1, wq, wk, wv, wo, w2, wg, wu, wd] = views(NAME, params)?;
        let (x, dev) = (x_td, ctx.device);
        let rows = self.region.local_rows::<B, C>(ctx.tp, batch.tokens());
        let Normed { y: n1, rstd: rstd1 } = self.norm1.forward(dev, rows, w1, B::whole(&x))?;
        let (a, attention) = self.attention.forward(ctx, batch, [wq, wk, wv, wo], n1)?;
        let (h, Normed { y: n2, rstd: rstd2 }) =
            self.norm2
                .forward_residual(dev, rows, w2, B::whole(&a), B::whole(&x))?;
        drop(a);
        let (mut y, mlp) = self.mlp.forward(ctx, batch, [wg, wu, wd], n2)?;
        dev.add::<E>(B::whole_mut(&mut y), B::whole(&h))?;
        let saved = BlockForward {
            x,
            rstd1,
            attention,
            h,
            rstd2,
            mlp,
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
        let &[w1, wq, wk, wv, wo, w2, wg, wu, wd] = views(NAME, params)?;
        let (dy, dev) = (dy_td, ctx.device);
        let rows = self.region.local_rows::<B, C>(ctx.tp, batch.tokens());
        let BlockForward {
            x,
            rstd1,
            attention,
            h,
            rstd2,
            mlp,
        } = saved.take_forward(NAME)?;
        let (dn2, mlp) = self
            .mlp
            .backward_input(ctx, batch, [wg, wu, wd], mlp, &dy)?;
        let hidden = (B::whole(&h), B::whole(&rstd2));
        let (dn, beside) = (B::whole(&dn2), Some(B::whole(&dy)));
        let dh = self
            .norm2
            .backward_input(dev, rows, w2, hidden, dn, beside)?;
        let weights = [wq, wk, wv, wo];
        let (dn1, attention) = self
            .attention
            .backward_input(ctx, batch, weights, attention, &dh)?;
        let input = (B::whole(&x), B::whole(&rstd1));
        let (dn, beside) = (B::whole(&dn1), Some(B::whole(&dh)));
        let dx = self
            .norm1
            .backward_input(dev, rows, w1, input, dn, beside)?;
        *saved = Saved::Weight(BlockWeight {
            x,
            rstd1,
            dn1,
            attention,
            dh,
            h,
            rstd2,
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
        let grads: &mut [_; 9] = views_mut(NAME, grads)?;
        let [g1, gq, gk, gv, go, g2, gg, gu, gd] = grads.each_mut().map(|g| B::reborrow(g));
        let dev = ctx.device;
        let rows = self.region.local_rows::<B, C>(ctx.tp, batch.tokens());
        let s = saved.into_weight(NAME)?;
        let grads = [gg, gu, gd];
        self.mlp.backward_weight(ctx, batch, s.mlp, &s.dy, grads)?;
        let hidden = (B::whole(&s.h), B::whole(&s.rstd2));
        self.norm2
            .backward_weight::<B, E>(dev, rows, hidden, B::whole(&s.dn2), g2)?;
        let grads = [gq, gk, gv, go];
        self.attention
            .backward_weight(ctx, batch, s.attention, &s.dh, grads)?;
        let input = (B::whole(&s.x), B::whole(&s.rstd1));
        self.norm1
            .backward_weight::<B, E>(dev, rows, input, B::whole(&s.dn1), g1)
    }
}
