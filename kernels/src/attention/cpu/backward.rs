//! Gradients: one part for each KV head, which owns its rows of dk and dv and, query head after
//! query head, the rows of dq of those that read it.
//!
//! ```text
//! P  = exp(scale q k^T - lse)          dv += P^T do        for each block of queries,
//! dS = scale P (do v^T - delta)        dk += dS^T q        for each block of keys that it sees
//!                                      dq += dS k
//! ```
//!
//! Where scores are capped, P is of the capped ones, and dS is times `1 - tanh^2`.

use alloc::vec::Vec;

use super::dropped::Dropped;
use super::mask::Mask;
use super::{Block, Call, KEYS, QUERIES, blocks, by_head, cut, weight};
use crate::Real;
use crate::attention::AttentionSpec;
use crate::cpu::{Cpu, Scratch, wide};
use crate::gemm::cpu::{same, same_mut};
use crate::gemm::simd::{Operand, Right, Tile};

/// Writes the gradients, or adds them to what is there. `false` where `A` is not `T`.
pub(super) fn run_as<A: Real, T: Tile>(
    cpu: &Cpu,
    x: &Call<'_, A>,
    (do_bshd, lse, delta): (&[A], &[A], &[A]),
    [dq, dk, dv]: [&mut [A]; 3],
    add: bool,
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
        add,
    };
    cpu.for_each(parts, |bg, (dq, dk, dv)| {
        backward_group(&x, &y, bg / kv_heads, bg % kv_heads, dq, dk, dv);
    });
    true
}

/// What backward gets from forward and from above, and whether it adds.
struct Given<'a, T> {
    do_bshd: &'a [T],
    lse: &'a [T],
    delta: &'a [T],
    add: bool,
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
    // What nobody sees need not be packed.
    let seen = |z: &Block| blocks(queries, QUERIES).any(|s| !Mask::new(x, b, s, *z).none);
    let key_blocks: Vec<Block> = blocks(keys, KEYS).filter(seen).collect();
    let len = key_blocks.len() * (2 * across + along)
        + 2 * keys * d
        + QUERIES * (2 * KEYS + d)
        + KEYS
        + 2 * Right::<T>::room(QUERIES, d);
    let mut scratch = Scratch::take();
    let mut room = scratch.of::<T>(len);
    let kv: Vec<_> = key_blocks
        .into_iter()
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
    let slopes = cut(&mut room, KEYS);
    let scale = T::from_f64(x.spec.scale);
    let cap = x.spec.softcap.map(T::from_f64);
    for (r, mut dq_sd) in dq.into_iter().enumerate() {
        let h = g * heads / x.spec.kv_heads + r;
        let dropped = Dropped::new(x, b, h);
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
                let mask = Mask::new(x, b, s, *z);
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
                            let slopes = cap.map(|cap| bend(p, slopes, scale, cap));
                            let by = if slopes.is_some() { T::ONE } else { scale };
                            weigh(p, &mask, i, by, lse[i]);
                            match &dropped {
                                None => differentiate(p, ds, scale, delta[i]),
                                Some(dropped) => {
                                    let (at, by) = ((s.first + i, *z), (scale, delta[i]));
                                    dropped.differentiate(at, p, ds, by);
                                }
                            }
                            for (ds, &slope) in ds.iter_mut().zip(slopes.unwrap_or_default()) {
                                *ds *= slope;
                            }
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
            give(dq, rows, d, y.add);
        }
    }
    if let Some(of) = x.spec.dropout {
        let scale = T::from_f64(of.dropout.scale());
        dv.iter_mut().for_each(|x| *x *= scale);
    }
    let (mut dk_zd, mut dv_zd) = (dk_zd, dv_zd);
    give(dk, &mut dk_zd, d, y.add);
    give(dv, &mut dv_zd, d, y.add);
}

/// Products to capped scores; gives the derivatives of those by the scaled ones.
#[inline(always)]
fn bend<'a, T: Real>(p: &mut [T], slopes: &'a mut [T], scale: T, cap: T) -> &'a [T] {
    for (x, slope) in p.iter_mut().zip(slopes.iter_mut()) {
        let part = (*x * scale / cap).tanh();
        (*x, *slope) = (cap * part, T::ONE - part * part);
    }
    slopes
}

/// Scores to weights.
#[inline(always)]
fn weigh<T: Real>(p: &mut [T], mask: &Mask<'_>, i: usize, scale: T, lse: T) {
    for x in p.iter_mut() {
        *x = weight(*x * scale - lse);
    }
    // Also where the row sees nothing and lse is minus infinity.
    mask.hide(i, p, T::ZERO);
}

/// The gradient of the weights to that of the unscaled scores.
#[inline(always)]
fn differentiate<T: Real>(p: &[T], ds: &mut [T], scale: T, delta: T) {
    for (ds, &p) in ds.iter_mut().zip(p.iter()) {
        *ds = p * scale * (*ds - delta);
    }
}

/// Writes contiguous rows to where they belong, or adds them there; a zero is +0.
fn give<T: Real>(from: &[T], to: &mut [&mut [T]], d: usize, add: bool) {
    for (to, from) in to.iter_mut().zip(from.chunks_exact(d)) {
        for (to, &x) in to.iter_mut().zip(from) {
            *to = x + if add { *to } else { T::ZERO };
        }
    }
}
