//! f32 products of bench-s and of two cubes, beside `matrixmultiply` and the measured FMA peak.
//!
//! A layer of weights `[n, k]` on m tokens makes three products: NT `[m, n] = [m, k] [n, k]^T`
//! forward, NN `[m, k] = [m, n] [n, k]` for the input's gradient, TN `[n, k] += [m, n]^T [m, k]`
//! for the weights'.

use std::time::Duration;

use criterion::{Criterion, Throughput};
use quintet_benches::{Sheet, peak, peer};
use quintet_kernels::{Cpu, Gemm, GemmSpec, Trans};

const TOKENS: usize = 256;
/// (n, k): q and o; k and v; gate and up; down; head.
const LAYERS: [(usize, usize); 5] = [(256, 256), (128, 256), (688, 256), (256, 688), (512, 256)];

fn main() {
    let mut criterion = Criterion::default()
        .sample_size(20)
        .warm_up_time(Duration::from_millis(100))
        .measurement_time(Duration::from_millis(500))
        .configure_from_args();
    let mut rows = Vec::new();
    for threads in [1, 2] {
        let cpu = Cpu::new(threads);
        let before = peak::fma_f32(threads);
        let mut sheet = Sheet::default();
        let mut group = criterion.benchmark_group(format!("gemm f32, {threads} threads"));
        let mut flops = Vec::new();
        for spec in products() {
            let (label, work) = (label(&spec), 2.0 * (spec.m * spec.n * spec.k) as f64);
            group.throughput(Throughput::Elements(work as u64));
            let (a, b) = (wave(spec.m * spec.k), wave(spec.k * spec.n));
            let (mut ours, mut theirs) = (vec![0.0; spec.m * spec.n], vec![0.0; spec.m * spec.n]);
            group.bench_function(&label, |bencher| {
                bencher.iter_custom(|calls| {
                    sheet.batch(
                        &label,
                        calls,
                        || {
                            let (a, c) = (&a[..], &mut ours[..]);
                            let fits = cpu.gemm::<f32, f32>(&spec, a, &b, None, None, c);
                            fits.expect("lengths are the spec's");
                        },
                        || peer::gemm(&cpu, &spec, &a, &b, &mut theirs),
                    )
                });
            });
            flops.push((label, work));
        }
        group.finish();
        let peaks = [before, peak::fma_f32(threads)];
        let peak = peaks.into_iter().flatten().reduce(f64::max);
        rows.push((threads, peak, sheet, flops));
    }
    criterion.final_summary();
    for (threads, peak, sheet, flops) in rows {
        let limit = peak.map_or("unknown".into(), |peak| {
            format!("{:.0} GFLOP/s", peak * 1e-9)
        });
        println!("\ngemm f32, {threads} threads; FMA peak {limit}");
        println!("form      m    n    k   GFLOP/s  of peak  / matrixmultiply");
        for row in sheet.summaries() {
            let of = |(label, _): &&(String, f64)| *label == row.label;
            let work = flops.iter().find(of).map_or(0.0, |(_, work)| *work);
            let rate = work / row.ours;
            let share = peak.map_or(String::new(), |peak| {
                format!("{:.0} %", 100.0 * rate / peak)
            });
            println!(
                "{} {:9.1} {share:>8} {:8.2}x",
                row.label,
                rate * 1e-9,
                row.ratio
            );
        }
    }
}

fn products() -> Vec<GemmSpec> {
    let layers = LAYERS.iter().flat_map(|&(n, k)| {
        [
            GemmSpec::new(TOKENS, n, k, Trans::N, Trans::T),
            GemmSpec::new(TOKENS, k, n, Trans::N, Trans::N),
            GemmSpec::new(n, k, TOKENS, Trans::T, Trans::N).accumulate(),
        ]
    });
    let cubes = [512, 1024].map(|n| GemmSpec::new(n, n, n, Trans::N, Trans::N));
    layers.chain(cubes).collect()
}

fn label(spec: &GemmSpec) -> String {
    format!(
        "{:?}{:?} {:6} {:4} {:4}",
        spec.a, spec.b, spec.m, spec.n, spec.k
    )
}

fn wave(len: usize) -> Vec<f32> {
    (0..len).map(|i| (i as f32 * 0.37).sin()).collect()
}
