//! Pointwise ops: cuda/swiglu.cu, gelu.cu, add.cu, dropout.cu, cast.cu.

use alloc::format;
use core::any::TypeId;

use super::{Gpu, GpuMut, GpuRef, draws, len, packed, pointers, suffix};
use crate::error::need;
use crate::launch::{Arg, Launch};
use crate::{DropoutSpec, Error, Float, Pointwise};

impl<L: Launch> Gpu<L> {
    /// Launches a kernel over arrays of `n` elements of `E` each.
    fn over<E: Float>(
        &self,
        (module, op): (&'static str, &'static str),
        n: usize,
        ptrs: &[u64],
    ) -> Result<(), Error> {
        let (function, pack) = packed::<E>(op, op, ptrs, n)?;
        let args = ptrs.iter().map(|&p| Arg::Ptr(p)).chain([len(n)]);
        let args: alloc::vec::Vec<Arg> = args.collect();
        self.launch_flat((module, &function), n, pack, &args)
    }
}

impl<L: Launch> Pointwise for Gpu<L> {
    fn swiglu<E: Float>(
        &self,
        g: GpuRef<'_, L, E>,
        u: GpuRef<'_, L, E>,
        y: GpuMut<'_, L, E>,
    ) -> Result<(), Error> {
        need("swiglu", "u", g.len, u.len)?;
        need("swiglu", "y", g.len, y.len)?;
        self.over::<E>(("swiglu", "swiglu"), g.len, &[g.ptr, u.ptr, y.ptr])
    }

    fn swiglu_backward<E: Float>(
        &self,
        g: GpuRef<'_, L, E>,
        u: GpuRef<'_, L, E>,
        dy: GpuRef<'_, L, E>,
        dg: GpuMut<'_, L, E>,
        du: GpuMut<'_, L, E>,
    ) -> Result<(), Error> {
        let op = "swiglu_backward";
        let lens = [("u", u.len), ("dy", dy.len), ("dg", dg.len), ("du", du.len)];
        for (what, got) in lens {
            need(op, what, g.len, got)?;
        }
        let ptrs = [g.ptr, u.ptr, dy.ptr, dg.ptr, du.ptr];
        self.over::<E>(("swiglu", op), g.len, &ptrs)
    }

    fn gelu<E: Float>(&self, x: GpuRef<'_, L, E>, y: GpuMut<'_, L, E>) -> Result<(), Error> {
        need("gelu", "y", x.len, y.len)?;
        self.over::<E>(("gelu", "gelu"), x.len, &[x.ptr, y.ptr])
    }

    fn gelu_backward<E: Float>(
        &self,
        x: GpuRef<'_, L, E>,
        dy: GpuRef<'_, L, E>,
        dx: GpuMut<'_, L, E>,
    ) -> Result<(), Error> {
        let op = "gelu_backward";
        need(op, "dy", x.len, dy.len)?;
        need(op, "dx", x.len, dx.len)?;
        self.over::<E>(("gelu", op), x.len, &[x.ptr, dy.ptr, dx.ptr])
    }

    fn add<E: Float>(&self, x: GpuMut<'_, L, E>, y: GpuRef<'_, L, E>) -> Result<(), Error> {
        need("add", "y", x.len, y.len)?;
        self.over::<E>(("add", "add"), x.len, &[x.ptr, y.ptr])
    }

    fn add_rows<E: Float>(
        &self,
        dy: GpuRef<'_, L, E>,
        db: GpuMut<'_, L, E::Acc>,
    ) -> Result<(), Error> {
        let op = "add_rows";
        let dim = db.len;
        let rows = dy.len.checked_div(dim).unwrap_or(0);
        need(op, "dy", rows * dim, dy.len)?;
        let function = format!("add_rows_{}", suffix::<E>(op)?);
        let args = [Arg::Ptr(dy.ptr), Arg::Ptr(db.ptr), len(rows), len(dim)];
        let blocks = if rows == 0 { 0 } else { dim.div_ceil(32) };
        self.launch(("add", &function), blocks as u64, [32, 32, 1], &args)
    }

    fn dropout<E: Float>(
        &self,
        spec: &DropoutSpec,
        at: GpuRef<'_, L, i32>,
        x: GpuMut<'_, L, E>,
    ) -> Result<(), Error> {
        let op = "dropout";
        need(op, "x", at.len * spec.width, x.len)?;
        let function = format!("dropout_{}", suffix::<E>(op)?);
        let mut args = pointers(&[x.ptr, at.ptr]);
        args.extend([at.len, spec.width, spec.first, spec.rows.max(1)].map(len));
        args.extend(draws(Some(spec.dropout)));
        let fours = at.len * spec.width.div_ceil(4);
        self.launch_flat(("dropout", &function), fours, 1, &args)
    }

    fn cast<I: Float, O: Float>(
        &self,
        x: GpuRef<'_, L, I>,
        y: GpuMut<'_, L, O>,
    ) -> Result<(), Error> {
        let op = "cast";
        need(op, "y", x.len, y.len)?;
        if TypeId::of::<I>() == TypeId::of::<O>() {
            let bytes = x.len * size_of::<I>();
            return self.0.launcher.copy(self.0.compute(), x.ptr, y.ptr, bytes);
        }
        let function = format!("cast_{}_{}", suffix::<I>(op)?, suffix::<O>(op)?);
        let args = [Arg::Ptr(x.ptr), Arg::Ptr(y.ptr), len(x.len)];
        self.launch_flat(("cast", &function), x.len, 1, &args)
    }
}
