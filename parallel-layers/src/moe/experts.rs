//! The experts of one rank: SwiGLU with a matrix for each group of rows.
//!
//! The ledger has one line a projection, `[experts, out, in]`: Shard(experts) over ep, the width
//! Shard over etp, Replicate over edp.

use alloc::format;
use alloc::string::String;
use alloc::vec::Vec;

use quintet_collectives::{Axis, DeviceMesh, Init, ParamSpec, Placement};
use quintet_kernels::{Backend, GroupedGemm, GroupedSpec, Pointwise, Scalar, Tag, Trans};

use super::{MoeShape, MoeSpec, NAME};
use crate::Error;
use crate::mlp::gated;
use crate::recompute::Remade;
use crate::saved::{views, views_mut};
use crate::spec::{INIT_STD, join};

#[derive(Debug, Clone)]
pub(super) struct Experts {
    mesh: DeviceMesh,
    name: String,
    experts: usize,
    hidden: usize,
    ffn: usize,
    layers: usize,
}

#[derive(Debug)]
pub(super) struct ExpertsForward<Buf> {
    x: Buf,
    g: Buf,
    u: Buf,
    s: Remade<Buf>,
}

impl<Buf> ExpertsForward<Buf> {
    /// Lets go what is cheap to make again.
    pub(super) fn let_go(&mut self) {
        self.s.let_go();
    }
}

#[derive(Debug)]
pub(super) struct ExpertsWeight<Buf> {
    counts: Vec<usize>,
    x: Buf,
    s: Buf,
    dg: Buf,
    du: Buf,
    dy: Buf,
}

impl Experts {
    pub(super) fn new(
        mesh: &DeviceMesh,
        name: &str,
        shape: &MoeShape,
        spec: &MoeSpec,
    ) -> Result<Self, Error> {
        let ep = mesh.degree(Axis::Ep);
        if spec.experts == 0 || !spec.experts.is_multiple_of(ep) {
            return Err(Error::Layout(format!(
                "ep={ep} does not divide {} experts",
                spec.experts
            )));
        }
        Ok(Self {
            mesh: *mesh,
            name: join(name, "experts"),
            experts: spec.experts,
            hidden: shape.hidden,
            ffn: spec.ffn,
            layers: shape.layers,
        })
    }

    pub(super) fn params(&self) -> Vec<ParamSpec> {
        let (d, f, mesh) = (self.hidden, self.ffn, &self.mesh);
        let small = INIT_STD / libm::sqrt(2.0 * self.layers.max(1) as f64);
        let line = |part: &str, shape: [usize; 2], cut: usize, std: f64| ParamSpec {
            name: format!("{}.{part}.weight", self.name),
            shape: Vec::from([self.experts, shape[0], shape[1]]),
            at_use: Vec::from([
                (mesh.factor(Axis::Edp), Placement::Replicate),
                (mesh.factor(Axis::Ep), Placement::shard(0)),
                (mesh.factor(Axis::Etp), Placement::shard(cut)),
            ]),
            tie: None,
            init: Init::Normal { std },
            decay: true,
        };
        Vec::from([
            line("gate_proj", [f, d], 1, INIT_STD),
            line("up_proj", [f, d], 1, INIT_STD),
            line("down_proj", [d, f], 2, small),
        ])
    }

