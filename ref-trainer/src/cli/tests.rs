use super::*;
use crate::failure::Exit;
use crate::job::{DataSource, Decay, Dtype, LogFormat, OptimizerKind, Over, Ranks};
use crate::model_config::Model;
use proptest::prelude::*;
use quintet_parallel_layers::Recompute;
use quintet_parallel_layers::moe::Score;
use quintet_parallel_layers::pipeline::ScheduleKind;
use quintet_planner::CpComm;
use quintet_planner::config::{Layout, MoeConfig};

fn run(line: &str) -> Result<Command, Failure> {
    let words = std::iter::once("quintet").chain(line.split_whitespace());
    parse(words, &Variables::new())
}

fn train(line: &str) -> Job {
    match run(line) {
        Ok(Command::Train(job)) => job,
        other => panic!("{line}: {other:?}"),
    }
}

fn verify(line: &str) -> Job {
    match run(line) {
        Ok(Command::Verify { job, .. }) => job,
        other => panic!("{line}: {other:?}"),
    }
}

/// Refused with exit 2, in one sentence that holds `words`.
fn refused(line: &str, words: &str) {
    let failure = run(line).expect_err(line);
    assert_eq!(failure.exit, Exit::Usage, "{line}: {failure}");
    let sentence = failure.sentence;
    assert!(sentence.contains(words), "{line}: {sentence}");
    assert!(
        !sentence.contains('\n') && !sentence.ends_with('.'),
        "{line}: {sentence}"
    );
}

/// Every flag of the contract (DESIGN, "The command line") and every spelling of Megatron's that
/// we take.
const CONTRACT: &str = "data-parallel-size tensor-parallel-size pipeline-parallel-size \
    context-parallel-size expert-parallel-size expert-tensor-parallel-size dp tp pp cp ep etp \
    tensor-model-parallel-size pipeline-model-parallel-size expert-model-parallel-size \
    sequence-parallel zero-stage use-distributed-optimizer schedule virtual-stages \
    num-virtual-stages-per-pipeline-rank cp-comm cp-comm-type recompute recompute-granularity \
    ulysses-degree pipeline-layout pipeline-model-parallel-layout hybrid-shard-size bucket-bytes \
    reduction-order model dropout window-size pack-documents \
    untie-embeddings-and-output-weights num-experts moe-router-topk moe-router-score-function \
    moe-aux-loss-coeff moe-z-loss-coeff moe-capacity-factor moe-expert-capacity-factor \
    moe-ffn-hidden-size moe-router-pre-softmax moe-router-topk-scaling-factor \
    moe-router-enable-expert-bias moe-router-bias-update-rate \
    moe-shared-expert-intermediate-size moe-shared-expert-gate optimizer \
    lr min-lr lr-decay-style lr-warmup-iters weight-decay clip-grad adam-beta1 adam-beta2 adam-eps \
    eval-interval steps train-iters micro-batch-size mbs global-batch-size gbs seq-length seq-len \
    seed data data-path dtype device launch transport constants threads-per-rank save load save-interval \
    run-dir metrics trace profile-step-start profile-step-end report tensorboard-dir log-format config mask-fraction \
    mask-samples prove quiet";

#[test]
fn every_flag_of_the_contract_is_known() {
    let command = command();
    let spelt = |command: &clap::Command| -> Vec<String> {
        let names = |arg: &clap::Arg| {
            let aliases = arg.get_all_aliases().unwrap_or_default();
            arg.get_long()
                .into_iter()
                .chain(aliases)
                .map(String::from)
                .collect::<Vec<_>>()
        };
        command.get_arguments().flat_map(names).collect()
    };
    let of = |name| spelt(command.find_subcommand(name).unwrap());
    for (place, known) in [
        ("", spelt(&command)),
        ("train", of("train")),
        ("verify", of("verify")),
    ] {
        for flag in CONTRACT.split_whitespace() {
            assert!(known.iter().any(|name| name == flag), "{place} --{flag}");
        }
    }
    for flag in [
        "model",
        "data",
        "seq-length",
        "json",
        "dp",
        "tensor-model-parallel-size",
        "load",
    ] {
        assert!(of("eval").iter().any(|name| name == flag), "eval --{flag}");
    }
    command.debug_assert();
}

