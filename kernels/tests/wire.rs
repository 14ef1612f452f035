//! What a layer asks of `Collectives`, asked of communicators over host memory.
#![cfg(all(feature = "std", feature = "wire"))]

#[path = "laws/speak.rs"]
mod speak;

use std::time::Duration;

use half::bf16;
use quintet_collectives::{Communicator, Error as WireError, ReduceOp, transport::local::World};
use quintet_kernels::{
    Backend, Collectives, Cpu, CpuBuf, CpuEvent, Error, Float, Pending, Scalar, Tag,
};

use speak::{WORLD, speak};

/// Runs `body` on each rank of a world, with a device of its own.
fn each_rank(body: impl Fn(&dyn Fn() -> Communicator<quintet_collectives::Local>, Cpu) + Sync) {
    World::run(WORLD, |comm| {
        let group = comm.group().clone();
        // Further groups of the same ranks, each with a worker of its own.
        let again = || comm.subgroup(&group, "again").unwrap();
        body(&again, Cpu::new(1));
        Ok(())
    })
    .unwrap();
}

fn numbers<E: Scalar>(device: &Cpu, x: &[f64]) -> CpuBuf<E> {
    speak::numbers(device, x)
}

fn read<E: Scalar>(buf: &CpuBuf<E>) -> Vec<f64> {
    buf.as_ref().iter().map(|x| Float::to_f64(*x)).collect()
}

#[test]
fn every_call_in_every_type() {
    each_rank(|comm, device| {
        speak::<_, _, f64>(&comm(), &device);
        speak::<_, _, f32>(&comm(), &device);
        speak::<_, _, bf16>(&comm(), &device);
    });
}

/// A started call begins after its event: the others cannot end before the last rank's event.
#[test]
fn a_started_call_waits_for_its_event() {
    each_rank(|comm, device| {
        let comm = comm();
        let after = CpuEvent::pending();
        let buf = numbers::<f32>(&device, &[1.0]);
        let started = comm
            .start_all_reduce(buf, ReduceOp::Sum, after.clone())
            .unwrap();
        let event = Pending::<Cpu, f32>::event(&started);
        assert!(!event.wait_for(Duration::from_millis(20)));
        after.set();
        assert_eq!(read(&started.wait().unwrap()), [3.0]);
        assert!(event.is_set());
    });
}

/// The end of one group's call is the event after which another group's begins.
#[test]
fn calls_chain_by_events() {
    each_rank(|comm, device| {
        let (first, second) = (comm(), comm());
        let gate = CpuEvent::pending();
        let one = first
            .start_all_reduce(numbers::<f64>(&device, &[1.0]), ReduceOp::Sum, gate.clone())
            .unwrap();
        let after = Pending::<Cpu, f64>::event(&one);
        let two = second
            .start_all_reduce(numbers::<f64>(&device, &[2.0]), ReduceOp::Sum, after)
            .unwrap();
        assert!(!two.done().wait(Duration::from_millis(10)).unwrap());
        gate.set();
        assert_eq!(read(&two.wait().unwrap()), [6.0]);
        assert!(one.is_done());
    });
}

/// Buffers on the wire stay counted, and are counted less when they are dropped.
#[test]
fn buffers_in_flight_are_counted() {
    each_rank(|comm, device| {
        let comm = comm();
        let buf = device.zeros::<f32>(Tag::Comm, 100).unwrap();
        let started = comm
            .start_all_reduce(buf, ReduceOp::Sum, CpuEvent::done())
            .unwrap();
        assert_eq!(device.meter().now(Tag::Comm), 400);
        drop(started.wait().unwrap());
        assert_eq!(device.meter().now(Tag::Comm), 0);
    });
}

#[test]
fn errors_come_through() {
    each_rank(|comm, device| {
        let comm = comm();
        let mine = numbers::<f32>(&device, &[1.0]);
        let mut all = numbers::<f32>(&device, &[0.0; 2]);
        let refused = Collectives::<Cpu>::all_gather(
            &comm,
            Cpu::whole(&mine),
            &[1; 3],
            Cpu::whole_mut(&mut all),
        );
        let refused = refused.map_err(Error::from);
        assert!(matches!(
            refused,
            Err(Error::Collective(WireError::Len { .. }))
        ));
        let started = Collectives::<Cpu>::start_send(&comm, 5, 0, mine, CpuEvent::done());
        assert!(matches!(started.err(), Some(WireError::Layout(_))));
    });
}
