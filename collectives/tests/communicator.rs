//! The communicator's own promises: order and bits, in place, started operations, groups, counters.

use std::sync::Mutex;
use std::thread;
use std::time::{Duration, Instant};

use half::bf16;
use quintet_collectives::pending::once;
use quintet_collectives::transport::delay::Delay;
use quintet_collectives::transport::local::{Local, World};
use quintet_collectives::{
    Algorithm, CollectiveShape as S, Communicator, DType, Done, Element, Error, Order, Plan,
    ProcessGroup, ReduceOp, Result, chunk, plan,
};

/// Values of very different sizes, so that another order gives other bits.
fn rough(rank: usize, i: usize) -> f32 {
    let x = (rank * 2_654_435_761 + i * 40_503) % 10_007;
    (x as f32 - 5000.0) * [1e-6, 1.0, 1e6][(rank + i) % 3]
}

fn left_fold(world: usize, i: usize) -> f32 {
    (1..world).fold(rough(0, i), |sum, r| sum + rough(r, i))
}

#[test]
fn rank_order_is_a_left_fold_to_the_bit() {
    for world in [1, 2, 3, 7, 8] {
        for len in [1, 5, 1000, 20_000] {
            World::run(world, |comm| {
                let r = comm.rank();
                let input: Vec<f32> = (0..len).map(|i| rough(r, i)).collect();
                let expected: Vec<u32> = (0..len).map(|i| left_fold(world, i).to_bits()).collect();
                let bits = |x: &[f32]| x.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
                let mut x = input.clone();
                comm.all_reduce(&mut x, ReduceOp::Sum)?;
                assert_eq!(bits(&x), expected);
                let mut y = vec![0f32; len];
                comm.all_reduce_into(&input, &mut y, ReduceOp::Sum)?;
                assert_eq!(bits(&y), expected);
                let counts: Vec<usize> = chunk::chunk_lens(len, world).collect();
                let own = chunk::chunk(len, world, r);
                let mut whole = input.clone();
                comm.reduce_scatter_in_place(&mut whole, &counts, ReduceOp::Sum)?;
                assert_eq!(bits(&whole[own.clone()]), expected[own.clone()]);
                let mut part = vec![0f32; own.len()];
                comm.reduce_scatter_v(&input, &mut part, &counts, ReduceOp::Sum)?;
                assert_eq!(bits(&part), expected[own]);
                comm.all_gather_in_place(&mut whole, &counts)?;
                assert_eq!(bits(&whole), expected);
                let mut at_root = input.clone();
                comm.reduce(&mut at_root, ReduceOp::Sum, world - 1)?;
                assert_eq!(
                    bits(&at_root),
                    if r == world - 1 {
                        expected
                    } else {
                        bits(&input)
                    }
                );
                Ok(())
            })
            .unwrap();
        }
    }
}

#[test]
fn any_order_gives_all_ranks_the_same_bits_every_time() {
    let run = || {
        World::run(6, |comm| {
            let comm = comm.with_order(Order::Any);
            let mut x: Vec<f32> = (0..20_000).map(|i| rough(comm.rank(), i)).collect();
            comm.all_reduce(&mut x, ReduceOp::Sum)?;
            Ok(x.iter().map(|x| x.to_bits()).collect::<Vec<_>>())
        })
        .unwrap()
    };
    let first = run();
    assert!(first.iter().all(|x| *x == first[0]));
    assert_eq!(run(), first);
}

/// The error of a 16-bit sum is one rounding of the f32 sum, whatever the plan and world.
#[test]
fn sixteen_bit_sums_round_once() {
    for world in [2usize, 8, 17] {
        for order in [Order::Rank, Order::Any] {
            for len in [3usize, 40_000] {
                World::run(world, |comm| {
                    let comm = comm.with_order(order);
                    let value = |r: usize| bf16::from_f32(1.0 + r as f32 / 128.0);
                    let mut x = vec![value(comm.rank()); len];
                    comm.all_reduce(&mut x, ReduceOp::Sum)?;
                    // These sums are exact in f32 in any order.
                    let exact = bf16::from_f32((0..world).map(|r| value(r).to_f32()).sum());
                    assert!(x.iter().all(|x| *x == exact));
                    let mut x = vec![value(comm.rank()); len];
                    comm.all_reduce(&mut x, ReduceOp::Avg)?;
                    let sum: f32 = (0..world).map(|r| value(r).to_f32()).sum();
                    assert!(x.iter().all(|x| *x == bf16::from_f32(sum / world as f32)));
                    Ok(())
                })
                .unwrap();
            }
        }
    }
}

