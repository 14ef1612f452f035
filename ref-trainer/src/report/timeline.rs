//! Recorded spans put in order: which track and lane each is drawn on, what it is called, and which
//! send met which receipt. Pure data; [`trace`](super::trace) and the page write it down.
//!
//! ```text
//! rank 4   compute          [ step 2 [ pipeline [ F mb0 ][ recv F mb1 ][ F mb1 ] ... ]]
//!          communication    [ recv pp <- 0 ]     [ all_reduce tp, 4096 B ]
//!          communication 2           [ send pp -> 8, 2048 B ]      overlaps the one above
//! ```

use std::collections::{BTreeMap, VecDeque};

use quintet_parallel_layers::pipeline::Action;

use crate::spans::{Operation, Recording, Span, What};

/// The spans of all ranks, ready to be drawn.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Timeline {
    /// By rank.
    pub ranks: Vec<Tracks>,
    /// Messages whose both ends were recorded.
    pub flows: Vec<Flow>,
    /// Spans that found no room in a recorder.
    pub dropped: u64,
}

/// The spans of one rank, each track in order of begin, an outer span before what it holds.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Tracks {
    /// What the rank's thread did; nested.
    pub compute: Vec<Span>,
    /// Operations of communicators, each with the lane on which it overlaps no other.
    pub communication: Vec<(usize, Span)>,
}

/// A message from one rank's span of communication to another's.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Flow {
    /// Rank and index among its spans of communication.
    pub from: (usize, usize),
    /// Likewise.
    pub to: (usize, usize),
}

impl Timeline {
    /// Orders what ranks recorded; times become those since the first begin.
    #[must_use]
    pub fn new(recordings: &[Recording]) -> Self {
        let spans = || recordings.iter().flat_map(|r| &r.spans);
        let first = spans().map(|span| span.begin).min().unwrap_or(0);
        let ranks: Vec<Tracks> = recordings.iter().map(|r| tracks(r, first)).collect();
        Self {
            flows: flows(&ranks),
            ranks,
            dropped: recordings.iter().map(|r| r.dropped).sum(),
        }
    }

    /// The end of the last span, in nanoseconds.
    #[must_use]
    pub fn end(&self) -> u64 {
        let ends = self.ranks.iter().flat_map(|rank| {
            let compute = rank.compute.iter().map(|span| span.end);
            compute.chain(rank.communication.iter().map(|(_, span)| span.end))
        });
        ends.max().unwrap_or(0)
    }

    /// Whether there is nothing to draw.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        let none = |rank: &Tracks| rank.compute.is_empty() && rank.communication.is_empty();
        self.ranks.iter().all(none)
    }
}

fn tracks(recording: &Recording, first: u64) -> Tracks {
    let mut spans: Vec<Span> = recording.spans.clone();
    for span in &mut spans {
        (span.begin, span.end) = (span.begin - first, span.end - first);
    }
    spans.sort_by_key(|span| (span.begin, std::cmp::Reverse(span.end), depth(&span.what)));
    let (operations, compute): (Vec<Span>, Vec<Span>) = spans
        .into_iter()
        .partition(|span| matches!(span.what, What::Operation(_)));
    let lanes = lanes(&operations);
    Tracks {
        compute,
        communication: lanes.into_iter().zip(operations).collect(),
    }
}

/// How deep a span may lie in others that begin and end with it.
fn depth(what: &What) -> usize {
    match what {
        What::Step(_) => 0,
        What::Phase(_) => 1,
        What::Action(_) | What::Operation(_) => 2,
    }
}

/// The first lane that is free when each span begins; spans come in order of begin.
fn lanes(spans: &[Span]) -> Vec<usize> {
    let mut ends: Vec<u64> = Vec::new();
    let place = |span: &Span| {
        let free = ends.iter().position(|end| *end <= span.begin);
        let lane = free.unwrap_or(ends.len());
        match ends.get_mut(lane) {
            Some(end) => *end = span.end,
            None => ends.push(span.end),
        }
        lane
    };
    spans.iter().map(place).collect()
}

/// The k-th send of a group, pair and tag met the k-th receipt.
fn flows(ranks: &[Tracks]) -> Vec<Flow> {
    type Key = (&'static str, usize, usize, u64);
    let mut sends: BTreeMap<Key, VecDeque<(usize, usize)>> = BTreeMap::new();
    let ends = |op: &'static str| {
        let of = move |(rank, tracks): (usize, &Tracks)| {
            let found = tracks.communication.iter().enumerate();
            let found: Vec<_> = found
                .filter_map(|(at, (_, span))| match span.what {
                    What::Operation(o) if o.op == op => Some((o, o.peer?, (rank, at))),
                    _ => None,
                })
                .collect();
            found
        };
        ranks.iter().enumerate().flat_map(of)
    };
    for (operation, peer, end) in ends("send") {
        let key = (operation.group, end.0, peer, operation.number);
        sends.entry(key).or_default().push_back(end);
    }
    let met = ends("recv").filter_map(|(operation, peer, to)| {
        let key = (operation.group, peer, to.0, operation.number);
        let from = sends.get_mut(&key)?.pop_front()?;
        Some(Flow { from, to })
    });
    met.collect()
}

/// What a span is called. `first` is the number in the step of this replica's first microbatch.
#[must_use]
pub fn name(what: &What, first: usize) -> String {
    match what {
        What::Step(step) => format!("step {step}"),
        What::Phase(phase) => (*phase).to_string(),
        What::Action(action) => action_name(action, first),
        What::Operation(operation) => operation_name(operation),
    }
}

