//! Laws of the pointwise ops.
//!
//! Bounds: an exponential is good to two roundings, the sigmoid to four, and each op makes fewer
//! than a dozen more, relative to the magnitudes that are added.

use half::bf16;
use quintet_kernels::activation::naive;
use quintet_kernels::{Dropout, DropoutSpec, Float, Pointwise, Tag, dropout};

use crate::common::*;

const LENGTHS: [usize; 5] = [0, 1, 17, 1000, 40_000];

/// Whatever rows of three sequences of five a device has, it lets go of the same.
pub fn dropout_by_place<B: Pointwise, E: Float>(device: &B) {
    let dropout = Dropout {
        share: 0.3,
        seed: 1,
        step: 2,
        site: 3,
        sample: 4,
    };
    let (rows, width) = (5, 7);
    let places: Vec<i32> = [0, 3, 4, 8, 9].repeat(3);
    let all = Draw::new(5).vec::<E>(places.len() * width, 2.0);
    for first in [0, 1, 7, places.len()] {
        let spec = DropoutSpec {
            dropout,
            first,
            rows,
            width,
        };
        let (at, x) = (&places[first..], &all[first * width..]);
        let want = dropout::naive(&spec, at, x);
        let at = device.upload(Tag::Scratch, at).unwrap();
        let mut y = up::<B, E>(device, x);
        device
            .dropout::<E>(&spec, B::whole(&at), B::whole_mut(&mut y))
            .unwrap();
        close("y", &down::<B, E>(device, &y), &want, |i| {
            (E::UNIT_ROUNDOFF + 2.0 * acc::<E>()) * want[i].abs()
        });
        assert!(first > 0 || (20..45).contains(&want.iter().filter(|y| **y == 0.0).count()));
        let short = device.upload::<i32>(Tag::Scratch, &[0]).unwrap();
        let refused = device.dropout::<E>(&spec, B::whole(&short), B::whole_mut(&mut y));
        assert!(refused.is_err());
    }
    // What is let go is zero whatever it was, and no less than zero.
    let spec = DropoutSpec {
        dropout,
        first: 0,
        rows,
        width,
    };
    let at = device.upload(Tag::Scratch, &places).unwrap();
    let mut y = up::<B, E>(device, &vec![f64::NEG_INFINITY; all.len()]);
    device
        .dropout::<E>(&spec, B::whole(&at), B::whole_mut(&mut y))
        .unwrap();
    let want = dropout::naive(&spec, &places, &vec![-1.0; all.len()]);
    for (y, want) in down::<B, E>(device, &y).iter().zip(want) {
        let bits = if want == 0.0 { 0.0 } else { f64::NEG_INFINITY };
        assert_eq!(y.to_bits(), f64::to_bits(bits));
    }
}

pub fn swiglu<B: Pointwise, E: Float>(device: &B) {
    for n in LENGTHS {
        let mut draw = Draw::new(n as u64);
        let mut gate = draw.vec::<E>(n, 20.0);
        // Gates whose exponential leaves the range of f32.
        for (g, far) in gate.iter_mut().zip([-200.0, 200.0, -90.0, 0.0]) {
            *g = E::from_f64(far).to_f64();
        }
        let (up_, dout) = (draw.vec::<E>(n, 2.0), draw.vec::<E>(n, 2.0));
        let (g, u) = (up::<B, E>(device, &gate), up::<B, E>(device, &up_));
        let dy = up::<B, E>(device, &dout);
        let [mut y, mut dg, mut du] = [(); 3].map(|()| unset::<B, E>(device, n));
        let whole = B::whole;
        device
            .swiglu::<E>(whole(&g), whole(&u), B::whole_mut(&mut y))
            .unwrap();
        device
            .swiglu_backward::<E>(
                B::whole(&g),
                B::whole(&u),
                B::whole(&dy),
                B::whole_mut(&mut dg),
                B::whole_mut(&mut du),
            )
            .unwrap();
        let tol = E::UNIT_ROUNDOFF + 12.0 * acc::<E>();
        // Below the least normal f32 a result may be lost altogether.
        let least = 1e-35;
        let want: Vec<f64> = (0..n).map(|i| naive::swiglu(gate[i], up_[i])).collect();
        close("y", &down::<B, E>(device, &y), &want, |i| {
            tol * want[i].abs() + least
        });
        let want: Vec<(f64, f64)> = (0..n)
            .map(|i| naive::swiglu_backward(gate[i], up_[i], dout[i]))
            .collect();
        let (want_dg, want_du): (Vec<f64>, Vec<f64>) = want.into_iter().unzip();
        close("dg", &down::<B, E>(device, &dg), &want_dg, |i| {
            let s = 1.0 / (1.0 + (-gate[i]).exp());
            let size = (dout[i] * up_[i]).abs() * s * (1.0 + gate[i].abs());
            E::UNIT_ROUNDOFF * want_dg[i].abs() + 12.0 * acc::<E>() * size + least
        });
        close("du", &down::<B, E>(device, &du), &want_du, |i| {
            tol * want_du[i].abs() + least
        });
    }
}

