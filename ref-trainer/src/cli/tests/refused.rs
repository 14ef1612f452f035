//! What cannot be done: one sentence.

use super::*;

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
fn what_is_not_built_is_refused_by_name() {
    let cases = ["--device emulated"];
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
    for (flags, words) in [
        ("--device cpu", "--device cpu is none"),
        (
            "--reduction-order rank",
            "folds in an order that NCCL chooses",
        ),
        ("--constants f", "NCCL has its own"),
        ("--override all_reduce:ring", "NCCL has its own"),
    ] {
        refused(&format!("bench all_reduce --transport nccl {flags}"), words);
    }
    refused("bench --calibrate --transport nccl", "NCCL has its own");
    refused("bench kernels --transport nccl", "timed on the CPU");
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
    for line in ["train", "bench all_reduce"] {
        refused(&format!("{line} --transport nccl"), "built without NCCL");
    }
}

#[test]
fn bench_has_a_device_for_nccl_alone() {
    refused("bench all_reduce --device cuda", "is for --transport nccl");
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
