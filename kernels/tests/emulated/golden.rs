//! What the kernels of products move and multiply, by the emulator's counters, beside what their formula says; for those
//! that are bound by memory see traffic.rs.
//!
//! `QUINTET_GOLDEN=write` writes golden.txt anew; without it a difference fails.

use std::fmt::Write;

use half::bf16;
use quintet_kernels::emulated::{Counters, Emulated};
use quintet_kernels::{Attention, Backend, Carry, Float, Gemm, GemmSpec, Gpu, Tag};

use crate::attention::{Problem, spec};
use crate::laws::gpu;
use crate::support::{FORMS, Random, download, upload};

type Device = Gpu<Emulated>;

pub fn line(out: &mut String, name: &str, c: &Counters) {
    assert_eq!(
        (c.bank_conflicts, c.sectors),
        (0, c.least_sectors),
        "{name}"
    );
    let Counters {
        global_read,
        global_written,
        sectors,
        least_sectors,
        shared_phases,
        bank_conflicts,
        mma,
        blocks,
        ..
    } = c;
    writeln!(
        out,
        "{name}: blocks {blocks} read {global_read} written {global_written} sectors {sectors} least {least_sectors} phases {shared_phases} conflicts {bank_conflicts} mma {mma}"
    )
    .unwrap();
}

/// Counters of what `body` launches on a device that counts, after a warm-up of its arguments.
pub fn counted(device: &Device) -> Counters {
    // Reading anything back performs what is queued.
    let probe = upload(device, &[0_i32]);
    download(device, &probe);
    device.launcher().take_counters()
}

/// One product of whole tiles in bf16; returns its counters.
fn product<O: Float<Acc = f32>>(form: usize, [m, n, k]: [usize; 3]) -> Counters {
    let (device, mut rng) = (gpu(0), Random(1));
    device.launcher().count_accesses();
    let (a_form, b_form) = FORMS[form];
    let spec = GemmSpec::new(m, n, k, a_form, b_form);
    let (a, b) = (
        upload(&device, &rng.integers::<bf16>(m * k, 1)),
        upload(&device, &rng.integers::<bf16>(k * n, 1)),
    );
    let mut c = device.alloc::<O>(Tag::Scratch, m * n).unwrap();
    device
        .gemm::<bf16, O>(
            &spec,
            Device::whole(&a),
            Device::whole(&b),
            None,
            None,
            Device::whole_mut(&mut c),
        )
        .unwrap();
    counted(&device)
}

/// The same in tf32.
fn product_tf32(form: usize, [m, n, k]: [usize; 3], out: &mut String) {
    let (device, mut rng) = (gpu(0), Random(1));
    device.launcher().count_accesses();
    let (a_form, b_form) = FORMS[form];
    let spec = GemmSpec::new(m, n, k, a_form, b_form).tf32();
    let (a, b) = (
        upload(&device, &rng.integers::<f32>(m * k, 1)),
        upload(&device, &rng.integers::<f32>(k * n, 1)),
    );
    let mut c = device.alloc::<f32>(Tag::Scratch, m * n).unwrap();
    let (a, b, into) = (
        Device::whole(&a),
        Device::whole(&b),
        Device::whole_mut(&mut c),
    );
    device
        .gemm::<f32, f32>(&spec, a, b, None, None, into)
        .unwrap();
    let (c, blocks) = (counted(&device), m * n / 4096);
    assert_eq!(c.mma as usize, (m / 16) * (n / 8) * (k / 8));
    assert_eq!(c.global_read as usize, blocks * (64 + 64) * k * 4);
    assert_eq!(c.global_written as usize, m * n * 4);
    line(
        out,
        &format!("gemm_tf32_{} {m}x{n}x{k}", ["nn", "nt", "tn", "tt"][form]),
        &c,
    );
}

