//! What must hold of every draw, in each type.

use quintet_ref_trainer::failure::Failure;
use quintet_ref_trainer::job::{Dtype, Job};
use quintet_ref_trainer::record::Step;
use quintet_ref_trainer::tolerance::{DEVIATIONS, Each, ceiling, derived, in_sums, units};
use quintet_ref_trainer::verify::{Evidence, Verdict, distances, evidence, judge, scatter};

use super::Draw;

/// What one draw came to.
pub struct Outcome {
    /// What `verify` says.
    pub verdict: Verdict,
    /// The layout's steps.
    pub ours: Vec<Step>,
    /// The twin's steps.
    pub twin: Vec<Step>,
    /// The oracle's steps.
    pub truth: Vec<Step>,
    /// Whether each step counted as many valid tokens as the oracle.
    pub counts_equal: bool,
    /// How far roundings took the oracle.
    pub scatter: Each,
}

/// How a draw that holds does so.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Held {
    /// Within the bound.
    Within,
    /// Beyond it, but no further than rounding alone explains.
    Rounding,
    /// Gradients that are chaos: rounding may have led anywhere, and such a draw decides little.
    Undecided,
}

/// Runs a draw under its layout, on the oracle and on the twin.
///
/// # Errors
/// What one of them cannot do.
pub fn run(draw: &Draw) -> Result<Outcome, Failure> {
    draw.job.check()?;
    Ok(outcome(draw, evidence(&draw.job, &draw.samples())?))
}

/// What evidence comes to.
pub fn outcome(draw: &Draw, evidence: Evidence) -> Outcome {
    let verdict = judge(&draw.job, &evidence);
    let mut steps = evidence.ours.steps.iter().zip(&evidence.truth);
    Outcome {
        counts_equal: steps.all(|(x, r)| x.count == r.count),
        scatter: evidence.scatter,
        verdict,
        ours: evidence.ours.steps,
        twin: evidence.twin,
        truth: evidence.truth,
    }
}

impl Outcome {
    /// Whether the limit of the norm was felt.
    pub fn clipped(&self, job: &Job) -> bool {
        let limit = job.optimizer.clip_grad;
        limit > 0.0 && self.truth.iter().any(|step| step.norm > limit)
    }

    /// All that is no matter of rounding holds: copies, bytes sent and held, counts of tokens and
    /// of choices.
    fn exact(&self) -> bool {
        let v = &self.verdict;
        let bytes = v.bytes_counted == v.bytes_predicted && v.memory_differs.is_empty();
        self.counts_equal && bytes && v.copies_differ.is_empty() && v.routed_equal
    }

    /// The comparisons that found a difference.
    pub fn found(&self) -> Vec<&'static str> {
        let v = &self.verdict;
        let within = |value: f64, bound: f64| value <= bound;
        let all = [
            ("loss", !within(v.loss_rel, v.bounds.loss)),
            ("gradients", !within(v.grad_rel_max, v.bounds.grads)),
            ("norm", !within(v.grad_norm_rel, v.bounds.norm)),
            ("parameters", !within(v.param_rel_max, v.bounds.params)),
            ("balance", !within(v.aux_rel, v.bounds.aux)),
            ("routing", !v.routed_equal),
            ("counts", !self.counts_equal),
            ("copies", !v.copies_differ.is_empty()),
            ("bytes", v.bytes_counted != v.bytes_predicted),
            ("memory", !v.memory_differs.is_empty()),
        ];
        let found = all.into_iter().filter(|(_, seen)| *seen);
        found.map(|(name, _)| name).collect()
    }
}

/// What must hold of a draw.
///
/// # Errors
/// What does not.
pub fn holds(draw: &Draw, outcome: &Outcome) -> Result<Held, String> {
    match draw.job.dtype {
        Dtype::F64 => in_f64(draw, outcome),
        Dtype::F32 | Dtype::Bf16 => narrow(draw, outcome),
    }
}

fn in_f64(draw: &Draw, outcome: &Outcome) -> Result<Held, String> {
    let v = &outcome.verdict;
    if v.ok {
        return bits(&draw.job, v).map(|()| Held::Within);
    }
    // Now and then rounding alone goes further: descent at a rate of 1 can be chaos, and a step in
    // which only first positions count gives q and k no gradient but rounding. Such draws are
    // counted, and held to what roundings do to the oracle.
    let (bound, off) = (rounding_bound(draw, outcome)?, largest(v));
    let explained = off <= bound;
    if !outcome.exact() || !explained {
        return Err(format!(
            "{:?}: off by {off:.1e}, rounding explains {bound:.1e}\n{v:#?}",
            outcome.found()
        ));
    }
    Ok(Held::Rounding)
}

