//! Attention: cuda/attention_mma.cu for bf16 whose rows are whole chunks of 16 bytes, else
//! cuda/attention_simt.cu. Both run from the same spec; which one, [`Gpu::explain_attention`] says.

use alloc::format;
use alloc::string::String;
use alloc::vec::Vec;
use core::any::TypeId;

use half::bf16;

use super::{Gpu, GpuMut, GpuRef, draws, len, pointers, suffix};
use crate::attention::Lens;
use crate::error::need;
use crate::launch::{Arg, Launch};
use crate::{Attention, AttentionSpec, Carry, Error, Float, Places};

/// Threads of a block of the tiled kernels.
const THREADS: u32 = 128;

/// A family of kernels for one head width.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Family {
    /// Ordinary cores; so many times 64 columns in registers.
    Simt(usize),
    /// Tensor cores; heads padded to so many columns.
    Mma(usize),
}

impl Family {
    fn of<E: Float>(op: &'static str, spec: &AttentionSpec, ptrs: &[u64]) -> Result<Self, Error> {
        let width = match spec.head_dim {
            0..=64 => 64,
            65..=128 => 128,
            129..=256 => 256,
            _ => {
                let why = "on a GPU heads are at most 256 wide";
                return Err(Error::Spec { op, why });
            }
        };
        let chunks = spec.head_dim.is_multiple_of(8) && ptrs.iter().all(|p| p.is_multiple_of(16));
        Ok(match TypeId::of::<E>() == TypeId::of::<bf16>() && chunks {
            true => Self::Mma(width),
            false => Self::Simt(width / 64),
        })
    }

    fn module(self) -> &'static str {
        match self {
            Self::Simt(_) => "attention_simt",
            Self::Mma(_) => "attention_mma",
        }
    }

    /// The kernel `op` of the family.
    fn function<E: Float>(self, op: &str) -> Result<String, Error> {
        Ok(match self {
            Self::Simt(columns) => format!("{op}_{}_{columns}", suffix::<E>("attention")?),
            Self::Mma(width) => format!("{op}_{width}"),
        })
    }

    /// Rows of a block's tile: queries, or keys where a block owns keys.
    fn rows(self) -> usize {
        match self {
            Self::Simt(_) => 32,
            Self::Mma(_) => 64,
        }
    }

    /// Bytes of dynamic shared memory: `own` tiles of a block and two stages of two tiles of what
    /// passes by.
    fn shared(self, own: usize) -> u32 {
        let Self::Mma(width) = self else { return 0 };
        let passing = match (width, own) {
            (256, 2) => 16,
            (256, _) | (_, 2) => 32,
            _ => 64,
        };
        ((own * 64 + 4 * passing) * width * 2) as u32
    }

    /// Blocks that share a tile of keys, each with its columns.
    fn parts(self) -> u64 {
        match self {
            Self::Mma(256) | Self::Simt(4) => 2,
            _ => 1,
        }
    }
}

type Rows<'a, L, E> = (GpuRef<'a, L, E>, GpuRef<'a, L, E>, GpuRef<'a, L, E>);

impl<L: Launch> Attention for Gpu<L> {
    fn attention<E: Float>(
        &self,
        spec: &AttentionSpec,
        qkv: Rows<'_, L, E>,
        places: Places<GpuRef<'_, L, i32>>,
        o_bshd: GpuMut<'_, L, E>,
        lse_bhs: GpuMut<'_, L, E::Acc>,
    ) -> Result<(), Error> {
        let op = "attention";
        let lens = check(op, spec, &qkv, &places)?;
        need(op, "o", lens.q, o_bshd.len)?;
        need(op, "lse", lens.lse, lse_bhs.len)?;
        let outs = [o_bshd.ptr, lse_bhs.ptr];
        self.tiled::<E>(op, spec, &qkv, &places, &outs)
    }

    fn attention_step<E: Float>(
        &self,
        spec: &AttentionSpec,
        qkv: Rows<'_, L, E>,
        places: Places<GpuRef<'_, L, i32>>,
        carry: Carry<GpuMut<'_, L, E::Acc>>,
    ) -> Result<(), Error> {
        let op = "attention_step";
        let lens = check(op, spec, &qkv, &places)?;
        need(op, "the carry's o", lens.q, carry.o_bshd.len)?;
        need(op, "the carry's max", lens.lse, carry.max_bhs.len)?;
        need(op, "the carry's sum", lens.lse, carry.sum_bhs.len)?;
        let outs = [carry.o_bshd.ptr, carry.max_bhs.ptr, carry.sum_bhs.ptr];
        self.tiled::<E>(op, spec, &qkv, &places, &outs)
    }

