//! A world of one, which every machine with a GPU has.

use std::ffi::{CStr, c_char};
use std::process::Command;
use std::time::Duration;

use quintet_collectives::transport::local::World;

use super::*;

/// Runs `body` as the one rank of a world.
fn alone(body: impl FnOnce(&Found, &Comm) -> Result<()>) {
    let (found, world) = (found(), World::new(1).unwrap());
    let seat = world.seats().into_iter().next().unwrap();
    let comm = found.comm(seat.endpoint());
    body(&found, &comm).unwrap();
    drop(comm);
    seat.finish(Ok(()));
}

/// Every operation that moves something, on `n` elements; alone, each gives what it is given.
fn shapes(n: usize) -> Vec<Shape> {
    let counts = || vec![n];
    vec![
        Shape::AllReduce { len: n },
        Shape::ReduceScatter { counts: counts() },
        Shape::AllGather { counts: counts() },
        Shape::Broadcast { len: n, root: 0 },
        Shape::Reduce { len: n, root: 0 },
        Shape::Gather {
            counts: counts(),
            root: 0,
        },
        Shape::Scatter {
            counts: counts(),
            root: 0,
        },
        Shape::AllToAll { len: n },
        Shape::AllToAllV {
            send: counts(),
            recv: counts(),
        },
    ]
}

fn given_back<E: Element>(comm: &Comm, lane: &Arc<CudaLane>, of: impl Fn(i32) -> E) -> Result<()> {
    for n in [1000, 1, 0] {
        let x: Vec<E> = (0..n).map(|i| of(i as i32 % 100)).collect();
        for shape in shapes(n) {
            for &redop in folds(&shape) {
                let got = call(comm, lane, (shape.clone(), redop), &x, n)?;
                assert_eq!(got, x, "{shape:?} {redop}");
            }
        }
        for shape in shapes(n).into_iter().take(5) {
            let x_in_place = Memory::of(lane, &x);
            let both = [x_in_place.whole(); 2];
            comm.on_device(shape.clone(), ReduceOp::Sum, both, lane.clone())?;
            assert_eq!(x_in_place.read(), x, "{shape:?} in place");
        }
    }
    Ok(())
}

#[test]
fn every_operation_type_and_fold() {
    alone(|found, comm| {
        let lane = found.lane();
        each_type!(given_back(comm, &lane));
        let none = Memory::<u8>::of(&lane, &[]);
        comm.on_device(Shape::Barrier, ReduceOp::Sum, [none.whole(); 2], lane)
    });
}

#[test]
fn split_and_started() {
    alone(|found, comm| {
        let part = comm.split(7, 0)?.with_order(Order::Any);
        let again = part.subgroup(part.group(), "again")?;
        let mut started = Vec::new();
        for (round, group) in [comm, &part, &again]
            .into_iter()
            .cycle()
            .take(9)
            .enumerate()
        {
            let (lane, x) = (found.lane(), vec![round as f32; 10_000]);
            let memory = Memory::of(&lane, &x);
            let shape = Shape::AllReduce { len: x.len() };
            let both = [memory.whole(); 2];
            started.push((
                x,
                group.start_on_device(memory, shape, ReduceOp::Sum, both, lane)?,
            ));
        }
        for (x, pending) in started {
            assert_eq!(pending.wait()?.read(), x);
        }
        Ok(())
    });
}

#[test]
fn every_drop_order() {
    alone(|found, comm| {
        let lane = found.lane();
        for order in [
            [0, 1, 2],
            [0, 2, 1],
            [1, 0, 2],
            [1, 2, 0],
            [2, 0, 1],
            [2, 1, 0],
        ] {
            let world = comm.subgroup(comm.group(), "everyone")?;
            let half = world.split(0, 0)?;
            let unused = half.split(0, 0)?;
            for group in [&world, &half] {
                let shape = Shape::AllReduce { len: 3 };
                let got = call(group, &lane, (shape, ReduceOp::Sum), &[1i32, 2, 3], 3)?;
                assert_eq!(got, [1, 2, 3]);
            }
            let mut groups = [world, half, unused].map(Some);
            for at in order {
                drop(groups[at].take());
            }
        }
        Ok(())
    });
    // With something under way, which nobody waits for.
    alone(|found, comm| {
        let part = comm.subgroup(comm.group(), "dropped")?;
        let lane = found.lane();
        let memory = Memory::of(&lane, &vec![1f32; 1 << 20]);
        let (shape, both) = (Shape::AllReduce { len: 1 << 20 }, [memory.whole(); 2]);
        let pending = part.start_on_device(memory, shape, ReduceOp::Sum, both, lane)?;
        drop(part);
        drop(pending);
        let lane = found.lane();
        let sum = (Shape::AllReduce { len: 1 }, ReduceOp::Sum);
        call(comm, &lane, sum, &[1i32], 1).map(|got| assert_eq!(got, [1]))
    });
}

