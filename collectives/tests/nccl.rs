//! NCCL as it is called: every type and fold, in place, uneven and empty, its own fold order refused; and what goes
//! wrong, told to every rank. By the stand-in over threads and host memory (tests/nccl_shim); the library that pip
//! installs is looked at where there is one.
#![cfg(feature = "nccl")]
#![allow(unsafe_code)] // it works on addresses

mod common;
#[path = "common/nccl.rs"]
mod shim;

use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use half::{bf16, f16};
use quintet_collectives::element::Bool;
use quintet_collectives::nccl::{HostLane, Library, Nccl, OLDEST, explain};
use quintet_collectives::plan::{CollectiveShape as S, Operation};
use quintet_collectives::store::FileStore;
use quintet_collectives::transport::device::Lane;
use quintet_collectives::transport::local::{Local, World};
use quintet_collectives::{Communicator, DType, Element, Error, Order, ReduceOp, Result};

use shim::{Told, call, call_within, library, span};

type Comm = Communicator<Nccl<Local>>;

/// Runs `body` on every rank over this library; what each rank's call returned.
fn outcomes<R: Send>(
    world: usize,
    library: &Arc<Library>,
    body: impl Fn(&Comm) -> Result<R> + Sync,
) -> Vec<Result<R>> {
    let world = World::new(world).unwrap();
    let results = Mutex::new(Vec::new());
    thread::scope(|scope| {
        for seat in world.seats() {
            let (results, body) = (&results, &body);
            scope.spawn(move || {
                let comm = Communicator::new(Nccl::new(seat.endpoint(), library.clone()));
                let outcome = body(&comm);
                drop(comm);
                results.lock().unwrap().push((seat.rank(), outcome));
                seat.finish(Ok(()));
            });
        }
    });
    let mut results = results.into_inner().unwrap();
    results.sort_by_key(|(rank, _)| *rank);
    results.into_iter().map(|(_, outcome)| outcome).collect()
}

fn all_well(world: usize, body: impl Fn(&Comm) -> Result<()> + Sync) {
    for outcome in outcomes(world, &library(), body) {
        outcome.unwrap();
    }
}

fn every_fold<E: Element>(world: usize, value: impl Fn(usize, usize) -> E + Sync + Copy) {
    all_well(world, |comm| {
        let comm = comm.subgroup(comm.group(), "any")?.with_order(Order::Any);
        for redop in [
            ReduceOp::Sum,
            ReduceOp::Prod,
            ReduceOp::Min,
            ReduceOp::Max,
            ReduceOp::Avg,
        ] {
            let mine: Vec<E> = (0..9).map(|i| value(comm.rank(), i)).collect();
            let (mut host, mut device) = (mine.clone(), vec![E::zeroed(); 9]);
            comm.all_reduce(&mut host, redop)?;
            call(
                &comm,
                &library(),
                S::AllReduce { len: 9 },
                redop,
                &mine,
                &mut device,
            )?;
            assert_eq!(device, host, "{} {redop}", E::DTYPE);
        }
        Ok(())
    });
}

#[test]
fn every_type_and_fold() {
    // Small powers of two: exact in any order, also as a mean of two or four.
    let small = |rank: usize, i: usize| [1, 2, 4, 4][(rank + i) % 4];
    for world in [1, 2, 4] {
        every_fold(world, |r, i| f64::from(small(r, i)));
        every_fold(world, |r, i| small(r, i) as f32);
        every_fold(world, |r, i| bf16::from_f32(small(r, i) as f32));
        every_fold(world, |r, i| f16::from_f32(small(r, i) as f32));
        every_fold(world, |r, i| small(r, i) - 3);
        every_fold(world, |r, i| i64::from(small(r, i)) - 3);
        every_fold(world, |r, i| small(r, i) as u8);
        every_fold(world, |r, i| small(r, i) as u32);
        every_fold(world, |r, i| small(r, i) as u64);
        every_fold(world, |r, i| Bool::from((r + i) % 3 == 0));
    }
}

