//! What instructions compute and count, under every seed.

use quintet_kernels::Error;
use quintet_kernels::emulated::Counters;
use quintet_kernels::launch::{Arg, Call, Launch, Limit, Stream};

use crate::instruction_laws::{self, run, up};
use crate::{device, seeds};

const STREAM: Stream = Stream(0);

#[test]
fn matrix_instructions_multiply() {
    for seed in seeds() {
        instruction_laws::matrix_instructions_multiply(&device(seed), seed);
    }
}

#[test]
fn matrices_move_and_turn() {
    for seed in seeds() {
        instruction_laws::matrices_move_and_turn(&device(seed));
    }
}

#[test]
fn lanes_exchange() {
    for seed in seeds() {
        instruction_laws::lanes_exchange(&device(seed), seed);
    }
}

#[test]
fn pipelines_and_named_barriers_are_clean() {
    for seed in seeds() {
        instruction_laws::pipelines_and_named_barriers_are_clean(&device(seed));
    }
}

#[test]
fn conversions_and_powers() {
    for seed in seeds() {
        instruction_laws::conversions_and_powers(&device(seed), seed);
    }
}

#[test]
fn counters_see_conflicts_sectors_and_products() {
    for seed in seeds() {
        let device = device(seed);
        instruction_laws::matrix_instructions_multiply(&device, seed);
        assert_eq!(device.take_counters().mma, 0, "counted only when asked");
        device.count_accesses();
        let conflicts = |stride: i32| {
            let shared = 32 * 4 * 33;
            run::<_, f32>(&device, ("strides", 32, shared), &[], 32, &[stride]);
            device.take_counters().bank_conflicts
        };
        assert_eq!([1, 2, 32, 33].map(conflicts), [0, 1, 31, 0]);
        let x = up(&device, &[0.0f32; 1024]);
        let counted = |stride: i32| {
            run::<_, f32>(&device, ("strides_of_global", 32, 0), &[x], 32, &[stride]);
            let Counters {
                sectors,
                least_sectors,
                global_read,
                global_written,
                ..
            } = device.take_counters();
            [sectors, least_sectors, global_read, global_written]
        };
        assert_eq!(counted(1), [8, 8, 128, 128]);
        assert_eq!(counted(8), [36, 8, 128, 128]);
        let arrays = [up(&device, &[0u16; 256]), up(&device, &[0u16; 128])];
        run::<_, f32>(&device, ("product_bf16", 32, 768), &arrays, 128, &[]);
        assert_eq!(device.take_counters().mma, 1);
    }
}

#[test]
fn launches_no_driver_takes_are_refused() {
    let device = device(0);
    let y = device.alloc("y", 256).unwrap();
    let call = Call {
        module: "instructions",
        function: "bounded",
        grid: [1, 1, 1],
        block: [64, 1, 1],
        shared: 0,
        args: &[Arg::Ptr(y)],
    };
    let limit = |call: &Call<'_>| match device.launch(STREAM, call) {
        Err(Error::Limit { limit, .. }) => Some(limit),
        Ok(()) => None,
        Err(error) => panic!("{error}"),
    };
    assert_eq!(limit(&call), None);
    let block = [65, 1, 1];
    assert_eq!(limit(&Call { block, ..call }), Some(Limit::LaunchBounds));
    let grid = [1, 1, 65_536];
    assert_eq!(limit(&Call { grid, ..call }), Some(Limit::Grid(2)));
    let shared = 163 * 1024 + 1;
    assert_eq!(limit(&Call { shared, ..call }), Some(Limit::Shared));
    let args = &[Arg::I32(0)][..];
    let refused = device.launch(STREAM, &Call { args, ..call });
    assert!(matches!(refused, Err(Error::Arguments { .. })));
    let function = "bounce";
    let refused = device.launch(STREAM, &Call { function, ..call });
    let error = refused.unwrap_err();
    assert_eq!(
        error.to_string(),
        "module instructions has no kernel bounce"
    );
    device.synchronize(STREAM).unwrap();
    assert_eq!(device.take_log(), ["bounded"]);
}
