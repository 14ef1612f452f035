//! Laws of the router, of moving rows, and of products of groups.

use quintet_kernels::moe::{
    Combine, Permutation, Permute, Routed, Router, RouterSpec, Score, naive,
};
use quintet_kernels::{Float, GroupedGemm, GroupedSpec, Trans};

use crate::common::*;

/// Every rule, on shapes from no token to more than one part of the work.
fn routers() -> impl Iterator<Item = RouterSpec> {
    let shapes = [(0, 3, 2), (1, 1, 1), (7, 5, 1), (9, 4, 4), (300, 16, 3)];
    let rules = [(Score::Softmax, 1.0), (Score::Sigmoid, 2.5)];
    shapes.into_iter().flat_map(move |(tokens, experts, topk)| {
        rules.into_iter().flat_map(move |(score, scale)| {
            [false, true].map(|normalize| RouterSpec {
                tokens,
                experts,
                topk,
                score,
                normalize,
                scale,
            })
        })
    })
}

type RoutedHost = (Vec<i32>, Vec<f64>, Vec<f64>);

fn route<B: Router, E: Float>(
    device: &B,
    spec: &RouterSpec,
    logits: &[f64],
    bias: Option<&[f64]>,
) -> RoutedHost {
    let l = up::<B, E::Acc>(device, logits);
    let bias = bias.map(|b| up::<B, E::Acc>(device, b));
    let pairs = spec.tokens * spec.topk;
    let mut choice = up_raw(device, &vec![-9_i32; pairs]);
    let mut weight = unset::<B, E::Acc>(device, pairs);
    let mut sums = unset::<B, E::Acc>(device, spec.experts + 1);
    let out = Routed {
        choice_tk: B::whole_mut(&mut choice),
        weight_tk: B::whole_mut(&mut weight),
        sums_e: B::whole_mut(&mut sums),
    };
    let bias = bias.as_ref().map(B::whole);
    device
        .route::<E::Acc>(spec, B::whole(&l), bias, out)
        .unwrap();
    (
        down_raw::<B, i32>(device, &choice),
        down::<B, E::Acc>(device, &weight),
        down::<B, E::Acc>(device, &sums),
    )
}

fn route_backward<B: Router, E: Float>(
    device: &B,
    spec: &RouterSpec,
    logits: &[f64],
    choice: &[i32],
    (dweight, dsums): (&[f64], &[f64]),
) -> Vec<f64> {
    let choice = up_raw(device, choice);
    let [l, dw, ds] = [logits, dweight, dsums].map(|x| up::<B, E::Acc>(device, x));
    let mut dl = unset::<B, E::Acc>(device, logits.len());
    let grads = (B::whole(&dw), B::whole(&ds));
    device
        .route_backward::<E::Acc>(
            spec,
            B::whole(&l),
            B::whole(&choice),
            grads,
            B::whole_mut(&mut dl),
        )
        .unwrap();
    down::<B, E::Acc>(device, &dl)
}

pub fn router<B: Router, E: Float>(device: &B) {
    for spec in routers() {
        let mut draw = Draw::new((spec.tokens + spec.experts) as u64);
        let logits = draw.vec::<E>(spec.tokens * spec.experts, 4.0);
        let bias = draw.vec::<E>(spec.experts, 0.5);
        for bias in [None, Some(&bias[..])] {
            let (choice, weight, sums) = route::<B, E>(device, &spec, &logits, bias);
            let (want, want_weight, want_sums) = naive::route(&spec, &logits, bias);
            // A choice may differ only between scores that rounding cannot tell apart.
            let tol = 40.0 * acc::<E>();
            let same = choice == want;
            assert!(same || acc::<E>() > 1e-10, "{spec:?}: {choice:?} {want:?}");
            if same {
                close("weight", &weight, &want_weight, |i| {
                    tol * (want_weight[i] + 1e-3)
                });
            }
            let n = (spec.tokens + 30) as f64;
            close("sums", &sums, &want_sums, |i| {
                n * acc::<E>() * (want_sums[i] + 1.0)
            });
        }
    }
}