#[test]
fn in_place_even_and_uneven() {
    all_well(3, |comm| {
        let (me, lib) = (comm.rank(), library());
        for counts in [vec![2, 2, 2], vec![3, 0, 2]] {
            let starts: Vec<usize> = (0..3).map(|r| counts[..r].iter().sum()).collect();
            let (len, own) = (counts.iter().sum(), starts[me]..starts[me] + counts[me]);
            let mut x: Vec<i32> = (0..len).map(|i| (i * 3 + me) as i32).collect();
            call_within(
                comm,
                &lib,
                S::ReduceScatter {
                    counts: counts.clone(),
                },
                ReduceOp::Sum,
                &mut x,
                [0..len, own.clone()],
            )?;
            let folded: Vec<i32> = own.clone().map(|i| (i * 9 + 3) as i32).collect();
            assert_eq!(x[own.clone()], folded);
            call_within(
                comm,
                &lib,
                S::AllGather {
                    counts: counts.clone(),
                },
                ReduceOp::Sum,
                &mut x,
                [own, 0..len],
            )?;
            assert_eq!(x, (0..len).map(|i| (i * 9 + 3) as i32).collect::<Vec<_>>());
        }
        let mut x = [me as i64; 4];
        let whole = [0..4, 0..4];
        call_within(
            comm,
            &lib,
            S::AllReduce { len: 4 },
            ReduceOp::Max,
            &mut x,
            whole.clone(),
        )?;
        assert_eq!(x, [2; 4]);
        x = [me as i64; 4];
        call_within(
            comm,
            &lib,
            S::Broadcast { len: 4, root: 1 },
            ReduceOp::Sum,
            &mut x,
            whole.clone(),
        )?;
        assert_eq!(x, [1; 4]);
        x = [me as i64; 4];
        call_within(
            comm,
            &lib,
            S::Reduce { len: 4, root: 2 },
            ReduceOp::Sum,
            &mut x,
            whole,
        )?;
        assert_eq!(x, [if me == 2 { 3 } else { me as i64 }; 4]);
        Ok(())
    });
}

#[test]
fn lengths_types_and_overlaps_are_looked_at_before_anything_is_called() {
    all_well(2, |comm| {
        let lib = library();
        let error = call(
            comm,
            &lib,
            S::AllReduce { len: 4 },
            ReduceOp::Sum,
            &[1f32; 4],
            &mut [0f32; 3],
        )
        .unwrap_err();
        assert!(
            matches!(
                error,
                Error::Len {
                    what: "the output",
                    expected: 4,
                    got: 3,
                    ..
                }
            ),
            "{error}"
        );
        let x = [0f32; 8];
        let lane = HostLane::new(&lib)?;
        let spans = [span(&x).part(0..4), span(&x).part(2..6)];
        let error = comm
            .on_device(S::AllReduce { len: 4 }, ReduceOp::Sum, spans, lane.clone())
            .unwrap_err();
        assert!(error.to_string().contains("overlap"), "{error}");
        let spans = [span(&[0i32; 4]), span(&x).part(0..4)];
        let error = comm
            .on_device(S::AllReduce { len: 4 }, ReduceOp::Sum, spans, lane.clone())
            .unwrap_err();
        assert!(error.to_string().contains("is of i32, not f32"), "{error}");
        let error = comm
            .start_send_on_device((), span(&x), (0, 1 << 61), lane)
            .unwrap_err();
        assert!(error.to_string().contains("below 2^61"), "{error}");
        assert_eq!(comm.stats().bytes, 0);
        comm.barrier()
    });
    // A communicator over anything else says so.
    World::run(1, |comm| {
        let x = [0f32; 4];
        let lane = HostLane::new(&library())?;
        let error = comm.on_device(
            S::AllReduce { len: 4 },
            ReduceOp::Sum,
            [span(&x), span(&x)],
            lane,
        );
        assert!(error.unwrap_err().to_string().contains("reaches no device"));
        Ok(())
    })
    .unwrap();
}

