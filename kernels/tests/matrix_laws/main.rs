//! Laws that every device must keep, stamped once for each device.
//!
//! A law is a function generic over the device. To put another device under the same laws, add
//! one `kernel_laws!` line with an expression that makes it.

mod attention;
mod backend;
mod gemm;
mod pieces;
mod support;
mod threads;

/// Stamps the law-suite for one device: a module of tests named after it.
macro_rules! kernel_laws {
    ($name:ident, $make:expr) => {
        mod $name {
            kernel_laws!(@stamp $make; backend
                memory_is_counted views_cut_and_join events_happen wrong_lengths_are_refused
                rows_are_copied);
            kernel_laws!(@stamp $make; gemm
                exact_on_integers near_naive split_changes_no_bit empty_and_deep epilogues
                refuses_what_does_not_fit adjoint);
            kernel_laws!(@stamp $make; attention
                one_hot_keys_are_looked_up near_naive rows_do_not_know_each_other
                nothing_seen_gives_zero finite_differences adjoint refuses_what_does_not_fit
                one_key_has_no_gradient);
            kernel_laws!(@stamp $make; pieces
                in_order_they_have_the_bits_of_one_call in_any_cut_and_order_they_sum_up
                unseen_ones_change_no_bit error_does_not_grow_with_their_number
                refuses_what_does_not_fit);
        }
    };
    (@stamp $make:expr; $suite:ident $($law:ident)*) => {
        mod $suite {
            $(#[test] fn $law() { crate::$suite::$law(&$make); })*
        }
    };
}

kernel_laws!(one_thread, quintet_kernels::Cpu::new(1));
kernel_laws!(three_threads, quintet_kernels::Cpu::new(3));
