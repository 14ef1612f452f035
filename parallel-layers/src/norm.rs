//! RMSNorm and LayerNorm, as layers: every rank normalises the rows it holds.
//!
//! ```text
//!                      x             w (and b)     y
//! plain                Invariant     Invariant     Invariant     all ranks do the same
//! sequence parallel    Shard(t)      Replicate     Shard(t)      each its own tokens, so the
//!                                                                gradient of w is Partial
//! per head             Shard(head)   Replicate     Shard(head)   each its own heads (q and k norms)
//! ```
//!
//! Nothing is sent; the placement of w alone makes the ledger sum its gradient over tp, and only
//! where ranks use it differently.

use alloc::string::{String, ToString};
use alloc::vec::Vec;

use quintet_collectives::{Axis, DeviceMesh, Init, ParamSpec, Placement};
use quintet_kernels::{Norm, NormSpec, Scalar, Tag};

use crate::saved::{views, views_mut};
use crate::spec::dense;
use crate::{Error, spec};

const NAME: &str = "norm";

/// Which norm.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum NormKind {
    /// `y = w * h / rms(h)` (Zhang and Sennrich 2019).
    Rms,
    /// `y = w * (h - mean(h)) / std(h) + b` (Ba et al. 2016).
    Layer,
}

/// A norm over rows of `dim`; h is x, or x + r.
#[derive(Debug, Clone)]
pub struct RowNorm {
    kind: NormKind,
    mesh: DeviceMesh,
    name: String,
    dim: usize,
    eps: f64,
    on_tp: Placement,
}

/// The statistics of each row, which backward needs.
#[derive(Debug)]
pub struct RowStats<Stat> {
    /// `mean[t]`; LayerNorm's alone.
    mean: Option<Stat>,
    /// `1 / rms[t]` or `1 / std[t]`.
    rstd: Stat,
}

/// What the norm computes: its output, and the statistics for backward.
#[derive(Debug)]
pub struct Normed<Buf, Stat> {
    /// `y[t, d]`.
    pub y: Buf,
    /// Of each row.
    pub stats: RowStats<Stat>,
}

impl RowNorm {
    /// The norm whose parameters are `{name}.weight` and, of a LayerNorm, `{name}.bias`; `on_tp`
    /// says how ranks of tp use them ([`crate::region::Region::outside_param`] between layers).
    #[must_use]
    pub fn new(mesh: &DeviceMesh, name: &str, kind: NormKind, dim: usize, eps: f64) -> Self {
        Self {
            kind,
            mesh: *mesh,
            name: name.to_string(),
            dim,
            eps,
            on_tp: Placement::Invariant,
        }
    }

    /// The same, used over tp as `placement` says (Invariant where nothing is said).
    #[must_use]
    pub fn on_tp(mut self, placement: Placement) -> Self {
        self.on_tp = placement;
        self
    }

