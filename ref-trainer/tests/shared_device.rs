//! Ranks that are threads share the emulated device: collectives are performed on it, with the numbers and the bytes
//! of those that go through the host.
#![cfg(feature = "emulated")]

use std::process::Command;

use serde_json::Value;

const SMALL: &str = "verify --device emulated --seq-length 8 --mbs 1 --gbs 2 --steps 1 --json";

fn verdict(line: &str) -> Value {
    let mut command = Command::new(env!("CARGO_BIN_EXE_quintet"));
    let output = command
        .args(SMALL.split_whitespace())
        .args(line.split_whitespace())
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{said}");
    serde_json::from_slice(&output.stdout).unwrap()
}

#[test]
fn collectives_on_the_device_are_those_of_the_host() {
    let layout = "--dp 2 --tp 2 --dtype bf16 --model tiny --zero-stage 3";
    let near = verdict(layout);
    let far = verdict(&format!("{layout} --by-messages"));
    for (verdict, on_device) in [(&near, true), (&far, false)] {
        assert_eq!(verdict["ok"], true, "{verdict}");
        assert_eq!(verdict["on_device"], on_device, "{verdict}");
    }
    for key in [
        "loss_rel",
        "grad_rel_max",
        "param_rel_max",
        "bit_equal",
        "bytes_counted",
    ] {
        assert_eq!(near[key], far[key], "{key}");
    }
}
