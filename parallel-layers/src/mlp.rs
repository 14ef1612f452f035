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
use quintet_kernels::{Collectives, Gemm, Pointwise, Scalar};

use crate::architecture::MlpKind;
use crate::block::BlockSpec;
use crate::{Ctx, Error, MicroBatch};

mod gelu;
mod swiglu;

pub use gelu::{GeluForward, GeluMlp, GeluWeight};
pub(crate) use swiglu::gated;
pub use swiglu::{SwiGluForward, SwiGluMlp, SwiGluWeight};

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
