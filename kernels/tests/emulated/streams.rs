//! Streams and events: what is not ordered is found, whatever order the seed chose.

use quintet_kernels::Error;
use quintet_kernels::emulated::FaultKind;
use quintet_kernels::launch::{Launch, Stream};

use crate::{device, seeds};

const A: Stream = Stream(0);
const B: Stream = Stream(1);

fn kind(result: Result<(), Error>) -> Option<FaultKind> {
    match result {
        Ok(()) => None,
        Err(Error::Fault(fault)) => Some(fault.kind),
        Err(error) => panic!("{error}"),
    }
}

#[test]
fn a_missing_event_is_found() {
    for seed in seeds() {
        for event in [true, false] {
            let device = device(seed);
            let (x, y) = (
                device.alloc("x", 64).unwrap(),
                device.alloc("y", 64).unwrap(),
            );
            device.fill(A, x, 7, 64).unwrap();
            if event {
                let filled = device.record(A);
                device.wait(B, &filled);
            }
            device.copy(B, x, y, 64).unwrap();
            let mut out = [0; 64];
            let result = device.download(B, y, &mut out);
            // Where the copy comes first, the fill finds it as the reader.
            let result = result.and_then(|()| device.synchronize(A));
            match event {
                true => assert_eq!((kind(result), out), (None, [7; 64])),
                false => assert!(
                    matches!(
                        kind(result),
                        Some(FaultKind::StreamRace | FaultKind::Unwritten)
                    ),
                    "seed {seed}"
                ),
            }
        }
    }
}

#[test]
fn a_wait_of_the_host_orders_too() {
    for seed in seeds() {
        let device = device(seed);
        let x = device.alloc("x", 64).unwrap();
        device.fill(A, x, 1, 64).unwrap();
        device.synchronize(A).unwrap();
        device.fill(B, x, 2, 64).unwrap();
        let mut out = [0; 64];
        device.download(B, x, &mut out).unwrap();
        assert_eq!(out, [2; 64]);
        device.fill(A, x, 3, 64).unwrap();
        device.download(A, x, &mut out).unwrap();
        assert_eq!(out, [3; 64]);
    }
}

#[test]
fn frees_wait_for_their_own_stream_only() {
    for seed in seeds() {
        for event in [true, false] {
            let device = device(seed);
            let (x, y) = (
                device.alloc("x", 64).unwrap(),
                device.alloc("y", 64).unwrap(),
            );
            device.fill(A, x, 7, 64).unwrap();
            device.synchronize(A).unwrap();
            device.copy(B, x, y, 64).unwrap();
            if event {
                let copied = device.record(B);
                device.wait(A, &copied);
            }
            device.free(A, x);
            let result = device.synchronize(A).and_then(|()| device.synchronize(B));
            let found = kind(result);
            match event {
                true => assert_eq!(found, None),
                false => assert!(
                    matches!(found, Some(FaultKind::StreamRace | FaultKind::Freed)),
                    "seed {seed}: {found:?}"
                ),
            }
        }
    }
}

#[test]
fn what_is_freed_or_unwritten_is_not_read() {
    let device = device(0);
    let x = device.alloc("x", 64).unwrap();
    device.fill(A, x, 7, 32).unwrap();
    let mut out = [0; 64];
    device.download(A, x, &mut out[..32]).unwrap();
    let refused = device.download(A, x, &mut out);
    assert_eq!(kind(refused), Some(FaultKind::Unwritten));

    let device = crate::device(1);
    let x = device.alloc("x", 64).unwrap();
    device.fill(A, x, 7, 64).unwrap();
    device.free(A, x);
    assert_eq!(
        kind(device.download(A, x, &mut out)),
        Some(FaultKind::Freed)
    );

    let device = crate::device(2);
    let x = device.alloc("x", 64).unwrap();
    device.fill(A, x, 7, 65).unwrap();
    assert_eq!(kind(device.synchronize(A)), Some(FaultKind::OutOfBounds));
}

/// Ranks that share a device speak by copies and folds on it, under every order of their streams.
#[cfg(feature = "wire")]
#[test]
fn ranks_share_a_device() {
    use quintet_kernels::launch::Libraries;
    for seed in seeds() {
        let device = device(seed);
        let seat = |_| {
            (
                device.clone(),
                [device.fresh_stream(), device.fresh_stream()],
            )
        };
        crate::one_device::on_one_device(&device, seat);
        let log = device.take_log();
        for kernel in ["fold_f64", "fold_f32", "fold_bf16", "fold_f32_wide"] {
            assert!(
                log.iter().any(|name| name == kernel),
                "{kernel} is not in {log:?}"
            );
        }
    }
}

#[test]
fn an_event_nobody_records_is_named() {
    let (one, other) = (device(0), device(1));
    let event = other.record(A);
    one.wait(A, &event);
    let found = kind(one.synchronize(A));
    assert_eq!(found, Some(FaultKind::Divergence));
}
