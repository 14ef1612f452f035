//! Two ranks on one GPU, where the library is new enough and whoever starts it has allowed it.

use quintet_collectives::nccl::SHARED_GPUS;
use quintet_collectives::transport::local::World;

use super::*;

/// Runs `body` on two ranks that share the device; says why not, where they may not.
fn two(body: impl Fn(&Found, &Comm) -> Result<()> + Sync) {
    let found = found();
    if found.library.version() < SHARED_GPUS {
        println!("skipped: {:?} is older than {SHARED_GPUS}", found.library);
        return;
    }
    let asked = env::var("NCCL_MULTI_RANK_GPU_ENABLE").is_ok_and(|word| word == "1");
    if on_a_gpu() && !asked {
        println!("skipped: NCCL_MULTI_RANK_GPU_ENABLE=1 is not set");
        return;
    }
    let world = World::new(2).unwrap();
    let (found, body) = (&found, &body);
    std::thread::scope(|scope| {
        for seat in world.seats() {
            scope.spawn(move || {
                let comm = found.comm(seat.endpoint());
                let outcome = body(found, &comm);
                drop(comm);
                seat.finish(Ok(()));
                outcome.unwrap();
            });
        }
    });
}

/// What a rank gives at this place: powers of two, so that folds are exact in any order, and as a mean.
fn given(rank: usize, i: usize) -> i32 {
    [1, 2, 4, 8][(3 * rank + i) % 4] * 2
}

fn folded(redop: ReduceOp, i: usize) -> i32 {
    let [a, b] = [given(0, i), given(1, i)];
    match redop {
        ReduceOp::Sum => a + b,
        ReduceOp::Prod => a * b,
        ReduceOp::Min => a.min(b),
        ReduceOp::Max => a.max(b),
        ReduceOp::Avg => (a + b) / 2,
    }
}

/// Every operation, even, uneven and of nothing; with what this rank gives and gets, as places of a rank's.
fn cases(me: usize, redop: ReduceOp) -> Vec<(Shape, usize, Vec<i32>)> {
    let fold = |range: Range<usize>| range.map(|i| folded(redop, i)).collect::<Vec<i32>>();
    let of = |rank: usize, range: Range<usize>| range.map(move |i| given(rank, i));
    let mut cases = vec![
        (Shape::AllReduce { len: 9 }, 9, fold(0..9)),
        (
            Shape::Broadcast { len: 5, root: 1 },
            [0, 5][me],
            of(1, 0..5).collect(),
        ),
        (
            Shape::Reduce { len: 5, root: 1 },
            5,
            if me == 1 { fold(0..5) } else { vec![] },
        ),
        (
            Shape::AllToAll { len: 3 },
            6,
            (0..2).flat_map(|r| of(r, 3 * me..3 * me + 3)).collect(),
        ),
    ];
    for counts in [[4, 4], [5, 2], [0, 3], [0, 0]] {
        let (all, mine) = (counts[0] + counts[1], counts[me]);
        let start = [0, counts[0]][me];
        let both: Vec<i32> = (0..2).flat_map(|r| of(r, 0..counts[r])).collect();
        let (vector, root) = (counts.to_vec(), 1);
        cases.extend([
            (
                Shape::ReduceScatter {
                    counts: vector.clone(),
                },
                all,
                fold(start..start + mine),
            ),
            (
                Shape::AllGather {
                    counts: vector.clone(),
                },
                mine,
                both.clone(),
            ),
            (
                Shape::Gather {
                    counts: vector.clone(),
                    root,
                },
                mine,
                if me == root { both } else { vec![] },
            ),
            (
                Shape::Scatter {
                    counts: vector.clone(),
                    root,
                },
                [0, all][me],
                of(root, start..start + mine).collect(),
            ),
        ]);
        // A rank gives the other one as many as it gets of itself.
        let sends = [[counts[0], counts[1]], [counts[1], counts[0]]];
        let recv: Vec<usize> = (0..2).map(|from| sends[from][me]).collect();
        let came = (0..2).flat_map(|from| {
            let first = if me == 0 { 0 } else { sends[from][0] };
            of(from, first..first + sends[from][me])
        });
        cases.push((
            Shape::AllToAllV {
                send: sends[me].to_vec(),
                recv,
            },
            all,
            came.collect(),
        ));
    }
    cases
}

fn as_one<E: Element>(comm: &Comm, lane: &Arc<CudaLane>, of: impl Fn(i32) -> E) -> Result<()> {
    let me = comm.rank();
    let typed = |x: Vec<i32>| -> Vec<E> { x.into_iter().map(&of).collect() };
    for redop in folds(&Shape::AllReduce { len: 1 }) {
        for (shape, len, wanted) in cases(me, *redop) {
            let mine = typed((0..len).map(|i| given(me, i)).collect());
            let got = call(comm, lane, (shape.clone(), *redop), &mine, wanted.len())?;
            assert_eq!(
                got,
                typed(wanted),
                "rank {me}: {shape:?} {redop} of {}",
                E::DTYPE
            );
        }
    }
    Ok(())
}

#[test]
fn every_operation_type_and_fold() {
    two(|found, comm| {
        let lane = found.lane();
        each_type!(as_one(comm, &lane));
        let none = Memory::<u8>::of(&lane, &[]);
        comm.on_device(Shape::Barrier, ReduceOp::Sum, [none.whole(); 2], lane)
    });
}

#[test]
fn messages_both_ways() {
    two(|found, comm| {
        let (me, lanes) = (comm.rank(), [found.lane(), found.lane()]);
        let [mine, theirs] = [me, 1 - me].map(|rank| vec![rank as f32 + 0.5; 100_000]);
        let (out, room) = (
            Memory::of(&lanes[0], &mine),
            Memory::of(&lanes[1], &vec![0f32; 100_000]),
        );
        let (from, to) = (out.whole(), room.whole());
        let going = comm.start_send_on_device(out, from, (1 - me, 3), lanes[0].clone())?;
        let coming = comm.start_recv_on_device(room, to, (1 - me, 3), lanes[1].clone())?;
        assert_eq!(coming.wait()?.read(), theirs);
        going.wait().map(drop)
    });
}

#[test]
fn a_rank_that_leaves_is_lost_and_the_other_is_free() {
    two(|found, comm| {
        let sum = || {
            let shape = Shape::AllReduce { len: 3 };
            call(comm, &found.lane(), (shape, ReduceOp::Sum), &[1i64; 3], 3)
        };
        assert_eq!(sum()?, [2; 3]);
        if comm.rank() == 0 {
            let error = sum().unwrap_err();
            let lost = matches!(
                error,
                Error::PeerLost { rank: 1, .. } | Error::Timeout { peer: Some(1), .. }
            );
            assert!(lost, "{error}");
        }
        Ok(())
    });
}
