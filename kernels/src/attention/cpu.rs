//! Attention on the CPU: one part for each head, blocks of queries against blocks of keys.
//!
//! ```text
//!            KEYS     KEYS     KEYS            K^T, V packed once for each head
//!          +--------+--------+--------+
//!  QUERIES | S -> P | S -> P |  skip  |        S = q K^T,  m, l: running maximum and sum of a row
//!          +--------+--------+--------+        o = o exp(m_old - m) + P V;  at the end o / l
//!  QUERIES | S -> P | S -> P | S -> P |
//!          +--------+--------+--------+        a block that none of the rows sees is skipped
//! ```
//!
//! What a row gets from a block it does not see is a sum of zeros, so skipping can at most change
//! the sign of a zero; the last step of each result adds +0 and makes those alike. All sums run
//! over blocks in order, so threads change nothing either.

mod backward;
mod forward;

use alloc::vec;
use alloc::vec::Vec;

use super::{Attention, AttentionSpec};
use crate::cpu::Cpu;
use crate::error::need;
use crate::gemm::cpu::{same, same_mut, widen};
use crate::gemm::simd::{Operand, Tile};
use crate::{Error, Float, Real};

/// Queries of one block.
const QUERIES: usize = 64;
/// Keys of one block; blocks begin at its multiples.
const KEYS: usize = 64;

impl Attention for Cpu {
    fn attention<E: Float>(
        &self,
        spec: &AttentionSpec,
        qkv: (&[E], &[E], &[E]),
        pos: (&[i32], &[i32]),
        o_bshd: &mut [E],
        lse_bhs: &mut [E::Acc],
    ) -> Result<(), Error> {
        const OP: &str = "attention";
        let qkv_lens = [qkv.0.len(), qkv.1.len(), qkv.2.len()];
        let lens = spec.check(OP, qkv_lens, [pos.0.len(), pos.1.len()])?;
        need(OP, "o", lens.q, o_bshd.len())?;
        need(OP, "lse", lens.lse, lse_bhs.len())?;
        let (q, k, v) = (widen(qkv.0), widen(qkv.1), widen(qkv.2));
        let x = Call {
            spec,
            q: &q,
            k: &k,
            v: &v,
            pos,
        };
        in_acc(o_bshd, |o| {
            let done = forward::run_as::<E::Acc, f32>(self, &x, o, lse_bhs)
                || forward::run_as::<E::Acc, f64>(self, &x, o, lse_bhs);
            done.then_some(()).ok_or(no_tiles(OP))
        })
    }

    fn attention_delta<E: Float>(
        &self,
        spec: &AttentionSpec,
        do_bshd: &[E],
        o_bshd: &[E],
        delta_bhs: &mut [E::Acc],
    ) -> Result<(), Error> {
        const OP: &str = "attention_delta";
        let lens = spec.lens(OP)?;
        need(OP, "do", lens.q, do_bshd.len())?;
        need(OP, "o", lens.q, o_bshd.len())?;
        need(OP, "delta", lens.lse, delta_bhs.len())?;
        let (h, d) = (spec.heads, spec.head_dim);
        self.for_each(delta_bhs.chunks_mut(spec.queries.max(1)), |bh, delta_s| {
            let first = bh / h * spec.queries * h + bh % h;
            for (s, delta) in delta_s.iter_mut().enumerate() {
                let at = (first + s * h) * d;
                *delta = dot(&do_bshd[at..at + d], &o_bshd[at..at + d]);
            }
        });
        Ok(())
    }

    fn attention_backward<E: Float>(
        &self,
        spec: &AttentionSpec,
        qkv: (&[E], &[E], &[E]),
        pos: (&[i32], &[i32]),
        do_bshd: &[E],
        lse_delta: (&[E::Acc], &[E::Acc]),
        dqkv: (&mut [E], &mut [E], &mut [E]),
    ) -> Result<(), Error> {
        const OP: &str = "attention_backward";
        let qkv_lens = [qkv.0.len(), qkv.1.len(), qkv.2.len()];
        let lens = spec.check(OP, qkv_lens, [pos.0.len(), pos.1.len()])?;
        need(OP, "do", lens.q, do_bshd.len())?;
        need(OP, "lse", lens.lse, lse_delta.0.len())?;
        need(OP, "delta", lens.lse, lse_delta.1.len())?;
        need(OP, "dq", lens.q, dqkv.0.len())?;
        need(OP, "dk", lens.kv, dqkv.1.len())?;
        need(OP, "dv", lens.kv, dqkv.2.len())?;
        let (q, k, v) = (widen(qkv.0), widen(qkv.1), widen(qkv.2));
        let x = Call {
            spec,
            q: &q,
            k: &k,
            v: &v,
            pos,
        };
        let y = (&*widen(do_bshd), lse_delta.0, lse_delta.1);
        in_acc(dqkv.0, |dq| {
            in_acc(dqkv.1, |dk| {
                in_acc(dqkv.2, |dv| {
                    let done = backward::run_as::<E::Acc, f32>(self, &x, y, [dq, dk, dv])
                        || backward::run_as::<E::Acc, f64>(self, &x, y, [dq, dk, dv]);
                    done.then_some(()).ok_or(no_tiles(OP))
                })
            })
        })
    }
}

fn no_tiles(op: &'static str) -> Error {
    let why = "on the CPU attention accumulates in f32 or f64";
    Error::Spec { op, why }
}

