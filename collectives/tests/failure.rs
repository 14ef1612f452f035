//! What goes wrong is told to every rank, soon and with the first cause; nothing hangs.

use std::sync::Mutex;
use std::thread;
use std::time::{Duration, Instant};

use quintet_collectives::transport::local::{Local, World};
use quintet_collectives::{Communicator, Error, Order, ReduceOp, Result};

type Comm = Communicator<Local>;

/// Runs `body` on every rank and returns what each rank's call returned.
fn outcomes<R: Send>(world: usize, body: impl Fn(&Comm) -> Result<R> + Sync) -> Vec<Result<R>> {
    let results: Mutex<Vec<Option<Result<R>>>> = Mutex::new((0..world).map(|_| None).collect());
    let begin = Instant::now();
    // A failing rank's error is kept aside and the rank ends well, so that all are heard.
    World::run(world, |comm| {
        let result = body(&comm);
        results.lock().unwrap()[comm.rank()] = Some(result);
        Ok(())
    })
    .unwrap();
    assert!(
        begin.elapsed() < Duration::from_secs(5),
        "took {:?}",
        begin.elapsed()
    );
    results
        .into_inner()
        .unwrap()
        .into_iter()
        .map(Option::unwrap)
        .collect()
}

fn mismatch_everywhere(world: usize, words: &[&str], body: impl Fn(&Comm) -> Result<()> + Sync) {
    for (rank, outcome) in outcomes(world, body).into_iter().enumerate() {
        let error = outcome.expect_err("a mismatch is an error on every rank");
        assert!(
            matches!(error, Error::Mismatch { .. }),
            "rank {rank}: {error}"
        );
        let text = error.to_string();
        assert!(
            words.iter().all(|word| text.contains(word)),
            "rank {rank}: {text}"
        );
    }
}

#[test]
fn a_different_count() {
    for world in [2, 5] {
        mismatch_everywhere(world, &["rank 1", "f32 x 9", "f32 x 8"], |comm| {
            let mut x = vec![0f32; 8 + usize::from(comm.rank() == 1)];
            comm.all_reduce(&mut x, ReduceOp::Sum)
        });
    }
    mismatch_everywhere(3, &["counts"], |comm| {
        let counts = if comm.rank() == 2 {
            [1, 2, 3]
        } else {
            [2, 1, 3]
        };
        comm.all_gather_in_place(&mut [0f32; 6], &counts)
    });
}

#[test]
fn both_call_sites_are_named() {
    let (first, second) = (line!() + 3, line!() + 4);
    let sites = [first, second].map(|line| format!("tests/failure.rs:{line}"));
    mismatch_everywhere(2, &[&sites[0], &sites[1]], |comm| match comm.rank() {
        0 => comm.all_reduce(&mut [0f32; 4], ReduceOp::Sum),
        _ => comm.broadcast(&mut [0f32; 4], 0),
    });
}

#[test]
fn a_different_type_of_equal_bytes() {
    mismatch_everywhere(4, &["f32 x 8", "i32 x 8"], |comm| {
        if comm.rank() == 2 {
            comm.all_reduce(&mut [0i32; 8], ReduceOp::Sum)
        } else {
            comm.all_reduce(&mut [0f32; 8], ReduceOp::Sum)
        }
    });
}

#[test]
fn a_different_fold_and_a_different_order() {
    mismatch_everywhere(4, &["sum", "max"], |comm| {
        let op = if comm.rank() == 3 {
            ReduceOp::Max
        } else {
            ReduceOp::Sum
        };
        comm.all_reduce(&mut [0f32; 8], op)
    });
    let error = World::run(4, |comm| {
        let order = if comm.rank() == 3 {
            Order::Any
        } else {
            Order::Rank
        };
        comm.with_order(order)
            .all_reduce(&mut [0f32; 8], ReduceOp::Sum)
    });
    assert!(matches!(error, Err(Error::Mismatch { .. })));
}

