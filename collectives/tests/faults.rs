//! Connections that end or lie at a chosen byte: every rank says so in time, and none goes on with what
//! it got.
#![cfg(unix)]

mod common;

use std::thread;
use std::time::{Duration, Instant};

use common::join;
use quintet_collectives::transport::fault::WireFaults;
use quintet_collectives::transport::socket::Kind;
use quintet_collectives::{Error, ReduceOp, Result};

/// What each rank of three came to, working on until something fails, where `faults` are those of rank 0.
fn outcomes(kind: Kind, payload_crc: bool, faults: WireFaults) -> Vec<Result<()>> {
    let seats = join(kind, 3, |join| {
        join.payload_crc = payload_crc;
        join.faults = (join.rank == 0).then_some(faults);
    });
    thread::scope(|scope| {
        let threads: Vec<_> = seats
            .into_iter()
            .map(|seat| {
                scope.spawn(move || {
                    let comm = seat.communicator()?;
                    let mut outcome = Ok(());
                    // Enough turns for any byte that is chosen here to be reached.
                    for turn in 0..2000 {
                        let mut x = vec![1f32; [1, 100, 7000][turn % 3]];
                        outcome = comm.all_reduce(&mut x, ReduceOp::Sum);
                        if outcome.is_err() {
                            break;
                        }
                        assert!(x.iter().all(|x| *x == 3.0), "a wrong sum");
                    }
                    seat.finish(match &outcome {
                        Ok(()) => Ok(()),
                        Err(error) => Err(error),
                    });
                    outcome
                })
            })
            .collect();
        threads.into_iter().map(|t| t.join().unwrap()).collect()
    })
}

/// All ranks fail within two seconds and name an end of the link between 0 and 1.
fn all_name_the_link(kind: Kind, payload_crc: bool, faults: WireFaults) {
    let begin = Instant::now();
    for (rank, outcome) in outcomes(kind, payload_crc, faults).into_iter().enumerate() {
        let error = outcome.expect_err("a fault is an error on every rank");
        let Error::PeerLost { rank: lost, .. } = error else {
            panic!("{faults:?}, rank {rank}: {error}");
        };
        assert!(lost < 2, "{faults:?}, rank {rank}: {lost}");
    }
    let took = begin.elapsed();
    assert!(took < Duration::from_secs(10), "{faults:?}: {took:?}");
}

#[test]
fn a_connection_that_ends_anywhere_is_a_lost_peer() {
    for kind in [Kind::Tcp, Kind::Unix] {
        for byte in [0, 1, 63, 64, 65, 141, 142, 1000, 50_000, 1_000_003] {
            let cut = Some((1, byte));
            all_name_the_link(
                kind,
                false,
                WireFaults {
                    cut,
                    ..WireFaults::default()
                },
            );
        }
    }
}

#[test]
fn a_flipped_bit_of_any_header_is_seen() {
    for byte in (0..64).step_by(3).chain(64..141).step_by(2) {
        let flipped = Some((1, byte));
        all_name_the_link(
            Kind::Unix,
            false,
            WireFaults {
                flipped,
                ..WireFaults::default()
            },
        );
    }
}

#[test]
fn a_flipped_bit_of_a_payload_is_seen_where_it_carries_a_checksum() {
    for byte in (141..600).step_by(41).chain([20_000, 300_001]) {
        let flipped = Some((1, byte));
        let short = byte % 2 == 0;
        let faults = WireFaults {
            flipped,
            short,
            seed: byte,
            ..WireFaults::default()
        };
        all_name_the_link(Kind::Tcp, true, faults);
    }
}
