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
