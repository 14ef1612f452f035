//! Laws of the fold of collectives, on GPUs: from the left, in the type of sums, rounded once.

use quintet_kernels::gpu::{Fold, PARTS};
use quintet_kernels::launch::Launch;
use quintet_kernels::{Backend, Error, Float, Gpu};

use crate::common::*;

const OPS: [Fold; 5] = [Fold::Sum, Fold::Prod, Fold::Min, Fold::Max, Fold::Mean];

/// One element of each part, by the definition.
fn fold<E: Float>(op: Fold, parts: &[E]) -> E {
    let nan = |x: E::Acc| x.partial_cmp(&x).is_none();
    let two = |a: E::Acc, b: E::Acc| match op {
        Fold::Sum | Fold::Mean => a + b,
        Fold::Prod => a * b,
        // A NaN wins, of equals the left stays.
        Fold::Min if b < a || nan(b) && !nan(a) => b,
        Fold::Max if b > a || nan(b) && !nan(a) => b,
        Fold::Min | Fold::Max => a,
    };
    let all = parts
        .iter()
        .skip(1)
        .fold(parts[0].to_acc(), |a, b| two(a, b.to_acc()));
    E::from_acc(match op {
        Fold::Mean => all / E::Acc::from_f64(parts.len() as f64),
        _ => all,
    })
}

/// Bit for bit, for any number of parts and elements, aligned or not, and into one of the parts.
pub fn in_rank_order<L: Launch, E: Float>(device: &Gpu<L>) {
    let mut draw = Draw::new(7);
    let many = if size_of::<E>() == 2 {
        PARTS
    } else {
        2 * PARTS + 3
    };
    for parts in [1, 2, 3, 8, PARTS, many] {
        for (first, n) in [(0, 0), (0, 1), (1, 7), (0, 64), (0, 1003), (3, 640)] {
            let mut x: Vec<Vec<f64>> = (0..parts).map(|_| draw.vec::<E>(first + n, 3.0)).collect();
            if n > 4 {
                (x[parts / 2][first + 1], x[0][first + 2]) = (f64::NAN, f64::NAN);
                (x[0][first + 3], x[parts - 1][first + 3]) = (-0.0, 0.0);
            }
            let mut bufs: Vec<_> = x.iter().map(|x| up::<Gpu<L>, E>(device, x)).collect();
            for op in OPS {
                let of =
                    |i: usize| -> Vec<E> { x.iter().map(|x| E::from_f64(x[first + i])).collect() };
                let want: Vec<E> = (0..n).map(|i| fold(op, &of(i))).collect();
                let mut out = unset::<Gpu<L>, E>(device, first + n);
                let view = |buf| Gpu::slice(Gpu::whole(buf), first..first + n);
                let views: Vec<_> = bufs.iter().map(view).collect();
                let (_, to) = Gpu::split_mut(Gpu::whole_mut(&mut out), first);
                device.fold(op, &views, to).unwrap();
                let got = down_raw::<Gpu<L>, E>(device, &out)[first..].to_vec();
                let same = |(g, w): (&E, &E)| {
                    let (g, w) = (g.to_f64(), w.to_f64());
                    g.to_bits() == w.to_bits() || g.is_nan() && w.is_nan()
                };
                assert!(
                    got.iter().zip(&want).all(same),
                    "{op:?} of {parts} parts, {n} from {first} on"
                );
            }
            bufs.clear();
        }
    }
    let x = up::<Gpu<L>, E>(device, &[1.0, 2.0]);
    let mut out = unset::<Gpu<L>, E>(device, 1);
    let mut refuse = |parts: &[_]| {
        device
            .fold(Fold::Sum, parts, Gpu::whole_mut(&mut out))
            .unwrap_err()
    };
    assert!(matches!(refuse(&[Gpu::whole(&x)]), Error::Len { .. }));
    assert!(matches!(refuse(&[]), Error::Spec { .. }));
    if size_of::<E>() == 2 {
        let one = Gpu::slice(Gpu::whole(&x), 0..1);
        assert!(matches!(refuse(&[one; PARTS + 1]), Error::Spec { .. }));
    }
}
