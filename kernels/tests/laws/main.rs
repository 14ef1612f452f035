//! The laws of the ops, stamped on every device and storage type.
//!
//! Each law is a function over a device `B` and a storage type `E`. Inputs are drawn at random,
//! rounded to `E`, and the f64 `naive` of the op says what is right; the bound of a comparison is
//! counted from the roundings that the op may make.

mod common;
mod cross_entropy;
mod embedding;
mod linear_loss;
mod moe;
mod norm;
mod optimizer;
mod pointwise;
mod rope;
mod threads;

use quintet_kernels::Cpu;

/// Stamps all laws on the device that `$new` makes.
macro_rules! kernel_laws {
    ($device:ident, $new:expr) => {
        mod $device {
            use super::*;

            kernel_laws!(f64: f64, $new, in_every_type);
            kernel_laws!(f32: f32, $new, in_every_type);
            kernel_laws!(bf16: half::bf16, $new, in_every_type);
            kernel_laws!(exact: f64, $new, in_f64);
        }
    };
    ($name:ident: $t:ty, $new:expr, in_every_type) => {
        kernel_laws!($name: $t, $new, [
            rms_norm: norm::rms_norm,
            rms_norm_backward: norm::rms_norm_backward,
            layer_norm: norm::layer_norm,
            layer_norm_backward: norm::layer_norm_backward,
            rope: rope::turns,
            rope_adjoint: rope::inverse_is_the_adjoint,
            swiglu: pointwise::swiglu,
            gelu: pointwise::gelu,
            sums: pointwise::sums,
            dropout: pointwise::dropout_by_place,
            casts: pointwise::casts,
            embedding: embedding::looks_up,
            embedding_backward: embedding::scatters_in_order,
            embedding_shards: embedding::shards_sum_to_the_whole,
            cross_entropy: cross_entropy::loss_and_gradient,
            cross_entropy_extremes: cross_entropy::extremes,
            linear_loss: linear_loss::in_chunks,
            linear_loss_memory: linear_loss::keeps_to_its_chunk,
            adamw: optimizer::adamw,
            adamw_cut: optimizer::adamw_cut_anywhere,
            sgd: optimizer::sgd,
            squares: optimizer::squares,
            router: moe::router,
            router_ties: moe::router_ties_and_bias,
            router_refusals: moe::router_refuses,
            expert_rows: moe::rows_there_and_back,
            grouped_gemm: moe::groups_are_products,
        ]);
    };
    ($name:ident: $t:ty, $new:expr, in_f64) => {
        kernel_laws!($name: $t, $new, [
            rms_norm_gradient: norm::rms_norm_gradient,
            layer_norm_gradient: norm::layer_norm_gradient,
            pointwise_gradients: pointwise::gradients,
            cross_entropy_gradient: cross_entropy::gradient,
            router_gradient: moe::router_gradient,
            adamw_loop: optimizer::adamw_follows_the_loop,
        ]);
    };
    ($name:ident: $t:ty, $new:expr, [$($test:ident: $module:ident::$law:ident,)*]) => {
        mod $name {
            use super::*;
            $(#[test] fn $test() { $module::$law::<_, $t>(&$new); })*
        }
    };
}

kernel_laws!(cpu, Cpu::new(1));
kernel_laws!(cpu_with_threads, Cpu::new(3));
