//! What instructions compute and count, under every seed.

use half::{bf16, f16};
use quintet_kernels::Error;
use quintet_kernels::emulated::{Counters, Emulated};
use quintet_kernels::launch::{Arg, Call, Launch, Limit, Stream};

use crate::common::Draw;
use crate::{device, seeds};

const STREAM: Stream = Stream(0);

fn up<T: bytemuck::Pod>(device: &Emulated, host: &[T]) -> u64 {
    let bytes: &[u8] = bytemuck::cast_slice(host);
    let ptr = device.alloc("x", bytes.len()).unwrap();
    device.upload(STREAM, bytes, ptr).unwrap();
    ptr
}

/// Runs one block of `function` with `arrays`, the room for `n` results, and `numbers`.
fn run<T: bytemuck::Pod>(
    device: &Emulated,
    (function, threads, shared): (&str, u32, u32),
    arrays: &[u64],
    n: usize,
    numbers: &[i32],
) -> Vec<T> {
    let y = device.alloc("y", n * size_of::<T>()).unwrap();
    let pointers = arrays.iter().copied().chain([y]).map(Arg::Ptr);
    let args: Vec<Arg> = pointers
        .chain(numbers.iter().map(|&x| Arg::I32(x)))
        .collect();
    let call = Call {
        module: "instructions",
        function,
        grid: [1, 1, 1],
        block: [threads, 1, 1],
        shared,
        args: &args,
    };
    device.launch(STREAM, &call).unwrap();
    let mut out = vec![T::zeroed(); n];
    let bytes = bytemuck::cast_slice_mut(&mut out);
    device
        .download(STREAM, y, bytes)
        .unwrap_or_else(|e| panic!("{function}: {e}"));
    out
}

/// 1 + a b for a of 16 x k and b of k x 8.
fn product(a: &[f32], b: &[f32], k: usize) -> Vec<f32> {
    let at = |i: usize, j: usize| (0..k).map(|p| a[i * k + p] * b[p * 8 + j]).sum::<f32>();
    (0..128).map(|e| 1.0 + at(e / 8, e % 8)).collect()
}

#[test]
fn matrix_instructions_multiply() {
    for seed in seeds() {
        let (device, mut draw) = (device(seed), Draw::new(seed));
        let mut whole =
            |n: usize| -> Vec<f32> { draw.whole(n, 20).into_iter().map(|x| x as f32).collect() };
        let (a, b) = (whole(256), whole(128));
        let bf = |x: &[f32]| {
            x.iter()
                .map(|&x| bf16::from_f32(x).to_bits())
                .collect::<Vec<_>>()
        };
        let hf = |x: &[f32]| {
            x.iter()
                .map(|&x| f16::from_f32(x).to_bits())
                .collect::<Vec<_>>()
        };
        let arrays = [up(&device, &bf(&a)), up(&device, &bf(&b))];
        let got = run::<f32>(&device, ("product_bf16", 32, 768), &arrays, 128, &[]);
        assert_eq!(got, product(&a, &b, 16));
        let arrays = [up(&device, &hf(&a)), up(&device, &hf(&b))];
        let got = run::<f32>(&device, ("product_f16", 32, 768), &arrays, 128, &[]);
        assert_eq!(got, product(&a, &b, 16));
        let (a, b) = (&a[..128], &b[..64]);
        let arrays = [up(&device, a), up(&device, b)];
        let got = run::<f32>(&device, ("product_tf32", 32, 0), &arrays, 128, &[]);
        assert_eq!(got, product(a, b, 8));
        assert_eq!(device.take_counters().mma, 0, "counted only when asked");
    }
}

#[test]
fn matrices_move_and_turn() {
    let x: Vec<u16> = (0..256).collect();
    let turned: Vec<u16> = (0..256)
        .map(|i| i / 64 * 64 + i % 8 * 8 + i / 8 % 8)
        .collect();
    for seed in seeds() {
        let device = device(seed);
        for (kernel, n, want) in [
            ("move_1", 64, &x),
            ("move_2_in", 128, &turned),
            ("move_4_out", 256, &turned),
            ("move_4_both", 256, &x),
        ] {
            let arrays = [up(&device, &x[..n])];
            let got = run::<u16>(&device, (kernel, 32, 0), &arrays, n, &[]);
            assert_eq!(got, want[..n], "{kernel}");
        }
    }
}

#[test]
fn lanes_exchange() {
    for seed in seeds() {
        let (device, mut draw) = (device(seed), Draw::new(seed));
        let x: Vec<u32> = (0..32).map(|_| draw.below(1000) as u32).collect();
        let got = run::<u32>(&device, ("lanes", 32, 0), &[up(&device, &x)], 16 * 32, &[]);
        let all = |f: fn(u32, u32) -> u32| x.iter().copied().reduce(f).unwrap();
        let ballot = (0..32)
            .map(|l| u32::from(x[l].is_multiple_of(3)) << l)
            .sum::<u32>();
        let same = u32::from(x.iter().all(|&v| v == x[7]));
        for l in 0..32 {
            let up = if l >= 2 { l - 2 } else { l };
            let down = if l % 16 + 3 < 16 { l + 3 } else { l };
            let want = [
                x[5],
                x[l / 8 * 8 + (l + 3) % 8],
                x[up],
                x[down],
                x[l ^ 12],
                ballot,
                1,
                same,
                all(|a, b| a + b),
                all(u32::min),
                all(u32::max),
                all(|a, b| a & b),
                all(|a, b| a | b),
                all(|a, b| a ^ b),
                x[l ^ 1],
                7 + 100 + 1000,
            ];
            let got: Vec<u32> = (0..16).map(|k| got[k * 32 + l]).collect();
            assert_eq!(got, want, "lane {l}");
        }
    }
}

#[test]
fn pipelines_and_named_barriers_are_clean() {
    for seed in seeds() {
        let device = device(seed);
        for rows in [1, 2, 3, 9] {
            let x: Vec<f32> = (0..64 * rows).map(|i| i as f32).collect();
            let sum = |width: usize, t: usize| -> f32 {
                (0..rows).map(|i| x[i * width + width - 1 - t]).sum()
            };
            let arrays = [up(&device, &x)];
            let count = [rows as i32];
            let got = run::<f32>(&device, ("pipeline", 64, 0), &arrays, 64, &count);
            assert_eq!(got, (0..64).map(|t| sum(64, t)).collect::<Vec<_>>());
            let kernel = ("producer_and_consumer", 64, 0);
            let got = run::<f32>(&device, kernel, &arrays, 32, &count);
            assert_eq!(got, (0..32).map(|t| sum(32, t)).collect::<Vec<_>>());
        }
    }
}

#[test]
fn counters_see_conflicts_sectors_and_products() {
    for seed in seeds() {
        let device = device(seed);
        device.count_accesses();
        let conflicts = |stride: i32| {
            let shared = 32 * 4 * 33;
            run::<f32>(&device, ("strides", 32, shared), &[], 32, &[stride]);
            device.take_counters().bank_conflicts
        };
        assert_eq!([1, 2, 32, 33].map(conflicts), [0, 1, 31, 0]);
        let x = up(&device, &[0.0f32; 1024]);
        let counted = |stride: i32| {
            run::<f32>(&device, ("strides_of_global", 32, 0), &[x], 32, &[stride]);
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
        run::<f32>(&device, ("product_bf16", 32, 768), &arrays, 128, &[]);
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