#[test]
fn each_flag_reaches_the_job() {
    let cases: &[(&str, fn(&mut Job))] = &[
        ("--dp 2", |j| j.layout.dp = 2),
        ("--data-parallel-size 2", |j| j.layout.dp = 2),
        ("--tp 4", |j| j.layout.tp = 4),
        ("--tensor-model-parallel-size=4", |j| j.layout.tp = 4),
        ("--pipeline-model-parallel-size 4", |j| j.layout.pp = 4),
        (
            "--cp 1 --ep 1 --etp 1 --virtual-stages 1 --recompute none",
            |_| {},
        ),
        (
            "--model tiny-moe --dp 4 --ep 2 --etp 2 --moe-capacity-factor 1.25",
            |j| {
                let moe = Model::tiny_moe();
                (j.model, j.model_name) = (moe.config, "tiny-moe".into());
                (j.layout.dp, j.layout.ep, j.layout.etp) = (4, 2, 2);
                let moe = j.model.moe.as_mut().unwrap();
                moe.capacity_factor = Some(1.25);
            },
        ),
        (
            "--num-experts 4 --moe-router-score-function sigmoid --moe-router-pre-softmax --moe-aux-loss-coeff 0.5 --moe-z-loss-coeff 0.25 --moe-ffn-hidden-size 9",
            |j| {
                j.model.moe = Some(MoeConfig {
                    score: Score::Sigmoid,
                    normalize: false,
                    aux_loss: 0.5,
                    z_loss: 0.25,
                    ..MoeConfig::new(4, 2, 9)
                });
            },
        ),
        (
            "--num-experts 4 --moe-router-topk 3 --moe-router-topk-scaling-factor 2.5 --moe-router-enable-expert-bias --moe-router-bias-update-rate 0.01 --moe-shared-expert-intermediate-size 7 --moe-shared-expert-gate",
            |j| {
                j.model.moe = Some(MoeConfig {
                    scale: 2.5,
                    selection_bias: true,
                    bias_update_rate: 0.01,
                    shared_ffn: 7,
                    shared_gate: true,
                    ..MoeConfig::new(4, 3, 176)
                });
            },
        ),
        ("--tp 2 --sequence-parallel", |j| {
            j.layout.tp = 2;
            j.layout.sequence_parallel = true;
        }),
        ("--sequence-parallel=false", |_| {}),
        ("--zero-stage 1", |j| j.layout.zero_stage = 1),
        ("--use-distributed-optimizer", |j| j.layout.zero_stage = 1),
        ("--zero-stage 2", |j| {
            (j.layout.zero_stage, j.layout.bucket_bytes) = (2, 1);
        }),
        (
            "--dp 4 --zero-stage 3 --hybrid-shard-size 2 --bucket-bytes 70",
            |j| {
                j.layout.dp = 4;
                (j.layout.zero_stage, j.layout.bucket_bytes) = (3, 70);
                j.layout.hybrid_shard_size = Some(2);
            },
        ),
        ("--schedule gpipe", |j| {
            j.layout.schedule = ScheduleKind::GPipe
        }),
        ("--schedule 1f1b", |_| {}),
        ("--pp 2 --schedule zb-h1", |j| {
            (j.layout.pp, j.layout.schedule) = (2, ScheduleKind::ZbH1);
        }),
        ("--pp 2 --schedule interleaved", |j| {
            (j.layout.pp, j.layout.schedule) = (2, ScheduleKind::Interleaved);
            j.layout.virtual_stages = 2;
        }),
        ("--pp 2 --virtual-stages 2", |j| {
            (j.layout.pp, j.layout.schedule) = (2, ScheduleKind::Interleaved);
            j.layout.virtual_stages = 2;
        }),
        (
            "--pp 2 --schedule dualpipe-v --pipeline-layout 1,1,1,1",
            |j| {
                (j.layout.pp, j.layout.schedule) = (2, ScheduleKind::DualPipeV);
                j.layout.stage_layers = Some(vec![1; 4]);
            },
        ),
        ("--pp 2 --pipeline-layout 1,3", |j| {
            j.layout.pp = 2;
            j.layout.stage_layers = Some(vec![1, 3]);
        }),
        ("--bucket-bytes 4096", |j| j.layout.bucket_bytes = 4096),
        ("--recompute selective", |j| {
            j.layout.recompute = Recompute::Selective;
        }),
        ("--recompute full", |j| {
            (j.layout.recompute, j.layout.bucket_bytes) = (Recompute::Full, 1);
        }),
        ("--recompute-granularity full --bucket-bytes 4096", |j| {
            (j.layout.recompute, j.layout.bucket_bytes) = (Recompute::Full, 4096);
        }),
        ("--reduction-order any", |j| j.layout.any_order = true),
        (
            "--dropout 0 --window-size 0 --num-experts 0 --pack-documents=false",
            |_| {},
        ),
        ("--untie-embeddings-and-output-weights", |j| {
            j.model.tied = false
        }),
        ("--dropout 0.1", |j| j.model.dropout = 0.1),
        ("--optimizer sgd", |j| j.optimizer.kind = OptimizerKind::Sgd),
        ("--optimizer adam", |_| {}),
        ("--lr 0.5 --min-lr 0.25", |j| {
            (j.optimizer.lr, j.optimizer.min_lr) = (0.5, 0.25)
        }),
        ("--lr-decay-style linear", |j| {
            j.optimizer.decay = Decay::Linear
        }),
        ("--lr-warmup-iters 7", |j| j.optimizer.warmup = 7),
        ("--weight-decay 0.5", |j| j.optimizer.weight_decay = 0.5),
        ("--clip-grad 0", |j| j.optimizer.clip_grad = 0.0),
        ("--adam-beta1 0.5 --adam-beta2 0.75 --adam-eps 1e-6", |j| {
            (j.optimizer.beta1, j.optimizer.beta2, j.optimizer.eps) = (0.5, 0.75, 1e-6);
        }),
        ("--eval-interval 9", |j| j.eval_interval = 9),
        ("--steps 50", |j| (j.steps, j.optimizer.warmup) = (50, 5)),
        ("--train-iters 1000", |j| j.steps = 1000),
        ("--mbs 4 --gbs 32", |j| {
            (j.batch.micro_batch, j.batch.global_batch) = (4, 32)
        }),
        ("--seq-length 48", |j| j.batch.seq = 48),
        ("--seed 18446744073709551615", |j| j.seed = u64::MAX),
        ("--data play.txt", |j| {
            j.data = DataSource::File("play.txt".into())
        }),
        ("--data embedded", |_| {}),
        ("--dtype f64", |j| j.dtype = Dtype::F64),
        ("--dtype bf16", |j| j.dtype = Dtype::Bf16),
        ("--device cpu --launch threads --transport local", |_| {}),
        ("--by-messages", |j| j.by_messages = true),
        ("--constants c.txt", |j| j.constants = Some("c.txt".into())),
        ("--threads-per-rank 3", |j| j.threads_per_rank = 3),
        ("--save a --save-interval 10", |j| {
            (j.save, j.save_interval) = (Some("a".into()), 10)
        }),
        ("--run-dir c", |j| j.run_dir = Some("c".into())),
        ("--metrics d.jsonl", |j| j.metrics = Some("d.jsonl".into())),
        ("--trace t.json --report r.html --tensorboard-dir tb", |j| {
            (j.trace, j.report) = (Some("t.json".into()), Some("r.html".into()));
            j.tensorboard_dir = Some("tb".into());
        }),
        ("--profile-step-start 10 --profile-step-end 12", |j| {
            (j.profile_step_start, j.profile_step_end) = (Some(10), Some(12));
        }),
        ("--log-format megatron", |j| {
            j.log_format = LogFormat::Megatron;
        }),
        ("--log-format json --log-interval 5", |j| {
            (j.log_format, j.log_interval) = (LogFormat::Json, 5);
        }),
        ("--mask-fraction 0.25", |j| j.mask_fraction = 0.25),
        ("--mask-samples 0.5", |j| j.mask_samples = Some(0.5)),
        ("--prove", |j| j.prove = true),
        ("--quiet", |j| j.quiet = true),
        ("--model tiny", |_| {}),
    ];
    for (flags, change) in cases {
        let mut job = train("train");
        change(&mut job);
        assert_eq!(train(&format!("train {flags}")), job, "{flags}");
    }
}

