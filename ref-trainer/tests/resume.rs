//! A checkpoint of a run over cp and experts goes on, and is evaluated, under other layouts.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Self {
        let path =
            std::env::temp_dir().join(format!("quintet-resume-{name}-{}", std::process::id()));
        std::fs::create_dir_all(&path).unwrap();
        Self(path)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

fn quintet(at: &Path, line: &str) -> String {
    let output = Command::new(env!("CARGO_BIN_EXE_quintet"))
        .args(line.split_whitespace())
        .current_dir(at)
        .stdin(Stdio::null())
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{line}: {said}");
    String::from_utf8_lossy(&output.stdout).into_owned()
}

fn number(object: &str, key: &str) -> f64 {
    let object: serde_json::Value = serde_json::from_str(object).unwrap();
    object[key].as_f64().unwrap()
}

#[track_caller]
fn close(a: f64, b: f64) {
    assert!((a - b).abs() < 1e-9 * b.abs(), "{a} {b}");
}

/// Layouts of the same model: cp in its three ways, experts over each fold, stages, ZeRO.
const LAYOUTS: [&str; 7] = [
    "",
    "--cp 2 --cp-comm all-gather --ep 2",
    "--cp 2 --tp 2 --ep 4 --sequence-parallel --zero-stage 3",
    "--cp 4 --cp-comm ulysses --ulysses-degree 2 --ep 2 --etp 2",
    "--dp 2 --cp 2 --pp 2 --ep 2 --zero-stage 2",
    "--tp 2 --ep 2 --pp 4 --schedule zb-h1 --zero-stage 1",
    "--pp 2 --schedule dualpipe-v --dp 2 --ep 2",
];

#[test]
fn a_run_over_cp_and_ep_goes_on_under_any_layout() {
    let dir = Folder::new("train");
    let common = "--dtype f64 --eval-interval 0 --log-format json";
    let problem = "--model tiny-moe --seq-length 16 --mbs 1 --gbs 8 --moe-router-enable-expert-bias \
                   --moe-shared-expert-intermediate-size 12 --moe-capacity-factor 1.5 --lr-decay-style constant";
    let steps = |text: &str| -> Vec<f64> { text.lines().map(|l| number(l, "loss")).collect() };
    let whole = quintet(
        &dir.0,
        &format!("train {problem} {common} --steps 4 --run-dir w"),
    );
    let first = "--cp 2 --dp 2 --ep 2 --zero-stage 3 --save c --steps 2 --run-dir f";
    let first = quintet(&dir.0, &format!("train {problem} {common} {first}"));
    let (whole, first) = (steps(&whole), steps(&first));
    assert_eq!((whole.len(), first.len()), (4, 2));
    first.iter().zip(&whole).for_each(|(a, b)| close(*a, *b));
    for (run, layout) in LAYOUTS.iter().enumerate() {
        let line = format!("train --load c {common} --steps 4 --run-dir r{run} {layout}");
        let after = steps(&quintet(&dir.0, &line));
        assert_eq!(after.len(), 2, "{layout}");
        after
            .iter()
            .zip(&whole[2..])
            .for_each(|(a, b)| close(*a, *b));
    }
}

#[test]
fn eval_is_the_same_over_cp_and_ep() {
    let dir = Folder::new("eval");
    let text: String = (0..30).map(|i| format!("line {i} of a text\n\n")).collect();
    std::fs::write(dir.0.join("text"), text).unwrap();
    let train = "train --model tiny-moe --seq-length 16 --mbs 1 --gbs 4 --steps 2 --cp 2 --ep 2 --save c --quiet \
                 --pack-documents --dtype f64";
    quintet(&dir.0, train);
    let eval = |flags: &str| -> (f64, f64) {
        let line = format!("eval --load c --data text --dtype f64 --json {flags}");
        let said = quintet(&dir.0, &line);
        (number(&said, "loss"), number(&said, "tokens"))
    };
    let one = eval("");
    assert!(one.1 > 300.0, "{one:?}");
    let flags = [
        "--window-size 3",
        "--moe-capacity-factor 0.5",
        "--pack-documents=false",
    ];
    for (turn, flags) in flags.into_iter().enumerate() {
        let other = eval(flags);
        assert!((other.0 - one.0).abs() > 1e-6, "{flags} changed nothing");
        for layout in LAYOUTS.into_iter().skip(turn).step_by(3) {
            let here = eval(&format!("{layout} {flags}"));
            close(here.0, other.0);
            assert_eq!(here.1, other.1, "{layout}");
        }
    }
}
