//! Experts: cuda/router.cu and cuda/permute.cu.

use alloc::format;

use super::{Gpu, GpuMut, GpuRef, THREADS, acc, len, packed, pointers, ptr_or_null, suffix};
use crate::error::need;
use crate::launch::{Arg, Launch};
use crate::moe::{Combine, LEAST_SUM, Routed, Score};
use crate::{Error, Float, Permute, Real, Router, RouterSpec};

/// Warps of a block of the router: a token each.
const WARPS: usize = 8;

impl<L: Launch> Router for Gpu<L> {
    fn route<A: Real>(
        &self,
        spec: &RouterSpec,
        logits_te: GpuRef<'_, L, A>,
        bias_e: Option<GpuRef<'_, L, A>>,
        out: Routed<'_, Self, A>,
    ) -> Result<(), Error> {
        let op = "route";
        let lens = [
            ("logits", logits_te.len),
            ("choice", out.choice_tk.len),
            ("weight", out.weight_tk.len),
            ("sums", out.sums_e.len),
        ];
        spec.check(op, lens)?;
        if let Some(bias) = &bias_e {
            need(op, "bias", spec.experts, bias.len)?;
        }
        let t = suffix::<A>(op)?;
        let mut args = alloc::vec![
            Arg::Ptr(logits_te.ptr),
            ptr_or_null(bias_e.as_ref()),
            Arg::Ptr(out.choice_tk.ptr),
            Arg::Ptr(out.weight_tk.ptr),
        ];
        args.extend(rule::<A>(spec));
        let blocks = spec.tokens.div_ceil(WARPS) as u64;
        let block = [THREADS, 1, 1];
        self.launch(("router", &format!("route_{t}")), blocks, block, &args)?;
        let args = [
            Arg::Ptr(logits_te.ptr),
            Arg::Ptr(out.sums_e.ptr),
            len(spec.tokens),
            len(spec.experts),
            sigmoid(spec),
            acc::<A>(LEAST_SUM),
        ];
        let blocks = (spec.experts + 1).div_ceil(32) as u64;
        self.launch(("router", &format!("route_sums_{t}")), blocks, block, &args)
    }

    fn route_backward<A: Real>(
        &self,
        spec: &RouterSpec,
        logits_te: GpuRef<'_, L, A>,
        choice_tk: GpuRef<'_, L, i32>,
        (dweight_tk, dsums_e): (GpuRef<'_, L, A>, GpuRef<'_, L, A>),
        dlogits_te: GpuMut<'_, L, A>,
    ) -> Result<(), Error> {
        let op = "route_backward";
        let lens = [
            ("logits", logits_te.len),
            ("choice", choice_tk.len),
            ("dweight", dweight_tk.len),
            ("dsums", dsums_e.len),
        ];
        spec.check(op, lens)?;
        need(op, "dlogits", logits_te.len, dlogits_te.len)?;
        let mut args = pointers(&[
            logits_te.ptr,
            choice_tk.ptr,
            dweight_tk.ptr,
            dsums_e.ptr,
            dlogits_te.ptr,
        ]);
        args.extend(rule::<A>(spec));
        let function = format!("{op}_{}", suffix::<A>(op)?);
        let blocks = spec.tokens.div_ceil(WARPS) as u64;
        self.launch(("router", &function), blocks, [THREADS, 1, 1], &args)
    }
}

/// Shape and rule, as the kernels take them last.
fn rule<A: Real>(spec: &RouterSpec) -> [Arg; 7] {
    [
        len(spec.tokens),
        len(spec.experts),
        len(spec.topk),
        sigmoid(spec),
        Arg::I32(spec.normalize.into()),
        acc::<A>(spec.scale),
        acc::<A>(LEAST_SUM),
    ]
}

fn sigmoid(spec: &RouterSpec) -> Arg {
    Arg::I32((spec.score == Score::Sigmoid).into())
}

