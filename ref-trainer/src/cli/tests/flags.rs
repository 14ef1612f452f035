//! What is asked for is what is done.

use super::*;

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
