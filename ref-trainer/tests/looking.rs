//! Looking at a run: what `--trace`, `--report`, `--tensorboard-dir` and `--log-format megatron` leave is
//! whole, and says what the run did, to the byte and in the schedule's order.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use quintet_parallel_layers::pipeline::{Action, Schedule, ScheduleKind};
use serde_json::Value;

struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("quintet-look-{name}-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&path);
        std::fs::create_dir_all(&path).unwrap();
        Self(path)
    }

    fn text(&self, name: &str) -> String {
        std::fs::read_to_string(self.0.join(name)).unwrap()
    }

    fn json(&self, name: &str) -> Value {
        serde_json::from_str(&self.text(name)).unwrap()
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

fn quintet(at: &Path, line: &str) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_quintet"));
    command.current_dir(at).args(line.split_whitespace());
    command.output().unwrap()
}

#[track_caller]
fn fine(at: &Path, line: &str) -> String {
    let output = quintet(at, line);
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{line}: {said}");
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// A span of a trace, in whole nanoseconds.
#[derive(Debug, Clone)]
struct Drawn {
    name: String,
    kind: String,
    begin: u64,
    end: u64,
    args: Value,
}

type Track = (u64, u64);

/// The spans of each track, in the order of the file.
fn spans(trace: &Value) -> BTreeMap<Track, Vec<Drawn>> {
    let mut tracks: BTreeMap<Track, Vec<Drawn>> = BTreeMap::new();
    let nanos = |value: &Value| (value.as_f64().unwrap() * 1e3).round() as u64;
    for event in trace["traceEvents"].as_array().unwrap() {
        if event["ph"] != "X" {
            continue;
        }
        let begin = nanos(&event["ts"]);
        tracks.entry(track(event)).or_default().push(Drawn {
            name: event["name"].as_str().unwrap().into(),
            kind: event["cat"].as_str().unwrap().into(),
            begin,
            end: begin + nanos(&event["dur"]),
            args: event["args"].clone(),
        });
    }
    tracks
}

fn track(event: &Value) -> Track {
    (
        event["pid"].as_u64().unwrap(),
        event["tid"].as_u64().unwrap(),
    )
}

/// On each track times never run back, and a span lies within another or outside it.
fn well_formed(tracks: &BTreeMap<Track, Vec<Drawn>>) {
    for ((rank, tid), spans) in tracks {
        let mut open: Vec<&Drawn> = Vec::new();
        let mut before = 0;
        for span in spans {
            assert!(
                span.begin >= before && span.end >= span.begin,
                "{rank} {tid} {span:?}"
            );
            before = span.begin;
            while open.last().is_some_and(|outer| outer.end <= span.begin) {
                open.pop();
            }
            if let Some(outer) = open.last() {
                assert!(
                    *tid == 0 && span.end <= outer.end,
                    "{rank} {tid}: {span:?} in {outer:?}"
                );
            }
            open.push(span);
        }
    }
}

/// Arrows have two ends, the first not after the second, each within a span that tells the same
/// message; returns how many there are by group.
fn arrows(trace: &Value, tracks: &BTreeMap<Track, Vec<Drawn>>) -> BTreeMap<String, usize> {
    let mut ends: BTreeMap<u64, Vec<&Value>> = BTreeMap::new();
    for event in trace["traceEvents"].as_array().unwrap() {
        if event["ph"] == "s" || event["ph"] == "f" {
            ends.entry(event["id"].as_u64().unwrap())
                .or_default()
                .push(event);
        }
    }
    let mut groups = BTreeMap::new();
    for pair in ends.values() {
        assert_eq!(pair.len(), 2);
        let (from, to) = (pair[0], pair[1]);
        assert_eq!(
            (&from["ph"], &to["ph"], &to["bp"]),
            (&"s".into(), &"f".into(), &"e".into())
        );
        let around = |event: &Value, op: &str| {
            let at = (event["ts"].as_f64().unwrap() * 1e3).round() as u64;
            let spans = tracks[&track(event)].iter();
            let found = spans
                .clone()
                .find(|s| s.begin <= at && at <= s.end && s.name.starts_with(op));
            (
                at,
                found.unwrap_or_else(|| panic!("no {op} around {event}")),
            )
        };
        let ((sent, send), (got, recv)) = (around(from, "send"), around(to, "recv"));
        assert!(sent <= got);
        assert_eq!(send.args["peer"], to["pid"]);
        assert_eq!(recv.args["peer"], from["pid"]);
        assert_eq!(send.args["tag"], recv.args["tag"]);
        let group = send.args["group"].as_str().unwrap();
        *groups.entry(group.to_string()).or_insert(0) += 1;
    }
    groups
}

/// The passes of a stage, as the schedule orders them.
fn ordered(schedule: &Schedule, stage: usize, first: usize) -> Vec<String> {
    let named = |action: &Action| {
        let (letter, mb, chunk, segment) = match *action {
            Action::Forward { mb, chunk } => ("F", mb, chunk, 0),
            Action::BackwardInput { mb, chunk, segment } => ("B", mb, chunk, segment),
            Action::BackwardWeight { mb, chunk, segment } => ("W", mb, chunk, segment),
            _ => return None,
        };
        let mut name = format!("{letter} mb{}", first + mb);
        if chunk > 0 {
            name += &format!(" chunk {chunk}");
        }
        if segment > 0 {
            name += &format!(" segment {segment}");
        }
        Some(name)
    };
    schedule.actions(stage).iter().filter_map(named).collect()
}

/// Bytes by group that the metrics of these steps tell.
fn metrics(folder: &Folder, steps: std::ops::RangeInclusive<u64>) -> BTreeMap<String, u64> {
    let mut sum = BTreeMap::new();
    for line in folder.text("r/metrics.jsonl").lines() {
        let object: Value = serde_json::from_str(line).unwrap();
        if steps.contains(&object["step"].as_u64().unwrap()) {
            for (group, bytes) in object["bytes"].as_object().unwrap() {
                *sum.entry(group.clone()).or_insert(0) += bytes.as_u64().unwrap();
            }
        }
    }
    sum
}

/// The numbers that a page holds.
fn page(folder: &Folder, name: &str) -> Value {
    let text = folder.text(name);
    let (_, rest) = text.split_once("id=\"data\">").unwrap();
    serde_json::from_str(rest.split_once("</script>").unwrap().0).unwrap()
}

/// Runs a layout of two replicas and two stages and holds its trace against schedule and metrics.
fn traced(kind: ScheduleKind, flags: &str, chunks: usize, segments: usize) {
    let folder = Folder::new(&format!("{kind}-{segments}"));
    let line = format!(
        "train --dp 2 --pp 2 --schedule {kind} {flags} --gbs 8 --mbs 1 --seq-length 8 --steps 4 --eval-interval 0 --quiet --run-dir r --trace out/t.json --profile-step-start 1 --profile-step-end 3"
    );
    fine(&folder.0, &line);
    let trace = folder.json("out/t.json");
    let tracks = spans(&trace);
    well_formed(&tracks);
    let all = vec![segments; 2 * chunks];
    let schedule = Schedule::new(kind, 2, 4, &all).unwrap();
    let tp = trace["otherData"]["layout"]
        .as_str()
        .unwrap()
        .contains("tp 2");
    let (tp, world) = if tp { (2, 8) } else { (1, 4) };
    for rank in 0..world {
        let compute = &tracks[&(rank, 0)];
        let steps: Vec<&Drawn> = compute.iter().filter(|s| s.kind == "step").collect();
        let names: Vec<&str> = steps.iter().map(|s| s.name.as_str()).collect();
        assert_eq!(names, ["step 2", "step 3"]);
        // Rank = ((pp * 2 + dp) * 1 + cp) * tp + tp.
        let (stage, first) = (rank / (2 * tp), rank / tp % 2 * 4);
        for step in steps {
            let passes: Vec<&str> = compute
                .iter()
                .filter(|s| ["forward", "backward", "weight"].contains(&s.kind.as_str()))
                .filter(|s| step.begin <= s.begin && s.end <= step.end)
                .map(|s| s.name.as_str())
                .collect();
            assert_eq!(
                passes,
                ordered(&schedule, stage as usize, first as usize),
                "{kind} rank {rank}"
            );
        }
    }
    // What the communicators told is what they counted.
    let mut told: BTreeMap<String, u64> = BTreeMap::new();
    for span in tracks
        .iter()
        .filter(|((_, tid), _)| *tid > 0)
        .flat_map(|(_, s)| s)
    {
        let group = span.args["group"].as_str().unwrap();
        *told.entry(group.into()).or_default() += span.args["bytes"].as_u64().unwrap();
    }
    told.retain(|_, bytes| *bytes > 0);
    assert_eq!(told, metrics(&folder, 2..=3), "{kind}");
    let sends = (0..2)
        .flat_map(|stage| schedule.actions(stage))
        .filter(|a| matches!(a, Action::SendForward { .. } | Action::SendBackward { .. }));
    let expected = sends.count() * 2 * tp as usize * 2;
    assert_eq!(arrows(&trace, &tracks).get("pp"), Some(&expected), "{kind}");
}

#[test]
fn a_trace_has_the_schedules_order_and_the_counters_bytes() {
    traced(ScheduleKind::OneFOneB, "--tp 2 --sequence-parallel", 1, 1);
    traced(ScheduleKind::GPipe, "", 1, 1);
    traced(ScheduleKind::Interleaved, "--virtual-stages 2", 2, 1);
    traced(
        ScheduleKind::ZbH1,
        "--zero-stage 2 --bucket-bytes 1000000",
        1,
        1,
    );
    traced(ScheduleKind::DualPipeV, "--zero-stage 1", 2, 1);
}

/// Sixteen ranks on all five axes, proven: the page is small, whole, and its figures are the run's.
#[test]
fn the_page_of_sixteen_ranks_is_small_and_true() {
    let folder = Folder::new("page");
    let line = "train --model tiny-moe --dp 2 --tp 2 --pp 2 --cp 2 --ep 4 --steps 3 --seq-length 16 --gbs 8 --mbs 1 --eval-interval 0 --prove --run-dir r --tensorboard-dir tb --report out/page.html";
    let said = fine(&folder.0, line);
    assert!(said.contains("out/page.html"), "{said}");
    let text = folder.text("out/page.html");
    assert!(text.len() < 2_000_000, "{} bytes", text.len());
    let data = page(&folder, "out/page.html");
    assert_eq!(data["proof"]["holds"], true);
    assert_eq!(data["proof"]["losses"].as_array().unwrap().len(), 3);
    assert_eq!(data["places"].as_array().unwrap().len(), 16);
    assert_eq!(data["timeline"]["ranks"].as_array().unwrap().len(), 16);
    assert_eq!(data["timeline"]["left_out"], 0);
    assert!(!data["timeline"]["flows"].as_array().unwrap().is_empty());
    // From rank to rank, by group, as the transport counted.
    let groups: Vec<&str> = data["traffic"]["groups"]
        .as_array()
        .unwrap()
        .iter()
        .map(|g| g.as_str().unwrap())
        .collect();
    let mut told: BTreeMap<String, u64> = BTreeMap::new();
    let mut by_rank = BTreeMap::new();
    for cell in data["traffic"]["cells"].as_array().unwrap() {
        let [group, from, to, bytes] = [0, 1, 2, 3].map(|i| cell[i].as_u64().unwrap());
        assert!(from != to && from < 16 && to < 16);
        *told.entry(groups[group as usize].into()).or_default() += bytes;
        *by_rank.entry((from as usize, group as usize)).or_insert(0) += bytes;
    }
    assert_eq!(told, metrics(&folder, 1..=3));
    // Each rank sends what was predicted of it, but for rows that the router directs.
    for (group, name) in groups.iter().enumerate() {
        for rank in 0..16 {
            let measured = by_rank.get(&(rank, group)).copied().unwrap_or(0);
            let predicted = data["traffic"]["predicted"][rank][group].as_u64().unwrap();
            let routed = ["ep", "etp"].contains(name);
            assert!(
                measured == predicted || routed && measured > predicted,
                "rank {rank} {name}"
            );
        }
    }
    for rank in 0..16 {
        let of = |what: &str, i: usize| data["memory"][what][rank][i].as_u64().unwrap();
        for exact in 0..3 {
            assert_eq!(of("counted", exact), of("predicted", exact), "rank {rank}");
        }
    }
    assert_eq!(data["memory"]["estimate"], true);
    let load = data["experts"]["load"].as_array().unwrap();
    let choices = |row: &Value| {
        row.as_array()
            .unwrap()
            .iter()
            .map(|n| n.as_u64().unwrap())
            .sum::<u64>()
    };
    assert!(
        load.iter()
            .all(|row| choices(row) == choices(&load[0]) && choices(row) > 0)
    );
    let events = std::fs::read_dir(folder.0.join("tb")).unwrap().count();
    assert_eq!(events, 1);
}

/// An interrupted or failed run and one rank alone leave a page too; a page and a trace that cannot be
/// written are said.
#[test]
fn every_run_leaves_a_page_and_a_bad_path_is_said() {
    let folder = Folder::new("every");
    fine(
        &folder.0,
        "train --steps 1 --seq-length 8 --gbs 2 --mbs 1 --eval-interval 0 --quiet --run-dir r --trace t.json",
    );
    let data = page(&folder, "r/report.html");
    assert!(data["traffic"].is_null() && !data["timeline"].is_null());
    let of = |what: &str| data["memory"][what][0][3].as_u64().unwrap();
    assert!(of("counted") > 0 && of("counted") <= of("predicted"));
    assert_eq!(spans(&folder.json("t.json")).keys().count(), 1);
    std::fs::write(folder.0.join("file"), "x").unwrap();
    for flag in [
        "--trace file/t.json",
        "--report file/r.html",
        "--tensorboard-dir file",
    ] {
        let output = quintet(
            &folder.0,
            &format!(
                "train --steps 1 --seq-length 8 --gbs 2 --mbs 1 --eval-interval 0 --quiet --run-dir r2 {flag}"
            ),
        );
        assert_eq!(output.status.code(), Some(3), "{flag}");
    }
}

/// The shape that scrapers of Megatron's log look for: fields between bars, each `name: value`.
#[test]
fn megatrons_lines_are_read_by_its_readers() {
    let folder = Folder::new("megatron");
    let said = fine(
        &folder.0,
        "train --dp 2 --seq-length 64 --gbs 16 --mbs 2 --steps 6 --eval-interval 3 --log-format megatron --log-interval 2 --run-dir r",
    );
    let lines: Vec<&str> = said
        .lines()
        .filter(|line| line.contains("] iteration "))
        .collect();
    assert_eq!(lines.len(), 5); // 1, 2, 3 (held out), 4, 6
    for line in &lines {
        let fields: Vec<&str> = line.split(" | ").collect();
        assert_eq!(fields.len(), 10, "{line}");
        for field in &fields[1..] {
            let (name, value) = field.trim_end_matches(" |").rsplit_once(": ").unwrap();
            assert!(value.trim().parse::<f64>().is_ok(), "{name}: {value}");
        }
        assert!(line.ends_with(" |"), "{line}");
    }
    assert!(
        lines[4].contains("iteration        6/       6 | consumed samples:           96 |"),
        "{}",
        lines[4]
    );
    let validation: Vec<&str> = said
        .lines()
        .filter(|line| line.starts_with(" validation loss at iteration"))
        .collect();
    assert_eq!(validation.len(), 2);
    assert!(
        validation[0].contains("iteration 3 | lm loss value: ")
            && validation[0].contains(" | lm loss PPL: ")
    );
}

/// The page of a plan holds the object that `--json` prints, and loads nothing.
#[test]
fn a_plan_has_a_page_too() {
    let folder = Folder::new("plan");
    let line = "plan --model tiny-moe --gpus 16 --seq-length 64 --global-batch-size 64 --top 3";
    let json: Value = serde_json::from_str(&fine(&folder.0, &format!("{line} --json"))).unwrap();
    let said = fine(&folder.0, &format!("{line} --html out/plan.html"));
    assert!(said.contains("MFU"), "{said}");
    assert_eq!(page(&folder, "out/plan.html"), json);
    let text = folder.text("out/plan.html");
    assert!(!text.contains("https:") && !text.contains("src="));
    std::fs::write(folder.0.join("file"), "x").unwrap();
    for (flags, code) in [("--html file/p.html", 3), ("--html p.html --steps", 2)] {
        let output = quintet(&folder.0, &format!("{line} {flags}"));
        assert_eq!(output.status.code(), Some(code), "{flags}");
    }
}