    /// Products from d to this rank's part of f, whose length follows from the weights.
    fn wide<'a, B: Backend, E: Scalar>(
        &self,
        counts: &'a [usize],
        w: B::Ref<'_, E>,
    ) -> GroupedSpec<'a> {
        let f = B::len(w) / (counts.len() * self.hidden).max(1);
        GroupedSpec {
            counts,
            n: f,
            k: self.hidden,
        }
    }

    pub(super) fn forward<B: GroupedGemm + Pointwise, E: Scalar>(
        &self,
        dev: &B,
        counts: &[usize],
        params: &[B::Ref<'_, E>],
        x: B::Buf<E>,
    ) -> Result<(B::Buf<E>, ExpertsForward<B::Buf<E>>), Error> {
        let &[wg, wu, wd] = views(NAME, params)?;
        let wide = self.wide::<B, E>(counts, wg);
        let rows: usize = counts.iter().sum();
        let product = |w: B::Ref<'_, E>| {
            let mut y = dev.alloc(Tag::Activation, rows * wide.n)?;
            dev.grouped_gemm::<E>(
                &wide,
                (Trans::T, false),
                B::whole(&x),
                w,
                B::whole_mut(&mut y),
            )?;
            Ok::<_, Error>(y)
        };
        let (g, u) = (product(wg)?, product(wu)?);
        let s = gated::<B, E>(dev, &g, &u)?;
        let mut y = dev.alloc(Tag::Activation, rows * self.hidden)?;
        let narrow = turned(&wide);
        dev.grouped_gemm::<E>(
            &narrow,
            (Trans::T, false),
            B::whole(&s),
            wd,
            B::whole_mut(&mut y),
        )?;
        let s = Remade::Here(s);
        Ok((y, ExpertsForward { x, g, u, s }))
    }

    /// Makes again what was let go.
    pub(super) fn remake<B: Pointwise, E: Scalar>(
        dev: &B,
        saved: &mut ExpertsForward<B::Buf<E>>,
    ) -> Result<(), Error> {
        let ExpertsForward { g, u, s, .. } = saved;
        s.remake(|| gated::<B, E>(dev, g, u))
    }

    pub(super) fn backward_input<B: GroupedGemm + Pointwise, E: Scalar>(
        &self,
        dev: &B,
        counts: &[usize],
        params: &[B::Ref<'_, E>],
        saved: ExpertsForward<B::Buf<E>>,
        dy: B::Buf<E>,
    ) -> Result<(B::Buf<E>, ExpertsWeight<B::Buf<E>>), Error> {
        let &[wg, wu, wd] = views(NAME, params)?;
        let wide = self.wide::<B, E>(counts, wg);
        let ExpertsForward { x, g, u, s } = saved;
        let s = s.made(NAME)?;
        let len = B::len(B::whole(&g));
        let mut ds = dev.alloc(Tag::Activation, len)?;
        dev.grouped_gemm::<E>(
            &wide,
            (Trans::N, false),
            B::whole(&dy),
            wd,
            B::whole_mut(&mut ds),
        )?;
        let (mut dg, mut du) = (
            dev.alloc(Tag::Activation, len)?,
            dev.alloc(Tag::Activation, len)?,
        );
        dev.swiglu_backward::<E>(
            B::whole(&g),
            B::whole(&u),
            B::whole(&ds),
            B::whole_mut(&mut dg),
            B::whole_mut(&mut du),
        )?;
        drop((g, u, ds));
        let mut dx = dev.alloc(Tag::Activation, B::len(B::whole(&x)))?;
        let narrow = turned(&wide);
        for (w, dy, add) in [(wg, &dg, false), (wu, &du, true)] {
            dev.grouped_gemm::<E>(
                &narrow,
                (Trans::N, add),
                B::whole(dy),
                w,
                B::whole_mut(&mut dx),
            )?;
        }
        let counts = counts.to_vec();
        let saved = ExpertsWeight {
            counts,
            x,
            s,
            dg,
            du,
            dy,
        };
        Ok((dx, saved))
    }

    pub(super) fn backward_weight<B: GroupedGemm, E: Scalar>(
        &self,
        dev: &B,
        saved: &ExpertsWeight<B::Buf<E>>,
        grads: &mut [B::Mut<'_, E::Acc>],
    ) -> Result<(), Error> {
        let grads: &mut [_; 3] = views_mut(NAME, grads)?;
        let [gg, gu, gd] = grads.each_mut().map(|g| B::reborrow(g));
        let wide = GroupedSpec {
            counts: &saved.counts,
            n: B::len(B::as_ref(&gg)) / (saved.counts.len() * self.hidden).max(1),
            k: self.hidden,
        };
        let (x, s) = (B::whole(&saved.x), B::whole(&saved.s));
        dev.grouped_gemm_weight::<E>(&turned(&wide), B::whole(&saved.dy), s, gd)?;
        dev.grouped_gemm_weight::<E>(&wide, B::whole(&saved.dg), x, gg)?;
        Ok(dev.grouped_gemm_weight::<E>(&wide, B::whole(&saved.du), x, gu)?)
    }
}

/// The product the other way.
fn turned<'a>(spec: &GroupedSpec<'a>) -> GroupedSpec<'a> {
    GroupedSpec {
        counts: spec.counts,
        n: spec.k,
        k: spec.n,
    }
}
