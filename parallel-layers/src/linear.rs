//! The two tensor parallel linear layers, weights stored `[out, in]`.
//!
//! ```text
//! ColumnParallelLinear     rows of the weight are cut: Shard(0)
//!   x Replicate ------------- y = x w^T (+ b) --------------> y Shard(1)
//!   dx Partial  <------------ dx = dy w --------------------- dy Shard(1)
//!
//! RowParallelLinear        columns of the weight are cut: Shard(1)
//!   x Shard(1) -- x w^T --> Partial -- leave --> y (+ b)      Invariant, or Shard(t)
//!   dx Shard(1) <-- dy w -- Replicate <-- dual of leave -- dy Invariant, or Shard(t)
//! ```
//!
//! A column layer has no move of its own, since several share one input: the caller moves it
//! ([`crate::region`]). The bias of a row layer is added once, after the sum over ranks. Weight
//! gradients `dw += dy^T x` are local; who sums them follows from the ledger.
//!
//! With fewer KV heads than ranks, [`ColumnParallelLinear::parts`] cuts the weight in fewer parts
//! than tp has ranks: tp = parts x rep, Shard(0) over the first factor, Replicate over the second.

use alloc::string::{String, ToString};
use alloc::vec::Vec;
use core::ops::Range;

use quintet_collectives::chunk::chunk;
use quintet_collectives::{Axis, DeviceMesh, Factor, Init, ParamSpec, Placement};
use quintet_kernels::{
    Backend, Collectives, Epilogue, Float, Gemm, GemmSpec, Pointwise, Scalar, Tag, Trans,
};

use crate::region::{Region, apply, apply_to};
use crate::spec::{INIT_STD, OnTp, dense};
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
        let mut weight = dense(m, &(self.name.clone() + ".weight"), &shape, &on_tp, init);
        weight.tie.clone_from(&self.tie);
        let mut all = alloc::vec![weight];
        if self.bias {
            let name = self.name.clone() + ".bias";
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
        let mut y = ctx.device.zeros(Tag::Activation, rows * here.outputs)?;
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
        let weight = dense(m, &(self.name.clone() + ".weight"), &shape, &on_tp, init);
        let mut all = alloc::vec![weight];
        if self.bias {
            let name = self.name.clone() + ".bias";
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
        let mut y = ctx.device.zeros(Tag::Activation, rows * self.outputs)?;
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
        let mut dx = ctx.device.zeros(Tag::Activation, rows * here.inputs)?;
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

/// `y[t, d] += b[d]`: a product over no inputs, whose epilogue adds the bias.
fn add_bias<B: Gemm, E: Float>(
    device: &B,
    rows: usize,
    width: usize,
    bias: B::Ref<'_, E>,
    y: B::Mut<'_, E>,
) -> Result<(), Error> {
    let spec = GemmSpec::new(rows, width, 0, Trans::N, Trans::T)
        .accumulate()
        .epilogue(Epilogue::Bias);
    let none = B::slice(bias, 0..0);
    Ok(device.gemm::<E, E>(&spec, none, none, Some(bias), None, y)?)
}

/// The product on one rank.
#[derive(Clone, Copy)]
struct Dense {
    rows: usize,
    outputs: usize,
    inputs: usize,
}

impl Dense {
    /// `y_tf = x_td w_fd^T (+ b_f)`.
    fn forward<B: Gemm, E: Float>(
        self,
        device: &B,
        w: B::Ref<'_, E>,
        bias: Option<B::Ref<'_, E>>,
        x: B::Ref<'_, E>,
        y: B::Mut<'_, E>,
    ) -> Result<(), Error> {
        let mut spec = GemmSpec::new(self.rows, self.outputs, self.inputs, Trans::N, Trans::T);
        if bias.is_some() {
            spec = spec.epilogue(Epilogue::Bias);
        }
        Ok(device.gemm::<E, E>(&spec, x, w, bias, None, y)?)
    }

    /// `dx_td (+)= dy_tf w_fd`.
    fn backward_input<B: Gemm, E: Float>(
        self,
        device: &B,
        w: B::Ref<'_, E>,
        dy: B::Ref<'_, E>,
        dx: B::Mut<'_, E>,
        accumulate: bool,
    ) -> Result<(), Error> {
        let mut spec = GemmSpec::new(self.rows, self.inputs, self.outputs, Trans::N, Trans::N);
        spec.accumulate = accumulate;
        Ok(device.gemm::<E, E>(&spec, dy, w, None, None, dx)?)
    }

    /// `dw_fd += dy_tf^T x_td`, in Acc.
    fn backward_weight<B: Gemm, E: Float>(
        self,
        device: &B,
        x: B::Ref<'_, E>,
        dy: B::Ref<'_, E>,
        dw: B::Mut<'_, E::Acc>,
    ) -> Result<(), Error> {
        let spec =
            GemmSpec::new(self.outputs, self.inputs, self.rows, Trans::T, Trans::N).accumulate();
        Ok(device.gemm::<E, E::Acc>(&spec, dy, x, None, None, dw)?)
    }
}
