//! Mixture of experts: an MLP of which each token uses a few parts.
//!
//! ```text
//!             outside      Invariant, or Shard(t) under sequence parallelism
//!               |  +-------------------------------------------------- shared experts (an MLP beside)
//!             take part    Shard(t) over dp x cp x tp: each token on one rank
//!               |
//!             router       choice[t,k], weight[t,k]; its weight is Replicate on dp, cp and tp
//!               |
//!             dispatch     rows in order of (expert, token, k); all-to-all over ep, then
//!               |          all-gather over etp
//!             experts      SwiGLU of each row by its expert; width f is Shard over etp
//!               |          Partial over etp
//!             combine      reduce-scatter over etp, all-to-all back, y[t] = sum over k of
//!               |          weight[t,k] row[t,k], in order of k, where the token is
//!             gather       Shard(t) -> outside
//! ```
//!
//! Experts are folded into the ranks of dp x cp x tp (the mesh's expert view): an expert's weights
//! are Shard over ep and etp and Replicate over edp. Each collective is issued by every rank
//! whatever the data: an expert without tokens, an expert with all of them, a rank without tokens
//! are ordinary.
//!
//! **Balance.** Per microbatch and layer, with `f_e` the share of all (token, k) that chose e
//! before anything is dropped, `P_e` the mean over tokens of the router's share for e, both over
//! all ranks that share the microbatch: `aux = experts * sum over e of f_e P_e`, which is 1 where
//! all is even (Switch, with top-k counted as Megatron does); `z = mean over tokens of log(sum of
//! exp(logits))^2`. The step's loss gains `aux_loss * aux + z_loss * z`, summed over layers and
//! averaged over the microbatches of the step. f carries no gradient.
//!
//! **Capacity.** With a factor c an expert takes the first `ceil(tokens topk c / experts)` pairs of
//! a microbatch in order of (token, k); what comes after is dropped: it adds nothing, and the
//! weights of what remains stay as they are.

use alloc::string::String;
use alloc::vec::Vec;

use quintet_collectives::chunk::chunk_len;
use quintet_collectives::{DeviceMesh, Move, ParamSpec, Placement};
pub use quintet_kernels::moe::Score;
use quintet_kernels::moe::{Permute, Router};
use quintet_kernels::{Collectives, Gemm, GroupedGemm, Pointwise, Scalar, Tag};

use crate::recompute::Remade;
use crate::region::{apply, apply_to};
use crate::saved::{runs, runs_mut};
use crate::{Ctx, Error, MicroBatch};

mod dispatch;
mod experts;
mod router;
mod shared;

use dispatch::Dispatch;
use experts::{Experts, ExpertsForward, ExpertsWeight};
pub use router::Routing;
use router::{RouterForward, RouterLayer, RouterWeight};
use shared::{SharedExperts, SharedForward, SharedWeight};

const NAME: &str = "moe";

/// Shape and rules of a mixture of experts.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct MoeSpec {
    /// Experts; ep divides them.
    pub experts: usize,
    /// Experts a token goes to.
    pub topk: usize,
    /// Width of an expert.
    pub ffn: usize,
    /// From logits to scores.
    pub score: Score,
    /// The weights of a token are divided by their sum.
    pub normalize: bool,
    /// Multiplies the weights last.
    pub scale: f64,
    /// A bias on the choice alone, moved by the trainer after each step (DeepSeek-V3).
    pub selection_bias: bool,
    /// Weight of the balance loss; 0 is none.
    pub aux_loss: f64,
    /// Weight of the router's z-loss; 0 is none.
    pub z_loss: f64,
    /// Room of an expert over its fair share; none drops nothing.
    pub capacity_factor: Option<f64>,
    /// Width of the shared experts together; 0 is none.
    pub shared_ffn: usize,
    /// Each token weighs the shared experts by a gate of its own (Qwen2-MoE).
    pub shared_gate: bool,
}

