//! One suite, stamped on every way to move messages: each operation, plan, world and ragged length
//! gives exactly what a serial loop gives.

#[cfg(unix)]
mod common;
#[path = "common/laws.rs"]
mod laws;
#[cfg(feature = "nccl")]
#[path = "common/nccl.rs"]
#[allow(dead_code)]
mod nccl;

#[cfg(unix)]
use std::sync::{Arc, Mutex};

use half::{bf16, f16};
use laws::{Outputs, cases, on_calls, parts};
#[cfg(unix)]
use quintet_collectives::Sockets;
use quintet_collectives::performer::{Link, Performer, View};
use quintet_collectives::plan::{CollectiveShape as S, Plan};
#[cfg(unix)]
use quintet_collectives::transport::fault::WireFaults;
use quintet_collectives::transport::fault::{Faults, Faulty};
use quintet_collectives::transport::local::World;
use quintet_collectives::transport::sim::{Delivery, Part, Sim};
#[cfg(unix)]
use quintet_collectives::transport::socket::{Kind, Seat};
use quintet_collectives::transport::{Call, Transport, Wait};
use quintet_collectives::{Algorithm, Element, Order, ReduceOp, Result};
#[cfg(feature = "nccl")]
use quintet_collectives::{Communicator, cost::Model};

fn on_sim<E: Element>(delivery: Delivery, parts: &[Part<E>]) -> Outputs<E> {
    let seed = parts.len() as u64 * 77 + parts[0].input.len() as u64;
    let outcome = Sim { delivery, seed }.run(parts)?;
    Ok((outcome.outputs, outcome.bytes))
}

/// Threads that perform the given plans, whatever a communicator would choose.
fn on_local<E: Element>(world: &World, parts: &[Part<E>]) -> Outputs<E> {
    let seats = world.seats();
    on_threads(seats.iter().map(|seat| seat.endpoint()).collect(), parts)
}

fn on_threads<E: Element, T: Transport + Send>(ends: Vec<T>, parts: &[Part<E>]) -> Outputs<E> {
    let ranks: Vec<Result<(Vec<E>, u64)>> = std::thread::scope(|scope| {
        let threads: Vec<_> = ends
            .into_iter()
            .zip(parts)
            .map(|(end, part)| {
                scope.spawn(move || {
                    let mut output = vec![E::zeroed(); part.plan.output_len(end.rank())];
                    let mut link = Link::new(end);
                    let mut view = View::Apart {
                        input: &part.input,
                        output: &mut output,
                    };
                    let (shape, n) = (part.plan.shape(), part.plan.world());
                    let call = Call::new(0, shape, n, E::DTYPE, Some(part.redop), Order::Rank);
                    let mut performer = Performer::begin(&part.plan, call, &mut link)?;
                    while !performer.poll(&mut link, &mut view)? {
                        let mut wait = Wait {
                            all: true,
                            ..Wait::default()
                        };
                        performer.wait(&mut wait);
                        link.transport
                            .park(&wait, std::time::Duration::from_secs(20));
                    }
                    Ok((output, link.bytes))
                })
            })
            .collect();
        threads
            .into_iter()
            .map(|thread| thread.join().unwrap())
            .collect()
    });
    Ok(ranks
        .into_iter()
        .collect::<Result<Vec<_>>>()?
        .into_iter()
        .unzip())
}

#[cfg(target_os = "linux")]
fn on_socket_calls<E: Element>(kind: Kind, parts: &[Part<E>]) -> Outputs<E> {
    on_calls(socket_ends(kind, false, parts.len())?, parts)
}