/// Whole numbers, so that ties are ties in every type.
pub fn router_ties_and_bias<B: Router, E: Float>(device: &B) {
    let spec = RouterSpec {
        tokens: 2,
        experts: 5,
        topk: 3,
        score: Score::Softmax,
        normalize: true,
        scale: 1.0,
    };
    let logits = [0.0, 1.0, 1.0, 0.0, 1.0, 3.0, 3.0, 3.0, 3.0, 3.0];
    let (choice, weight, _) = route::<B, E>(device, &spec, &logits, None);
    assert_eq!(choice, [1, 2, 4, 0, 1, 2], "of equals the lower index");
    close("weight", &weight, &[1.0 / 3.0; 6], |_| 4.0 * acc::<E>());
    // The bias turns the choice around and weighs nothing.
    let bias = [0.0, 0.0, 0.0, 2.0, 4.0];
    let (choice, weight, _) = route::<B, E>(device, &spec, &logits, Some(&bias));
    assert_eq!(choice, [4, 3, 1, 4, 3, 0]);
    let e = std::f64::consts::E;
    let sum = e + 1.0 + e;
    close(
        "weight",
        &weight[..3],
        &[e / sum, 1.0 / sum, e / sum],
        |_| 8.0 * acc::<E>(),
    );
    // More experts than a warp has lanes: those of one lane are far apart, best first and best last.
    let many = RouterSpec {
        experts: 70,
        topk: 4,
        ..spec
    };
    let falls = (0..70).map(|e| f64::from(900 - 20 * e));
    let rises = (0..70).map(f64::from);
    let logits_te: Vec<f64> = falls.chain(rises).collect();
    let (choice, weight, sums) = route::<B, E>(device, &many, &logits_te, None);
    assert_eq!(choice, [0, 1, 2, 3, 69, 68, 67, 66]);
    let (_, want, want_sums) = naive::route(&many, &logits_te, None);
    // The exponent of a logit less the logarithm of the sum: off by a rounding of what is largest.
    let tol = 2.0 * 900.0 * acc::<E>();
    close("weight", &weight, &want, |i| tol * (want[i] + 1e-3));
    close("sums", &sums, &want_sums, |i| tol * (want_sums[i] + 1.0));
    // Logits far apart: nothing overflows, and the sum of exponentials is not lost.
    let far = [
        900.0, -900.0, 0.0, 899.0, -900.0, -80.0, -80.0, -80.0, -80.0, -80.0,
    ];
    for score in [Score::Softmax, Score::Sigmoid] {
        let spec = RouterSpec { score, ..spec };
        let (choice, weight, sums) = route::<B, E>(device, &spec, &far, None);
        assert!(
            weight.iter().chain(&sums).all(|x| x.is_finite()),
            "{weight:?} {sums:?}"
        );
        let grads = (&[1.0; 6][..], &[1.0; 6][..]);
        let dl = route_backward::<B, E>(device, &spec, &far, &choice, grads);
        assert!(dl.iter().all(|x| x.is_finite()), "{dl:?}");
    }
}

pub fn router_refuses<B: Router, E: Float>(device: &B) {
    for topk in [0, 3] {
        let spec = RouterSpec {
            tokens: 1,
            experts: 2,
            topk,
            score: Score::Softmax,
            normalize: false,
            scale: 1.0,
        };
        let l = up::<B, E::Acc>(device, &[0.0; 2]);
        let mut choice = up_raw(device, &vec![0_i32; topk]);
        let [mut weight, mut sums] = [topk, 3].map(|n| unset::<B, E::Acc>(device, n));
        let out = Routed {
            choice_tk: B::whole_mut(&mut choice),
            weight_tk: B::whole_mut(&mut weight),
            sums_e: B::whole_mut(&mut sums),
        };
        assert!(
            device
                .route::<E::Acc>(&spec, B::whole(&l), None, out)
                .is_err()
        );
    }
}

pub fn router_gradient<B: Router, E: Float>(device: &B) {
    for spec in routers().filter(|s| s.tokens < 20) {
        let mut draw = Draw::new(3);
        let logits = draw.vec::<E>(spec.tokens * spec.experts, 2.0);
        let dweight = draw.vec::<E>(spec.tokens * spec.topk, 1.0);
        let dsums = draw.vec::<E>(spec.experts + 1, 1.0);
        let (choice, ..) = naive::route(&spec, &logits, None);
        let dl = route_backward::<B, E>(device, &spec, &logits, &choice, (&dweight, &dsums));
        slope("dlogits", &logits, &dl, |l| {
            naive::pairing(&spec, l, &choice, &dweight, &dsums)
        });
    }
}

/// Choices in which some pairs are dropped, some experts are empty, one has all.
fn choices(draw: &mut Draw, pairs: usize, experts: usize) -> [Vec<i32>; 3] {
    let any = (0..pairs)
        .map(|_| draw.below(experts + 1) as i32 - 1)
        .collect();
    [any, vec![experts as i32 - 1; pairs], vec![-1; pairs]]
}