fn action_name(action: &Action, first: usize) -> String {
    let at = |mb: usize, chunk: usize| match chunk {
        0 => format!("mb{}", first + mb),
        _ => format!("mb{} chunk {chunk}", first + mb),
    };
    let part = |segment: usize| match segment {
        0 => String::new(),
        _ => format!(" segment {segment}"),
    };
    match *action {
        Action::Gather { chunk } => format!("gather parameters of chunk {chunk}"),
        Action::Release { chunk } => format!("release parameters of chunk {chunk}"),
        Action::Forward { mb, chunk } => format!("F {}", at(mb, chunk)),
        Action::BackwardInput { mb, chunk, segment } => {
            format!("B {}{}", at(mb, chunk), part(segment))
        }
        Action::BackwardWeight { mb, chunk, segment } => {
            format!("W {}{}", at(mb, chunk), part(segment))
        }
        Action::RecvForward { mb, chunk, from } => {
            format!("receive F {} from stage {from}", at(mb, chunk))
        }
        Action::SendForward { mb, chunk, to } => format!("send F {} to stage {to}", at(mb, chunk)),
        Action::RecvBackward { mb, chunk, from } => {
            format!("receive B {} from stage {from}", at(mb, chunk))
        }
        Action::SendBackward { mb, chunk, to } => {
            format!("send B {} to stage {to}", at(mb, chunk))
        }
        Action::ReduceGrads { chunk, bucket } => {
            format!("reduce gradients of chunk {chunk}, bucket {bucket}")
        }
    }
}

fn operation_name(operation: &Operation) -> String {
    let Operation {
        op, group, bytes, ..
    } = operation;
    match (*op, operation.peer) {
        ("recv", Some(peer)) => format!("{op} {group} <- {peer}"),
        (_, Some(peer)) => format!("{op} {group} -> {peer}, {bytes} B"),
        (_, None) => format!("{op} {group}, {bytes} B"),
    }
}

/// The kind of a span, one word: what a reader filters and colours by.
#[must_use]
pub fn kind(what: &What) -> &'static str {
    match what {
        What::Step(_) => "step",
        What::Phase(_) => "phase",
        What::Operation(operation) if operation.peer.is_some() => "message",
        What::Operation(_) => "collective",
        What::Action(action) => match action {
            Action::Forward { .. } => "forward",
            Action::BackwardInput { .. } => "backward",
            Action::BackwardWeight { .. } => "weight",
            Action::RecvForward { .. } | Action::RecvBackward { .. } => "receive",
            Action::SendForward { .. } | Action::SendBackward { .. } => "send",
            Action::Gather { .. } | Action::Release { .. } => "parameters",
            Action::ReduceGrads { .. } => "gradients",
        },
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    pub(crate) fn span(what: What, begin: u64, end: u64) -> Span {
        Span { what, begin, end }
    }

    pub(crate) fn message(op: &'static str, peer: usize, number: u64) -> What {
        What::Operation(Operation {
            op,
            group: "pp",
            peer: Some(peer),
            number,
            bytes: if op == "send" { 64 } else { 0 },
            started: true,
        })
    }

    pub(crate) fn recording(spans: Vec<Span>) -> Recording {
        Recording { spans, dropped: 0 }
    }

    #[test]
    fn spans_that_overlap_take_lanes_of_their_own() {
        let op = |b, e| span(message("send", 1, 0), b, e);
        let rank = recording(vec![
            op(15, 30),
            op(10, 20),
            op(12, 13),
            op(20, 25),
            op(13, 14),
        ]);
        let timeline = Timeline::new(&[rank]);
        let drawn: Vec<(usize, u64, u64)> = timeline.ranks[0]
            .communication
            .iter()
            .map(|(lane, s)| (*lane, s.begin, s.end))
            .collect();
        // Begins are counted from the first; what only touches may share a lane.
        let want = [(0, 0, 10), (1, 2, 3), (1, 3, 4), (1, 5, 20), (0, 10, 15)];
        assert_eq!(drawn, want);
        assert_eq!(timeline.end(), 20);
    }

    #[test]
    fn sends_meet_receipts_in_order_and_only_of_their_tag() {
        let zero = recording(vec![
            span(message("send", 1, 7), 0, 1),
            span(message("send", 1, 7), 2, 3),
            span(message("send", 1, 9), 4, 5),
        ]);
        let one = recording(vec![
            span(message("recv", 0, 9), 0, 6),
            span(message("recv", 0, 7), 1, 2),
            span(message("recv", 0, 7), 2, 4),
            // Its send was not recorded.
            span(message("recv", 0, 7), 8, 9),
        ]);
        let flows = Timeline::new(&[zero, one]).flows;
        let ends: Vec<_> = flows.iter().map(|f| (f.from, f.to)).collect();
        let want = [((0, 2), (1, 0)), ((0, 0), (1, 1)), ((0, 1), (1, 2))];
        assert_eq!(ends, want);
    }

    #[test]
    fn outer_spans_come_first() {
        let action = What::Action(Action::Forward { mb: 0, chunk: 1 });
        let rank = recording(vec![
            span(action, 5, 9),
            span(What::Phase("pipeline"), 5, 9),
            span(What::Step(3), 5, 9),
        ]);
        let timeline = Timeline::new(&[rank, Recording::default()]);
        let names: Vec<String> = timeline.ranks[0]
            .compute
            .iter()
            .map(|s| name(&s.what, 4))
            .collect();
        assert_eq!(names, ["step 3", "pipeline", "F mb4 chunk 1"]);
        assert!(!timeline.is_empty() && Timeline::new(&[]).is_empty());
    }
}