/// On device memory, as far as the stand-in for NCCL has such, over these endpoints.
#[cfg(feature = "nccl")]
fn on_nccl<E: Element, T: Transport + Send + 'static>(
    ends: Vec<T>,
    parts: &[Part<E>],
) -> Outputs<E> {
    let library = nccl::library();
    let rank = |end: T, part: &Part<E>| {
        let (plan, me) = (&part.plan, end.rank());
        let forced = format!("{}:{}", plan.shape().operation(), plan.algorithm());
        let model = Model {
            overrides: forced.parse()?,
            ..Model::default()
        };
        // NCCL folds as it likes; what these laws fold comes out the same.
        let end = quintet_collectives::nccl::Nccl::new(end, library.clone());
        let comm = Communicator::new(end)
            .with_order(Order::Any)
            .with_model(model);
        let mut output = vec![E::zeroed(); plan.output_len(me)];
        nccl::call(
            &comm,
            &library,
            plan.shape().clone(),
            part.redop,
            &part.input,
            &mut output,
        )?;
        Ok((output, comm.stats().bytes))
    };
    let ranks: Vec<Result<(Vec<E>, u64)>> = std::thread::scope(|scope| {
        let pairs = ends.into_iter().zip(parts);
        let threads: Vec<_> = pairs
            .map(|(end, part)| scope.spawn(|| rank(end, part)))
            .collect();
        threads
            .into_iter()
            .map(|thread| thread.join().unwrap())
            .collect()
    });
    Ok(ranks
        .into_iter()
        .collect::<Result<Vec<_>>>()?
        .into_iter()
        .unzip())
}

/// Threads whose messages come late and in another order, are refused at first, and who wake for nothing.
fn on_faulty<E: Element>(parts: &[Part<E>]) -> Outputs<E> {
    let seats = World::new(parts.len())?.seats();
    let faulty = |seat: &quintet_collectives::transport::local::Seat| {
        let seed = (seat.rank() * 1000 + parts[0].input.len()) as u64;
        Faulty::new(seat.endpoint(), Faults::some(seed))
    };
    on_threads(seats.iter().map(faulty).collect(), parts)
}

/// The same over sockets: connected once for each kind and world, a group of its own each time.
/// `short`: their reads and writes stop anywhere.
#[cfg(unix)]
fn on_sockets<E: Element>(kind: Kind, short: bool, parts: &[Part<E>]) -> Outputs<E> {
    on_threads(socket_ends(kind, short, parts.len())?, parts)
}

#[cfg(unix)]
fn socket_ends(kind: Kind, short: bool, world: usize) -> Result<Vec<Sockets>> {
    static RUNS: Mutex<Vec<(Kind, bool, Arc<Vec<Seat>>)>> = Mutex::new(Vec::new());
    let mut runs = RUNS.lock().unwrap();
    let known = runs
        .iter()
        .find(|(k, s, seats)| (*k, *s, seats.len()) == (kind, short, world));
    let seats = match known {
        Some((_, _, seats)) => seats.clone(),
        None => {
            let seats = Arc::new(common::join(kind, world, |join| {
                join.window = 1 << 28;
                join.faults = short.then_some(WireFaults {
                    seed: join.rank as u64,
                    short,
                    ..WireFaults::default()
                });
            }));
            runs.push((kind, short, seats.clone()));
            seats
        }
    };
    // Of all ranks before anybody else's: the k-th of one belongs to the k-th of the others.
    seats.iter().map(Seat::endpoint).collect()
}

fn law<E: Element>(
    world: usize,
    len: usize,
    redop: ReduceOp,
    f: impl Fn(i32) -> E + Copy,
    run: &mut dyn FnMut(&[Part<E>]) -> Outputs<E>,
) {
    for (shapes, expected) in cases(world, len, redop) {
        for algorithm in Algorithm::ALL {
            let Some(parts) = parts(&shapes, algorithm, redop, f) else {
                continue;
            };
            let (outputs, bytes) = run(&parts).unwrap();
            for (rank, output) in outputs.iter().enumerate() {
                let expected: Vec<E> = expected[rank].iter().map(|&x| f(x)).collect();
                assert_eq!(
                    output, &expected,
                    "{:?} {algorithm} rank {rank} of {world}",
                    shapes[rank]
                );
                assert_eq!(bytes[rank], parts[rank].plan.bytes_sent(rank, E::DTYPE));
            }
        }
    }
}

