//! The gated MLP of Llama.

use alloc::vec::Vec;

use quintet_collectives::{DeviceMesh, ParamSpec};
use quintet_kernels::{Collectives, Gemm, Pointwise, Scalar, Tag};

use super::NAME;
use crate::block::BlockSpec;
use crate::linear::{ColumnParallelLinear, RowBackward, RowParallelLinear};
use crate::recompute::Remade;
use crate::region::{Region, apply};
use crate::saved::{views, views_mut};
use crate::spec::join;
use crate::{Ctx, Error, MicroBatch};

/// `y = (silu(x Wg^T) * (x Wu^T)) Wd^T`.
#[derive(Debug, Clone)]
pub struct SwiGluMlp {
    gate: ColumnParallelLinear,
    up: ColumnParallelLinear,
    down: RowParallelLinear,
    region: Region,
    hidden: usize,
}

/// What forward saves. All but x is cut along f.
#[derive(Debug)]
pub struct SwiGluForward<Buf> {
    /// The input, as it lies outside.
    x: Remade<Buf>,
    /// Gate, before silu.
    g: Buf,
    /// Up.
    u: Buf,
    /// silu(g) * u.
    s: Remade<Buf>,
}

impl<Buf> SwiGluForward<Buf> {
    /// Lets go what is cheap to make again.
    pub(crate) fn let_go(&mut self) {
        self.s.let_go();
        self.x.let_go();
    }
}

/// What the weights' gradients need.
#[derive(Debug)]
pub struct SwiGluWeight<Buf> {
    x: Buf,
    s: Buf,
    dg: Buf,
    du: Buf,
    /// `None` where it is the gradient that came in.
    dy_whole: Option<Buf>,
}

impl SwiGluMlp {
    /// The MLP of a block; parameters begin with `name`.
    ///
    /// # Errors
    /// None today.
    pub fn new(mesh: &DeviceMesh, name: &str, spec: &BlockSpec) -> Result<Self, Error> {
        let (d, f) = (spec.hidden, spec.ffn);
        let region = Region::new(spec.sequence_parallel)?;
        let column = |part: &str| ColumnParallelLinear::new(mesh, &join(name, part), f, d);
        Ok(Self {
            gate: column("gate_proj"),
            up: column("up_proj"),
            down: RowParallelLinear::new(mesh, &join(name, "down_proj"), d, f, region)
                .into_residual(spec.layers),
            region,
            hidden: d,
        })
    }

    /// gate, up and down.
    #[must_use]
    pub fn params(&self) -> Vec<ParamSpec> {
        [self.gate.params(), self.up.params(), self.down.params()]
            .into_iter()
            .flatten()
            .collect()
    }

