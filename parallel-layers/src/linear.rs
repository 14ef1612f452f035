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

mod column;
mod row;

use quintet_kernels::{Epilogue, Float, Gemm, GemmSpec, Trans};

use crate::Error;

pub use column::ColumnParallelLinear;
pub use row::{RowBackward, RowParallelLinear};

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
