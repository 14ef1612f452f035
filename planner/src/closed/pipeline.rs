//! What the stages of a pipeline hold at once, and how long they wait for each other.
//!
//! ```text
//! schedule       held on stage s of p, m microbatches      idle beside m w, w = F + Bi + Bw
//! gpipe          m                                         (p - 1) (F + Bi + Bw (S - 1) / S)
//! 1f1b           min(m, p - s)                             the same
//! interleaved    played                                    the same / v
//! zb-h1          played (p)                                (p - 1) (F + Bi - Bw), and no less than
//!                                                          (p - 1) F
//! dualpipe-v     played (p + 1 of twice as many halves)    (p - 1) (F + Bi - Bw) / 2, and no less
//!                                                          than (p - 1) F / 2
//! ```
//!
//! where a stage's chunk has S layers, and its gradient leaves before the last one's weights.
//! What is played is the order of the first few microbatches: after them it repeats itself.

use alloc::vec::Vec;

use quintet_parallel_layers::pipeline::{Action, Actions, Schedule, ScheduleKind};

use super::{Counts, layers, stage};
use crate::{Error, Layout, ModelConfig};

/// One stage of a pipeline.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Stage {
    /// Which.
    pub stage: usize,
    /// The layers of each of its chunks.
    pub chunks: Vec<Counts>,
    /// Those of all.
    pub layers: Counts,
    /// Neighbours along the model of all its chunks.
    pub neighbours: u64,
    /// Those of them that lie on another stage.
    pub elsewhere: u64,
    /// What it holds when it holds most; several where none of them is the most of each kind.
    pub peaks: Vec<Peak>,
}

/// How many layers, times microbatches, are held at once.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Peak {
    /// With what forward saved.
    pub saved: Counts,
    /// With what backward keeps beside that until the gradients of the parameters.
    pub kept: Counts,
    /// Whose forward runs, and lets go at its end what will be computed again.
    pub running: Counts,
}

impl Peak {
    fn covers(&self, other: &Self) -> bool {
        self.saved.covers(&other.saved)
            && self.kept.covers(&other.kept)
            && self.running.covers(&other.running)
    }
}

impl Stage {
    /// Whether another stage needs no more than this one, of anything.
    fn covers(&self, other: &Self) -> bool {
        let peak = |peak: &Peak| self.peaks.iter().any(|mine| mine.covers(peak));
        self.layers.covers(&other.layers)
            && self.neighbours >= other.neighbours
            && self.elsewhere >= other.elsewhere
            && self.chunks.len() == other.chunks.len()
            && self
                .chunks
                .iter()
                .zip(&other.chunks)
                .all(|(a, b)| a.covers(b))
            && other.peaks.iter().all(peak)
    }
}

/// Every stage of the pipeline in which each replica has `microbatches`.
///
/// # Errors
/// What the schedule refuses.
pub fn stages(
    model: &ModelConfig,
    layout: &Layout,
    microbatches: usize,
) -> Result<Vec<Stage>, Error> {
    let (p, kind) = (layout.pp, layout.schedule);
    // What is played stops changing once the pipe has been full.
    let played = match kind {
        ScheduleKind::GPipe | ScheduleKind::OneFOneB => 0,
        _ => microbatches.min(4 * p),
    };
    let route = layout.route();
    let mut segments = alloc::vec![1; layout.places()];
    for (s, c) in (0..p).flat_map(|s| (0..layout.chunks()).map(move |c| (s, c))) {
        segments[route.place(s, c)] = layers(model, layout, s, c).all() as usize;
    }
    let schedule = Schedule::new(kind, p, played, &segments)?;
    let stage = |s: usize| {
        let chunks = stage(model, layout, s);
        let mut layers = Counts::default();
        chunks.iter().for_each(|chunk| layers.add(chunk, 1));
        let ends = (0..layout.chunks()).flat_map(|c| [route.before(s, c), route.after(s, c)]);
        let neighbours: Vec<usize> = ends.flatten().map(|(peer, _)| peer).collect();
        let peaks = match kind {
            ScheduleKind::GPipe => alternating(&chunks[0], microbatches),
            ScheduleKind::OneFOneB => alternating(&chunks[0], microbatches.min(p - s)),
            _ => highest(&schedule.actions(s), &chunks),
        };
        Stage {
            stage: s,
            layers,
            neighbours: neighbours.len() as u64,
            elsewhere: neighbours.iter().filter(|peer| **peer != s).count() as u64,
            peaks,
            chunks,
        }
    };
    Ok((0..p).map(stage).collect())
}

/// The stages of which one is the fullest, whatever a layer costs.
#[must_use]
pub fn fullest(stages: Vec<Stage>) -> Vec<Stage> {
    let mut kept: Vec<Stage> = Vec::new();
    for stage in stages {
        if kept.iter().any(|k| k.covers(&stage)) {
            continue;
        }
        kept.retain(|k| !stage.covers(k));
        kept.push(stage);
    }
    kept
}

/// The moments at which a chunk that holds at most `held` microbatches, and passes backward through
/// one at a time, layer by layer, holds most.
fn alternating(chunk: &Counts, held: usize) -> Vec<Peak> {
    let (mut peaks, mut saved) = (Vec::new(), Counts::default());
    if held == 0 {
        return peaks;
    }
    saved.add(chunk, held as u64);
    for (running, _) in kinds(chunk) {
        let kept = Counts::default();
        note(
            &mut peaks,
            Peak {
                saved,
                kept,
                running,
            },
        );
    }
    for (kept, count) in kinds(chunk) {
        let running = Counts::default();
        note(
            &mut peaks,
            Peak {
                saved,
                kept,
                running,
            },
        );
        saved.take(&kept, count);
    }
    peaks
}

