//! Stage 3 gathers one layer ahead: the parameters of a layer are on the wire while the layer
//! before it computes, and a step costs what computing costs.
#![allow(clippy::unwrap_used)]

mod common;

use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use common::{Model, degrees, groups};
use quintet_collectives::transport::delay::Delay;
use quintet_collectives::transport::{Message, Tag, Transport, Wait};
use quintet_collectives::{Communicator, Local, Result, World, forward_transport};
use quintet_kernels::Cpu;
use quintet_zero::{Gathering, ParamStore, Partition, ZeroStage};

const MESSAGE: Duration = Duration::from_millis(6);
const COMPUTE: Duration = Duration::from_millis(8);
const BLOCKS: usize = 8;

type Log = Arc<Mutex<Vec<Instant>>>;

/// A delayed endpoint that notes when messages leave.
struct Stamped {
    inner: Delay<Local>,
    sent: Log,
}

impl Transport for Stamped {
    forward_transport!(inner: group, calls);

    fn try_send(&mut self, to: usize, message: Message) -> Result<Option<Message>> {
        let back = self.inner.try_send(to, message)?;
        if back.is_none() {
            self.sent.lock().unwrap().push(Instant::now());
        }
        Ok(back)
    }
    fn try_recv(&mut self, from: usize, tag: Tag) -> Result<Option<Message>> {
        self.inner.try_recv(from, tag)
    }
    fn park(&mut self, wait: &Wait, timeout: Duration) {
        self.inner.park(wait, timeout);
    }
    fn subgroup(&self, members: &[usize], name: &str) -> Result<Self> {
        Ok(Self {
            inner: self.inner.subgroup(members, name)?,
            sent: self.sent.clone(),
        })
    }
}

type Wire = Communicator<Stamped>;

/// A forward over all buckets: when each one's layers began and ended, and how long it took.
fn forward(
    params: &mut ParamStore<Cpu, f32>,
    groups: &impl quintet_zero::Groups<Wire>,
    ahead: bool,
) -> (Vec<(Instant, Instant)>, Duration) {
    let (start, mut layers) = (Instant::now(), Vec::new());
    let mut gathering = Gathering::<Cpu, Wire, f32>::new();
    let buckets = params.layout().buckets().len();
    for bucket in (0..buckets).rev() {
        if !ahead || bucket + 1 == buckets {
            gathering.ahead(params, groups, bucket).unwrap();
        }
        gathering.end_bucket(params, bucket).unwrap();
        if ahead && bucket > 0 {
            gathering.ahead(params, groups, bucket - 1).unwrap();
        }
        let began = Instant::now();
        assert!(params.views(buckets - 1 - bucket).is_ok());
        thread::sleep(COMPUTE);
        layers.push((began, Instant::now()));
        params.release(bucket).unwrap();
    }
    (layers, start.elapsed())
}

#[test]
fn the_next_layer_is_on_the_wire_while_a_layer_computes() {
    let model = Model {
        bucket_bytes: 0,
        blocks: BLOCKS,
        tie: false,
        ..Model::new(degrees(1, 2, 1, 1, 1))
    };
    let world = World::new(2).unwrap();
    thread::scope(|scope| {
        for seat in world.seats() {
            scope.spawn(move || {
                let sent = Log::default();
                let comm = Communicator::new(Stamped {
                    inner: Delay::new(seat.endpoint(), MESSAGE, Duration::ZERO),
                    sent: sent.clone(),
                });
                let (device, layout) = (Cpu::new(1), model.layout(seat.rank()));
                let groups = groups(&layout, comm).unwrap();
                let partition = Partition::new(layout.clone(), ZeroStage::Three);
                let mut params = ParamStore::<Cpu, f32>::zeros(&device, &partition).unwrap();
                // Parts of a layer, each one message of this rank.
                let parts = |bucket: usize| -> usize {
                    let parts = layout.parts_of(bucket).into_iter();
                    parts.filter(|&p| layout.parts()[p].len > 0).count()
                };
                let buckets = layout.buckets().len();
                for _ in 0..4 {
                    sent.lock().unwrap().clear();
                    let (layers, _) = forward(&mut params, &groups, true);
                    let sent = sent.lock().unwrap().clone();
                    let mut at = parts(buckets - 1);
                    for k in 0..buckets - 1 {
                        let own = parts(buckets - 2 - k);
                        for when in &sent[at..at + own] {
                            let (_, end) = layers[k];
                            assert!(*when < end, "layer {} was sent after layer {k}", k + 1);
                        }
                        at += own;
                    }
                    assert_eq!(at, sent.len());
                }
                // The best of a few: what else runs on the machine only ever adds. At best a layer
                // takes 8 ms where it takes 8 + 6 when each gather is waited for.
                let best = |params: &mut _, ahead| {
                    let times = (0..5).map(|_| forward(params, &groups, ahead).1.as_secs_f64());
                    times.fold(f64::INFINITY, f64::min)
                };
                let (ahead, waiting) = (best(&mut params, true), best(&mut params, false));
                let ratio = ahead / waiting;
                println!("ahead {ahead:.3} s, waiting {waiting:.3} s: {ratio:.2}");
                assert!(ratio <= 0.8, "{ratio}");
            });
        }
    });
}
