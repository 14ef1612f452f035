//! The laws of the ops (tests/laws), stamped on the emulated GPU in every storage type.
//!
//! The sum of squares has laws of its own here: a GPU sums in an order that depends on the length,
//! so cutting an array changes bits (not on a CPU, which sums in index order).

use quintet_kernels::emulated::Emulated;
use quintet_kernels::launch::Arch;
use quintet_kernels::optimizer::naive;
use quintet_kernels::{Backend, Error, Float, Gpu, Optimizer};

use crate::common::*;
use crate::{
    cross_entropy, embedding, folds, linear_loss, moe, norm, optimizer, pointwise, rope, seeds,
};

pub fn gpu(seed: u64) -> Gpu<Emulated> {
    Gpu::new(Emulated::new(Arch(80), seed)).unwrap()
}

/// Nothing is computed on the host: the kernels of a law's ops are in the launch log.
pub fn ran(device: &Gpu<Emulated>, kernels: &[&str]) {
    let log = device.launcher().take_log();
    // A name without the type and what comes after it.
    let base = |name: &str| {
        let cut = ["_f32", "_f64", "_bf16"].map(|t| name.find(t));
        let end = cut.into_iter().flatten().min().unwrap_or(name.len());
        name[..end].to_string()
    };
    for kernel in kernels {
        let there = log.iter().any(|name| base(name) == *kernel);
        assert!(there, "{kernel} is not in {log:?}");
    }
}

macro_rules! laws {
    ($name:ident: $t:ty, [$($test:ident: $module:ident::$law:ident $(=> [$($kernel:literal)*])?,)*]) => {
        mod $name {
            use super::*;
            $(#[test] fn $test() {
                for seed in seeds() {
                    let device = gpu(seed);
                    $module::$law::<_, $t>(&device);
                    ran(&device, &[$($($kernel),*)?]);
                }
            })*
        }
    };
    ($name:ident: $t:ty) => {
        laws!($name: $t, [
            rms_norm: norm::rms_norm => ["rms_norm"],
            rms_norm_backward: norm::rms_norm_backward =>
                ["rms_norm_backward_input" "rms_norm_backward_weight"],
            layer_norm: norm::layer_norm => ["layer_norm"],
            layer_norm_backward: norm::layer_norm_backward =>
                ["layer_norm_backward_input" "layer_norm_backward_weight"],
            rope: rope::turns => ["rope"],
            rope_adjoint: rope::inverse_is_the_adjoint,
            swiglu: pointwise::swiglu => ["swiglu" "swiglu_backward"],
            gelu: pointwise::gelu => ["gelu" "gelu_backward"],
            sums: pointwise::sums => ["add" "add_rows"],
            dropout: pointwise::dropout_by_place,
            casts: pointwise::casts => ["cast"],
            embedding: embedding::looks_up => ["embedding"],
            embedding_backward: embedding::scatters_in_order => ["embedding_backward"],
            embedding_shards: embedding::shards_sum_to_the_whole,
            cross_entropy: cross_entropy::loss_and_gradient =>
                ["logit_max" "logit_sums" "token_loss" "logit_backward"],
            cross_entropy_extremes: cross_entropy::extremes,
            linear_loss: linear_loss::in_chunks =>
                ["logit_max" "logit_sums" "shift_sums" "token_loss" "logit_backward"],
            linear_loss_memory: linear_loss::keeps_to_its_chunk,
            folds: folds::in_rank_order => ["fold"],
            adamw: optimizer::adamw => ["adamw"],
            adamw_cut: optimizer::adamw_cut_anywhere,
            sgd: optimizer::sgd => ["sgd"],
            router_ties: moe::router_ties_and_bias => ["route" "route_sums" "route_backward"],
            router_refuses: moe::router_refuses,
            rows: moe::rows_there_and_back =>
                ["gather_rows" "combine" "combine_rows" "combine_weights"],
            groups: moe::groups_are_products => ["grouped_nt" "grouped_nn" "grouped_weight"],
        ]);
    };
}

laws!(f64: f64);
laws!(f32: f32);
laws!(bf16: half::bf16);
laws!(exact: f64, [
    adamw_loop: optimizer::adamw_follows_the_loop,
    router_gradient: moe::router_gradient,
]);

fn squares<E: Float>(device: &Gpu<Emulated>) {
    let mut draw = Draw::new(4);
    for n in [0, 1, 255, 1003, 70_001] {
        let x = draw.vec::<E>(n, 2.0);
        let buf = up::<_, E>(device, &x);
        let mut sums = [(); 2].map(|()| up::<_, f64>(device, &[0.5]));
        for sum in &mut sums {
            let (x, out) = (
                Gpu::<Emulated>::whole(&buf),
                Gpu::<Emulated>::whole_mut(sum),
            );
            device.add_squares::<E>(x, out).unwrap();
        }
        let [got, again] = sums.map(|sum| down::<_, f64>(device, &sum)[0]);
        let want = 0.5 + naive::squares(&x);
        assert!((got - want).abs() <= 1e-12 * want, "{got} {want}");
        assert_eq!(got, again, "the same bits each time");
    }
    let buf = up::<_, E>(device, &[1.0]);
    let mut none = up::<_, f64>(device, &[]);
    let (x, out) = (
        Gpu::<Emulated>::whole(&buf),
        Gpu::<Emulated>::whole_mut(&mut none),
    );
    assert!(matches!(
        device.add_squares::<E>(x, out),
        Err(Error::Len { .. })
    ));
}

#[test]
fn squares_in_a_fixed_order() {
    for seed in seeds() {
        squares::<f32>(&gpu(seed));
        squares::<half::bf16>(&gpu(seed));
        let device = gpu(seed);
        squares::<f64>(&device);
        ran(&device, &["squares", "add_parts"]);
    }
}

/// Long, and the same kernels whatever is stored: logits are in Acc.
#[test]
fn routers() {
    moe::router::<_, f64>(&gpu(0));
    moe::router::<_, f32>(&gpu(1));
}
