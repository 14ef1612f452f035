//! Laws of RoPE.

use quintet_kernels::rope::naive;
use quintet_kernels::{Error, Float, Rope, RopeSpec};

use crate::common::*;

fn turn<B: Rope, E: Float>(device: &B, spec: &RopeSpec, pos: &[i32], x: &[f64]) -> Vec<f64> {
    let pos = up_raw(device, pos);
    let mut x = up::<B, E>(device, x);
    device
        .rope::<E>(spec, B::whole(&pos), B::whole_mut(&mut x))
        .unwrap();
    down::<B, E>(device, &x)
}

fn cases() -> impl Iterator<Item = (RopeSpec, Vec<i32>, Draw)> {
    [
        (4, 2, 8, 8),
        (3, 1, 2, 2),
        (0, 2, 4, 4),
        (7, 3, 34, 34),
        (40, 4, 128, 128),
        (5, 3, 7, 4),
        (6, 2, 10, 10),
        (3, 2, 6, 0),
    ]
    .into_iter()
    .map(|(rows, heads, head_dim, rotary)| {
        let mut draw = Draw::new((rows + head_dim) as u64);
        let mut pos: Vec<i32> = (0..rows).map(|_| draw.below(100_000) as i32).collect();
        if let Some(first) = pos.first_mut() {
            *first = 0;
        }
        let spec = RopeSpec {
            rows,
            heads,
            head_dim,
            rotary,
            theta: 10_000.0,
            inverse: false,
        };
        (spec, pos, draw)
    })
}

pub fn turns<B: Rope, E: Float>(device: &B) {
    for (mut spec, pos, mut draw) in cases() {
        let token = spec.heads * spec.head_dim;
        let x = draw.vec::<E>(spec.rows * token, 2.0);
        for inverse in [false, true] {
            spec.inverse = inverse;
            let want = naive::rope(&spec, &pos, &x);
            let got = turn::<B, E>(device, &spec, &pos, &x);
            // Sine, cosine, two products and a sum; an angle of 1e5 in f64 is off by 1e-11.
            close("x", &got, &want, |i| {
                E::UNIT_ROUNDOFF * want[i].abs() + 5.0 * acc::<E>() * 4.0
            });
            if spec.rows > 0 {
                assert_eq!(got[..token], x[..token], "position 0 turns nothing");
            }
        }
    }
    // What is odd cannot be halved, and no more can turn than there is.
    for rotary in [3, 6] {
        let spec = RopeSpec {
            rows: 1,
            heads: 1,
            head_dim: 4,
            rotary,
            theta: 1e4,
            inverse: false,
        };
        let pos = up_raw(device, &[1]);
        let mut x = up::<B, E>(device, &[0.0; 4]);
        let refused = device.rope::<E>(&spec, B::whole(&pos), B::whole_mut(&mut x));
        assert!(matches!(refused, Err(Error::Spec { .. })));
    }
}

pub fn inverse_is_the_adjoint<B: Rope, E: Float>(device: &B) {
    for (spec, pos, mut draw) in cases() {
        let n = spec.rows * spec.heads * spec.head_dim;
        let (x, y) = (draw.vec::<E>(n, 1.0), draw.vec::<E>(n, 1.0));
        let inverse = RopeSpec {
            inverse: true,
            ..spec
        };
        let forth = dot(&turn::<B, E>(device, &spec, &pos, &x), &y);
        let back = dot(&x, &turn::<B, E>(device, &inverse, &pos, &y));
        let bound = 2.0 * n as f64 * 2.0 * (E::UNIT_ROUNDOFF + 5.0 * acc::<E>());
        assert!((forth - back).abs() <= bound, "{forth} {back}");
    }
}