#[test]
fn a_nan_anywhere_is_everywhere() {
    for order in [Order::Rank, Order::Any] {
        for len in [3usize, 30_000] {
            for bad in 0..4 {
                World::run(4, |comm| {
                    let comm = comm.with_order(order);
                    for op in [ReduceOp::Min, ReduceOp::Max] {
                        let mut x = vec![comm.rank() as f32; len];
                        if comm.rank() == bad {
                            x[len / 2] = f32::NAN;
                        }
                        comm.all_reduce(&mut x, op)?;
                        assert!(x[len / 2].is_nan());
                        assert_eq!(x.iter().filter(|x| x.is_nan()).count(), 1);
                    }
                    Ok(())
                })
                .unwrap();
            }
        }
    }
}

/// Performs one operation on every rank and compares counters with the prediction.
fn counted<E: Element>(
    world: usize,
    order: Order,
    shapes: &[S],
    call: impl Fn(&Communicator<Local>) -> Result<()> + Sync,
) {
    World::run(world, |comm| {
        let comm = comm.with_order(order);
        let r = comm.rank();
        call(&comm)?;
        let predicted = plan::bytes_sent(&shapes[r], r, world, E::DTYPE, order)?;
        assert_eq!(
            comm.stats().bytes,
            predicted,
            "{:?} rank {r} of {world}",
            shapes[r]
        );
        Ok(())
    })
    .unwrap();
}

#[test]
fn counters_equal_the_prediction() {
    for order in [Order::Rank, Order::Any] {
        for world in [1usize, 2, 5, 8] {
            for len in [0usize, 3, 10_000] {
                let counts: Vec<usize> = (0..world).map(|r| len * (r % 3)).collect();
                let (c, total) = (&counts, counts.iter().sum::<usize>());
                let root = world - 1;
                let same = |shape: S| vec![shape; world];
                let sum = ReduceOp::Sum;
                counted::<f32>(world, order, &same(S::AllReduce { len }), |comm| {
                    comm.all_reduce(&mut vec![0f32; len], sum)
                });
                counted::<bf16>(world, order, &same(S::AllReduce { len }), |comm| {
                    comm.all_reduce(&mut vec![bf16::ONE; len], sum)
                });
                counted::<bf16>(
                    world,
                    order,
                    &same(S::ReduceScatter {
                        counts: counts.clone(),
                    }),
                    |comm| comm.reduce_scatter_in_place(&mut vec![bf16::ONE; total], c, sum),
                );
                counted::<f64>(
                    world,
                    order,
                    &same(S::AllGather {
                        counts: counts.clone(),
                    }),
                    |comm| comm.all_gather_in_place(&mut vec![0f64; total], c),
                );
                counted::<u8>(world, order, &same(S::Broadcast { len, root }), |comm| {
                    comm.broadcast(&mut vec![0u8; len], root)
                });
                counted::<f32>(world, order, &same(S::Reduce { len, root }), |comm| {
                    comm.reduce(&mut vec![0f32; len], sum, root)
                });
                counted::<i64>(
                    world,
                    order,
                    &same(S::Gather {
                        counts: counts.clone(),
                        root,
                    }),
                    |comm| {
                        comm.gather_v(&vec![0i64; c[comm.rank()]], &mut vec![0i64; total], c, root)
                    },
                );
                counted::<i32>(
                    world,
                    order,
                    &same(S::Scatter {
                        counts: counts.clone(),
                        root,
                    }),
                    |comm| {
                        comm.scatter_v(&vec![0i32; total], &mut vec![0i32; c[comm.rank()]], c, root)
                    },
                );
                counted::<f32>(world, order, &same(S::AllToAll { len }), |comm| {
                    comm.all_to_all(&vec![0f32; len * world], &mut vec![0f32; len * world])
                });
                let v: Vec<S> = (0..world)
                    .map(|r| S::AllToAllV {
                        send: counts.clone(),
                        recv: vec![c[r]; world],
                    })
                    .collect();
                counted::<f32>(world, order, &v, |comm| {
                    let recv = vec![c[comm.rank()]; world];
                    comm.all_to_all_v(
                        &vec![0f32; total],
                        c,
                        &mut vec![0f32; recv.iter().sum()],
                        &recv,
                    )
                });
                counted::<u8>(world, order, &same(S::Barrier), |comm| comm.barrier());
            }
        }
    }
}

