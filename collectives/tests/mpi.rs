//! The laws of transports over MPI. This program is one rank: `.ci/launchers` has mpirun start it in worlds of 1
//! to 4, with what it shall do.
//!
//! ```text
//! mpirun -n 4 PROGRAM              every law; ends well
//! mpirun -n 4 PROGRAM fails        rank 1 ends with an error, and the others hear which
//! mpirun -n 4 PROGRAM dies         rank 1 kills itself; what is left is up to MPI
//! PROGRAM alone                    as rank of more than MPI has started
//! PROGRAM funneled | serialized    the program initialises MPI with too few threads itself
//! ```

#[path = "common/laws.rs"]
mod laws;

use std::thread;
use std::time::{Duration, Instant};

use half::bf16;
use mpi::Threading;
use quintet_collectives::transport::socket::{Join, Kind, Seat};
use quintet_collectives::transport::{local, mpi as by_mpi};
use quintet_collectives::{
    Algorithm, Communicator, Element, Error, Order, ProcessGroup, ReduceOp, Result, Sockets,
};

fn main() {
    let asked = std::env::args().nth(1);
    match asked.as_deref() {
        None => {
            let seat = by_mpi::join().unwrap();
            laws(&seat);
            over(seat);
        }
        Some("fails") => fails(),
        Some("dies") => dies(),
        Some("alone") => alone(),
        Some("funneled") => refused(Threading::Funneled),
        Some("serialized") => refused(Threading::Serialized),
        Some(other) => panic!("{other} is nothing to do"),
    }
}

fn laws(seat: &Seat) {
    let world = seat.world();
    let mut count = 0;
    // The last is longer than what MPI sends without asking.
    for len in [0, 1, world - 1, world, world + 1, 40, 3001] {
        count += law(seat, len, ReduceOp::Sum, |x| x);
    }
    count += law(seat, 9, ReduceOp::Min, f64::from);
    count += law(seat, 9, ReduceOp::Max, |x| x as f32);
    count += law(seat, 5, ReduceOp::Prod, i64::from);
    count += law(seat, 11, ReduceOp::Sum, |x| bf16::from_f32(x as f32));
    count += law(seat, 11, ReduceOp::Sum, |x| x as u8);
    assert!(count > 12 * 10, "{count}");
    let rounded = bits(seat);
    let laws: [(&str, fn(&Seat) -> Result<()>); 6] = [
        ("messages", messages),
        ("much more than there is room for", backlog),
        ("started", started),
        ("sub-groups on threads", subgroups),
        ("mismatch", mismatch),
        ("abort", abort),
    ];
    for (name, law) in laws {
        law(seat).unwrap_or_else(|error| panic!("{name}: {error}"));
    }
    if seat.rank() == 0 {
        println!(
            "mpi: {count} plans in a world of {world} right, {rounded} with rounded sums equal to threads to the bit, {} laws",
            laws.len()
        );
    }
}

/// Every operation and plan gives what a serial loop gives, and sends the bytes of its plan.
fn law<E: Element>(seat: &Seat, len: usize, redop: ReduceOp, f: impl Fn(i32) -> E + Copy) -> usize {
    let (me, world) = (seat.rank(), seat.world());
    let mut count = 0;
    for (shapes, expected) in laws::cases(world, len, redop) {
        for algorithm in Algorithm::ALL {
            let Some(parts) = laws::parts(&shapes, algorithm, redop, f) else {
                continue;
            };
            let part = &parts[me];
            let (output, bytes) = laws::call(seat.endpoint().unwrap(), part).unwrap();
            let expected: Vec<E> = expected[me].iter().map(|&x| f(x)).collect();
            let what = format!("{:?} {algorithm} rank {me} of {world}", shapes[me]);
            assert_eq!(output, expected, "{what}");
            assert_eq!(bytes, part.plan.bytes_sent(me, E::DTYPE), "{what}");
            count += 1;
        }
    }
    count
}