#[test]
fn its_own_fold_order_is_refused_unless_asked_for() {
    all_well(3, |comm| {
        let lib = library();
        let sum = |comm: &Comm, redop| {
            // 1 + 2^-24 + 2^-24 in rank order, and anything else.
            let x = [[1.0f32, 2f32.powi(-24), 2f32.powi(-24)][comm.rank()]];
            let mut y = [0f32];
            call(comm, &lib, S::AllReduce { len: 1 }, redop, &x, &mut y).map(|()| y[0])
        };
        let error = sum(comm, ReduceOp::Sum).unwrap_err();
        assert!(matches!(error, Error::Plan { .. }), "{error}");
        assert!(
            error
                .to_string()
                .contains("order rank: NCCL chooses how it folds"),
            "{error}"
        );
        assert_eq!(sum(comm, ReduceOp::Max)?, 1.0);
        let any = comm.subgroup(comm.group(), "any")?.with_order(Order::Any);
        // The stand-in folds from the last rank to the first, which is why it must be asked for.
        assert_eq!(sum(&any, ReduceOp::Sum)?, 1.0 + 2f32.powi(-23));
        let said = explain(
            Operation::AllReduce,
            DType::F32,
            ReduceOp::Sum,
            3,
            comm.order(),
        );
        assert!(said.refused && said.to_string().contains("ncclAllReduce"));
        comm.barrier()
    });
}

#[test]
fn messages_meet_by_tag_in_whatever_order_they_are_asked_for() {
    all_well(2, |comm| {
        let (lib, other) = (library(), 1 - comm.rank());
        let lane = || HostLane::new(&lib);
        let sent: Vec<Vec<f32>> = (0..4)
            .map(|tag| vec![(10 * comm.rank() + tag) as f32; 100])
            .collect();
        let room: Vec<Vec<f32>> = vec![vec![0.0; 100]; 4];
        // Sends in one order, receives in the other, both ways at once.
        let mut going = Vec::new();
        for (tag, x) in sent.into_iter().enumerate() {
            let span = span(&x);
            going.push(comm.start_send_on_device(x, span, (other, tag as u64), lane()?)?);
        }
        let mut coming = Vec::new();
        for (tag, x) in room.into_iter().enumerate().rev() {
            let span = span(&x);
            coming.push((
                tag,
                comm.start_recv_on_device(x, span, (other, tag as u64), lane()?)?,
            ));
        }
        for (tag, pending) in coming {
            assert_eq!(pending.wait()?, vec![(10 * other + tag) as f32; 100]);
        }
        for pending in going {
            pending.wait()?;
        }
        assert_eq!(comm.stats().bytes, 4 * 400);
        // An empty one, and one that is not what it should be.
        let empty: [f32; 0] = [];
        let (go, come) = match comm.rank() {
            0 => (
                Some(comm.start_send_on_device((), span(&empty), (1, 7), lane()?)?),
                None,
            ),
            _ => (
                None,
                Some(comm.start_recv_on_device((), span(&empty), (0, 7), lane()?)?),
            ),
        };
        for pending in [go, come].into_iter().flatten() {
            pending.wait()?;
        }
        let (four, five) = ([1i32; 4], [0f32; 5]);
        match comm.rank() {
            0 => comm
                .start_send_on_device((), span(&four), (1, 8), lane()?)?
                .wait()?,
            _ => {
                let error = comm
                    .start_recv_on_device((), span(&five), (0, 8), lane()?)?
                    .wait()
                    .unwrap_err();
                assert_eq!(
                    error.to_string(),
                    "group world: rank 1 expects f32 x 5 from rank 0 in recv, which sent i32 x 4"
                );
            }
        }
        comm.barrier()
    });
}