#[test]
fn two_groups_over_the_same_ranks_do_not_mix() {
    World::run(4, |comm| {
        let other = comm.subgroup(
            &ProcessGroup::new(vec![3, 1, 2, 0], comm.rank())?,
            "reversed",
        )?;
        assert_eq!(other.rank(), [3, 1, 2, 0][comm.rank()]);
        thread::scope(|scope| {
            let other = &other;
            let work = |comm: &Communicator<Local>, weight: i64| -> Result<()> {
                for i in 0..1000i64 {
                    let mut x = [weight * i; 3];
                    comm.all_reduce(&mut x, ReduceOp::Sum)?;
                    assert_eq!(x, [4 * weight * i; 3]);
                }
                Ok(())
            };
            let thread = scope.spawn(move || work(other, 7));
            work(&comm, 1)?;
            thread.join().unwrap()
        })
    })
    .unwrap();
}

#[test]
fn split_orders_by_key() {
    World::run(6, |comm| {
        let r = comm.rank();
        let third = comm.split((r % 2) as i64, -(r as i64))?;
        assert_eq!(
            third.group().ranks(),
            if r.is_multiple_of(2) {
                [4, 2, 0]
            } else {
                [5, 3, 1]
            }
        );
        let again = comm.split((r % 2) as i64, 0)?;
        let mut x = [r as i32];
        again.all_reduce(&mut x, ReduceOp::Sum)?;
        third.broadcast(&mut x, 0)?;
        assert_eq!(x, [if r.is_multiple_of(2) { 6 } else { 9 }]);
        assert!(
            comm.subgroup(&ProcessGroup::new(vec![r, 9], r)?, "no")
                .is_err()
        );
        Ok(())
    })
    .unwrap();
}

/// A buffer type of somebody else's.
struct Flat(Vec<f32>);

impl AsRef<[f32]> for Flat {
    fn as_ref(&self) -> &[f32] {
        &self.0
    }
}

impl AsMut<[f32]> for Flat {
    fn as_mut(&mut self) -> &mut [f32] {
        &mut self.0
    }
}

#[test]
fn started_operations_keep_their_order_and_give_buffers_back() {
    World::run(4, |comm| {
        let r = comm.rank();
        let gate = Done::new();
        let a = comm.start_all_reduce(Flat(vec![1.0; 5000]), ReduceOp::Sum, gate.clone())?;
        let b = comm.start_all_gather_v::<f32, _>(vec![r as f32; 4], &[1; 4], a.done())?;
        let c = comm.start_reduce_scatter_v::<f32, _>(
            vec![2.0; 8],
            &[2; 4],
            ReduceOp::Sum,
            once(|| Ok(())),
        )?;
        let d = comm.start_send::<i32, _>(vec![r as i32], (r + 1) % 4, 9, ())?;
        let e = comm.start_recv::<i32, _>(vec![0i32], (r + 3) % 4, 9, ())?;
        // Messages do not wait for collectives.
        assert_eq!(
            (d.wait()?, e.wait()?),
            (vec![r as i32], vec![((r + 3) % 4) as i32])
        );
        assert!(!a.is_done() && !b.is_done());
        gate.set(Ok(()));
        // A blocking call goes after what was started.
        comm.barrier()?;
        assert!(a.is_done() && b.is_done() && c.is_done());
        assert_eq!(a.wait()?.0, vec![4.0; 5000]);
        assert_eq!(b.wait()?, [0.0, 1.0, 2.0, 3.0]);
        assert_eq!(c.wait()?[2 * r..2 * r + 2], [8.0, 8.0]);
        Ok(())
    })
    .unwrap();
}

