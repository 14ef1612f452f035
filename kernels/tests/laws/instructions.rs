//! What instructions compute, on any device that launches: whole numbers and moved bits, so that
//! every device must give the same. The kernels are those of emulated/kernels/instructions.cu.

use half::{bf16, f16};
use quintet_kernels::launch::{Arg, Call, Launch, Stream};

use crate::common::Draw;

const STREAM: Stream = Stream(0);

pub fn up<D: Launch, T: bytemuck::Pod>(device: &D, host: &[T]) -> u64 {
    let bytes: &[u8] = bytemuck::cast_slice(host);
    let ptr = device.alloc("x", bytes.len()).unwrap();
    device.upload(STREAM, bytes, ptr).unwrap();
    ptr
}

/// Runs one block of `function` with `arrays`, the room for `n` results, and `numbers`.
pub fn run<D: Launch, T: bytemuck::Pod>(
    device: &D,
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

pub fn matrix_instructions_multiply<D: Launch>(device: &D, seed: u64) {
    let mut draw = Draw::new(seed);
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
    let arrays = [up(device, &bf(&a)), up(device, &bf(&b))];
    let got = run::<_, f32>(device, ("product_bf16", 32, 768), &arrays, 128, &[]);
    assert_eq!(got, product(&a, &b, 16));
    let arrays = [up(device, &hf(&a)), up(device, &hf(&b))];
    let got = run::<_, f32>(device, ("product_f16", 32, 768), &arrays, 128, &[]);
    assert_eq!(got, product(&a, &b, 16));
    let (a, b) = (&a[..128], &b[..64]);
    let arrays = [up(device, a), up(device, b)];
    let got = run::<_, f32>(device, ("product_tf32", 32, 0), &arrays, 128, &[]);
    assert_eq!(got, product(a, b, 8));
}

pub fn matrices_move_and_turn<D: Launch>(device: &D) {
    let x: Vec<u16> = (0..256).collect();
    let turned: Vec<u16> = (0..256)
        .map(|i| i / 64 * 64 + i % 8 * 8 + i / 8 % 8)
        .collect();
    for (kernel, n, want) in [
        ("move_1", 64, &x),
        ("move_2_in", 128, &turned),
        ("move_4_out", 256, &turned),
        ("move_4_both", 256, &x),
    ] {
        let arrays = [up(device, &x[..n])];
        let got = run::<_, u16>(device, (kernel, 32, 0), &arrays, n, &[]);
        assert_eq!(got, want[..n], "{kernel}");
    }
}

pub fn lanes_exchange<D: Launch>(device: &D, seed: u64) {
    let mut draw = Draw::new(seed);
    let x: Vec<u32> = (0..32).map(|_| draw.below(1000) as u32).collect();
    let got = run::<_, u32>(device, ("lanes", 32, 0), &[up(device, &x)], 16 * 32, &[]);
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

pub fn pipelines_and_named_barriers_are_clean<D: Launch>(device: &D) {
    for rows in [1, 2, 3, 9] {
        let x: Vec<f32> = (0..64 * rows).map(|i| i as f32).collect();
        let sum = |width: usize, t: usize| -> f32 {
            (0..rows).map(|i| x[i * width + width - 1 - t]).sum()
        };
        let arrays = [up(device, &x)];
        let count = [rows as i32];
        let got = run::<_, f32>(device, ("pipeline", 64, 0), &arrays, 64, &count);
        assert_eq!(got, (0..64).map(|t| sum(64, t)).collect::<Vec<_>>());
        let kernel = ("producer_and_consumer", 64, 0);
        let got = run::<_, f32>(device, kernel, &arrays, 32, &count);
        assert_eq!(got, (0..32).map(|t| sum(32, t)).collect::<Vec<_>>());
    }
}

/// Conversions round as the manual says; 2^x is within its 2 ulp.
pub fn conversions_and_powers<D: Launch>(device: &D, seed: u64) {
    let mut draw = Draw::new(seed);
    let mut x: Vec<f32> = (0..64).map(|_| (draw.unit() * 40.0) as f32).collect();
    // Halfway between two bf16, either way, and the ends.
    x[..4].copy_from_slice(&[1.0 + 1.0 / 256.0, 1.0 + 3.0 / 256.0, 0.0, f32::INFINITY]);
    let bits = run::<_, u16>(device, ("conversions", 64, 0), &[up(device, &x)], 64, &[]);
    let want: Vec<u16> = x.iter().map(|&x| bf16::from_f32(x).to_bits()).collect();
    assert_eq!(bits, want);
    let got = run::<_, f32>(device, ("powers", 64, 0), &[up(device, &x)], 64, &[]);
    for (x, got) in x.iter().zip(got) {
        let (got, want) = (f64::from(got), f64::from(*x).exp2());
        let near = got == want || (got / want - 1.0).abs() <= 2.0_f64.powi(-22);
        assert!(near, "2^{x}: {got}");
    }
}