#[test]
fn experts_that_cannot_be_are_refused() {
    refused("train --ep 2", "cuts experts, and the model has none");
    refused("--ep 2", "dp x cp x tp / etp = 1; valid: 1");
    refused(
        "train --moe-router-topk 2",
        "--moe-router-topk is a rule for experts",
    );
    let moe = |flags: &str| format!("verify --model tiny-moe --dp 2 --tp 2 {flags}");
    refused(&moe("--ep 3"), "valid: 1, 2, 4");
    refused(&moe("--ep 2 --etp 4"), "valid: 1");
    refused(&moe("--etp 3"), "divisors: 1, 2, 4");
    refused(&moe("--num-experts 6 --ep 4"), "must divide the 6 experts");
    refused(&moe("--moe-router-topk 9"), "from 1 to the 8 experts");
    refused(&moe("--moe-capacity-factor -1"), "must be from 0");
    refused(&moe("--moe-aux-loss-coeff nan"), "must be from 0");
    refused(&moe("--moe-shared-expert-gate"), "needs shared experts");
}

#[test]
fn sequences_are_cut() {
    let job =
        train("train --cp 4 --cp-comm p2p --ulysses-degree 2 --window-size 5 --pack-documents");
    let l = &job.layout;
    assert_eq!(
        (l.cp, l.cp_comm, l.ulysses(), l.cp_outer()),
        (4, CpComm::Ring, 2, 2)
    );
    assert_eq!((job.model.window, job.pack_documents), (Some(5), true));
    let all = train("train --cp 4 --cp-comm ulysses --window-size 0");
    assert_eq!((all.layout.ulysses(), all.model.window), (4, None));
    for (flags, words) in [
        ("--cp 3", "nearest: 60 or 66"),
        ("--cp 64", "nearest: 128"),
        ("--cp 4 --ulysses-degree 3", "divisors: 1, 2, 4"),
        ("--ulysses-degree 2", "divisors: 1"),
        ("--cp 8 --cp-comm ulysses", "ulysses-degree may be 1, 2, 4"),
        ("--cp 0 --cp-comm ulysses", "the least is 1"),
        ("--cp 2 --ulysses-degree 0", "does not divide"),
        (
            "--dropout 1",
            "dropout is 1; it must be at least 0 and less than 1",
        ),
        ("--dropout nan", "dropout is NaN"),
    ] {
        refused(&format!("train {flags}"), words);
    }
}

#[test]
fn what_is_not_built_is_refused_by_name() {
    let cases = ["--device emulated", "--transport mpi"];
    for flags in cases {
        for subcommand in ["", "train"] {
            refused(&format!("{subcommand} {flags}"), "not built yet");
        }
        let value = flags.split(' ').next_back().unwrap();
        refused(flags, value);
    }
    refused("precompile", "--arch");
    refused("precompile --arch 80", "--out");
    refused("precompile --arch eighty --out d", "eighty");
    for flags in [
        "--save d",
        "--load d",
        "--metrics m",
        "--run-dir r",
        "--quiet",
        "--eval-interval 1",
        "--trace t",
        "--report r",
        "--tensorboard-dir d",
        "--profile-step-start 1",
        "--profile-step-end 1",
    ] {
        refused(&format!("verify {flags}"), "belongs to train");
    }
}

