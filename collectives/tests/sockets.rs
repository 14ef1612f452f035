//! Ranks over tcp and unix sockets: failures, strangers, promises of the communicator. Threads of one
//! process; killed processes are in `killed.rs`.
#![cfg(unix)]

mod common;

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::thread;
use std::time::{Duration, Instant};

use common::{Folder, join};
use quintet_collectives::store::{FileStore, Store, StoreServer, TcpStore};
use quintet_collectives::transport::socket::{Join, Kind, Seat, Sockets};
use quintet_collectives::{Communicator, Error, Order, ReduceOp, Result};

type Comm = Communicator<Sockets>;

const KINDS: [Kind; 2] = [Kind::Tcp, Kind::Unix];

/// Runs `body` on every rank, ends each rank well, and returns what each body returned.
fn outcomes<R: Send>(
    kind: Kind,
    world: usize,
    body: impl Fn(&Comm) -> Result<R> + Sync,
) -> Vec<Result<R>> {
    let seats = join(kind, world, |_| {});
    each(seats, |seat| {
        let result = body(&seat.communicator().unwrap());
        seat.finish(Ok(()));
        result
    })
}

/// Runs `body` on every rank's seat, one thread each.
fn each<R: Send>(seats: Vec<Seat>, body: impl Fn(Seat) -> R + Sync) -> Vec<R> {
    thread::scope(|scope| {
        let threads: Vec<_> = seats
            .into_iter()
            .map(|seat| {
                let body = &body;
                scope.spawn(move || body(seat))
            })
            .collect();
        threads.into_iter().map(|t| t.join().unwrap()).collect()
    })
}

fn mismatch_everywhere(
    kind: Kind,
    world: usize,
    words: &[&str],
    body: impl Fn(&Comm) -> Result<()> + Sync,
) {
    let begin = Instant::now();
    for (rank, outcome) in outcomes(kind, world, body).into_iter().enumerate() {
        let error = outcome.expect_err("a mismatch is an error on every rank");
        assert!(
            matches!(error, Error::Mismatch { .. }),
            "rank {rank}: {error}"
        );
        let text = error.to_string();
        for word in words {
            assert!(text.contains(word), "rank {rank}: {text} lacks {word}");
        }
    }
    assert!(
        begin.elapsed() < Duration::from_secs(5),
        "{:?}",
        begin.elapsed()
    );
}

