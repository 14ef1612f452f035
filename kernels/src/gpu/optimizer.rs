//! Optimizer steps: cuda/optimizer.cu.

use alloc::format;

use super::{Gpu, GpuMut, GpuRef, THREADS, acc, len, suffix};
use crate::error::need;
use crate::launch::{Arg, Launch};
use crate::{AdamWSpec, Error, Float, Optimizer, SgdSpec};

/// The most partial sums of [`Optimizer::add_squares`].
pub(super) const PARTS: usize = 256;
/// Elements for each of which another partial sum is worth a block.
const PART_LEN: usize = 4096;

impl<L: Launch> Optimizer for Gpu<L> {
    fn adamw<E: Float>(
        &self,
        spec: &AdamWSpec,
        grad: GpuRef<'_, L, E::Acc>,
        master: GpuMut<'_, L, E::Acc>,
        (m, v): (GpuMut<'_, L, E::Acc>, GpuMut<'_, L, E::Acc>),
        param: Option<GpuMut<'_, L, E>>,
    ) -> Result<(), Error> {
        let (op, n) = ("adamw", grad.len);
        if spec.step == 0 {
            let why = "steps count from 1: the moments' bias is divided by 1 - beta^step";
            return Err(Error::Spec { op, why });
        }
        need(op, "master", n, master.len)?;
        need(op, "m", n, m.len)?;
        need(op, "v", n, v.len)?;
        need(op, "param", n, param.as_ref().map_or(n, |p| p.len))?;
        let bias = |beta: f64| 1.0 - libm::pow(beta, spec.step as f64);
        let function = format!("adamw_{}", suffix::<E>(op)?);
        let args = [
            Arg::Ptr(grad.ptr),
            Arg::Ptr(master.ptr),
            Arg::Ptr(m.ptr),
            Arg::Ptr(v.ptr),
            Arg::Ptr(param.map_or(0, |p| p.ptr)),
            len(n),
            acc::<E>(spec.beta1),
            acc::<E>(1.0 - spec.beta1),
            acc::<E>(spec.beta2),
            acc::<E>(1.0 - spec.beta2),
            acc::<E>(spec.eps),
            acc::<E>(spec.grad_scale),
            acc::<E>(1.0 - spec.lr * spec.weight_decay),
            acc::<E>(spec.lr / bias(spec.beta1)),
            acc::<E>(1.0 / libm::sqrt(bias(spec.beta2))),
        ];
        self.launch_flat(("optimizer", &function), n, 1, &args)
    }

    fn sgd<E: Float>(
        &self,
        spec: &SgdSpec,
        grad: GpuRef<'_, L, E::Acc>,
        master: GpuMut<'_, L, E::Acc>,
        param: Option<GpuMut<'_, L, E>>,
    ) -> Result<(), Error> {
        let (op, n) = ("sgd", grad.len);
        need(op, "master", n, master.len)?;
        need(op, "param", n, param.as_ref().map_or(n, |p| p.len))?;
        let function = format!("sgd_{}", suffix::<E>(op)?);
        let args = [
            Arg::Ptr(grad.ptr),
            Arg::Ptr(master.ptr),
            Arg::Ptr(param.map_or(0, |p| p.ptr)),
            len(n),
            acc::<E>(spec.lr),
            acc::<E>(spec.weight_decay),
            acc::<E>(spec.grad_scale),
        ];
        self.launch_flat(("optimizer", &function), n, 1, &args)
    }

    /// In f64, in an order that depends on the length of `x` alone.
    fn add_squares<T: Float>(
        &self,
        x: GpuRef<'_, L, T>,
        out: GpuMut<'_, L, f64>,
    ) -> Result<(), Error> {
        let op = "add_squares";
        if out.len == 0 {
            return need(op, "out", 1, 0);
        }
        if x.len == 0 {
            return Ok(());
        }
        let parts = x.len.div_ceil(PART_LEN).min(PARTS);
        let function = format!("squares_{}", suffix::<T>(op)?);
        let args = [Arg::Ptr(x.ptr), Arg::Ptr(self.0.parts), len(x.len)];
        let block = [THREADS, 1, 1];
        self.launch(("optimizer", &function), parts as u64, block, &args)?;
        let args = [
            Arg::Ptr(self.0.parts),
            Arg::Ptr(out.ptr),
            Arg::I32(parts as i32),
        ];
        self.launch(("optimizer", "add_parts"), 1, block, &args)
    }
}
