//! `quintet plan` as a person or a script calls it.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use serde_json::Value;

fn plan(line: &str) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_quintet"));
    command.arg("plan").args(line.split_whitespace());
    command.output().unwrap()
}

fn said(output: &Output) -> (i32, String, String) {
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    (
        output.status.code().unwrap_or(-1),
        text(&output.stdout),
        text(&output.stderr),
    )
}

fn folder(name: &str) -> PathBuf {
    let dir = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    fs::create_dir_all(&dir).unwrap();
    dir
}

const CLUSTER: &str = r#"
name = "mine"
gpus = 16
gpus_per_node = 8
memory_gib = 80.0
memory_GBps = 3350.0
bf16_tflops = 989.4
inside = { GBps = 450.0, latency_us = 5.0 }
between = { GBps = 50.0, latency_us = 10.0 }
"#;

const QWEN3: &str = r#"{"model_type": "qwen3", "vocab_size": 151936, "hidden_size": 4096,
"num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
"intermediate_size": 12288, "max_position_embeddings": 40960, "torch_dtype": "bfloat16"}"#;

#[test]
fn a_file_of_each_kind_and_stable_keys() {
    let dir = folder("plan-json");
    let (model, cluster) = (dir.join("config.json"), dir.join("my.toml"));
    fs::write(&model, QWEN3).unwrap();
    fs::write(&cluster, CLUSTER).unwrap();
    let line = format!(
        "--model {} --cluster {} --global-batch-size 64 --json",
        model.display(),
        cluster.display()
    );
    let (code, out, err) = said(&plan(&line));
    assert_eq!(code, 0, "{err}");
    let all: Value = serde_json::from_str(&out).unwrap();
    assert_eq!(all["model"]["parameters"], "8190735360");
    assert_eq!(all["cluster"]["gpus"], 16);
    let page = include_str!("../../docs/plan.md").replace("[]", "");
    for layout in all["layouts"].as_array().unwrap() {
        let memory = layout["memory_bytes"].as_object().unwrap();
        let sum: u64 = memory.values().filter_map(Value::as_u64).sum();
        assert_eq!(layout["memory_bytes_total"], sum);
        let stages = layout["stages"].as_array().unwrap();
        assert_eq!(stages.len() as u64, layout["pp"].as_u64().unwrap());
        let fullest = layout["fullest_stage"].as_u64().unwrap() as usize;
        assert_eq!(stages[fullest], layout["memory_bytes"]);
        let seconds = layout["seconds"].as_object().unwrap();
        let sum: f64 = seconds.values().filter_map(Value::as_f64).sum();
        assert!((sum / layout["step_seconds"].as_f64().unwrap() - 1.0).abs() < 1e-9);
        let world = ["tp", "pp", "cp", "dp"].map(|axis| layout[axis].as_u64().unwrap());
        assert_eq!(world.iter().product::<u64>(), 16);
        // Every key that is printed is documented.
        for key in layout.as_object().unwrap().keys().chain(memory.keys()) {
            assert!(
                page.contains(&format!("`{key}`")) || page.contains(&format!(".{key}`")),
                "{key}"
            );
        }
    }
    for key in all.as_object().unwrap().keys() {
        assert!(page.contains(&format!("`{key}")), "{key}");
    }
    let csv = said(&plan(&line.replace("--json", "--csv"))).1;
    let rows: Vec<&str> = csv.lines().collect();
    assert_eq!(rows.len(), 1 + all["layouts"].as_array().unwrap().len());
    let commas = |row: &str| row.matches(',').count();
    assert!(rows.iter().all(|row| commas(row) == commas(rows[0])));
}

#[test]
fn a_table_explained() {
    let (code, out, err) = said(&plan(
        "--model mixtral-8x7b --gpus 16 --global-batch-size 64 --explain --mbs 1",
    ));
    assert_eq!(code, 0, "{err}");
    for part in [
        "MFU",
        "network",
        "weights met",
        "why others do not go",
        "over memory",
        "ep-folds-into-the-world",
    ] {
        assert!(out.contains(part), "{part} in {out}");
    }
    let (code, out, _) = said(&plan(
        "--model llama3-8b --gpus 8 --global-batch-size 32 --steps",
    ));
    assert_eq!(code, 0);
    let titles = [
        "1. memory",
        "2. tensor",
        "3. pipeline",
        "4. the rest",
        "5. context",
        "6. watch",
    ];
    let places: Vec<Option<usize>> = titles.iter().map(|title| out.find(title)).collect();
    assert!(
        places.iter().all(Option::is_some) && places.is_sorted(),
        "{out}"
    );
}