#[cfg(feature = "nccl")]
#[test]
fn nccl_needs_a_device_and_folds_in_its_own_order() {
    refused("train --transport nccl", "--device cpu is none");
    refused("bench all_reduce --transport nccl", "not built yet");
    refused(
        "verify --device emulated --transport nccl --reduction-order rank",
        "folds in an order that NCCL chooses",
    );
    let job = verify("verify --device emulated --transport nccl --dp 2");
    assert!(job.nccl && job.layout.any_order);
    assert_eq!(job.ranks, Ranks::Threads);
}

#[cfg(not(feature = "nccl"))]
#[test]
fn nccl_is_refused_by_a_build_without_it() {
    refused("train --transport nccl", "built without NCCL");
}

#[test]
fn slips_are_named_in_one_sentence() {
    let cases = [
        ("--tp 3", "divisors: 1, 2, 4"),
        ("--steps 5 --profile-step-start 5", "last step"),
        ("--profile-step-start 3 --profile-step-end 3", "after"),
        ("--profile-step-end 0", "after"),
        ("--tp 0", "tp=0"),
        ("--tp -1", "-1"),
        ("--tp two", "two"),
        ("--tp 99999999999999999999", "--tp"),
        ("--dp 100000", "at most"),
        ("--pp 5", "4 layers"),
        ("--pp 4 --virtual-stages 2", "use at most pp=2"),
        (
            "--pp 2 --schedule zb-h1 --virtual-stages 2",
            "use schedule interleaved",
        ),
        ("--pp 1 --schedule dualpipe-v", "at least pp=2"),
        (
            "--pp 2 --schedule dualpipe-v --gbs 6",
            "nearest global-batch-size: 8",
        ),
        (
            "--pp 2 --schedule interleaved --gbs 6",
            "nearest global-batch-size: 4 or 8",
        ),
        (
            "trace --schedule interleaved --microbatches 6",
            "nearest: 4 or 8",
        ),
        ("trace --schedule dualpipe-v --pp 1", "at least 2 stages"),
        ("trace --pp 0", "at least 1 stage"),
        ("trace --pp 99999999999", "more than can be drawn"),
        ("trace --recorder d --pp 2", "cannot be used with"),
        ("--pp 2 --pipeline-layout 1,2", "[1, 2]"),
        ("--pipeline-layout 1,x", "x"),
        ("--gbs 3", "nearest: 4"),
        ("--zero-stage 4", "0..=3"),
        (
            "--dp 4 --zero-stage 3 --hybrid-shard-size 3",
            "dp 4 x cp 1 = 4 replicas; valid: 1, 2, 4",
        ),
        (
            "--dp 4 --zero-stage 2 --hybrid-shard-size 0",
            "valid: 1, 2, 4",
        ),
        ("--dp 4 --hybrid-shard-size 2", "use zero-stage 1, 2 or 3"),
        (
            "--zero-stage 0 --use-distributed-optimizer",
            "cannot be used with",
        ),
        ("--tp 2 --tp 2", "multiple times"),
        ("--lr nan", "lr is NaN"),
        ("--lr=-1", "lr is -1"),
        ("--steps 0", "steps is 0"),
        ("--save-interval 5", "--save DIR"),
        ("--model tinny", "no such preset"),
        ("--scheduel gpipe", "--schedule"),
        ("--config no/such.json", "no/such.json"),
        ("frain", "frain"),
        ("--tp 2 verify", "verify"),
        ("eval", "trained parameters"),
        ("eval --model tiny --data f", "trained parameters"),
        ("verify --steps 3 --json yes", "yes"),
    ];
    for (line, words) in cases {
        refused(line, words);
    }
    assert_eq!(run("--model no/config.json").unwrap_err().exit, Exit::Data);
}

fn under(variables: &[(&str, &str)], line: &str) -> Result<Command, Failure> {
    let env = variables
        .iter()
        .map(|(name, value)| (name.to_string(), value.to_string()));
    let words = std::iter::once("quintet").chain(line.split_whitespace());
    parse(words, &env.collect())
}

#[test]
fn ranks_are_what_launch_transport_and_the_launcher_say() {
    use Ranks::{Processes, Threads};
    for (flags, ranks) in [
        ("", Threads),
        ("--launch threads", Threads),
        ("--launch threads --transport auto", Threads),
        ("--transport local", Threads),
        ("--transport auto", Threads),
        ("--launch processes", Processes(Over::Auto)),
        ("--launch processes --transport shm", Processes(Over::Shm)),
        ("--transport unix", Processes(Over::Unix)),
        ("--transport tcp", Processes(Over::Tcp)),
    ] {
        let job = train(&format!("train --dp 2 {flags}"));
        assert_eq!((job.ranks, job.launched), (ranks, false), "{flags}");
        assert_eq!(job.starts_processes(), ranks != Threads);
    }
    let torchrun = |world| [("RANK", "1"), ("WORLD_SIZE", world), ("MASTER_ADDR", "x")];
    let ours = [("QUINTET_RANK", "0"), ("QUINTET_WORLD_SIZE", "1")];
    let said = [("QUINTET_TRANSPORT", "unix"), ("SLURM_PROCID", "1")];
    let srun = [("SLURM_STEP_ID", "0"), ("SLURM_STEP_NUM_TASKS", "2")];
    let srun = [&said[..], &srun, &[("SLURM_STEP_NODELIST", "n1")]].concat();
    for (variables, line, over) in [
        (&torchrun("2")[..], "train --dp 2", Over::Auto),
        (&torchrun("2"), "train --tp 2 --transport tcp", Over::Tcp),
        (
            &torchrun("2"),
            "verify --tp 2 --launch processes",
            Over::Auto,
        ),
        // One process that our launcher started is a rank: it must not start itself again.
        (&ours, "train --transport shm", Over::Shm),
        (&srun, "verify --dp 2", Over::Unix),
        (&srun, "train --dp 2 --transport tcp", Over::Tcp),
    ] {
        let Ok(Command::Train(job) | Command::Verify { job, .. }) = under(variables, line) else {
            panic!("{line}: {:?}", under(variables, line));
        };
        assert_eq!((job.ranks, job.launched), (Processes(over), true), "{line}");
        assert!(!job.starts_processes(), "{line}");
    }
    // One process of a launcher is as good as none.
    let Ok(Command::Train(job)) = under(&[("RANK", "0"), ("WORLD_SIZE", "1")], "train --dp 2")
    else {
        panic!();
    };
    assert_eq!((job.ranks, job.launched), (Threads, false));
}