macro_rules! laws {
    ($name:ident, $worlds:expr, $run:expr) => {
        mod $name {
            use super::*;

            #[test]
            fn every_operation_plan_world_and_length() {
                for world in $worlds {
                    for len in [0, 1, world - 1, world, world + 1, 40] {
                        law(world, len, ReduceOp::Sum, |x| x, &mut $run);
                    }
                    law(world, 9, ReduceOp::Min, f64::from, &mut $run);
                    law(world, 9, ReduceOp::Max, |x| x as f32, &mut $run);
                    law(world, 5, ReduceOp::Prod, i64::from, &mut |p: &[Part<
                        i64,
                    >]| {
                        if p.len() <= 9 {
                            ($run)(p)
                        } else {
                            on_sim(Delivery::Rendezvous, p)
                        }
                    });
                }
            }

            #[test]
            fn sixteen_bits_and_bytes() {
                for world in [1usize, 2, 5, 8] {
                    law(
                        world,
                        11,
                        ReduceOp::Sum,
                        |x| bf16::from_f32(x as f32),
                        &mut $run,
                    );
                    law(
                        world,
                        11,
                        ReduceOp::Sum,
                        |x| f16::from_f32(x as f32),
                        &mut $run,
                    );
                    law(world, 11, ReduceOp::Sum, |x| x as u8, &mut $run);
                }
            }
        }
    };
}

const WORLDS: [usize; 12] = [1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 16, 17];

laws!(sim_rendezvous, WORLDS, |p: &[Part<_>]| on_sim(
    Delivery::Rendezvous,
    p
));
laws!(sim_bounded, WORLDS, |p: &[Part<_>]| on_sim(
    Delivery::Bounded(16),
    p
));
laws!(local, WORLDS, |p: &[Part<_>]| on_local(
    &World::new(p.len())?,
    p
));
#[cfg(unix)]
laws!(tcp, 1usize..=9, |p: &[Part<_>]| on_sockets(
    Kind::Tcp,
    false,
    p
));
#[cfg(unix)]
laws!(unix, 1usize..=9, |p: &[Part<_>]| on_sockets(
    Kind::Unix,
    false,
    p
));
#[cfg(unix)]
laws!(tcp_short, [2usize, 3, 5], |p: &[Part<_>]| on_sockets(
    Kind::Tcp,
    true,
    p
));
#[cfg(unix)]
laws!(unix_short, [2usize, 5], |p: &[Part<_>]| on_sockets(
    Kind::Unix,
    true,
    p
));
laws!(faulty, [1usize, 2, 3, 5], |p: &[Part<_>]| on_faulty(p));
#[cfg(target_os = "linux")]
laws!(shm, WORLDS, |p: &[Part<_>]| on_sockets(Kind::Shm, false, p));
laws!(local_calls, WORLDS, |p: &[Part<_>]| {
    let world = World::new(p.len())?;
    on_calls(
        world.seats().iter().map(|seat| seat.endpoint()).collect(),
        p,
    )
});
#[cfg(target_os = "linux")]
laws!(shm_calls, WORLDS, |p: &[Part<_>]| on_socket_calls(
    Kind::Shm,
    p
));
#[cfg(feature = "nccl")]
laws!(nccl_local, [1usize, 2, 3, 5], |p: &[Part<_>]| {
    let world = World::new(p.len())?;
    on_nccl(
        world.seats().iter().map(|seat| seat.endpoint()).collect(),
        p,
    )
});
#[cfg(all(feature = "nccl", unix))]
laws!(nccl_unix, [1usize, 3], |p: &[Part<_>]| on_nccl(
    socket_ends(Kind::Unix, false, p.len())?,
    p
));
laws!(local_tight, [1usize, 2, 3, 8], |p: &[Part<_>]| on_local(
    &World::with_buffer(p.len(), 1)?,
    p
));

#[test]
fn a_simulated_mismatch_names_both_calls() {
    let plan = |len| Plan::new(S::AllReduce { len }, Algorithm::Ring, 2).unwrap();
    let part = |len| Part {
        plan: plan(len),
        redop: ReduceOp::Sum,
        input: vec![0f32; len],
    };
    let error = Sim {
        delivery: Delivery::Rendezvous,
        seed: 3,
    }
    .run(&[part(4), part(5)])
    .unwrap_err();
    let text = error.to_string();
    assert!(
        text.contains("all_reduce(f32 x 4") && text.contains("all_reduce(f32 x 5"),
        "{text}"
    );
}
