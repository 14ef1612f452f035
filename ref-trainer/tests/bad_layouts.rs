//! Layouts that cannot be, typed as a person would: exit 2, one sentence that says what is wrong and
//! the nearest valid choices, and those choices are valid.

use std::process::{Command, Stdio};

use quintet_ref_trainer::cli;

/// What is typed, what must be said, and what is typed instead of its end to follow the advice.
struct Case {
    line: &'static str,
    said: &'static [&'static str],
    instead: &'static [&'static str],
}

const fn case(
    line: &'static str,
    said: &'static [&'static str],
    instead: &'static [&'static str],
) -> Case {
    Case {
        line,
        said,
        instead,
    }
}

/// The model of the demo has 4 heads on 2 KV heads, 4 layers and 8 experts.
const CASES: &[Case] = &[
    // Heads.
    case(
        "--tp 3",
        &["tp=3", "4 heads", "divisors: 1, 2, 4"],
        &["--tp 1", "--tp 2", "--tp 4"],
    ),
    case("--tp 8", &["tp=8", "divisors: 1, 2, 4"], &["--tp 4"]),
    case("--tp 0", &["tp=0", "the least is 1"], &["--tp 1"]),
    case(
        "--model HEADS --tp 4",
        &["tp=4 and 6 KV heads", "valid: 1, 2, 3, 6, 12"],
        &[
            "--model HEADS --tp 1",
            "--model HEADS --tp 2",
            "--model HEADS --tp 3",
            "--model HEADS --tp 6",
            "--model HEADS --tp 12",
        ],
    ),
    // A sequence in two pieces a rank.
    case(
        "--cp 3",
        &["seq-length 64", "2 x cp = 6", "nearest: 60 or 66"],
        &["--cp 3 --seq-length 60", "--cp 3 --seq-length 66"],
    ),
    case(
        "--cp 2 --seq-length 63",
        &["2 x cp = 4", "nearest: 60 or 64"],
        &["--cp 2 --seq-length 60", "--cp 2 --seq-length 64"],
    ),
    case(
        "--cp 4 --seq-length 7",
        &["nearest: 8"],
        &["--cp 4 --seq-length 8"],
    ),
    case(
        "--seq-length 63",
        &["2 x cp = 4", "nearest: 60 or 64"],
        &["--seq-length 64"],
    ),
    case(
        "--cp 4 --ulysses-degree 3",
        &["ulysses-degree 3", "cp=4", "divisors: 1, 2, 4"],
        &["--cp 4 --ulysses-degree 2"],
    ),
    case(
        "--cp 8 --cp-comm ulysses",
        &["4 heads", "ulysses-degree may be 1, 2, 4"],
        &["--cp 8 --cp-comm ulysses --ulysses-degree 4"],
    ),
    // Experts.
    case(
        "--dp 2 --tp 2 --ep 3",
        &["ep=3", "8 experts", "valid: 1, 2, 4"],
        &["--dp 2 --tp 2 --ep 4", "--dp 2 --tp 2 --ep 2"],
    ),
    case(
        "--ep 2",
        &["ep=2", "dp x cp x tp / etp = 1", "valid: 1"],
        &["--ep 1"],
    ),
    case(
        "--num-experts 6 --dp 2 --cp 2 --tp 2 --ep 4",
        &["6 experts", "valid: 1, 2"],
        &["--num-experts 6 --dp 2 --cp 2 --tp 2 --ep 2"],
    ),
    case(
        "--dp 4 --etp 3",
        &["etp=3", "= 4", "divisors: 1, 2, 4"],
        &["--dp 4 --etp 2"],
    ),
    case(
        "--dp 4 --ep 4 --etp 2",
        &["ep=4", "dp x cp x tp / etp = 2", "valid: 1, 2"],
        &["--dp 4 --ep 2 --etp 2"],
    ),
    case(
        "--model tiny --dp 2 --ep 2",
        &["the model has none", "ep=1"],
        &["--model tiny --dp 2 --ep 1", "--dp 2 --ep 2"],
    ),
    case(
        "--moe-router-topk 9",
        &["moe-router-topk 9", "from 1 to the 8 experts"],
        &["--moe-router-topk 8"],
    ),
    // Stages, schedules and their microbatches.
    case("--pp 5", &["pp=5", "at most 4"], &["--pp 4"]),
    case(
        "--pp 2 --schedule interleaved --gbs 6",
        &[
            "multiple of pp=2",
            "got 3",
            "nearest global-batch-size: 4 or 8",
        ],
        &[
            "--pp 2 --schedule interleaved --gbs 4",
            "--pp 2 --schedule interleaved --gbs 8",
        ],
    ),
    case(
        "--pp 2 --schedule dualpipe-v --gbs 6",
        &["at least 4 = 2 pp", "nearest global-batch-size: 8"],
        &["--pp 2 --schedule dualpipe-v --gbs 8"],
    ),
    case(
        "--pp 1 --schedule dualpipe-v",
        &["at least pp=2", "or schedule 1f1b"],
        &["--pp 2 --schedule dualpipe-v", "--pp 1 --schedule 1f1b"],
    ),
    case(
        "--pp 4 --virtual-stages 2",
        &["8 chunks", "4 layers", "at most pp=2, or schedule 1f1b"],
        &["--pp 2 --virtual-stages 2", "--pp 4 --schedule 1f1b"],
    ),
    case(
        "--pp 2 --virtual-stages 4",
        &["at most pp=1, or virtual-stages=2"],
        &["--pp 1 --virtual-stages 4", "--pp 2 --virtual-stages 2"],
    ),
    case(
        "--pp 4 --schedule dualpipe-v",
        &["at most pp=2, or schedule 1f1b"],
        &["--pp 2 --schedule dualpipe-v", "--pp 4 --schedule 1f1b"],
    ),
    case(
        "--pp 2 --virtual-stages 8",
        &["4 layers", "use virtual-stages=2, or schedule 1f1b"],
        &["--pp 2 --virtual-stages 2", "--pp 2 --schedule 1f1b"],
    ),
    case(
        "--pp 2 --schedule interleaved --virtual-stages 1",
        &["use 2 or more"],
        &["--pp 2 --schedule interleaved --virtual-stages 2"],
    ),
    case(
        "--pp 2 --schedule zb-h1 --virtual-stages 2",
        &["use schedule interleaved", "virtual-stages=1"],
        &[
            "--pp 2 --schedule interleaved --virtual-stages 2",
            "--pp 2 --schedule zb-h1 --virtual-stages 1",
        ],
    ),
    case(
        "--pp 2 --pipeline-layout 1,2",
        &["[1, 2]", "2 stages", "sum to 4"],
        &["--pp 2 --pipeline-layout 1,3"],
    ),
    case(
        "--pp 2 --schedule dualpipe-v --pipeline-layout 2,2",
        &["4 chunks", "sum to 4"],
        &["--pp 2 --schedule dualpipe-v --pipeline-layout 1,1,1,1"],
    ),
    // Samples and shards.
    case(
        "--dp 2 --gbs 6",
        &["micro-batch-size 2 x dp 2 = 4", "nearest: 4 or 8"],
        &["--dp 2 --gbs 4", "--dp 2 --gbs 8"],
    ),
    case(
        "--dp 3 --cp 2 --gbs 12 --zero-stage 3 --hybrid-shard-size 4",
        &["hybrid-shard-size 4", "= 6 replicas", "valid: 1, 2, 6"],
        &["--dp 3 --cp 2 --gbs 12 --zero-stage 3 --hybrid-shard-size 2"],
    ),
    case(
        "--dp 2 --hybrid-shard-size 2",
        &["zero-stage 0", "use zero-stage 1, 2 or 3"],
        &["--dp 2 --hybrid-shard-size 2 --zero-stage 1"],
    ),
    case(
        "--window-size 0 --model LEARNED --seq-length 20",
        &["16 learned positions", "at most 16"],
        &["--window-size 0 --model LEARNED --seq-length 16"],
    ),
];