#[test]
fn what_cannot_be_is_one_sentence_and_exit_2() {
    let dir = folder("plan-refused");
    let file = |name: &str, text: String| {
        let path = dir.join(name);
        fs::write(&path, text).unwrap();
        path.display().to_string()
    };
    let none = file("none.toml", CLUSTER.replace("gpus = 16", "gpus = 0"));
    let odd = file("odd.toml", format!("colour = 3\n{CLUSTER}"));
    let short = file("short.toml", CLUSTER.replace("bf16_tflops = 989.4", ""));
    let tiny = file("tiny.toml", CLUSTER.replace("80.0", "4.001"));
    let unknown = file("unknown.json", QWEN3.replace("head_dim", "heads_dim"));
    let missing = file(
        "missing.json",
        QWEN3.replace("\"num_hidden_layers\": 36,", ""),
    );
    for (line, parts) in [
        (
            format!("--model llama3-8b --cluster {none}"),
            vec!["0 GPUs"],
        ),
        (String::from("--model llama3-8b --gpus 0"), vec!["0 GPUs"]),
        (format!("--model llama3-8b --cluster {odd}"), vec!["colour"]),
        (
            format!("--model llama3-8b --cluster {short}"),
            vec!["bf16_tflops"],
        ),
        (format!("--model {unknown} --gpus 8"), vec!["heads_dim"]),
        (
            format!("--model {missing} --gpus 8"),
            vec!["num_hidden_layers is missing"],
        ),
        (
            String::from("--model llama3-8b --gpus 8 --tp 5"),
            vec!["tp=5 does not divide"],
        ),
        (
            String::from("--model mixtral-8x7b --gpus 64 --ep 3"),
            vec!["ep=3 must divide the 8 experts"],
        ),
        (
            String::from("--model llama3-8b --gpus 8 --ep 2"),
            vec!["the model has none"],
        ),
        (String::from("--model llama9 --gpus 8"), vec!["llama3-405b"]),
        (
            String::from("--model llama3-8b --preset v100"),
            vec!["a100, h100"],
        ),
        (
            String::from("--model llama3-70b --gpus 8 --global-batch-size 64"),
            vec![
                "GiB on its fullest rank",
                "the smallest cluster of this kind that would do has",
            ],
        ),
        (
            format!("--model llama3-405b --cluster {tiny} --global-batch-size 64"),
            vec!["no cluster of this kind would do"],
        ),
    ] {
        let (code, out, err) = said(&plan(&line));
        assert_eq!((code, out.as_str()), (2, ""), "{line}: {err}");
        assert_eq!(err.lines().count(), 1, "{err}");
        for part in parts {
            assert!(err.contains(part), "{part} in {err}");
        }
    }
}

const TIMES: &str = r#"
[links]
constants = "constants.txt"
inside = "shm"
between = "tcp"

[[gemm]]
m = 4096
n = 4096
k = 4096
us = 277.8

[[attention]]
sequences = 1
tokens = 8192
heads = 16
head_dim = 128
us = 555.6
"#;

const CONSTANTS: &str = "[shm]
latency 4e-6
overhead 1e-6
send 1048576:1e-11 33554432:1e-11 -:1e-11
fold 1048576:1e-11 33554432:1e-11 -:1e-11
[tcp]
latency 2e-5
overhead 1e-6
send 1048576:1e-9 33554432:1e-9 -:1e-9
fold 1048576:1e-11 33554432:1e-11 -:1e-11
";

