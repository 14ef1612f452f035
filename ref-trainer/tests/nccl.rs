//! NCCL end to end, by its stand-in over threads and host memory: the proof holds, and what cannot be used is
//! refused in one sentence.
#![cfg(all(feature = "nccl", feature = "emulated"))]

use std::path::PathBuf;
use std::process::{Command, Output, Stdio};

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

#[test]
fn every_operation_of_bench_is_right_where_its_elements_lie() {
    let ops = "all_reduce reduce_scatter all_gather broadcast reduce gather scatter all_to_all";
    for op in ops.split(' ') {
        let line = "--transport nccl --device emulated --ranks 3 -b 0 -e 64 -f 8 -n 2 -w 1 --json";
        let output = quintet(&format!("bench {op} {line}"), stand_in(), "");
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{op}: {said}");
        let rows = String::from_utf8(output.stdout).unwrap();
        let rows: Vec<Value> = rows
            .lines()
            .map(|row| serde_json::from_str(row).unwrap())
            .collect();
        assert!(rows.len() >= 3, "{rows:?}");
        for row in rows {
            assert_eq!(
                (&row["op"], &row["transport"]),
                (&op.into(), &"nccl".into())
            );
            assert_eq!(
                (&row["wrong"], &row["algorithm"]),
                (&0.into(), &"nccl".into()),
                "{row}"
            );
            assert!(
                row["us"].as_f64() > Some(0.0) && row["predicted_us"].is_null(),
                "{row}"
            );
        }
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

/// A folder that goes with the value.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("quintet-{name}-{}", std::process::id()));
        std::fs::create_dir_all(&path).unwrap();
        Self(path)
    }

    /// What tells the stand-in that ranks are processes, which meet here.
    fn across(&self) -> String {
        format!("across={}", self.0.display())
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

#[test]
fn processes_have_the_verdict_of_threads() {
    let folder = Folder::new("across");
    let layout = format!("{PROOF} --dp 2 --pp 2");
    let verdict = |flags: &str, told: &str| -> Value {
        let output = quintet(&format!("{layout} {flags}"), stand_in(), told);
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{said}");
        serde_json::from_slice(&output.stdout).unwrap()
    };
    let threads = verdict("", "");
    assert_eq!(threads["ok"], true);
    let processes = verdict("--launch processes", &folder.across());
    assert_eq!(processes, threads);
    // Nothing of a communicator that ended well stays but that it is over.
    let left = std::fs::read_dir(&folder.0).unwrap().flatten();
    let left: Vec<_> = left.filter(|entry| entry.path().is_dir()).collect();
    assert!(left.is_empty(), "{left:?}");
}

#[test]
fn a_tp_group_that_leaves_its_host_is_warned_of() {
    let folder = Folder::new("apart");
    let free = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = free.local_addr().unwrap().port().to_string();
    drop(free);
    let rank = |rank: &str, host: &str| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_quintet"));
        command.args(format!("{PROOF} --tp 2").split_whitespace());
        command
            .env("QUINTET_NCCL_LIB", stand_in())
            .env("QUINTET_NCCL_SHIM", folder.across())
            .env("QUINTET_HOST", host);
        command
            .env("RANK", rank)
            .env("WORLD_SIZE", "2")
            .env("LOCAL_RANK", "0");
        command
            .env("MASTER_ADDR", "127.0.0.1")
            .env("MASTER_PORT", &port);
        command
            .env("LOCAL_WORLD_SIZE", "1")
            .env("QUINTET_TIMEOUT", "60");
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
        command.spawn().unwrap()
    };
    let ranks = [rank("0", "here"), rank("1", "there")];
    let said = ranks.map(|rank| {
        let output = rank.wait_with_output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.success(), "{said}");
        said
    });
    let warning = "ranks 0 and 1 are of one tp group and on here and there";
    assert!(said[0].contains(warning), "{}", said[0]);
    assert_eq!(said[1], "");
}
