//! A training step of bench-s (f32, microbatch 1, 8 sequences a step): 8 ranks (dp 2, tp 2, pp 2)
//! of one thread each, beside one rank of two threads.

use std::time::Duration;

use criterion::{Criterion, SamplingMode, Throughput};
use quintet_benches::{Sheet, train::Setup};

fn main() {
    let mut criterion = Criterion::default()
        .sample_size(10)
        .warm_up_time(Duration::from_millis(500))
        .measurement_time(Duration::from_secs(5))
        .configure_from_args();
    let start = |layout, threads| {
        let started = Setup::bench_s(layout, threads).start(None);
        started.expect("bench-s can be cut so")
    };
    let (mut many, mut one) = (start([2, 2, 2, 1], 1), start([1, 1, 1, 1], 2));
    let (mut sheet, tokens) = (Sheet::default(), one.tokens);
    let mut group = criterion.benchmark_group("step of bench-s");
    group.throughput(Throughput::Elements(tokens));
    group.sampling_mode(SamplingMode::Flat);
    let label = "8 ranks (2,2,2) beside 1 rank";
    group.bench_function(label, |bencher| {
        bencher.iter_custom(|steps| {
            let ours = || many.team.run(steps).expect("8 ranks train");
            sheet.pair(label, steps, ours, || {
                one.team.run(steps).expect("1 rank trains")
            })
        });
    });
    group.finish();
    criterion.final_summary();
    many.end().expect("8 ranks end");
    one.end().expect("1 rank ends");
    println!("\nbench-s f32, {tokens} tokens a step, tokens/s");
    println!("8 ranks (2,2,2) x 1 thread   1 rank x 2 threads   ratio");
    for row in sheet.summaries() {
        let rate = |seconds: f64| tokens as f64 / seconds;
        let (many, one) = (rate(row.ours), rate(row.theirs));
        println!("{many:26.0} {one:20.0} {:6.2}x", row.ratio);
    }
}