#[test]
fn an_abort_ends_it_and_nothing_else() {
    alone(|found, comm| {
        let sum = |comm: &Comm| {
            let shape = Shape::AllReduce { len: 5 };
            call(comm, &found.lane(), (shape, ReduceOp::Sum), &[2f64; 5], 5)
        };
        assert_eq!(sum(comm)?, [2.0; 5]);
        let lane = found.lane();
        let memory = Memory::of(&lane, &vec![1f32; 1 << 22]);
        let (shape, both) = (Shape::AllReduce { len: 1 << 22 }, [memory.whole(); 2]);
        let pending = comm.start_on_device(memory, shape, ReduceOp::Sum, both, lane)?;
        comm.abort();
        // It may have been over before.
        let outcome = pending.wait();
        assert!(
            matches!(outcome, Ok(_) | Err(Error::Aborted { .. })),
            "{:?}",
            outcome.err()
        );
        assert_eq!(sum(comm).unwrap_err(), Error::Aborted { rank: 0 });
        let world = World::new(1)?;
        let seat = world.seats().into_iter().next().unwrap();
        assert_eq!(sum(&found.comm(seat.endpoint()))?, [2.0; 5]);
        seat.finish(Ok(()));
        Ok(())
    });
}

#[test]
fn a_deadline_aborts_what_is_under_way() {
    alone(|found, comm| {
        // A first use, which takes NCCL longer than this; the stand-in is told to take for ever.
        let _late = (!on_a_gpu()).then(|| Stalled::new(found));
        let short = comm.subgroup(comm.group(), "short")?;
        let short = short.with_deadline(Duration::from_millis(1));
        let sum = || {
            let shape = Shape::AllReduce { len: 1 };
            call(&short, &found.lane(), (shape, ReduceOp::Sum), &[1i32], 1)
        };
        // What was aborted is not taken up again.
        for _ in 0..2 {
            let error = sum().unwrap_err();
            let timeout = matches!(
                error,
                Error::Timeout {
                    op: "all_reduce",
                    ..
                }
            );
            assert!(timeout, "{error}");
        }
        Ok(())
    });
    alone(|found, comm| {
        let shape = Shape::AllReduce { len: 1 };
        call(comm, &found.lane(), (shape, ReduceOp::Sum), &[1i32], 1).map(drop)
    });
}

/// The stand-in has no kernel end until this is dropped.
struct Stalled<'a>(&'a Found);

impl<'a> Stalled<'a> {
    fn new(found: &'a Found) -> Self {
        tell(found, c"stall=1");
        Self(found)
    }
}

impl Drop for Stalled<'_> {
    fn drop(&mut self) {
        tell(self.0, c"stall=0");
    }
}

fn tell(found: &Found, words: &CStr) {
    type Set = unsafe extern "C" fn(*const c_char) -> bool;
    // SAFETY: it is loaded already; the symbol's type.
    unsafe {
        let library = libloading::Library::new(found.library.path()).unwrap();
        assert!(library.get::<Set>(b"quintetNcclOnHostSet\0").unwrap()(
            words.as_ptr()
        ));
    }
}

/// The device is of no use after it, so a process of its own does it.
#[test]
fn what_the_device_finds_wrong_is_told() {
    let mut command = Command::new(env::current_exe().unwrap());
    command.args([
        "--exact",
        "alone::memory_that_is_none",
        "--ignored",
        "--nocapture",
    ]);
    let output = command.output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(
        output.status.success() && said.contains("1 passed"),
        "{said}"
    );
    println!(
        "{}",
        said.lines()
            .find(|line| line.contains("told: "))
            .unwrap_or("")
    );
}

#[test]
#[ignore = "it leaves the device useless: what_the_device_finds_wrong_is_told starts it"]
fn memory_that_is_none() {
    let (found, world) = (found(), World::new(1).unwrap());
    let seat = world.seats().into_iter().next().unwrap();
    let comm = found.comm(seat.endpoint());
    let lane = found.lane();
    let y = Memory::of(&lane, &[0f32; 100]);
    // SAFETY: none, on purpose: the device refuses to read there.
    let nowhere = unsafe { Span::new::<f32>(1 << 12, 100) };
    let shape = Shape::AllReduce { len: 100 };
    let sum = comm.on_device(shape, ReduceOp::Sum, [nowhere, y.whole()], lane);
    let error = sum.unwrap_err();
    println!("told: {error}");
    assert!(
        matches!(error, Error::Nccl { .. } | Error::System { .. }),
        "{error}"
    );
}
