//! Long messages over sockets, which go from the caller's memory to the caller's memory: right in pieces of any length,
//! beside those of other groups on the same connection, and after somebody has given up in the middle.
#![cfg(unix)]

mod common;

use std::thread;
use std::time::{Duration, Instant};

use common::join;
use quintet_collectives::cost::{Model, Topology};
use quintet_collectives::plan::{Hosts, Operation};
use quintet_collectives::transport::fault::WireFaults;
use quintet_collectives::transport::socket::{Kind, Seat, Sockets};
use quintet_collectives::transport::{Call, Message, Sent, Tag, Transport, Wait};
use quintet_collectives::{
    Algorithm, CollectiveShape, Communicator, DType, Error, Order, ReduceOp, Result,
};

type Comm = Communicator<Sockets>;

const KINDS: [Kind; 2] = [Kind::Tcp, Kind::Unix];

fn each(seats: Vec<Seat>, body: impl Fn(&Comm) -> Result<()> + Sync) {
    thread::scope(|scope| {
        for seat in seats {
            let body = &body;
            let limit = Duration::from_secs(40);
            scope.spawn(move || seat.run(|comm| body(&comm.with_deadline(limit))).unwrap());
        }
    });
}

/// What rank `rank` brings: small whole numbers, so that no sum is rounded.
fn mine(rank: usize, len: usize, turn: usize) -> Vec<f32> {
    let x = (0..len).map(|i| ((i * 7 + rank * 13 + turn) % 101) as f32);
    x.collect()
}

fn sums(comm: &Comm, lens: &[usize]) -> Result<()> {
    let (n, me) = (comm.world(), comm.rank());
    for (turn, &len) in lens.iter().enumerate() {
        let x = mine(me, len, turn);
        let mut expected = vec![0f32; len];
        for rank in 0..n {
            let theirs = mine(rank, len, turn);
            expected
                .iter_mut()
                .zip(theirs)
                .for_each(|(sum, x)| *sum += x);
        }
        let mut apart = vec![0f32; len];
        comm.all_reduce_into(&x, &mut apart, ReduceOp::Sum)?;
        assert!(apart == expected, "{len} apart");
        let mut within = x.clone();
        comm.all_reduce(&mut within, ReduceOp::Sum)?;
        assert!(within == expected, "{len} in place");
        let mut all = vec![0f32; len * n];
        comm.all_gather(&x, &mut all)?;
        for rank in 0..n {
            assert!(
                all[rank * len..][..len] == mine(rank, len, turn),
                "{len} of {rank}"
            );
        }
        let mut root = x.clone();
        comm.broadcast(&mut root, n - 1)?;
        assert!(root == mine(n - 1, len, turn), "{len} broadcast");
        let mut part = vec![0f32; len];
        comm.reduce_scatter(&all, &mut part, ReduceOp::Max)?;
        assert!(part == mine(me, len, turn), "{len} scattered");
    }
    Ok(())
}

/// Sums by pairs in pieces, which are as many rounds, of which each writes where others will, or did, send from.
#[test]
fn long_sums_in_pieces_arrive_whole() {
    let model = |text: &str| Model {
        overrides: text.parse().unwrap(),
        ..Model::default()
    };
    for (kind, world) in KINDS.into_iter().flat_map(|kind| [(kind, 2), (kind, 3)]) {
        for text in ["all_reduce:pairwise/100k", "all_reduce:pairwise/256k"] {
            each(join(kind, world, |_| {}), |comm| {
                let comm = comm.split(0, comm.rank() as i64)?.with_model(model(text));
                sums(&comm, &[1, 70_001, 400_000])
            });
        }
    }
}

/// Where it is known that all are on one host a sum that does not fit a cache goes in pieces by itself, and only there.
#[test]
fn ranks_of_one_host_take_long_sums_in_pieces() {
    const LEN: usize = 4 << 20;
    let model = |hosts| Model {
        topology: hosts,
        ..Model::default()
    };
    let shape = CollectiveShape::AllReduce { len: LEN };
    let one = model(Some(Topology::new(Hosts::blocks(2, 2))));
    let two = model(Some(Topology::new(Hosts::blocks(2, 1))));
    for (model, pieces) in [(&one, true), (&two, false), (&model(None), false)] {
        let spec = model.choose(&shape, 2, DType::F32, Order::Rank).unwrap();
        assert_eq!(spec.algorithm, Algorithm::Pairwise);
        assert_eq!(spec.chunk_len.is_some(), pieces);
    }
    for kind in KINDS {
        each(join(kind, 2, |_| {}), |comm| {
            let comm = comm.split(0, comm.rank() as i64)?.with_model(one.clone());
            sums(&comm, &[LEN])
        });
    }
}

#[test]
fn long_messages_arrive_whole_however_they_are_cut() {
    for kind in KINDS {
        for world in [2, 3] {
            let lens = [16_383, 16_384, 40_001, 300_000];
            each(join(kind, world, |_| {}), |comm| sums(comm, &lens));
            let short = |seed| WireFaults {
                short: true,
                seed,
                ..WireFaults::default()
            };
            let seats = join(kind, world, |join| {
                join.faults = Some(short(join.rank as u64))
            });
            each(seats, |comm| sums(comm, &[20_000, 70_001]));
        }
    }
}