/// What of a block the mixture needs to know.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct MoeShape {
    /// Width of the residual stream.
    pub hidden: usize,
    /// Blocks in the whole model, for the scale at which down_proj begins.
    pub layers: usize,
    /// Values between layers are Shard(token) over tp instead of Invariant.
    pub sequence_parallel: bool,
}

/// The MLP of a block, made of experts.
#[derive(Debug, Clone)]
pub struct MoeMlp {
    router: RouterLayer,
    experts: Experts,
    shared: Option<SharedExperts>,
    enter: Move,
    leave: Move,
    hidden: usize,
}

/// What forward saves; `Buf` and `Stat` are buffers of E and of its Acc.
#[derive(Debug)]
pub struct MoeForward<Buf, Stat> {
    /// The tokens of this rank.
    x: Remade<Buf>,
    router: RouterForward<Stat>,
    dispatch: Dispatch,
    experts: ExpertsForward<Buf>,
    /// What the experts made of this rank's rows.
    rows: Buf,
    shared: Option<SharedForward<Buf, Stat>>,
}

/// What the weights' gradients need.
#[derive(Debug)]
pub struct MoeWeight<Buf, Stat> {
    x: Buf,
    router: RouterWeight<Stat>,
    experts: ExpertsWeight<Buf>,
    shared: Option<SharedWeight<Buf, Stat>>,
}

impl<Buf, Stat> MoeForward<Buf, Stat> {
    /// Where the tokens of this rank went, and what this rank adds to the losses of balance.
    #[must_use]
    pub fn routing(&self) -> &Routing {
        &self.router.routing
    }

    /// Lets go what is cheap to make again.
    pub(crate) fn let_go(&mut self) {
        self.x.let_go();
        self.experts.let_go();
        if let Some(shared) = &mut self.shared {
            shared.let_go();
        }
    }
}

impl MoeMlp {
    /// The mixture whose parameters begin with `name`.
    ///
    /// # Errors
    /// [`Error::Layout`] where ep does not divide the experts, or a token would go to none or to
    /// more than there are.
    pub fn new(
        mesh: &DeviceMesh,
        name: &str,
        shape: &MoeShape,
        spec: &MoeSpec,
    ) -> Result<Self, Error> {
        let cut = Placement::shard(0);
        let outside = if shape.sequence_parallel {
            cut
        } else {
            Placement::Invariant
        };
        let shared = (spec.shared_ffn > 0).then(|| SharedExperts::new(mesh, name, shape, spec));
        Ok(Self {
            router: RouterLayer::new(mesh, name, shape.hidden, spec)?,
            experts: Experts::new(mesh, name, shape, spec)?,
            shared: shared.transpose()?,
            enter: Move::new(outside, cut)?,
            leave: Move::new(cut, outside)?,
            hidden: shape.hidden,
        })
    }

    /// Router (and its bias), gate, up and down of the experts, those of the shared ones (and
    /// their gate).
    #[must_use]
    pub fn params(&self) -> Vec<ParamSpec> {
        let shared = self.shared.as_ref().map(SharedExperts::params);
        [
            self.router.params(),
            self.experts.params(),
            shared.unwrap_or_default(),
        ]
        .concat()
    }

    /// The name of the bias on the choice, if there is one: no gradient reaches it, the trainer
    /// moves it.
    #[must_use]
    pub fn selection_bias(&self) -> Option<String> {
        self.router.selection_bias()
    }

    fn counts(&self) -> [usize; 3] {
        let shared = self.shared.as_ref().map_or(0, |s| s.params().len());
        [self.router.params().len(), 3, shared]
    }

