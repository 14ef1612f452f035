//! The MLP of GPT-2.

use alloc::vec::Vec;

use quintet_collectives::{DeviceMesh, ParamSpec};
use quintet_kernels::{Collectives, Gemm, Pointwise, Scalar, Tag};

use super::NAME;
use crate::block::BlockSpec;
use crate::linear::{ColumnParallelLinear, RowBackward, RowParallelLinear};
use crate::recompute::Remade;
use crate::region::{Region, apply};
use crate::saved::{runs, runs_mut, weight_bias, weight_bias_mut};
use crate::spec::join;
use crate::{Ctx, Error, MicroBatch};

/// `y = gelu(x Wu^T + bu) Wd^T + bd`; without the biases where the architecture has none.
#[derive(Debug, Clone)]
pub struct GeluMlp {
    up: ColumnParallelLinear,
    down: RowParallelLinear,
    region: Region,
    hidden: usize,
}

/// What forward saves. All but x is cut along f.
#[derive(Debug)]
pub struct GeluForward<Buf> {
    /// The input, as it lies outside.
    x: Remade<Buf>,
    /// Up, before gelu.
    u: Buf,
    /// gelu(u).
    s: Remade<Buf>,
}

impl<Buf> GeluForward<Buf> {
    /// Lets go what is cheap to make again.
    pub(crate) fn let_go(&mut self) {
        self.s.let_go();
        self.x.let_go();
    }
}

/// What the weights' gradients need.
#[derive(Debug)]
pub struct GeluWeight<Buf> {
    x: Buf,
    s: Buf,
    du: Buf,
    /// `None` where it is the gradient that came in.
    dy_whole: Option<Buf>,
}

impl GeluMlp {
    /// The MLP of a block; parameters begin with `name`.
    ///
    /// # Errors
    /// None today.
    pub fn new(mesh: &DeviceMesh, name: &str, spec: &BlockSpec) -> Result<Self, Error> {
        let (d, f) = (spec.hidden, spec.ffn);
        let region = Region::new(spec.sequence_parallel)?;
        let mut up = ColumnParallelLinear::new(mesh, &join(name, "up_proj"), f, d);
        let mut down = RowParallelLinear::new(mesh, &join(name, "down_proj"), d, f, region)
            .into_residual(spec.layers);
        if spec.architecture.out_bias {
            (up, down) = (up.with_bias(), down.with_bias());
        }
        Ok(Self {
            up,
            down,
            region,
            hidden: d,
        })
    }

    /// up and down, each with its bias if it has one.
    #[must_use]
    pub fn params(&self) -> Vec<ParamSpec> {
        [self.up.params(), self.down.params()].concat()
    }

    fn counts(&self) -> [usize; 2] {
        [self.up.params().len(), self.down.params().len()]
    }

