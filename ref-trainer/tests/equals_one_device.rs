//! The property that this project exists for: whatever the layout, a step is what one device
//! computes.
//!
//! `QUINTET_CASES=N` runs N draws of each property instead of the few that always run.

mod common;

use std::cell::RefCell;

use common::coverage::Coverage;
use common::{Draw, cases, draws, runner};
use proptest::test_runner::{TestCaseError, TestError};
use quintet_ref_trainer::failure::Failure;
use quintet_ref_trainer::job::{Dtype, Job};
use quintet_ref_trainer::verify::{Verdict, evidence, judge};

/// What one draw came to.
struct Outcome {
    verdict: Verdict,
    /// The limit of the norm was felt.
    clipped: bool,
    /// All that is no matter of rounding: copies, bytes, counts of tokens.
    exact: bool,
}

fn run(draw: &Draw) -> Result<Outcome, Failure> {
    draw.job.check()?;
    let evidence = evidence(&draw.job, &draw.samples())?;
    let limit = draw.job.optimizer.clip_grad;
    let clipped = limit > 0.0 && evidence.truth.iter().any(|step| step.norm > limit);
    let verdict = judge(&draw.job, &evidence);
    let counts = evidence
        .ours
        .steps
        .iter()
        .zip(&evidence.truth)
        .all(|(x, r)| x.count == r.count);
    let bytes = verdict.bytes_counted == verdict.bytes_predicted;
    let exact = counts && bytes && verdict.copies_differ.is_empty();
    Ok(Outcome {
        verdict,
        clipped,
        exact,
    })
}

/// Runs `holds` on draws of `dtype`; the smallest that fails is told with how to run it again.
fn property(
    dtype: Dtype,
    cases: u32,
    holds: impl Fn(&Draw, &Outcome) -> Result<(), String>,
) -> Coverage {
    let coverage = RefCell::new(Coverage::default());
    let result = runner(cases).run(&draws(dtype), |draw| {
        let outcome = run(&draw).map_err(|e| TestCaseError::fail(e.to_string()))?;
        coverage.borrow_mut().add(&draw, outcome.clipped);
        holds(&draw, &outcome).map_err(TestCaseError::fail)
    });
    match result {
        Ok(()) => coverage.into_inner(),
        Err(TestError::Fail(why, draw)) => panic!("{why}\n{draw}\n{}", draw.replay()),
        Err(TestError::Abort(why)) => panic!("gave up: {why}"),
    }
}

/// The largest differences of a run.
#[derive(Debug, Default)]
struct Worst {
    loss: f64,
    grad: f64,
    norm: f64,
    param: f64,
}

impl Worst {
    fn add(&mut self, v: &Verdict) {
        self.loss = self.loss.max(v.loss_rel);
        self.grad = self.grad.max(v.grad_rel_max);
        self.norm = self.norm.max(v.grad_norm_rel);
        self.param = self.param.max(v.param_rel_max);
    }
}

#[test]
fn in_f64_every_layout_equals_the_oracle() {
    let worst = RefCell::new(Worst::default());
    let coverage = property(Dtype::F64, cases(160), |draw, outcome| {
        let v = &outcome.verdict;
        if !v.ok {
            return Err(format!("{v:#?}"));
        }
        worst.borrow_mut().add(v);
        bits(draw, v)
    });
    println!("{coverage}{:#?}", worst.into_inner());
    assert_eq!(coverage.gaps(), Vec::<String>::new());
}

/// Stages alone change no bit where no table is shared, beside the norm's.
fn bits(draw: &Draw, v: &Verdict) -> Result<(), String> {
    let l = &draw.job.layout;
    let stages_alone = l.dp == 1 && l.tp == 1 && (l.pp == 1 || !draw.job.model.tied);
    let b = v.bit_equal;
    if stages_alone && !(b.loss && b.grads && (b.params || draw.job.optimizer.clip_grad > 0.0)) {
        return Err(format!("stages alone must keep the twin's bits: {b:?}"));
    }
    Ok(())
}

/// Unit roundoff of f32.
const U: f64 = 1.0 / (1 << 24) as f64;

/// How far f32 may be from the oracle.
///
/// A sum of K terms errs by at most about sqrt(K) u of its size, rounding errors being as good as
/// independent (Higham and Mary 2019, theorem 2.4, in place of the worst case K u, which is never
/// met). On the way from a token to a gradient such sums follow one another, and independent errors
/// add in squares, so that the way as a whole errs by u sqrt(sum of all K):
///
/// ```text
/// a block, forward     norm h, q k v h, scores e, softmax and values t, o_proj n e,
///                      norm h, gate and up h, down f
/// the head             norm h, logits h, softmax v
/// backward             the same sums again, transposed, and once more for the second operand
/// a weight's gradient  all tokens of the batch
/// ```
///
/// A norm at the entry of each region keeps sizes where they are, so an error is passed on about
/// as large as it is. What is left goes into one factor: `MARGIN` standard deviations for the
/// largest of some thousand elements, times the cancellation in the softmax's backward (p (dp - sum
/// p dp)). Each further step begins from parameters that are off by that much.
fn f32_bound(job: &Job) -> f64 {
    let (m, b) = (&job.model, &job.batch);
    let block = 4 * m.hidden + m.head_dim + b.seq + m.heads * m.head_dim + m.ffn;
    let way = m.layers * block + 2 * m.hidden + m.vocab;
    let tokens = b.seq * b.global_batch;
    MARGIN * U * ((3 * way + tokens) as f64).sqrt() * job.steps as f64
}

const MARGIN: f64 = 40.0;

#[test]
fn in_f32_every_layout_equals_the_oracle_within_a_derived_bound() {
    let seen = RefCell::new(Vec::new());
    property(Dtype::F32, cases(50), |draw, outcome| {
        let v = &outcome.verdict;
        let (bound, worst) = (f32_bound(&draw.job), largest(v));
        if std::env::var("QUINTET_SHOW").is_ok() {
            println!(
                "{worst:.2e} {bound:.2e} {:.3} {} {draw}\n",
                worst / bound,
                v.worst
            );
        }
        seen.borrow_mut().push((worst / bound, worst, bound));
        if worst >= bound {
            return Err(format!(
                "{worst:.1e} is over the bound of {bound:.1e}\n{v:#?}"
            ));
        }
        if outcome.exact {
            Ok(())
        } else {
            Err(format!("{v:#?}"))
        }
    });
    let mut seen = seen.into_inner();
    seen.sort_by(|a, b| a.0.total_cmp(&b.0));
    let (closest, worst, bound) = seen[seen.len() - 1];
    let middle = seen[seen.len() / 2];
    println!(
        "worst observed {worst:.2e} beside its bound {bound:.2e}; median {:.2e} beside {:.2e}",
        middle.1, middle.2
    );
    assert!(
        closest > 0.01,
        "a bound over 100 times the worst observed is no bound: {closest:.1e}"
    );
}

/// The largest difference of a verdict.
fn largest(v: &Verdict) -> f64 {
    v.loss_rel
        .max(v.grad_rel_max)
        .max(v.grad_norm_rel)
        .max(v.param_rel_max)
}
