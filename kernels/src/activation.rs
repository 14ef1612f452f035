//! Pointwise ops: SwiGLU, GELU, sums, dropout, and the cast between storage types.

pub mod cpu;
pub mod naive;

use alloc::vec;

use crate::dropout::DropoutSpec;
use crate::error::need;
use crate::{Backend, Error, Float, Real, Tag};

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

    /// Lets elements of `x` go and scales up what stays ([`crate::dropout`]), which of a gradient is
    /// the backward; `at` are the places of its rows in their samples. A device without an op of its
    /// own does it on the host.
    ///
    /// # Errors
    /// [`Error::Len`] where `x` does not have a row of `width` for each place.
    fn dropout<E: Float>(
        &self,
        spec: &DropoutSpec,
        at: Self::Ref<'_, i32>,
        x: Self::Mut<'_, E>,
    ) -> Result<(), Error> {
        let (rows, len) = (Self::len(at), Self::len(Self::as_ref(&x)));
        need("dropout", "x", rows * spec.width, len)?;
        let (mut places, mut host) = (vec![0; rows], vec![E::from_acc(E::Acc::ZERO); len]);
        self.download(at, &mut places)?;
        self.download(Self::as_ref(&x), &mut host)?;
        spec.apply(&places, &mut host);
        let dropped = self.upload(Tag::Scratch, &host)?;
        self.copy(Self::whole(&dropped), x)
    }

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
