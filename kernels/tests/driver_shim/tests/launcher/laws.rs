//! The laws of the ops, stamped on `Cuda`: those that few kernels and few seconds hold, for what
//! they are to find is in the launcher; the kernels themselves are held to all of them by the
//! emulator's own tests.

use half::bf16;
use quintet_kernels::cuda::Cuda;
use quintet_kernels::launch::{Launch, Libraries};
use quintet_kernels::{Backend, GemmSpec, Gpu, Trans};

use crate::attention::{Problem, spec};
use crate::support::{FORMS, Random, close, download, gemm as multiply, upload, wide};
use crate::{
    backend, cross_entropy, folds, gpu, linear_loss, moe, norm, optimizer, pieces, pointwise, rope,
};

macro_rules! laws {
    ($($name:ident: $law:expr;)*) => {
        $(#[test] fn $name() { $law(&gpu()); })*
    };
}

laws! {
    views_cut_and_join: backend::views_cut_and_join;
    memory_is_counted: backend::memory_is_counted;
    events_happen: backend::events_happen;
    wrong_lengths_are_refused: backend::wrong_lengths_are_refused;
    rows_are_copied: backend::rows_are_copied;
    rms_norm: norm::rms_norm::<_, f32>;
    rms_norm_backward: norm::rms_norm_backward::<_, bf16>;
    layer_norm_backward: norm::layer_norm_backward::<_, f32>;
    rope_turns: rope::turns::<_, f32>;
    swiglu: pointwise::swiglu::<_, bf16>;
    gelu: pointwise::gelu::<_, f64>;
    sums: pointwise::sums::<_, bf16>;
    casts: pointwise::casts::<_, bf16>;
    dropout: pointwise::dropout_by_place::<_, f32>;
    embedding: crate::embedding::scatters_in_order::<_, bf16>;
    loss: cross_entropy::loss_and_gradient::<_, f32>;
    linear_loss: linear_loss::in_chunks::<_, bf16>;
    folds: folds::in_rank_order::<_, bf16>;
    adamw: optimizer::adamw::<_, bf16>;
    router: moe::router_ties_and_bias::<_, f32>;
    rows: moe::rows_there_and_back::<_, bf16>;
    experts: moe::groups_are_products::<_, bf16>;
    ring: |device| pieces::in_order_of(device, (3, 129));
}

#[test]
fn products_in_every_form() {
    let device = gpu();
    let mut rng = Random(1);
    for (a, b) in FORMS {
        for [m, n, k] in [[70, 136, 40], [9, 5, 7]] {
            let spec = GemmSpec::new(m, n, k, a, b);
            let (x, y) = (
                rng.integers::<bf16>(m * k, 3),
                rng.integers::<bf16>(k * n, 3),
            );
            let got = multiply::<_, bf16, f32>(&device, &spec, &x, &y, &vec![0.0; m * n]);
            let mut want = vec![0.0; m * n];
            quintet_kernels::gemm::naive::gemm(&spec, &wide(&x), &wide(&y), None, None, &mut want);
            assert_eq!(wide(&got), want, "{spec:?}");
        }
    }
}

/// Heads of each width: beyond 48 KiB of shared memory a kernel must have asked for it.
#[test]
fn attention_of_each_width() {
    let device = gpu();
    for d in [64, 128, 256] {
        let problem =
            Problem::<bf16>::random(&mut Random(d as u64), spec((1, 5, 20), (2, 1, d), true));
        let (got, want) = (problem.solve(&device), crate::attention::naive_of(&problem));
        close("o", &got.o, &want.o, |_| 0.03);
        close("dk", &got.dk, &want.dk, |_| 0.1);
    }
}

/// Two ranks on one device, each on its own streams, at the same time.
#[test]
fn ranks_share_a_device() {
    use quintet_kernels::launch::Stream;
    let cuda = crate::cuda();
    let run = |rank: u32| {
        let streams = [Stream(2 * rank), Stream(2 * rank + 1)];
        let device = Gpu::on(cuda.at_home(streams[0]), streams).unwrap();
        let spec = GemmSpec::new(33, 24, 16, Trans::N, Trans::T);
        let mut rng = Random(u64::from(rank));
        for _ in 0..20 {
            let (x, y) = (
                rng.integers::<bf16>(33 * 16, 3),
                rng.integers::<bf16>(24 * 16, 3),
            );
            let got = multiply::<_, bf16, f32>(&device, &spec, &x, &y, &vec![0.0; 33 * 24]);
            let mut want = vec![0.0; 33 * 24];
            quintet_kernels::gemm::naive::gemm(&spec, &wide(&x), &wide(&y), None, None, &mut want);
            assert_eq!(wide(&got), want);
        }
    };
    std::thread::scope(|scope| {
        for rank in 0..4 {
            scope.spawn(move || run(rank));
        }
    });
}

/// The same, and what one has the others sum, by copies and folds on the device.
#[test]
fn ranks_of_a_device_speak_on_it() {
    use quintet_kernels::launch::Stream;
    let cuda = crate::cuda();
    crate::one_device::on_one_device(&cuda, |rank| {
        let streams = [Stream(100 + 2 * rank as u32), Stream(101 + 2 * rank as u32)];
        (cuda.at_home(streams[0]), streams)
    });
}

/// What libraries of the device, such as NCCL, are given.
#[test]
fn libraries_get_streams_of_their_own() {
    let cuda = crate::cuda();
    let (a, b) = (cuda.fresh_stream(), cuda.fresh_stream());
    let handles = [a, b].map(|s| cuda.stream_handle(s));
    assert!(a != b && handles[0] != handles[1] && !handles.contains(&0));
    cuda.enter().unwrap();
    let x = cuda.alloc("x", 64).unwrap();
    cuda.fill(a, x, 7, 64).unwrap();
    assert!(cuda.idle(a).unwrap());
    let mut host = [0; 64];
    cuda.download(a, x, &mut host).unwrap();
    assert_eq!(host, [7; 64]);
}

#[test]
fn a_kernel_is_compiled_once_and_explained() {
    let device = gpu();
    let spec = GemmSpec::new(4, 8, 8, Trans::T, Trans::T);
    let one = vec![1.0_f64; 64];
    let run = || multiply::<_, f64, f64>(&device, &spec, &one[..32], &one, &one[..32]);
    assert_eq!(run(), vec![8.0; 32]);
    let line = device.explain_gemm::<f64, f64>(&spec).unwrap();
    assert_eq!(line, "gemm_simt: gemm_tt_f64_f64");
    let of_it = |lines: Vec<String>| {
        lines
            .into_iter()
            .filter(|l| l.contains("gemm_tt_f64_f64"))
            .count()
    };
    assert_eq!(of_it(device.launcher().loaded()), 1);
    run();
    assert_eq!(of_it(device.launcher().loaded()), 1);
    let x = upload(&device, &one);
    assert_eq!(download(&device, &x), one);
    assert!(Launch::arch(device.launcher()).0 >= 80);
    let _: &Cuda = device.launcher();
    let _ = Gpu::<Cuda>::whole(&x);
}
