//! A timeline as text: a row per stage, a column per slot of time.

use alloc::string::String;
use alloc::vec::Vec;
use core::fmt;

use super::timeline::{Durations, Span, StageTime, Timeline, simulate};
use super::{Action, Schedule};

/// Letter, microbatch and chunk of an action that computes.
pub(super) fn mark(action: &Action) -> Option<Mark> {
    match *action {
        Action::Forward { mb, chunk } => Some(('F', mb, chunk)),
        Action::BackwardInput { mb, chunk, .. } => Some(('B', mb, chunk)),
        Action::BackwardWeight { mb, chunk, .. } => Some(('W', mb, chunk)),
        _ => None,
    }
}

type Mark = (char, usize, usize);

/// A [`Timeline`] as text.
#[derive(Debug, Clone, Copy)]
pub struct Grid<'a> {
    timeline: &'a Timeline,
    slot: f64,
    /// Whether a stage has several chunks, which are then told apart.
    chunks: bool,
}

impl<'a> Grid<'a> {
    pub(super) fn new(timeline: &'a Timeline, slot: f64) -> Self {
        let spans = timeline.stages.iter().flatten();
        let mut marks = spans.filter_map(|span| mark(&span.action));
        Self {
            timeline,
            slot,
            chunks: marks.any(|(_, _, chunk)| chunk > 0),
        }
    }

    /// `F3`; with several chunks `F3a` for the first, `F3b` for the second.
    fn label(&self, (letter, mb, chunk): Mark) -> String {
        let name = u8::try_from(chunk).ok().and_then(|c| b'a'.checked_add(c));
        match name.filter(u8::is_ascii_lowercase) {
            _ if !self.chunks => alloc::format!("{letter}{mb}"),
            Some(name) => alloc::format!("{letter}{mb}{}", char::from(name)),
            None => alloc::format!("{letter}{mb}/{chunk}"),
        }
    }

    /// Labels of a stage's slots, empty where it idles for at least half of one.
    fn row(&self, spans: &[Span]) -> Vec<String> {
        let mut fills: Vec<Vec<(Mark, f64)>> = Vec::new();
        for span in spans {
            let Some(mark) = mark(&span.action) else {
                continue;
            };
            let mut at = (span.start / self.slot) as usize;
            while (at as f64) * self.slot < span.end {
                let begin = span.start.max(at as f64 * self.slot);
                let limit = (at + 1) as f64 * self.slot;
                let length = span.end.min(limit) - begin;
                if fills.len() <= at {
                    fills.resize(at + 1, Vec::new());
                }
                match fills[at].iter_mut().find(|(m, _)| *m == mark) {
                    Some((_, sum)) => *sum += length,
                    None => fills[at].push((mark, length)),
                }
                at += 1;
            }
        }
        let half = self.slot / 2.0;
        let label = |fill: &Vec<(Mark, f64)>| {
            let most = fill.iter().fold(None, |best: Option<&(_, f64)>, next| {
                best.filter(|b| b.1 >= next.1).or(Some(next))
            });
            match most {
                Some((mark, _)) if fill.iter().map(|f| f.1).sum::<f64>() > half => {
                    self.label(*mark)
                }
                _ => String::new(),
            }
        };
        let mut row: Vec<String> = fills.iter().map(label).collect();
        while row.last().is_some_and(String::is_empty) {
            row.pop();
        }
        row
    }
}

impl fmt::Display for Grid<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if !self.slot.is_finite() || self.slot <= 0.0 {
            return Ok(());
        }
        let stages = &self.timeline.stages;
        let rows: Vec<_> = stages.iter().map(|spans| self.row(spans)).collect();
        let width = rows.iter().flatten().map(String::len).max().unwrap_or(0);
        let digits = alloc::format!("{}", stages.len().saturating_sub(1)).len();
        for (stage, row) in rows.iter().enumerate() {
            write!(f, "stage {stage:>digits$} |")?;
            for (at, label) in row.iter().enumerate() {
                let label = if label.is_empty() { "." } else { label };
                if at + 1 < row.len() {
                    write!(f, " {label:<width$}")?;
                } else {
                    write!(f, " {label}")?;
                }
            }
            writeln!(f)?;
        }
        Ok(())
    }
}

/// The schedule with a forward in one slot and a backward in one more: weights and all in one
/// piece, or each half in a slot where the kind parts them.
impl fmt::Display for Schedule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let splits = self.kind().splits_backward();
        let slot = StageTime {
            forward: 1.0,
            backward_input: 1.0,
            backward_weight: if splits { 1.0 } else { 0.0 },
        };
        let times = Durations::equal(self.stages() * self.chunks(), slot, 0.0);
        match simulate(self, &times) {
            Ok(timeline) => timeline.grid(1.0).fmt(f),
            Err(error) => error.fmt(f),
        }
    }
}
