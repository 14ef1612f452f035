//! Laws of the optimizer steps.

use quintet_kernels::optimizer::naive;
use quintet_kernels::{AdamWSpec, Backend, Error, Float, Optimizer, SgdSpec, backend};

use crate::common::*;

fn spec(step: u64) -> AdamWSpec {
    AdamWSpec {
        lr: 1e-2,
        beta1: 0.9,
        beta2: 0.95,
        eps: 1e-8,
        weight_decay: 0.1,
        step,
        grad_scale: 0.7,
    }
}

/// Master weights, moments, and the parameters as they are used.
struct State<B: Backend, E: Float> {
    w: B::Buf<E::Acc>,
    m: B::Buf<E::Acc>,
    v: B::Buf<E::Acc>,
    p: B::Buf<E>,
}

impl<B: Optimizer, E: Float> State<B, E> {
    fn new(device: &B, w: &[f64]) -> Self {
        Self {
            w: up::<B, E::Acc>(device, w),
            m: up::<B, E::Acc>(device, &vec![0.0; w.len()]),
            v: up::<B, E::Acc>(device, &vec![0.0; w.len()]),
            p: unset::<B, E>(device, w.len()),
        }
    }

    /// One step on `range`.
    fn adamw(
        &mut self,
        device: &B,
        spec: &AdamWSpec,
        grad: &[f64],
        range: core::ops::Range<usize>,
        with_param: bool,
    ) {
        let grad = up::<B, E::Acc>(device, grad);
        let cut = |buf| backend::slice_mut::<B, _>(B::whole_mut(buf), range.clone());
        let p = backend::slice_mut::<B, E>(B::whole_mut(&mut self.p), range.clone());
        device
            .adamw::<E>(
                spec,
                B::slice(B::whole(&grad), range.clone()),
                cut(&mut self.w),
                (cut(&mut self.m), cut(&mut self.v)),
                with_param.then_some(p),
            )
            .unwrap();
    }

    fn down(&self, device: &B) -> [Vec<f64>; 3] {
        [&self.w, &self.m, &self.v].map(|buf| down::<B, E::Acc>(device, buf))
    }
}

/// Each step against the loop in f64 from the state before it, so that errors do not add up.
pub fn adamw<B: Optimizer, E: Float>(device: &B) {
    for n in [0, 1, 33, 40_000] {
        let mut draw = Draw::new(n as u64);
        let mut state = State::<B, E>::new(device, &draw.vec::<E::Acc>(n, 1.0));
        for step in 1..=4 {
            let grad = draw.vec::<E::Acc>(n, 3.0);
            let spec = spec(step);
            let [w0, m0, v0] = state.down(device);
            state.adamw(device, &spec, &grad, 0..n, step != 2);
            let (mut w, mut m, mut v) = (w0.clone(), m0.clone(), v0.clone());
            for i in 0..n {
                naive::adamw(&spec, grad[i], &mut w[i], &mut m[i], &mut v[i]);
            }
            let [w1, m1, v1] = state.down(device);
            let a = acc::<E>();
            close("m", &m1, &m, |i| 6.0 * a * (m0[i].abs() + grad[i].abs()));
            close("v", &v1, &v, |i| 8.0 * a * v[i]);
            // The update is lr at its first step, and never much more.
            close("w", &w1, &w, |i| 4.0 * a * w0[i].abs() + 60.0 * a * spec.lr);
            if step != 2 {
                let p: Vec<f64> = w1.iter().map(|&w| E::from_f64(w).to_f64()).collect();
                assert_eq!(
                    down::<B, E>(device, &state.p),
                    p,
                    "the master, rounded once"
                );
            }
        }
    }
    let mut state = State::<B, E>::new(device, &[1.0]);
    let grad = up::<B, E::Acc>(device, &[1.0]);
    let refused = device.adamw::<E>(
        &spec(0),
        B::whole(&grad),
        B::whole_mut(&mut state.w),
        (B::whole_mut(&mut state.m), B::whole_mut(&mut state.v)),
        None,
    );
    assert!(matches!(refused, Err(Error::Spec { .. })));
}

