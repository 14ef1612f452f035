//! The second half of a block: one MLP for all tokens, gated or not, or a mixture of experts.

use alloc::vec::Vec;

use quintet_collectives::{DeviceMesh, ParamSpec};
use quintet_kernels::{Collectives, Gemm, GroupedGemm, Permute, Pointwise, Router, Scalar};

use crate::architecture::MlpKind;
use crate::block::BlockSpec;
use crate::mlp::{GeluForward, GeluMlp, GeluWeight, SwiGluForward, SwiGluMlp, SwiGluWeight};
use crate::moe::{MoeForward, MoeMlp, MoeShape, MoeWeight, Routing};
use crate::{Ctx, Error, MicroBatch};

const NAME: &str = "mlp";

/// An MLP of a block.
#[derive(Debug, Clone)]
pub enum Ffn {
    /// Three matrices and a gate, the same for all tokens.
    SwiGlu(SwiGluMlp),
    /// Two matrices, with biases where the architecture has them, the same for all tokens.
    Gelu(GeluMlp),
    /// For each token a few of many.
    Moe(MoeMlp),
}

/// What forward saves.
#[derive(Debug)]
pub enum FfnForward<Buf, Stat> {
    /// Of [`Ffn::SwiGlu`].
    SwiGlu(SwiGluForward<Buf>),
    /// Of [`Ffn::Gelu`].
    Gelu(GeluForward<Buf>),
    /// Of [`Ffn::Moe`].
    Moe(MoeForward<Buf, Stat>),
}

/// What the weights' gradients need.
#[derive(Debug)]
pub enum FfnWeight<Buf, Stat> {
    /// Of [`Ffn::SwiGlu`].
    SwiGlu(SwiGluWeight<Buf>),
    /// Of [`Ffn::Gelu`].
    Gelu(GeluWeight<Buf>),
    /// Of [`Ffn::Moe`].
    Moe(MoeWeight<Buf, Stat>),
}

impl<Buf, Stat> FfnForward<Buf, Stat> {
    /// Where tokens went; none of a dense MLP.
    #[must_use]
    pub fn routing(&self) -> Option<&Routing> {
        match self {
            FfnForward::SwiGlu(_) | FfnForward::Gelu(_) => None,
            FfnForward::Moe(saved) => Some(saved.routing()),
        }
    }

    /// Lets go what is cheap to make again.
    pub(crate) fn let_go(&mut self) {
        match self {
            FfnForward::SwiGlu(saved) => saved.let_go(),
            FfnForward::Gelu(saved) => saved.let_go(),
            FfnForward::Moe(saved) => saved.let_go(),
        }
    }
}

impl Ffn {
    /// The MLP that a block's spec asks for; parameters begin with `name`.
    ///
    /// # Errors
    /// [`Error::Layout`] where the experts cannot be dealt to ep.
    pub fn new(mesh: &DeviceMesh, name: &str, spec: &BlockSpec) -> Result<Self, Error> {
        let Some(moe) = &spec.moe else {
            return Ok(match spec.architecture.mlp {
                MlpKind::SwiGlu => Ffn::SwiGlu(SwiGluMlp::new(mesh, name, spec)?),
                MlpKind::Gelu => Ffn::Gelu(GeluMlp::new(mesh, name, spec)?),
            });
        };
        let shape = MoeShape {
            hidden: spec.hidden,
            layers: spec.layers,
            sequence_parallel: spec.sequence_parallel,
        };
        Ok(Ffn::Moe(MoeMlp::new(mesh, name, &shape, moe)?))
    }

    /// Its parameters.
    #[must_use]
    pub fn params(&self) -> Vec<ParamSpec> {
        match self {
            Ffn::SwiGlu(mlp) => mlp.params(),
            Ffn::Gelu(mlp) => mlp.params(),
            Ffn::Moe(moe) => moe.params(),
        }
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
    ) -> Result<(B::Buf<E>, FfnForward<B::Buf<E>, B::Buf<E::Acc>>), Error>
    where
        B: Gemm + GroupedGemm + Pointwise + Router + Permute,
        C: Collectives<B>,
        E: Scalar,
    {
        Ok(match self {
            Ffn::SwiGlu(mlp) => {
                let (y, saved) = mlp.forward(ctx, batch, params, x_td)?;
                (y, FfnForward::SwiGlu(saved))
            }
            Ffn::Gelu(mlp) => {
                let (y, saved) = mlp.forward(ctx, batch, params, x_td)?;
                (y, FfnForward::Gelu(saved))
            }
            Ffn::Moe(moe) => {
                let (y, saved) = moe.forward(ctx, batch, params, x_td)?;
                (y, FfnForward::Moe(saved))
            }
        })
    }

