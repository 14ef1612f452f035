//! Pointwise ops: SwiGLU, GELU, sums, and the cast between storage types.

pub mod cpu;
pub mod naive;

use crate::{Backend, Error, Float};

/// Pointwise ops on a device; all arguments of a call have one length.
pub trait Pointwise: Backend {
    /// `y = silu(g) * u`, silu(g) = g / (1 + e^-g).
    ///
    /// # Errors
    /// [`Error::Len`] where lengths differ.
    fn swiglu<E: Float>(
        &self,
        g: Self::Ref<'_, E>,
        u: Self::Ref<'_, E>,
        y: Self::Mut<'_, E>,
    ) -> Result<(), Error>;

    /// Gradients of both inputs of [`Pointwise::swiglu`], overwritten.
    ///
    /// # Errors
    /// [`Error::Len`] where lengths differ.
    fn swiglu_backward<E: Float>(
        &self,
        g: Self::Ref<'_, E>,
        u: Self::Ref<'_, E>,
        dy: Self::Ref<'_, E>,
        dg: Self::Mut<'_, E>,
        du: Self::Mut<'_, E>,
    ) -> Result<(), Error>;

    /// `y = gelu(x)`, tanh form (GPT-2's).
    ///
    /// # Errors
    /// [`Error::Len`] where lengths differ.
    fn gelu<E: Float>(&self, x: Self::Ref<'_, E>, y: Self::Mut<'_, E>) -> Result<(), Error>;

    /// `dx = gelu'(x) dy`.
    ///
    /// # Errors
    /// [`Error::Len`] where lengths differ.
    fn gelu_backward<E: Float>(
        &self,
        x: Self::Ref<'_, E>,
        dy: Self::Ref<'_, E>,
        dx: Self::Mut<'_, E>,
    ) -> Result<(), Error>;

    /// `x += y`.
    ///
    /// # Errors
    /// [`Error::Len`] where lengths differ.
    fn add<E: Float>(&self, x: Self::Mut<'_, E>, y: Self::Ref<'_, E>) -> Result<(), Error>;

    /// `db[n] += sum over rows of dy[rows, n]`: the gradient of a bias, in Acc and row order.
    ///
    /// # Errors
    /// [`Error::Len`] where `dy` is no multiple of `db`.
    fn add_rows<E: Float>(
        &self,
        dy: Self::Ref<'_, E>,
        db: Self::Mut<'_, E::Acc>,
    ) -> Result<(), Error>;

    /// `y = x` in another storage type, rounded once.
    ///
    /// # Errors
    /// [`Error::Len`] where lengths differ.
    fn cast<I: Float, O: Float>(
        &self,
        x: Self::Ref<'_, I>,
        y: Self::Mut<'_, O>,
    ) -> Result<(), Error>;
}