#[test]
fn a_launcher_is_not_ignored() {
    let two = [
        ("RANK", "1"),
        ("WORLD_SIZE", "2"),
        ("MASTER_ADDR", "10.0.0.1"),
    ];
    for (variables, line, words) in [
        (
            &two[..],
            "train",
            "the layout has 1 ranks, and the launcher has started 2",
        ),
        (&two, "train --dp 4", "start 4"),
        (&two, "verify --dp 2 --launch threads", "leave it out"),
        (&two, "train --dp 2 --transport local", "leave it out"),
        (
            &two,
            "plan --model tiny --gpus 8",
            "plan works in one process",
        ),
        (&two, "trace", "trace works"),
        (&two, "convert a b", "convert works"),
        (&two, "bench all_reduce --transport local", "leave it out"),
        (&two[1..], "train --dp 2", "RANK"),
        (&[("QUINTET_WORLD_SIZE", "4")], "", "QUINTET_RANK"),
        (
            &[],
            "train --launch threads --transport tcp",
            "--launch processes",
        ),
        (
            &[],
            "train --launch processes --transport local",
            "use auto, shm",
        ),
    ] {
        let failure = under(variables, line).expect_err(line);
        assert_eq!(failure.exit, Exit::Usage, "{line}");
        let s = failure.sentence;
        assert!(s.contains(words), "{line}: {s}");
    }
    assert!(under(&[("WORLD_SIZE", "1")], "").is_ok());
    assert!(under(&two, "launch -n 2 -- x").is_ok());
}

#[test]
fn launch_takes_a_command() {
    let command = ["quintet", "train", "--dp", "2"].map(Into::into).to_vec();
    assert_eq!(
        run("launch -n 2 -- quintet train --dp 2").unwrap(),
        Command::Launch { ranks: 2, command }
    );
    for line in [
        "launch -n 2",
        "launch -- x",
        "launch -n 0 -- x",
        "launch -n x -- x",
    ] {
        assert_eq!(run(line).unwrap_err().exit, Exit::Usage, "{line}");
    }
}

#[test]
fn each_subcommand_has_its_defaults() {
    assert_eq!(train(""), Job::demo());
    assert_eq!(train("train"), Job::default());
    assert_eq!(verify("verify"), Job::verify());
    assert_eq!(train("--tp 4").layout.world(), 4);
    assert_eq!(train("--tp 4").model, Job::demo().model);
    assert!(train("--model tiny-moe --steps 9").prove && !train("train --model tiny-moe").prove);
    // An ep that nobody asked for gives way; nothing else does.
    for (flags, ep) in [
        ("--model tiny", 1),
        ("--num-experts 0", 1),
        ("--num-experts 5", 1),
        ("--num-experts 6", 2),
        ("--num-experts 12", 4),
        ("--model bench-s", 1),
    ] {
        for subcommand in ["", "verify"] {
            let line = format!("{subcommand} {flags}");
            let job = match run(&line) {
                Ok(Command::Train(job) | Command::Verify { job, .. }) => job,
                other => panic!("{line}: {other:?}"),
            };
            let wanted = Layout {
                ep,
                ..Job::demo().layout
            };
            assert_eq!(job.layout, wanted, "{line}");
        }
    }
    let one = Layout {
        cp: 2,
        ..Layout::single()
    };
    assert_eq!(train("--cp 2").layout, one);
    assert_eq!(train("train --model tiny-moe").layout, Layout::single());
    assert_eq!(verify("verify --dp 3 --mbs 2").batch.global_batch, 12);
    let bench = train("train --model bench-s").batch;
    assert_eq!(
        (bench.seq, bench.micro_batch, bench.global_batch),
        (256, 1, 8)
    );
    assert!((train("train --lr 1e-4").optimizer.min_lr / 1e-5 - 1.0).abs() < 1e-12);
    assert_eq!(train("train --steps 4").optimizer.warmup, 0);
    assert!(matches!(
        run("verify --json"),
        Ok(Command::Verify { json: true, .. })
    ));
}

