//! The matrix product.

use half::bf16;
use quintet_kernels::gemm::naive;
use quintet_kernels::{Epilogue, Error, Float, Gemm, GemmSpec, Trans};

use crate::support::{FORMS, Random, close, download, gemm, upload, wide};

/// Sums of small whole numbers are exact in any order: any wrong index shows.
pub fn exact_on_integers<B: Gemm>(dev: &B) {
    fn law<B: Gemm, I: Float, O: Float<Acc = I::Acc>>(dev: &B, r: usize, deepest: usize) {
        let mut rng = Random(1);
        for round in 0..120 {
            let [m, n] = [0; 2].map(|_| 1 + rng.below(70));
            let k = 1 + rng.below(deepest);
            let (a_form, b_form) = FORMS[round % 4];
            let mut spec = GemmSpec::new(m, n, k, a_form, b_form);
            spec.accumulate = rng.below(2) == 1;
            let (a, b) = (rng.integers::<I>(m * k, r), rng.integers::<I>(k * n, r));
            let c = rng.integers::<O>(m * n, r);
            let mut want = wide(&c);
            naive::gemm(&spec, &wide(&a), &wide(&b), None, None, &mut want);
            assert_eq!(wide(&gemm(dev, &spec, &a, &b, &c)), want, "{spec:?}");
        }
    }
    law::<B, f64, f64>(dev, 9, 600);
    law::<B, f32, f32>(dev, 9, 600);
    law::<B, bf16, f32>(dev, 9, 600);
    law::<B, bf16, bf16>(dev, 1, 200);
    law::<B, f32, bf16>(dev, 1, 200);
}

/// |error| <= (terms of the longest chain) u sum |a||b|, plus one rounding of the result.
pub fn near_naive<B: Gemm>(dev: &B) {
    fn law<B: Gemm, I: Float, O: Float<Acc = I::Acc>>(dev: &B) {
        let mut rng = Random(2);
        for round in 0..24 {
            let [m, n, k] = [40, 60, 700].map(|most| 1 + rng.below(most));
            let (a_form, b_form) = FORMS[round % 4];
            let spec = GemmSpec::new(m, n, k, a_form, b_form).accumulate();
            let (a, b) = (rng.vec::<I>(m * k), rng.vec::<I>(k * n));
            let c = rng.vec::<O>(m * n);
            let (mut want, mut size) = (wide(&c), wide(&c));
            let abs = |x: &[I]| x.iter().map(|x| x.to_f64().abs()).collect::<Vec<_>>();
            naive::gemm(&spec, &wide(&a), &wide(&b), None, None, &mut want);
            size.iter_mut().for_each(|x| *x = x.abs());
            naive::gemm(&spec, &abs(&a), &abs(&b), None, None, &mut size);
            let got = gemm(dev, &spec, &a, &b, &c);
            let (acc, out) = (<I::Acc as Float>::UNIT_ROUNDOFF, O::UNIT_ROUNDOFF);
            close("c", &got, &want, |i| {
                (k + 1) as f64 * acc * size[i] + out * want[i].abs()
            });
        }
    }
    law::<B, f64, f64>(dev);
    law::<B, f32, f32>(dev);
    law::<B, bf16, f32>(dev);
    law::<B, bf16, bf16>(dev);
}

