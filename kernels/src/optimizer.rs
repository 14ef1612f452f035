//! Optimizer steps and the sum of squares, on a flat range.
//!
//! The gradient is multiplied by `grad_scale` (the clip factor) on the way in, so clipping costs
//! no pass of its own. The step is taken in Acc on the master weights and written to the
//! parameters as they are used, rounded once; where storage and Acc are the same type the caller
//! may keep no second copy and pass `param = None`.

pub mod cpu;
pub mod naive;

use crate::{Backend, Error, Float};

/// Numbers of one AdamW step (Loshchilov and Hutter 2019, decoupled decay, as PyTorch does it).
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AdamWSpec {
    /// Learning rate of this step.
    pub lr: f64,
    /// Decay of the first moment.
    pub beta1: f64,
    /// Decay of the second moment.
    pub beta2: f64,
    /// Added to the root of the second moment.
    pub eps: f64,
    /// Decoupled weight decay; 0 for parameters that take none.
    pub weight_decay: f64,
    /// Step number, from 1.
    pub step: u64,
    /// Factor on the gradient.
    pub grad_scale: f64,
}

/// Numbers of one SGD step: `w -= lr (grad_scale g + weight_decay w)`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct SgdSpec {
    /// Learning rate of this step.
    pub lr: f64,
    /// Weight decay; 0 for parameters that take none.
    pub weight_decay: f64,
    /// Factor on the gradient.
    pub grad_scale: f64,
}

/// Optimizer steps on a device; all arguments of a call have one length.
pub trait Optimizer: Backend {
    /// `m = b1 m + (1-b1) g; v = b2 v + (1-b2) g^2;`
    /// `w = w (1 - lr wd) - lr (m / (1-b1^t)) / (sqrt(v / (1-b2^t)) + eps)`.
    ///
    /// # Errors
    /// [`Error::Len`] where lengths differ.
    fn adamw<E: Float>(
        &self,
        spec: &AdamWSpec,
        grad: Self::Ref<'_, E::Acc>,
        master: Self::Mut<'_, E::Acc>,
        moments: (Self::Mut<'_, E::Acc>, Self::Mut<'_, E::Acc>),
        param: Option<Self::Mut<'_, E>>,
    ) -> Result<(), Error>;

    /// `w -= lr (scale g + wd w)`.
    ///
    /// # Errors
    /// [`Error::Len`] where lengths differ.
    fn sgd<E: Float>(
        &self,
        spec: &SgdSpec,
        grad: Self::Ref<'_, E::Acc>,
        master: Self::Mut<'_, E::Acc>,
        param: Option<Self::Mut<'_, E>>,
    ) -> Result<(), Error>;

    /// `out[0] += sum of x^2`, in f64 and index order.
    ///
    /// # Errors
    /// [`Error::Len`] where `out` holds no element.
    fn add_squares<T: Float>(
        &self,
        x: Self::Ref<'_, T>,
        out: Self::Mut<'_, f64>,
    ) -> Result<(), Error>;
}
