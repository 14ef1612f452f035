//! Nothing is computed on the host: each op's law leaves its own kernels in the launch log.

use half::bf16;
use quintet_kernels::emulated::Emulated;
use quintet_kernels::{Backend, Dropout, DropoutSpec, GemmSpec, Gpu, Pointwise, Trans};

use crate::attention::{Problem, spec};
use crate::laws::gpu;
use crate::support::{Random, close, download, gemm as multiply, upload};
use crate::{cross_entropy, embedding, moe, norm, optimizer, pieces, pointwise, rope};

type Law = fn(&Gpu<Emulated>);

/// A law, and the kernels that must have run, without the endings that name a wider variant.
const OPS: &[(Law, &[&str])] = &[
    (norm::rms_norm::<_, f32>, &["rms_norm_f32"]),
    (
        norm::rms_norm_backward::<_, f32>,
        &[
            "rms_norm_backward_input_f32",
            "rms_norm_backward_weight_f32",
        ],
    ),
    (norm::layer_norm::<_, f32>, &["layer_norm_f32"]),
    (
        norm::layer_norm_backward::<_, f32>,
        &[
            "layer_norm_backward_input_f32",
            "layer_norm_backward_weight_f32",
        ],
    ),
    (rope::turns::<_, f32>, &["rope_f32"]),
    (
        pointwise::swiglu::<_, f32>,
        &["swiglu_f32", "swiglu_backward_f32"],
    ),
    (
        pointwise::gelu::<_, f32>,
        &["gelu_f32", "gelu_backward_f32"],
    ),
    (dropped, &["dropout_f32"]),
    (pointwise::sums::<_, f32>, &["add_f32", "add_rows_f32"]),
    (pointwise::casts::<_, f32>, &["cast_f32_bf16"]),
    (embedding::looks_up::<_, f32>, &["embedding_f32"]),
    (
        embedding::scatters_in_order::<_, f32>,
        &["embedding_backward_f32"],
    ),
    (
        cross_entropy::loss_and_gradient::<_, f32>,
        &[
            "logit_max_f32",
            "logit_sums_f32",
            "token_loss_f32",
            "logit_backward_f32",
        ],
    ),
    (optimizer::adamw::<_, f32>, &["adamw_f32"]),
    (optimizer::sgd::<_, f32>, &["sgd_f32"]),
    (
        moe::router_ties_and_bias::<_, f32>,
        &["route_f32", "route_sums_f32", "route_backward_f32"],
    ),
    (
        moe::rows_there_and_back::<_, bf16>,
        &[
            "gather_rows_bf16",
            "combine_bf16",
            "combine_rows_bf16",
            "combine_weights_bf16",
        ],
    ),
    (
        moe::groups_are_products::<_, f32>,
        &["grouped_nt_f32", "grouped_nn_f32", "grouped_weight_f32"],
    ),
    (
        moe::groups_are_products::<_, bf16>,
        &["grouped_nt_bf16", "grouped_nn_bf16", "grouped_weight_bf16"],
    ),
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
