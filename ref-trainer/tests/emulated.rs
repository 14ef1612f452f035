//! The proof over the CUDA kernels, run and checked on the host: layouts of eight ranks are what one device computes.
//! Batches are small here, for every kernel's thread is a fiber; `quintet verify --device emulated` alone takes the whole.
#![cfg(feature = "emulated")]

use std::process::Command;

use serde_json::Value;

fn proof(line: &str) -> Value {
    let mut command = Command::new(env!("CARGO_BIN_EXE_quintet"));
    let small = "verify --device emulated --seq-length 8 --mbs 1 --gbs 2 --steps 1 --json";
    command.args(small.split_whitespace().chain(line.split_whitespace()));
    let output = command.output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{line}: {said}");
    let verdict: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(verdict["ok"], true, "{line}: {verdict}");
    assert_eq!(verdict["bytes_predicted"], verdict["bytes_counted"]);
    verdict
}

#[test]
fn data_tensor_and_pipeline_in_f32() {
    let verdict = proof("--dp 2 --tp 2 --pp 2 --dtype f32");
    for group in ["dp", "tp", "pp"] {
        let sent = verdict["bytes_counted"][group].as_u64();
        assert!(sent > Some(0), "{group}: {verdict}");
    }
}

#[test]
fn data_tensor_and_pipeline_in_bf16() {
    proof("--dp 2 --tp 2 --pp 2 --dtype bf16");
}

#[test]
fn context_and_experts() {
    proof("--cp 2 --ep 2 --model tiny-moe --dtype f32");
}
