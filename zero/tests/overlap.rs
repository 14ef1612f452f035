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
use quintet_zero::{Gathering, GradSync, ParamStore, Partition, ShardedOptimizer, ZeroStage};

const MESSAGE: Duration = Duration::from_millis(5);
const COMPUTE: Duration = Duration::from_millis(5);
const BLOCKS: usize = 8;

/// When, since the step began: backward of bucket k ended, its reduction began, it was handed over.
struct Trace {
    backward: Vec<Duration>,
    handed: Vec<Duration>,
    step: Duration,
}

/// Forward, backward, step. `wait`: for each collective where it is started.
fn step(
    (params, sync, optimizer): &mut Parts,
    last: &mut Option<Gathering<Cpu, Wire, f32>>,
    groups: &impl quintet_zero::Groups<Wire>,
    wait: bool,
) -> Trace {
    let start = Instant::now();
    let buckets = sync.layout().buckets().len();
    for bucket in (0..buckets).rev() {
        if let Some(gathering) = last {
            gathering.end_bucket(params, bucket).unwrap();
        }
        assert!(params.views(buckets - 1 - bucket).is_ok());
        thread::sleep(COMPUTE);
    }
    let (mut backward, mut handed) = (Vec::new(), Vec::new());
    sync.zero().unwrap();
    for bucket in 0..buckets {
        thread::sleep(COMPUTE);
        backward.push(start.elapsed());
        sync.reduce(groups, bucket).unwrap();
        handed.push(start.elapsed());
        if wait {
            sync.wait(groups, bucket).unwrap();
        }
    }
    sync.finish(groups).unwrap();
    *last = None;
    if wait {
        optimizer.step(params, sync, groups, 0.1, 1.0).unwrap();
    } else {
        *last = Some(
            optimizer
                .start_step(params, sync, groups, 0.1, 1.0)
                .unwrap(),
        );
    }
    Trace {
        backward,
        handed,
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
    let traces: Vec<[Vec<Trace>; 2]> = thread::scope(|scope| {
        let ranks = world.seats().into_iter().map(|seat| {
            scope.spawn(move || {
                let comm = Communicator::new(Delay::new(seat.endpoint(), MESSAGE, Duration::ZERO));
                let (device, layout) = (Cpu::new(1), model.layout(seat.rank()));
                let groups = groups(&layout, comm).unwrap();
                let partition = Partition::new(layout.clone(), ZeroStage::One);
                let params = ParamStore::zeros(&device, &partition).unwrap();
                let sync = GradSync::new(&device, &partition, &groups).unwrap();
                let optimizer = ShardedOptimizer::new(&device, &partition, ADAMW, &params).unwrap();
                let mut parts = (params, sync, optimizer);
                let mut run = |wait, last: &mut _| step(&mut parts, last, &groups, wait);
                let mut last = None;
                let overlapped: Vec<_> = (0..6).map(|_| run(false, &mut last)).collect();
                last.take()
                    .map(|g| g.end(&mut parts.0))
                    .transpose()
                    .unwrap();
                let mut run = |wait, last: &mut _| step(&mut parts, last, &groups, wait);
                let blocking: Vec<_> = (0..4).map(|_| run(true, &mut last)).collect();
                // The first step has no all-gather before it.
                [overlapped.into_iter().skip(1).collect(), blocking]
            })
        });
        let ranks: Vec<_> = ranks.collect();
        ranks.into_iter().map(|r| r.join().unwrap()).collect()
    });
    for rank in traces {
        // The best of a few: what else runs on the machine only ever adds. At best a layer takes
        // 5 + 5 ms where it takes 5 + (5 + 5) + 5 ms when each message is waited for.
        let best = |traces: &[Trace]| traces.iter().map(|t| t.step).min().unwrap().as_secs_f64();
        let (overlapped, blocking) = (best(&rank[0]), best(&rank[1]));
        let ratio = overlapped / blocking;
        println!(
            "a step takes {overlapped:.3} s, waiting for each message {blocking:.3} s: {ratio:.2}"
        );
        assert!(ratio <= 0.7, "{ratio}");
        for trace in &rank[0] {
            for k in 0..trace.handed.len() - 1 {
                assert!(trace.handed[k] < trace.backward[k + 1]);
            }
        }
        // Handing buckets over is not waiting for their messages.
        let hand = |t: &Trace| {
            t.handed
                .iter()
                .zip(&t.backward)
                .map(|(h, b)| *h - *b)
                .sum::<Duration>()
        };
        let least = rank[0].iter().map(hand).min().unwrap();
        let buckets = BLOCKS as u32 + 2;
        assert!(
            least < MESSAGE * buckets / 2,
            "{least:?} for {buckets} buckets"
        );
    }
}