    /// The weight, and a LayerNorm's bias.
    #[must_use]
    pub fn params(&self) -> Vec<ParamSpec> {
        let on_tp = [(self.mesh.factor(Axis::Tp), self.on_tp)];
        let param = |part: &str, init| {
            let name = spec::join(&self.name, part);
            dense(&self.mesh, &name, &[self.dim], &on_tp, init)
        };
        let weight = param("weight", Init::Ones);
        match self.kind {
            NormKind::Rms => Vec::from([weight]),
            NormKind::Layer => Vec::from([weight, param("bias", Init::Zeros)]),
        }
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
        params: &[B::Ref<'_, E>],
        x: B::Ref<'_, E>,
    ) -> Result<Normed<B::Buf<E>, B::Buf<E::Acc>>, Error> {
        self.normalise(device, rows, params, x, None)
    }

    /// Normalises h = x + r, and gives h back first.
    ///
    /// # Errors
    /// What a kernel refuses.
    pub fn forward_residual<B: Norm, E: Scalar>(
        &self,
        device: &B,
        rows: usize,
        params: &[B::Ref<'_, E>],
        x: B::Ref<'_, E>,
        r: B::Ref<'_, E>,
    ) -> Result<(B::Buf<E>, Normed<B::Buf<E>, B::Buf<E::Acc>>), Error> {
        let mut h = device.alloc(Tag::Activation, rows * self.dim)?;
        let residual = Some((r, B::whole_mut(&mut h)));
        let normed = self.normalise(device, rows, params, x, residual)?;
        Ok((h, normed))
    }

    fn normalise<B: Norm, E: Scalar>(
        &self,
        device: &B,
        rows: usize,
        params: &[B::Ref<'_, E>],
        x: B::Ref<'_, E>,
        residual: Option<(B::Ref<'_, E>, B::Mut<'_, E>)>,
    ) -> Result<Normed<B::Buf<E>, B::Buf<E::Acc>>, Error> {
        let spec = self.spec(rows);
        let mut y = device.alloc(Tag::Activation, rows * self.dim)?;
        let mut rstd = device.alloc(Tag::Activation, rows)?;
        let (y_all, rstd_all) = (B::whole_mut(&mut y), B::whole_mut(&mut rstd));
        let mean = match self.kind {
            NormKind::Rms => {
                let &[w] = views(NAME, params)?;
                device.rms_norm::<E>(&spec, x, residual, w, y_all, rstd_all)?;
                None
            }
            NormKind::Layer => {
                let &[w, b] = views(NAME, params)?;
                let mut mean = device.alloc(Tag::Activation, rows)?;
                let stats = (B::whole_mut(&mut mean), rstd_all);
                device.layer_norm::<E>(&spec, x, residual, (w, b), y_all, stats)?;
                Some(mean)
            }
        };
        let stats = RowStats { mean, rstd };
        Ok(Normed { y, stats })
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
        params: &[B::Ref<'_, E>],
        (h, stats): (B::Ref<'_, E>, &RowStats<B::Buf<E::Acc>>),
        dy: B::Ref<'_, E>,
        dresidual: Option<B::Ref<'_, E>>,
    ) -> Result<B::Buf<E>, Error> {
        let mut dh = device.alloc(Tag::Activation, rows * self.dim)?;
        let (spec, dh_all) = (self.spec(rows), B::whole_mut(&mut dh));
        let rstd = B::whole(&stats.rstd);
        match &stats.mean {
            None => {
                let &[w] = views(NAME, params)?;
                device.rms_norm_backward_input::<E>(&spec, h, w, rstd, dy, dresidual, dh_all)?;
            }
            Some(mean) => {
                let &[w, _] = views(NAME, params)?;
                let stats = (B::whole(mean), rstd);
                device.layer_norm_backward_input::<E>(&spec, h, w, stats, dy, dresidual, dh_all)?;
            }
        }
        Ok(dh)
    }

    /// Adds to the gradients of the weight and, of a LayerNorm, the bias.
    ///
    /// # Errors
    /// What a kernel refuses.
    pub fn backward_weight<B: Norm, E: Scalar>(
        &self,
        device: &B,
        rows: usize,
        (h, stats): (B::Ref<'_, E>, &RowStats<B::Buf<E::Acc>>),
        dy: B::Ref<'_, E>,
        grads: &mut [B::Mut<'_, E::Acc>],
    ) -> Result<(), Error> {
        let (spec, rstd) = (self.spec(rows), B::whole(&stats.rstd));
        match &stats.mean {
            None => {
                let [dw]: &mut [_; 1] = views_mut(NAME, grads)?;
                device.rms_norm_backward_weight::<E>(&spec, h, rstd, dy, B::reborrow(dw))?;
            }
            Some(mean) => {
                let [dw, db]: &mut [_; 2] = views_mut(NAME, grads)?;
                let dwb = (B::reborrow(dw), B::reborrow(db));
                let stats = (B::whole(mean), rstd);
                device.layer_norm_backward_weight::<E>(&spec, h, stats, dy, dwb)?;
            }
        }
        Ok(())
    }
}
