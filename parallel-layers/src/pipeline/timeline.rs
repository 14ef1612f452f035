//! A schedule played against given times: when each action runs, how long the stages idle.
//!
//! A stage performs its actions in order. A send costs it nothing: the message is there
//! [`Durations::message`] later. A receive lasts until its message is there. Gathers, releases
//! and reductions run beside the work and take no time here.
//!
//! With `p` equal stages, `S` segments, `m` microbatches and free messages a microbatch takes
//! `w = F + Bi + Bw` of a stage's time, and holds its neighbour up for `h = F + Bi + Bw (S - 1) / S`
//! (its gradient leaves before the last weights are done). Then for GPipe and 1F1B alike
//!
//! ```text
//! makespan = m w + (p - 1) h        bubble = (p - 1) h / (m w + (p - 1) h)
//! ```
//!
//! which is the usual `(p - 1) / (m + p - 1)` where backward comes in one piece (`Bw = 0`), and
//! less where it does not.

use alloc::collections::BTreeMap;
use alloc::string::ToString;
use alloc::vec;
use alloc::vec::Vec;

use super::grid::{Grid, mark};
use super::{Action, Actions, Direction, Error, Schedule};

/// Time of one microbatch in one chunk, in any unit. The backward times are those of the whole
/// chunk; its segments take equal parts.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct StageTime {
    /// Forward.
    pub forward: f64,
    /// Gradients of the inputs.
    pub backward_input: f64,
    /// Gradients of the parameters.
    pub backward_weight: f64,
}

/// The times a schedule is played with.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Durations {
    /// One per chunk in the order of the model ([`Route::place`](super::Route::place)): with one
    /// chunk a stage, one per stage.
    pub chunks: Vec<StageTime>,
    /// From the start of a send until its receive may end.
    pub message: f64,
}

impl Durations {
    /// The same times for each of `chunks`.
    #[must_use]
    pub fn equal(chunks: usize, time: StageTime, message: f64) -> Self {
        Self {
            chunks: vec![time; chunks],
            message,
        }
    }
}

/// An action with the time it runs.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Span {
    /// The action.
    pub action: Action,
    /// When the stage reaches it.
    pub start: f64,
    /// When the stage is done with it.
    pub end: f64,
}

/// When each action of each stage runs.
#[derive(Debug, Clone, PartialEq)]
pub struct Timeline {
    /// Per stage, its actions in order.
    pub stages: Vec<Vec<Span>>,
}

/// Plays a schedule. Nothing bounds how many sends are under way.
///
/// # Errors
/// [`Error::Times`] and [`Error::Time`] where the times do not fit.
pub fn simulate(schedule: &Schedule, times: &Durations) -> Result<Timeline, Error> {
    let expected = schedule.stages() * schedule.chunks();
    let got = times.chunks.len();
    if expected != got {
        return Err(Error::Times { expected, got });
    }
    check("message", times.message)?;
    for time in &times.chunks {
        check("forward", time.forward)?;
        check("backward of inputs", time.backward_input)?;
        check("backward of weights", time.backward_weight)?;
    }
    let cost = |stage, action: &Action| cost(schedule, times, stage, action);
    let stages = play(&schedule.all(), None, times.message, cost)?;
    Ok(Timeline { stages })
}

fn check(what: &'static str, time: f64) -> Result<(), Error> {
    if time.is_finite() && time >= 0.0 {
        Ok(())
    } else {
        let got = time.to_string();
        Err(Error::Time { what, got })
    }
}

fn cost(schedule: &Schedule, times: &Durations, stage: usize, action: &Action) -> f64 {
    let of = |chunk| {
        let time = times
            .chunks
            .get(schedule.route().place(stage, chunk))
            .copied();
        let segments = schedule.segments(stage, chunk).max(1);
        (time.unwrap_or_default(), segments as f64)
    };
    match *action {
        Action::Forward { chunk, .. } => of(chunk).0.forward,
        Action::BackwardInput { chunk, .. } => of(chunk).0.backward_input / of(chunk).1,
        Action::BackwardWeight { chunk, .. } => of(chunk).0.backward_weight / of(chunk).1,
        _ => 0.0,
    }
}

/// Messages one way between two stages: when each is there, when each was taken.
#[derive(Default)]
struct Channel {
    there: Vec<f64>,
    taken: Vec<f64>,
}

