//! RMSNorm between layers: every rank normalises the rows it holds.
//!
//! ```text
//!                      x             w            y
//! plain                Invariant     Invariant    Invariant     all ranks do the same
//! sequence parallel    Shard(t)      Replicate    Shard(t)      each its own tokens, so the
//!                                                               gradient of w is Partial
//! ```
//!
//! Nothing is sent; the placement of w alone makes the ledger sum its gradient over tp under
//! sequence parallelism, and only then.

use alloc::string::{String, ToString};

use quintet_collectives::{Axis, DeviceMesh, Init, ParamSpec};
use quintet_kernels::{Norm, NormSpec, Scalar, Tag};

use crate::region::Region;
use crate::spec::dense;
use crate::{Error, spec};

/// `y = w * h / rms(h)`, where h is x or x + r.
#[derive(Debug, Clone)]
pub struct RmsNorm {
    mesh: DeviceMesh,
    name: String,
    dim: usize,
    eps: f64,
    region: Region,
}

/// What the norm computes: its output, and the statistic of each row for backward.
#[derive(Debug)]
pub struct Normed<Buf, Stat> {
    /// `y[t, d]`.
    pub y: Buf,
    /// `1 / rms[t]`.
    pub rstd: Stat,
}

impl RmsNorm {
    /// The norm whose parameter is `{name}.weight`, on values between regions like `region`.
    #[must_use]
    pub fn new(mesh: &DeviceMesh, name: &str, dim: usize, eps: f64, region: Region) -> Self {
        Self {
            mesh: *mesh,
            name: name.to_string(),
            dim,
            eps,
            region,
        }
    }

    /// The weight.
    #[must_use]
    pub fn param(&self) -> ParamSpec {
        let on_tp = [(self.mesh.factor(Axis::Tp), self.region.outside_param())];
        let name = spec::join(&self.name, "weight");
        dense(&self.mesh, &name, &[self.dim], &on_tp, Init::Ones)
    }

    fn spec(&self, rows: usize) -> NormSpec {
        NormSpec {
            rows,
            dim: self.dim,
            eps: self.eps,
        }
    }

    /// Normalises `rows` rows of x.
    ///
    /// # Errors
    /// What a kernel refuses.
    pub fn forward<B: Norm, E: Scalar>(
        &self,
        device: &B,
        rows: usize,
        w: B::Ref<'_, E>,
        x: B::Ref<'_, E>,
    ) -> Result<Normed<B::Buf<E>, B::Buf<E::Acc>>, Error> {
        let mut y = device.alloc(Tag::Activation, rows * self.dim)?;
        let mut rstd = device.alloc(Tag::Activation, rows)?;
        let (y_all, rstd_all) = (B::whole_mut(&mut y), B::whole_mut(&mut rstd));
        device.rms_norm::<E>(&self.spec(rows), x, None, w, y_all, rstd_all)?;
        Ok(Normed { y, rstd })
    }

    /// Normalises h = x + r, and gives h back first.
    ///
    /// # Errors
    /// What a kernel refuses.
    pub fn forward_residual<B: Norm, E: Scalar>(
        &self,
        device: &B,
        rows: usize,
        w: B::Ref<'_, E>,
        x: B::Ref<'_, E>,
        r: B::Ref<'_, E>,
    ) -> Result<(B::Buf<E>, Normed<B::Buf<E>, B::Buf<E::Acc>>), Error> {
        let mut h = device.alloc(Tag::Activation, rows * self.dim)?;
        let mut y = device.alloc(Tag::Activation, rows * self.dim)?;
        let mut rstd = device.alloc(Tag::Activation, rows)?;
        device.rms_norm::<E>(
            &self.spec(rows),
            x,
            Some((r, B::whole_mut(&mut h))),
            w,
            B::whole_mut(&mut y),
            B::whole_mut(&mut rstd),
        )?;
        Ok((h, Normed { y, rstd }))
    }

    /// Gradient of h: what comes through the norm from `dy`, plus `dresidual`, which comes
    /// beside it.
    ///
    /// # Errors
    /// What a kernel refuses.
    pub fn backward_input<B: Norm, E: Scalar>(
        &self,
        device: &B,
        rows: usize,
        w: B::Ref<'_, E>,
        (h, rstd): (B::Ref<'_, E>, B::Ref<'_, E::Acc>),
        dy: B::Ref<'_, E>,
        dresidual: Option<B::Ref<'_, E>>,
    ) -> Result<B::Buf<E>, Error> {
        let mut dh = device.alloc(Tag::Activation, rows * self.dim)?;
        let dh_all = B::whole_mut(&mut dh);
        let spec = self.spec(rows);
        device.rms_norm_backward_input::<E>(&spec, h, w, rstd, dy, dresidual, dh_all)?;
        Ok(dh)
    }

    /// Adds to the gradient of the weight.
    ///
    /// # Errors
    /// What a kernel refuses.
    pub fn backward_weight<B: Norm, E: Scalar>(
        &self,
        device: &B,
        rows: usize,
        (h, rstd): (B::Ref<'_, E>, B::Ref<'_, E::Acc>),
        dy: B::Ref<'_, E>,
        dw: B::Mut<'_, E::Acc>,
    ) -> Result<(), Error> {
        Ok(device.rms_norm_backward_weight::<E>(&self.spec(rows), h, rstd, dy, dw)?)
    }
}
