//! `quintet trace`: a schedule as a picture and in figures, before any rank exists.

use std::fmt::Write as _;
use std::path::PathBuf;

use clap::Args;
use quintet_parallel_layers::pipeline::laws::held;
use quintet_parallel_layers::pipeline::{Durations, Schedule, ScheduleKind, StageTime, simulate};

use super::words;
use crate::failure::Failure;

#[derive(Debug, Args)]
pub(super) struct TraceArgs {
    /// Order of work to draw [default: 1f1b]
    #[arg(long, value_enum)]
    schedule: Option<words::Schedule>,
    /// Stages [default: 4]
    #[arg(long = "pp", visible_aliases = ["pipeline-parallel-size", "pipeline-model-parallel-size"], value_name = "N")]
    pp: Option<usize>,
    /// Microbatches of a pipeline in a step [default: 8]
    #[arg(long, value_name = "N")]
    microbatches: Option<usize>,
    /// Chunks of the model that a stage holds under the interleaved schedule [default: 2]
    #[arg(
        long,
        visible_alias = "num-virtual-stages-per-pipeline-rank",
        value_name = "N"
    )]
    virtual_stages: Option<usize>,
    /// Say of what ranks have recorded there (train --recorder) which rank is at which call
    #[arg(long, value_name = "DIR", conflicts_with_all = ["schedule", "pp", "microbatches", "virtual_stages"])]
    pub(super) recorder: Option<PathBuf>,
}

/// Slots of a picture; more is a slip of the finger.
const MOST: usize = 1 << 18;

impl TraceArgs {
    /// The schedule that is asked for.
    ///
    /// # Errors
    /// Exit 2 where the kind cannot run so.
    pub(super) fn schedule(&self) -> Result<Schedule, Failure> {
        let (pp, m) = (self.pp.unwrap_or(4), self.microbatches.unwrap_or(8));
        let asked = match (self.schedule, self.virtual_stages) {
            (None, Some(2..)) => ScheduleKind::Interleaved,
            (kind, _) => kind.map_or(ScheduleKind::OneFOneB, ScheduleKind::from),
        };
        let chunks = match (asked.chunks(), self.virtual_stages) {
            (None, Some(chunks @ 0..2)) => {
                return Err(Failure::usage(format!(
                    "virtual-stages={chunks} is too few for schedule {asked}, whose stages hold at least 2 chunks"
                )));
            }
            (None, chunks) => chunks.unwrap_or(2),
            (Some(fixed), Some(chunks)) if chunks != fixed && chunks != 1 => {
                return Err(Failure::usage(format!(
                    "virtual-stages={chunks} does not go with schedule {asked}, whose stages hold {fixed} of the model's chunks"
                )));
            }
            (Some(fixed), _) => fixed,
        };
        let slots = pp.saturating_mul(chunks).saturating_mul(m.max(1));
        if slots > MOST {
            return Err(Failure::usage(format!(
                "{pp} stages of {chunks} chunks and {m} microbatches are more than can be drawn; at most {MOST} passes"
            )));
        }
        let segments = vec![1; pp * chunks];
        Schedule::new(asked, pp, m, &segments).map_err(|e| Failure::usage(e.to_string()))
    }
}

/// Grid, bubble and high-water marks, where a forward and each half of a backward take one slot.
///
/// # Errors
/// Where the schedule cannot be played.
pub fn describe(schedule: &Schedule) -> Result<String, Failure> {
    let slot = StageTime {
        forward: 1.0,
        backward_input: 1.0,
        backward_weight: 1.0,
    };
    let places = schedule.route().places();
    let played = simulate(schedule, &Durations::equal(places, slot, 0.0))?;
    let (pp, chunks) = (schedule.stages(), schedule.chunks());
    let mut text = format!("{} over {pp} stages", schedule.kind());
    if chunks > 1 {
        let _ = write!(text, " of {chunks} chunks (a, b, ...)");
    }
    let _ = writeln!(text, ", {} microbatches", schedule.microbatches());
    let _ = writeln!(
        text,
        "F forward, B gradient of the input, W gradient of the weights, one slot each"
    );
    let _ = write!(text, "{}", played.grid(1.0));
    let whole = played.makespan();
    let _ = writeln!(
        text,
        "bubble {:.2} %: a stage idles for {} of {whole} slots",
        100.0 * played.bubble(),
        whole - played.busy(0)
    );
    let marks: Vec<usize> = schedule.all().iter().map(|a| held(a)).collect();
    let most = marks.iter().max().copied().unwrap_or(0);
    let each: Vec<String> = marks.iter().map(ToString::to_string).collect();
    let unit = if chunks > 1 {
        format!("microbatches of a chunk, which is 1/{chunks} of a stage")
    } else {
        "microbatches".into()
    };
    let _ = writeln!(
        text,
        "activations held: at most {most} {unit}; by stage {}",
        each.join(" ")
    );
    Ok(text)
}