/// Lets `work` fill `out` in Acc, and rounds it where it is stored narrower.
fn in_acc<E: Float>(
    out: &mut [E],
    work: impl FnOnce(&mut [E::Acc]) -> Result<(), Error>,
) -> Result<(), Error> {
    if let Some(out) = same_mut(out) {
        return work(out);
    }
    let mut wide = vec![E::Acc::ZERO; out.len()];
    work(&mut wide)?;
    for (out, x) in out.iter_mut().zip(wide) {
        *out = E::from_acc(x);
    }
    Ok(())
}

/// Arguments of one call, in Acc.
#[derive(Clone, Copy)]
struct Call<'a, T> {
    spec: &'a AttentionSpec,
    q: &'a [T],
    k: &'a [T],
    v: &'a [T],
    /// Of queries and keys.
    pos: (&'a [i32], &'a [i32]),
}

impl<'a, T: Tile> Call<'a, T> {
    /// The call in `T`, where `A` is `T`.
    fn of<A: Real>(x: &Call<'a, A>) -> Option<Self> {
        Some(Self {
            spec: x.spec,
            q: same(x.q)?,
            k: same(x.k)?,
            v: same(x.v)?,
            pos: x.pos,
        })
    }

    /// Rows of head `h` of sequence `b` in an array shaped as q.
    fn of_queries(&self, x: &'a [T], b: usize, h: usize) -> Operand<'a, T> {
        let AttentionSpec { heads, .. } = *self.spec;
        self.head(x, b * self.spec.queries, heads, h)
    }

    /// Rows of KV head `g` of sequence `b` in an array shaped as k.
    fn of_keys(&self, x: &'a [T], b: usize, g: usize) -> Operand<'a, T> {
        let AttentionSpec { kv_heads, .. } = *self.spec;
        self.head(x, b * self.spec.keys, kv_heads, g)
    }

    fn head(&self, x: &'a [T], first: usize, heads: usize, h: usize) -> Operand<'a, T> {
        let d = self.spec.head_dim;
        // An array without rows has no head to begin at.
        let data = x.get((first * heads + h) * d..).unwrap_or_default();
        Operand::strided(data, heads * d, 1)
    }

    /// Who sees whom among `queries` and `keys` of sequence `b`.
    fn mask(&self, b: usize, queries: Block, keys: Block) -> Mask<'a> {
        let q_pos = &self.pos.0[b * self.spec.queries + queries.first..][..queries.len];
        let k_pos = &self.pos.1[b * self.spec.keys + keys.first..][..keys.len];
        let range = |pos: &[i32]| {
            pos.iter()
                .fold((i32::MAX, i32::MIN), |r, &p| (r.0.min(p), r.1.max(p)))
        };
        let ((q_min, q_max), (k_min, k_max)) = (range(q_pos), range(k_pos));
        Mask {
            q_pos,
            k_pos,
            none: self.spec.causal && k_min > q_max,
            all: !self.spec.causal || k_max <= q_min,
        }
    }
}

struct Mask<'a> {
    q_pos: &'a [i32],
    k_pos: &'a [i32],
    /// No query sees a key.
    none: bool,
    /// Each query sees each key.
    all: bool,
}

impl Mask<'_> {
    /// Sets what query `s` does not see to `hidden`.
    #[inline(always)]
    fn hide<T: Real>(&self, s: usize, row: &mut [T], hidden: T) {
        if !self.all {
            for (x, &pos) in row.iter_mut().zip(self.k_pos) {
                *x = if pos <= self.q_pos[s] { *x } else { hidden };
            }
        }
    }
}

/// Rows `first .. first + len`.
#[derive(Clone, Copy)]
struct Block {
    first: usize,
    len: usize,
}

fn blocks(len: usize, step: usize) -> impl Iterator<Item = Block> + Clone {
    (0..len).step_by(step).map(move |first| Block {
        first,
        len: step.min(len - first),
    })
}

/// The rows of each head, from an array `[batch, rows, heads, d]`.
fn by_head<T>(x: &mut [T], rows: usize, heads: usize, d: usize) -> Vec<Vec<&mut [T]>> {
    let batch = x.len() / (rows * heads * d).max(1);
    let mut parts: Vec<_> = (0..batch * heads)
        .map(|_| Vec::with_capacity(rows))
        .collect();
    for (i, row) in x.chunks_exact_mut(d).enumerate() {
        parts[i / (rows * heads) * heads + i % heads].push(row);
    }
    parts
}

/// Cuts `len` elements off the front of `room`.
fn cut<'a, T>(room: &mut &'a mut [T], len: usize) -> &'a mut [T] {
    let (front, rest) = core::mem::take(room).split_at_mut(len);
    *room = rest;
    front
}

/// `e^x` of an `x <= 0` up to rounding, and 0 where that would be below the normal numbers:
/// hidden keys have x = -inf, and each underflow would cost the CPU a hundred cycles.
#[inline(always)]
fn weight<T: Real>(x: T) -> T {
    let least = T::from_f64(if size_of::<T>() == 4 { -87.0 } else { -708.0 });
    let gone = x <= least;
    let e = (if gone { T::ZERO } else { x }).exp();
    if gone { T::ZERO } else { e }
}

fn dot<E: Float>(x: &[E], y: &[E]) -> E::Acc {
    x.iter()
        .zip(y)
        .fold(E::Acc::ZERO, |sum, (x, y)| sum + x.to_acc() * y.to_acc())
}