/// Columns and rows of a product, computed alone, have the bits they have in the whole: at every
/// offset, in every form, with k over several blocks.
pub fn split_changes_no_bit<B: Gemm>(dev: &B) {
    fn law<B: Gemm, E: Float>(dev: &B, k: usize) {
        let mut rng = Random(k as u64);
        let (m, n) = (37, 75);
        let (a, b) = (rng.vec::<E>(m * k), rng.vec::<E>(k * n));
        let turn = |x: &[E], rows: usize, cols: usize| -> Vec<E> {
            let at = |i: usize| x[i % rows * cols + i / rows];
            (0..x.len()).map(at).collect()
        };
        let bt = turn(&b, k, n);
        let spec = GemmSpec::new(m, n, k, Trans::N, Trans::N);
        let whole = gemm::<B, E, E>(dev, &spec, &a, &b, &vec![E::from_f64(0.0); m * n]);
        for offset in 0..17 {
            let (rows, cols) = (
                offset..m.min(offset + 1 + 3 * offset),
                offset * 2..n - offset,
            );
            let a_part = &a[rows.start * k..rows.end * k];
            let b_part = &bt[cols.start * k..cols.end * k];
            let (m, n_part) = (rows.len(), cols.len());
            let (at_part, b_n) = (turn(a_part, m, k), turn(b_part, n_part, k));
            for (a_form, b_form) in FORMS {
                let spec = GemmSpec::new(m, n_part, k, a_form, b_form);
                let a = if a_form == Trans::N { a_part } else { &at_part };
                let b = if b_form == Trans::N { &b_n } else { b_part };
                let got = gemm::<B, E, E>(dev, &spec, a, b, &vec![E::from_f64(0.0); m * n_part]);
                for (i, row) in rows.clone().enumerate() {
                    let want = &whole[row * n..][cols.clone()];
                    assert_eq!(&got[i * n_part..][..n_part], want, "row {row} {spec:?}");
                }
            }
        }
    }
    for k in [1, 7, 255, 256, 257, 530, 1100] {
        law::<B, f32>(dev, k);
    }
    law::<B, f64>(dev, 300);
    law::<B, bf16>(dev, 300);
}

/// No rows, no columns, nothing to sum; and a B that is packed in several blocks.
pub fn empty_and_deep<B: Gemm>(dev: &B) {
    for (a, b) in FORMS {
        assert!(
            gemm::<B, f32, f32>(dev, &GemmSpec::new(0, 5, 3, a, b), &[], &[1.0; 15], &[])
                .is_empty()
        );
        assert!(
            gemm::<B, f32, f32>(dev, &GemmSpec::new(5, 0, 3, a, b), &[1.0; 15], &[], &[])
                .is_empty()
        );
        let none = GemmSpec::new(2, 3, 0, a, b);
        assert_eq!(
            gemm::<B, f64, f64>(dev, &none, &[], &[], &[9.0; 6]),
            [0.0; 6]
        );
        let kept = gemm::<B, bf16, f32>(dev, &none.accumulate(), &[], &[], &[9.0; 6]);
        assert_eq!(kept, [9.0; 6]);
    }
    let (m, n, k) = (3, 700, 2100);
    let mut rng = Random(3);
    let (a, b) = (rng.integers::<f32>(m * k, 3), rng.integers::<f32>(k * n, 3));
    for b_form in [Trans::N, Trans::T] {
        let spec = GemmSpec::new(m, n, k, Trans::N, b_form);
        let mut want = vec![0.0; m * n];
        naive::gemm(&spec, &wide(&a), &wide(&b), None, None, &mut want);
        assert_eq!(wide(&gemm(dev, &spec, &a, &b, &vec![7.0_f32; m * n])), want);
    }
}

