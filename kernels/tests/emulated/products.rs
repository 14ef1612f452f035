//! The product and the device's own laws on the emulated GPU, in sizes that a few seconds hold.

use half::bf16;
use quintet_kernels::emulated::Emulated;
use quintet_kernels::gemm::naive;
use quintet_kernels::gpu::{Activation, FusedSpec};
use quintet_kernels::{Backend, Float, GemmSpec, Gpu, Trans};

use crate::laws::gpu;
use crate::support::{FORMS, Random, close, download, gemm as multiply, upload, wide};
use crate::{backend, gemm, seeds};

/// Rows, columns and depth of a draw: tiles of one element, whole tiles, and a bit more.
fn shape(rng: &mut Random) -> [usize; 3] {
    [140, 140, 90].map(|most| match rng.below(4) {
        0 => 1,
        1 => 16 * (1 + rng.below(most / 16)),
        _ => 1 + rng.below(most),
    })
}

fn spec([m, n, k]: [usize; 3], form: usize, accumulate: bool) -> GemmSpec {
    let (a, b) = FORMS[form % 4];
    GemmSpec {
        accumulate,
        ..GemmSpec::new(m, n, k, a, b)
    }
}

fn exact<I: Float, O: Float<Acc = I::Acc>>(device: &Gpu<Emulated>, seed: u64, r: usize) {
    let mut rng = Random(seed);
    for form in 0..4 {
        let spec = spec(shape(&mut rng), form, rng.below(2) == 1);
        let (a, b) = (
            rng.integers::<I>(spec.m * spec.k, r),
            rng.integers::<I>(spec.k * spec.n, r),
        );
        let c = rng.integers::<O>(spec.m * spec.n, r);
        let mut want = wide(&c);
        naive::gemm(&spec, &wide(&a), &wide(&b), None, None, &mut want);
        assert_eq!(wide(&multiply(device, &spec, &a, &b, &c)), want, "{spec:?}");
    }
}

#[test]
fn whole_numbers_are_exact_in_every_form_and_type() {
    for seed in seeds() {
        let device = gpu(seed);
        exact::<f32, f32>(&device, seed, 9);
        exact::<f64, f64>(&device, seed + 1, 9);
        exact::<bf16, f32>(&device, seed + 2, 9);
        exact::<bf16, bf16>(&device, seed + 3, 1);
        exact::<f32, bf16>(&device, seed + 4, 1);
    }
}

/// Asked for, f32 is rounded to tf32 in every form, and nothing else is lost; unasked it is exact.
#[test]
fn tf32_is_asked_for() {
    for seed in seeds() {
        let (device, mut rng) = (gpu(seed), Random(seed + 40));
        for form in 0..4 {
            for sizes in [shape(&mut rng), [64, 64, 32], [70, 68, 36]] {
                let plain = spec(sizes, form, rng.below(2) == 1);
                let [m, n, k] = sizes;
                let (a, b) = (rng.integers::<f32>(m * k, 9), rng.integers::<f32>(k * n, 9));
                let c = rng.integers::<f32>(m * n, 9);
                let mut want = wide(&c);
                naive::gemm(&plain, &wide(&a), &wide(&b), None, None, &mut want);
                let got = multiply(&device, &plain.tf32(), &a, &b, &c);
                assert_eq!(wide(&got), want, "{plain:?}");
                // 12 bits of fraction, of which tf32 keeps 10.
                let fine = vec![1.0 + 1.0 / 4096.0_f32; m * k];
                let (ones, zeros) = (vec![1.0_f32; k * n], vec![0.0_f32; m * n]);
                let sums = |spec: &GemmSpec| multiply(&device, spec, &fine, &ones, &zeros);
                let k = k as f32;
                assert_eq!(sums(&plain.tf32()), vec![k; m * n]);
                assert_eq!(sums(&plain), vec![k + k / 4096.0; m * n]);
            }
        }
        let log = device.launcher().take_log();
        for form in ["nn", "nt", "tn", "tt"] {
            assert!(
                log.contains(&format!("gemm_tf32_{form}")),
                "{form}: {log:?}"
            );
        }
        let asked = spec([4, 4, 4], 0, false).tf32();
        let of = |line: Result<String, _>| line.unwrap();
        assert_eq!(
            of(device.explain_gemm::<f32, f32>(&asked)),
            "gemm_tf32: gemm_tf32_nn"
        );
        assert_eq!(
            of(device.explain_gemm::<f32, bf16>(&asked)),
            "gemm_simt: gemm_nn_f32_bf16"
        );
        assert_eq!(
            of(device.explain_gemm::<f64, f64>(&asked)),
            "gemm_simt: gemm_nn_f64_f64"
        );
    }
}

