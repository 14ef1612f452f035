//! Pointwise ops on slices, computed in Acc and rounded once. Of slices that differ in length the
//! common part is done.
//!
//! GELU's tanh is taken as a sigmoid, `(1 + tanh z) / 2 = 1 / (1 + e^-2z)`: one exponential, and
//! no cancellation where z is far below zero.

use core::any::TypeId;

use super::Pointwise;
use crate::dropout::DropoutSpec;
use crate::error::need;
use crate::lanes::{GRAIN, columns, columns_per_part};
use crate::{Cpu, Error, Float, Real};

/// See [`Pointwise::swiglu`].
#[inline(always)]
pub fn swiglu<E: Float>(g: &[E], u: &[E], y: &mut [E]) {
    for ((y, g), u) in y.iter_mut().zip(g).zip(u) {
        let g = g.to_acc();
        *y = E::from_acc(g * sigmoid(g) * u.to_acc());
    }
}

/// See [`Pointwise::swiglu_backward`].
#[inline(always)]
pub fn swiglu_backward<E: Float>(g: &[E], u: &[E], dy: &[E], dg: &mut [E], du: &mut [E]) {
    let ins = g.iter().zip(u).zip(dy);
    for (((g, u), dy), (dg, du)) in ins.zip(dg.iter_mut().zip(du)) {
        let (g, u, dy) = (g.to_acc(), u.to_acc(), dy.to_acc());
        let s = sigmoid(g);
        let silu = g * s;
        *dg = E::from_acc(dy * u * (s + silu * (E::Acc::ONE - s)));
        *du = E::from_acc(dy * silu);
    }
}

/// See [`Pointwise::gelu`].
#[inline(always)]
pub fn gelu<E: Float>(x: &[E], y: &mut [E]) {
    for (y, x) in y.iter_mut().zip(x) {
        let x = x.to_acc();
        let (z, _) = twice_inner(x);
        *y = E::from_acc(x * sigmoid(z));
    }
}

/// See [`Pointwise::gelu_backward`].
#[inline(always)]
pub fn gelu_backward<E: Float>(x: &[E], dy: &[E], dx: &mut [E]) {
    for ((dx, x), dy) in dx.iter_mut().zip(x).zip(dy) {
        let x = x.to_acc();
        let (z, slope) = twice_inner(x);
        let s = sigmoid(z);
        *dx = E::from_acc(dy.to_acc() * (s + x * s * (E::Acc::ONE - s) * slope));
    }
}

/// See [`Pointwise::add`].
#[inline(always)]
pub fn add<E: Float>(x: &mut [E], y: &[E]) {
    for (x, y) in x.iter_mut().zip(y) {
        *x = E::from_acc(x.to_acc() + y.to_acc());
    }
}

/// Adds columns `first ..` of the rows of `dy`, each `n` wide, to `db`; see
/// [`Pointwise::add_rows`].
#[inline(always)]
pub fn add_rows<E: Float>(n: usize, first: usize, dy: &[E], db: &mut [E::Acc]) {
    for row in dy.chunks_exact(n.max(1)) {
        for (db, dy) in db.iter_mut().zip(columns(row, first, usize::MAX - first)) {
            *db += dy.to_acc();
        }
    }
}

/// See [`Pointwise::cast`].
#[inline(always)]
pub fn cast<I: Float, O: Float>(x: &[I], y: &mut [O]) {
    if TypeId::of::<I::Acc>() == TypeId::of::<O::Acc>() {
        // The way over f64 is exact and folds away; `O::from_f64` would be the slower rounding.
        for (y, x) in y.iter_mut().zip(x) {
            *y = O::from_acc(O::Acc::from_f64(x.to_f64()));
        }
    } else {
        for (y, x) in y.iter_mut().zip(x) {
            *y = O::from_f64(x.to_f64());
        }
    }
}

/// `1 / (1 + e^-x)`.
#[inline(always)]
pub(crate) fn sigmoid<A: Real>(x: A) -> A {
    A::ONE / (A::ONE + (-x).exp())
}

/// `z = 2 sqrt(2/pi) (x + 0.044715 x^3)` and `dz/dx`: tanh(z / 2) is GELU's.
#[inline(always)]
fn twice_inner<A: Real>(x: A) -> (A, A) {
    let linear = A::from_f64(TWICE_ROOT);
    let cubic = A::from_f64(TWICE_ROOT * 0.044715);
    let square = cubic * (x * x);
    (x * (linear + square), linear + A::from_f64(3.0) * square)
}