#[test]
fn a_ring_of_messages_on_one_lane_each_moves() {
    all_well(4, |comm| {
        let (me, lib) = (comm.rank(), library());
        let (right, left) = ((me + 1) % 4, (me + 3) % 4);
        // A lane each way, as a device has: a kernel that sends waits for the one that receives.
        let (out, inn) = (HostLane::new(&lib)?, HostLane::new(&lib)?);
        let mut x = vec![me as f64; 1000];
        for _ in 0..3 {
            let room = vec![0.0; 1000];
            let (from, to) = (span(&x), span(&room));
            let go = comm.start_send_on_device(x, from, (right, 0), out.clone())?;
            let come = comm.start_recv_on_device(room, to, (left, 0), inn.clone())?;
            x = come.wait()?;
            go.wait()?;
        }
        assert_eq!(x[999], ((me + 1) % 4) as f64);
        Ok(())
    });
}

#[test]
fn started_collectives_follow_each_other_and_groups_stay_apart() {
    all_well(4, |comm| {
        let lib = library();
        let half = comm.split((comm.rank() / 2) as i64, 0)?;
        let mut pending = Vec::new();
        for round in 0..5i32 {
            for group in [comm, &half] {
                let x = vec![round + group.rank() as i32; 50];
                let at = span(&x);
                let shape = S::AllReduce { len: 50 };
                pending.push((
                    group.world(),
                    round,
                    group.start_on_device(
                        x,
                        shape,
                        ReduceOp::Sum,
                        [at, at],
                        HostLane::new(&lib)?,
                    )?,
                ));
            }
        }
        for (world, round, pending) in pending {
            let ranks: i32 = (0..world as i32).sum();
            assert_eq!(pending.wait()?, vec![world as i32 * round + ranks; 50]);
        }
        Ok(())
    });
}

#[test]
fn a_barrier_waits_for_the_lane() {
    let told = Told::new("barrier");
    told.set("late=200");
    for outcome in outcomes(2, &told.library(), |comm| {
        let lib = told.library();
        let lane = HostLane::new(&lib)?;
        let x = vec![comm.rank() as i32; 10];
        let at = span(&x);
        let pending = comm.start_on_device(
            x,
            S::AllReduce { len: 10 },
            ReduceOp::Sum,
            [at, at],
            lane.clone(),
        )?;
        let none: [u8; 0] = [];
        comm.on_device(S::Barrier, ReduceOp::Sum, [span(&none), span(&none)], lane)?;
        assert!(pending.is_done());
        pending.wait().map(drop)
    }) {
        outcome.unwrap();
    }
    assert_eq!(told.faults(), "");
}

#[test]
fn calls_that_differ_are_a_mismatch_and_nccl_never_hears_of_them() {
    let told = Told::new("mismatch");
    let lib = told.library();
    for (rank, outcome) in outcomes(3, &lib, |comm| {
        // A communicator that is ready, so that nothing but the comparison is in the way.
        step(comm, &lib)?;
        let late = comm.rank() == 1;
        if late {
            thread::sleep(Duration::from_millis(100));
        }
        let comm = comm.subgroup(comm.group(), "step")?;
        let mut first = [0i32];
        call(
            &comm,
            &lib,
            S::AllReduce { len: 1 },
            ReduceOp::Sum,
            &[1],
            &mut first,
        )?;
        if late {
            thread::sleep(Duration::from_millis(100));
        }
        let len = 8 + usize::from(comm.rank() == 1);
        let (x, mut y) = (vec![1i32; len], vec![0; len]);
        call(&comm, &lib, S::AllReduce { len }, ReduceOp::Sum, &x, &mut y)
    })
    .into_iter()
    .enumerate()
    {
        let error = outcome.unwrap_err();
        assert!(
            matches!(error, Error::Mismatch { .. }),
            "rank {rank}: {error}"
        );
        assert!(error.to_string().contains("i32 x 9"), "{error}");
    }
    // Three ranks' two calls that were alike, and no other.
    assert_eq!(told.put(), 6);
    // Counts of all_to_all_v, which differ from rank to rank by right, are compared pair by pair.
    for outcome in outcomes(2, &lib, |comm| {
        let (send, recv) = match comm.rank() {
            0 => (vec![1, 0], vec![1, 1]),
            _ => (vec![1, 1], vec![2, 1]),
        };
        let x = vec![0i32; send.iter().sum()];
        let mut y = vec![0; recv.iter().sum()];
        call(
            comm,
            &lib,
            S::AllToAllV { send, recv },
            ReduceOp::Sum,
            &x,
            &mut y,
        )
    }) {
        assert!(
            matches!(
                outcome,
                Err(Error::Message {
                    peer: 0,
                    rank: 1,
                    ..
                })
            ),
            "{outcome:?}"
        );
    }
    assert_eq!((told.faults(), told.live()), (String::new(), 0));
}

