//! Reductions run beside backward: on a wire with latency a step takes much less than one that
//! waits for each bucket, and the trace shows why.
#![allow(clippy::unwrap_used)]

mod common;

use std::thread;
use std::time::{Duration, Instant};

use common::{ADAMW, Model, degrees, groups};
use quintet_collectives::transport::delay::Delay;
use quintet_collectives::{Communicator, World};
use quintet_kernels::Cpu;
use quintet_zero::{GradSync, ParamStore, Partition, ShardedOptimizer, ZeroStage};

const MESSAGE: Duration = Duration::from_millis(5);
const COMPUTE: Duration = Duration::from_millis(5);
const BLOCKS: usize = 8;

/// When, since the step began: backward of bucket k ended, its reduction began, it was handed over.
struct Trace {
    backward: Vec<Duration>,
    handed: Vec<Duration>,
    grads: Duration,
    step: Duration,
}

fn step(
    (params, sync, optimizer): &mut Parts,
    groups: &impl quintet_zero::Groups<Wire>,
    wait: bool,
) -> Trace {
    let start = Instant::now();
    let (mut backward, mut handed) = (Vec::new(), Vec::new());
    sync.zero().unwrap();
    for bucket in 0..sync.layout().buckets().len() {
        thread::sleep(COMPUTE);
        backward.push(start.elapsed());
        sync.reduce(groups, bucket).unwrap();
        handed.push(start.elapsed());
        if wait {
            sync.wait(bucket).unwrap();
        }
    }
    sync.finish(groups).unwrap();
    let grads = start.elapsed();
    optimizer.step(params, sync, groups, 0.1, 1.0).unwrap();
    Trace {
        backward,
        handed,
        grads,
        step: start.elapsed(),
    }
}

type Wire = Communicator<Delay<quintet_collectives::Local>>;
type Parts = (
    ParamStore<Cpu, f32>,
    GradSync<Cpu, Wire, f32>,
    ShardedOptimizer<Cpu, f32>,
);

#[test]
fn reductions_run_beside_backward() {
    let model = Model {
        bucket_bytes: 0,
        blocks: BLOCKS,
        tie: false,
        ..Model::new(degrees(1, 2, 1, 1, 1))
    };
    let world = World::new(2).unwrap();
    let traces: Vec<Vec<[Trace; 2]>> = thread::scope(|scope| {
        let ranks = world.seats().into_iter().map(|seat| {
            scope.spawn(move || {
                let comm = Communicator::new(Delay::new(seat.endpoint(), MESSAGE, Duration::ZERO));
                let (device, layout) = (Cpu::new(1), model.layout(seat.rank()));
                let groups = groups(&layout, comm).unwrap();
                let partition = Partition::new(layout.clone(), ZeroStage::One).unwrap();
                let params = ParamStore::zeros(&device, &layout).unwrap();
                let sync = GradSync::new(&device, &partition, &groups).unwrap();
                let optimizer = ShardedOptimizer::new(&device, &partition, ADAMW, &params).unwrap();
                let mut parts = (params, sync, optimizer);
                let mut both = || [false, true].map(|wait| step(&mut parts, &groups, wait));
                (0..8).map(|_| both()).collect()
            })
        });
        let ranks: Vec<_> = ranks.collect();
        ranks.into_iter().map(|r| r.join().unwrap()).collect()
    });
    for rank in traces {
        // The best of a few: what else runs on the machine only ever adds. The all-gather after the
        // step is not hidden yet: 10 (5 + 5) ms against 10 (5 + 5 + 5) ms is the best there is.
        let best = |of: fn(&Trace) -> Duration, which: usize| {
            rank.iter()
                .map(|t| of(&t[which]))
                .min()
                .unwrap()
                .as_secs_f64()
        };
        for (what, of, most) in [
            (
                "the whole step",
                (|t| t.step) as fn(&Trace) -> Duration,
                0.7,
            ),
            ("until gradients are summed", |t| t.grads, 0.65),
        ] {
            let (overlapped, blocking) = (best(of, 0), best(of, 1));
            let ratio = overlapped / blocking;
            println!(
                "{what}: {overlapped:.3} s, waiting for each bucket {blocking:.3} s: {ratio:.2}"
            );
            assert!(ratio <= most, "{what}: {ratio}");
        }
        for [trace, _] in &rank {
            for k in 0..trace.handed.len() - 1 {
                assert!(trace.handed[k] < trace.backward[k + 1]);
            }
        }
        // Handing a bucket over takes no message's time.
        let hand = |t: &Trace| {
            t.handed
                .iter()
                .zip(&t.backward)
                .map(|(h, b)| *h - *b)
                .sum::<Duration>()
        };
        let least = rank.iter().map(|t| hand(&t[0])).min().unwrap();
        assert!(least < MESSAGE * 2, "{least:?} for {} buckets", BLOCKS + 2);
    }
}
