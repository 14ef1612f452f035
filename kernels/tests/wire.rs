//! What a layer asks of `Collectives`, asked of communicators over host memory.
#![cfg(all(feature = "std", feature = "wire"))]

use std::time::Duration;

use half::bf16;
use quintet_collectives::{Communicator, Error as WireError, ReduceOp, transport::local::World};
use quintet_kernels::{
    Backend, Collectives, Cpu, CpuBuf, CpuEvent, Error, Float, Pending, Queue, Scalar, Tag,
};

const WORLD: usize = 3;

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
    let host: Vec<E> = x.iter().map(|&x| E::from_f64(x)).collect();
    device.upload(Tag::Comm, &host).unwrap()
}

fn read<E: Scalar>(buf: &CpuBuf<E>) -> Vec<f64> {
    buf.as_ref().iter().map(|x| Float::to_f64(*x)).collect()
}

/// All blocking and started forms, written as a layer would: over any device's collectives.
fn speak<C: Collectives<Cpu>, E: Scalar>(comm: &C, device: &Cpu) {
    let me = comm.rank();
    let now = || device.record(Queue::Compute);
    assert_eq!(comm.world(), WORLD);
    // `E::Acc` names one type although a Scalar is both a Float and an Element.
    let mut sum: CpuBuf<E::Acc> = device.zeros(Tag::Comm, 2).unwrap();
    comm.all_reduce(Cpu::whole_mut(&mut sum), ReduceOp::Sum)
        .unwrap();

    let counts = [2, 0, 1];
    let mine = numbers::<E>(device, &vec![me as f64; counts[me]]);
    let mut all = numbers::<E>(device, &[9.0; 3]);
    comm.all_gather(Cpu::whole(&mine), &counts, Cpu::whole_mut(&mut all))
        .unwrap();
    assert_eq!(read(&all), [0.0, 0.0, 2.0]);

    let mut part = numbers::<E>(device, &vec![9.0; counts[me]]);
    let whole = numbers::<E>(device, &[1.0, 2.0, me as f64]);
    comm.reduce_scatter(
        Cpu::whole(&whole),
        &counts,
        Cpu::whole_mut(&mut part),
        ReduceOp::Sum,
    )
    .unwrap();
    assert_eq!(read(&part), [&[3.0, 6.0][..], &[], &[3.0]][me]);

    // Rank r sends s elements r to each rank s.
    let send = numbers::<E>(device, &[me as f64; 3]);
    let mut recv = numbers::<E>(device, &vec![9.0; 3 * me]);
    comm.all_to_all(
        Cpu::whole(&send),
        &[0, 1, 2],
        Cpu::whole_mut(&mut recv),
        &[me; 3],
    )
    .unwrap();
    let want: Vec<f64> = (0..3).flat_map(|r| vec![f64::from(r); me]).collect();
    assert_eq!(read(&recv), want);

    let mut word = numbers::<E>(device, &[me as f64]);
    comm.broadcast(Cpu::whole_mut(&mut word), 2).unwrap();
    assert_eq!(read(&word), [2.0]);

    let buf = numbers::<E>(device, &[1.0, me as f64]);
    let started = comm.start_all_reduce(buf, ReduceOp::Sum, now()).unwrap();
    let event = started.event();
    device.wait(Queue::Compute, &event);
    assert!(event.is_set());
    let buf = started.wait_on(device, Queue::Compute).unwrap();
    assert_eq!(read(&buf), [3.0, 3.0]);

    let started = comm
        .start_reduce_scatter(buf, &[1, 1, 0], ReduceOp::Max, now())
        .unwrap();
    let buf = started.wait_host().unwrap();
    assert!(me == 2 || read(&buf)[me] == 3.0);

    let mut rows = [0.0; 3];
    rows[me] = me as f64 + 1.0;
    let buf = numbers::<E>(device, &rows);
    let started = comm.start_all_gather(buf, &[1; 3], now()).unwrap();
    assert_eq!(read(&started.wait_host().unwrap()), [1.0, 2.0, 3.0]);

    let (next, last) = ((me + 1) % WORLD, (me + WORLD - 1) % WORLD);
    let buf = numbers::<E>(device, &[me as f64]);
    let recv = comm
        .start_recv(last, 7, numbers::<E>(device, &[9.0]))
        .unwrap();
    let send = comm.start_send(next, 7, buf, now()).unwrap();
    assert_eq!(read(&send.wait_host().unwrap()), [me as f64]);
    assert_eq!(read(&recv.wait_host().unwrap()), [last as f64]);
}

#[test]
fn every_call_in_every_type() {
    each_rank(|comm, device| {
        speak::<_, f64>(&comm(), &device);
        speak::<_, f32>(&comm(), &device);
        speak::<_, bf16>(&comm(), &device);
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
