//! Mixture of experts: the router, the permutation by expert, and products of groups of rows.
//!
//! ```text
//! logits_te --route--> choice_tk, weight_tk          which experts a token goes to, and how much
//! choice_tk --Permutation--> rows by expert          expert 0: pairs 1 4 | expert 1: pairs 0 2 | ..
//! x_td --gather_rows--> x_rd --grouped_gemm--> y_rd  one matrix an expert
//! y_rd --combine--> y_td                             y[t] = sum over k of weight[t,k] y[row of (t,k)]
//! ```
//!
//! Legend: t token, e expert, k choice of a token, r row (a pair of token and choice that was not
//! dropped), d width. Pair (t, k) has number `t * topk + k`; everything is in the order of pairs,
//! so nothing depends on timing or on the number of threads.

mod cpu;
mod grouped;
pub mod naive;
mod permute;
mod router;

pub use grouped::{GroupedGemm, GroupedSpec};
#[cfg(feature = "gpu")]
pub(crate) use grouped::{check_grouped, check_grouped_weight};
pub use permute::{Combine, Permutation, Permute, capacity, drop_beyond};
pub use router::{LEAST_SUM, Routed, Router, RouterSpec, Score};