    fn attention_finish<E: Float>(
        &self,
        spec: &AttentionSpec,
        carry: Carry<GpuRef<'_, L, E::Acc>>,
        o_bshd: GpuMut<'_, L, E>,
        lse_bhs: GpuMut<'_, L, E::Acc>,
    ) -> Result<(), Error> {
        let op = "attention_finish";
        let lens = spec.lens(op)?;
        need(op, "the carry's o", lens.q, carry.o_bshd.len)?;
        need(op, "the carry's max", lens.lse, carry.max_bhs.len)?;
        need(op, "the carry's sum", lens.lse, carry.sum_bhs.len)?;
        need(op, "o", lens.q, o_bshd.len)?;
        need(op, "lse", lens.lse, lse_bhs.len)?;
        let args = [
            Arg::Ptr(carry.o_bshd.ptr),
            Arg::Ptr(carry.max_bhs.ptr),
            Arg::Ptr(carry.sum_bhs.ptr),
            Arg::Ptr(o_bshd.ptr),
            Arg::Ptr(lse_bhs.ptr),
            len(spec.queries),
            len(spec.heads),
            len(spec.head_dim),
            len(lens.q),
        ];
        let function = format!("{op}_{}", suffix::<E>(op)?);
        self.launch_flat(("attention_simt", &function), lens.q, 1, &args)
    }

    fn attention_delta<E: Float>(
        &self,
        spec: &AttentionSpec,
        do_bshd: GpuRef<'_, L, E>,
        o_bshd: GpuRef<'_, L, E>,
        delta_bhs: GpuMut<'_, L, E::Acc>,
    ) -> Result<(), Error> {
        let op = "attention_delta";
        let lens = spec.lens(op)?;
        need(op, "do", lens.q, do_bshd.len)?;
        need(op, "o", lens.q, o_bshd.len)?;
        need(op, "delta", lens.lse, delta_bhs.len)?;
        let mut args = pointers(&[do_bshd.ptr, o_bshd.ptr, delta_bhs.ptr]);
        args.extend([spec.queries, spec.heads, spec.head_dim].map(len));
        let family = Family::of::<E>(op, spec, &[do_bshd.ptr, o_bshd.ptr])?;
        let Family::Mma(width) = family else {
            args.push(len(lens.lse));
            let function = format!("{op}_{}", suffix::<E>(op)?);
            return self.launch_flat((family.module(), &function), lens.lse, 1, &args);
        };
        let blocks = tiles(spec.batch, spec.heads, spec.queries, family.rows());
        let shared = (2 * family.rows() * width * 2) as u32;
        let kernel = (family.module(), &*family.function::<E>(op)?);
        self.launch_with(kernel, blocks, ([THREADS, 1, 1], shared), &args)
    }

    fn attention_backward<E: Float>(
        &self,
        spec: &AttentionSpec,
        qkv: Rows<'_, L, E>,
        places: Places<GpuRef<'_, L, i32>>,
        do_bshd: GpuRef<'_, L, E>,
        lse_delta: (GpuRef<'_, L, E::Acc>, GpuRef<'_, L, E::Acc>),
        (dq, dk, dv): (GpuMut<'_, L, E>, GpuMut<'_, L, E>, GpuMut<'_, L, E>),
    ) -> Result<(), Error> {
        let given = (do_bshd, lse_delta);
        let into = [(dq.ptr, dq.len), (dk.ptr, dk.len), (dv.ptr, dv.len)];
        self.backward::<E>("attention_backward", spec, (&qkv, &places), given, into)
    }

    fn attention_backward_step<E: Float>(
        &self,
        spec: &AttentionSpec,
        qkv: Rows<'_, L, E>,
        places: Places<GpuRef<'_, L, i32>>,
        do_bshd: GpuRef<'_, L, E>,
        lse_delta: (GpuRef<'_, L, E::Acc>, GpuRef<'_, L, E::Acc>),
        (dq, dk, dv): (
            GpuMut<'_, L, E::Acc>,
            GpuMut<'_, L, E::Acc>,
            GpuMut<'_, L, E::Acc>,
        ),
    ) -> Result<(), Error> {
        let given = (do_bshd, lse_delta);
        let into = [(dq.ptr, dq.len), (dk.ptr, dk.len), (dv.ptr, dv.len)];
        let op = "attention_backward_step";
        self.backward::<E>(op, spec, (&qkv, &places), given, into)
    }
}

impl<L: Launch> Gpu<L> {
    /// Forward: `outs` are what the kernel writes.
    fn tiled<E: Float>(
        &self,
        op: &'static str,
        spec: &AttentionSpec,
        qkv: &Rows<'_, L, E>,
        places: &Places<GpuRef<'_, L, i32>>,
        outs: &[u64],
    ) -> Result<(), Error> {
        let mut args = pointers(&[qkv.0.ptr, qkv.1.ptr, qkv.2.ptr]);
        args.extend(pointers(outs));
        args.extend(call(spec, places));
        let ptrs = [qkv.0.ptr, qkv.1.ptr, qkv.2.ptr, outs[0]];
        let family = Family::of::<E>(op, spec, &ptrs)?;
        let blocks = tiles(spec.batch, spec.heads, spec.queries, family.rows());
        let kernel = (family.module(), &*family.function::<E>(op)?);
        self.launch_with(kernel, blocks, ([THREADS, 1, 1], family.shared(1)), &args)
    }

