//! The number of threads changes no bit, on calls large enough to be cut.

use half::bf16;
use quintet_kernels::{
    AdamWSpec, Cpu, CrossEntropy, CrossEntropySpec, Embedding, EmbeddingSpec, Float, Norm,
    NormSpec, Optimizer, Pointwise, Rope, RopeSpec,
};

use crate::common::Draw;

const ROWS: usize = 90;
const DIM: usize = 1040;

/// Everything that all ops compute from one set of inputs.
fn perform<E: Float>(device: &Cpu) -> (Vec<Vec<E>>, Vec<Vec<E::Acc>>) {
    let n = ROWS * DIM;
    let mut draw = Draw::new(1);
    let mut stored = |n: usize| -> Vec<E> {
        let x = draw.vec::<E>(n, 2.0);
        x.into_iter().map(E::from_f64).collect()
    };
    let acc = |n: usize| vec![<E::Acc as Float>::from_f64(0.5); n];
    let (x, dy, w, b) = (stored(n), stored(n), stored(DIM), stored(DIM));
    let mut outs: Vec<Vec<E>> = (0..12).map(|_| stored(n)).collect();
    let mut sums: Vec<Vec<E::Acc>> = vec![acc(ROWS), acc(ROWS), acc(ROWS)];
    sums.extend((0..4).map(|_| acc(DIM)));
    sums.extend((0..3).map(|_| acc(n)));
    sums.extend([acc(ROWS), acc(2 * ROWS)]);
    let weight = acc(ROWS);
    let ids: Vec<i32> = (0..ROWS as i32).map(|t| t * 37 % DIM as i32).collect();
    let (tokens, rows, dim) = (ROWS, ROWS, DIM);

    let [h, y, dh, h2, y2, dh2, turned, act, dg, du, look, dlogits] = &mut outs[..] else {
        unreachable!("twelve were made")
    };
    let [
        rstd,
        mean2,
        rstd2,
        dw,
        dw2,
        db2,
        db,
        master,
        m,
        v,
        max,
        stats,
    ] = &mut sums[..]
    else {
        unreachable!("twelve were made")
    };
    let eps = 1e-6;
    let spec = NormSpec { rows, dim, eps };
    let residual = Some((&dy[..], &mut h[..]));
    device.rms_norm(&spec, &x, residual, &w, y, rstd).unwrap();
    device
        .rms_norm_backward_input(&spec, h, &w, rstd, &dy, Some(&x), dh)
        .unwrap();
    device
        .rms_norm_backward_weight::<E>(&spec, h, rstd, &dy, dw)
        .unwrap();
    let residual = Some((&dy[..], &mut h2[..]));
    device
        .layer_norm(&spec, &x, residual, (&w, &b), y2, (mean2, rstd2))
        .unwrap();
    device
        .layer_norm_backward_input(&spec, h2, &w, (mean2, rstd2), &dy, Some(&x), dh2)
        .unwrap();
    device
        .layer_norm_backward_weight::<E>(&spec, h2, (mean2, rstd2), &dy, (dw2, db2))
        .unwrap();
    let spec = RopeSpec {
        rows,
        heads: 13,
        head_dim: DIM / 13,
        rotary: DIM / 13,
        theta: 1e4,
        inverse: false,
    };
    turned.copy_from_slice(&x);
    device.rope(&spec, &ids, turned).unwrap();
    device.swiglu(&x, &dy, act).unwrap();
    device.swiglu_backward(&x, &dy, &x, dg, du).unwrap();
    device.add_rows::<E>(&dy, db).unwrap();
    let spec = EmbeddingSpec {
        tokens,
        first: 0,
        rows,
        dim,
    };
    device.embedding(&spec, &ids, &x, look).unwrap();
    device
        .embedding_backward::<E>(&spec, &ids, &dy, master)
        .unwrap();
    let grad = master.clone();
    let spec = AdamWSpec {
        lr: 1e-3,
        beta1: 0.9,
        beta2: 0.99,
        eps: 1e-8,
        weight_decay: 0.1,
        step: 3,
        grad_scale: 1.0,
    };
    device
        .adamw::<E>(&spec, &grad, master, (m, v), None)
        .unwrap();
    let spec = CrossEntropySpec {
        tokens,
        first: 0,
        entries: DIM,
    };
    device.logit_max(&spec, &x, max).unwrap();
    device.logit_sums(&spec, &x, &ids, max, stats).unwrap();
    device
        .logit_backward(&spec, &x, &ids, max, stats, &weight, dlogits)
        .unwrap();
    (outs, sums)
}

#[test]
fn change_no_bit() {
    assert_eq!(perform::<f64>(&Cpu::new(1)), perform::<f64>(&Cpu::new(3)));
    assert_eq!(perform::<f32>(&Cpu::new(1)), perform::<f32>(&Cpu::new(2)));
    assert_eq!(perform::<bf16>(&Cpu::new(1)), perform::<bf16>(&Cpu::new(5)));
}
