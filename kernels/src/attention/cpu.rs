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
mod dropped;
mod forward;
mod mask;

use alloc::borrow::Cow;
use alloc::vec;
use alloc::vec::Vec;

use super::{Attention, AttentionSpec, Carry, Places};
use crate::cpu::{Cpu, Scratch};
use crate::error::need;
use crate::gemm::cpu::{same, same_mut, widen};
use crate::gemm::simd::{Operand, Right, Tile};
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
        places: Places<&[i32]>,
        o_bshd: &mut [E],
        lse_bhs: &mut [E::Acc],
    ) -> Result<(), Error> {
        const OP: &str = "attention";
        let lens = check(OP, spec, qkv, places)?;
        need(OP, "o", lens.q, o_bshd.len())?;
        need(OP, "lse", lens.lse, lse_bhs.len())?;
        let (q, k, v) = (widen(qkv.0), widen(qkv.1), values(spec, qkv.2));
        let x = Call {
            spec,
            q: &q,
            k: &k,
            v: &v,
            places,
        };
        in_acc(o_bshd, |o| {
            let done = forward::run_as::<E::Acc, f32>(self, &x, o, lse_bhs)
                || forward::run_as::<E::Acc, f64>(self, &x, o, lse_bhs);
            done.then_some(()).ok_or(no_tiles(OP))
        })
    }

    fn attention_step<E: Float>(
        &self,
        spec: &AttentionSpec,
        qkv: (&[E], &[E], &[E]),
        places: Places<&[i32]>,
        carry: Carry<&mut [E::Acc]>,
    ) -> Result<(), Error> {
        const OP: &str = "attention_step";
        let lens = check(OP, spec, qkv, places)?;
        need(OP, "the carry's o", lens.q, carry.o_bshd.len())?;
        need(OP, "the carry's max", lens.lse, carry.max_bhs.len())?;
        need(OP, "the carry's sum", lens.lse, carry.sum_bhs.len())?;
        let (q, k, v) = (widen(qkv.0), widen(qkv.1), values(spec, qkv.2));
        let x = Call {
            spec,
            q: &q,
            k: &k,
            v: &v,
            places,
        };
        let carry = [carry.o_bshd, carry.max_bhs, carry.sum_bhs];
        let [o, max, sum] = carry;
        let done = forward::step_as::<E::Acc, f32>(self, &x, [&mut *o, &mut *max, &mut *sum])
            || forward::step_as::<E::Acc, f64>(self, &x, [o, max, sum]);
        done.then_some(()).ok_or(no_tiles(OP))
    }

    fn attention_finish<E: Float>(
        &self,
        spec: &AttentionSpec,
        carry: Carry<&[E::Acc]>,
        o_bshd: &mut [E],
        lse_bhs: &mut [E::Acc],
    ) -> Result<(), Error> {
        const OP: &str = "attention_finish";
        let lens = spec.lens(OP)?;
        need(OP, "the carry's o", lens.q, carry.o_bshd.len())?;
        need(OP, "the carry's max", lens.lse, carry.max_bhs.len())?;
        need(OP, "the carry's sum", lens.lse, carry.sum_bhs.len())?;
        need(OP, "o", lens.q, o_bshd.len())?;
        need(OP, "lse", lens.lse, lse_bhs.len())?;
        let AttentionSpec {
            queries,
            heads,
            head_dim: d,
            ..
        } = *spec;
        let outs = by_head(o_bshd, queries, heads, d).into_iter();
        let outs = outs.zip(lse_bhs.chunks_mut(queries.max(1)));
        self.for_each(outs, |bh, (o_sd, lse_s)| {
            let first = bh / heads * queries * heads + bh % heads;
            for (s, (o, lse)) in o_sd.into_iter().zip(lse_s).enumerate() {
                let acc = &carry.o_bshd[(first + s * heads) * d..][..d];
                let stats = (
                    carry.max_bhs[bh * queries + s],
                    carry.sum_bhs[bh * queries + s],
                );
                *lse = settle(acc, stats, |i, x| o[i] = E::from_acc(x));
            }
        });
        Ok(())
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
        let (do_, o) = (widen(do_bshd), widen(o_bshd));
        let done = delta_as::<E::Acc, f32>(self, spec, &do_, &o, delta_bhs)
            || delta_as::<E::Acc, f64>(self, spec, &do_, &o, delta_bhs);
        done.then_some(()).ok_or(no_tiles(OP))
    }

    fn attention_backward<E: Float>(
        &self,
        spec: &AttentionSpec,
        qkv: (&[E], &[E], &[E]),
        places: Places<&[i32]>,
        do_bshd: &[E],
        lse_delta: (&[E::Acc], &[E::Acc]),
        dqkv: (&mut [E], &mut [E], &mut [E]),
    ) -> Result<(), Error> {
        let lens = [dqkv.0.len(), dqkv.1.len(), dqkv.2.len()];
        in_acc(dqkv.0, |dq| {
            in_acc(dqkv.1, |dk| {
                in_acc(dqkv.2, |dv| {
                    let into = (lens, [dq, dk, dv]);
                    gradients(self, spec, qkv, places, do_bshd, lse_delta, into, false)
                })
            })
        })
    }

    fn attention_backward_step<E: Float>(
        &self,
        spec: &AttentionSpec,
        qkv: (&[E], &[E], &[E]),
        places: Places<&[i32]>,
        do_bshd: &[E],
        lse_delta: (&[E::Acc], &[E::Acc]),
        (dq, dk, dv): (&mut [E::Acc], &mut [E::Acc], &mut [E::Acc]),
    ) -> Result<(), Error> {
        let into = ([dq.len(), dk.len(), dv.len()], [dq, dk, dv]);
        gradients(self, spec, qkv, places, do_bshd, lse_delta, into, true)
    }
}