pub fn gelu<B: Pointwise, E: Float>(device: &B) {
    for n in LENGTHS {
        let mut draw = Draw::new(n as u64 + 7);
        let input = draw.vec::<E>(n, 6.0);
        let dout = draw.vec::<E>(n, 2.0);
        let (x, dy) = (up::<B, E>(device, &input), up::<B, E>(device, &dout));
        let [mut y, mut dx] = [(); 2].map(|()| unset::<B, E>(device, n));
        device
            .gelu::<E>(B::whole(&x), B::whole_mut(&mut y))
            .unwrap();
        device
            .gelu_backward::<E>(B::whole(&x), B::whole(&dy), B::whole_mut(&mut dx))
            .unwrap();
        // The exponent z is rounded too: an error of |z| roundings in the sigmoid. The twin's
        // 1 + tanh cancels where z is far below zero, which costs it an absolute 1e-16.
        let z = |x: f64| 1.6 * x.abs() * (1.0 + 0.045 * x * x);
        let want: Vec<f64> = input.iter().map(|&x| naive::gelu(x)).collect();
        close("y", &down::<B, E>(device, &y), &want, |i| {
            let tol = E::UNIT_ROUNDOFF + (8.0 + 4.0 * z(input[i])) * acc::<E>();
            tol * want[i].abs() + 1e-15
        });
        let want: Vec<f64> = (0..n)
            .map(|i| naive::gelu_backward(input[i], dout[i]))
            .collect();
        close("dx", &down::<B, E>(device, &dx), &want, |i| {
            let size = dout[i].abs() * (1.0 + 2.0 * z(input[i]));
            E::UNIT_ROUNDOFF * want[i].abs() + 16.0 * acc::<E>() * size + 1e-14
        });
    }
}

pub fn sums<B: Pointwise, E: Float>(device: &B) {
    for n in LENGTHS {
        let mut draw = Draw::new(n as u64 + 1);
        let (x, y) = (draw.vec::<E>(n, 3.0), draw.vec::<E>(n, 3.0));
        let mut sum = up::<B, E>(device, &x);
        let other = up::<B, E>(device, &y);
        device
            .add::<E>(B::whole_mut(&mut sum), B::whole(&other))
            .unwrap();
        let want: Vec<f64> = x.iter().zip(&y).map(|(x, y)| x + y).collect();
        close("x + y", &down::<B, E>(device, &sum), &want, |i| {
            E::UNIT_ROUNDOFF * want[i].abs() * 1.01
        });
    }
    // Small whole numbers are summed without rounding.
    for (rows, n) in [(1, 1), (0, 3), (9, 130), (300, 200)] {
        let mut draw = Draw::new(rows as u64);
        let (dy, mut want) = (draw.whole(rows * n, 8), draw.whole(n, 8));
        let (dys, mut db) = (up::<B, E>(device, &dy), up::<B, E::Acc>(device, &want));
        device
            .add_rows::<E>(B::whole(&dys), B::whole_mut(&mut db))
            .unwrap();
        naive::add_rows(&dy, &mut want);
        assert_eq!(down::<B, E::Acc>(device, &db), want);
    }
    let ragged = up::<B, E>(device, &[0.0; 7]);
    let mut db = up::<B, E::Acc>(device, &[0.0; 3]);
    let refused = device.add_rows::<E>(B::whole(&ragged), B::whole_mut(&mut db));
    assert!(refused.is_err());
}

pub fn casts<B: Pointwise, E: Float>(device: &B) {
    cast_to::<B, E, f64>(device);
    cast_to::<B, E, f32>(device);
    cast_to::<B, E, bf16>(device);
}

fn cast_to<B: Pointwise, I: Float, O: Float>(device: &B) {
    let mut draw = Draw::new(3);
    let mut x = draw.vec::<I>(40_000, 1000.0);
    x[..3].copy_from_slice(&[f64::INFINITY, f64::NEG_INFINITY, -0.0]);
    let from = up::<B, I>(device, &x);
    let mut to = unset::<B, O>(device, x.len());
    device
        .cast::<I, O>(B::whole(&from), B::whole_mut(&mut to))
        .unwrap();
    let want: Vec<O> = x.iter().map(|&x| O::from_f64(x)).collect();
    assert_eq!(down_raw(device, &to), want, "{} to {}", I::NAME, O::NAME);
}

/// The twin's backward is the slope of its forward; the device is held to the twin.
pub fn gradients<B: Pointwise, E: Float>(_: &B) {
    let mut draw = Draw::new(5);
    for x in draw.vec::<E>(200, 5.0) {
        let (u, dy) = (draw.unit(), draw.unit());
        let (dg, du) = naive::swiglu_backward(x, u, dy);
        slope("swiglu", &[x, u], &[dg, du], |x| {
            dy * naive::swiglu(x[0], x[1])
        });
        let dx = naive::gelu_backward(x, dy);
        slope("gelu", &[x], &[dx], |x| dy * naive::gelu(x[0]));
    }
}