pub fn epilogues<B: Gemm>(dev: &B) {
    fn law<B: Gemm, I: Float, O: Float<Acc = I::Acc>>(dev: &B, epilogue: Epilogue) {
        let (m, n, k) = (19, 37, 11);
        let mut rng = Random(4);
        let (a, b, bias) = (rng.vec::<I>(m * k), rng.vec::<I>(k * n), rng.vec::<I>(n));
        let (residual, c) = (rng.vec::<O>(m * n), rng.vec::<O>(m * n));
        let named = |these: &[Epilogue]| these.contains(&epilogue);
        let has_bias = named(&[Epilogue::Bias, Epilogue::BiasGelu, Epilogue::BiasResidual]);
        let has_residual = named(&[Epilogue::Residual, Epilogue::BiasResidual]);
        for accumulate in [false, true] {
            let mut spec = GemmSpec::new(m, n, k, Trans::N, Trans::T).epilogue(epilogue);
            spec.accumulate = accumulate;
            let (w_bias, w_residual) = (wide(&bias), wide(&residual));
            let mut want = wide(&c);
            naive::gemm(
                &spec,
                &wide(&a),
                &wide(&b),
                has_bias.then_some(&w_bias),
                has_residual.then_some(&w_residual),
                &mut want,
            );
            let (a, b, mut got) = (upload(dev, &a), upload(dev, &b), upload(dev, &c));
            let (bias, residual) = (upload(dev, &bias), upload(dev, &residual));
            dev.gemm(
                &spec,
                B::whole(&a),
                B::whole(&b),
                has_bias.then(|| B::whole(&bias)),
                has_residual.then(|| B::whole(&residual)),
                B::whole_mut(&mut got),
            )
            .unwrap();
            // Sums of a dozen terms below 1, and a GELU whose slope is below 1.2.
            let acc = 40.0 * <I::Acc as Float>::UNIT_ROUNDOFF * (k + 3) as f64;
            close("c", &download(dev, &got), &want, |i| {
                acc + O::UNIT_ROUNDOFF * want[i].abs()
            });
        }
    }
    for epilogue in [
        Epilogue::None,
        Epilogue::Bias,
        Epilogue::BiasGelu,
        Epilogue::Residual,
        Epilogue::BiasResidual,
    ] {
        law::<B, f64, f64>(dev, epilogue);
        law::<B, f32, f32>(dev, epilogue);
        law::<B, bf16, bf16>(dev, epilogue);
        law::<B, bf16, f32>(dev, epilogue);
    }
}

/// The three products of a linear layer are adjoint: <y', x w^T> = <y' w, x> = <y'^T x, w>.
pub fn adjoint<B: Gemm>(dev: &B) {
    let (t, f, d) = (33, 45, 70);
    let mut rng = Random(5);
    let (x, w, dy) = (rng.vec(t * d), rng.vec(f * d), rng.vec::<f64>(t * f));
    let call = |m, n, k, a_form, b_form, a: &[f64], b: &[f64]| {
        let spec = GemmSpec::new(m, n, k, a_form, b_form);
        gemm(dev, &spec, a, b, &vec![0.0; m * n])
    };
    let dot = |x: &[f64], y: &[f64]| x.iter().zip(y).map(|(x, y)| x * y).sum::<f64>();
    let y = dot(&dy, &call(t, f, d, Trans::N, Trans::T, &x, &w));
    let dx = dot(&x, &call(t, d, f, Trans::N, Trans::N, &dy, &w));
    let dw = dot(&w, &call(f, d, t, Trans::T, Trans::N, &dy, &x));
    assert!(
        (y - dx).abs() < 1e-11 && (y - dw).abs() < 1e-11,
        "{y} {dx} {dw}"
    );
}

pub fn refuses_what_does_not_fit<B: Gemm>(dev: &B) {
    let x = upload(dev, &[1.0_f32; 6]);
    let mut c = upload(dev, &[5.0_f32; 4]);
    let six = B::whole(&x);
    let call = |spec: &GemmSpec, bias, residual, c: &mut B::Buf<f32>| {
        dev.gemm(spec, six, six, bias, residual, B::whole_mut(c))
    };
    let good = GemmSpec::new(2, 2, 3, Trans::N, Trans::N);
    let pair = Some(B::slice(six, 0..2));
    for (spec, bias, residual) in [
        (GemmSpec { k: 2, ..good }, None, None),
        (GemmSpec { m: 3, k: 2, ..good }, None, None),
        (good, pair, None),
        (good, None, Some(B::slice(six, 0..4))),
        (good.epilogue(Epilogue::Bias), None, None),
        (good.epilogue(Epilogue::BiasGelu), Some(six), None),
        (good.epilogue(Epilogue::Residual), None, pair),
        (good.epilogue(Epilogue::BiasResidual), pair, None),
    ] {
        let refused = call(&spec, bias, residual, &mut c);
        assert!(matches!(refused, Err(Error::Len { .. })), "{spec:?}");
    }
    let endless = GemmSpec::new(usize::MAX, 2, 2, Trans::N, Trans::N);
    assert!(matches!(
        call(&endless, None, None, &mut c),
        Err(Error::Spec { .. })
    ));
    assert_eq!(download(dev, &c), [5.0; 4], "a refused call writes nothing");
}