/// |error| <= k u sum |a||b|, and one rounding of the result.
fn near<I: Float, O: Float<Acc = I::Acc>>(device: &Gpu<Emulated>, seed: u64) {
    let mut rng = Random(seed);
    for form in 0..4 {
        let spec = spec(shape(&mut rng), form, true);
        let (a, b) = (rng.vec::<I>(spec.m * spec.k), rng.vec::<I>(spec.k * spec.n));
        let c = rng.vec::<O>(spec.m * spec.n);
        let (mut want, mut size) = (wide(&c), wide(&c));
        let abs = |x: &[I]| x.iter().map(|x| x.to_f64().abs()).collect::<Vec<_>>();
        naive::gemm(&spec, &wide(&a), &wide(&b), None, None, &mut want);
        size.iter_mut().for_each(|x| *x = x.abs());
        naive::gemm(&spec, &abs(&a), &abs(&b), None, None, &mut size);
        let got = multiply(device, &spec, &a, &b, &c);
        let u = <I::Acc as Float>::UNIT_ROUNDOFF;
        close("c", &got, &want, |i| {
            (spec.k + 1) as f64 * u * size[i] + O::UNIT_ROUNDOFF * want[i].abs()
        });
    }
}

#[test]
fn sums_are_near_the_twins() {
    for seed in seeds() {
        let device = gpu(seed);
        near::<f32, f32>(&device, seed);
        near::<f64, f64>(&device, seed + 1);
        near::<bf16, f32>(&device, seed + 2);
        near::<bf16, bf16>(&device, seed + 3);
    }
}

/// A row or column alone has the bits it has in the whole, in every form.
#[test]
fn cuts_change_no_bit() {
    for seed in seeds() {
        let (device, mut rng) = (gpu(seed), Random(seed));
        let (m, n, k) = (70, 67, 1 + rng.below(80));
        let (a, b) = (rng.vec::<f32>(m * k), rng.vec::<f32>(n * k));
        let zeros = vec![0.0f32; m * n];
        let nt = |m, n| GemmSpec::new(m, n, k, Trans::N, Trans::T);
        let whole = multiply(&device, &nt(m, n), &a, &b, &zeros);
        let (row, col) = (rng.below(m - 5), rng.below(n - 3));
        let (a_part, b_part) = (&a[row * k..(row + 5) * k], &b[col * k..(col + 3) * k]);
        let part = multiply(&device, &nt(5, 3), a_part, b_part, &zeros[..15]);
        for i in 0..5 {
            let at = (row + i) * n + col;
            assert_eq!(part[3 * i..3 * i + 3], whole[at..at + 3]);
        }
        let turned: Vec<f32> = (0..m * k).map(|i| a[i % m * k + i / m]).collect();
        let tt = GemmSpec::new(m, n, k, Trans::T, Trans::T);
        assert_eq!(multiply(&device, &tt, &turned, &b, &zeros), whole);
    }
}

#[test]
fn nothing_to_sum_and_nothing_to_write() {
    let device = gpu(0);
    for (a, b) in FORMS {
        let none = GemmSpec::new(2, 3, 0, a, b);
        let zero = multiply::<_, f64, f64>(&device, &none, &[], &[], &[9.0; 6]);
        assert_eq!(zero, [0.0; 6]);
        let kept = multiply::<_, bf16, f32>(&device, &none.accumulate(), &[], &[], &[9.0; 6]);
        assert_eq!(kept, [9.0; 6]);
        let empty = GemmSpec::new(0, 5, 3, a, b);
        assert!(multiply::<_, f32, f32>(&device, &empty, &[], &[1.0; 15], &[]).is_empty());
    }
}

#[test]
fn epilogues() {
    gemm::epilogues(&gpu(0));
}

#[test]
fn products_that_do_not_fit_are_refused() {
    gemm::refuses_what_does_not_fit(&gpu(0));
}

#[test]
fn the_device_keeps_its_laws() {
    for seed in seeds() {
        backend::memory_is_counted(&gpu(seed));
        backend::views_cut_and_join(&gpu(seed));
        backend::events_happen(&gpu(seed));
        backend::wrong_lengths_are_refused(&gpu(seed));
    }
}

/// Every op's own kernel runs: nothing is done on the host.
#[test]
fn the_log_names_what_ran() {
    let device = gpu(0);
    let spec = GemmSpec::new(2, 2, 4, Trans::N, Trans::T);
    multiply::<_, f32, f32>(&device, &spec, &[1.0; 8], &[1.0; 8], &[0.0; 4]);
    assert_eq!(device.launcher().take_log(), ["gemm_nt_f32_f32"]);
}