fn attention(d: usize, out: &mut String) {
    let (device, mut rng) = (gpu(0), Random(2));
    let shape = spec((1, 128, 128), (1, 1, d), false);
    let x = Problem::<bf16>::random(&mut rng, shape);
    device.launcher().count_accesses();
    let mut o = device.alloc::<bf16>(Tag::Scratch, x.q.len()).unwrap();
    let [mut lse, mut delta] = [0; 2].map(|_| device.alloc::<f32>(Tag::Scratch, 128).unwrap());
    let [mut dq, mut dk, mut dv] =
        [0; 3].map(|_| device.alloc::<bf16>(Tag::Scratch, x.q.len()).unwrap());
    let mut acc = device.alloc::<f32>(Tag::Scratch, x.q.len()).unwrap();
    let [mut max, mut sum] = [0; 2].map(|_| device.zeros::<f32>(Tag::Scratch, 128).unwrap());
    let do_ = upload(&device, &x.do_);
    let do_ = Device::whole(&do_);
    x.call(&device, |qkv, places| {
        counted(&device);
        device
            .attention(
                &shape,
                qkv,
                places,
                Device::whole_mut(&mut o),
                Device::whole_mut(&mut lse),
            )
            .unwrap();
        let products = |c: &Counters| c.mma as usize * 16 * 8 * 16 / (128 * 128 * d);
        let c = counted(&device);
        assert_eq!(products(&c), 2, "q k^T and w v");
        line(out, &format!("attention {d}"), &c);
        let carry = Carry {
            o_bshd: Device::whole_mut(&mut acc),
            max_bhs: Device::whole_mut(&mut max),
            sum_bhs: Device::whole_mut(&mut sum),
        };
        device
            .attention_step::<bf16>(&shape, qkv, places, carry)
            .unwrap();
        line(out, &format!("attention_step {d}"), &counted(&device));
        device
            .attention_delta(
                &shape,
                do_,
                Device::whole(&o),
                Device::whole_mut(&mut delta),
            )
            .unwrap();
        line(out, &format!("attention_delta {d}"), &counted(&device));
        let stats = (Device::whole(&lse), Device::whole(&delta));
        let into = (
            Device::whole_mut(&mut dq),
            Device::whole_mut(&mut dk),
            Device::whole_mut(&mut dv),
        );
        device
            .attention_backward(&shape, qkv, places, do_, stats, into)
            .unwrap();
        let c = counted(&device);
        // Two for dq and one to give it; two for dk and dv, by each part of the columns, and two.
        assert_eq!(products(&c), if d > 128 { 9 } else { 7 });
        line(out, &format!("attention_backward {d}"), &c);
    });
}

#[test]
fn counters_are_the_golden_ones() {
    let mut out = String::new();
    for (form, name) in ["nn", "nt", "tn", "tt"].into_iter().enumerate() {
        for (shape, tile) in [
            ([64, 64, 96], 64 * 64),
            ([128, 256, 64], 128 * 128),
            ([256, 256, 64], 128 * 256),
        ] {
            let [m, n, k] = shape;
            for (c, bytes) in [
                (product::<bf16>(form, shape), 2),
                (product::<f32>(form, shape), 4),
            ] {
                let blocks = m * n / tile;
                line(
                    &mut out,
                    &format!("gemm_{name} {m}x{n}x{k} by {tile} to {bytes} bytes"),
                    &c,
                );
                assert_eq!(c.blocks as usize, blocks, "the tile chosen");
                assert_eq!(c.mma as usize, (m / 16) * (n / 8) * (k / 16));
                let (rows, columns) = match tile {
                    4096 => (64, 64),
                    16384 => (128, 128),
                    _ => (128, 256),
                };
                assert_eq!(c.global_read as usize, blocks * (rows + columns) * k * 2);
                assert_eq!(c.global_written as usize, m * n * bytes);
            }
        }
    }
    for form in 0..4 {
        product_tf32(form, [128, 64, 64], &mut out);
    }
    for d in [64, 128, 256] {
        attention(d, &mut out);
    }
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/emulated/golden.txt");
    if std::env::var("QUINTET_GOLDEN").is_ok_and(|word| word == "write") {
        std::fs::write(path, &out).unwrap();
    }
    assert_eq!(out, std::fs::read_to_string(path).unwrap());
}
