//! The laws of attention (tests/matrix_laws), stamped on the emulated GPU in sizes that a few
//! seconds hold, and what is the GPU's own: which kernels run, in every width.

use half::bf16;
use quintet_kernels::{AttentionSpec, Float};

use crate::attention::{Problem, Size, naive_of, spec};
use crate::laws::gpu;
use crate::support::{Random, close};
use crate::{attention, pieces, seeds};

/// One token, fewer keys than a tile, more than one tile of each, a head as wide as no chunk.
fn size() -> Size {
    Size {
        shapes: vec![
            spec((1, 1, 1), (1, 1, 1), true),
            spec((2, 3, 3), (2, 1, 8), false),
            spec((1, 33, 70), (2, 1, 16), true),
            spec((1, 20, 70), (1, 1, 5), true),
            spec((1, 70, 9), (2, 2, 24), false),
        ],
        tokens: 70,
        rounded: bf16::UNIT_ROUNDOFF,
    }
}

#[test]
fn near_naive() {
    attention::near_naive_on(&gpu(0), &size());
}

#[test]
fn one_hot_keys_are_looked_up() {
    attention::one_hot_keys_of(&gpu(0), 40, 40);
}

#[test]
fn rows_do_not_know_each_other() {
    attention::rows_on(&gpu(0), &size());
}

#[test]
fn finite_differences() {
    let mut size = size();
    size.shapes.truncate(3);
    attention::finite_differences_on(&gpu(0), &size);
}

#[test]
fn adjoint() {
    attention::adjoint_on(&gpu(0), &size());
}

#[test]
fn one_key_has_no_gradient() {
    attention::one_key_on(&gpu(0), &size());
}

#[test]
fn nothing_seen_gives_zero() {
    for seed in seeds() {
        attention::nothing_seen_gives_zero(&gpu(seed));
    }
}

#[test]
fn what_does_not_fit_is_refused() {
    attention::refuses_what_does_not_fit(&gpu(0));
    pieces::refuses_what_does_not_fit(&gpu(0));
}

#[test]
fn pieces_in_order_have_the_bits_of_one_call() {
    pieces::in_order_of(&gpu(0), (20, 140));
}

#[test]
fn pieces_in_any_cut_and_order_sum_up() {
    pieces::in_any_cut_of(&gpu(0), (33, 70), 2);
}

#[test]
fn unseen_pieces_change_no_bit() {
    pieces::unseen_ones_change_no_bit(&gpu(0));
}

#[test]
fn error_does_not_grow_with_the_pieces() {
    pieces::error_of(&gpu(0), 64, 1);
}

/// FlashAttention's criterion: no farther off than a few times what rounding each weight and its
/// gradient to bf16 costs, here of values in [-1, 1).
fn tensor_cores(x: &Problem<bf16>, seed: u64) {
    let device = gpu(seed);
    let (got, want, d) = (x.solve(&device), naive_of(x), x.spec.head_dim as f64);
    let u = bf16::UNIT_ROUNDOFF;
    close("o", &got.o, &want.o, |i| u * (1.0 + want.o[i].abs()));
    close("lse", &got.lse, &want.lse, |_| 1e-5);
    let ds = 4.0 * u * d.sqrt();
    let reads = (x.spec.queries * x.spec.heads / x.spec.kv_heads) as f64 / x.spec.keys as f64;
    close("dq", &got.dq, &want.dq, |i| ds + u * want.dq[i].abs());
    close("dk", &got.dk, &want.dk, |i| {
        ds * (1.0 + reads) + u * want.dk[i].abs()
    });
    close("dv", &got.dv, &want.dv, |i| {
        2.0 * u * (1.0 + reads) + u * want.dv[i].abs()
    });
    let log = device.launcher().take_log();
    let width = x.spec.head_dim.next_power_of_two().max(64);
    for name in ["", "_delta", "_backward_kv", "_backward_q"] {
        let name = format!("attention{name}_{width}");
        assert!(log.contains(&name), "{name} {log:?}");
    }
    let said = device.explain_attention::<bf16>(&x.spec).unwrap();
    assert_eq!(said, format!("attention_mma: attention_{width}"));
}

/// Every width that is a multiple of 8, up to the widest.
#[test]
fn every_width_runs_on_the_tensor_cores() {
    for (seed, d) in [8, 56, 64, 72, 128, 136, 200, 256].into_iter().enumerate() {
        let mut rng = Random(d as u64);
        let shape = spec((1, 70, 80), (2, 1, d), true);
        let x = Problem::<bf16>::random(&mut rng, shape);
        tensor_cores(&x, seed as u64);
        if d == 64 || d == 136 {
            let near = AttentionSpec {
                window: Some(19),
                ..shape
            };
            let x = Problem::<bf16>::random(&mut rng, near).packed(&mut rng);
            tensor_cores(&x, seed as u64 + 1);
            tensor_cores(&x.capped(0.7), seed as u64 + 2);
        }
    }
}
