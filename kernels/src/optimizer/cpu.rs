//! Optimizer steps on slices: one pass, each element on its own, so that any cut of the range
//! gives the same bits. Of slices that differ in length the common part is done.

use super::{AdamWSpec, Optimizer, SgdSpec};
use crate::error::need;
use crate::lanes::GRAIN;
use crate::{Cpu, Error, Float, Real};

/// See [`Optimizer::adamw`].
#[inline(always)]
pub fn adamw<E: Float>(
    spec: &AdamWSpec,
    grad: &[E::Acc],
    master: &mut [E::Acc],
    (m, v): (&mut [E::Acc], &mut [E::Acc]),
    param: Option<&mut [E]>,
) {
    let acc = E::Acc::from_f64;
    // The step's factors are taken in f64 and rounded once.
    let step = spec.step as f64;
    let (b1, b2) = (acc(spec.beta1), acc(spec.beta2));
    let (c1, c2) = (acc(1.0 - spec.beta1), acc(1.0 - spec.beta2));
    let rate = acc(spec.lr / (1.0 - libm::pow(spec.beta1, step)));
    let correct = acc(1.0 / (1.0 - libm::pow(spec.beta2, step)));
    let keep = acc(1.0 - spec.lr * spec.weight_decay);
    let (eps, scale) = (acc(spec.eps), acc(spec.grad_scale));
    let update = move |grad: E::Acc, w: &mut E::Acc, m: &mut E::Acc, v: &mut E::Acc| {
        let g = grad * scale;
        *m = b1 * *m + c1 * g;
        *v = b2 * *v + c2 * (g * g);
        *w = *w * keep - rate * *m / ((*v * correct).sqrt() + eps);
    };
    let moments = m.iter_mut().zip(v);
    let all = grad.iter().zip(master).zip(moments);
    match param {
        Some(param) => all.zip(param).for_each(|(((&g, w), (m, v)), p)| {
            update(g, w, m, v);
            *p = E::from_acc(*w);
        }),
        None => all.for_each(|((&g, w), (m, v))| update(g, w, m, v)),
    }
}

/// See [`Optimizer::sgd`].
#[inline(always)]
pub fn sgd<E: Float>(
    spec: &SgdSpec,
    grad: &[E::Acc],
    master: &mut [E::Acc],
    param: Option<&mut [E]>,
) {
    let acc = E::Acc::from_f64;
    let (lr, scale, decay) = (acc(spec.lr), acc(spec.grad_scale), acc(spec.weight_decay));
    let update = move |grad: E::Acc, w: &mut E::Acc| *w -= lr * (scale * grad + decay * *w);
    let all = grad.iter().zip(master);
    match param {
        Some(param) => all.zip(param).for_each(|((&g, w), p)| {
            update(g, w);
            *p = E::from_acc(*w);
        }),
        None => all.for_each(|(&g, w)| update(g, w)),
    }
}

/// `start + sum of x^2`, in f64 and index order: cut anywhere and carried on, the same bits.
#[must_use]
#[inline(always)]
pub fn squares<T: Float>(start: f64, x: &[T]) -> f64 {
    x.iter().fold(start, |sum, x| sum + x.to_f64() * x.to_f64())
}

impl Optimizer for Cpu {
    fn adamw<E: Float>(
        &self,
        spec: &AdamWSpec,
        grad: &[E::Acc],
        master: &mut [E::Acc],
        (m, v): (&mut [E::Acc], &mut [E::Acc]),
        param: Option<&mut [E]>,
    ) -> Result<(), Error> {
        let op = "adamw";
        if spec.step == 0 {
            let why = "steps count from 1: the moments' bias is undone by 1 - beta^step";
            return Err(Error::Spec { op, why });
        }
        let fits = |what, got| need(op, what, grad.len(), got);
        fits("master", master.len())?;
        fits("first moment", m.len())?;
        fits("second moment", v.len())?;
        let moments = m.chunks_mut(GRAIN).zip(v.chunks_mut(GRAIN));
        let all = grad.chunks(GRAIN).zip(master.chunks_mut(GRAIN));
        let all = all.zip(moments);
        if let Some(param) = param {
            fits("param", param.len())?;
            self.for_each(
                all.zip(param.chunks_mut(GRAIN)),
                #[inline(always)]
                |_, (((g, w), mv), p)| {
                    adamw(spec, g, w, mv, Some(p));
                },
            );
        } else {
            self.for_each(
                all,
                #[inline(always)]
                |_, ((g, w), mv)| adamw::<E>(spec, g, w, mv, None),
            );
        }
        Ok(())
    }

    fn sgd<E: Float>(
        &self,
        spec: &SgdSpec,
        grad: &[E::Acc],
        master: &mut [E::Acc],
        param: Option<&mut [E]>,
    ) -> Result<(), Error> {
        need("sgd", "master", grad.len(), master.len())?;
        let all = grad.chunks(GRAIN).zip(master.chunks_mut(GRAIN));
        if let Some(param) = param {
            need("sgd", "param", grad.len(), param.len())?;
            self.for_each(
                all.zip(param.chunks_mut(GRAIN)),
                #[inline(always)]
                |_, ((g, w), p)| {
                    sgd(spec, g, w, Some(p));
                },
            );
        } else {
            self.for_each(
                all,
                #[inline(always)]
                |_, (g, w)| sgd::<E>(spec, g, w, None),
            );
        }
        Ok(())
    }

    fn add_squares<T: Float>(&self, x: &[T], out: &mut [f64]) -> Result<(), Error> {
        match out.first_mut() {
            Some(out) => *out = squares(*out, x),
            None => need("add_squares", "out", 1, 0)?,
        }
        Ok(())
    }
}
