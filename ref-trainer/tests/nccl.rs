//! NCCL end to end, by its stand-in over threads and host memory: the proof holds, and what cannot be used is
//! refused in one sentence.
#![cfg(all(feature = "nccl", feature = "emulated"))]

use std::path::PathBuf;
use std::process::{Command, Output};

use serde_json::Value;

/// Where cargo has put the stand-in: it is built with this test.
fn stand_in() -> PathBuf {
    let test = std::env::current_exe().unwrap();
    test.with_file_name("libquintet_nccl_shim.so")
}

const PROOF: &str =
    "verify --device emulated --transport nccl --seq-length 8 --mbs 1 --gbs 2 --steps 1 --json";

fn quintet(line: &str, library: PathBuf, told: &str) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_quintet"));
    command.args(line.split_whitespace());
    command.env("QUINTET_NCCL_LIB", library);
    command.env("QUINTET_NCCL_SHIM", told);
    command.output().unwrap()
}

#[test]
fn a_layout_over_nccl_is_what_one_device_computes() {
    let output = quintet(&format!("{PROOF} --dp 2 --tp 2 --pp 2"), stand_in(), "");
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{said}");
    let verdict: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(verdict["ok"], true, "{verdict}");
    assert_eq!(verdict["bytes_predicted"], verdict["bytes_counted"]);
    for group in ["dp", "tp", "pp"] {
        assert!(
            verdict["bytes_counted"][group].as_u64().unwrap() > 0,
            "{group}: {verdict}"
        );
    }
}

/// Exit code and the one sentence.
fn refused(library: PathBuf, told: &str) -> (i32, String) {
    let output = quintet(&format!("{PROOF} --dp 2"), library, told);
    let said = String::from_utf8_lossy(&output.stderr).trim().to_string();
    assert_eq!(said.lines().count(), 1, "{said}");
    (output.status.code().unwrap(), said)
}

#[test]
fn a_library_that_cannot_be_used_is_one_sentence_and_exit_2() {
    let driver = "fail=ncclCommInitRankConfig:1:Cuda failure 35 'CUDA driver version is insufficient for CUDA runtime version'";
    let short = PathBuf::from(env!("CARGO_BIN_EXE_quintet"));
    for (library, told, words) in [
        (
            "/nowhere/libnccl.so.2".into(),
            "",
            "NCCL is not found as /nowhere/libnccl.so.2",
        ),
        (short, "", "cannot be loaded"),
        (stand_in(), "version=2708", "NCCL 2.7.8 at"),
        (
            stand_in(),
            driver,
            "the NVIDIA driver is older than NCCL 2.30.0",
        ),
        (
            stand_in(),
            "driver=/nowhere/libcuda.so.1",
            "works on the memory of GPUs",
        ),
    ] {
        let (code, said) = refused(library, told);
        assert_eq!(code, 2, "{said}");
        assert!(said.contains(words), "{said}");
    }
}

#[test]
fn what_nccl_says_ends_the_run_with_exit_5() {
    let (code, said) = refused(stand_in(), "broken=6");
    assert_eq!(code, 5, "{said}");
    assert!(
        said.contains("remote process exited") && said.contains("was told to break"),
        "{said}"
    );
}
