//! Outputs cut over tp.

use alloc::string::{String, ToString};
use alloc::vec::Vec;
use core::ops::Range;

use quintet_collectives::chunk::chunk;
use quintet_collectives::{Axis, DeviceMesh, Factor, Init, ParamSpec, Placement};
use quintet_kernels::{Backend, Collectives, Gemm, Pointwise, Scalar, Tag};

use super::Dense;
use crate::spec::{INIT_STD, OnTp, dense, join};
use crate::{Ctx, Error};

/// `y = x w^T + b` with the outputs cut over tp.
#[derive(Debug, Clone)]
pub struct ColumnParallelLinear {
    mesh: DeviceMesh,
    name: String,
    outputs: usize,
    inputs: usize,
    unit: usize,
    cut: Factor,
    rep: Factor,
    bias: bool,
    tie: Option<String>,
}

impl ColumnParallelLinear {
    /// The layer whose parameters are `{name}.weight` and `{name}.bias`: without bias, cut in
    /// single outputs over all of tp.
    #[must_use]
    pub fn new(mesh: &DeviceMesh, name: &str, outputs: usize, inputs: usize) -> Self {
        let cut = mesh.factor(Axis::Tp);
        Self {
            mesh: *mesh,
            name: name.to_string(),
            outputs,
            inputs,
            unit: 1,
            cut,
            rep: Factor { degree: 1, ..cut },
            bias: false,
            tie: None,
        }
    }

    /// Keeps runs of `unit` outputs together: the width of a head.
    #[must_use]
    pub fn units(mut self, unit: usize) -> Self {
        self.unit = unit.max(1);
        self
    }

    /// Cuts the outputs in `parts`, each held by tp / parts neighbours.
    ///
    /// # Errors
    /// Where `parts` does not divide tp.
    pub fn parts(mut self, parts: usize) -> Result<Self, Error> {
        (self.cut, self.rep) = self.mesh.split_axis(Axis::Tp, parts)?;
        Ok(self)
    }

    /// Adds a bias.
    #[must_use]
    pub fn with_bias(mut self) -> Self {
        self.bias = true;
        self
    }

    /// Says that the weight is one of several copies, which sum their gradients as `group`.
    #[must_use]
    pub fn tied(mut self, group: &str) -> Self {
        self.tie = Some(group.to_string());
        self
    }

    /// The weight, and the bias if there is one.
    #[must_use]
    pub fn params(&self) -> Vec<ParamSpec> {
        let mut on_tp: OnTp = [(self.cut, Placement::shard_units(0, self.unit))].to_vec();
        if self.rep.degree > 1 {
            on_tp.push((self.rep, Placement::Replicate));
        }
        let (m, init) = (&self.mesh, Init::Normal { std: INIT_STD });
        let shape = [self.outputs, self.inputs];
        let mut weight = dense(m, &join(&self.name, "weight"), &shape, &on_tp, init);
        weight.tie.clone_from(&self.tie);
        let mut all = alloc::vec![weight];
        if self.bias {
            let name = join(&self.name, "bias");
            all.push(dense(m, &name, &[self.outputs], &on_tp, Init::Zeros));
        }
        all
    }

    /// The outputs that tp rank `rank` computes.
    #[must_use]
    pub fn local(&self, rank: usize) -> Range<usize> {
        let place = rank / self.cut.stride % self.cut.degree;
        let part = chunk(self.outputs / self.unit, self.cut.degree, place);
        part.start * self.unit..part.end * self.unit
    }

    fn here<B: Backend, C: Collectives<B>>(&self, ctx: &Ctx<'_, B, C>, rows: usize) -> Dense {
        Dense {
            rows,
            outputs: self.local(ctx.tp.rank()).len(),
            inputs: self.inputs,
        }
    }

    /// `y` Shard(1) from the whole `x` Replicate.
    ///
    /// # Errors
    /// What a kernel refuses.
    pub fn forward<B: Gemm, C: Collectives<B>, E: Scalar>(
        &self,
        ctx: &Ctx<'_, B, C>,
        rows: usize,
        w: B::Ref<'_, E>,
        bias: Option<B::Ref<'_, E>>,
        x: B::Ref<'_, E>,
    ) -> Result<B::Buf<E>, Error> {
        let here = self.here(ctx, rows);
        let mut y = ctx.device.alloc(Tag::Activation, rows * here.outputs)?;
        here.forward(ctx.device, w, bias, x, B::whole_mut(&mut y))?;
        Ok(y)
    }

    /// `dx` Partial from `dy` Shard(1); added to what `dx` holds where `accumulate`.
    ///
    /// # Errors
    /// What a kernel refuses.
    pub fn backward_input<B: Gemm, C: Collectives<B>, E: Scalar>(
        &self,
        ctx: &Ctx<'_, B, C>,
        rows: usize,
        w: B::Ref<'_, E>,
        dy: B::Ref<'_, E>,
        dx: B::Mut<'_, E>,
        accumulate: bool,
    ) -> Result<(), Error> {
        self.here(ctx, rows)
            .backward_input(ctx.device, w, dy, dx, accumulate)
    }

    /// Adds to the gradient of the weight, and of the bias where `db` is given.
    ///
    /// # Errors
    /// What a kernel refuses.
    pub fn backward_weight<B: Gemm + Pointwise, C: Collectives<B>, E: Scalar>(
        &self,
        ctx: &Ctx<'_, B, C>,
        rows: usize,
        x: B::Ref<'_, E>,
        dy: B::Ref<'_, E>,
        dw: B::Mut<'_, E::Acc>,
        db: Option<B::Mut<'_, E::Acc>>,
    ) -> Result<(), Error> {
        let here = self.here(ctx, rows);
        here.backward_weight::<B, E>(ctx.device, x, dy, dw)?;
        match db {
            Some(db) if here.outputs > 0 => Ok(ctx.device.add_rows::<E>(dy, db)?),
            _ => Ok(()),
        }
    }
}