/// Plays programs until all are done or none can go on. With `room`, a send waits until fewer
/// than that many messages its way are under way. What comes out does not depend on the order in
/// which stages are visited: each channel has one writer and one reader (Kahn).
pub(crate) fn play(
    programs: &[Actions],
    room: Option<usize>,
    message: f64,
    cost: impl Fn(usize, &Action) -> f64,
) -> Result<Vec<Vec<Span>>, Error> {
    let mut channels: BTreeMap<(usize, usize, Direction), Channel> = BTreeMap::new();
    let mut done: Vec<Vec<Span>> = programs
        .iter()
        .map(|actions| Vec::with_capacity(actions.len()))
        .collect();
    let mut moved = true;
    while moved {
        moved = false;
        for (stage, (actions, spans)) in programs.iter().zip(&mut done).enumerate() {
            while let Some(action) = actions.get(spans.len()) {
                let start = spans.last().map_or(0.0, |span| span.end);
                let Some(end) = perform(&mut channels, stage, action, start, room, message) else {
                    break;
                };
                let end = end + cost(stage, action);
                spans.push(Span {
                    action: *action,
                    start,
                    end,
                });
                moved = true;
            }
        }
    }
    for (stage, (actions, spans)) in programs.iter().zip(&done).enumerate() {
        if let Some(&action) = actions.get(spans.len()) {
            return Err(Error::Deadlock { stage, action });
        }
    }
    Ok(done)
}

/// When the message side of an action is done; none where it must wait.
fn perform(
    channels: &mut BTreeMap<(usize, usize, Direction), Channel>,
    stage: usize,
    action: &Action,
    now: f64,
    room: Option<usize>,
    message: f64,
) -> Option<f64> {
    let Some(m) = action.message() else {
        return Some(now);
    };
    if m.sends {
        let channel = channels.entry((stage, m.peer, m.direction)).or_default();
        let count = channel.there.len();
        let now = match room {
            Some(room) if count >= room => now.max(*channel.taken.get(count - room)?),
            _ => now,
        };
        channel.there.push(now + message);
        Some(now)
    } else {
        let channel = channels.entry((m.peer, stage, m.direction)).or_default();
        let now = now.max(*channel.there.get(channel.taken.len())?);
        channel.taken.push(now);
        Some(now)
    }
}

impl Timeline {
    /// When the last stage is done.
    #[must_use]
    pub fn makespan(&self) -> f64 {
        let ends = self.stages.iter().filter_map(|spans| spans.last());
        ends.map(|span| span.end).fold(0.0, f64::max)
    }

    /// How long a stage computes.
    #[must_use]
    pub fn busy(&self, stage: usize) -> f64 {
        let spans = self.stages.get(stage).map_or(&[][..], Vec::as_slice);
        let work = spans.iter().filter(|span| mark(&span.action).is_some());
        work.map(|span| span.end - span.start).sum()
    }

    /// The share of all stages' time in which they do not compute, from 0 to 1.
    #[must_use]
    pub fn bubble(&self) -> f64 {
        let whole = self.makespan() * self.stages.len() as f64;
        if whole <= 0.0 {
            return 0.0;
        }
        let busy: f64 = (0..self.stages.len()).map(|stage| self.busy(stage)).sum();
        1.0 - busy / whole
    }

    /// A picture: a row per stage, a column per `slot` of time, in each what fills most of it
    /// (`F` forward, `B` gradients of inputs, `W` of parameters, with the microbatch). Nothing is
    /// drawn for a slot that is not a positive number.
    #[must_use]
    pub fn grid(&self, slot: f64) -> Grid<'_> {
        Grid::new(self, slot)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pipeline::{ScheduleKind, laws::tests::each, stage::IN_FLIGHT};
    use alloc::format;

    const SPLIT: StageTime = StageTime {
        forward: 1.0,
        backward_input: 1.25,
        backward_weight: 0.75,
    };
    const WHOLE: StageTime = StageTime {
        forward: 1.0,
        backward_input: 2.0,
        backward_weight: 0.0,
    };

    fn near(a: f64, b: f64) -> bool {
        (a - b).abs() < 1e-9
    }

    /// The column "idle" of the table in [`pipeline`](crate::pipeline), in terms of the times of
    /// one chunk; none where it says nothing.
    fn idle(schedule: &Schedule, time: StageTime) -> Option<f64> {
        let segments = schedule.segments(0, 0) as f64;
        let (p, m) = (schedule.stages() as f64, schedule.microbatches() as f64);
        let (f, b, w) = (time.forward, time.backward_input, time.backward_weight);
        if m == 0.0 {
            return Some(0.0);
        }
        let held_up = f + b + w * (segments - 1.0) / segments;
        match schedule.kind() {
            ScheduleKind::GPipe | ScheduleKind::OneFOneB => Some((p - 1.0) * held_up),
            ScheduleKind::Interleaved => {
                let close = w == 0.0 || (f <= b && w <= f);
                close.then_some((p - 1.0) * held_up)
            }
            ScheduleKind::ZbH1 => Some((p - 1.0) * (f + b) - (m.min(p) - 1.0) * w.min(f).min(b)),
            ScheduleKind::DualPipeV if b <= f && f <= b + w && segments == 1.0 => {
                Some((p - 1.0) * f.max(f + b - w))
            }
            ScheduleKind::DualPipeV => None,
        }
    }