    /// y outside from x outside, both `[t, d]`.
    ///
    /// # Errors
    /// What a kernel or a collective refuses or fails with.
    pub fn forward<B, C, E>(
        &self,
        ctx: &Ctx<'_, B, C>,
        batch: &MicroBatch<B, E>,
        params: &[B::Ref<'_, E>],
        x_td: B::Buf<E>,
    ) -> Result<(B::Buf<E>, MoeForward<B::Buf<E>, B::Buf<E::Acc>>), Error>
    where
        B: Gemm + GroupedGemm + Pointwise + Router + Permute,
        C: Collectives<B>,
        E: Scalar,
    {
        let [router, experts, beside] = runs(NAME, params, self.counts())?;
        let (t, d, dev) = (batch.tokens(), self.hidden, ctx.device);
        let (mut shared, mut shared_y) = (None, None);
        let (x, all) = self.mine(ctx, batch, x_td)?;
        if let (Some(layer), Some(x_td)) = (&self.shared, all) {
            let (y, saved) = layer.forward(ctx, batch, beside, x_td)?;
            (shared, shared_y) = (Some(saved), Some(y));
        }
        let routed = self.router.forward(ctx, batch, router, B::whole(&x))?;
        let dispatch = Dispatch::new(ctx, &routed.kept_tk, self.router.experts(), d)?;
        let sent = dispatch.gather(dev, self.router.topk(), B::whole(&x))?;
        let arrived = dispatch.to_experts(ctx, sent)?;
        let (made, saved) = self
            .experts
            .forward(dev, dispatch.counts(), experts, arrived)?;
        let rows = dispatch.to_tokens(ctx, made)?;
        let mut y = dev.alloc(
            Tag::Activation,
            chunk_len(t, ctx.tp.world(), ctx.tp.rank()) * d,
        )?;
        dispatch.combine(
            dev,
            self.router.topk(),
            Some(B::whole(&routed.weight_tk)),
            &rows,
            &mut y,
        )?;
        let mut y = apply(ctx, self.leave, y, t, d)?;
        if let Some(beside) = shared_y {
            dev.add::<E>(B::whole_mut(&mut y), B::whole(&beside))?;
        }
        let saved = MoeForward {
            x: Remade::Here(x),
            router: routed,
            dispatch,
            experts: saved,
            rows,
            shared,
        };
        Ok((y, saved))
    }

    /// The tokens of this rank, and for the shared experts all that came.
    fn mine<B, C, E>(
        &self,
        ctx: &Ctx<'_, B, C>,
        batch: &MicroBatch<B, E>,
        x_td: B::Buf<E>,
    ) -> Result<(B::Buf<E>, Option<B::Buf<E>>), Error>
    where
        B: Pointwise,
        C: Collectives<B>,
        E: Scalar,
    {
        let (t, d) = (batch.tokens(), self.hidden);
        let mine = apply_to(ctx, self.enter, B::whole(&x_td), t, d)?;
        Ok(match (mine, &self.shared) {
            (None, None) => (x_td, None),
            (Some(mine), None) => (mine, None),
            (Some(mine), Some(_)) => (mine, Some(x_td)),
            (None, Some(_)) => (copy::<B, E>(ctx.device, &x_td)?, Some(x_td)),
        })
    }

    /// Makes again what was let go; `x_td` makes what forward was given.
    pub(crate) fn remake<B, C, E>(
        &self,
        ctx: &Ctx<'_, B, C>,
        batch: &MicroBatch<B, E>,
        saved: &mut MoeForward<B::Buf<E>, B::Buf<E::Acc>>,
        x_td: impl FnOnce() -> Result<B::Buf<E>, Error>,
    ) -> Result<(), Error>
    where
        B: Pointwise,
        C: Collectives<B>,
        E: Scalar,
    {
        Experts::remake::<B, E>(ctx.device, &mut saved.experts)?;
        if !saved.x.is_gone() {
            return Ok(());
        }
        let (x, all) = self.mine(ctx, batch, x_td()?)?;
        if let (Some(shared), Some(x_td)) = (&mut saved.shared, all) {
            SharedExperts::remake::<B, E>(ctx.device, shared, x_td)?;
        }
        saved.x.remake(|| Ok(x))
    }

    /// dx outside from dy outside.
    ///
    /// # Errors
    /// As [`MoeMlp::forward`].
    pub fn backward_input<B, C, E>(
        &self,
        ctx: &Ctx<'_, B, C>,
        batch: &MicroBatch<B, E>,
        params: &[B::Ref<'_, E>],
        saved: MoeForward<B::Buf<E>, B::Buf<E::Acc>>,
        dy_td: &B::Buf<E>,
    ) -> Result<(B::Buf<E>, MoeWeight<B::Buf<E>, B::Buf<E::Acc>>), Error>
    where
        B: Gemm + GroupedGemm + Pointwise + Router + Permute,
        C: Collectives<B>,
        E: Scalar,
    {
        let [router, experts, beside] = runs(NAME, params, self.counts())?;
        let (t, d, dev) = (batch.tokens(), self.hidden, ctx.device);
        let MoeForward {
            x,
            router: routed,
            dispatch,
            experts: saved,
            rows,
            shared,
        } = saved;
        let x = x.made(NAME)?;
        let mine = apply_to(ctx, self.leave.backward()?, B::whole(dy_td), t, d)?;
        let dy = B::whole(mine.as_ref().unwrap_or(dy_td));
        let topk = self.router.topk();
        let weight = B::whole(&routed.weight_tk);
        let (drows, dweight) = dispatch.combine_backward::<B, E>(dev, topk, weight, &rows, dy)?;
        drop(rows);
        let dmade = dispatch.to_experts(ctx, drows)?;
        let counts = dispatch.counts();
        let (darrived, experts) = self
            .experts
            .backward_input(dev, counts, experts, saved, dmade)?;
        let dsent = dispatch.to_tokens(ctx, darrived)?;
        let mut dx = dev.alloc(Tag::Activation, B::len(B::whole(&x)))?;
        dispatch.combine::<B, E>(dev, topk, None, &dsent, &mut dx)?;
        drop(dsent);
        let router = self
            .router
            .backward_input(dev, router, routed, &dweight, &mut dx)?;
        let mut dx = apply(ctx, self.enter.backward()?, dx, t, d)?;
        let mut shared_weight = None;
        if let (Some(layer), Some(saved)) = (&self.shared, shared) {
            let (beside, saved) = layer.backward_input(ctx, batch, beside, saved, dy_td)?;
            dev.add::<E>(B::whole_mut(&mut dx), B::whole(&beside))?;
            shared_weight = Some(saved);
        }
        let saved = MoeWeight {
            x,
            router,
            experts,
            shared: shared_weight,
        };
        Ok((dx, saved))
    }

    /// Adds to the gradients of the parameters; `dy_td` is what backward_input was given.
    ///
    /// # Errors
    /// As [`MoeMlp::forward`].
    pub fn backward_weight<B, C, E>(
        &self,
        ctx: &Ctx<'_, B, C>,
        batch: &MicroBatch<B, E>,
        saved: MoeWeight<B::Buf<E>, B::Buf<E::Acc>>,
        dy_td: &B::Buf<E>,
        grads: &mut [B::Mut<'_, E::Acc>],
    ) -> Result<(), Error>
    where
        B: Gemm + GroupedGemm + Pointwise + Router + Permute,
        C: Collectives<B>,
        E: Scalar,
    {
        let [router, experts, beside] = runs_mut(NAME, grads, self.counts())?;
        let dev = ctx.device;
        let x = B::whole(&saved.x);
        self.router
            .backward_weight::<B, E>(dev, x, &saved.router, router)?;
        self.experts
            .backward_weight::<B, E>(dev, &saved.experts, experts)?;
        match (&self.shared, saved.shared) {
            (Some(layer), Some(saved)) => layer.backward_weight(ctx, batch, saved, dy_td, beside),
            _ => Ok(()),
        }
    }
}

/// A second buffer of the same values.
fn copy<B: Pointwise, E: Scalar>(device: &B, x: &B::Buf<E>) -> Result<B::Buf<E>, Error> {
    let mut y = device.alloc(Tag::Activation, B::len(B::whole(x)))?;
    device.copy(B::whole(x), B::whole_mut(&mut y))?;
    Ok(y)
}
