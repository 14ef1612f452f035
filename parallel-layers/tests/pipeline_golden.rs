//! Schedules as text. `UPDATE_GOLDEN=1 cargo test -p quintet-parallel-layers` writes the files
//! anew; read the diff before you keep it.

use std::fmt::Write as _;
use std::path::PathBuf;
use std::{env, fs};

use quintet_parallel_layers::pipeline::{Durations, Schedule, ScheduleKind, StageTime, simulate};

fn golden(name: &str, text: &str) {
    let path: PathBuf = [env!("CARGO_MANIFEST_DIR"), "tests", "golden", name]
        .iter()
        .collect();
    if env::var_os("UPDATE_GOLDEN").is_some() {
        fs::write(&path, text).unwrap();
    }
    let kept = fs::read_to_string(&path).unwrap_or_default();
    assert_eq!(kept, text, "{} differs", path.display());
}

/// None where the kind cannot run so many microbatches over so many stages.
fn schedule(
    kind: ScheduleKind,
    stages: usize,
    microbatches: usize,
    segments: usize,
) -> Option<Schedule> {
    let chunks = kind.chunks().unwrap_or(2);
    Schedule::new(kind, stages, microbatches, &vec![segments; stages * chunks]).ok()
}

/// Those of 4 stages are to be held against the papers' figures: interleaved over 8 microbatches
/// (Narayanan et al. 2021, figure 4), zb-h1 over 8 (Qi et al. 2023, figure 2), dualpipe-v over 10
/// (DeepSeek's picture, where a forward and a backward that overlap share a slot).
#[test]
fn grids() {
    let mut text = String::new();
    for (stages, microbatches) in [(1, 3), (2, 4), (4, 2), (4, 6), (4, 8), (4, 10), (4, 12)] {
        for kind in ScheduleKind::ALL {
            let Some(schedule) = schedule(kind, stages, microbatches, 1) else {
                continue;
            };
            let name = kind.name();
            let _ = writeln!(text, "{name}, {stages} stages, {microbatches} microbatches");
            let _ = writeln!(text, "{schedule}");
        }
    }
    golden("grids.txt", &text);
}

/// Weights' gradients drawn apart: the gradient moves on before `W` of the last segment.
#[test]
fn grids_with_backward_in_two() {
    let slot = StageTime {
        forward: 1.0,
        backward_input: 1.0,
        backward_weight: 1.0,
    };
    let mut text = String::new();
    for kind in ScheduleKind::ALL {
        let schedule = schedule(kind, 4, 8, 1).unwrap();
        let times = Durations::equal(4 * schedule.chunks(), slot, 0.0);
        let timeline = simulate(&schedule, &times).unwrap();
        let (name, bubble) = (kind.name(), timeline.bubble());
        let _ = writeln!(text, "{name}, 4 stages, 8 microbatches, bubble {bubble:.4}");
        let _ = writeln!(text, "{}", timeline.grid(1.0));
    }
    golden("grids_split.txt", &text);
}

#[test]
fn actions() {
    let mut text = String::new();
    for kind in ScheduleKind::ALL {
        let microbatches = if kind == ScheduleKind::DualPipeV {
            6
        } else {
            3
        };
        let schedule = schedule(kind, 3, microbatches, 2).unwrap();
        for stage in 0..3 {
            let name = kind.name();
            let _ = writeln!(
                text,
                "{name}, stage {stage} of 3, {microbatches} microbatches, 2 segments"
            );
            let mut line = String::new();
            for action in schedule.actions(stage) {
                let word = action.to_string();
                let _ = write!(line, "{}{word}", if line.is_empty() { "" } else { ", " });
                if word.starts_with("release") {
                    let _ = writeln!(text, "  {line}");
                    line.clear();
                }
            }
            let _ = writeln!(text, "{line}");
        }
    }
    golden("actions.txt", &text);
}