    fn backward<E: Float>(
        &self,
        op: &'static str,
        spec: &AttentionSpec,
        (qkv, places): (&Rows<'_, L, E>, &Places<GpuRef<'_, L, i32>>),
        (do_bshd, (lse, delta)): (
            GpuRef<'_, L, E>,
            (GpuRef<'_, L, E::Acc>, GpuRef<'_, L, E::Acc>),
        ),
        [dq, dk, dv]: [(u64, usize); 3],
    ) -> Result<(), Error> {
        let lens = check(op, spec, qkv, places)?;
        need(op, "do", lens.q, do_bshd.len)?;
        need(op, "lse", lens.lse, lse.len)?;
        need(op, "delta", lens.lse, delta.len)?;
        need(op, "dq", lens.q, dq.1)?;
        need(op, "dk", lens.kv, dk.1)?;
        need(op, "dv", lens.kv, dv.1)?;
        let given = pointers(&[
            qkv.0.ptr,
            qkv.1.ptr,
            qkv.2.ptr,
            do_bshd.ptr,
            lse.ptr,
            delta.ptr,
        ]);
        let args = |into: &[u64]| -> Vec<Arg> {
            let into = pointers(into);
            given
                .iter()
                .copied()
                .chain(into)
                .chain(call(spec, places))
                .collect()
        };
        let ptrs = [
            qkv.0.ptr,
            qkv.1.ptr,
            qkv.2.ptr,
            do_bshd.ptr,
            dq.0,
            dk.0,
            dv.0,
        ];
        let family = Family::of::<E>(op, spec, &ptrs)?;
        let block = ([THREADS, 1, 1], family.shared(2));
        let blocks = tiles(spec.batch, spec.kv_heads, spec.keys, family.rows());
        let kernel = (
            family.module(),
            &*family.function::<E>(&format!("{op}_kv"))?,
        );
        self.launch_with(kernel, blocks * family.parts(), block, &args(&[dk.0, dv.0]))?;
        let blocks = tiles(spec.batch, spec.heads, spec.queries, family.rows());
        let kernel = (family.module(), &*family.function::<E>(&format!("{op}_q"))?);
        self.launch_with(kernel, blocks, block, &args(&[dq.0]))
    }

    /// The kernel that [`Attention::attention`] runs for arrays at multiples of 16 bytes.
    ///
    /// # Errors
    /// [`Error::Spec`] where there is none.
    pub fn explain_attention<E: Float>(&self, spec: &AttentionSpec) -> Result<String, Error> {
        let family = Family::of::<E>("attention", spec, &[])?;
        let function = family.function::<E>("attention")?;
        Ok(format!("{}: {function}", family.module()))
    }
}

fn check<L: Launch, E: Float>(
    op: &'static str,
    spec: &AttentionSpec,
    qkv: &Rows<'_, L, E>,
    places: &Places<GpuRef<'_, L, i32>>,
) -> Result<Lens, Error> {
    let places = Places {
        q_pos: places.q_pos.len,
        k_pos: places.k_pos.len,
        documents: places.documents.map(|(q, k)| (q.len, k.len)),
        at: places.at.map(|(q, k)| (q.len, k.len)),
    };
    spec.check(op, [qkv.0.len, qkv.1.len, qkv.2.len], places)
}

/// Blocks over the heads of all sequences.
fn tiles(batch: usize, heads: usize, rows: usize, tile: usize) -> u64 {
    (batch * heads) as u64 * rows.div_ceil(tile) as u64
}

/// What all tiled kernels take last.
fn call<L: Launch>(spec: &AttentionSpec, places: &Places<GpuRef<'_, L, i32>>) -> [Arg; 22] {
    let documents = places.documents.map_or((0, 0), |(q, k)| (q.ptr, k.ptr));
    let at = places.at.map_or((0, 0), |(q, k)| (q.ptr, k.ptr));
    let [least, site, left, seed, step, sample] = draws(spec.dropout.map(|of| of.dropout));
    let window = spec.window.and_then(|w| i64::try_from(w).ok());
    [
        len(spec.queries),
        len(spec.keys),
        len(spec.heads),
        len(spec.kv_heads),
        len(spec.head_dim),
        Arg::Ptr(places.q_pos.ptr),
        Arg::Ptr(places.k_pos.ptr),
        Arg::Ptr(documents.0),
        Arg::Ptr(documents.1),
        Arg::Ptr(at.0),
        Arg::Ptr(at.1),
        Arg::I64(window.unwrap_or(i64::MAX)),
        Arg::I32(spec.causal.into()),
        Arg::F64(spec.scale),
        Arg::F64(spec.softcap.unwrap_or(0.0)),
        least,
        site,
        left,
        seed,
        step,
        sample,
        len(spec.dropout.map_or(0, |of| of.first_head)),
    ]
}