/// Within the bounds that are derived for the draw; in bf16 also as near to the twin as sums in f32
/// are.
fn narrow(draw: &Draw, outcome: &Outcome) -> Result<Held, String> {
    let v = &outcome.verdict;
    let twin = beside_the_twin(&draw.job, outcome);
    if let Some((what, off, bound)) = twin.filter(|(_, off, bound)| off > bound) {
        return Err(format!(
            "[\"{what}\"]: {off:.1e} from the twin, sums in f32 explain {bound:.1e}\n{v:#?}"
        ));
    }
    // A quantity of which roundings explain anything decides nothing; the others still do.
    let most = ceiling(draw.job.dtype);
    let chaos = |what: &str| match what {
        "loss" => v.bounds.loss >= most,
        "norm" => v.bounds.norm >= most,
        "parameters" => v.bounds.params >= most,
        "balance" => v.bounds.aux >= most,
        "gradients" | "routing" => v.bounds.grads >= most,
        // What is sent to experts is predicted from the oracle's choices.
        "bytes" => v.bounds.grads >= most && !v.routed_equal,
        // And what their rows take.
        "memory" => {
            let rows = v.memory_differs.contains("of activations");
            rows && v.bounds.grads >= most && !v.routed_equal
        }
        _ => false,
    };
    let found: Vec<_> = outcome.found().into_iter().filter(|w| !chaos(w)).collect();
    if !found.is_empty() {
        return Err(format!("{found:?}\n{v:#?}"));
    }
    Ok(match twin {
        None if chaos("gradients") => Held::Undecided,
        _ => Held::Within,
    })
}

/// Stages alone change no bit where no table is shared. (The norm is summed in another order, so
/// that clipping makes other bits of it.)
fn bits(job: &Job, v: &Verdict) -> Result<(), String> {
    let (l, bits) = (&job.layout, v.bit_equal);
    let stages_alone = l.dp == 1 && l.tp == 1 && l.cp == 1 && (l.pp == 1 || !job.model.tied);
    let clips = job.optimizer.clip_grad > 0.0;
    if stages_alone && !clips && !(bits.loss && bits.grads && bits.params) {
        return Err(format!("stages alone must keep the twin's bits: {bits:?}"));
    }
    Ok(())
}

/// How far roundings may take a draw from the oracle ([`derived`]).
///
/// # Errors
/// What the oracle refuses.
pub fn rounding_bound(draw: &Draw, outcome: &Outcome) -> Result<f64, String> {
    let scatter = scatter(&draw.job, &draw.samples(), &outcome.truth, &[]);
    let scatter = scatter.map_err(|e| e.to_string())?;
    Ok(derived(&draw.job, scatter).largest())
}

/// How far the first gradients of a layout in bf16 are from the twin's, and how far they may be: a
/// share of how far one rounding in bf16 takes the oracle; none where values are rounded that the twin
/// does not have (parts of sums over tp).
///
/// Nothing on the way of a token differs from the twin where it stays on one rank: what differs are
/// sums of gradients, which are taken in f32, so that their roundings are smaller by the quotient of
/// the units. Over cp the sums of attention over keys differ in f32 too, and now and then a value falls
/// to the other side of a rounding in bf16: with a probability p of one f32 rounding over one in bf16, and then
/// by 2 units instead of the unit / sqrt(3) of a random rounding.
pub fn beside_the_twin(job: &Job, outcome: &Outcome) -> Option<(&'static str, f64, f64)> {
    let (l, (unit, wide)) = (&job.layout, units(Dtype::Bf16));
    if job.dtype != Dtype::Bf16 || l.tp > 1 || l.etp > 1 {
        return None;
    }
    let quotient = wide / unit;
    let (what, share) = if l.cp == 1 {
        ("twin, whole tokens", DEVIATIONS * in_sums(job) * quotient)
    } else {
        let over_keys = (job.batch.seq as f64 / 2.0).sqrt();
        let share = DEVIATIONS * (12.0 * over_keys * quotient).sqrt();
        ("twin, over cp", share)
    };
    let (ours, twin) = (&outcome.ours[..1], &outcome.twin[..1]);
    let off = distances(job, ours, twin).0.grads;
    Some((what, off, share * outcome.scatter.grads))
}

/// The largest difference of a verdict.
pub fn largest(v: &Verdict) -> f64 {
    v.loss_rel
        .max(v.grad_rel_max)
        .max(v.grad_norm_rel)
        .max(v.param_rel_max)
        .max(v.aux_rel)
}