    /// y outside from x outside, both `[t, d]`.
    ///
    /// # Errors
    /// What a kernel or a collective refuses or fails with.
    pub fn forward<B: Gemm + Pointwise, C: Collectives<B>, E: Scalar>(
        &self,
        ctx: &Ctx<'_, B, C>,
        batch: &MicroBatch<B, E>,
        params: &[B::Ref<'_, E>],
        x_td: B::Buf<E>,
    ) -> Result<(B::Buf<E>, GeluForward<B::Buf<E>>), Error> {
        let [up, down] = runs(NAME, params, self.counts())?;
        let (t, (wu, bu), (wd, bd)) = (
            batch.tokens(),
            weight_bias(NAME, up)?,
            weight_bias(NAME, down)?,
        );
        let whole = self.region.inside(ctx, &x_td, t, self.hidden)?;
        let x = B::whole(whole.as_ref().unwrap_or(&x_td));
        let u = self.up.forward(ctx, t, wu, bu, x)?;
        drop(whole);
        let s = gelu::<B, E>(ctx.device, &u)?;
        let y = self.down.forward(ctx, t, wd, bd, B::whole(&s))?;
        let (x, s) = (Remade::Here(x_td), Remade::Here(s));
        Ok((y, GeluForward { x, u, s }))
    }

    /// Makes again what was let go; `x` makes the input.
    pub(crate) fn remake<B: Pointwise, E: Scalar>(
        device: &B,
        saved: &mut GeluForward<B::Buf<E>>,
        x: impl FnOnce() -> Result<B::Buf<E>, Error>,
    ) -> Result<(), Error> {
        let GeluForward { x: input, u, s } = saved;
        input.remake(x)?;
        s.remake(|| gelu::<B, E>(device, u))
    }

    /// dx outside from dy outside.
    ///
    /// # Errors
    /// As [`GeluMlp::forward`].
    pub fn backward_input<B: Gemm + Pointwise, C: Collectives<B>, E: Scalar>(
        &self,
        ctx: &Ctx<'_, B, C>,
        batch: &MicroBatch<B, E>,
        params: &[B::Ref<'_, E>],
        saved: GeluForward<B::Buf<E>>,
        dy_td: &B::Buf<E>,
    ) -> Result<(B::Buf<E>, GeluWeight<B::Buf<E>>), Error> {
        let [up, down] = runs(NAME, params, self.counts())?;
        let ((wu, _), (wd, _)) = (weight_bias(NAME, up)?, weight_bias(NAME, down)?);
        let (t, dev) = (batch.tokens(), ctx.device);
        let GeluForward { x, u, s } = saved;
        let (x, s) = (x.made(NAME)?, s.made(NAME)?);
        let RowBackward { dy_whole, dx: ds } = self.down.backward_input(ctx, t, wd, dy_td)?;
        let mut du = dev.alloc(Tag::Activation, B::len(B::whole(&u)))?;
        dev.gelu_backward::<E>(B::whole(&u), B::whole(&ds), B::whole_mut(&mut du))?;
        drop((u, ds));
        let mut dx = dev.alloc(Tag::Activation, t * self.hidden)?;
        let du_all = B::whole(&du);
        self.up
            .backward_input(ctx, t, wu, du_all, B::whole_mut(&mut dx), false)?;
        let dx = apply(ctx, self.region.enter().backward()?, dx, t, self.hidden)?;
        let saved = GeluWeight { x, s, du, dy_whole };
        Ok((dx, saved))
    }

    /// Adds to the gradients of up and down; `dy_td` is what backward_input was given.
    ///
    /// # Errors
    /// As [`GeluMlp::forward`].
    pub fn backward_weight<B: Gemm + Pointwise, C: Collectives<B>, E: Scalar>(
        &self,
        ctx: &Ctx<'_, B, C>,
        batch: &MicroBatch<B, E>,
        saved: GeluWeight<B::Buf<E>>,
        dy_td: &B::Buf<E>,
        grads: &mut [B::Mut<'_, E::Acc>],
    ) -> Result<(), Error> {
        let [up, down] = runs_mut(NAME, grads, self.counts())?;
        let (t, dy) = (batch.tokens(), B::whole(dy_td));
        let dy_whole = B::whole(saved.dy_whole.as_ref().unwrap_or(dy_td));
        let (gd, bd) = weight_bias_mut::<B, E::Acc>(NAME, down)?;
        self.down.backward_weight::<B, C, E>(
            ctx,
            t,
            B::whole(&saved.s),
            dy_whole,
            gd,
            bd.map(|bias| (dy, bias)),
        )?;
        let (gu, bu) = weight_bias_mut::<B, E::Acc>(NAME, up)?;
        let whole = self.region.inside(ctx, &saved.x, t, self.hidden)?;
        let x = B::whole(whole.as_ref().unwrap_or(&saved.x));
        let du = B::whole(&saved.du);
        self.up.backward_weight::<B, C, E>(ctx, t, x, du, gu, bu)
    }
}

/// `gelu(u)`.
fn gelu<B: Pointwise, E: Scalar>(device: &B, u: &B::Buf<E>) -> Result<B::Buf<E>, Error> {
    let mut s = device.alloc(Tag::Activation, B::len(B::whole(u)))?;
    device.gelu::<E>(B::whole(u), B::whole_mut(&mut s))?;
    Ok(s)
}
