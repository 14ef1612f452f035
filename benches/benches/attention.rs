//! Causal attention in f32, forward and backward, beside attention with all scores in memory on
//! products by `matrixmultiply` (what a framework without a fused kernel does). One thread.

use std::time::Duration;

use criterion::{Criterion, Throughput};
use quintet_benches::{Sheet, peer::Materialised};
use quintet_kernels::{Attention, AttentionSpec, Cpu};

fn main() {
    let mut criterion = Criterion::default()
        .sample_size(20)
        .warm_up_time(Duration::from_millis(200))
        .measurement_time(Duration::from_secs(1))
        .configure_from_args();
    let mut sheet = Sheet::default();
    let mut work = Vec::new();
    let mut group = criterion.benchmark_group("attention f32, causal, 1 thread");
    for (positions, head_dim) in [(256, 32), (256, 64), (1024, 32), (1024, 64)] {
        let mut case = Case::new(positions, head_dim);
        for backward in [false, true] {
            let way = if backward { "backward" } else { "forward" };
            let label = format!("{way:8} {positions:5} {head_dim:3}");
            // Two products forward, five backward (the scores are computed again), half of each.
            let products = if backward { 5.0 } else { 2.0 };
            let flops = products * (case.spec.heads * positions * positions * head_dim) as f64;
            group.throughput(Throughput::Elements(flops as u64));
            group.bench_function(&label, |bencher| {
                bencher.iter_custom(|calls| {
                    let Case { ours, theirs, .. } = &mut case;
                    sheet.batch(
                        &label,
                        calls,
                        || ours.run(backward),
                        || theirs.run(backward),
                    )
                });
            });
            work.push((label, flops));
        }
    }
    group.finish();
    criterion.final_summary();
    println!("\nattention f32, b 1, h 8, g 4, causal, 1 thread");
    println!("way       s   d      ms   GFLOP/s  / materialised");
    for row in sheet.summaries() {
        let of = |(label, _): &&(String, f64)| *label == row.label;
        let flops = work.iter().find(of).map_or(0.0, |(_, work)| *work);
        let (ms, rate) = (row.ours * 1e3, flops / row.ours * 1e-9);
        println!("{} {ms:8.3} {rate:8.1} {:8.2}x", row.label, row.ratio);
    }
}

struct Case {
    spec: AttentionSpec,
    ours: Ours,
    theirs: Theirs,
}

struct Ours {
    spec: AttentionSpec,
    cpu: Cpu,
    pos: Vec<i32>,
    host: Host,
    lse: Vec<f32>,
    delta: Vec<f32>,
}

struct Theirs {
    plain: Materialised,
    host: Host,
}

/// Arguments and results of one way.
struct Host {
    qkv: [Vec<f32>; 3],
    o: Vec<f32>,
    d_o: Vec<f32>,
    dqkv: [Vec<f32>; 3],
}

impl Case {
    fn new(positions: usize, head_dim: usize) -> Self {
        let spec = AttentionSpec {
            batch: 1,
            queries: positions,
            keys: positions,
            heads: 8,
            kv_heads: 4,
            head_dim,
            scale: 1.0 / (head_dim as f64).sqrt(),
            causal: true,
            window: None,
            softcap: None,
            dropout: None,
        };
        let rows = spec.heads * positions;
        let mut ours = Ours {
            spec,
            cpu: Cpu::new(1),
            pos: (0..positions as i32).collect(),
            host: Host::new(&spec),
            lse: vec![0.0; rows],
            delta: vec![0.0; rows],
        };
        let (plain, host) = (Materialised::new(&spec), Host::new(&spec));
        let mut theirs = Theirs { plain, host };
        // Backward needs what forward leaves, also where only backward is asked for.
        ours.run(false);
        theirs.run(false);
        Self { spec, ours, theirs }
    }
}

impl Ours {
    fn run(&mut self, backward: bool) {
        let Host { qkv, o, d_o, dqkv } = &mut self.host;
        let qkv = (&qkv[0][..], &qkv[1][..], &qkv[2][..]);
        let pos = (&self.pos[..], &self.pos[..]);
        let (spec, cpu) = (&self.spec, &self.cpu);
        let done = if backward {
            let [dq, dk, dv] = dqkv;
            cpu.attention_delta::<f32>(spec, d_o, o, &mut self.delta)
                .and_then(|()| {
                    let rows = (&self.lse[..], &self.delta[..]);
                    cpu.attention_backward(spec, qkv, pos.into(), d_o, rows, (dq, dk, dv))
                })
        } else {
            cpu.attention(spec, qkv, pos.into(), o, &mut self.lse)
        };
        done.expect("lengths are the spec's");
    }
}

impl Theirs {
    fn run(&mut self, backward: bool) {
        let Host { qkv, o, d_o, dqkv } = &mut self.host;
        let [q, k, v] = qkv;
        if backward {
            let [dq, dk, dv] = dqkv;
            self.plain.backward((q, k, v), o, d_o, (dq, dk, dv));
        } else {
            self.plain.forward(q, k, v, o);
        }
    }
}

impl Host {
    fn new(spec: &AttentionSpec) -> Self {
        let of = |heads: usize, step: f32| -> Vec<f32> {
            let len = spec.queries * heads * spec.head_dim;
            (0..len).map(|i| (i as f32 * step).sin()).collect()
        };
        let qkv = [
            of(spec.heads, 0.7),
            of(spec.kv_heads, 1.3),
            of(spec.kv_heads, 0.9),
        ];
        Self {
            o: vec![0.0; qkv[0].len()],
            d_o: of(spec.heads, 1.1),
            dqkv: qkv.clone(),
            qkv,
        }
    }
}