/// One of each kind that a chunk has, and how many, in the order of backward.
fn kinds(chunk: &Counts) -> impl Iterator<Item = (Counts, u64)> {
    let one = Counts::default();
    [
        (Counts { head: 1, ..one }, chunk.head),
        (Counts { moe: 1, ..one }, chunk.moe),
        (Counts { dense: 1, ..one }, chunk.dense),
        (Counts { embed: 1, ..one }, chunk.embed),
    ]
    .into_iter()
    .filter(|(_, count)| *count > 0)
}

fn note(peaks: &mut Vec<Peak>, now: Peak) {
    if !peaks.iter().any(|peak| peak.covers(&now)) {
        peaks.retain(|peak| !now.covers(peak));
        peaks.push(now);
    }
}

/// The moments at which a stage holds most, counted as [`memory`](crate::memory) counts; each layer
/// is a segment.
fn highest(actions: &Actions, chunks: &[Counts]) -> Vec<Peak> {
    let order: Vec<Vec<Counts>> = chunks
        .iter()
        .map(|chunk| {
            let runs = kinds(chunk);
            runs.flat_map(|(one, count)| (0..count).map(move |_| one))
                .collect()
        })
        .collect();
    let (mut peaks, mut now) = (Vec::new(), Peak::default());
    for action in actions {
        match *action {
            Action::Forward { chunk, .. } => {
                now.saved.add(&chunks[chunk], 1);
                for (running, _) in kinds(&chunks[chunk]) {
                    note(&mut peaks, Peak { running, ..now });
                }
            }
            Action::BackwardInput { chunk, segment, .. } => {
                now.kept.add(&order[chunk][segment], 1);
                note(&mut peaks, now);
            }
            Action::BackwardWeight { chunk, segment, .. } => {
                now.saved.take(&order[chunk][segment], 1);
                now.kept.take(&order[chunk][segment], 1);
            }
            _ => {}
        }
    }
    peaks
}

/// Seconds of one microbatch on a stage, over all of its chunks.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct StageSeconds {
    /// Forward.
    pub forward: f64,
    /// Gradients of the inputs.
    pub input: f64,
    /// Gradients of the parameters.
    pub weight: f64,
}

impl StageSeconds {
    /// All three.
    #[must_use]
    pub fn all(&self) -> f64 {
        self.forward + self.input + self.weight
    }
}

/// Seconds that a pipeline of equal stages idles in a step, beside what its microbatches take; each
/// chunk has `segments` layers.
#[must_use]
pub fn idle(layout: &Layout, time: StageSeconds, segments: u64) -> f64 {
    let ramp = layout.pp.saturating_sub(1) as f64;
    let last = time.weight / segments.max(1) as f64;
    let split = (time.forward + time.input - time.weight).max(time.forward);
    ramp * match layout.schedule {
        ScheduleKind::GPipe | ScheduleKind::OneFOneB => time.all() - last,
        ScheduleKind::Interleaved => (time.all() - last) / layout.chunks().max(1) as f64,
        ScheduleKind::ZbH1 => split,
        ScheduleKind::DualPipeV => split / 2.0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use quintet_parallel_layers::pipeline::{Durations, StageTime, simulate};

    /// Against schedules played with equal stages: those of one piece to the last digit, the others
    /// within a tenth of the idle time or of one stage's microbatch.
    #[test]
    fn idle_time_is_what_a_played_schedule_idles() {
        for kind in ScheduleKind::ALL {
            for (p, m) in [(2, 8), (4, 16), (8, 16), (8, 64), (6, 24)] {
                for (forward, input, weight) in [(1.0, 1.0, 1.0), (1.0, 1.4, 0.9), (1.0, 1.2, 1.0)]
                {
                    let layout = Layout {
                        pp: p,
                        schedule: kind,
                        virtual_stages: if kind == ScheduleKind::Interleaved {
                            3
                        } else {
                            1
                        },
                        ..Layout::single()
                    };
                    let v = layout.chunks();
                    let segments = 4;
                    let schedule =
                        Schedule::new(kind, p, m, &alloc::vec![segments; p * v]).unwrap();
                    let one = StageTime {
                        forward: forward / v as f64,
                        backward_input: input / v as f64,
                        backward_weight: weight / v as f64,
                    };
                    let played = simulate(&schedule, &Durations::equal(p * v, one, 0.0)).unwrap();
                    let ends = played.stages.iter().filter_map(|s| s.last()).map(|s| s.end);
                    let makespan = ends.fold(0.0, f64::max);
                    let time = StageSeconds {
                        forward,
                        input,
                        weight,
                    };
                    let idled = makespan - m as f64 * time.all();
                    let ours = idle(&layout, time, segments as u64);
                    let off = (ours - idled).abs();
                    let plain = matches!(kind, ScheduleKind::GPipe | ScheduleKind::OneFOneB);
                    let bound = if plain {
                        1e-9
                    } else {
                        (0.1 * idled).max(0.5 * time.all())
                    };
                    assert!(
                        off <= bound,
                        "{kind} p {p} m {m} {time:?}: {ours} for {idled}"
                    );
                }
            }
        }
    }
}
