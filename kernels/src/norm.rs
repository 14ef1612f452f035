//! RMSNorm and LayerNorm over the last dim, each with an optional residual taken in on the way.
//!
//! ```text
//! h_td = x_td + r_td (or x_td)      y = w * h / sqrt(mean(h^2) + eps)              RMSNorm
//!                                   y = w * (h - mean) / sqrt(var + eps) + b       LayerNorm
//! ```
//!
//! Statistics are kept per row in Acc (`stat_t`: rstd; LayerNorm also `mean_t`). The weight's
//! gradient is added into Acc in row order.

pub mod cpu;
pub mod naive;

use crate::{Backend, Error, Float};

/// Shape of one norm call.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct NormSpec {
    /// Rows (tokens).
    pub rows: usize,
    /// Width of a row.
    pub dim: usize,
    /// Added to the variance.
    pub eps: f64,
}

impl NormSpec {
    /// Elements of all rows.
    pub(crate) fn len(&self) -> usize {
        self.rows.saturating_mul(self.dim)
    }
}

/// The norms on a device.
pub trait Norm: Backend {
    /// RMSNorm. With `residual = Some((r_td, h_td))` the sum x + r is written to `h_td` and
    /// normalised; without it x itself is.
    ///
    /// # Errors
    /// [`Error::Len`] where a length does not fit.
    fn rms_norm<E: Float>(
        &self,
        spec: &NormSpec,
        x_td: Self::Ref<'_, E>,
        residual: Option<(Self::Ref<'_, E>, Self::Mut<'_, E>)>,
        w_d: Self::Ref<'_, E>,
        y_td: Self::Mut<'_, E>,
        rstd_t: Self::Mut<'_, E::Acc>,
    ) -> Result<(), Error>;

    /// Gradient of the normalised input h: `dh = dresidual + d(norm)/dh . dy`, where `dresidual`
    /// (the gradient that reaches h beside the norm) may be absent.
    ///
    /// # Errors
    /// [`Error::Len`] where a length does not fit.
    fn rms_norm_backward_input<E: Float>(
        &self,
        spec: &NormSpec,
        h_td: Self::Ref<'_, E>,
        w_d: Self::Ref<'_, E>,
        rstd_t: Self::Ref<'_, E::Acc>,
        dy_td: Self::Ref<'_, E>,
        dresidual_td: Option<Self::Ref<'_, E>>,
        dh_td: Self::Mut<'_, E>,
    ) -> Result<(), Error>;

    /// `dw[d] += sum_t dy[t,d] h[t,d] rstd[t]`.
    ///
    /// # Errors
    /// [`Error::Len`] where a length does not fit.
    fn rms_norm_backward_weight<E: Float>(
        &self,
        spec: &NormSpec,
        h_td: Self::Ref<'_, E>,
        rstd_t: Self::Ref<'_, E::Acc>,
        dy_td: Self::Ref<'_, E>,
        dw_d: Self::Mut<'_, E::Acc>,
    ) -> Result<(), Error>;

    /// LayerNorm; arguments as [`Norm::rms_norm`], `wb = (weight, bias)`,
    /// `stats = (mean_t, rstd_t)`.
    ///
    /// # Errors
    /// [`Error::Len`] where a length does not fit.
    fn layer_norm<E: Float>(
        &self,
        spec: &NormSpec,
        x_td: Self::Ref<'_, E>,
        residual: Option<(Self::Ref<'_, E>, Self::Mut<'_, E>)>,
        wb: (Self::Ref<'_, E>, Self::Ref<'_, E>),
        y_td: Self::Mut<'_, E>,
        stats: (Self::Mut<'_, E::Acc>, Self::Mut<'_, E::Acc>),
    ) -> Result<(), Error>;

    /// As [`Norm::rms_norm_backward_input`], for LayerNorm.
    ///
    /// # Errors
    /// [`Error::Len`] where a length does not fit.
    fn layer_norm_backward_input<E: Float>(
        &self,
        spec: &NormSpec,
        h_td: Self::Ref<'_, E>,
        w_d: Self::Ref<'_, E>,
        stats: (Self::Ref<'_, E::Acc>, Self::Ref<'_, E::Acc>),
        dy_td: Self::Ref<'_, E>,
        dresidual_td: Option<Self::Ref<'_, E>>,
        dh_td: Self::Mut<'_, E>,
    ) -> Result<(), Error>;

    /// `dw += sum_t dy (h - mean) rstd` and `db += sum_t dy`; `dwb = (dw, db)`.
    ///
    /// # Errors
    /// [`Error::Len`] where a length does not fit.
    fn layer_norm_backward_weight<E: Float>(
        &self,
        spec: &NormSpec,
        h_td: Self::Ref<'_, E>,
        stats: (Self::Ref<'_, E::Acc>, Self::Ref<'_, E::Acc>),
        dy_td: Self::Ref<'_, E>,
        dwb: (Self::Mut<'_, E::Acc>, Self::Mut<'_, E::Acc>),
    ) -> Result<(), Error>;
}