/// Sums that round: the same bits as between threads, for every operation and plan.
fn bits(seat: &Seat) -> usize {
    let (me, world) = (seat.rank(), seat.world());
    let mut count = 0;
    for len in [1, 7, 2500] {
        for (shapes, _) in laws::cases(world, len, ReduceOp::Sum) {
            for algorithm in Algorithm::ALL {
                let uneven = |x: i32| 1.0f32 / (x as f32 + 3.7);
                let Some(parts) = laws::parts(&shapes, algorithm, ReduceOp::Sum, uneven) else {
                    continue;
                };
                let (output, _) = laws::call(seat.endpoint().unwrap(), &parts[me]).unwrap();
                let threads = local::World::new(world).unwrap().seats();
                let ends = threads.iter().map(|seat| seat.endpoint()).collect();
                let (wanted, _) = laws::on_calls(ends, &parts).unwrap();
                let bits = |x: &[f32]| x.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
                let what = format!("{:?} {algorithm}", shapes[me]);
                assert_eq!(bits(&output), bits(&wanted[me]), "{what}");
                count += 1;
            }
        }
    }
    count
}

/// A value that tells sender, receiver and message.
fn word(from: usize, to: usize, i: usize) -> u64 {
    ((from * 16 + to) << 32 | i) as u64
}

/// Messages of one tag in order, of several in any, to every rank, this one too; lengths around each padding.
fn messages(seat: &Seat) -> Result<()> {
    let comm = seat.communicator()?;
    let (me, world) = (comm.rank(), comm.world());
    for to in 0..world {
        for (i, len) in [0usize, 1, 2, 3, 9, 1000, 100_000].into_iter().enumerate() {
            comm.send(&vec![word(me, to, i) as u8; len], to, 5)?;
            comm.send(&[word(me, to, i)], to, u64::MAX - i as u64)?;
        }
    }
    for from in 0..world {
        for i in (0..7).rev() {
            let mut x = [0];
            comm.recv(&mut x, from, u64::MAX - i as u64)?;
            assert_eq!(x, [word(from, me, i)]);
        }
        for (i, len) in [0usize, 1, 2, 3, 9, 1000, 100_000].into_iter().enumerate() {
            let mut x = vec![0u8; len];
            comm.recv(&mut x, from, 5)?;
            assert_eq!(x, vec![word(from, me, i) as u8; len]);
        }
    }
    comm.barrier()
}

/// More than may be under way: the sender waits, and the receiver gets all of it.
fn backlog(seat: &Seat) -> Result<()> {
    let comm = seat.communicator()?;
    let (me, world) = (comm.rank(), comm.world());
    let len = 1 << 20;
    if world > 1 && me == 0 {
        for i in 0..20 {
            comm.send(&vec![i as u64; len], world - 1, 0)?;
        }
    } else if me + 1 == world && world > 1 {
        // Nothing is taken out meanwhile.
        thread::sleep(Duration::from_millis(300));
        for i in 0..20 {
            let mut x = vec![0u64; len];
            comm.recv(&mut x, 0, 0)?;
            assert!(x.iter().all(|&x| x == i as u64));
        }
    }
    comm.barrier()?;
    let sent = seat.moved();
    assert_eq!((sent.tcp, sent.unix, sent.shm), (0, 0, 0));
    assert_eq!(sent.mpi > 0, world > 1);
    Ok(())
}

/// Several operations in flight at once, and one that is never waited for.
fn started(seat: &Seat) -> Result<()> {
    let comm = seat.communicator()?.with_order(Order::Any);
    let world = comm.world() as u64;
    let sums: Vec<_> = (0..5u64)
        .map(|i| comm.start_all_reduce(vec![i; 5000], ReduceOp::Sum, ()))
        .collect::<Result<_>>()?;
    core::mem::forget(comm.start_all_reduce(vec![1u8; 100], ReduceOp::Sum, ())?);
    for (i, sum) in sums.into_iter().enumerate() {
        assert_eq!(sum.wait()?, vec![i as u64 * world; 5000]);
    }
    comm.barrier()
}