/// The checkpoint's model, and what flags say is to be computed with it.
#[test]
fn eval_takes_a_checkpoints_model_and_flags_win() {
    let dir = crate::report::test_dir::TestDir::new("eval");
    let root = dir.path();
    let was =
        train("train --model tiny-moe --window-size 9 --seq-len 20 --pack-documents --steps 9");
    checkpoint_of(&was, root);
    let eval = |flags: &str| match run(&format!("eval --load {} {flags}", root.display())) {
        Ok(Command::Eval { job, weights, json }) => {
            assert_eq!(weights, Weights::Checkpoint(root.into()));
            (job, json)
        }
        other => panic!("{flags}: {other:?}"),
    };
    let (job, json) = eval("--seq-length 8 --dp 3 --json");
    assert_eq!((job.batch.seq, job.batch.global_batch, json), (8, 9, true));
    assert_eq!((&job.model, job.pack_documents), (&was.model, true));
    let (job, _) = eval("--window-size 5 --pack-documents=false --moe-capacity-factor 2 --ep 1");
    assert_eq!((job.model.window, job.batch.seq), (Some(5), 20));
    assert_eq!(job.model.moe.unwrap().capacity_factor, Some(2.0));
    assert!(!job.pack_documents);
    let (job, _) = eval("--window-size 0");
    assert_eq!(job.model.window, None);
    // Flags that ask for other parameters.
    for flags in ["--num-experts 4", "--untie-embeddings-and-output-weights"] {
        let (job, _) = eval(flags);
        let weights = Weights::Checkpoint(root.into());
        let failure = crate::weights::belong_to(&job, &weights).expect_err(flags);
        assert_eq!(failure.exit, Exit::Usage);
        assert!(failure.sentence.contains("other parameters"), "{failure}");
    }
    assert_eq!(run("eval --load no/such").unwrap_err().exit, Exit::Data);
}

/// `[default: x; verify: y]` in a help text is what happens without the flag.
#[test]
fn help_tells_the_truth_about_defaults() {
    let command = command();
    let mut checked = 0;
    for arg in command.find_subcommand("train").unwrap().get_arguments() {
        let help = arg.get_help().map(ToString::to_string).unwrap_or_default();
        let Some((_, defaults)) = help.split_once("[default: ") else {
            continue;
        };
        for default in defaults.trim_end_matches(']').split("; ") {
            let (verifies, value) = match default.strip_prefix("verify: ") {
                Some(value) => (true, value),
                None => (false, default),
            };
            if value.contains(' ') {
                continue;
            }
            let flag = format!("--{}={value}", arg.get_long().unwrap());
            let same = if verifies {
                verify(&format!("verify {flag}")) == verify("verify")
            } else {
                train(&format!("train {flag}")) == train("train")
            };
            assert!(same, "{flag}: {help}");
            checked += 1;
        }
    }
    assert!(checked > 30, "{checked}");
}

#[test]
fn help_and_version_are_printed() {
    for line in [
        "--help",
        "-h",
        "train --help",
        "verify -h",
        "eval --help",
        "help",
        "plan --help",
    ] {
        let Ok(Command::Print(text)) = run(line) else {
            panic!("{line}")
        };
        assert!(text.contains("Usage:") && !text.contains('\x1b'), "{line}");
    }
    let Ok(Command::Print(help)) = run("--help") else {
        panic!()
    };
    for heading in [
        "Layout:",
        "Model:",
        "Optimiser:",
        "Run:",
        "Output:",
        "Exit codes:",
    ] {
        assert!(help.contains(heading), "{heading}");
    }
    assert!(matches!(run("--version"), Ok(Command::Print(text)) if text.starts_with("quintet ")));
}