fn check<E: Float>(
    op: &'static str,
    spec: &AttentionSpec,
    qkv: (&[E], &[E], &[E]),
    places: Places<&[i32]>,
) -> Result<super::Lens, Error> {
    let places = Places {
        q_pos: places.q_pos.len(),
        k_pos: places.k_pos.len(),
        documents: places.documents.map(|(q, k)| (q.len(), k.len())),
        at: places.at.map(|(q, k)| (q.len(), k.len())),
    };
    spec.check(op, [qkv.0.len(), qkv.1.len(), qkv.2.len()], places)
}

/// Gradients in Acc, written or added; `into` has the lengths that the caller gave.
fn gradients<E: Float>(
    cpu: &Cpu,
    spec: &AttentionSpec,
    qkv: (&[E], &[E], &[E]),
    places: Places<&[i32]>,
    do_bshd: &[E],
    lse_delta: (&[E::Acc], &[E::Acc]),
    ([dq_len, dk_len, dv_len], [dq, dk, dv]): ([usize; 3], [&mut [E::Acc]; 3]),
    add: bool,
) -> Result<(), Error> {
    const OP: &str = "attention_backward";
    let lens = check(OP, spec, qkv, places)?;
    need(OP, "do", lens.q, do_bshd.len())?;
    need(OP, "lse", lens.lse, lse_delta.0.len())?;
    need(OP, "delta", lens.lse, lse_delta.1.len())?;
    need(OP, "dq", lens.q, dq_len)?;
    need(OP, "dk", lens.kv, dk_len)?;
    need(OP, "dv", lens.kv, dv_len)?;
    let (q, k, v) = (widen(qkv.0), widen(qkv.1), values(spec, qkv.2));
    let x = Call {
        spec,
        q: &q,
        k: &k,
        v: &v,
        places,
    };
    let y = (&*widen(do_bshd), lse_delta.0, lse_delta.1);
    let done = backward::run_as::<E::Acc, f32>(cpu, &x, y, [&mut *dq, &mut *dk, &mut *dv], add)
        || backward::run_as::<E::Acc, f64>(cpu, &x, y, [dq, dk, dv], add);
    done.then_some(()).ok_or(no_tiles(OP))
}

/// `delta` by the products that backward takes `do v^T` with: of a square of rows the diagonal.
/// `false` where `A` is not `T`.
fn delta_as<A: Real, T: Tile>(
    cpu: &Cpu,
    spec: &AttentionSpec,
    do_bshd: &[A],
    o_bshd: &[A],
    delta_bhs: &mut [A],
) -> bool {
    let (Some(do_), Some(o), Some(delta)) = (same(do_bshd), same(o_bshd), same_mut(delta_bhs))
    else {
        return false;
    };
    let AttentionSpec {
        queries,
        heads,
        head_dim: d,
        ..
    } = *spec;
    cpu.for_each(delta.chunks_mut(queries.max(1)), |bh, delta_s| {
        let (first, room) = (bh / heads * queries, Right::<T>::room(d, T::NR));
        let rows = |x| head(x, d, first, heads, bh % heads);
        let (do_, o): (Operand<'_, T>, Operand<'_, T>) = (rows(do_), rows(o));
        let mut scratch = Scratch::take();
        let (room, square) = scratch.of::<T>(room + T::NR * T::NR).split_at_mut(room);
        for s in blocks(queries, T::NR) {
            let n = s.len;
            let (do_, o) = (do_.from(s.first, 0), o.from(s.first, 0));
            let o = Right::new(o.transposed(), d, n, &mut room[..Right::<T>::room(d, n)]);
            o.times(&do_, &mut square[..n * n], false);
            let diagonal = square.iter().step_by(n + 1);
            for (delta, &x) in delta_s[s.first..].iter_mut().zip(diagonal).take(n) {
                *delta = x;
            }
        }
    });
    true
}

/// The values, scaled up where probabilities are let go.
fn values<'a, E: Float>(spec: &AttentionSpec, v: &'a [E]) -> Cow<'a, [E::Acc]> {
    let v = widen(v);
    let Some(of) = spec.dropout else {
        return v;
    };
    let scale = E::Acc::from_f64(of.dropout.scale());
    Cow::Owned(v.iter().map(|&v| v * scale).collect())
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
    places: Places<&'a [i32]>,
}

impl<'a, T: Tile> Call<'a, T> {
    /// The call in `T`, where `A` is `T`.
    fn of<A: Real>(x: &Call<'a, A>) -> Option<Self> {
        Some(Self {
            spec: x.spec,
            q: same(x.q)?,
            k: same(x.k)?,
            v: same(x.v)?,
            places: x.places,
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
        head(x, self.spec.head_dim, first, heads, h)
    }
}

/// Rows of head `h` from row `first` on, in an array of rows of `heads` heads of `d`.
fn head<T: Copy>(x: &[T], d: usize, first: usize, heads: usize, h: usize) -> Operand<'_, T> {
    // An array without rows has no head to begin at.
    let data = x.get((first * heads + h) * d..).unwrap_or_default();
    Operand::strided(data, heads * d, 1)
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

/// Gives what a row has summed up, normalised, and returns its log-sum-exp.
#[inline(always)]
fn settle<T: Real>(acc: &[T], (max, sum): (T, T), mut give: impl FnMut(usize, T)) -> T {
    if sum > T::ZERO {
        let norm = T::ONE / sum;
        for (i, &x) in acc.iter().enumerate() {
            give(i, x * norm + T::ZERO);
        }
        max + sum.ln()
    } else {
        (0..acc.len()).for_each(|i| give(i, T::ZERO));
        T::NEG_INFINITY
    }
}