/// 12 heads on 6 KV heads; 16 learned positions.
const HEADS: &str = r#"{"model_type": "llama", "hidden_size": 48, "intermediate_size": 16, "num_hidden_layers": 4,
    "num_attention_heads": 12, "num_key_value_heads": 6, "vocab_size": 256, "rms_norm_eps": 1e-5}"#;
const LEARNED: &str = r#"{"model_type": "gpt2", "n_embd": 16, "n_layer": 4, "n_head": 4, "vocab_size": 256,
    "n_positions": 16}"#;

#[test]
fn bad_layouts_are_one_sentence_with_what_would_do() {
    let folder = std::env::temp_dir().join(format!("quintet-layouts-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    for (name, text) in [("HEADS", HEADS), ("LEARNED", LEARNED)] {
        std::fs::write(folder.join(name), text).unwrap();
    }
    let words = |line: &str| -> Vec<String> {
        let path = |word: &str| match word {
            "HEADS" | "LEARNED" => folder.join(word).display().to_string(),
            other => other.to_string(),
        };
        line.split_whitespace().map(path).collect()
    };
    for case in CASES {
        let line = case.line;
        let output = Command::new(env!("CARGO_BIN_EXE_quintet"))
            .args(words(line))
            .current_dir(&folder)
            .stdin(Stdio::null())
            .output()
            .unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{line}: {said}");
        assert!(output.stdout.is_empty(), "{line}");
        let sentence = said.trim_end_matches('\n');
        assert!(
            sentence.starts_with("quintet: ") && !sentence.contains('\n'),
            "{line}: {said}"
        );
        for words in case.said {
            assert!(sentence.contains(words), "{line}: {sentence}");
        }
        for line in case.instead {
            let all = std::iter::once("quintet".to_string()).chain(words(line));
            if let Err(failure) = cli::parse(all, &Default::default()) {
                panic!("{} was advised and is refused: {failure}", line);
            }
        }
    }
    // Nothing was begun: no run's folder is there.
    assert!(!folder.join("runs").exists());
    std::fs::remove_dir_all(&folder).unwrap();
}