/// Everybody calls all_reduce over and over with a deadline of 300 ms, on memory of its own.
fn step(comm: &Comm, lib: &Arc<Library>) -> Result<()> {
    let comm = comm
        .subgroup(comm.group(), "step")?
        .with_deadline(Duration::from_millis(300));
    let x = vec![1i64; 100];
    let mut y = vec![0; 100];
    call(
        &comm,
        lib,
        S::AllReduce { len: 100 },
        ReduceOp::Sum,
        &x,
        &mut y,
    )
}

#[test]
fn a_device_that_stalls_is_a_timeout_and_is_aborted() {
    let told = Told::new("stall");
    let lib = told.library();
    let begin = Instant::now();
    for outcome in outcomes(2, &lib, |comm| {
        step(comm, &lib)?;
        comm.barrier()?;
        told.set("stall=1");
        let part = comm.subgroup(comm.group(), "stalls")?;
        let part = part.with_deadline(Duration::from_millis(300));
        let (x, mut y, lane) = (vec![1i64; 100], vec![0i64; 100], HostLane::new(&lib)?);
        let spans = [span(&x), span(&y)];
        let shape = S::AllReduce { len: 100 };
        let error = part.on_device(shape, ReduceOp::Sum, spans, lane.clone());
        // The others have given up too, and the device goes on: what was aborted is not done after all.
        comm.subgroup(comm.group(), "later")?.barrier()?;
        told.set("stall=0");
        for _ in 0..10 {
            assert!(lane.idle()?);
        }
        y[0] += y[99];
        assert_eq!(y, vec![0; 100]);
        error
    }) {
        let error = outcome.unwrap_err();
        assert!(
            matches!(
                error,
                Error::Timeout {
                    op: "all_reduce",
                    ..
                }
            ),
            "{error}"
        );
        assert!(
            error.to_string().contains("waiting for the device"),
            "{error}"
        );
    }
    assert!(
        begin.elapsed() < Duration::from_secs(5),
        "{:?}",
        begin.elapsed()
    );
    assert_eq!((told.faults(), told.live()), (String::new(), 0));
}

#[test]
fn a_rank_whose_device_is_lost_frees_the_others() {
    let told = Told::new("lost");
    let lib = told.library();
    for outcome in outcomes(3, &lib, |comm| {
        step(comm, &lib)?;
        comm.barrier()?;
        told.set("lost=1");
        step(comm, &lib)
    }) {
        // Whoever gives up first aborts, and the control connection tells the others why.
        assert!(matches!(outcome, Err(Error::Timeout { .. })), "{outcome:?}");
    }
    assert_eq!(told.live(), 0);
}

#[test]
fn a_rank_that_leaves_is_lost_by_name_while_others_wait_for_it() {
    let told = Told::new("leaves");
    let lib = told.library();
    for (rank, outcome) in outcomes(3, &lib, |comm| {
        step(comm, &lib)?;
        if comm.rank() == 2 {
            return Ok(());
        }
        step(comm, &lib)
    })
    .into_iter()
    .enumerate()
    {
        match rank {
            2 => outcome.unwrap(),
            _ => assert!(
                matches!(
                    outcome,
                    Err(Error::PeerLost { rank: 2, .. } | Error::Timeout { peer: Some(2), .. })
                ),
                "{outcome:?}"
            ),
        }
    }
    assert_eq!((told.faults(), told.live()), (String::new(), 0));
}

