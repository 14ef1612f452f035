//! Inputs cut over tp.

use alloc::string::{String, ToString};
use alloc::vec::Vec;
use core::ops::Range;

use quintet_collectives::chunk::chunk;
use quintet_collectives::{Axis, DeviceMesh, Init, ParamSpec, Placement};
use quintet_kernels::{Backend, Collectives, Gemm, Pointwise, Scalar, Tag};

use super::{Dense, add_bias};
use crate::region::{Region, apply, apply_to};
use crate::spec::{INIT_STD, dense, join};
use crate::{Ctx, Error};

/// `y = x w^T + b` with the inputs cut over tp.
#[derive(Debug, Clone)]
pub struct RowParallelLinear {
    mesh: DeviceMesh,
    name: String,
    outputs: usize,
    inputs: usize,
    unit: usize,
    std: f64,
    bias: bool,
    region: Region,
}

/// The gradient that a row-parallel layer's backward makes whole, and the one it computes.
#[derive(Debug)]
pub struct RowBackward<Buf> {
    /// `dy` Replicate; `None` where it is the `dy` that came in.
    pub dy_whole: Option<Buf>,
    /// `dx` Shard(1).
    pub dx: Buf,
}

impl RowParallelLinear {
    /// The layer whose parameters are `{name}.weight` and `{name}.bias`, that leaves `region`:
    /// without bias, cut in single inputs.
    #[must_use]
    pub fn new(
        mesh: &DeviceMesh,
        name: &str,
        outputs: usize,
        inputs: usize,
        region: Region,
    ) -> Self {
        Self {
            mesh: *mesh,
            name: name.to_string(),
            outputs,
            inputs,
            unit: 1,
            std: INIT_STD,
            bias: false,
            region,
        }
    }

    /// Keeps runs of `unit` inputs together: the width of a head.
    #[must_use]
    pub fn units(mut self, unit: usize) -> Self {
        self.unit = unit.max(1);
        self
    }

    /// Adds a bias.
    #[must_use]
    pub fn with_bias(mut self) -> Self {
        self.bias = true;
        self
    }

    /// Begins smaller by sqrt(2 layers), as what writes to the residual stream of that many
    /// blocks should (GPT-2).
    #[must_use]
    pub fn into_residual(mut self, layers: usize) -> Self {
        self.std = INIT_STD / libm::sqrt(2.0 * layers.max(1) as f64);
        self
    }

    /// The weight, and the bias if there is one.
    #[must_use]
    pub fn params(&self) -> Vec<ParamSpec> {
        let (m, tp) = (&self.mesh, self.mesh.factor(Axis::Tp));
        let on_tp = [(tp, Placement::shard_units(1, self.unit))];
        let (shape, init) = ([self.outputs, self.inputs], Init::Normal { std: self.std });
        let weight = dense(m, &join(&self.name, "weight"), &shape, &on_tp, init);
        let mut all = alloc::vec![weight];
        if self.bias {
            let name = join(&self.name, "bias");
            let on_tp = [(tp, self.region.outside_param())];
            all.push(dense(m, &name, &[self.outputs], &on_tp, Init::Zeros));
        }
        all
    }

    /// The inputs that tp rank `rank` takes.
    #[must_use]
    pub fn local(&self, rank: usize) -> Range<usize> {
        let part = chunk(self.inputs / self.unit, self.mesh.degree(Axis::Tp), rank);
        part.start * self.unit..part.end * self.unit
    }

    fn here<B: Backend, C: Collectives<B>>(&self, ctx: &Ctx<'_, B, C>, rows: usize) -> Dense {
        Dense {
            rows,
            outputs: self.outputs,
            inputs: self.local(ctx.tp.rank()).len(),
        }
    }

    /// `y`, moved out of the region, from `x` Shard(1).
    ///
    /// # Errors
    /// What a kernel or a collective refuses or fails with.
    pub fn forward<B: Gemm, C: Collectives<B>, E: Scalar>(
        &self,
        ctx: &Ctx<'_, B, C>,
        rows: usize,
        w: B::Ref<'_, E>,
        bias: Option<B::Ref<'_, E>>,
        x: B::Ref<'_, E>,
    ) -> Result<B::Buf<E>, Error> {
        let here = self.here(ctx, rows);
        let mut y = ctx.device.alloc(Tag::Activation, rows * self.outputs)?;
        here.forward(ctx.device, w, None, x, B::whole_mut(&mut y))?;
        let mut y = apply(ctx, self.region.leave(), y, rows, self.outputs)?;
        if let Some(bias) = bias {
            let rows = self.region.local_rows::<B, C>(ctx.tp, rows);
            add_bias(ctx.device, rows, self.outputs, bias, B::whole_mut(&mut y))?;
        }
        Ok(y)
    }

    /// `dx` Shard(1) from `dy` as it lies between layers.
    ///
    /// # Errors
    /// What a kernel or a collective refuses or fails with.
    pub fn backward_input<B: Gemm, C: Collectives<B>, E: Scalar>(
        &self,
        ctx: &Ctx<'_, B, C>,
        rows: usize,
        w: B::Ref<'_, E>,
        dy: &B::Buf<E>,
    ) -> Result<RowBackward<B::Buf<E>>, Error> {
        let back = self.region.leave().backward()?;
        let dy_whole = apply_to(ctx, back, B::whole(dy), rows, self.outputs)?;
        let here = self.here(ctx, rows);
        let mut dx = ctx.device.alloc(Tag::Activation, rows * here.inputs)?;
        let dy = B::whole(dy_whole.as_ref().unwrap_or(dy));
        here.backward_input(ctx.device, w, dy, B::whole_mut(&mut dx), false)?;
        Ok(RowBackward { dy_whole, dx })
    }

    /// Adds to the gradient of the weight from `dy` made whole, and, where `bias` is given, to
    /// that of the bias from `dy` as it lies between layers: `bias = (dy, db)`.
    ///
    /// # Errors
    /// What a kernel refuses.
    pub fn backward_weight<B: Gemm + Pointwise, C: Collectives<B>, E: Scalar>(
        &self,
        ctx: &Ctx<'_, B, C>,
        rows: usize,
        x: B::Ref<'_, E>,
        dy_whole: B::Ref<'_, E>,
        dw: B::Mut<'_, E::Acc>,
        bias: Option<(B::Ref<'_, E>, B::Mut<'_, E::Acc>)>,
    ) -> Result<(), Error> {
        let here = self.here(ctx, rows);
        here.backward_weight::<B, E>(ctx.device, x, dy_whole, dw)?;
        if let Some((dy, db)) = bias {
            ctx.device.add_rows::<E>(dy, db)?;
        }
        Ok(())
    }
}