/// Elements beyond any socket's buffers.
const BEYOND: usize = 12 << 20;

#[test]
fn groups_share_a_connection_while_one_has_a_long_message_on_it() {
    for kind in KINDS {
        each(join(kind, 2, |_| {}), |comm| {
            let other = comm.split(0, -(comm.rank() as i64))?;
            let (lens, many) = ([400_000, 20_000, 900_001], [1, 20_000, 1, 100_000, 3]);
            thread::scope(|scope| {
                let thread = scope.spawn(|| (0..3).try_for_each(|_| sums(comm, &lens)));
                (0..6).try_for_each(|_| sums(&other, &many))?;
                thread.join().unwrap()
            })?;
            // One calls late: what the other sends him meanwhile keeps nobody else from going on.
            thread::scope(|scope| {
                let thread = scope.spawn(|| {
                    if comm.rank() == 0 {
                        thread::sleep(Duration::from_millis(300));
                    }
                    let mut x = vec![1f32; BEYOND];
                    comm.all_reduce(&mut x, ReduceOp::Sum)?;
                    assert!(x.iter().all(|x| *x == 2.0));
                    Ok(())
                });
                thread::sleep(Duration::from_millis(50));
                sums(&other, &[5, 30_000])?;
                thread.join().unwrap()
            })
        });
    }
}

#[test]
fn who_gives_up_in_the_middle_leaves_the_connection_to_others() {
    for kind in KINDS {
        each(join(kind, 2, |_| {}), |comm| {
            let other = comm.split(0, comm.rank() as i64)?;
            let given_up = comm.split(0, comm.rank() as i64)?;
            if comm.rank() == 0 {
                let brief = given_up.with_deadline(Duration::from_millis(150));
                let error = brief.all_reduce(&mut vec![1f32; BEYOND], ReduceOp::Sum);
                assert!(
                    matches!(error, Err(Error::Timeout { peer: Some(1), .. })),
                    "{error:?}"
                );
            } else {
                thread::sleep(Duration::from_millis(300));
            }
            sums(&other, &[7, 100_000, 1_000_000])
        });
    }
}

/// All that a rank sent is to be had after it has left, the last of it too, which comes together with the end of the
/// connection.
#[test]
fn what_a_rank_sent_before_it_left_is_taken_whole() {
    const LEN: usize = 134_925;
    let sent: Vec<u8> = (0..LEN).map(|i| (i % 251) as u8).collect();
    for kind in KINDS {
        let mut seats = join(kind, 2, |_| {});
        let (one, zero) = (seats.pop().unwrap(), seats.pop().unwrap());
        let mut end = one.endpoint().unwrap();
        end.announce(&gather(LEN)).unwrap();
        send(&mut end, &sent);
        // It stays until the other has all.
        let leaving = thread::spawn(move || drop((end, one)));
        thread::sleep(Duration::from_millis(100));

        let mut end = zero.endpoint().unwrap();
        end.announce(&gather(LEN)).unwrap();
        let mut got = vec![0; LEN];
        let came = take(&mut end, &mut got);
        assert!(came == LEN && got == sent, "{kind:?}: {came} of {LEN}");
        drop((end, zero));
        leaving.join().unwrap();
    }
}

/// A call of a group of two, with so many bytes of each.
fn gather(len: usize) -> Call {
    Call {
        sequence: 0,
        operation: Operation::Gather,
        dtype: DType::U8,
        len: 2 * len,
        counts: 0,
        root: Some(0),
        redop: None,
        order: Order::Rank,
        site: None,
    }
}

/// Sends all of it, as long as the kernel takes it.
fn send(end: &mut Sockets, bytes: &[u8]) {
    let wait = Wait {
        send: vec![0],
        ..Wait::default()
    };
    for _ in 0..20 {
        match end.send_along(0, TAG, DType::U8, bytes).unwrap() {
            Sent::All => return,
            Sent::Part { .. } => end.park(&wait, Duration::from_secs(1)),
            Sent::Never => break,
        }
    }
    panic!("{} bytes do not go", bytes.len());
}

/// Takes a message of rank 1, of as many bytes as there is room for, in parts; how many came before nothing did.
fn take(end: &mut Sockets, room: &mut [u8]) -> usize {
    let wait = Wait {
        recv: vec![(1, TAG)],
        ..Wait::default()
    };
    let (of, mut at) = ((DType::U8, room.len()), 0);
    for _ in 0..20 {
        at += end
            .recv_along(1, TAG, of, &mut room[at..])
            .unwrap()
            .unwrap();
        if at == room.len() {
            break;
        }
        end.park(&wait, Duration::from_secs(1));
    }
    at
}

/// Looks at what has come, for whichever group, until something can be expected to be there.
fn look(end: &mut Sockets) {
    end.park(&Wait::default(), Duration::from_millis(200));
}