#[test]
fn receives_started_first_do_not_hold_up_sends() {
    World::run(2, |comm| {
        let peer = 1 - comm.rank();
        let got = comm.start_recv::<f32, _>(vec![0f32; 3], peer, 1, ())?;
        // The gate of the send depends on something received: only the worker's patience helps.
        let first = comm.start_recv::<f32, _>(vec![0f32; 1], peer, 0, ())?;
        comm.send(&[1f32], peer, 0)?;
        let sent = comm.start_send::<f32, _>(vec![5f32; 3], peer, 1, first.done())?;
        assert_eq!(got.wait()?, [5.0; 3]);
        sent.wait()?;
        comm.barrier()
    })
    .unwrap();
}

#[test]
fn a_failed_gate_fails_its_operation_alone() {
    World::run(2, |comm| {
        let sub = comm.split(0, 0)?;
        let bad =
            sub.start_send::<f32, _>(vec![0f32], 0, 0, || Err(Error::Gate("no gradient".into())))?;
        assert_eq!(bad.wait().unwrap_err(), Error::Gate("no gradient".into()));
        let panics =
            sub.start_send::<f32, _>(vec![0f32], 0, 0, || -> Result<()> { panic!("in a gate") })?;
        assert!(matches!(panics.wait(), Err(Error::Gate(_))));
        comm.barrier()
    })
    .unwrap();
}

#[test]
fn dropping_a_handle_changes_nothing_for_others() {
    World::run(3, |comm| {
        for i in 0..50 {
            let a = comm.start_all_reduce::<f32, _>(vec![1.0; 100], ReduceOp::Sum, ())?;
            if i % 3 == comm.rank() {
                drop(a)
            } else {
                assert_eq!(a.wait()?, vec![3.0; 100])
            }
        }
        Ok(())
    })
    .unwrap();
}

/// Work and communication of 150 ms each take less together than one after the other.
#[test]
fn overlap_is_real() {
    let world = World::new(2).unwrap();
    let seats = world.seats();
    let times = Mutex::new(Vec::new());
    thread::scope(|scope| {
        for seat in seats {
            let times = &times;
            scope.spawn(move || {
                let delay = Delay::new(seat.endpoint(), Duration::from_millis(150), Duration::ZERO);
                let comm = Communicator::new(delay);
                comm.barrier().unwrap();
                let begin = Instant::now();
                let a = comm
                    .start_all_reduce::<f32, _>(vec![1.0; 10], ReduceOp::Sum, ())
                    .unwrap();
                thread::sleep(Duration::from_millis(150));
                assert_eq!(a.wait().unwrap(), vec![2.0; 10]);
                times.lock().unwrap().push(begin.elapsed());
                seat.finish(Ok(()));
            });
        }
    });
    for time in times.into_inner().unwrap() {
        assert!(
            time >= Duration::from_millis(150) && time < Duration::from_millis(280),
            "{time:?}"
        );
    }
}

#[test]
fn eight_ranks_pass_a_thousand_barriers() {
    let begin = Instant::now();
    World::run(8, |comm| (0..1000).try_for_each(|_| comm.barrier())).unwrap();
    assert!(
        begin.elapsed() < Duration::from_secs(10),
        "{:?}",
        begin.elapsed()
    );
}

#[test]
fn statistics_tell_waiting() {
    World::run(2, |comm| {
        if comm.rank() == 0 {
            thread::sleep(Duration::from_millis(80));
        }
        comm.barrier()?;
        let stats = comm.stats();
        assert_eq!((stats.bytes, stats.messages), (0, 1));
        if comm.rank() == 1 {
            assert!(stats.blocked >= Duration::from_millis(50), "{stats:?}");
        }
        Ok(())
    })
    .unwrap();
}

#[test]
fn prediction_and_plan_agree() {
    let shape = S::AllReduce { len: 1 << 20 };
    let plan = Plan::new(shape.clone(), Algorithm::Pairwise, 8).unwrap();
    let predicted = plan::bytes_sent(&shape, 3, 8, DType::F32, Order::Rank).unwrap();
    assert_eq!(predicted, plan.bytes_sent(3, DType::F32));
    assert_eq!(predicted, 2 * 7 * (1 << 20) / 8 * 4);
}