/// A layer with its activation in one pass, against both in f64; values of half a unit's spacing.
fn fused(seed: u64, activation: Activation, [m, n, k]: [usize; 3]) {
    let (device, mut rng) = (gpu(seed), Random(seed));
    let spec = FusedSpec {
        m,
        n,
        k,
        activation,
    };
    let (x, w) = (rng.vec::<bf16>(m * k), rng.vec::<bf16>(n * k));
    let gelu = activation == Activation::Gelu;
    let bias = gelu.then(|| rng.vec::<bf16>(n));
    let mut want = vec![0.0; m * n];
    let product = GemmSpec::new(m, n, k, Trans::N, Trans::T);
    let (x64, w64) = (wide(&x), wide(&w));
    naive::gemm(&product, &x64, &w64, None, None, &mut want);
    for (i, want) in want.iter_mut().enumerate() {
        *want += bias.as_ref().map_or(0.0, |b| b[i % n].to_f64());
    }
    let silu = |x: f64| x / (1.0 + (-x).exp());
    let y = |kept: &[f64]| -> Vec<f64> {
        match gelu {
            true => kept.iter().map(|&x| naive::gelu(x)).collect(),
            false => kept.chunks(2).map(|p| silu(p[0]) * p[1]).collect(),
        }
    };
    let (x_buf, w_buf) = (upload(&device, &x), upload(&device, &w));
    let bias_buf = bias.as_ref().map(|b| upload(&device, b));
    let unset = |len: usize| upload(&device, &vec![bf16::NAN; len]);
    let (mut kept, mut out) = (unset(m * n), unset(if gelu { m * n } else { m * n / 2 }));
    let (x, w) = (Gpu::whole(&x_buf), Gpu::whole(&w_buf));
    let bias = bias_buf.as_ref().map(Gpu::whole);
    let into = (Gpu::whole_mut(&mut kept), Gpu::whole_mut(&mut out));
    device
        .gemm_activation(&spec, x, w, bias, into.0, into.1)
        .unwrap();
    let (kept_host, u) = (download(&device, &kept), bf16::UNIT_ROUNDOFF);
    let sums = 1e-6 * k as f64;
    close("kept", &kept_host, &want, |i| sums + u * want[i].abs());
    let want_y = y(&want);
    let most = want.iter().fold(1.0_f64, |m, x| m.max(x.abs()));
    close("y", &download(&device, &out), &want_y, |i| {
        2.0 * most * sums + u * want_y[i].abs()
    });

    // The layer above: its input is y, m x ny; its gradient comes through w2, k x ny.
    let ny = out_columns(n, gelu);
    let (dy, w2) = (rng.vec::<bf16>(m * k), rng.vec::<bf16>(k * ny));
    let mut sum = vec![0.0; m * ny];
    let product = GemmSpec::new(m, ny, k, Trans::N, Trans::N);
    naive::gemm(&product, &wide(&dy), &wide(&w2), None, None, &mut sum);
    let held = wide(&kept_host);
    let slope = |f: &dyn Fn(f64) -> f64, x: f64| (f(x + 1e-5) - f(x - 1e-5)) / 2e-5;
    let want: Vec<f64> = (0..m * n)
        .map(|i| match gelu {
            true => sum[i] * slope(&naive::gelu, held[i]),
            false if i % 2 == 0 => sum[i / 2] * slope(&silu, held[i]) * held[i + 1],
            false => sum[i / 2] * silu(held[i - 1]),
        })
        .collect();
    let (dy, w2, mut dkept) = (upload(&device, &dy), upload(&device, &w2), unset(m * n));
    let spec = FusedSpec { n: ny, ..spec };
    let (dy, w2) = (Gpu::whole(&dy), Gpu::whole(&w2));
    device
        .gemm_activation_backward(&spec, dy, w2, Gpu::whole(&kept), Gpu::whole_mut(&mut dkept))
        .unwrap();
    let bound = 2.0 * most * (sums + 1e-8 * k as f64);
    close("dkept", &download(&device, &dkept), &want, |i| {
        bound + u * want[i].abs()
    });
}

fn out_columns(n: usize, gelu: bool) -> usize {
    if gelu { n } else { n / 2 }
}

#[test]
fn activations_are_fused() {
    for seed in seeds() {
        for activation in [Activation::Gelu, Activation::Swiglu] {
            fused(seed, activation, [70, 48, 40]);
            fused(seed + 1, activation, [5, 14, 9]);
        }
    }
    fused(7, Activation::Swiglu, [130, 256, 16]);
    fused(8, Activation::Gelu, [130, 128, 16]);
}