#[test]
fn what_nccl_says_is_told_to_every_rank() {
    for (words, call_named) in [
        (
            "fail=ncclAllReduce:3:the stand-in was told to",
            "ncclAllReduce",
        ),
        (
            "fail=ncclGetUniqueId:2:no route to anywhere",
            "ncclGetUniqueId",
        ),
        (
            "fail=ncclCommInitRankConfig:1:Cuda failure 2 'out of memory'",
            "ncclCommInitRankConfig",
        ),
        ("stall=1;broken=3", "ncclCommGetAsyncError"),
    ] {
        let told = Told::new(call_named);
        told.set(words);
        let lib = told.library();
        for outcome in outcomes(2, &lib, |comm| step(comm, &lib)) {
            let error = outcome.unwrap_err();
            let text = error.to_string();
            assert!(matches!(error, Error::Nccl { .. }), "{text}");
            assert!(
                text.contains(call_named) && text.contains(" says "),
                "{text}"
            );
            let last = words.rsplit(':').next().filter(|_| words.contains(':'));
            assert!(
                text.ends_with(last.unwrap_or("was told to break")),
                "{text}"
            );
        }
        assert_eq!(told.live(), 0, "{words}");
    }
}

#[test]
fn what_nccl_says_of_others_is_believed_once_they_have_had_time_to_say_why() {
    let told = Told::new("remote");
    told.set("stall=1;broken=6");
    let lib = told.library();
    let begin = Instant::now();
    for outcome in outcomes(2, &lib, |comm| {
        let (x, mut y) = (vec![1i32; 4], vec![0; 4]);
        let shape = S::AllReduce { len: 4 };
        call(comm, &lib, shape, ReduceOp::Sum, &x, &mut y)
    }) {
        let error = outcome.unwrap_err();
        assert!(matches!(error, Error::Nccl { code: 6, .. }), "{error}");
    }
    let took = begin.elapsed();
    let (least, most) = (Duration::from_millis(700), Duration::from_secs(3));
    assert!(took >= least && took < most, "{took:?}");
    assert_eq!(told.live(), 0);
}

#[test]
fn an_abort_frees_whoever_waits_for_a_device() {
    let told = Told::new("abort");
    told.set("stall=1");
    let lib = told.library();
    let begin = Instant::now();
    for outcome in outcomes(3, &lib, |comm| {
        let x = vec![1i32; 10];
        let at = span(&x);
        let pending = comm.start_on_device(
            x,
            S::AllReduce { len: 10 },
            ReduceOp::Sum,
            [at, at],
            HostLane::new(&lib)?,
        )?;
        if comm.rank() == 1 {
            thread::sleep(Duration::from_millis(100));
            comm.abort();
        }
        pending.wait()
    }) {
        assert_eq!(outcome.unwrap_err(), Error::Aborted { rank: 1 });
    }
    assert!(
        begin.elapsed() < Duration::from_secs(3),
        "{:?}",
        begin.elapsed()
    );
    assert_eq!(told.live(), 0);
}

#[test]
fn every_drop_order_ends_well() {
    let told = Told::new("drops");
    let lib = told.library();
    let begin = Instant::now();
    let orders = [[0, 1, 2], [2, 1, 0], [1, 0, 2], [1, 2, 0]];
    for outcome in outcomes(4, &lib, |comm| {
        let world = comm.subgroup(comm.group(), "everyone")?;
        let half = comm.split((comm.rank() % 2) as i64, 0)?;
        let alone = comm.split(comm.rank() as i64, 0)?;
        let groups = [world, half, alone];
        for group in &groups {
            step(group, &lib)?;
            let mut y = [0i32];
            call(
                group,
                &lib,
                S::AllReduce { len: 1 },
                ReduceOp::Sum,
                &[1],
                &mut y,
            )?;
            assert_eq!(y, [group.world() as i32]);
        }
        // Each rank in an order of its own: nobody may wait in one for who waits in another.
        let mut groups = groups.map(Some);
        for at in orders[comm.rank()] {
            drop(groups[at].take());
        }
        Ok(())
    }) {
        outcome.unwrap();
    }
    assert!(
        begin.elapsed() < Duration::from_secs(3),
        "{:?}",
        begin.elapsed()
    );
    assert_eq!((told.faults(), told.live()), (String::new(), 0));
}

