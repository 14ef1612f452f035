//! all_reduce between ranks that are threads, in nccl-tests' columns, beside a copy of the same
//! bytes by one thread.

use std::hint::black_box;
use std::time::{Duration, Instant};

use criterion::{BenchmarkId, Criterion, Throughput};
use quintet_benches::bus::{Op, factor};
use quintet_benches::{Sheet, Team};
use quintet_collectives::ReduceOp;

fn main() {
    let mut criterion = Criterion::default()
        .sample_size(10)
        .warm_up_time(Duration::from_millis(100))
        .measurement_time(Duration::from_millis(400))
        .configure_from_args();
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let mut tables = Vec::new();
    for ranks in [2, 4, 8] {
        let mut sheet = Sheet::default();
        let mut group = criterion.benchmark_group(format!("all_reduce f32, {ranks} ranks"));
        for bytes in (3..=24).step_by(3).map(|power| 1_usize << power) {
            let label = format!("{bytes:9}");
            group.throughput(Throughput::Bytes(bytes as u64));
            let mut team = team(ranks, bytes / 4);
            let (from, mut to) = (vec![1.0_f32; bytes / 4], vec![0.0_f32; bytes / 4]);
            let mut copy = |calls| {
                let start = Instant::now();
                for _ in 0..calls {
                    to.copy_from_slice(black_box(&from));
                    black_box(&mut to);
                }
                start.elapsed()
            };
            group.bench_function(BenchmarkId::from_parameter(bytes), |bencher| {
                bencher.iter_custom(|calls| {
                    let ours = || team.run(calls).expect("all ranks reduce");
                    sheet.pair(&label, calls, ours, || copy(calls))
                });
            });
            team.dismiss().expect("all ranks end");
        }
        group.finish();
        tables.push((ranks, sheet));
    }
    criterion.final_summary();
    for (ranks, sheet) in tables {
        let many = if ranks > cores {
            ", more than cores"
        } else {
            ""
        };
        println!("\nall_reduce f32, {ranks} ranks on {cores} cores{many}");
        println!("   size(B)   time(us)  algbw(GB/s)  busbw(GB/s)  busbw / memcpy");
        for row in sheet.summaries() {
            let bytes: f64 = row.label.trim().parse().unwrap_or(f64::NAN);
            let (algbw, scale) = (bytes / row.ours * 1e-9, factor(Op::AllReduce, ranks));
            let busbw = algbw * scale;
            let (us, of) = (row.ours * 1e6, row.ratio * scale);
            println!(
                "{} {us:11.2} {algbw:12.3} {busbw:12.3} {of:14.3}x",
                row.label
            );
        }
    }
}

/// Ranks that reduce buffers of zeros, over and over.
fn team(ranks: usize, len: usize) -> Team {
    Team::start(ranks, move |comm, orders| {
        let mut buffer = vec![0.0_f32; len];
        orders.serve(|| Ok(comm.all_reduce(&mut buffer, ReduceOp::Sum)?))
    })
    .expect("there are ranks")
}