#[test]
fn the_other_way_round() {
    mismatch_everywhere(3, &["all_reduce", "broadcast", "call 0"], |comm| {
        let mut x = [0f32; 4];
        if comm.rank() == 0 {
            comm.all_reduce(&mut x, ReduceOp::Sum)?;
            comm.broadcast(&mut x, 0)
        } else {
            comm.broadcast(&mut x, 0)?;
            comm.all_reduce(&mut x, ReduceOp::Sum)
        }
    });
}

#[test]
fn a_different_root_also_where_nothing_is_exchanged() {
    // Roots that send without receiving, and ranks that exchange nothing at all.
    mismatch_everywhere(4, &["root 0", "root 1"], |comm| {
        comm.broadcast(&mut [0f32; 4], usize::from(comm.rank() == 1))
    });
    mismatch_everywhere(4, &["root 0", "root 1"], |comm| {
        comm.broadcast(&mut [0f32; 0], usize::from(comm.rank() == 1))
    });
    mismatch_everywhere(4, &["root 0", "root 1"], |comm| {
        let counts = [1, 0, 0, 0];
        let input: &[f32] = if comm.rank() == 0 { &[1.0] } else { &[] };
        let mut output = [0f32; 1];
        comm.gather_v(input, &mut output, &counts, usize::from(comm.rank() == 1))
    });
}

