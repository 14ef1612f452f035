//! What must hold of every draw, in f64 and in f32.

use quintet_ref_trainer::failure::Failure;
use quintet_ref_trainer::job::{Dtype, Job};
use quintet_ref_trainer::oracle;
use quintet_ref_trainer::record::{Record, Step};
use quintet_ref_trainer::verify::{Evidence, OracleOptimizer, Verdict, evidence, judge};

use super::Draw;

/// What one draw came to.
pub struct Outcome {
    /// What `verify` says.
    pub verdict: Verdict,
    /// The twin's steps.
    pub twin: Vec<Step>,
    /// The oracle's steps.
    pub truth: Vec<Step>,
    /// Whether each step counted as many valid tokens as the oracle.
    pub counts_equal: bool,
    /// The least distance between an expert that was chosen and one that was not.
    pub margin: f64,
}

/// How a draw that holds does so.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Held {
    /// Within the bound.
    Within,
    /// Beyond it, but no further than rounding alone explains.
    Rounding,
    /// Rounding may choose another expert: such a draw decides nothing.
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
    let steps = evidence.ours.steps.iter().zip(&evidence.truth);
    Outcome {
        counts_equal: steps.clone().all(|(x, r)| x.count == r.count),
        margin: evidence.margin,
        verdict,
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
        let beyond = |value: f64| value >= v.bound;
        let all = [
            ("loss", beyond(v.loss_rel)),
            ("gradients", beyond(v.grad_rel_max)),
            ("norm", beyond(v.grad_norm_rel)),
            ("parameters", beyond(v.param_rel_max)),
            ("balance", beyond(v.aux_rel)),
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
        Dtype::F32 => in_f32(draw, outcome),
    }
}

fn in_f64(draw: &Draw, outcome: &Outcome) -> Result<Held, String> {
    let v = &outcome.verdict;
    if v.ok {
        return bits(&draw.job, v).map(|()| Held::Within);
    }
    // Now and then rounding alone goes further: descent at a rate of 1 can be chaos, and a step in
    // which only first positions count gives q and k no gradient but rounding. One device is then
    // off as well. Such draws are counted, and held to that.
    let one_device = DEVIATIONS * distance(&draw.job, &outcome.twin, &outcome.truth);
    let bound = rounding_bound(draw, outcome)?
        .max(one_device)
        .min(MOST_IN_F64);
    let off = largest(v);
    if !outcome.exact() || off >= bound {
        return Err(format!(
            "{:?}: off by {off:.1e}, rounding explains {bound:.1e}\n{v:#?}",
            outcome.found()
        ));
    }
    Ok(Held::Rounding)
}

fn in_f32(draw: &Draw, outcome: &Outcome) -> Result<Held, String> {
    if outcome.margin < 100.0 * logit_error(&draw.job) {
        return Ok(Held::Undecided);
    }
    let (bound, off) = (rounding_bound(draw, outcome)?, largest(&outcome.verdict));
    if outcome.exact() && off < bound {
        return Ok(Held::Within);
    }
    // As in f64: where one device is as far off, the layout is not to blame.
    let one_device = DEVIATIONS * distance(&draw.job, &outcome.twin, &outcome.truth);
    if outcome.exact() && off < one_device {
        return Ok(Held::Rounding);
    }
    Err(format!(
        "off by {off:.1e}, rounding explains {bound:.1e}\n{:#?}",
        outcome.verdict
    ))
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

/// How far rounding may take a draw from the oracle: the condition of the problem times the error
/// of the way.
///
/// *Condition.* How far the oracle is from itself where each of its first parameters is rounded
/// once. It is measured, in f64, so that cancellation (in the backward of a softmax), depth and the
/// number of steps are all in it.
///
/// *Way.* Every sum on the way from tokens to a gradient rounds its terms as that did the
/// parameters. K roundings, as good as independent, have the effect of sqrt(K), not of K (Higham
/// and Mary 2019, theorem 2.4); so have sums that follow one another. Terms on the way:
///
/// ```text
/// a block, forward     norm h, q k v h, scores e, softmax and values t, o_proj n e,
///                      norm h, gate and up h, down f
/// the head             norm h, logits h, softmax v
/// backward             the same sums transposed: for the input, and for the weight
/// a weight's gradient  all tokens of the batch
/// ```
///
/// The result is a standard deviation, so to say; `DEVIATIONS` of them are the bound.
///
/// # Errors
/// What the oracle refuses.
pub fn rounding_bound(draw: &Draw, outcome: &Outcome) -> Result<f64, String> {
    let (m, b) = (&draw.job.model, &draw.job.batch);
    let block = 4 * m.hidden + m.head_dim + b.seq + m.heads * m.head_dim + m.ffn;
    let way = m.layers * block + 2 * m.hidden + m.vocab;
    // A block with experts: the router, and a sum over the choices of a token.
    let experts = m.moe.map_or(0, |moe| {
        m.layers * (m.hidden + moe.experts + moe.topk * (m.hidden + moe.ffn) + moe.shared_ffn)
    });
    let terms = 3 * (way + experts) + b.seq * b.global_batch;
    let condition = condition(draw, &outcome.truth).map_err(|e| e.to_string())?;
    Ok(DEVIATIONS * (terms as f64).sqrt() * condition)
}

const DEVIATIONS: f64 = 4.0;

/// What no draw in f64 may be off by, whatever explains it.
const MOST_IN_F64: f64 = 1e-5;

/// What one rounding of every parameter does to the oracle.
fn condition(draw: &Draw, truth: &[Step]) -> Result<f64, Failure> {
    let (job, samples) = (&draw.job, draw.samples());
    let rounded = |w: f64| match job.dtype {
        Dtype::F32 => f64::from(w as f32),
        // To a neighbour, up or down as good as at random.
        Dtype::F64 if w.to_bits() & 1 == 0 => w.next_up(),
        Dtype::F64 => w.next_down(),
    };
    let mut params = oracle::init_random(&job.model, job.seed);
    params.values_mut().flatten().for_each(|w| *w = rounded(*w));
    let mut optimizer = OracleOptimizer::new(job);
    let step = |step| optimizer.step(job, &samples, step, &mut params);
    let steps: Vec<Step> = (1..=job.steps).map(step).collect::<Result<_, _>>()?;
    Ok(distance(job, &steps, truth))
}

/// The largest difference of steps from the oracle's.
fn distance(job: &Job, steps: &[Step], truth: &[Step]) -> f64 {
    let ours = Record {
        steps: steps.to_vec(),
        ..Record::default()
    };
    let (twin, truth) = (truth.to_vec(), truth.to_vec());
    let evidence = Evidence {
        ours,
        twin,
        truth,
        ..Evidence::default()
    };
    largest(&judge(job, &evidence))
}

/// How far rounding takes a router's logits, which are of order 1: as many roundings as there are
/// terms on the way to the last router.
fn logit_error(job: &Job) -> f64 {
    let (m, b) = (&job.model, &job.batch);
    let Some(moe) = &m.moe else { return 0.0 };
    let block = 4 * m.hidden + m.head_dim + b.seq + m.heads * m.head_dim;
    let terms = m.layers * (block + moe.topk * (m.hidden + moe.ffn) + m.hidden);
    DEVIATIONS * (terms as f64).sqrt() * f64::from(f32::EPSILON) / 2.0
}

/// The largest difference of a verdict.
pub fn largest(v: &Verdict) -> f64 {
    v.loss_rel
        .max(v.grad_rel_max)
        .max(v.grad_norm_rel)
        .max(v.param_rel_max)
        .max(v.aux_rel)
}
