//! What may be carried and how it may be folded: every element type, folds that a caller brings, bytes of any
//! length; over threads, sockets and shared memory.
#![cfg(unix)]

mod common;

use std::thread;

use common::join;
use quintet_collectives::element::Bool;
use quintet_collectives::transport::socket::Kind;
use quintet_collectives::{Communicator, Element, ReduceOp, Result, Transport, World};

/// What every rank does.
trait Body: Sync {
    fn run<T: Transport + Send + 'static>(&self, comm: &Communicator<T>) -> Result<()>;
}

/// On every rank of worlds of 1, 2 and 5, over all that carries messages.
fn everywhere(body: &impl Body) {
    let kinds: &[Kind] = if cfg!(target_os = "linux") {
        &[Kind::Tcp, Kind::Unix, Kind::Shm]
    } else {
        &[Kind::Tcp, Kind::Unix]
    };
    for world in [1, 2, 5] {
        World::run(world, |comm| body.run(&comm)).unwrap();
        for &kind in kinds {
            let seats = join(kind, world, |_| {});
            thread::scope(|scope| {
                for seat in seats {
                    scope.spawn(move || {
                        body.run(&seat.communicator().unwrap()).unwrap();
                        seat.finish(Ok(()));
                    });
                }
            });
        }
    }
}

struct Types;

impl Types {
    /// `value(k)` for rank k, folded one after the other by `fold`.
    fn check<E: Element, T: Transport + Send + 'static>(
        comm: &Communicator<T>,
        op: ReduceOp,
        value: impl Fn(usize, usize) -> E,
        fold: impl Fn(E, E) -> E,
    ) -> Result<()> {
        for len in [0, 1, 9, 1000, 40_000] {
            let of = |rank| (0..len).map(move |i| (rank, i));
            let mut x: Vec<E> = of(comm.rank()).map(|(rank, i)| value(rank, i)).collect();
            comm.all_reduce(&mut x, op)?;
            for (i, x) in x.iter().enumerate() {
                let all = (0..comm.world()).map(|rank| value(rank, i));
                assert_eq!(
                    Some(*x),
                    all.reduce(&fold),
                    "{} {op} {i} of {len}",
                    E::DTYPE
                );
            }
        }
        Ok(())
    }
}

impl Body for Types {
    fn run<T: Transport + Send + 'static>(&self, comm: &Communicator<T>) -> Result<()> {
        let large = |rank: usize, i: usize| (rank as u64 + 1) << (i % 62);
        Self::check(comm, ReduceOp::Sum, large, u64::wrapping_add)?;
        Self::check(comm, ReduceOp::Max, large, u64::max)?;
        let small = |rank: usize, i: usize| u32::MAX - (rank * 31 + i) as u32;
        Self::check(comm, ReduceOp::Prod, small, u32::wrapping_mul)?;
        Self::check(comm, ReduceOp::Min, small, u32::min)?;
        let any = |rank: usize, i: usize| Bool::from((rank + i).is_multiple_of(3));
        let or = |a, b| Bool::from(bool::from(a) || bool::from(b));
        Self::check(comm, ReduceOp::Max, any, or)?;
        let and = |a, b| Bool::from(bool::from(a) && bool::from(b));
        Self::check(comm, ReduceOp::Min, any, and)
    }
}

struct Folds;

impl Body for Folds {
    fn run<T: Transport + Send + 'static>(&self, comm: &Communicator<T>) -> Result<()> {
        // Digits in rank order: neither commutative nor associative.
        for len in [0usize, 1, 4, 1001] {
            let mut x = vec![comm.rank() as i64 + 1; len];
            comm.all_reduce_by(&mut x, |acc, next| 10 * acc + next)?;
            let wanted = (1..=comm.world() as i64).fold(0, |acc, next| 10 * acc + next);
            assert_eq!(x, vec![wanted; len]);
        }
        Ok(())
    }
}

struct Bytes;

impl Body for Bytes {
    fn run<T: Transport + Send + 'static>(&self, comm: &Communicator<T>) -> Result<()> {
        let of = |rank: usize, len: usize| vec![rank as u8; rank * len];
        for (root, len) in (0..comm.world()).zip([0, 1, 30_000, 7, 100]) {
            let all = comm.gather_bytes(&of(comm.rank(), len), root)?;
            let here = comm.rank() == root;
            let wanted = (0..comm.world()).filter(|_| here).map(|rank| of(rank, len));
            assert_eq!(all, wanted.collect::<Vec<_>>());
            let told = comm.broadcast_bytes(&of(comm.rank(), len), root)?;
            assert_eq!(told, of(root, len));
        }
        Ok(())
    }
}

#[test]
fn every_type_is_carried_and_folded() {
    everywhere(&Types);
}

#[test]
fn a_fold_of_the_callers_goes_in_rank_order() {
    everywhere(&Folds);
}

#[test]
fn bytes_of_any_length_are_gathered_and_told() {
    everywhere(&Bytes);
}