/// Sub-groups of the same ranks under way on two threads, made without a message.
fn subgroups(seat: &Seat) -> Result<()> {
    let comm = seat.communicator()?;
    let (me, world) = (comm.rank(), comm.world());
    let all: Vec<usize> = (0..world).rev().collect();
    let all = ProcessGroup::new(all, me)?;
    let alike: Vec<usize> = (0..world).filter(|r| r % 2 == me % 2).collect();
    let alike = ProcessGroup::new(alike, me)?;
    let before = seat.moved().mpi;
    let groups = [
        comm.subgroup(&all, "reversed")?,
        comm.subgroup(&all, "reversed")?,
        comm.subgroup(&alike, "alike")?,
    ];
    assert_eq!(seat.moved().mpi, before);
    thread::scope(|scope| {
        let threads = groups.map(|group| {
            scope.spawn(move || {
                for i in 0..50u64 {
                    let mut x = vec![me as u64 * i; 700];
                    group.all_reduce(&mut x, ReduceOp::Sum)?;
                    let members = group.group().ranks().iter();
                    let sum: u64 = members.map(|&r| r as u64 * i).sum();
                    assert_eq!(x, vec![sum; 700]);
                }
                Ok(())
            })
        });
        threads
            .into_iter()
            .try_for_each(|thread| thread.join().unwrap())
    })
}

/// Different calls are named on every rank; other groups go on.
fn mismatch(seat: &Seat) -> Result<()> {
    let comm = seat.communicator()?;
    let (me, world) = (comm.rank(), comm.world());
    if world > 1 {
        let len = 3 + usize::from(me == world - 1);
        let outcome = comm.all_reduce(&mut vec![0f32; len], ReduceOp::Sum);
        let Err(error @ Error::Mismatch { .. }) = outcome else {
            panic!("rank {me}: {outcome:?}");
        };
        let said = error.to_string();
        let both = said.contains("all_reduce(f32 x 3") && said.contains("all_reduce(f32 x 4");
        assert!(both && said.contains("mpi.rs"), "{said}");
    }
    seat.communicator()?.barrier()
}

/// A thread that waits for what never comes is freed by another rank's abort, and so is what is made later.
fn abort(seat: &Seat) -> Result<()> {
    let comm = seat.communicator()?;
    let (me, world) = (comm.rank(), comm.world());
    comm.barrier()?;
    let begun = Instant::now();
    if me + 1 == world {
        thread::sleep(Duration::from_millis(50));
        seat.abort();
    }
    let outcome = comm.recv(&mut [0u8], me, 9);
    assert_eq!(outcome, Err(Error::Aborted { rank: world - 1 }));
    assert!(begun.elapsed() < Duration::from_secs(5), "{begun:?}");
    assert!(seat.communicator()?.barrier().is_err());
    Ok(())
}

/// MPI cannot come back.
fn over(seat: Seat) {
    seat.finish(Ok(()));
    let error = by_mpi::join().unwrap_err();
    assert!(error.to_string().contains("finalised"), "{error}");
}

fn fails() {
    let seat = by_mpi::join().unwrap();
    let (me, world) = (seat.rank(), seat.world());
    assert!(world > 1);
    let outcome = seat.run(|comm: Communicator<Sockets>| {
        if comm.rank() == 1 {
            return Err(Error::Gate(String::from("the disk is full")));
        }
        comm.barrier()
    });
    let error = outcome.unwrap_err();
    if me == 1 {
        assert_eq!(error.to_string(), "the disk is full");
    } else {
        assert_eq!(error.to_string(), "rank 1 was lost: the disk is full");
        println!("rank {me} was told");
    }
}

fn dies() {
    let seat = by_mpi::join().unwrap();
    let comm = seat.communicator().unwrap();
    comm.barrier().unwrap();
    if comm.rank() == 1 {
        std::process::abort();
    }
    let waited = comm.with_deadline(Duration::from_secs(30)).barrier();
    println!("rank {} outlived rank 1: {waited:?}", seat.rank());
    seat.finish(Ok(()));
}

fn alone() {
    let join = Join {
        kind: Kind::Mpi,
        ..Join::new(2, 4, "laws")
    };
    let nowhere = quintet_collectives::store::FileStore::new(std::env::temp_dir()).unwrap();
    let error = join.over(&nowhere).unwrap_err().to_string();
    assert!(
        error.contains("rank 2 of 4, and to MPI rank 0 of 1"),
        "{error}"
    );
    println!("{error}");
}

fn refused(granted: Threading) {
    let (universe, level) = mpi::initialize_with_threading(granted).unwrap();
    let error = by_mpi::join().unwrap_err().to_string();
    // Some grant more than was asked for.
    assert!(level < Threading::Multiple, "{level:?}");
    assert!(error.contains("MPI_THREAD_MULTIPLE is needed"), "{error}");
    println!("{error}");
    drop(universe);
}
