//! Output and log-sum-exp, or a carry of them: one part for each query head.

use alloc::vec::Vec;

use super::dropped::Dropped;
use super::mask::Mask;
use super::{Block, Call, KEYS, QUERIES, blocks, by_head, cut, settle, weight};
use crate::Real;
use crate::attention::AttentionSpec;
use crate::cpu::{Cpu, Scratch, wide};
use crate::gemm::cpu::same_mut;
use crate::gemm::simd::{Operand, Right, Tile};

/// `false` where `A` is not `T`.
pub(super) fn run_as<A: Real, T: Tile>(
    cpu: &Cpu,
    x: &Call<'_, A>,
    o: &mut [A],
    lse: &mut [A],
) -> bool {
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
    cpu.for_each(outs, |bh, (o_sd, lse_s)| {
        head(&x, bh / heads, bh % heads, Out::Final { o_sd, lse_s });
    });
    true
}

/// The same from a carry into a carry: o, max and sum.
pub(super) fn step_as<A: Real, T: Tile>(
    cpu: &Cpu,
    x: &Call<'_, A>,
    [o, max, sum]: [&mut [A]; 3],
) -> bool {
    let (Some(x), Some(o), Some(max), Some(sum)) =
        (Call::<T>::of(x), same_mut(o), same_mut(max), same_mut(sum))
    else {
        return false;
    };
    let AttentionSpec {
        queries,
        heads,
        head_dim,
        ..
    } = *x.spec;
    let stats = max.chunks_mut(queries.max(1));
    let stats = stats.zip(sum.chunks_mut(queries.max(1)));
    let outs = by_head(o, queries, heads, head_dim).into_iter().zip(stats);
    cpu.for_each(outs, |bh, (o_sd, (max_s, sum_s))| {
        let carry = Out::Carry { o_sd, max_s, sum_s };
        head(&x, bh / heads, bh % heads, carry);
    });
    true
}

/// Where one head's rows begin and end.
enum Out<'a, T> {
    /// At nothing, and normalised.
    Final {
        o_sd: Vec<&'a mut [T]>,
        lse_s: &'a mut [T],
    },
    /// As an earlier step left them, and as this one does.
    Carry {
        o_sd: Vec<&'a mut [T]>,
        max_s: &'a mut [T],
        sum_s: &'a mut [T],
    },
}

impl<T: Real> Out<'_, T> {
    /// Fills the running rows of a block of queries.
    fn begin(&self, s: Block, d: usize, acc: &mut [T], max: &mut [T], sum: &mut [T]) {
        acc.fill(T::ZERO);
        max.fill(T::NEG_INFINITY);
        sum.fill(T::ZERO);
        if let Self::Carry { o_sd, max_s, sum_s } = self {
            for (i, acc) in acc.chunks_exact_mut(d).enumerate() {
                if sum_s[s.first + i] > T::ZERO {
                    acc.copy_from_slice(o_sd[s.first + i]);
                    (max[i], sum[i]) = (max_s[s.first + i], sum_s[s.first + i]);
                }
            }
        }
    }

    /// Takes the running rows of a block of queries.
    fn end(&mut self, s: Block, d: usize, acc: &[T], max: &[T], sum: &[T]) {
        for (i, acc) in acc.chunks_exact(d).enumerate() {
            let (row, stats) = (s.first + i, (max[i], sum[i]));
            match self {
                Self::Final { o_sd, lse_s } => {
                    let o = &mut *o_sd[row];
                    lse_s[row] = settle(acc, stats, |i, x| o[i] = x);
                }
                Self::Carry { o_sd, max_s, sum_s } => {
                    o_sd[row].copy_from_slice(acc);
                    (max_s[row], sum_s[row]) = stats;
                }
            }
        }
    }
}

fn head<T: Tile>(x: &Call<'_, T>, b: usize, h: usize, mut out: Out<'_, T>) {
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
    // What nobody sees need not be packed.
    let seen = |z: &Block| blocks(queries, QUERIES).any(|s| !Mask::new(x, b, s, *z).none);
    let key_blocks: Vec<Block> = blocks(keys, KEYS).filter(seen).collect();
    let packed = |z: &Block| Right::<T>::room(d, z.len) + Right::<T>::room(z.len, d);
    let mut scratch = Scratch::take();
    let len = key_blocks.iter().map(packed).sum::<usize>() + QUERIES * (KEYS + d + 3);
    let mut room = scratch.of::<T>(len);
    let kv: Vec<_> = key_blocks
        .into_iter()
        .map(|z| {
            let kt_room = cut(&mut room, Right::<T>::room(d, z.len));
            let v_room = cut(&mut room, Right::<T>::room(z.len, d));
            let kt = Right::new(k.from(z.first, 0).transposed(), d, z.len, kt_room);
            (z, kt, Right::new(v.from(z.first, 0), z.len, d, v_room))
        })
        .collect();
    let dropped = Dropped::new(x, b, h);
    let (scale, cap) = (T::from_f64(x.spec.scale), x.spec.softcap.map(T::from_f64));
    for s in blocks(queries, QUERIES) {
        let mut room = &mut *room;
        let acc = cut(&mut room, s.len * d);
        let [max, sum, fade] = [(); 3].map(|()| cut(&mut room, s.len));
        out.begin(s, d, acc, max, sum);
        let q = q.from(s.first, 0);
        for (z, kt, v) in &kv {
            let mask = Mask::new(x, b, s, *z);
            if mask.none {
                continue;
            }
            let p = &mut room[..s.len * z.len];
            kt.times(&q, p, false);
            wide(
                #[inline(always)]
                || {
                    soften(p, &mask, (scale, cap), [&mut *max, &mut *sum, &mut *fade]);
                    for (acc, &fade) in acc.chunks_exact_mut(d).zip(fade.iter()) {
                        for o in acc {
                            *o *= fade;
                        }
                    }
                },
            );
            if let Some(dropped) = &dropped {
                for (i, p) in p.chunks_exact_mut(z.len).enumerate() {
                    dropped.hide(s.first + i, *z, p);
                }
            }
            v.times(&Operand::strided(p, z.len, 1), acc, true);
        }
        out.end(s, d, acc, max, sum);
    }
}

/// Scores to weights `exp(score - max)`; `fade` is the factor on what came before. Each step is
/// done for all rows before the next: within one row they would wait for each other.
#[inline(always)]
fn soften<T: Real>(
    p: &mut [T],
    mask: &Mask<'_>,
    (scale, cap): (T, Option<T>),
    [max, sum, fade]: [&mut [T]; 3],
) {
    let keys = mask.keys();
    for (i, row) in p.chunks_exact_mut(keys).enumerate() {
        for x in row.iter_mut() {
            *x *= scale;
        }
        if let Some(cap) = cap {
            for x in row.iter_mut() {
                *x = cap * (*x / cap).tanh();
            }
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
