//! A timeline as the page takes it: names by number, times as differences, so that a step of
//! sixteen ranks is some tens of kilobytes.

use std::collections::BTreeMap;

use serde::Serialize;

use crate::report::timeline::{Timeline, Tracks, kind, name};
use crate::spans::{Span, What};

/// Spans that a page draws at most, over all ranks: about 20 bytes each.
pub(super) const MOST: usize = 50_000;

/// Nanoseconds of a tick.
const TICK: u64 = 100;

/// A timeline in numbers.
#[derive(Debug, Serialize)]
pub(super) struct Drawn {
    /// Nanoseconds of a tick.
    unit: u64,
    names: Vec<String>,
    kinds: Vec<&'static str>,
    /// Number, begin and end of each step, on rank 0.
    pub(super) steps: Vec<(u64, u64, u64)>,
    ranks: Vec<Rank>,
    /// From rank, its span of communication, to rank, its span: four numbers each.
    pub(super) flows: Vec<usize>,
    /// Spans for which there was no room, here or while they were recorded.
    pub(super) left_out: u64,
}

#[derive(Debug, Serialize)]
struct Rank {
    /// Computation: name, kind, begin since the one before, length; four numbers each.
    c: Vec<u64>,
    /// Communication: lane, and the same.
    m: Vec<u64>,
}

/// Numbers given out in the order of asking.
#[derive(Default)]
struct Numbers<T: Ord + Clone> {
    of: BTreeMap<T, usize>,
    all: Vec<T>,
}

impl<T: Ord + Clone> Numbers<T> {
    fn of(&mut self, what: T) -> u64 {
        let next = self.all.len();
        let number = *self.of.entry(what.clone()).or_insert(next);
        if number == next {
            self.all.push(what);
        }
        number as u64
    }
}

/// The first `most` spans, cut where a step begins if a whole one fits. Arrows are those of the
/// pipeline, for those of a ring would cover it.
pub(super) fn draw(timeline: &Timeline, first: &[usize], most: usize) -> Drawn {
    let until = fits(timeline, most);
    let (mut names, mut kinds) = (Numbers::default(), Numbers::default());
    let mut left_out = timeline.dropped;
    let mut ranks = Vec::new();
    for (rank, tracks) in timeline.ranks.iter().enumerate() {
        let first = first.get(rank).copied().unwrap_or(0);
        let mut number = |span: &Span| {
            let name = names.of(name(&span.what, first));
            [name, kinds.of(kind(&span.what))]
        };
        let (mut c, mut m) = (Vec::new(), Vec::new());
        let mut before = 0;
        for span in tracks.compute.iter().filter(|span| span.begin < until) {
            c.extend(number(span));
            c.extend(since(&mut before, span));
        }
        let mut before = 0;
        for (lane, span) in shown(tracks, until) {
            m.push(*lane as u64);
            m.extend(number(span));
            m.extend(since(&mut before, span));
        }
        let kept = c.len() / 4 + m.len() / 5;
        left_out += (tracks.compute.len() + tracks.communication.len() - kept) as u64;
        ranks.push(Rank { c, m });
    }
    Drawn {
        unit: TICK,
        steps: steps(timeline, until),
        ranks,
        flows: flows(timeline, until),
        left_out,
        names: names.all,
        kinds: kinds.all,
    }
}

/// The time until which spans are drawn.
fn fits(timeline: &Timeline, most: usize) -> u64 {
    let mut begins: Vec<u64> = timeline
        .ranks
        .iter()
        .flat_map(|rank| {
            let compute = rank.compute.iter().map(|span| span.begin);
            compute.chain(rank.communication.iter().map(|(_, span)| span.begin))
        })
        .collect();
    if begins.len() <= most {
        return u64::MAX;
    }
    begins.sort_unstable();
    let limit = begins[most];
    let starts = steps(timeline, u64::MAX)
        .into_iter()
        .map(|(_, b, _)| b * TICK);
    starts
        .filter(|begin| *begin > 0 && *begin <= limit)
        .max()
        .unwrap_or(limit)
}

fn shown(tracks: &Tracks, until: u64) -> impl Iterator<Item = &(usize, Span)> {
    tracks
        .communication
        .iter()
        .filter(move |(_, span)| span.begin < until)
}

/// Ticks since the begin before, and of the length.
fn since(before: &mut u64, span: &Span) -> [u64; 2] {
    let (begin, end) = (span.begin / TICK, span.end / TICK);
    let gap = begin - *before;
    *before = begin;
    [gap, end - begin]
}

fn steps(timeline: &Timeline, until: u64) -> Vec<(u64, u64, u64)> {
    let spans = timeline
        .ranks
        .first()
        .into_iter()
        .flat_map(|rank| &rank.compute);
    let step = |span: &Span| match span.what {
        What::Step(number) if span.begin < until => {
            Some((number, span.begin / TICK, span.end / TICK))
        }
        _ => None,
    };
    spans.filter_map(step).collect()
}

fn flows(timeline: &Timeline, until: u64) -> Vec<usize> {
    let of = |(rank, at): (usize, usize)| timeline.ranks[rank].communication[at].1;
    let pipeline = timeline.flows.iter().filter(|flow| {
        let (from, to) = (of(flow.from), of(flow.to));
        matches!(from.what, What::Operation(o) if o.group == "pp")
            && from.begin < until
            && to.begin < until
    });
    // Spans are left out at the end alone, so that their numbers stay.
    pipeline
        .flat_map(|flow| [flow.from.0, flow.from.1, flow.to.0, flow.to.1])
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::timeline::tests::{message, recording, span};

    fn two_steps() -> Timeline {
        let rank = |peer, op| {
            recording(vec![
                span(What::Step(1), 0, 5_000),
                span(message(op, peer, 1), 1_000, 2_000),
                span(What::Step(2), 6_000, 9_000),
                span(message(op, peer, 1), 7_000, 8_050),
            ])
        };
        Timeline::new(&[rank(1, "send"), rank(0, "recv")])
    }

    #[test]
    fn everything_is_there_where_it_fits() {
        let drawn = draw(&two_steps(), &[0, 0], 100);
        assert_eq!(drawn.steps, [(1, 0, 50), (2, 60, 90)]);
        assert_eq!(drawn.flows, [0, 0, 1, 0, 0, 1, 1, 1]);
        assert_eq!(
            drawn.names,
            ["step 1", "step 2", "send pp -> 1, 64 B", "recv pp <- 0"]
        );
        assert_eq!(drawn.ranks[0].c, [0, 0, 0, 50, 1, 0, 60, 30]);
        assert_eq!(drawn.ranks[0].m, [0, 2, 1, 10, 10, 0, 2, 1, 60, 10]);
        assert_eq!(drawn.left_out, 0);
    }

    #[test]
    fn what_does_not_fit_is_cut_at_a_step_and_told() {
        let drawn = draw(&two_steps(), &[], 5);
        assert_eq!(drawn.steps, [(1, 0, 50)]);
        assert_eq!(drawn.flows, [0, 0, 1, 0]);
        assert_eq!(drawn.left_out, 4);
        // Not even a step fits.
        let drawn = draw(&two_steps(), &[], 3);
        assert_eq!((drawn.left_out, drawn.flows.len()), (6, 0));
    }
}
