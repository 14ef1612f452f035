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

use alloc::vec;
use alloc::vec::Vec;

use super::{Attention, AttentionSpec};
use crate::cpu::{Cpu, Scratch, wide};
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
            let done = forward_as::<E::Acc, f32>(self, &x, o, lse_bhs)
                || forward_as::<E::Acc, f64>(self, &x, o, lse_bhs);
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
                    let done = backward_as::<E::Acc, f32>(self, &x, y, [dq, dk, dv])
                        || backward_as::<E::Acc, f64>(self, &x, y, [dq, dk, dv]);
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

/// `false` where `A` is not `T`.
fn forward_as<A: Real, T: Tile>(cpu: &Cpu, x: &Call<'_, A>, o: &mut [A], lse: &mut [A]) -> bool {
    let (Some(x), Some(o), Some(lse)) = (Call::<T>::of(x), same_mut(o), same_mut(lse)) else {
        return false;
    };
    let AttentionSpec {
        queries,
        heads,
        head_dim,
        ..
    } = *x.spec;
    let outs = by_head(o, queries, heads, head_dim)
        .into_iter()
        .zip(lse.chunks_mut(queries.max(1)));
    cpu.for_each(outs, |bh, (o_s, lse_s)| {
        forward_head(&x, bh / heads, bh % heads, o_s, lse_s);
    });
    true
}

fn forward_head<T: Tile>(
    x: &Call<'_, T>,
    b: usize,
    h: usize,
    mut o_sd: Vec<&mut [T]>,
    lse_s: &mut [T],
) {
    let AttentionSpec {
        queries,
        keys,
        head_dim: d,
        ..
    } = *x.spec;
    let g = h / (x.spec.heads / x.spec.kv_heads);
    let (q, k, v) = (
        x.of_queries(x.q, b, h),
        x.of_keys(x.k, b, g),
        x.of_keys(x.v, b, g),
    );
    let key_blocks = blocks(keys, KEYS);
    let packed = |z: Block| Right::<T>::room(d, z.len) + Right::<T>::room(z.len, d);
    let mut scratch = Scratch::take();
    let len = key_blocks.clone().map(packed).sum::<usize>() + QUERIES * (KEYS + d + 3);
    let mut room = scratch.of::<T>(len);
    let kv: Vec<_> = key_blocks
        .map(|z| {
            let kt_room = cut(&mut room, Right::<T>::room(d, z.len));
            let v_room = cut(&mut room, Right::<T>::room(z.len, d));
            let kt = Right::new(k.from(z.first, 0).transposed(), d, z.len, kt_room);
            (z, kt, Right::new(v.from(z.first, 0), z.len, d, v_room))
        })
        .collect();
    let scale = T::from_f64(x.spec.scale);
    for s in blocks(queries, QUERIES) {
        let mut room = &mut *room;
        let acc = cut(&mut room, s.len * d);
        let [max, sum, fade] = [(); 3].map(|()| cut(&mut room, s.len));
        acc.fill(T::ZERO);
        max.fill(T::NEG_INFINITY);
        sum.fill(T::ZERO);
        let q = q.from(s.first, 0);
        for (z, kt, v) in &kv {
            let mask = x.mask(b, s, *z);
            if mask.none {
                continue;
            }
            let p = &mut room[..s.len * z.len];
            kt.times(&q, p, false);
            wide(
                #[inline(always)]
                || {
                    soften(p, &mask, scale, [&mut *max, &mut *sum, &mut *fade]);
                    for (acc, &fade) in acc.chunks_exact_mut(d).zip(fade.iter()) {
                        for o in acc {
                            *o *= fade;
                        }
                    }
                },
            );
            v.times(&Operand::strided(p, z.len, 1), acc, true);
        }
        for (i, acc) in acc.chunks_exact(d).enumerate() {
            let seen = sum[i] > T::ZERO;
            let norm = if seen { T::ONE / sum[i] } else { T::ZERO };
            for (o, &x) in o_sd[s.first + i].iter_mut().zip(acc) {
                *o = x * norm + T::ZERO;
            }
            lse_s[s.first + i] = if seen {
                max[i] + sum[i].ln()
            } else {
                T::NEG_INFINITY
            };
        }
    }
}