/// What was timed takes the place of what is stated, in the model of time alone.
#[test]
fn times_replace_efficiencies() {
    let dir = folder("plan-times");
    let (times, constants) = (dir.join("times.toml"), dir.join("constants.txt"));
    fs::write(&constants, CONSTANTS).unwrap();
    fs::write(&times, TIMES).unwrap();
    let line = "--model llama3-8b --gpus 16 --tp 2 --pp 2 --cp 1 --global-batch-size 64 --mbs 1 --recompute none --schedule 1f1b --zero-stage 1";
    let with = format!("{line} --times {}", times.display());
    let (code, out, err) = said(&plan(&with));
    assert_eq!(code, 0, "{err}");
    // 2 x 4096^3 in 277.8 us are half of the peak; the shape of the curve stays, for one width was timed.
    assert!(
        out.contains("products at 52 % of the peak (half of that at width 128)"),
        "{out}"
    );
    // 2 x 8192^2 x 16 x 128 in 555.6 us.
    assert!(
        out.contains("attention 50 %") && out.contains("links 100 %"),
        "{out}"
    );
    let of = |line: &str| -> Value {
        let out = said(&plan(&format!("{line} --json"))).1;
        serde_json::from_str::<Value>(&out).unwrap()["layouts"][0].clone()
    };
    let (stated, timed) = (of(line), of(&with));
    assert_eq!(stated["memory_bytes"], timed["memory_bytes"]);
    assert_eq!(stated["traffic"], timed["traffic"]);
    // The links between nodes are 50 times slower.
    let slower = |part: &str| timed["seconds"][part].as_f64() > stated["seconds"][part].as_f64();
    assert!(slower("pp") && slower("dp"), "{stated} {timed}");
    // A trainer that sends a token once to a node, in 8 bits, waits less for experts.
    let practice = dir.join("practice.toml");
    fs::write(
        &practice,
        "[practice]\nfp8 = true\ndispatch_bytes = 1\ndispatch_nodes = 4\n",
    )
    .unwrap();
    let line = "--model deepseek-v3 --gpus 2048 --tp 1 --pp 16 --ep 64 --seq-length 4096 --zero-stage 1 --recompute full --schedule 1f1b --mbs 1 --cp 1";
    let (ours, theirs) = (
        of(line),
        of(&format!("{line} --times {}", practice.display())),
    );
    assert_eq!(ours["memory_bytes"], theirs["memory_bytes"]);
    let (code, out, err) = said(&plan(&format!("{line} --times {}", practice.display())));
    assert!(
        code == 0 && out.contains("another trainer's habits (products in 8 bits"),
        "{err}"
    );
    let half = |part: &str| {
        2.0 * theirs["seconds"][part].as_f64().unwrap() < ours["seconds"][part].as_f64().unwrap()
    };
    assert!(half("ep"), "{ours} {theirs}");
}

/// What `quintet bench kernels` prints is what `--times` reads.
#[test]
fn kernels_of_this_machine_are_times() {
    let dir = folder("plan-kernels");
    let mut command = Command::new(env!("CARGO_BIN_EXE_quintet"));
    let timed = command.args(["bench", "kernels"]).output().unwrap();
    assert!(timed.status.success(), "{timed:?}");
    let (times, cluster) = (dir.join("times.toml"), dir.join("cpu.toml"));
    fs::write(&times, &timed.stdout).unwrap();
    // Peaks that no CPU reaches.
    fs::write(&cluster, format!("f32_tflops = 20.0\n{CLUSTER}")).unwrap();
    let (code, out, err) = said(&plan(&format!(
        "--model bench-s --cluster {} --times {} --gpus 1 --dtype f32 --global-batch-size 8",
        cluster.display(),
        times.display()
    )));
    assert_eq!(code, 0, "{err}");
    assert!(!out.contains("products at 62 %"), "{out}");
}

#[test]
fn times_that_cannot_be_are_one_sentence_and_exit_2() {
    let dir = folder("plan-times-refused");
    fs::write(dir.join("constants.txt"), "[shm]\n").unwrap();
    let whole = CONSTANTS.split("[tcp]").next().unwrap();
    fs::write(dir.join("shm.txt"), whole).unwrap();
    let links = "[links]\nconstants = \"shm.txt\"\ninside = \"shm\"";
    for (at, (text, more, part)) in [
        ("[efficiency]\ngem = 0.5", "", "unknown field `gem`"),
        ("[efficiency]\ngemm = 1.5", "", "gemm is 1.5"),
        ("[efficiency]\nlink = 0.0", "", "link is 0"),
        ("[efficiency]\nhalf_width = -1.0", "", "half_width is -1"),
        ("[efficiency]\nmemory = nan", "", "memory is NaN"),
        (
            "[links]\nconstants = \"none.txt\"\ninside = \"shm\"",
            "",
            "none.txt cannot be read",
        ),
        (
            "[links]\nconstants = \"constants.txt\"\ninside = \"shm\"",
            "",
            "constants.txt",
        ),
        (
            "[links]\nconstants = \"shm.txt\"\ninside = \"unix\"",
            "",
            "there are shm",
        ),
        (links, "--gpus 16", "between is missing"),
        ("[practice]\nfp8 = true", "--preset a100", "fp8 peak is 0"),
        ("[practice]\ndispatch_nodes = 0", "", "at least 1"),
        (
            "[[gemm]]\nm = 4096\nn = 4096\nk = 4096\nus = 1.0",
            "",
            "times as fast as the cluster's peak",
        ),
        ("[[gemm]]\nm = 0\nn = 1\nk = 1\nus = 1.0", "", "above 0"),
        ("[[memory]]\nbytes = 8", "", "missing field `us`"),
        ("[[memory]\n", "", "line 1"),
    ]
    .into_iter()
    .enumerate()
    {
        let path = dir.join(format!("{at}.toml"));
        fs::write(&path, text).unwrap();
        let (code, out, err) = said(&plan(&format!(
            "--model llama3-8b {more} --times {}",
            path.display()
        )));
        assert_eq!((code, out.as_str()), (2, ""), "{text}: {err}");
        assert_eq!(err.lines().count(), 1, "{text}: {err}");
        assert!(
            err.contains(part) && err.contains(&format!("{at}.toml")),
            "{text}: {part} in {err}"
        );
    }
    let (code, _, err) = said(&plan("--model llama3-8b --times /none/times.toml"));
    assert!(code == 2 && err.contains("cannot be read"), "{err}");
}

