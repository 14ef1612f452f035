//! Nothing is computed on the host: products, attention and dropout leave their own kernels in the
//! launch log. The other ops' laws look there themselves.

use half::bf16;
use quintet_kernels::emulated::Emulated;
use quintet_kernels::{Backend, Dropout, DropoutSpec, GemmSpec, Gpu, Pointwise, Trans};

use crate::attention::{Problem, spec};
use crate::laws::gpu;
use crate::pieces;
use crate::support::{Random, close, download, gemm as multiply, upload};

type Law = fn(&Gpu<Emulated>);

/// A law, and the kernels that must have run, without the endings that name a wider variant.
const OPS: &[(Law, &[&str])] = &[
    (dropped, &["dropout_f32"]),
    (product::<f32>, &["gemm_nt_f32_f32"]),
    (product::<bf16>, &["gemm_nt_bf16_bf16_64x64"]),
    (
        heads,
        &[
            "attention_f32_1",
            "attention_delta_f32",
            "attention_backward_kv_f32_1",
            "attention_backward_q_f32_1",
        ],
    ),
    (
        |device| pieces::in_order_of(device, (3, 129)),
        &[
            "attention_step_f32_1",
            "attention_finish_f32",
            "attention_backward_step_kv_f32_1",
            "attention_backward_step_q_f32_1",
            "attention_step_64",
            "attention_finish_bf16",
            "attention_backward_step_kv_64",
            "attention_backward_step_q_64",
        ],
    ),
];

fn product<E: quintet_kernels::Float>(device: &Gpu<Emulated>) {
    let spec = GemmSpec::new(2, 8, 8, Trans::N, Trans::T);
    let one = |n| vec![E::from_f64(1.0); n];
    let c = multiply::<_, E, E>(device, &spec, &one(16), &one(64), &one(16));
    assert_eq!(c, vec![E::from_f64(8.0); 16]);
}

/// Rows from within a sequence on, of two sequences, let go of what the definition does.
fn dropped(device: &Gpu<Emulated>) {
    let dropout = Dropout {
        share: 0.4,
        seed: 1 << 40,
        step: 2,
        site: 3,
        sample: 4,
    };
    let (first, rows, width) = (3, 5, 7);
    let spec = DropoutSpec {
        dropout,
        first,
        rows,
        width,
    };
    let at = [3, 8, 0, 1, 2];
    let x: Vec<f32> = (1..=35).map(|i| i as f32).collect();
    let (places, mut got) = (upload(device, &at), upload(device, &x));
    let view = Gpu::whole_mut(&mut got);
    device
        .dropout::<f32>(&spec, Gpu::whole(&places), view)
        .unwrap();
    let left = |i: usize| {
        let draws = dropout.draws((first + i / width) / rows, 0);
        let stays = draws.keeps(at[i / width] as u32, (i % width) as u32);
        if stays { dropout.scale() } else { 0.0 }
    };
    let want: Vec<f64> = (0..35).map(|i| f64::from(x[i]) * left(i)).collect();
    close("x", &download(device, &got), &want, |i| 1e-6 * want[i]);
    assert!(want.contains(&0.0) && want.iter().any(|x| *x > 0.0));
}

fn heads(device: &Gpu<Emulated>) {
    Problem::<f32>::random(&mut Random(1), spec((1, 3, 5), (2, 1, 8), true)).solve(device);
}

#[test]
fn every_op_runs_its_own_kernels() {
    for (i, (law, kernels)) in OPS.iter().enumerate() {
        let device = gpu(0);
        law(&device);
        let log = device.launcher().take_log();
        for kernel in *kernels {
            let ran = log.iter().any(|name| name.starts_with(kernel));
            assert!(ran, "law {i}: {kernel} is not in {log:?}");
        }
    }
}
