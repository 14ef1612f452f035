//! The router: scores, the choice of experts, the weights of the choice, and what losses of balance
//! need.
//!
//! ```text
//! p[t,e]      softmax over e of logit[t,e], or sigmoid(logit[t,e])
//! choice[t]   the topk experts of the largest p[t,e] + bias[e], largest first; of equals the lower
//! weight[t,k] scale p[t,choice] [/ sum over the choice of p]       the bias weighs nothing
//! sums[e]     sum over t of q[t,e]: q = p, of sigmoids p / sum over e of p   balance loss
//! sums[E]     sum over t of log(sum over e of exp(logit[t,e]))^2             z-loss
//! ```
//!
//! Sigmoid scores with a bias on the choice are DeepSeek-V3's (2024); the balance loss is that of
//! Switch (Fedus et al. 2021), the z-loss that of ST-MoE (Zoph et al. 2022).

use crate::error::need;
use crate::{Backend, Error, Real};

/// Added to a sum of scores before something is divided by it.
pub const LEAST_SUM: f64 = 1e-20;

/// From logits to scores.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Score {
    /// Over all experts.
    #[default]
    Softmax,
    /// Of each expert alone.
    Sigmoid,
}

/// Shape and rule of a router.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RouterSpec {
    /// Tokens.
    pub tokens: usize,
    /// Experts.
    pub experts: usize,
    /// Experts a token goes to; at most `experts`.
    pub topk: usize,
    /// From logits to scores.
    pub score: Score,
    /// Weights of a token are divided by their sum.
    pub normalize: bool,
    /// Multiplies the weights last.
    pub scale: f64,
}

impl RouterSpec {
    /// Refuses lengths that do not fit.
    pub(crate) fn check(
        &self,
        op: &'static str,
        lens: [(&'static str, usize); 4],
    ) -> Result<(), Error> {
        if self.topk == 0 || self.topk > self.experts {
            return Err(Error::Spec {
                op,
                why: "topk must be from 1 to the number of experts",
            });
        }
        let [logits, choice, weight, sums] = lens;
        let pairs = self.tokens.saturating_mul(self.topk);
        need(
            op,
            logits.0,
            self.tokens.saturating_mul(self.experts),
            logits.1,
        )?;
        need(op, choice.0, pairs, choice.1)?;
        need(op, weight.0, pairs, weight.1)?;
        need(op, sums.0, self.experts + 1, sums.1)
    }
}

/// Where [`Router::route`] writes; all is overwritten.
pub struct Routed<'a, B: Backend, A: Real> {
    /// Experts, `[t, k]`.
    pub choice_tk: B::Mut<'a, i32>,
    /// Their weights, `[t, k]`.
    pub weight_tk: B::Mut<'a, A>,
    /// `[experts + 1]`, see the head of this module.
    pub sums_e: B::Mut<'a, A>,
}

/// The router on a device. Logits are in the type that sums are taken in.
pub trait Router: Backend {
    /// Chooses and weighs.
    ///
    /// # Errors
    /// [`Error::Spec`] where `topk` is 0 or more than `experts`, [`Error::Len`] where a length does
    /// not fit.
    fn route<A: Real>(
        &self,
        spec: &RouterSpec,
        logits_te: Self::Ref<'_, A>,
        bias_e: Option<Self::Ref<'_, A>>,
        out: Routed<'_, Self, A>,
    ) -> Result<(), Error>;

    /// Gradient of the logits, overwritten, from those of the weights and of the sums. The choice
    /// is given: no gradient passes through it, nor to the bias.
    ///
    /// # Errors
    /// As [`Router::route`].
    fn route_backward<A: Real>(
        &self,
        spec: &RouterSpec,
        logits_te: Self::Ref<'_, A>,
        choice_tk: Self::Ref<'_, i32>,
        dweight_and_dsums: (Self::Ref<'_, A>, Self::Ref<'_, A>),
        dlogits_te: Self::Mut<'_, A>,
    ) -> Result<(), Error>;
}