impl<L: Launch> Permute for Gpu<L> {
    fn gather_rows<E: Float>(
        &self,
        width: usize,
        index_r: GpuRef<'_, L, i32>,
        x: GpuRef<'_, L, E>,
        y: GpuMut<'_, L, E>,
    ) -> Result<(), Error> {
        let op = "gather_rows";
        need(op, "y", index_r.len.saturating_mul(width), y.len)?;
        let rows = x.len / width.max(1);
        need(op, "x", rows * width, x.len)?;
        let (function, _) = packed::<E>(op, op, &[x.ptr, y.ptr], width)?;
        let mut args = pointers(&[index_r.ptr, x.ptr, y.ptr]);
        args.extend([len(rows), len(width)]);
        let blocks = if width == 0 { 0 } else { index_r.len as u64 };
        self.launch(("permute", &function), blocks, [THREADS, 1, 1], &args)
    }

    fn combine<E: Float>(
        &self,
        by: Combine<'_, Self>,
        weight_tk: Option<GpuRef<'_, L, E::Acc>>,
        x_rd: GpuRef<'_, L, E>,
        y_td: GpuMut<'_, L, E>,
    ) -> Result<(), Error> {
        let op = "combine";
        let weights = weight_tk.map_or(by.rows_tk.len, |w| w.len);
        check(by, op, [weights, x_rd.len, y_td.len])?;
        let args = [
            Arg::Ptr(by.rows_tk.ptr),
            ptr_or_null(weight_tk.as_ref()),
            Arg::Ptr(x_rd.ptr),
            Arg::Ptr(y_td.ptr),
            len(by.pairs_r.len),
            len(by.topk),
            len(by.width),
        ];
        let function = format!("{op}_{}", suffix::<E>(op)?);
        let blocks = by.tokens as u64;
        self.launch(("permute", &function), blocks, [THREADS, 1, 1], &args)
    }

    fn combine_backward<E: Float>(
        &self,
        by: Combine<'_, Self>,
        (weight_tk, x_rd): (GpuRef<'_, L, E::Acc>, GpuRef<'_, L, E>),
        dy_td: GpuRef<'_, L, E>,
        dx_rd: GpuMut<'_, L, E>,
        dweight_tk: GpuMut<'_, L, E::Acc>,
    ) -> Result<(), Error> {
        let op = "combine_backward";
        check(by, op, [weight_tk.len, x_rd.len, dy_td.len])?;
        need(op, "dx", x_rd.len, dx_rd.len)?;
        need(op, "dweight", weight_tk.len, dweight_tk.len)?;
        let t = suffix::<E>(op)?;
        let block = [THREADS, 1, 1];
        let mut args = pointers(&[by.pairs_r.ptr, weight_tk.ptr, dy_td.ptr, dx_rd.ptr]);
        args.extend([len(by.tokens), len(by.topk), len(by.width)]);
        let (function, rows) = (format!("combine_rows_{t}"), by.pairs_r.len as u64);
        self.launch(("permute", &function), rows, block, &args)?;
        let mut args = pointers(&[by.rows_tk.ptr, x_rd.ptr, dy_td.ptr, dweight_tk.ptr]);
        args.extend([by.pairs_r.len, by.rows_tk.len, by.topk, by.width].map(len));
        let function = format!("combine_weights_{t}");
        let blocks = by.rows_tk.len.div_ceil(WARPS) as u64;
        self.launch(("permute", &function), blocks, block, &args)
    }
}

fn check<L: Launch>(
    by: Combine<'_, Gpu<L>>,
    op: &'static str,
    lens: [usize; 3],
) -> Result<(), Error> {
    let pairs = by.tokens.saturating_mul(by.topk);
    need(op, "rows", pairs, by.rows_tk.len)?;
    need(op, "weight", pairs, lens[0])?;
    need(op, "x", by.pairs_r.len.saturating_mul(by.width), lens[1])?;
    need(op, "y", by.tokens.saturating_mul(by.width), lens[2])
}
