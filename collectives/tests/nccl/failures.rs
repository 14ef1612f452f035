//! What goes wrong: calls that differ, devices that stall or are lost, ranks that leave, what NCCL says; each ends every rank.

use std::thread;
use std::time::{Duration, Instant};

use quintet_collectives::nccl::HostLane;
use quintet_collectives::plan::CollectiveShape as S;
use quintet_collectives::transport::device::Lane;
use quintet_collectives::{Error, ReduceOp};

use crate::shim::{Told, call, span};
use crate::{outcomes, step};

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
        // Two ranks on one GPU, where that is not allowed.
        (
            "fail=ncclCommInitRankConfig:5:Duplicate GPU detected",
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
