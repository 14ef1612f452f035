//! The MLPs of a block: each is one tensor parallel region.
//!
//! ```text
//! SwiGLU (Shazeer 2020)
//!                            +- gate -> Shard(f) -+
//! x outside --enter--> Replicate                  silu(g) * u --down--> Partial --leave--> y outside
//!                            +-- up --> Shard(f) -+
//!
//! GELU (GPT-2)
//! x outside --enter--> Replicate --up + b--> Shard(f) -- gelu --down--> Partial --leave--> + b, y outside
//!
//! outside: Invariant, or Shard(t) under sequence parallelism
//! ```
//!
//! The width f need not be a multiple of tp; a rank may hold none of it.

use alloc::vec::Vec;

use quintet_collectives::{DeviceMesh, ParamSpec};
use quintet_kernels::{Collectives, Gemm, Pointwise, Scalar, Tag};

use crate::architecture::MlpKind;
use crate::block::BlockSpec;
use crate::linear::{ColumnParallelLinear, RowBackward, RowParallelLinear};
use crate::recompute::Remade;
use crate::region::{Region, apply};
use crate::saved::{runs, runs_mut, views, views_mut, weight_bias, weight_bias_mut};
use crate::spec::join;
use crate::{Ctx, Error, MicroBatch};

const NAME: &str = "mlp";

/// The MLP of a block, of one kind or another.
#[derive(Debug, Clone)]
pub enum Mlp {
    /// Three matrices and a gate.
    SwiGlu(SwiGluMlp),
    /// Two matrices with biases.
    Gelu(GeluMlp),
}

/// What forward saves.
#[derive(Debug)]
pub enum MlpForward<Buf> {
    /// Of [`Mlp::SwiGlu`].
    SwiGlu(SwiGluForward<Buf>),
    /// Of [`Mlp::Gelu`].
    Gelu(GeluForward<Buf>),
}

impl<Buf> MlpForward<Buf> {
    /// Lets go what is cheap to make again.
    pub(crate) fn let_go(&mut self) {
        match self {
            MlpForward::SwiGlu(saved) => saved.let_go(),
            MlpForward::Gelu(saved) => saved.let_go(),
        }
    }
}

/// What the weights' gradients need.
#[derive(Debug)]
pub enum MlpWeight<Buf> {
    /// Of [`Mlp::SwiGlu`].
    SwiGlu(SwiGluWeight<Buf>),
    /// Of [`Mlp::Gelu`].
    Gelu(GeluWeight<Buf>),
}

impl Mlp {
    /// The MLP that the block's architecture asks for; parameters begin with `name`.
    ///
    /// # Errors
    /// None today.
    pub fn new(mesh: &DeviceMesh, name: &str, spec: &BlockSpec) -> Result<Self, Error> {
        Ok(match spec.architecture.mlp {
            MlpKind::SwiGlu => Mlp::SwiGlu(SwiGluMlp::new(mesh, name, spec)?),
            MlpKind::Gelu => Mlp::Gelu(GeluMlp::new(mesh, name, spec)?),
        })
    }

    /// Its parameters.
    #[must_use]
    pub fn params(&self) -> Vec<ParamSpec> {
        match self {
            Mlp::SwiGlu(mlp) => mlp.params(),
            Mlp::Gelu(mlp) => mlp.params(),
        }
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
    ) -> Result<(B::Buf<E>, MlpForward<B::Buf<E>>), Error> {
        Ok(match self {
            Mlp::SwiGlu(mlp) => {
                let (y, saved) = mlp.forward(ctx, batch, params, x_td)?;
                (y, MlpForward::SwiGlu(saved))
            }
            Mlp::Gelu(mlp) => {
                let (y, saved) = mlp.forward(ctx, batch, params, x_td)?;
                (y, MlpForward::Gelu(saved))
            }
        })
    }

    /// Makes again what was let go; `x` makes the input.
    pub(crate) fn remake<B: Pointwise, E: Scalar>(
        device: &B,
        saved: &mut MlpForward<B::Buf<E>>,
        x: impl FnOnce() -> Result<B::Buf<E>, Error>,
    ) -> Result<(), Error> {
        match saved {
            MlpForward::SwiGlu(saved) => SwiGluMlp::remake::<B, E>(device, saved, x),
            MlpForward::Gelu(saved) => GeluMlp::remake::<B, E>(device, saved, x),
        }
    }

    /// dx outside from dy outside.
    ///
    /// # Errors
    /// As [`Mlp::forward`], and [`Error::Order`] where what is saved is another MLP's.
    pub fn backward_input<B: Gemm + Pointwise, C: Collectives<B>, E: Scalar>(
        &self,
        ctx: &Ctx<'_, B, C>,
        batch: &MicroBatch<B, E>,
        params: &[B::Ref<'_, E>],
        saved: MlpForward<B::Buf<E>>,
        dy_td: &B::Buf<E>,
    ) -> Result<(B::Buf<E>, MlpWeight<B::Buf<E>>), Error> {
        Ok(match (self, saved) {
            (Mlp::SwiGlu(mlp), MlpForward::SwiGlu(saved)) => {
                let (dx, saved) = mlp.backward_input(ctx, batch, params, saved, dy_td)?;
                (dx, MlpWeight::SwiGlu(saved))
            }
            (Mlp::Gelu(mlp), MlpForward::Gelu(saved)) => {
                let (dx, saved) = mlp.backward_input(ctx, batch, params, saved, dy_td)?;
                (dx, MlpWeight::Gelu(saved))
            }
            _ => return Err(foreign()),
        })
    }

    /// Adds to the gradients of the parameters; `dy_td` is what backward_input was given.
    ///
    /// # Errors
    /// As [`Mlp::backward_input`].
    pub fn backward_weight<B: Gemm + Pointwise, C: Collectives<B>, E: Scalar>(
        &self,
        ctx: &Ctx<'_, B, C>,
        batch: &MicroBatch<B, E>,
        saved: MlpWeight<B::Buf<E>>,
        dy_td: &B::Buf<E>,
        grads: &mut [B::Mut<'_, E::Acc>],
    ) -> Result<(), Error> {
        match (self, saved) {
            (Mlp::SwiGlu(mlp), MlpWeight::SwiGlu(saved)) => {
                mlp.backward_weight(ctx, batch, saved, dy_td, grads)
            }
            (Mlp::Gelu(mlp), MlpWeight::Gelu(saved)) => {
                mlp.backward_weight(ctx, batch, saved, dy_td, grads)
            }
            _ => Err(foreign()),
        }
    }
}

fn foreign() -> Error {
    Error::Order {
        layer: NAME,
        what: "what this kind of MLP saves",
        first: "its own forward",
    }
}

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
    /// As [`SwiGluForward::let_go`].
    fn let_go(&mut self) {
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
    fn remake<B: Pointwise, E: Scalar>(
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

/// `gelu(u)`.
fn gelu<B: Pointwise, E: Scalar>(device: &B, u: &B::Buf<E>) -> Result<B::Buf<E>, Error> {
    let mut s = device.alloc(Tag::Activation, B::len(B::whole(u)))?;
    device.gelu::<E>(B::whole(u), B::whole_mut(&mut s))?;
    Ok(s)
}