pub fn rows_there_and_back<B: Permute, E: Float>(device: &B) {
    for (tokens, topk, experts, width) in
        [(0, 1, 3, 4), (5, 2, 3, 1), (9, 3, 4, 7), (700, 2, 5, 70)]
    {
        let mut draw = Draw::new(tokens as u64);
        for choice in choices(&mut draw, tokens * topk, experts) {
            let plan = Permutation::new(&choice, experts);
            let rows = plan.pairs().len();
            let (pairs_r, rows_tk) = (up_raw(device, plan.pairs()), up_raw(device, plan.rows()));
            let by = Combine {
                tokens,
                topk,
                width,
                rows_tk: B::whole(&rows_tk),
                pairs_r: B::whole(&pairs_r),
            };
            // Whole numbers, small enough that bf16 holds every sum.
            let (x, dy) = (draw.whole(rows * width, 3), draw.whole(tokens * width, 3));
            let weight = draw.whole(tokens * topk, 2);
            let [dx_x, dx_dy] = [&x, &dy].map(|v| up::<B, E>(device, v));
            let w = up::<B, E::Acc>(device, &weight);
            let combine = |weight| {
                let mut y = unset::<B, E>(device, tokens * width);
                device
                    .combine::<E>(by, weight, B::whole(&dx_x), B::whole_mut(&mut y))
                    .unwrap();
                down::<B, E>(device, &y)
            };
            let y = combine(Some(B::whole(&w)));
            assert_eq!(
                y,
                naive::combine(width, topk, plan.rows(), Some(&weight), &x)
            );
            let plain = combine(None);
            assert_eq!(plain, naive::combine(width, topk, plan.rows(), None, &x));

            let (mut dx, mut dw) = (
                unset::<B, E>(device, rows * width),
                unset::<B, E::Acc>(device, tokens * topk),
            );
            let ins = (B::whole(&w), B::whole(&dx_x));
            device
                .combine_backward::<E>(
                    by,
                    ins,
                    B::whole(&dx_dy),
                    B::whole_mut(&mut dx),
                    B::whole_mut(&mut dw),
                )
                .unwrap();
            let (dx, dw) = (down::<B, E>(device, &dx), down::<B, E::Acc>(device, &dw));
            let shape = (width, topk, rows);
            let want = naive::combine_backward(shape, plan.rows(), (&weight, &x), &dy);
            assert_eq!((&dx, &dw), (&want.0, &want.1));
            // Linear in the rows and in the weights.
            assert_eq!(dot(&y, &dy), dot(&x, &dx));
            assert_eq!(dot(&y, &dy), dot(&weight, &dw));

            // Gathering by token is the transpose of combining without weights.
            let tokens_r: Vec<i32> = plan.pairs().iter().map(|p| p / topk as i32).collect();
            let index = up_raw(device, &tokens_r);
            let mut gathered = unset::<B, E>(device, rows * width);
            device
                .gather_rows::<E>(
                    width,
                    B::whole(&index),
                    B::whole(&dx_dy),
                    B::whole_mut(&mut gathered),
                )
                .unwrap();
            let gathered = down::<B, E>(device, &gathered);
            for (r, t) in tokens_r.iter().enumerate() {
                let t = *t as usize * width;
                assert_eq!(gathered[r * width..(r + 1) * width], dy[t..t + width]);
            }
            assert_eq!(dot(&gathered, &x), dot(&dy, &plain));
        }
    }
    // A row by elements, and one by wider moves.
    no_row_is_zeros::<B, E>(device, 3);
    no_row_is_zeros::<B, E>(device, 16);
}