/// 2 sqrt(2 / pi).
const TWICE_ROOT: f64 = core::f64::consts::FRAC_2_SQRT_PI * core::f64::consts::SQRT_2;

impl Pointwise for Cpu {
    fn swiglu<E: Float>(&self, g: &[E], u: &[E], y: &mut [E]) -> Result<(), Error> {
        need("swiglu", "u", g.len(), u.len())?;
        need("swiglu", "y", g.len(), y.len())?;
        let ins = g.chunks(GRAIN).zip(u.chunks(GRAIN));
        let items = ins.zip(y.chunks_mut(GRAIN));
        self.for_each(
            items,
            #[inline(always)]
            |_, ((g, u), y)| swiglu(g, u, y),
        );
        Ok(())
    }

    fn swiglu_backward<E: Float>(
        &self,
        g: &[E],
        u: &[E],
        dy: &[E],
        dg: &mut [E],
        du: &mut [E],
    ) -> Result<(), Error> {
        let fits = |what, got| need("swiglu_backward", what, g.len(), got);
        fits("u", u.len())?;
        fits("dy", dy.len())?;
        fits("dg", dg.len())?;
        fits("du", du.len())?;
        let ins = g.chunks(GRAIN).zip(u.chunks(GRAIN)).zip(dy.chunks(GRAIN));
        let outs = dg.chunks_mut(GRAIN).zip(du.chunks_mut(GRAIN));
        self.for_each(
            ins.zip(outs),
            #[inline(always)]
            |_, (((g, u), dy), (dg, du))| {
                swiglu_backward(g, u, dy, dg, du);
            },
        );
        Ok(())
    }

    fn gelu<E: Float>(&self, x: &[E], y: &mut [E]) -> Result<(), Error> {
        need("gelu", "y", x.len(), y.len())?;
        let items = x.chunks(GRAIN).zip(y.chunks_mut(GRAIN));
        self.for_each(
            items,
            #[inline(always)]
            |_, (x, y)| gelu(x, y),
        );
        Ok(())
    }

    fn gelu_backward<E: Float>(&self, x: &[E], dy: &[E], dx: &mut [E]) -> Result<(), Error> {
        need("gelu_backward", "dy", x.len(), dy.len())?;
        need("gelu_backward", "dx", x.len(), dx.len())?;
        let ins = x.chunks(GRAIN).zip(dy.chunks(GRAIN));
        let items = ins.zip(dx.chunks_mut(GRAIN));
        self.for_each(
            items,
            #[inline(always)]
            |_, ((x, dy), dx)| gelu_backward(x, dy, dx),
        );
        Ok(())
    }

    fn add<E: Float>(&self, x: &mut [E], y: &[E]) -> Result<(), Error> {
        need("add", "y", x.len(), y.len())?;
        let items = x.chunks_mut(GRAIN).zip(y.chunks(GRAIN));
        self.for_each(
            items,
            #[inline(always)]
            |_, (x, y)| add(x, y),
        );
        Ok(())
    }

    fn add_rows<E: Float>(&self, dy: &[E], db: &mut [E::Acc]) -> Result<(), Error> {
        let n = db.len();
        let rows = dy.len() / n.max(1);
        need("add_rows", "dy", rows * n, dy.len())?;
        let cut = columns_per_part(rows);
        self.for_each(
            db.chunks_mut(cut),
            #[inline(always)]
            |i, db| add_rows(n, i * cut, dy, db),
        );
        Ok(())
    }

    fn dropout<E: Float>(&self, spec: &DropoutSpec, at: &[i32], x: &mut [E]) -> Result<(), Error> {
        need("dropout", "x", at.len() * spec.width, x.len())?;
        spec.apply(at, x);
        Ok(())
    }

    fn cast<I: Float, O: Float>(&self, x: &[I], y: &mut [O]) -> Result<(), Error> {
        need("cast", "y", x.len(), y.len())?;
        let items = x.chunks(GRAIN).zip(y.chunks_mut(GRAIN));
        self.for_each(
            items,
            #[inline(always)]
            |_, (x, y)| cast(x, y),
        );
        Ok(())
    }
}
