//! RoPE on slices. Angles are taken in f64 and their sine and cosine rounded once, so that far
//! positions turn as exactly as near ones; all heads of a token share them.

use alloc::vec::Vec;

use super::{Rope, RopeSpec};
use crate::error::need;
use crate::lanes::rows_per_part;
use crate::math::sin_cos_f64;
use crate::{Cpu, Error, Float, Real};

/// Turns rows of `x_thd` by `pos_t`; any block of rows. See [`Rope::rope`].
#[inline(always)]
pub fn rope<E: Float>(spec: &RopeSpec, pos_t: &[i32], x_thd: &mut [E]) {
    let (dim, half) = (spec.head_dim.max(1), spec.rotary / 2);
    let sign = if spec.inverse { -1.0 } else { 1.0 };
    let frequencies: Vec<f64> = (0..half)
        .map(|i| sign * libm::pow(spec.theta, -(i as f64) / half as f64))
        .collect();
    let (mut sines, mut cosines) = (
        alloc::vec![E::Acc::ZERO; half],
        alloc::vec![E::Acc::ZERO; half],
    );
    let token = spec.heads.saturating_mul(dim).max(1);
    for (&pos, x) in pos_t.iter().zip(x_thd.chunks_exact_mut(token)) {
        let turns = sines.iter_mut().zip(&mut cosines);
        for ((sin, cos), frequency) in turns.zip(&frequencies) {
            let (s, c) = sin_cos_f64(f64::from(pos) * frequency);
            (*sin, *cos) = (E::Acc::from_f64(s), E::Acc::from_f64(c));
        }
        for head in x.chunks_exact_mut(dim) {
            let (first, second) = head[..2 * half].split_at_mut(half);
            let turns = sines.iter().zip(&cosines);
            for ((a, b), (&sin, &cos)) in first.iter_mut().zip(second).zip(turns) {
                let (x, y) = (a.to_acc(), b.to_acc());
                *a = E::from_acc(x * cos - y * sin);
                *b = E::from_acc(x * sin + y * cos);
            }
        }
    }
}

impl Rope for Cpu {
    fn rope<E: Float>(&self, spec: &RopeSpec, pos_t: &[i32], x_thd: &mut [E]) -> Result<(), Error> {
        let op = "rope";
        if !spec.rotary.is_multiple_of(2) || spec.rotary > spec.head_dim {
            let why = "rotary must be even and at most head_dim: element i turns with element i + rotary / 2";
            return Err(Error::Spec { op, why });
        }
        let token = spec.heads.saturating_mul(spec.head_dim);
        need(op, "pos", spec.rows, pos_t.len())?;
        need(op, "x", spec.rows.saturating_mul(token), x_thd.len())?;
        let rows = rows_per_part(token);
        let items = pos_t
            .chunks(rows)
            .zip(x_thd.chunks_mut(rows * token.max(1)));
        self.for_each(
            items,
            #[inline(always)]
            |_, (pos, x)| rope(spec, pos, x),
        );
        Ok(())
    }
}