#[test]
fn all_to_all_v_that_disagrees() {
    for outcome in outcomes(3, |comm| {
        // Rank 0 sends nothing to rank 1, which expects two.
        let send = if comm.rank() == 0 {
            [1, 0, 1]
        } else {
            [1, 1, 1]
        };
        let recv = if comm.rank() == 1 {
            [2, 1, 1]
        } else {
            [1, 1, 1]
        };
        let input = vec![0f32; send.iter().sum()];
        let mut output = vec![0f32; recv.iter().sum()];
        comm.all_to_all_v(&input, &send, &mut output, &recv)?;
        comm.barrier()
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
}

/// How a rank may end before its part is done.
#[derive(Clone, Copy, PartialEq)]
enum End {
    Early,
    Fails,
    Panics,
}

#[test]
fn any_rank_may_be_lost_in_any_way() {
    for end in [End::Early, End::Fails, End::Panics] {
        for victim in 0..4 {
            let causes = Mutex::new(Vec::new());
            let begin = Instant::now();
            let result = World::run(4, |comm| {
                let outcome = (|| {
                    let half = comm.split((comm.rank() / 2) as i64, 0)?;
                    comm.barrier()?;
                    if comm.rank() == victim {
                        match end {
                            End::Early => return Ok(()),
                            End::Fails => return Err(Error::Layout("out of disk".into())),
                            End::Panics => panic!("out of luck"),
                        }
                    }
                    // Ranks of the other half wait for somebody who waits for the victim.
                    half.barrier()?;
                    comm.all_reduce(&mut [1f32; 100], ReduceOp::Sum)
                })();
                if comm.rank() != victim {
                    causes.lock().unwrap().push(outcome.clone());
                }
                outcome
            });
            assert!(
                begin.elapsed() < Duration::from_secs(1),
                "{:?}",
                begin.elapsed()
            );
            let causes = causes.into_inner().unwrap();
            assert_eq!(causes.len(), 3);
            for cause in causes {
                assert!(
                    matches!(cause, Err(Error::PeerLost { rank, .. }) if rank == victim),
                    "{cause:?}"
                );
            }
            match end {
                End::Early => {
                    assert!(matches!(result, Err(Error::PeerLost { rank, .. }) if rank == victim))
                }
                End::Fails => assert_eq!(result, Err(Error::Layout("out of disk".into()))),
                End::Panics => assert!(
                    matches!(&result, Err(Error::Panicked { rank, message }) if *rank == victim && message == "out of luck")
                ),
            }
        }
    }
}

#[test]
fn what_was_sent_before_a_good_end_arrives() {
    World::run(2, |comm| {
        if comm.rank() == 0 {
            // Dropped without waiting: the worker still delivers it.
            comm.start_send::<f32, _>(vec![7f32; 1000], 1, 3, || {
                thread::sleep(Duration::from_millis(50));
                Ok(())
            })?;
            return comm.send(&[8f32], 1, 4);
        }
        thread::sleep(Duration::from_millis(150));
        let (mut x, mut y) = ([0f32; 1000], [0f32]);
        comm.recv(&mut y, 0, 4)?;
        comm.recv(&mut x, 0, 3)?;
        assert_eq!((x[999], y[0]), (7.0, 8.0));
        assert!(matches!(
            comm.recv(&mut y, 0, 4),
            Err(Error::PeerLost { rank: 0, .. })
        ));
        Ok(())
    })
    .unwrap();
}

#[test]
fn a_ring_of_blocking_sends_times_out_and_sendrecv_does_not() {
    let world = World::with_buffer(3, 100).unwrap();
    let outcome: Result<Vec<()>> = world.go(|comm: Comm| {
        let (right, left) = ((comm.rank() + 1) % 3, (comm.rank() + 2) % 3);
        let mut got = [0f32; 64];
        comm.sendrecv(&[1f32; 64], right, &mut got, left, 0)?;
        comm.sendrecv(&[1f32; 64], right, &mut got, left, 0)?;
        comm.send(&[1f32; 64], right, 1)?;
        let comm = comm.with_deadline(Duration::from_millis(200));
        let error = comm.send(&[1f32; 64], right, 1).unwrap_err();
        assert!(
            matches!(error, Error::Timeout { peer: Some(peer), op: "send", .. } if peer == right),
            "{error}"
        );
        comm.with_deadline(Duration::from_secs(30)).barrier()
    });
    outcome.unwrap();
}

#[test]
fn a_collective_that_nobody_joins_times_out() {
    for (rank, outcome) in outcomes(3, |comm| {
        if comm.rank() == 1 {
            thread::sleep(Duration::from_millis(400));
            return comm.barrier();
        }
        let group = comm.group().clone();
        let sub = comm
            .subgroup(&group, "hasty")?
            .with_deadline(Duration::from_millis(100));
        sub.all_reduce(&mut [0f32; 4], ReduceOp::Sum)?;
        Ok(())
    })
    .into_iter()
    .enumerate()
    {
        let expected = |error: &Error| {
            matches!(
                error,
                Error::Timeout {
                    op: "all_reduce",
                    peer: Some(_),
                    ..
                }
            )
        };
        match outcome {
            Err(error) if rank != 1 => assert!(expected(&error), "{error}"),
            // Its own barrier lacks the others, who have left.
            Err(error) => assert!(
                matches!(error, Error::PeerLost { .. } | Error::Timeout { .. }),
                "{error}"
            ),
            Ok(()) => panic!("rank {rank} must fail"),
        }
    }
}

#[test]
fn an_abort_frees_everybody() {
    for outcome in outcomes(4, |comm| {
        if comm.rank() == 3 {
            thread::sleep(Duration::from_millis(50));
            comm.abort();
            return comm.barrier();
        }
        let row = comm.split(0, 0);
        row.map(drop)
    }) {
        assert_eq!(outcome, Err(Error::Aborted { rank: 3 }));
    }
}

#[test]
fn a_wrong_message_is_named() {
    World::run(2, |comm| {
        if comm.rank() == 0 {
            comm.send(&[1i32; 4], 1, 0)?;
            return comm.barrier();
        }
        let error = comm.recv(&mut [0f32; 4], 0, 0).unwrap_err();
        assert_eq!(
            error.to_string(),
            "group world: rank 1 expects f32 x 4 from rank 0 in recv, which sent i32 x 4"
        );
        comm.barrier()
    })
    .unwrap();
}

#[test]
fn a_wrong_length_is_found_before_anything_is_sent() {
    World::run(2, |comm| {
        let error = comm.all_gather(&[1f32; 2], &mut [0f32; 5]).unwrap_err();
        assert!(matches!(
            error,
            Error::Len {
                expected: 4,
                got: 5,
                ..
            }
        ));
        assert!(comm.broadcast(&mut [0f32; 1], 2).is_err());
        assert!(comm.all_gather_in_place(&mut [0f32; 4], &[3, 3]).is_err());
        comm.barrier()
    })
    .unwrap();
}