const TAG: Tag = Tag::Collective(0);

/// Of two messages that are alike the first may have come whole, read by another group's thread, before its owner looks;
/// the second is then not taken for it.
#[test]
fn messages_that_are_alike_keep_their_order() {
    const LEN: usize = 100_000;
    for kind in KINDS {
        let mut seats = join(kind, 2, |_| {});
        let (one, zero) = (seats.pop().unwrap(), seats.pop().unwrap());
        let (mut from, mut to) = (one.endpoint().unwrap(), zero.endpoint().unwrap());
        let mut other = to.subgroup(&[0, 1], "other").unwrap();
        from.announce(&gather(LEN)).unwrap();
        send(&mut from, &[1; LEN]);
        look(&mut other);
        to.announce(&gather(LEN)).unwrap();
        // With what the other group waits for its thread reads the head of the second, and leaves it there.
        let (short, mut from_other) = (Tag::User(5), from.subgroup(&[0, 1], "other").unwrap());
        let message = Message::new(short, &[7u8], Vec::new());
        assert!(from_other.try_send(0, message).unwrap().is_none());
        send(&mut from, &[2; LEN]);
        thread::sleep(Duration::from_millis(100));
        let wait = Wait {
            recv: vec![(1, short)],
            ..Wait::default()
        };
        other.park(&wait, Duration::from_secs(5));
        assert!(other.try_recv(1, short).unwrap().is_some());

        let mut room = vec![0; LEN];
        let early = to.recv_along(1, TAG, (DType::U8, LEN), &mut room).unwrap();
        assert_eq!(early, Some(0), "{kind:?}");
        let first = to.try_recv(1, TAG).unwrap().unwrap();
        assert!(first.elements::<u8>() == [1; LEN], "{kind:?}");
        let came = take(&mut to, &mut room);
        assert!(came == LEN && room == [2; LEN], "{kind:?}: {came}");
    }
}

/// Whoever waits behind a payload that another group has claimed is not kept when that group fails.
#[test]
fn a_group_that_fails_lets_others_have_the_connection() {
    const LEN: usize = 100_000;
    for kind in KINDS {
        let mut seats = join(kind, 2, |_| {});
        let (one, zero) = (seats.pop().unwrap(), seats.pop().unwrap());
        let (mut from, mut to) = (one.endpoint().unwrap(), zero.endpoint().unwrap());
        let mut from_other = from.subgroup(&[0, 1], "other").unwrap();
        let mut other = to.subgroup(&[0, 1], "other").unwrap();
        for end in [&mut from, &mut to] {
            end.announce(&gather(LEN)).unwrap();
        }
        let room = &mut [0; 10];
        assert_eq!(
            to.recv_along(1, TAG, (DType::U8, LEN), room).unwrap(),
            Some(0)
        );
        send(&mut from, &[1; LEN]);
        look(&mut to);
        assert_eq!(
            to.recv_along(1, TAG, (DType::U8, LEN), room).unwrap(),
            Some(10)
        );
        let short = Message::new(Tag::User(5), &[7u8], Vec::new());
        assert!(from_other.try_send(0, short).unwrap().is_none());

        thread::scope(|scope| {
            let (begin, tag) = (Instant::now(), Tag::User(5));
            let waiter = scope.spawn(move || {
                let wait = Wait {
                    recv: vec![(1, tag)],
                    ..Wait::default()
                };
                for _ in 0..5 {
                    if let Some(message) = other.try_recv(1, tag).unwrap() {
                        return message;
                    }
                    other.park(&wait, Duration::from_secs(5));
                }
                panic!("it never came");
            });
            thread::sleep(Duration::from_millis(200));
            assert!(!waiter.is_finished());
            to.control().poison(Error::Aborted { rank: 0 });
            assert_eq!(waiter.join().unwrap().elements::<u8>(), [7]);
            assert!(
                begin.elapsed() < Duration::from_secs(3),
                "{:?}",
                begin.elapsed()
            );
        });
    }
}

/// What is longer than its receiver expects is an error at once, as a short message is.
#[test]
fn a_long_message_of_another_length_is_named() {
    for kind in KINDS {
        each(join(kind, 2, |_| {}), |comm| {
            let (me, len) = (comm.rank(), 100_000);
            let expected = if me == 0 { len } else { len - 10 };
            let counts = |own: usize, other: usize| match me {
                0 => [own, other],
                _ => [other, own],
            };
            let (x, mut y) = (vec![1f32; len + 1], vec![0f32; expected + 1]);
            let calls = comm.split(0, me as i64)?;
            let outcome = calls.all_to_all_v(&x, &counts(1, len), &mut y, &counts(1, expected));
            match (me, outcome) {
                (0, _)
                | (
                    1,
                    Err(Error::Message {
                        rank: 1, peer: 0, ..
                    }),
                ) => Ok(()),
                (_, other) => panic!("rank {me}: {other:?}"),
            }
        });
    }
}
