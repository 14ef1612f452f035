//! What instructions compute and count, under every seed.

use std::fmt::Write;

use quintet_kernels::Error;
use quintet_kernels::emulated::Counters;
use quintet_kernels::launch::{Arg, Call, Launch, Limit, Stream};

use crate::common::Draw;
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

/// What a GPU must give too (benches/gpu-check): a line a kernel, with its arrays as they lie in
/// memory. Rewritten by running this test with QUINTET_WRITE_GOLDEN=1.
#[test]
fn golden_values_are_the_emulators() {
    let mut rng = Draw::new(7);
    let mut whole = |n: usize| -> Vec<f32> {
        let drawn = rng.whole(n, 20).into_iter();
        drawn.map(|x| x as f32).collect()
    };
    let bytes = |x: &[f32]| bytemuck::cast_slice(x).to_vec();
    let each = |x: &[f32], of: fn(f32) -> u16| -> Vec<u8> {
        let bits: Vec<u16> = x.iter().map(|&x| of(x)).collect();
        bytemuck::cast_slice(&bits).to_vec()
    };
    let (a, b) = (whole(256), whole(128));
    let to_bf16 = |x| half::bf16::from_f32(x).to_bits();
    let to_f16 = |x| half::f16::from_f32(x).to_bits();
    let moved: Vec<u8> = (0..256u16).flat_map(u16::to_le_bytes).collect();
    let lanes: Vec<u8> = (0..32u32)
        .flat_map(|l| (l * l % 101 + 3).to_le_bytes())
        .collect();
    let mut rounded = whole(64);
    rounded.iter_mut().for_each(|x| *x = *x / 7.0 + 1e-3);
    // Halfway between two bf16, either way.
    rounded[..2].copy_from_slice(&[1.0 + 1.0 / 256.0, 1.0 + 3.0 / 256.0]);
    // kernel, threads, dynamic shared bytes, arrays, numbers, bytes of results, ulps allowed
    type Case<'a> = (&'a str, u32, u32, Vec<Vec<u8>>, &'a [i32], usize, u32);
    let products = [each(&a, to_bf16), each(&b, to_bf16)].to_vec();
    let halves = [each(&a, to_f16), each(&b, to_f16)].to_vec();
    let cases: Vec<Case<'_>> = vec![
        ("product_bf16", 32, 768, products, &[], 512, 0),
        ("product_f16", 32, 768, halves, &[], 512, 0),
        (
            "product_tf32",
            32,
            0,
            vec![bytes(&a[..128]), bytes(&b[..64])],
            &[],
            512,
            0,
        ),
        ("move_1", 32, 0, vec![moved[..128].to_vec()], &[], 128, 0),
        ("move_2_in", 32, 0, vec![moved[..256].to_vec()], &[], 256, 0),
        ("move_4_out", 32, 0, vec![moved.clone()], &[], 512, 0),
        ("move_4_both", 32, 0, vec![moved], &[], 512, 0),
        ("lanes", 32, 0, vec![lanes], &[], 16 * 32 * 4, 0),
        ("pipeline", 64, 0, vec![bytes(&a)], &[4], 256, 0),
        (
            "producer_and_consumer",
            64,
            0,
            vec![bytes(&a)],
            &[5],
            128,
            0,
        ),
        ("conversions", 64, 0, vec![bytes(&rounded)], &[], 128, 0),
        ("powers", 64, 0, vec![bytes(&rounded)], &[], 256, 2),
    ];
    let hex = |x: &[u8]| x.iter().map(|b| format!("{b:02x}")).collect::<String>();
    let mut text = String::new();
    for (kernel, threads, shared, arrays, numbers, n, ulps) in cases {
        let device = device(0);
        let at: Vec<u64> = arrays.iter().map(|x| up(&device, x)).collect();
        let mut out = run::<_, u8>(&device, (kernel, threads, shared), &at, n, numbers);
        if kernel == "powers" {
            // What is right, which the host's own function may miss by a bit.
            let right = rounded.iter().map(|&x| f64::from(x).exp2() as f32);
            let right: Vec<u8> = right.flat_map(f32::to_le_bytes).collect();
            let word =
                |x: &[u8], i: usize| i64::from(i32::from_le_bytes(x[i..i + 4].try_into().unwrap()));
            for i in (0..n).step_by(4) {
                assert!(
                    (word(&right, i) - word(&out, i)).abs() <= 1,
                    "2^{}",
                    rounded[i / 4]
                );
            }
            out = right;
        }
        let arrays: Vec<String> = arrays.iter().map(|x| format!("\"{}\"", hex(x))).collect();
        writeln!(
            text,
            r#"{{"kernel": "{kernel}", "threads": {threads}, "shared": {shared}, "numbers": {numbers:?}, "ulps": {ulps}, "in": [{}], "out": "{}"}}"#,
            arrays.join(", "),
            hex(&out)
        )
        .unwrap();
    }
    let path = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/tests/emulated/intrinsics.jsonl"
    );
    if std::env::var_os("QUINTET_WRITE_GOLDEN").is_some() {
        std::fs::write(path, &text).unwrap();
    }
    assert_eq!(text, std::fs::read_to_string(path).unwrap());
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