/// Scores to weights `exp(score - max)`; `fade` is the factor on what came before. Each step is
/// done for all rows before the next: within one row they would wait for each other.
#[inline(always)]
fn soften<T: Real>(p: &mut [T], mask: &Mask<'_>, scale: T, [max, sum, fade]: [&mut [T]; 3]) {
    let keys = mask.k_pos.len();
    for (i, row) in p.chunks_exact_mut(keys).enumerate() {
        for x in row.iter_mut() {
            *x *= scale;
        }
        mask.hide(i, row, T::NEG_INFINITY);
        fade[i] = fold_lanes(row, max[i], T::max);
    }
    for (max, fade) in max.iter_mut().zip(fade.iter_mut()) {
        let new = *fade;
        *fade = weight(*max - base(new));
        *max = new;
    }
    for (row, &max) in p.chunks_exact_mut(keys).zip(max.iter()) {
        for x in row {
            *x = weight(*x - base(max));
        }
    }
    for ((row, sum), &fade) in p.chunks_exact(keys).zip(sum).zip(fade.iter()) {
        *sum = *sum * fade + fold_lanes(row, T::ZERO, |a, b| a + b);
    }
}

/// What is subtracted from scores: in a row that has seen nothing yet, minus infinity less itself
/// would be NaN.
#[inline(always)]
fn base<T: Real>(max: T) -> T {
    if max == T::NEG_INFINITY { T::ZERO } else { max }
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

/// Folds element i into lane i mod 16, then the lanes; `start` must be neutral or a maximum.
#[inline(always)]
fn fold_lanes<T: Real>(row: &[T], start: T, fold: impl Fn(T, T) -> T) -> T {
    let mut lanes = [start; 16];
    let (whole, rest) = row.as_chunks::<16>();
    for x in whole {
        for l in 0..16 {
            lanes[l] = fold(lanes[l], x[l]);
        }
    }
    for (lane, &x) in lanes.iter_mut().zip(rest) {
        *lane = fold(*lane, x);
    }
    for half in [8, 4, 2, 1] {
        for l in 0..half {
            lanes[l] = fold(lanes[l], lanes[l + half]);
        }
    }
    lanes[0]
}

fn dot<E: Float>(x: &[E], y: &[E]) -> E::Acc {
    x.iter()
        .zip(y)
        .fold(E::Acc::ZERO, |sum, (x, y)| sum + x.to_acc() * y.to_acc())
}

/// `false` where `A` is not `T`.
fn backward_as<A: Real, T: Tile>(
    cpu: &Cpu,
    x: &Call<'_, A>,
    (do_bshd, lse, delta): (&[A], &[A], &[A]),
    [dq, dk, dv]: [&mut [A]; 3],
) -> bool {
    let (Some(x), Some(do_bshd), Some(lse), Some(delta)) =
        (Call::<T>::of(x), same(do_bshd), same(lse), same(delta))
    else {
        return false;
    };
    let (Some(dq), Some(dk), Some(dv)) = (same_mut(dq), same_mut(dk), same_mut(dv)) else {
        return false;
    };
    let AttentionSpec {
        queries,
        keys,
        heads,
        kv_heads,
        head_dim: d,
        ..
    } = *x.spec;
    let dq = by_head(dq, queries, heads, d).into_iter();
    let mut dq: Vec<_> = dq.map(Some).collect();
    let group = heads / kv_heads;
    let (mut dk, mut dv) = (
        by_head(dk, keys, kv_heads, d).into_iter(),
        by_head(dv, keys, kv_heads, d).into_iter(),
    );
    let parts: Vec<_> = (0..x.spec.batch * kv_heads)
        .map(|bg| {
            let heads = bg * group..(bg + 1) * group;
            let dq: Vec<_> = heads
                .map(|bh| dq.get_mut(bh).and_then(Option::take).unwrap_or_default())
                .collect();
            let dk = dk.next().unwrap_or_default();
            (dq, dk, dv.next().unwrap_or_default())
        })
        .collect();
    let y = Given {
        do_bshd,
        lse,
        delta,
    };
    cpu.for_each(parts, |bg, (dq, dk, dv)| {
        backward_group(&x, &y, bg / kv_heads, bg % kv_heads, dq, dk, dv);
    });
    true
}

/// What backward gets from forward and from above.
struct Given<'a, T> {
    do_bshd: &'a [T],
    lse: &'a [T],
    delta: &'a [T],
}

