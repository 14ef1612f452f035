//! What holds of every layout without a second model to compare with: laws of the mathematics and
//! of the messages.

mod common;

use std::collections::{BTreeMap, BTreeSet};

use common::watched::{Group, Log, Seen, watch};
use common::{Deal, Draw, cut, plant, samples_of, small_job, text, with};
use quintet_collectives::DType;
use quintet_collectives::transport::Call;
use quintet_collectives::transport::local::World;
use quintet_kernels::{Scalar, bf16};
use quintet_planner::config::{Batch, Layout};
use quintet_planner::traffic::{self, WireTypes};
use quintet_ref_trainer::compare::{Tensors, compare};
use quintet_ref_trainer::data::{Corpus, RandomMask, Samples};
use quintet_ref_trainer::failure::Failure;
use quintet_ref_trainer::job::{Dtype, Job};
use quintet_ref_trainer::oracle::{self, EMBEDDING, HEAD};
use quintet_ref_trainer::rank::Begin;
use quintet_ref_trainer::record::{Recorded, Step, record, record_on};
use quintet_ref_trainer::verify::{OracleOptimizer, predicted_rows};

/// Layouts that between them cut everything that can be cut.
const MESHES: [(usize, usize, usize); 4] = [(1, 1, 1), (3, 1, 2), (1, 4, 2), (2, 2, 2)];

/// One step of the job cut over `mesh`, sequence-parallel and ZeRO-1 where there is a tp or dp.
fn on(job: &Job, mesh: (usize, usize, usize)) -> Job {
    let job = with(&cut(job, mesh), |l| {
        (l.sequence_parallel, l.zero_stage) = (l.tp > 1, 1)
    });
    Job { steps: 1, ..job }
}

fn first(job: &Job, samples: &Samples) -> Step {
    record(job, samples, Begin::Random)
        .expect("a run")
        .steps
        .remove(0)
}

