//! RoPE: cuda/rope.cu.

use alloc::format;
use alloc::vec::Vec;
use std::sync::PoisonError;

use super::{Gpu, GpuMut, GpuRef, len, suffix};
use crate::error::need;
use crate::launch::{Arg, Launch};
use crate::{Error, Float, Rope, RopeSpec};

/// A table of frequencies on the device.
#[derive(Debug)]
pub(super) struct Frequencies {
    half: usize,
    theta: f64,
    pub(super) ptr: u64,
}

impl<L: Launch> Gpu<L> {
    /// The address of `theta^(-i / half)` for i below `half`: made once, and kept.
    fn frequencies(&self, half: usize, theta: f64) -> Result<u64, Error> {
        let tables = &mut self
            .0
            .frequencies
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        let same = |f: &&Frequencies| (f.half, f.theta.to_bits()) == (half, theta.to_bits());
        if let Some(table) = tables.iter().find(same) {
            return Ok(table.ptr);
        }
        let of = |i| libm::pow(theta, -(i as f64) / half as f64);
        let host: Vec<f64> = (0..half).map(of).collect();
        let bytes: &[u8] = bytemuck::cast_slice(&host);
        let ptr = self.0.launcher.alloc("frequencies", bytes.len())?;
        self.0.launcher.upload(self.0.compute(), bytes, ptr)?;
        tables.push(Frequencies { half, theta, ptr });
        Ok(ptr)
    }
}

impl<L: Launch> Rope for Gpu<L> {
    fn rope<E: Float>(
        &self,
        spec: &RopeSpec,
        pos_t: GpuRef<'_, L, i32>,
        x_thd: GpuMut<'_, L, E>,
    ) -> Result<(), Error> {
        let op = "rope";
        if !spec.rotary.is_multiple_of(2) || spec.rotary > spec.head_dim {
            let why = "rotary must be even and at most head_dim: element i turns with element i + rotary / 2";
            return Err(Error::Spec { op, why });
        }
        let token = spec.heads.saturating_mul(spec.head_dim);
        need(op, "pos", spec.rows, pos_t.len)?;
        need(op, "x", spec.rows.saturating_mul(token), x_thd.len)?;
        let half = spec.rotary / 2;
        if half == 0 {
            return Ok(());
        }
        let function = format!("rope_{}", suffix::<E>(op)?);
        let args = [
            Arg::Ptr(x_thd.ptr),
            Arg::Ptr(pos_t.ptr),
            Arg::Ptr(self.frequencies(half, spec.theta)?),
            len(spec.rows),
            len(spec.heads),
            len(spec.head_dim),
            len(half),
            Arg::I32(if spec.inverse { -1 } else { 1 }),
        ];
        self.launch_flat(("rope", &function), spec.rows * half, 1, &args)
    }
}
