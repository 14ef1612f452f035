//! A timeline as text: a row per stage, a column per slot of time.

use alloc::string::String;
use alloc::vec::Vec;
use core::fmt;

use super::timeline::{Durations, Span, StageTime, Timeline, simulate};
use super::{Action, Schedule};

/// The letter and the microbatch of an action that computes.
pub(super) fn mark(action: &Action) -> Option<(char, usize)> {
    match *action {
        Action::Forward { mb, .. } => Some(('F', mb)),
        Action::BackwardInput { mb, .. } => Some(('B', mb)),
        Action::BackwardWeight { mb, .. } => Some(('W', mb)),
        _ => None,
    }
}

/// A [`Timeline`] as text.
#[derive(Debug, Clone, Copy)]
pub struct Grid<'a> {
    timeline: &'a Timeline,
    slot: f64,
}

impl<'a> Grid<'a> {
    pub(super) fn new(timeline: &'a Timeline, slot: f64) -> Self {
        Self { timeline, slot }
    }

    /// Labels of a stage's slots, empty where it idles for at least half of one.
    fn row(&self, spans: &[Span]) -> Vec<String> {
        let mut fills: Vec<Vec<((char, usize), f64)>> = Vec::new();
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
        let label = |fill: &Vec<((char, usize), f64)>| {
            let most = fill.iter().fold(None, |best: Option<&(_, f64)>, next| {
                best.filter(|b| b.1 >= next.1).or(Some(next))
            });
            match most {
                Some(((letter, mb), _)) if fill.iter().map(|f| f.1).sum::<f64>() > half => {
                    alloc::format!("{letter}{mb}")
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

/// The schedule with a forward in one slot and a backward, weights and all, in one more.
impl fmt::Display for Schedule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let slot = StageTime {
            forward: 1.0,
            backward_input: 1.0,
            backward_weight: 0.0,
        };
        let times = Durations::equal(self.stages() * self.chunks(), slot, 0.0);
        match simulate(self, &times) {
            Ok(timeline) => timeline.grid(1.0).fmt(f),
            Err(error) => error.fmt(f),
        }
    }
}
