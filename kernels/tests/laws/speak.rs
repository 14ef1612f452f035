//! What a layer asks of `Collectives`, on any device.

use quintet_collectives::ReduceOp;
use quintet_kernels::{Backend, Collectives, Float, Pending, Queue, Scalar, Tag};

pub const WORLD: usize = 3;

pub fn numbers<B: Backend, E: Scalar>(device: &B, x: &[f64]) -> B::Buf<E> {
    let host: Vec<E> = x.iter().map(|&x| E::from_f64(x)).collect();
    device.upload(Tag::Comm, &host).unwrap()
}

pub fn read<B: Backend, E: Scalar>(device: &B, buf: &B::Buf<E>) -> Vec<f64> {
    let view = B::whole(buf);
    let mut host = vec![E::zeroed(); B::len(view)];
    device.download(view, &mut host).unwrap();
    host.into_iter().map(Float::to_f64).collect()
}

/// All blocking and started forms, written as a layer would: over any device's collectives.
pub fn speak<B: Backend, C: Collectives<B>, E: Scalar>(comm: &C, device: &B) {
    let me = comm.rank();
    let now = || device.record(Queue::Compute);
    assert_eq!(comm.world(), WORLD);
    // `E::Acc` names one type although a Scalar is both a Float and an Element.
    let mut sum: B::Buf<E::Acc> = device.zeros(Tag::Comm, 2).unwrap();
    comm.all_reduce(B::whole_mut(&mut sum), ReduceOp::Sum)
        .unwrap();

    let counts = [2, 0, 1];
    let mine = numbers::<B, E>(device, &vec![me as f64; counts[me]]);
    let mut all = numbers::<B, E>(device, &[9.0; 3]);
    comm.all_gather(B::whole(&mine), &counts, B::whole_mut(&mut all))
        .unwrap();
    assert_eq!(read::<B, E>(device, &all), [0.0, 0.0, 2.0]);

    let mut part = numbers::<B, E>(device, &vec![9.0; counts[me]]);
    let whole = numbers::<B, E>(device, &[1.0, 2.0, me as f64]);
    comm.reduce_scatter(
        B::whole(&whole),
        &counts,
        B::whole_mut(&mut part),
        ReduceOp::Sum,
    )
    .unwrap();
    assert_eq!(
        read::<B, E>(device, &part),
        [&[3.0, 6.0][..], &[], &[3.0]][me]
    );

    // Rank r sends s elements r to each rank s.
    let send = numbers::<B, E>(device, &[me as f64; 3]);
    let mut recv = numbers::<B, E>(device, &vec![9.0; 3 * me]);
    comm.all_to_all(
        B::whole(&send),
        &[0, 1, 2],
        B::whole_mut(&mut recv),
        &[me; 3],
    )
    .unwrap();
    let want: Vec<f64> = (0..3).flat_map(|r| vec![f64::from(r); me]).collect();
    assert_eq!(read::<B, E>(device, &recv), want);

    let mut word = numbers::<B, E>(device, &[me as f64]);
    comm.broadcast(B::whole_mut(&mut word), 2).unwrap();
    assert_eq!(read::<B, E>(device, &word), [2.0]);

    let buf = numbers::<B, E>(device, &[1.0, me as f64]);
    let started = comm.start_all_reduce(buf, ReduceOp::Sum, now()).unwrap();
    let event = started.event();
    device.wait(Queue::Compute, &event);
    let buf = started.wait_on(device, Queue::Compute).unwrap();
    assert_eq!(read::<B, E>(device, &buf), [3.0, 3.0]);

    let started = comm
        .start_reduce_scatter(buf, &[1, 1, 0], ReduceOp::Max, now())
        .unwrap();
    let buf = started.wait_host().unwrap();
    assert!(me == 2 || read::<B, E>(device, &buf)[me] == 3.0);

    let mut rows = [0.0; 3];
    rows[me] = me as f64 + 1.0;
    let buf = numbers::<B, E>(device, &rows);
    let started = comm.start_all_gather(buf, &[1; 3], now()).unwrap();
    assert_eq!(
        read::<B, E>(device, &started.wait_host().unwrap()),
        [1.0, 2.0, 3.0]
    );

    let (next, last) = ((me + 1) % WORLD, (me + WORLD - 1) % WORLD);
    let buf = numbers::<B, E>(device, &[me as f64]);
    let recv = comm
        .start_recv(last, 7, numbers::<B, E>(device, &[9.0]))
        .unwrap();
    let send = comm.start_send(next, 7, buf, now()).unwrap();
    assert_eq!(
        read::<B, E>(device, &send.wait_host().unwrap()),
        [me as f64]
    );
    assert_eq!(
        read::<B, E>(device, &recv.wait_host().unwrap()),
        [last as f64]
    );
}