/// Figures that nobody means are refused before they overflow or take forever.
#[test]
fn figures_without_measure_are_refused() {
    let dir = folder("plan-large");
    let large = |key: &str, value: &str| {
        let path = dir.join(format!("{key}.json"));
        let mut keys: serde_json::Map<String, Value> = serde_json::from_str(QWEN3).unwrap();
        keys.insert(key.into(), serde_json::from_str(value).unwrap());
        fs::write(&path, Value::Object(keys).to_string()).unwrap();
        format!("--model {} --gpus 8", path.display())
    };
    let most = u64::MAX.to_string();
    for line in [
        format!("--model llama3-8b --gpus {most}"),
        format!("--model llama3-8b --gpus 8 --seq-length {most}"),
        format!("--model llama3-8b --gpus 8 --global-batch-size {most}"),
        String::from(
            "--model llama3-8b --gpus 8 --seq-length 67108864 --global-batch-size 67108864",
        ),
        String::from("--model llama3-8b --gpus 8 --seq-length 0"),
        String::from("--model llama3-8b --gpus 8 --global-batch-size 0"),
        String::from("--model llama3-8b --gpus 8 --mbs 0"),
        String::from("--model llama3-8b --gpus 8 --virtual-stages 0"),
        String::from("--model llama3-8b --gpus 8 --dp 0"),
        format!("--model llama3-8b --gpus 8 --tp {most}"),
        format!("--model mixtral-8x7b --gpus 8 --ep {most}"),
        format!("--model mixtral-8x7b --gpus 8 --etp {most}"),
        large("hidden_size", "1073741824"),
        large("num_hidden_layers", "1073741824"),
        large("num_attention_heads", "1073741824"),
        large("vocab_size", "1073741824"),
        large("intermediate_size", "1073741824"),
        large("head_dim", "1073741824"),
        large("head_dim", "0"),
        large("hidden_size", "1e300"),
        large("hidden_size", "[]"),
        large("hidden_size", "\"4096\""),
        large("tie_word_embeddings", "3"),
        large("layer_types", "{}"),
    ] {
        let (code, out, err) = said(&plan(&line));
        assert_eq!((code, out.as_str()), (2, ""), "{line}: {err}");
        assert_eq!(err.lines().count(), 1, "{line}: {err}");
        assert!(!err.contains("panicked"), "{line}: {err}");
    }
    // What was asked for and cannot be is named.
    for (more, part) in [
        ("--mbs 0", "micro-batch-size 0 does not divide"),
        (
            "--mbs 3 --global-batch-size 64",
            "micro-batch-size 3 does not divide the 64",
        ),
        ("--virtual-stages 99", "of 32 layers at most 16 chunks"),
        (
            "--schedule dualpipe-v --pp 1",
            "with one stage there is 1f1b alone",
        ),
        ("--tp 4 --pp 4", "tp=4 x pp=4 do not multiply"),
        (
            "--pp 4 --tp 1 --schedule gpipe",
            "leave something to be searched",
        ),
        ("--top 0", "--top"),
    ] {
        let (code, _, err) = said(&plan(&format!("--model llama3-8b --gpus 8 {more}")));
        assert!(code == 2 && err.contains(part), "{more}: {err}");
    }
    // A page that cannot be written is no answer.
    let path = dir.join("hidden_size.json").join("page.html");
    let line = format!("--model llama3-8b --gpus 8 --html {}", path.display());
    let (code, out, err) = said(&plan(&line));
    assert!(
        code > 0 && out.is_empty() && err.lines().count() == 1,
        "{err}"
    );
}

#[test]
fn the_best_shape_runs_at_toy_scale() {
    let (code, out, err) = said(&plan(
        "--model llama3-8b --gpus 8 --global-batch-size 32 --tp 2 --pp 2 --run",
    ));
    assert_eq!(code, 0, "{err}");
    assert!(
        out.contains("at toy scale") && out.contains("predicted"),
        "{out}"
    );
    assert!(out.contains("equal") && !out.contains("DIFFERS"), "{out}");
    assert!(
        out.contains("optimizer on the fullest rank") && !out.contains("predicted 0 bytes"),
        "{out}"
    );
}