#[test]
fn ids_may_lie_in_a_store() {
    let folder = common::Folder::new();
    let (lib, path) = (library(), folder.0.clone());
    let world = World::new(3).unwrap();
    thread::scope(|scope| {
        for seat in world.seats() {
            let (lib, path) = (&lib, &path);
            scope.spawn(move || {
                let store = Arc::new(FileStore::new(path).unwrap());
                let end = Nccl::with_store(seat.endpoint(), lib.clone(), store, "run-0");
                let comm = Communicator::new(end);
                for name in ["a", "b", "a"] {
                    let part = comm.subgroup(comm.group(), name).unwrap();
                    let mut y = [0i32];
                    call(
                        &part,
                        lib,
                        S::AllReduce { len: 1 },
                        ReduceOp::Sum,
                        &[1],
                        &mut y,
                    )
                    .unwrap();
                    assert_eq!(y, [3]);
                }
                drop(comm);
                seat.finish(Ok(()));
            });
        }
    });
    let keys = std::fs::read_dir(&path).unwrap().count();
    assert!(keys >= 3, "{keys} ids");
}

#[test]
fn a_library_that_cannot_be_used_is_one_sentence() {
    let told = Told::new("old");
    told.set("version=21304");
    let text = Library::first(&[told.path()]).unwrap_err().to_string();
    assert!(
        text.starts_with("NCCL 2.13.4 at ")
            && text.contains(&format!("too old, {OLDEST} or newer")),
        "{text}"
    );
    told.set("version=21400");
    assert_eq!(told.library().version(), OLDEST);

    // A symbol renamed in a copy.
    let mut bytes = std::fs::read(told.path()).unwrap();
    let name = b"\0ncclGroupEnd\0";
    let found: Vec<usize> = (0..bytes.len() - name.len())
        .filter(|&at| bytes[at..].starts_with(name))
        .collect();
    assert!(!found.is_empty());
    for at in found {
        bytes[at + 1] = b'x';
    }
    let path = told.path().with_file_name("libshort.so");
    std::fs::write(&path, bytes).unwrap();
    let text = Library::first(&[path]).unwrap_err().to_string();
    assert!(
        text.ends_with("is no NCCL that can be used: it has no ncclGroupEnd"),
        "{text}"
    );

    let driver = Told::new("driver");
    driver.set("fail=ncclCommInitRankConfig:1:Cuda failure 35 'CUDA driver version is insufficient for CUDA runtime version'");
    let lib = driver.library();
    for outcome in outcomes(1, &lib, |comm| step(comm, &lib)) {
        let error = outcome.unwrap_err();
        assert!(matches!(error, Error::Library(_)), "{error}");
        assert!(
            error
                .to_string()
                .starts_with("the NVIDIA driver is older than NCCL 2.30.0 at "),
            "{error}"
        );
    }
}

/// The library of `pip install nvidia-nccl-cu13`, which needs no GPU to be asked for its version.
#[test]
fn the_real_library_has_every_symbol() {
    let Ok(path) = std::env::var("QUINTET_REAL_NCCL") else {
        println!("skipped: QUINTET_REAL_NCCL names no libnccl.so.2");
        return;
    };
    let library = Library::first(&[path.into()]).unwrap();
    println!("{library:?}: {} symbols", Library::symbols().len());
    assert!(!library.on_host() && library.version() >= OLDEST);
    assert!(HostLane::new(&library).is_err());
}
