//! The SwiGLU MLP (Shazeer 2020): one tensor parallel region.
//!
//! ```text
//!                            +- gate -> Shard(f) -+
//! x outside --enter--> Replicate                  silu(g) * u --down--> Partial --leave--> y outside
//!                            +-- up --> Shard(f) -+
//! outside: Invariant, or Shard(t) under sequence parallelism
//! ```
//!
//! The width f need not be a multiple of tp; a rank may hold none of it.

use alloc::vec::Vec;

use quintet_collectives::{DeviceMesh, ParamSpec};
use quintet_kernels::{Collectives, Gemm, Pointwise, Scalar, Tag};

use crate::block::BlockSpec;
use crate::linear::{ColumnParallelLinear, RowBackward, RowParallelLinear};
use crate::region::{Region, apply};
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
pub struct MlpForward<Buf> {
    /// The input, whole.
    x: Buf,
    /// Gate, before silu.
    g: Buf,
    /// Up.
    u: Buf,
    /// silu(g) * u.
    s: Buf,
}

/// What the weights' gradients need.
#[derive(Debug)]
pub struct MlpWeight<Buf> {
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

    /// y outside from x outside, both `[t, d]`; the weights are gate, up, down.
    ///
    /// # Errors
    /// What a kernel or a collective refuses or fails with.
    pub fn forward<B: Gemm + Pointwise, C: Collectives<B>, E: Scalar>(
        &self,
        ctx: &Ctx<'_, B, C>,
        batch: &MicroBatch<B, E>,
        [wg, wu, wd]: [B::Ref<'_, E>; 3],
        x_td: B::Buf<E>,
    ) -> Result<(B::Buf<E>, MlpForward<B::Buf<E>>), Error> {
        let t = batch.tokens();
        let x = apply(ctx, self.region.enter(), x_td, t, self.hidden)?;
        let g = self.gate.forward(ctx, t, wg, None, B::whole(&x))?;
        let u = self.up.forward(ctx, t, wu, None, B::whole(&x))?;
        let mut s = ctx.device.alloc(Tag::Activation, B::len(B::whole(&g)))?;
        ctx.device
            .swiglu::<E>(B::whole(&g), B::whole(&u), B::whole_mut(&mut s))?;
        let y = self.down.forward(ctx, t, wd, None, B::whole(&s))?;
        Ok((y, MlpForward { x, g, u, s }))
    }

    /// dx outside from dy outside.
    ///
    /// # Errors
    /// As [`SwiGluMlp::forward`].
    pub fn backward_input<B: Gemm + Pointwise, C: Collectives<B>, E: Scalar>(
        &self,
        ctx: &Ctx<'_, B, C>,
        batch: &MicroBatch<B, E>,
        [wg, wu, wd]: [B::Ref<'_, E>; 3],
        saved: MlpForward<B::Buf<E>>,
        dy_td: &B::Buf<E>,
    ) -> Result<(B::Buf<E>, MlpWeight<B::Buf<E>>), Error> {
        let (t, dev) = (batch.tokens(), ctx.device);
        let MlpForward { x, g, u, s } = saved;
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
        let saved = MlpWeight {
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
        saved: MlpWeight<B::Buf<E>>,
        dy_td: &B::Buf<E>,
        [gg, gu, gd]: [B::Mut<'_, E::Acc>; 3],
    ) -> Result<(), Error> {
        let t = batch.tokens();
        let x = B::whole(&saved.x);
        let dy = B::whole(saved.dy_whole.as_ref().unwrap_or(dy_td));
        self.down
            .backward_weight::<B, C, E>(ctx, t, B::whole(&saved.s), dy, gd, None)?;
        self.gate
            .backward_weight::<B, C, E>(ctx, t, x, B::whole(&saved.dg), gg, None)?;
        self.up
            .backward_weight::<B, C, E>(ctx, t, x, B::whole(&saved.du), gu, None)
    }
}