/// One KV head and the query heads that read it, one after the other.
fn backward_group<T: Tile>(
    x: &Call<'_, T>,
    y: &Given<'_, T>,
    b: usize,
    g: usize,
    dq: Vec<Vec<&mut [T]>>,
    dk_zd: Vec<&mut [T]>,
    dv_zd: Vec<&mut [T]>,
) {
    let AttentionSpec {
        queries,
        keys,
        heads,
        head_dim: d,
        ..
    } = *x.spec;
    let (k, v) = (x.of_keys(x.k, b, g), x.of_keys(x.v, b, g));
    let (across, along) = (Right::<T>::room(d, KEYS), Right::<T>::room(KEYS, d));
    let key_count = keys.div_ceil(KEYS);
    let len = key_count * (2 * across + along)
        + 2 * keys * d
        + QUERIES * (2 * KEYS + d)
        + 2 * Right::<T>::room(QUERIES, d);
    let mut scratch = Scratch::take();
    let mut room = scratch.of::<T>(len);
    let kv: Vec<_> = blocks(keys, KEYS)
        .map(|z| {
            let (k, v) = (k.from(z.first, 0), v.from(z.first, 0));
            let (n, room) = (z.len, &mut room);
            let kt = Right::new(k.transposed(), d, n, cut(room, Right::<T>::room(d, n)));
            let vt = Right::new(v.transposed(), d, n, cut(room, Right::<T>::room(d, n)));
            let k = Right::new(k, n, d, cut(room, Right::<T>::room(n, d)));
            (z, kt, vt, k)
        })
        .collect();
    let (dk, dv) = (cut(&mut room, keys * d), cut(&mut room, keys * d));
    dk.fill(T::ZERO);
    dv.fill(T::ZERO);
    let scale = T::from_f64(x.spec.scale);
    for (r, mut dq_sd) in dq.into_iter().enumerate() {
        let h = g * dq_heads(x.spec) + r;
        let (q, do_) = (x.of_queries(x.q, b, h), x.of_queries(y.do_bshd, b, h));
        let stats = (b * heads + h) * queries;
        for s in blocks(queries, QUERIES) {
            let mut room = &mut *room;
            let (q, do_) = (q.from(s.first, 0), do_.from(s.first, 0));
            let q_right = Right::new(q, s.len, d, cut(&mut room, Right::<T>::room(s.len, d)));
            let do_right = Right::new(do_, s.len, d, cut(&mut room, Right::<T>::room(s.len, d)));
            let dq = cut(&mut room, s.len * d);
            dq.fill(T::ZERO);
            let lse = &y.lse[stats + s.first..][..s.len];
            let delta = &y.delta[stats + s.first..][..s.len];
            for (z, kt, vt, k) in &kv {
                let mask = x.mask(b, s, *z);
                if mask.none {
                    continue;
                }
                let (p, rest) = room.split_at_mut(s.len * z.len);
                let ds = &mut rest[..s.len * z.len];
                kt.times(&q, p, false);
                vt.times(&do_, ds, false);
                wide(
                    #[inline(always)]
                    || {
                        let rows = p.chunks_exact_mut(z.len).zip(ds.chunks_exact_mut(z.len));
                        for (i, (p, ds)) in rows.enumerate() {
                            differentiate(p, ds, &mask, i, scale, lse[i], delta[i]);
                        }
                    },
                );
                let at = z.first * d..(z.first + z.len) * d;
                let transposed = |x| Operand::strided(x, 1, z.len);
                do_right.times(&transposed(&*p), &mut dv[at.clone()], true);
                q_right.times(&transposed(&*ds), &mut dk[at], true);
                k.times(&Operand::strided(ds, z.len, 1), dq, true);
            }
            let rows = &mut dq_sd[s.first..];
            give(dq, rows, d);
        }
    }
    let (mut dk_zd, mut dv_zd) = (dk_zd, dv_zd);
    give(dk, &mut dk_zd, d);
    give(dv, &mut dv_zd, d);
}

/// Query heads of one KV head.
fn dq_heads(spec: &AttentionSpec) -> usize {
    spec.heads / spec.kv_heads
}

/// Scores to weights, and the gradient of the weights to that of the unscaled scores.
#[inline(always)]
fn differentiate<T: Real>(
    p: &mut [T],
    ds: &mut [T],
    mask: &Mask<'_>,
    i: usize,
    scale: T,
    lse: T,
    delta: T,
) {
    for x in p.iter_mut() {
        *x = weight(*x * scale - lse);
    }
    // Also where the row sees nothing and lse is minus infinity.
    mask.hide(i, p, T::ZERO);
    for (ds, &p) in ds.iter_mut().zip(p.iter()) {
        *ds = p * scale * (*ds - delta);
    }
}

/// Writes contiguous rows to where they belong; a zero is +0.
fn give<T: Real>(from: &[T], to: &mut [&mut [T]], d: usize) {
    for (to, from) in to.iter_mut().zip(from.chunks_exact(d)) {
        for (to, &x) in to.iter_mut().zip(from) {
            *to = x + T::ZERO;
        }
    }
}