    /// Makes again what was let go; `x_td` makes what forward was given.
    pub(crate) fn remake<B, C, E>(
        &self,
        ctx: &Ctx<'_, B, C>,
        batch: &MicroBatch<B, E>,
        saved: &mut FfnForward<B::Buf<E>, B::Buf<E::Acc>>,
        x_td: impl FnOnce() -> Result<B::Buf<E>, Error>,
    ) -> Result<(), Error>
    where
        B: Pointwise,
        C: Collectives<B>,
        E: Scalar,
    {
        match (self, saved) {
            (_, FfnForward::SwiGlu(saved)) => SwiGluMlp::remake::<B, E>(ctx.device, saved, x_td),
            (_, FfnForward::Gelu(saved)) => GeluMlp::remake::<B, E>(ctx.device, saved, x_td),
            (Ffn::Moe(moe), FfnForward::Moe(saved)) => moe.remake(ctx, batch, saved, x_td),
            _ => Err(foreign()),
        }
    }

    /// dx outside from dy outside.
    ///
    /// # Errors
    /// As [`Ffn::forward`], and [`Error::Order`] where what is saved is another MLP's.
    pub fn backward_input<B, C, E>(
        &self,
        ctx: &Ctx<'_, B, C>,
        batch: &MicroBatch<B, E>,
        params: &[B::Ref<'_, E>],
        saved: FfnForward<B::Buf<E>, B::Buf<E::Acc>>,
        dy_td: &B::Buf<E>,
    ) -> Result<(B::Buf<E>, FfnWeight<B::Buf<E>, B::Buf<E::Acc>>), Error>
    where
        B: Gemm + GroupedGemm + Pointwise + Router + Permute,
        C: Collectives<B>,
        E: Scalar,
    {
        Ok(match (self, saved) {
            (Ffn::SwiGlu(mlp), FfnForward::SwiGlu(saved)) => {
                let (dx, saved) = mlp.backward_input(ctx, batch, params, saved, dy_td)?;
                (dx, FfnWeight::SwiGlu(saved))
            }
            (Ffn::Gelu(mlp), FfnForward::Gelu(saved)) => {
                let (dx, saved) = mlp.backward_input(ctx, batch, params, saved, dy_td)?;
                (dx, FfnWeight::Gelu(saved))
            }
            (Ffn::Moe(moe), FfnForward::Moe(saved)) => {
                let (dx, saved) = moe.backward_input(ctx, batch, params, saved, dy_td)?;
                (dx, FfnWeight::Moe(saved))
            }
            _ => return Err(foreign()),
        })
    }

    /// Adds to the gradients of the parameters; `dy_td` is what backward_input was given.
    ///
    /// # Errors
    /// As [`Ffn::backward_input`].
    pub fn backward_weight<B, C, E>(
        &self,
        ctx: &Ctx<'_, B, C>,
        batch: &MicroBatch<B, E>,
        saved: FfnWeight<B::Buf<E>, B::Buf<E::Acc>>,
        dy_td: &B::Buf<E>,
        grads: &mut [B::Mut<'_, E::Acc>],
    ) -> Result<(), Error>
    where
        B: Gemm + GroupedGemm + Pointwise + Router + Permute,
        C: Collectives<B>,
        E: Scalar,
    {
        match (self, saved) {
            (Ffn::SwiGlu(mlp), FfnWeight::SwiGlu(saved)) => {
                mlp.backward_weight(ctx, batch, saved, dy_td, grads)
            }
            (Ffn::Gelu(mlp), FfnWeight::Gelu(saved)) => {
                mlp.backward_weight(ctx, batch, saved, dy_td, grads)
            }
            (Ffn::Moe(moe), FfnWeight::Moe(saved)) => {
                moe.backward_weight(ctx, batch, saved, dy_td, grads)
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