fn prepared<E: Scalar>(
    job: &Job,
    samples: &Samples,
    prepare: impl Fn(&mut Recorded<'_, E>) -> Result<(), Failure> + Sync,
) -> Step {
    let world = World::new(job.layout.world()).expect("a world");
    let run = record_on::<E>(&world, job, samples, Begin::Random, prepare);
    run.expect("a run").steps.remove(0)
}

fn assert_close(what: &str, a: &Step, b: &Step) {
    let grads = compare(&a.grads, &b.grads);
    let loss = (a.loss - b.loss).abs() / b.loss;
    assert!(
        loss < 1e-12 && grads.relative < 1e-11,
        "{what}: loss {loss:.1e}, {grads:?}"
    );
}

/// A batch that holds each sample twice has the same mean: losses are divided by the count of
/// the whole batch and summed over microbatches, neither averaged nor summed twice.
#[test]
fn repeating_every_microbatch_changes_no_mean() {
    let job = Job {
        batch: Batch {
            seq: 8,
            micro_batch: 1,
            global_batch: 6,
        },
        ..small_job()
    };
    // A text with room for one window: every sample is that window.
    let corpus = Corpus::from_bytes("(one window)", &text(job.model.vocab, 9, 5)).expect("a text");
    let samples = Samples::new(corpus, job.seed, 8).expect("a window");
    assert_eq!(samples.sample(1, 0).tokens, samples.sample(2, 17).tokens);
    for mesh in MESHES {
        let once = first(&on(&job, mesh), &samples);
        for times in [2, 3] {
            let mut more = on(&job, mesh);
            more.batch.global_batch *= times;
            assert_close(
                &format!("{mesh:?} x {times}"),
                &first(&more, &samples),
                &once,
            );
        }
    }
}

/// Which samples share a microbatch, and which replica has them, is no part of the problem.
#[test]
fn dealing_the_batch_differently_changes_no_mean() {
    let mut job = small_job();
    job.batch.global_batch = 24;
    let samples = samples_of(&job).with_mask(RandomMask {
        tokens: 0.4,
        samples: 0.3,
    });
    let one = first(&on(&job, (1, 1, 1)), &samples);
    for mesh in MESHES {
        for micro_batch in [1, 2, 4] {
            let mut job = on(&job, mesh);
            job.batch.micro_batch = micro_batch;
            let what = format!("{mesh:?} micro {micro_batch}");
            assert_close(&what, &first(&job, &samples), &one);
        }
    }
}

/// Tokens have no order: renaming them renames rows of the tables' gradients, though every row
/// moves to another rank.
#[test]
fn renaming_tokens_renames_rows() {
    let job = small_job();
    let (vocab, hidden) = (job.model.vocab, job.model.hidden);
    let renamed = |token: usize| vocab - 1 - token;
    let bytes = text(vocab, 400, job.seed);
    let mirror: Vec<u8> = bytes
        .iter()
        .map(|b| renamed(usize::from(*b)) as u8)
        .collect();
    let samples = |bytes: &[u8]| {
        let corpus = Corpus::from_bytes("(renamed)", bytes).expect("a text");
        Samples::new(corpus, job.seed, job.batch.seq).expect("a window")
    };
    let is_table = |name: &str| name == EMBEDDING || name == HEAD;
    let full = oracle::init_random(&job.model, job.seed);
    for mesh in MESHES {
        let job = on(&job, mesh);
        let plain = first(&job, &samples(&bytes));
        let mut turned = prepared::<f64>(&job, &samples(&mirror), |rank| {
            plant::set(rank, |name, i, was| {
                if !is_table(name) {
                    return was;
                }
                full[name][renamed(i / hidden) * hidden + i % hidden]
            })
        });
        for (_, grad) in turned.grads.iter_mut().filter(|(name, _)| is_table(name)) {
            *grad = grad.rchunks_exact(hidden).flatten().copied().collect();
        }
        assert_close(&format!("{mesh:?}"), &turned, &plain);
    }
}

/// Scaling by powers of two is exact, so here the scale of a gradient is seen to the last bit. The
/// residual stream twice as large (tables, o_proj, down_proj; eps to match) leaves loss and all
/// other gradients alone and halves theirs; a final norm twice as large under half a head does the
/// same to those two.
#[test]
fn gradients_scale_exactly() {
    fn hold<E: Scalar>(dtype: Dtype, mesh: (usize, usize, usize)) {
        let writes =
            |name: &str| name == EMBEDDING || name.contains("o_proj") || name.contains("down_proj");
        let factor = |name: &str| match name {
            HEAD => 0.5,
            oracle::FINAL_NORM => 2.0,
            _ if writes(name) => 2.0,
            _ => 1.0,
        };
        let job = Job {
            dtype,
            ..on(&small_job(), mesh)
        };
        let plain = first(&job, &samples_of(&job));
        let mut larger = job.clone();
        larger.model.norm_eps *= 4.0;
        let scaled = prepared::<E>(&larger, &samples_of(&job), |rank| {
            plant::set(rank, |name, _, was| was * factor(name))
        });
        let expected: Tensors = plain
            .grads
            .iter()
            .map(|(name, grad)| {
                (
                    name.clone(),
                    grad.iter().map(|g| g / factor(name)).collect(),
                )
            })
            .collect();
        assert_eq!(
            scaled.loss.to_bits(),
            plain.loss.to_bits(),
            "{mesh:?} {dtype:?}"
        );
        let found = compare(&scaled.grads, &expected);
        assert!(found.bit_equal, "{mesh:?} {dtype:?}: {found:?}");
    }
    for mesh in MESHES {
        hold::<f64>(Dtype::F64, mesh);
        hold::<f32>(Dtype::F32, mesh);
        hold::<bf16>(Dtype::Bf16, mesh);
    }
}

/// Draws for the laws of messages: as many ranks and features as the suite has, one or two steps.
fn message_draws(count: u32) -> Vec<Draw> {
    let deal = Deal::new(Dtype::F64, count);
    let draw = |number| {
        let mut draw = deal.draw(number);
        draw.job.steps = 2;
        draw
    };
    deal.numbers.clone().map(draw).collect()
}

/// The label under which a group is counted; none for what is not training.
fn label(name: &str) -> Option<&str> {
    let first = name.split(' ').next()?;
    (first != "report").then_some(first)
}

/// What each rank handed to its transports, by label.
fn sent(log: &Log, world: usize) -> Vec<BTreeMap<String, u64>> {
    let mut ranks = vec![BTreeMap::new(); world];
    for ((name, _), members) in log {
        let Some(label) = label(name) else { continue };
        for (&rank, seen) in members {
            let bytes: usize = seen.sent.iter().map(|(_, bytes)| bytes).sum();
            if bytes > 0 {
                *ranks[rank].entry(label.to_string()).or_default() += bytes as u64;
            }
        }
    }
    ranks
}

/// What the planner says of each rank, over all steps, experts' rows as the oracle routes them.
fn planned(job: &Job, samples: &Samples) -> Vec<BTreeMap<String, u64>> {
    let types = WireTypes {
        storage: DType::F64,
        accumulation: DType::F64,
    };
    let step = traffic::step(&job.model, &job.layout, &job.batch, types).expect("a plan");
    let mut params = oracle::init_random(&job.model, job.seed);
    let mut optimizer = OracleOptimizer::new(job);
    let mut ranks = vec![BTreeMap::<String, u64>::new(); job.layout.world()];
    for number in 1..=job.steps {
        optimizer
            .step(job, samples, number, &mut params)
            .expect("a step");
        let kept = optimizer.routed.kept.clone();
        let rows = predicted_rows(job, &traffic::Routing { kept }).expect("a plan");
        for (sum, sent) in ranks.iter_mut().zip(step.iter().zip(&rows)) {
            for (group, bytes) in sent.0.iter().chain(sent.1).filter(|(_, bytes)| **bytes > 0) {
                *sum.entry(group.clone()).or_default() += bytes;
            }
        }
    }
    ranks
}

#[test]
fn every_rank_sends_what_the_planner_says() {
    for draw in message_draws(30) {
        let (world, samples) = (draw.job.layout.world(), draw.samples());
        let predicted = planned(&draw.job, &samples);
        let log = watch(&draw.job, &draw.samples()).expect("a run");
        assert_eq!(sent(&log, world), predicted, "on the transport\n{draw}");
        let counted = record(&draw.job, &draw.samples(), Begin::Random)
            .expect("a run")
            .bytes;
        assert_eq!(counted, predicted, "by the communicators\n{draw}");
    }
}

#[test]
fn members_of_a_group_issue_the_same_calls_whatever_the_data() {
    for draw in message_draws(30) {
        let log = watch(&draw.job, &draw.samples()).expect("a run");
        for ((name, ranks), members) in &log {
            if ranks.len() < 2 {
                continue;
            }
            let calls: Vec<_> = members.values().map(|seen| &seen.calls).collect();
            assert!(
                calls.windows(2).all(|pair| pair[0] == pair[1]),
                "{name} {ranks:?}\n{draw}"
            );
        }
        // All masked, or nothing; documents or none; a text of one token, which sends every token to
        // the same experts: neither a call nor a message less.
        for tokens in [0.0, 1.0] {
            let mask = RandomMask {
                tokens,
                samples: 0.0,
            };
            let other = watch(&draw.job, &draw.samples().with_mask(mask)).expect("a run");
            let what = format!("masking {tokens} of the tokens");
            assert_eq!(changed(&log, &other), None, "{what} changes it\n{draw}");
        }
        let packed = !draw.job.pack_documents;
        let other = watch(&draw.job, &draw.samples().with_documents(packed)).expect("a run");
        assert_eq!(changed(&log, &other), None, "documents change it\n{draw}");
        let corpus = Corpus::from_bytes("(one token)", &[1; 400]).expect("a text");
        let skewed = Samples::new(corpus, draw.job.seed, draw.job.batch.seq).expect("a window");
        let other = watch(&draw.job, &skewed).expect("a run");
        assert_eq!(changed(&log, &other), None, "one token changes it\n{draw}");
    }
}

/// The first group whose calls or messages differ. Rows go where routers send them: over ep and etp
/// lengths may differ, and with them the plans that are chosen, but no call.
fn changed(a: &Log, b: &Log) -> Option<Group> {
    let groups: BTreeSet<&Group> = a.keys().chain(b.keys()).collect();
    let differs = |group: &&Group| {
        let rows = matches!(label(&group.0), Some("ep" | "etp"));
        let seen = |log: &Log| {
            let of = |seen: &Seen| {
                if rows {
                    without_lengths(seen)
                } else {
                    seen.clone()
                }
            };
            let members = log.get(*group).into_iter().flatten();
            members.map(|(rank, seen)| (*rank, of(seen))).collect()
        };
        let (a, b): (Vec<(usize, Seen)>, Vec<_>) = (seen(a), seen(b));
        a != b
    };
    groups.into_iter().find(differs).cloned()
}

fn without_lengths(seen: &Seen) -> Seen {
    let call = |call: &Call| Call {
        len: 0,
        counts: 0,
        ..*call
    };
    Seen {
        calls: seen.calls.iter().map(call).collect(),
        sent: Vec::new(),
    }
}

/// The control of the two above: a log that sees nothing would satisfy them.
#[test]
fn a_log_sees_what_passes() {
    let job = on(&small_job(), (2, 2, 2));
    let log = watch(&job, &samples_of(&job)).expect("a run");
    let total = |log: &Log| sent(log, 8).iter().flat_map(BTreeMap::values).sum::<u64>();
    let labels: Vec<&str> = ["dp", "pp", "tp", "world"].into();
    for rank in sent(&log, 8) {
        assert_eq!(rank.keys().map(String::as_str).collect::<Vec<_>>(), labels);
    }
    let plain = Layout {
        sequence_parallel: false,
        ..job.layout.clone()
    };
    let plain = Job {
        layout: plain,
        ..job.clone()
    };
    let other = watch(&plain, &samples_of(&job)).expect("a run");
    assert!(other != log && total(&other) > 0);
}

/// A batch that replicas cannot share evenly is refused by the ranks themselves, not only by the
/// command line: part of it would go unseen.
#[test]
fn a_batch_that_cannot_be_dealt_is_refused() {
    let mut job = cut(&small_job(), (2, 1, 1));
    job.batch = Batch {
        micro_batch: 5,
        ..job.batch
    };
    let refused = record(&job, &samples_of(&job), Begin::Random).expect_err("12 samples in fives");
    assert!(refused.sentence.contains("no multiple"), "{refused}");
}