/// Below 0 and beyond the last there are rows of zeros, either way.
fn no_row_is_zeros<B: Permute, E: Float>(device: &B, width: usize) {
    let (x, dy) = (
        Draw::new(1).whole(2 * width, 3),
        Draw::new(2).whole(2 * width, 3),
    );
    let row = |of: &[f64], r: i32, by: f64| -> Vec<f64> {
        let there = of.chunks(width).nth(r as usize);
        there.map_or(vec![0.0; width], |x| x.iter().map(|x| by * x).collect())
    };
    let [x_, dy_] = [&x, &dy].map(|v| up::<B, E>(device, v));
    let index = [-1, 1, 2, 0, i32::MIN, i32::MAX];
    let index_r = up_raw(device, &index);
    let mut y = unset::<B, E>(device, index.len() * width);
    let (at, of) = (B::whole(&index_r), B::whole(&x_));
    device
        .gather_rows::<E>(width, at, of, B::whole_mut(&mut y))
        .unwrap();
    let want: Vec<f64> = index.iter().flat_map(|&r| row(&x, r, 1.0)).collect();
    assert_eq!(down::<B, E>(device, &y), want);

    let (rows_tk, pairs_r) = (up_raw(device, &[-1, 1, 2, 0]), up_raw(device, &[-1, 4]));
    let by = Combine {
        tokens: 2,
        topk: 2,
        width,
        rows_tk: B::whole(&rows_tk),
        pairs_r: B::whole(&pairs_r),
    };
    let w = up::<B, E::Acc>(device, &[1.0, 2.0, 3.0, 4.0]);
    let mut y = unset::<B, E>(device, 2 * width);
    device
        .combine::<E>(by, Some(B::whole(&w)), B::whole(&x_), B::whole_mut(&mut y))
        .unwrap();
    let want = [row(&x, 1, 2.0), row(&x, 0, 4.0)].concat();
    assert_eq!(down::<B, E>(device, &y), want);
    let (mut dx, mut dw) = (
        unset::<B, E>(device, 2 * width),
        unset::<B, E::Acc>(device, 4),
    );
    let ins = (B::whole(&w), B::whole(&x_));
    device
        .combine_backward::<E>(
            by,
            ins,
            B::whole(&dy_),
            B::whole_mut(&mut dx),
            B::whole_mut(&mut dw),
        )
        .unwrap();
    assert_eq!(down::<B, E>(device, &dx), vec![0.0; 2 * width]);
    let along = |t: i32, r: i32| dot(&row(&dy, t, 1.0), &row(&x, r, 1.0));
    let want = [0.0, along(0, 1), 0.0, along(1, 0)];
    assert_eq!(down::<B, E::Acc>(device, &dw), want);
}

pub fn groups_are_products<B: GroupedGemm, E: Float>(device: &B) {
    for (counts, n, k) in [
        (&[0, 3, 0, 1][..], 4, 3),
        (&[0, 0, 9], 2, 5),
        (&[], 2, 2),
        (&[0, 0], 3, 1),
        (&[33, 1, 70], 17, 40),
    ] {
        let spec = GroupedSpec { counts, n, k };
        let rows: usize = counts.iter().sum();
        let mut draw = Draw::new(rows as u64);
        let (x, dy) = (draw.whole(rows * k, 1), draw.whole(rows * n, 1));
        let (w, start) = (
            draw.whole(counts.len() * n * k, 1),
            draw.whole(counts.len() * n * k, 3),
        );
        let [x_, dy_, w_] = [&x, &dy, &w].map(|v| up::<B, E>(device, v));
        let mut y = unset::<B, E>(device, rows * n);
        device
            .grouped_gemm::<E>(
                &spec,
                (Trans::T, false),
                B::whole(&x_),
                B::whole(&w_),
                B::whole_mut(&mut y),
            )
            .unwrap();
        assert_eq!(down::<B, E>(device, &y), naive::grouped(&spec, &x, &w));

        let (want_dx, want_dw) = naive::grouped_backward(&spec, &x, &w, &dy);
        let back = GroupedSpec { counts, n: k, k: n };
        let mut dx = up::<B, E>(device, &x);
        device
            .grouped_gemm::<E>(
                &back,
                (Trans::N, true),
                B::whole(&dy_),
                B::whole(&w_),
                B::whole_mut(&mut dx),
            )
            .unwrap();
        let want: Vec<f64> = want_dx.iter().zip(&x).map(|(dx, x)| dx + x).collect();
        assert_eq!(down::<B, E>(device, &dx), want);

        let mut dw = up::<B, E::Acc>(device, &start);
        device
            .grouped_gemm_weight::<E>(&spec, B::whole(&dy_), B::whole(&x_), B::whole_mut(&mut dw))
            .unwrap();
        let want: Vec<f64> = want_dw.iter().zip(&start).map(|(dw, s)| dw + s).collect();
        assert_eq!(down::<B, E::Acc>(device, &dw), want);
        let short = B::slice(B::whole(&x_), 0..(rows * k).saturating_sub(1));
        if rows > 0 {
            let y = B::whole_mut(&mut y);
            assert!(
                device
                    .grouped_gemm::<E>(&spec, (Trans::T, false), short, B::whole(&w_), y)
                    .is_err()
            );
        }
    }
}