/// Ten steps of one weight, written out by hand, in f64.
pub fn adamw_follows_the_loop<B: Optimizer, E: Float>(device: &B) {
    let (lr, b1, b2, eps, decay, clip): (f64, f64, f64, f64, f64, f64) =
        (1e-2, 0.9, 0.95, 1e-8, 0.1, 0.7);
    let mut state = State::<B, E>::new(device, &[0.5]);
    let (mut w, mut m, mut v) = (0.5f64, 0.0f64, 0.0f64);
    let mut draw = Draw::new(9);
    for t in 1..=10 {
        let grad = draw.unit();
        state.adamw(device, &spec(t), &[grad], 0..1, true);
        let g = clip * grad;
        m = b1 * m + (1.0 - b1) * g;
        v = b2 * v + (1.0 - b2) * g * g;
        let m_hat = m / (1.0 - b1.powi(t as i32));
        let v_hat = v / (1.0 - b2.powi(t as i32));
        w = w - lr * decay * w - lr * m_hat / (v_hat.sqrt() + eps);
        let [got, _, _] = state.down(device);
        assert!((got[0] - w).abs() < 1e-14, "step {t}: {} for {w}", got[0]);
    }
}

/// A shard's step gives the bits of the whole's, wherever it is cut.
pub fn adamw_cut_anywhere<B: Optimizer, E: Float>(device: &B) {
    let n = 1003;
    let mut draw = Draw::new(2);
    let w = draw.vec::<E::Acc>(n, 1.0);
    let mut whole = State::<B, E>::new(device, &w);
    let mut cut = State::<B, E>::new(device, &w);
    for step in 1..=3 {
        let grad = draw.vec::<E::Acc>(n, 1.0);
        whole.adamw(device, &spec(step), &grad, 0..n, true);
        let mut at = 0;
        while at < n {
            let end = n.min(at + draw.below(100));
            cut.adamw(device, &spec(step), &grad, at..end, true);
            at = end;
        }
    }
    assert_eq!(whole.down(device), cut.down(device));
    assert_eq!(down::<B, E>(device, &whole.p), down::<B, E>(device, &cut.p));
}

pub fn sgd<B: Optimizer, E: Float>(device: &B) {
    let spec = SgdSpec {
        lr: 0.5,
        weight_decay: 0.25,
        grad_scale: 2.0,
    };
    for (n, with_param) in [(0, true), (37, false), (37, true), (40_000, true)] {
        let mut draw = Draw::new(n as u64);
        let (w, grad) = (draw.whole(n, 64), draw.whole(n, 64));
        let mut master = up::<B, E::Acc>(device, &w);
        let mut param = unset::<B, E>(device, n);
        let g = up::<B, E::Acc>(device, &grad);
        device
            .sgd::<E>(
                &spec,
                B::whole(&g),
                B::whole_mut(&mut master),
                with_param.then(|| B::whole_mut(&mut param)),
            )
            .unwrap();
        // Whole numbers and powers of two: exact.
        let mut want = w.clone();
        for i in 0..n {
            naive::sgd(&spec, grad[i], &mut want[i]);
        }
        assert_eq!(down::<B, E::Acc>(device, &master), want);
        if with_param {
            let want: Vec<E> = want.iter().map(|&w| E::from_f64(w)).collect();
            assert_eq!(down_raw(device, &param), want);
        }
    }
}

pub fn squares<B: Optimizer, E: Float>(device: &B) {
    let mut draw = Draw::new(4);
    let x = draw.vec::<E>(1003, 2.0);
    let buf = up::<B, E>(device, &x);
    let sum_of = |cuts: &[usize]| {
        let mut out = up::<B, f64>(device, &[0.5]);
        for cut in cuts.windows(2) {
            let part = B::slice(B::whole(&buf), cut[0]..cut[1]);
            device
                .add_squares::<E>(part, B::whole_mut(&mut out))
                .unwrap();
        }
        down::<B, f64>(device, &out)[0]
    };
    let got = sum_of(&[0, 1003]);
    let want = 0.5 + naive::squares(&x);
    assert!((got - want).abs() <= 1e-12 * want, "{got} {want}");
    assert_eq!(
        got,
        sum_of(&[0, 1, 1, 500, 1003]),
        "carried on in index order"
    );
    let mut none = up::<B, f64>(device, &[]);
    let refused = device.add_squares::<E>(B::whole(&buf), B::whole_mut(&mut none));
    assert!(refused.is_err());
}