    /// y outside from x outside, both `[t, d]`; the parameters are gate, up, down.
    ///
    /// # Errors
    /// What a kernel or a collective refuses or fails with.
    pub fn forward<B: Gemm + Pointwise, C: Collectives<B>, E: Scalar>(
        &self,
        ctx: &Ctx<'_, B, C>,
        batch: &MicroBatch<B, E>,
        params: &[B::Ref<'_, E>],
        x_td: B::Buf<E>,
    ) -> Result<(B::Buf<E>, SwiGluForward<B::Buf<E>>), Error> {
        let &[wg, wu, wd] = views(NAME, params)?;
        let t = batch.tokens();
        let whole = self.region.inside(ctx, &x_td, t, self.hidden)?;
        let x = B::whole(whole.as_ref().unwrap_or(&x_td));
        let g = self.gate.forward(ctx, t, wg, None, x)?;
        let u = self.up.forward(ctx, t, wu, None, x)?;
        drop(whole);
        let s = gated::<B, E>(ctx.device, &g, &u)?;
        let y = self.down.forward(ctx, t, wd, None, B::whole(&s))?;
        let (x, s) = (Remade::Here(x_td), Remade::Here(s));
        Ok((y, SwiGluForward { x, g, u, s }))
    }

    /// Makes again what was let go; `x` makes the input.
    pub(crate) fn remake<B: Pointwise, E: Scalar>(
        device: &B,
        saved: &mut SwiGluForward<B::Buf<E>>,
        x: impl FnOnce() -> Result<B::Buf<E>, Error>,
    ) -> Result<(), Error> {
        let SwiGluForward { x: input, g, u, s } = saved;
        input.remake(x)?;
        s.remake(|| gated::<B, E>(device, g, u))
    }

    /// dx outside from dy outside.
    ///
    /// # Errors
    /// As [`SwiGluMlp::forward`].
    pub fn backward_input<B: Gemm + Pointwise, C: Collectives<B>, E: Scalar>(
        &self,
        ctx: &Ctx<'_, B, C>,
        batch: &MicroBatch<B, E>,
        params: &[B::Ref<'_, E>],
        saved: SwiGluForward<B::Buf<E>>,
        dy_td: &B::Buf<E>,
    ) -> Result<(B::Buf<E>, SwiGluWeight<B::Buf<E>>), Error> {
        let &[wg, wu, wd] = views(NAME, params)?;
        let (t, dev) = (batch.tokens(), ctx.device);
        let SwiGluForward { x, g, u, s } = saved;
        let (x, s) = (x.made(NAME)?, s.made(NAME)?);
        let RowBackward { dy_whole, dx: ds } = self.down.backward_input(ctx, t, wd, dy_td)?;
        let len = B::len(B::whole(&g));
        let mut dg = dev.alloc(Tag::Activation, len)?;
        let mut du = dev.alloc(Tag::Activation, len)?;
        dev.swiglu_backward::<E>(
            B::whole(&g),
            B::whole(&u),
            B::whole(&ds),
            B::whole_mut(&mut dg),
            B::whole_mut(&mut du),
        )?;
        drop((g, u, ds));
        let mut dx = dev.alloc(Tag::Activation, t * self.hidden)?;
        let (dg_all, du_all) = (B::whole(&dg), B::whole(&du));
        self.gate
            .backward_input(ctx, t, wg, dg_all, B::whole_mut(&mut dx), false)?;
        self.up
            .backward_input(ctx, t, wu, du_all, B::whole_mut(&mut dx), true)?;
        let dx = apply(ctx, self.region.enter().backward()?, dx, t, self.hidden)?;
        let saved = SwiGluWeight {
            x,
            s,
            dg,
            du,
            dy_whole,
        };
        Ok((dx, saved))
    }

    /// Adds to the gradients of gate, up, down; `dy_td` is what backward_input was given.
    ///
    /// # Errors
    /// As [`SwiGluMlp::forward`].
    pub fn backward_weight<B: Gemm + Pointwise, C: Collectives<B>, E: Scalar>(
        &self,
        ctx: &Ctx<'_, B, C>,
        batch: &MicroBatch<B, E>,
        saved: SwiGluWeight<B::Buf<E>>,
        dy_td: &B::Buf<E>,
        grads: &mut [B::Mut<'_, E::Acc>],
    ) -> Result<(), Error> {
        let grads: &mut [_; 3] = views_mut(NAME, grads)?;
        let [gg, gu, gd] = grads.each_mut().map(|g| B::reborrow(g));
        let t = batch.tokens();
        let dy = B::whole(saved.dy_whole.as_ref().unwrap_or(dy_td));
        self.down
            .backward_weight::<B, C, E>(ctx, t, B::whole(&saved.s), dy, gd, None)?;
        let whole = self.region.inside(ctx, &saved.x, t, self.hidden)?;
        let x = B::whole(whole.as_ref().unwrap_or(&saved.x));
        self.gate
            .backward_weight::<B, C, E>(ctx, t, x, B::whole(&saved.dg), gg, None)?;
        self.up
            .backward_weight::<B, C, E>(ctx, t, x, B::whole(&saved.du), gu, None)
    }
}

/// `silu(g) * u`.
pub(crate) fn gated<B: Pointwise, E: Scalar>(
    device: &B,
    g: &B::Buf<E>,
    u: &B::Buf<E>,
) -> Result<B::Buf<E>, Error> {
    let mut s = device.alloc(Tag::Activation, B::len(B::whole(g)))?;
    device.swiglu::<E>(B::whole(g), B::whole(u), B::whole_mut(&mut s))?;
    Ok(s)
}