    fn holds(schedule: &Schedule, time: StageTime) -> bool {
        let places = schedule.stages() * schedule.chunks();
        let Some(idle) = idle(schedule, time) else {
            return false;
        };
        let timeline = simulate(schedule, &Durations::equal(places, time, 0.0)).unwrap();
        let each = time.forward + time.backward_input + time.backward_weight;
        let work = (schedule.microbatches() * schedule.chunks()) as f64 * each;
        let whole = work + idle;
        let said = format!("{time:?} {schedule:?}\n{}", timeline.grid(0.25));
        assert!(near(timeline.makespan(), whole), "idle {idle} {said}");
        let bubble = if whole > 0.0 { idle / whole } else { 0.0 };
        assert!(near(timeline.bubble(), bubble), "{said}");
        for stage in 0..schedule.stages() {
            assert!(near(timeline.busy(stage), work), "{said}");
        }
        true
    }

    #[test]
    fn the_bubble_is_the_formulas() {
        let times = [
            (1.0, 2.0, 0.0),
            (2.0, 1.0, 0.0),
            (1.0, 1.0, 1.0),
            (1.0, 1.25, 0.75),
            (1.5, 1.0, 0.75),
            (1.0, 1.0, 2.0),
            (2.0, 1.0, 1.0),
        ];
        let mut count = std::collections::BTreeMap::new();
        for (forward, backward_input, backward_weight) in times {
            let time = StageTime {
                forward,
                backward_input,
                backward_weight,
            };
            each(|schedule| {
                let said = usize::from(holds(schedule, time));
                *count.entry(schedule.kind().name()).or_insert(0) += said;
            });
        }
        assert!(count.values().all(|&n| n > 100), "{count:?}");
    }

    /// Which schedule idles least, for p 4, m 8 and equal times: the reason for having them.
    #[test]
    fn bubbles_side_by_side() {
        let time = StageTime {
            forward: 1.0,
            backward_input: 1.0,
            backward_weight: 1.0,
        };
        let bubbles = ScheduleKind::ALL.map(|kind| {
            let chunks = kind.chunks().unwrap_or(2);
            let schedule = Schedule::new(kind, 4, 8, &vec![1; 4 * chunks]).unwrap();
            let times = Durations::equal(4 * chunks, time, 0.0);
            let idle = simulate(&schedule, &times).unwrap();
            // A chunk is as long as the stage is divided by.
            (idle.makespan() - 24.0 * chunks as f64) / chunks as f64
        });
        assert_eq!(bubbles, [6.0, 6.0, 3.0, 3.0, 1.5]);
    }

    /// The stage keeps few sends under way; with equal stages this costs no time.
    #[test]
    fn a_bounded_number_of_sends_costs_nothing() {
        each(|schedule| {
            let times = Durations::equal(schedule.stages() * schedule.chunks(), SPLIT, 0.0);
            let cost = |stage, action: &Action| cost(schedule, &times, stage, action);
            let free = simulate(schedule, &times).unwrap().makespan();
            let stages = play(&schedule.all(), Some(IN_FLIGHT), 0.0, cost).unwrap();
            let bounded = Timeline { stages }.makespan();
            if schedule.kind() == ScheduleKind::Interleaved && schedule.stages() > 5 {
                // The way from the last stage back to the first is short of room once.
                assert!(bounded <= free + SPLIT.backward_weight, "{schedule:?}");
            } else {
                assert!(near(bounded, free), "{schedule:?}");
            }
        });
    }

    #[test]
    fn a_slow_stage_and_slow_messages() {
        let schedule = Schedule::new(ScheduleKind::OneFOneB, 2, 2, &[1, 1]).unwrap();
        let mut times = Durations::equal(2, WHOLE, 0.5);
        times.chunks[1].forward = 3.0;
        let timeline = simulate(&schedule, &times).unwrap();
        // Stage 1: F0 1.5..4.5, B0 ..6.5, F1 ..9.5, B1 ..11.5; stage 0: B1 12..14.
        assert!(near(timeline.makespan(), 14.0));
        assert!(near(timeline.busy(1), 10.0));
        assert!(near(timeline.bubble(), 1.0 - 16.0 / 28.0));
    }

    #[test]
    fn times_that_do_not_fit_are_refused() {
        let schedule = Schedule::new(ScheduleKind::GPipe, 2, 1, &[1, 1]).unwrap();
        let (expected, got) = (2, 1);
        let times = Durations::equal(1, WHOLE, 0.0);
        assert_eq!(
            simulate(&schedule, &times),
            Err(Error::Times { expected, got })
        );
        let times = Durations::equal(2, WHOLE, f64::NAN);
        assert!(matches!(
            simulate(&schedule, &times),
            Err(Error::Time { .. })
        ));
    }
}