#[test]
fn a_saved_job_runs_again_and_flags_win() {
    let dir = crate::report::test_dir::TestDir::new("config");
    let path = dir.path().join("config.json");
    let job =
        train("--pp 2 --pipeline-layout 1,3 --steps 40 --lr 0.1 --mask-fraction 0.5 --seq-len 20");
    std::fs::write(&path, job.to_json().unwrap()).unwrap();
    let path = path.display();
    assert_eq!(train(&format!("--config {path}")), job);
    assert_eq!(train(&format!("train --config {path}")), job);
    let other = train(&format!(
        "--config {path} --pp 4 --steps 400 --model bench-s"
    ));
    assert_eq!(
        (other.layout.pp, other.layout.stage_layers, other.steps),
        (4, None, 400)
    );
    assert_eq!((other.optimizer, other.batch), (job.optimizer, job.batch));
    assert_eq!(
        verify(&format!("verify --config {path} --steps 2 --dtype f64")),
        Job {
            steps: 2,
            dtype: Dtype::F64,
            ..job.clone()
        }
    );
    std::fs::write(dir.path().join("bad.json"), r#"{"layout": {"tp": 3}}"#).unwrap();
    refused(
        &format!("--config {}", dir.path().join("bad.json").display()),
        "tp=3 does not divide",
    );
    std::fs::write(dir.path().join("list.json"), "[]").unwrap();
    refused(
        &format!("--config {}", dir.path().join("list.json").display()),
        "no saved job",
    );
}

/// What a checkpoint of this job has beside its numbers.
fn checkpoint_of(job: &Job, root: &std::path::Path) {
    let corpus = crate::data::Corpus::built_in();
    let about = crate::checkpoint::about(job, &corpus, 7).unwrap();
    let folder = root.join("step_00000007");
    std::fs::create_dir_all(&folder).unwrap();
    std::fs::write(root.join("latest"), "step_00000007\n").unwrap();
    let meta = serde_json::json!({
        "format": "quintet-checkpoint", "version": 1, "step": 7, "layout": "", "dtype": "f64",
        "optimizer": {"rule": "adamw", "steps": 7, "kinds": []}, "shapes": {}, "files": [],
        "user": about.user,
    });
    // The first line holds the checksum of the rest.
    let rest = format!("{meta:#}\n")
        .trim_start_matches(['{', '\n'])
        .to_string();
    let crc32 = crc32fast::hash(rest.as_bytes());
    let text = format!("{{ \"crc32\": \"{crc32:08x}\",\n{rest}");
    std::fs::write(folder.join("meta.json"), text).unwrap();
}

#[test]
fn a_checkpoint_stands_for_what_flags_do_not_say() {
    let dir = crate::report::test_dir::TestDir::new("adopt");
    let root = dir.path();
    let was = train(
        "train --tp 2 --seed 9 --seq-len 20 --gbs 6 --dtype f64 --lr 0.5 --lr-warmup-iters 3 --steps 400 \
         --mask-fraction 0.25 --untie-embeddings-and-output-weights --quiet",
    );
    checkpoint_of(&was, root);
    let load = format!("train --load {}", root.display());
    let job = train(&load);
    // What is learnt is the checkpoint's; how it is cut and printed is not.
    assert_eq!(
        job,
        was.clone().goes_on(Job {
            load: Some(root.into()),
            ..train("train")
        })
    );
    assert_eq!(
        (job.seed, job.batch, job.optimizer),
        (9, was.batch, was.optimizer)
    );
    assert_eq!((job.layout.tp, job.steps, job.quiet), (1, 300, false));
    let other = train(&format!("{load} --dp 3 --lr 0.25 --seed 10 --mbs 1"));
    assert_eq!(
        (other.layout.dp, other.optimizer.lr, other.seed),
        (3, 0.25, 10)
    );

    let corpus = crate::data::Corpus::built_in();
    let judge = |flags: &str| {
        crate::checkpoint::steps_done(&train(&format!("{load} {flags}")), &corpus, root)
    };
    assert_eq!(judge(""), Ok(7));
    assert_eq!(judge("--dp 3 --tp 4 --zero-stage 1 --seed 9"), Ok(7));
    for (flags, words) in [
        ("--seed 10", ["--seed 9", "not 10"]),
        ("--mask-fraction 0", ["--mask-fraction 0.25", "not 0"]),
        ("--mask-samples 1", ["--mask-samples 0.125", "not 1"]),
        (
            "--pack-documents",
            ["--pack-documents=false", "not --pack-documents=true"],
        ),
        (
            "--window-size 5",
            ["--model tiny (untied)", "(untied, a window of 5)"],
        ),
        ("--model bench-s", ["--model tiny", "bench-s"]),
        (
            "--untie-embeddings-and-output-weights=false",
            ["untied", "not --model tiny (tied)"],
        ),
        ("--steps 7", ["7 steps", "larger"]),
    ] {
        let failure = judge(flags).expect_err(flags);
        assert_eq!(failure.exit, Exit::Usage, "{flags}: {failure}");
        assert!(
            words.iter().all(|w| failure.sentence.contains(w)),
            "{flags}: {failure}"
        );
    }
    let text = crate::data::Corpus::from_bytes("x", b"another text").unwrap();
    let on = |flags: &str| {
        let job = train(&format!("{load} {flags}"));
        crate::checkpoint::steps_done(&job, &text, root).expect_err(flags)
    };
    assert_eq!(on("--data x.txt").exit, Exit::Usage);
    assert!(
        on("--data x.txt")
            .sentence
            .contains("--data embedded, not x.txt")
    );
    assert_eq!(on("").exit, Exit::Data);
    assert_eq!(run("train --load no/such").unwrap_err().exit, Exit::Data);
}

#[test]
fn a_file_says_how_long_a_sequence_may_be() {
    let dir = crate::report::test_dir::TestDir::new("positions");
    let mut model = crate::model_config::Model::tiny();
    model.max_positions = 48;
    let path = dir.path().join("config.json");
    std::fs::write(&path, model.to_json().unwrap()).unwrap();
    let path = path.display();
    assert_eq!(train(&format!("--model {path}")).batch.seq, 48);
    refused(&format!("--model {path} --seq-len 47"), "nearest: 44 or 48");
    let line = format!("train --model {path} --seq-len 47");
    assert_eq!(train(&line).batch.seq, 47);
    for subcommand in ["", "train", "verify"] {
        refused(
            &format!("{subcommand} --model {path} --seq-len 52"),
            "seq-length 52 is more than the 48 positions",
        );
    }
    refused(
        &format!("eval --model {path} --seq-len 52"),
        "use at most 48",
    );
    // Presets are trained from nothing, for any length.
    assert_eq!(train("--model tiny --seq-len 100").batch.seq, 100);
    // A saved job still knows.
    let saved = dir.path().join("job.json");
    std::fs::write(&saved, train(&format!("--model {path}")).to_json().unwrap()).unwrap();
    refused(
        &format!("--config {} --seq-len 52", saved.display()),
        "use at most 48",
    );
    assert_eq!(
        train(&format!(
            "--config {} --seq-len 52 --model tiny",
            saved.display()
        ))
        .max_positions,
        None
    );
}

#[test]
#[cfg(unix)]
fn what_is_not_utf8_is_refused_and_spelt_out() {
    use std::os::unix::ffi::OsStringExt;
    let odd = |bytes: &[u8]| OsString::from_vec(bytes.to_vec());
    for flag in [
        "data", "model", "save", "load", "run-dir", "metrics", "config",
    ] {
        let both = [odd(b"--"), flag.into(), odd(b"=caf\xe9")]
            .into_iter()
            .fold(OsString::new(), |mut all, part| {
                all.push(part);
                all
            });
        let apart = vec![OsString::from(format!("--{flag}")), odd(b"caf\xe9")];
        for given in [vec![both], apart] {
            let words = [odd(b"quintet\xff"), "train".into()]
                .into_iter()
                .chain(given);
            let failure = parse(words, &Variables::new()).expect_err(flag);
            assert_eq!(failure.exit, Exit::Usage);
            let s = failure.sentence;
            assert!(s.contains(r"caf\xE9") && !s.contains('\u{FFFD}'), "{s}");
        }
    }
    assert!(parse([odd(b"quintet\xff")], &Variables::new()).is_ok());
}

fn word() -> impl Strategy<Value = String> {
    let flags: Vec<String> = CONTRACT
        .split_whitespace()
        .chain(["json", "help"])
        .map(|flag| format!("--{flag}"))
        .collect();
    let values = [
        "0",
        "1",
        "2",
        "3",
        "-1",
        "1e999",
        "nan",
        "inf",
        "18446744073709551615",
        "4294967296",
        "1,3",
        "",
        "=",
        "--",
        "-h",
        "train",
        "verify",
        "eval",
        "plan",
        "gpipe",
        "f64",
        "any",
        "tiny",
        "bench-m",
        "tiny-moe",
        "true",
        "\u{1b}[31m",
        "ü\n",
    ];
    let joined = (
        prop::sample::select(flags.clone()),
        prop::sample::select(values.to_vec()),
    )
        .prop_map(|(flag, value)| format!("{flag}={value}"));
    prop_oneof![
        4 => prop::sample::select(flags),
        4 => prop::sample::select(values.to_vec()).prop_map(String::from),
        4 => joined,
        1 => any::<String>(),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    /// Whatever is typed: a sound job, a page of help, or one sentence.
    #[test]
    fn nothing_typed_panics(words in prop::collection::vec(word(), 0..8)) {
        match parse(std::iter::once("quintet".to_string()).chain(words), &Variables::new()) {
            Ok(Command::Train(job) | Command::Verify { job, .. } | Command::Eval { job, .. }) => {
                prop_assert!(job.check().is_ok());
                let back = Job::from_json(&job.to_json().unwrap()).unwrap();
                prop_assert_eq!(back, job);
            }
            Ok(Command::Convert(_)) => {}
            Ok(Command::Precompile(asked)) => prop_assert!(!asked.archs.is_empty()),
            Ok(Command::Plan(plan)) => prop_assert!(plan.request.cluster.validate().is_ok()),
            Ok(Command::Bench(bench)) => prop_assert!(bench.ranks > 0 && bench.bench.iters > 0),
            Ok(Command::Launch { ranks, command }) => {
                prop_assert!(ranks > 0 && !command.is_empty());
            }
            Ok(Command::Print(text)) => prop_assert!(!text.is_empty()),
            Err(failure) => {
                prop_assert!(matches!(failure.exit, Exit::Usage | Exit::Data));
                prop_assert!(!failure.sentence.contains('\n'), "{}", failure.sentence);
            }
        }
    }

    /// The same with every layout flag sound in form, which gets further in.
    #[test]
    fn no_layout_panics(degrees in prop::collection::vec(0usize..70, 3), batch in prop::collection::vec(0u64..100, 3), zero in 0u8..4, within in 0usize..9) {
        let line = format!(
            "verify --dp {} --tp {} --pp {} --mbs {} --gbs {} --seq-len {} --zero-stage {zero} --hybrid-shard-size {within}",
            degrees[0], degrees[1], degrees[2], batch[0], batch[1], batch[2]
        );
        if let Err(failure) = run(&line) {
            prop_assert_eq!(failure.exit, Exit::Usage);
            prop_assert!(!failure.sentence.contains('\n'));
        }
    }
}

#[test]
fn a_schedule_is_drawn_with_its_figures() {
    let drawn = |line: &str| match run(line) {
        Ok(Command::Print(text)) => text,
        other => panic!("{line}: {other:?}"),
    };
    let text = drawn("trace --schedule zb-h1 --pp 2 --microbatches 3");
    assert_eq!(
        text,
        "zb-h1 over 2 stages, 3 microbatches\n\
         F forward, B gradient of the input, W gradient of the weights, one slot each\n\
         stage 0 | F0 F1 .  B0 W0 F2 B1 W1 B2 W2\n\
         stage 1 | .  F0 B0 F1 B1 W0 F2 B2 W1 W2\n\
         bubble 10.00 %: a stage idles for 1 of 10 slots\n\
         activations held: at most 2 microbatches; by stage 2 2\n"
    );
    let text = drawn("trace --virtual-stages 3 --pp 2 --microbatches 4");
    assert!(
        text.starts_with("interleaved over 2 stages of 3 chunks"),
        "{text}"
    );
    let text = drawn("trace --schedule dualpipe-v --pp 2 --microbatches 5");
    assert!(text.contains("at most 5 microbatches of a chunk"), "{text}");
}