#[test]
fn mismatches_are_named_on_every_rank_with_both_sites() {
    for kind in KINDS {
        for world in [2, 5] {
            let words = ["rank 1", "f32 x 9", "f32 x 8", "tests/sockets.rs:"];
            mismatch_everywhere(kind, world, &words, |comm| {
                let mut x = vec![0f32; 8 + usize::from(comm.rank() == 1)];
                comm.all_reduce(&mut x, ReduceOp::Sum)
            });
        }
        let (one, two) = (line!() + 3, line!() + 4);
        let sites = [one, two].map(|line| format!("tests/sockets.rs:{line}"));
        mismatch_everywhere(kind, 2, &[&sites[0], &sites[1]], |comm| match comm.rank() {
            0 => comm.all_reduce(&mut [0f32; 4], ReduceOp::Sum),
            _ => comm.all_reduce(&mut [0i32; 4], ReduceOp::Sum),
        });
        // Ranks that exchange nothing, and calls the other way round.
        mismatch_everywhere(kind, 4, &["root 0", "root 1"], |comm| {
            comm.broadcast(&mut [0f32; 0], usize::from(comm.rank() == 1))
        });
        mismatch_everywhere(kind, 3, &["all_reduce", "broadcast", "call 0"], |comm| {
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
}

#[test]
fn a_rank_may_leave_early_fail_or_panic() {
    for kind in KINDS {
        for way in ["early", "fails", "panics"] {
            for victim in [0, 2] {
                let seats = join(kind, 4, |_| {});
                let begin = Instant::now();
                let found = each(seats, |seat| {
                    let rank = seat.rank();
                    seat.run(|comm| {
                        let half = comm.split((rank / 2) as i64, 0)?;
                        comm.barrier()?;
                        if rank == victim {
                            match way {
                                "early" => return Ok(()),
                                "fails" => return Err(Error::Layout("out of disk".into())),
                                _ => panic!("out of luck"),
                            }
                        }
                        // The other half waits for somebody who waits for the victim.
                        half.barrier()?;
                        comm.all_reduce(&mut [1f32; 100], ReduceOp::Sum)
                    })
                });
                assert!(
                    begin.elapsed() < Duration::from_secs(2),
                    "{:?}",
                    begin.elapsed()
                );
                for (rank, outcome) in found.into_iter().enumerate() {
                    if rank != victim {
                        assert!(
                            matches!(outcome, Err(Error::PeerLost { rank, .. }) if rank == victim),
                            "{way}: {outcome:?}"
                        );
                    }
                }
            }
        }
    }
}

#[test]
fn an_abort_frees_everybody_within_a_tenth_of_a_second() {
    for kind in KINDS {
        let found = outcomes(kind, 4, |comm| {
            let own = comm.split(comm.rank() as i64 / 2, 0)?;
            comm.barrier()?;
            if comm.rank() == 3 {
                thread::sleep(Duration::from_millis(50));
                comm.abort();
                return Ok((own.barrier(), Duration::ZERO));
            }
            if comm.rank() == 2 {
                thread::sleep(Duration::from_millis(20));
            }
            let begin = Instant::now();
            let error = comm.barrier();
            Ok((error, begin.elapsed()))
        });
        for (rank, outcome) in found.into_iter().enumerate() {
            let (error, waited) = outcome.unwrap();
            assert_eq!(error, Err(Error::Aborted { rank: 3 }), "rank {rank}");
            assert!(waited < Duration::from_millis(150), "{waited:?}");
        }
    }
}

#[test]
fn both_may_send_more_than_any_buffer_at_once() {
    for kind in KINDS {
        let found = outcomes(kind, 3, |comm| {
            let (right, left) = ((comm.rank() + 1) % 3, (comm.rank() + 2) % 3);
            let data = vec![comm.rank() as f32; 8 << 20];
            let mut got = vec![0f32; 8 << 20];
            // All send first; what is left of it goes out behind the scenes.
            comm.send(&data, right, 1)?;
            comm.recv(&mut got, left, 1)?;
            assert!(got.iter().all(|x| *x == left as f32));
            comm.all_reduce(&mut got, ReduceOp::Sum)?;
            assert!(got.iter().all(|x| *x == 3.0));
            Ok(())
        });
        found.into_iter().for_each(|outcome| outcome.unwrap());
    }
}

#[test]
fn a_full_buffer_makes_send_wait_and_names_the_peer() {
    for kind in KINDS {
        let seats = join(kind, 3, |join| join.buffer = 100);
        each(seats, |seat| {
            seat.run(|comm| {
                let (right, left) = ((comm.rank() + 1) % 3, (comm.rank() + 2) % 3);
                let mut got = [0f32; 64];
                for _ in 0..5 {
                    comm.sendrecv(&[1f32; 64], right, &mut got, left, 0)?;
                }
                comm.send(&[1f32; 64], right, 1)?;
                let comm = comm.with_deadline(Duration::from_millis(200));
                let error = comm.send(&[1f32; 64], right, 1).unwrap_err();
                assert!(
                    matches!(error, Error::Timeout { peer: Some(peer), op: "send", .. } if peer == right),
                    "{error}"
                );
                comm.with_deadline(Duration::from_secs(30)).barrier()
            })
            .unwrap();
        });
    }
}

#[test]
fn what_was_sent_before_a_good_end_arrives() {
    for kind in KINDS {
        let seats = join(kind, 2, |_| {});
        each(seats, |seat| {
            let body = |comm: Comm| {
                if comm.rank() == 0 {
                    comm.start_send::<f32, _>(vec![7f32; 1 << 20], 1, 3, || {
                        thread::sleep(Duration::from_millis(50));
                        Ok(())
                    })?;
                    return comm.send(&[8f32], 1, 4);
                }
                thread::sleep(Duration::from_millis(200));
                let (mut x, mut y) = (vec![0f32; 1 << 20], [0f32]);
                comm.recv(&mut y, 0, 4)?;
                comm.recv(&mut x, 0, 3)?;
                assert_eq!((x[999], x[(1 << 20) - 1], y[0]), (7.0, 7.0, 8.0));
                assert!(matches!(
                    comm.recv(&mut y, 0, 4),
                    Err(Error::PeerLost { rank: 0, .. })
                ));
                Ok::<(), Error>(())
            };
            seat.run(body).unwrap();
        });
    }
}

#[test]
fn who_has_not_called_is_named_at_the_deadline() {
    for kind in KINDS {
        let found = outcomes(kind, 5, |comm| {
            comm.barrier()?;
            if comm.rank() == 3 {
                thread::sleep(Duration::from_millis(700));
                return comm.barrier();
            }
            let group = comm.group().clone();
            let sub = comm.subgroup(&group, "hasty")?;
            sub.with_deadline(Duration::from_millis(200)).barrier()
        });
        for (rank, outcome) in found.into_iter().enumerate() {
            match outcome {
                Err(Error::Timeout { peer, .. }) => assert_eq!(peer, Some(3)),
                // Its own barrier lacks the others, who have left.
                Err(Error::PeerLost { .. }) if rank == 3 => {}
                other => panic!("rank {rank}: {other:?}"),
            }
        }
    }
}

#[test]
fn bits_are_those_of_threads() {
    let rough = |rank: usize, i: usize| {
        let x = (rank * 2_654_435_761 + i * 40_503) % 10_007;
        (x as f32 - 5000.0) * [1e-6, 1.0, 1e6][(rank + i) % 3]
    };
    for order in [Order::Rank, Order::Any] {
        for len in [5, 20_000] {
            let run = |world: usize| {
                let local = quintet_collectives::World::run(world, |comm| {
                    let comm = comm.with_order(order);
                    let mut x: Vec<f32> = (0..len).map(|i| rough(comm.rank(), i)).collect();
                    comm.all_reduce(&mut x, ReduceOp::Sum)?;
                    Ok(x.iter().map(|x| x.to_bits()).collect::<Vec<_>>())
                });
                local.unwrap()
            };
            let expected = run(5);
            for kind in KINDS {
                let seats = join(kind, 5, |join| join.payload_crc = true);
                let found = each(seats, |seat| {
                    seat.run(|comm| {
                        let comm = comm.with_order(order);
                        let mut x: Vec<f32> = (0..len).map(|i| rough(comm.rank(), i)).collect();
                        comm.all_reduce(&mut x, ReduceOp::Sum)?;
                        Ok::<_, Error>(x.iter().map(|x| x.to_bits()).collect::<Vec<_>>())
                    })
                    .unwrap()
                });
                assert_eq!(found, expected);
            }
        }
    }
}

#[test]
fn groups_on_several_threads_and_started_operations() {
    for kind in KINDS {
        let found = outcomes(kind, 3, |comm| {
            let other = comm.split(0, -(comm.rank() as i64))?;
            thread::scope(|scope| {
                let other = &other;
                let work = |comm: &Comm, weight: i64| -> Result<()> {
                    for i in 0..300i64 {
                        let mut x = [weight * i; 3];
                        comm.all_reduce(&mut x, ReduceOp::Sum)?;
                        assert_eq!(x, [3 * weight * i; 3]);
                    }
                    Ok(())
                };
                let thread = scope.spawn(move || work(other, 7));
                work(comm, 1)?;
                thread.join().unwrap()
            })?;
            let a = comm.start_all_reduce::<f32, _>(vec![1.0; 5000], ReduceOp::Sum, ())?;
            let b = comm.start_all_gather_v::<f32, _>(vec![1.0; 3], &[1; 3], a.done())?;
            comm.barrier()?;
            assert_eq!((a.wait()?, b.wait()?), (vec![3.0; 5000], vec![1.0; 3]));
            Ok(())
        });
        found.into_iter().for_each(|outcome| outcome.unwrap());
    }
}

/// Everything a stranger may do to the port while a run is meeting.
#[test]
fn strangers_harm_nobody() {
    let folder = Folder::new();
    let store = FileStore::new(&folder.0).unwrap();
    let second = Duration::from_secs(1);
    let rank = |rank: usize, generation: u32, secret: &str, timeout: u64| {
        let join = Join {
            generation,
            secret: secret.as_bytes().to_vec(),
            timeout: Duration::from_secs(timeout),
            ..Join::new(rank, 2, "run")
        };
        let store = store.clone();
        thread::spawn(move || join.over(&store))
    };
    let zero = rank(0, 1, "open sesame", 20);
    let address = store.wait("run/1/address/0", 5 * second).unwrap();
    let address = String::from_utf8(address).unwrap();
    let address = address.trim_start_matches("tcp:").to_string();
    let mut held = Vec::new();
    for noise in [
        &b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"[..],
        &[0xff; 4096],
        b"QNTH",
        b"QNT1\0\0\0\0",
        b"",
    ] {
        let mut stream = TcpStream::connect(&address).unwrap();
        stream.write_all(noise).unwrap();
        held.push(stream);
    }
    // One drips, one comes and goes.
    let drip = TcpStream::connect(&address).unwrap();
    drop(TcpStream::connect(&address).unwrap());
    (&drip).write_all(b"Q").unwrap();
    // A rank of another generation, and one that does not know the secret.
    store
        .set(
            "run/0/address/0",
            format!("tcp:{address}").as_bytes(),
            second,
        )
        .unwrap();
    let other = rank(1, 0, "open sesame", 5).join().unwrap();
    assert!(
        matches!(&other, Err(Error::Rendezvous(text)) if text.contains("generation")),
        "{other:?}"
    );
    let thief = rank(1, 1, "please", 5).join().unwrap();
    assert!(
        matches!(&thief, Err(Error::Rendezvous(text)) if text.contains("secret")),
        "{thief:?}"
    );
    assert!(!zero.is_finished());
    let one = rank(1, 1, "open sesame", 20);
    let seats = vec![zero.join().unwrap().unwrap(), one.join().unwrap().unwrap()];
    each(seats, |seat| {
        seat.run(|comm| comm.all_reduce(&mut [1f32], ReduceOp::Sum))
            .unwrap();
    });
}

/// A server that knows how to talk but not the secret is not believed.
#[test]
fn a_store_must_know_the_secret_too() {
    let server = StoreServer::start(0..=0, "127.0.0.1", "run", b"theirs").unwrap();
    let port = server.port();
    let second = Duration::from_secs(1);
    let error = TcpStore::connect("127.0.0.1", port..=port, "run", b"mine", second).unwrap_err();
    assert!(error.to_string().contains("secret"), "{error}");
    TcpStore::connect("127.0.0.1", port..=port, "run", b"theirs", second).unwrap();
}

#[test]
fn an_absent_rank_is_named_in_time_and_a_late_one_is_met() {
    let folder = Folder::new();
    let begin = Instant::now();
    let join = |rank: usize, run: &str, millis: u64| {
        let join = Join {
            timeout: Duration::from_millis(millis),
            ..Join::new(rank, 3, run)
        };
        join.over(&FileStore::new(&folder.0).unwrap())
    };
    thread::scope(|scope| {
        for rank in [0, 2] {
            let join = &join;
            scope.spawn(move || {
                let error = join(rank, "short", 1000).unwrap_err().to_string();
                assert!(error.contains("rank 1"), "{error}");
                let took = begin.elapsed();
                assert!((900..1600).contains(&(took.as_millis() as u64)), "{took:?}");
            });
        }
    });
    thread::scope(|scope| {
        for rank in 0..3 {
            let join = &join;
            scope.spawn(move || {
                if rank == 0 {
                    thread::sleep(Duration::from_millis(900));
                }
                join(rank, "late", 10_000).unwrap()
            });
        }
    });
}

#[test]
fn names_ports_and_families() {
    let server = StoreServer::start(0..=0, "127.0.0.1", "run", b"").unwrap();
    let port = server.port();
    let second = Duration::from_secs(1);
    // A name with an IPv6 address first and a listener on IPv4 alone.
    TcpStore::connect("localhost", port..=port, "run", b"", 5 * second).unwrap();
    let error = TcpStore::connect("no.such.host.invalid", 1..=1, "run", b"", second / 10);
    assert!(
        error
            .as_ref()
            .is_err_and(|e| e.to_string().contains("no.such.host.invalid")),
        "{error:?}"
    );
    if TcpListener::bind("[::1]:0").is_ok() {
        let host = |join: &mut Join| join.host = Some(String::from("::1"));
        // Bound to all interfaces: reachable under its IPv6 name.
        for seat in join(Kind::Tcp, 2, host) {
            seat.finish(Ok(()));
        }
    }
    // A port that is taken is named; a range goes on to the next.
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port();
    let error = StoreServer::start(port..=port, "127.0.0.1", "run", b"").unwrap_err();
    assert!(
        error.to_string().contains(&format!("127.0.0.1:{port}")),
        "{error}"
    );
    let next = StoreServer::start(port..=port.saturating_add(20), "127.0.0.1", "run", b"").unwrap();
    assert!(next.port() > port);
}

#[test]
fn stores_keep_and_count() {
    let folder = Folder::new();
    let server = StoreServer::start(0..=0, "127.0.0.1", "run", b"k").unwrap();
    let (port, second) = (server.port(), Duration::from_secs(1));
    let tcp = || TcpStore::connect("127.0.0.1", port..=port, "run", b"k", second).unwrap();
    let file = || FileStore::new(&folder.0).unwrap();
    let make: [&(dyn Fn() -> Box<dyn Store> + Sync); 2] =
        [&|| Box::new(tcp()), &|| Box::new(file())];
    for make in make {
        let store = make();
        assert_eq!(store.get("a", second).unwrap(), None);
        store.set("a", b"", second).unwrap();
        assert_eq!(store.get("a", second).unwrap(), Some(Vec::new()));
        let begin = Instant::now();
        assert!(store.wait("b", second / 10).is_err());
        assert!(begin.elapsed() < second);
        assert!(store.set("", b"x", second).is_err());
        assert!(store.set("a", &vec![0; (1 << 20) + 1], second).is_err());
        assert!(
            store.add("a", 1, second).is_err(),
            "an empty text is no number"
        );
        assert!(store.delete("a", second).unwrap());
        assert!(!store.delete("a", second).unwrap());
        thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(move || {
                    let store = make();
                    for _ in 0..50 {
                        store.add("n", 2, 5 * second).unwrap();
                    }
                });
            }
            scope.spawn(move || assert_eq!(make().wait("late", 5 * second).unwrap(), b"v"));
            thread::sleep(Duration::from_millis(30));
            store.set("late", b"v", second).unwrap();
        });
        assert_eq!(store.add("n", 0, second).unwrap(), 400);
        assert_eq!(store.add("n", -500, second).unwrap(), -100);
        store
            .set("n", i64::MAX.to_string().as_bytes(), second)
            .unwrap();
        assert!(store.add("n", 1, second).is_err());
    }
}

/// Bytes that are no handshake get no answer that helps, and the connection is closed.
#[test]
fn a_store_drops_noise() {
    let server = StoreServer::start(0..=0, "127.0.0.1", "run", b"").unwrap();
    let mut stream = TcpStream::connect(("127.0.0.1", server.port())).unwrap();
    stream.write_all(&[7; 200]).unwrap();
    stream
        .set_read_timeout(Some(Duration::from_secs(5)))
        .unwrap();
    let mut got = Vec::new();
    // The end may come as a reset.
    let _ = stream.read_to_end(&mut got);
    assert!(got.is_empty());
}

/// The control threads answer while the ranks compute.
#[test]
fn a_rank_that_computes_is_not_lost() {
    for kind in KINDS {
        let found = outcomes(kind, 3, |comm| {
            comm.barrier()?;
            if comm.rank() == 1 {
                thread::sleep(Duration::from_millis(2500));
            }
            comm.barrier()
        });
        found.into_iter().for_each(|outcome| outcome.unwrap());
    }
}
