//! `--trace FILE.json`: a [`Timeline`] in Chrome's trace event format, for ui.perfetto.dev and
//! chrome://tracing ("Trace Event Format", the Chromium project).
//!
//! ```text
//! pid = rank     tid 0 compute     tid 1, 2, ... communication, a lane each
//! ph "M" names   ph "X" a span     ph "s" and "f" the ends of an arrow from a send to its receipt
//! ```

use serde::Serialize;
use serde_json::{Map, Value, json};

use super::timeline::{Flow, Timeline, kind, name};
use crate::failure::Failure;
use crate::spans::{Span, What};

/// What is told of a rank beside its spans.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct RankName {
    /// Its place on the mesh, as in `pp 1 dp 0 tp 1`; empty of a single rank.
    pub place: String,
    /// Number in the step of its replica's first microbatch.
    pub first_microbatch: usize,
}

/// One event; times in microseconds.
#[derive(Debug, Serialize)]
struct Event {
    name: String,
    #[serde(skip_serializing_if = "str::is_empty")]
    cat: &'static str,
    ph: &'static str,
    pid: usize,
    tid: usize,
    #[serde(skip_serializing_if = "Option::is_none")]
    ts: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    dur: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    id: Option<usize>,
    /// `e`: an arrow ends at the span around its time, not at the next one.
    #[serde(skip_serializing_if = "Option::is_none")]
    bp: Option<&'static str>,
    #[serde(skip_serializing_if = "Map::is_empty")]
    args: Map<String, Value>,
}

/// The text of the file. `about` are further words on the run, shown as its metadata.
///
/// # Errors
/// None that a timeline can cause; exit 3 where JSON refuses it all the same.
pub fn chrome(
    timeline: &Timeline,
    ranks: &[RankName],
    about: &[(&'static str, String)],
) -> Result<String, Failure> {
    let mut events = Vec::new();
    let unknown = RankName::default();
    for (rank, tracks) in timeline.ranks.iter().enumerate() {
        let about = ranks.get(rank).unwrap_or(&unknown);
        let lanes = tracks.communication.iter().map(|(lane, _)| lane + 1).max();
        titles(rank, about, lanes.unwrap_or(0), &mut events);
        let first = about.first_microbatch;
        let compute = tracks.compute.iter().map(|s| event(rank, 0, s, first));
        events.extend(compute);
        let operations = tracks.communication.iter();
        events.extend(operations.map(|(lane, s)| event(rank, lane + 1, s, first)));
    }
    for (id, flow) in timeline.flows.iter().enumerate() {
        events.extend(arrow(timeline, id, flow));
    }
    let metadata: Map<String, Value> = about
        .iter()
        .map(|(key, value)| ((*key).to_string(), json!(value)))
        .collect();
    let events: Vec<String> = events
        .iter()
        .map(serde_json::to_string)
        .collect::<Result<_, _>>()
        .map_err(refused)?;
    let metadata = serde_json::to_string(&metadata).map_err(refused)?;
    Ok(format!(
        "{{\"displayTimeUnit\":\"ms\",\"otherData\":{metadata},\"traceEvents\":[\n{}\n]}}\n",
        events.join(",\n")
    ))
}

fn refused(e: serde_json::Error) -> Failure {
    Failure::data(format!("the trace cannot be written as JSON: {e}"))
}

/// Names of the process and its threads, and their order.
fn titles(rank: usize, about: &RankName, lanes: usize, events: &mut Vec<Event>) {
    let gap = if about.place.is_empty() { "" } else { ": " };
    let title = format!("rank {rank}{gap}{}", about.place);
    let mut meta = |tid, name: &str, key: &str, value: Value| {
        events.push(Event {
            name: name.to_string(),
            cat: "",
            ph: "M",
            pid: rank,
            tid,
            ts: None,
            dur: None,
            id: None,
            bp: None,
            args: [(key.to_string(), value)].into_iter().collect(),
        });
    };
    meta(0, "process_name", "name", json!(title));
    meta(0, "process_sort_index", "sort_index", json!(rank));
    meta(0, "thread_name", "name", json!("compute"));
    meta(0, "thread_sort_index", "sort_index", json!(0));
    for tid in 1..=lanes {
        let title = match tid {
            1 => "communication".to_string(),
            _ => format!("communication {tid}"),
        };
        meta(tid, "thread_name", "name", json!(title));
        meta(tid, "thread_sort_index", "sort_index", json!(tid));
    }
}

fn event(rank: usize, tid: usize, span: &Span, first: usize) -> Event {
    Event {
        name: name(&span.what, first),
        cat: kind(&span.what),
        ph: "X",
        pid: rank,
        tid,
        ts: Some(micros(span.begin)),
        dur: Some(micros(span.end - span.begin)),
        id: None,
        bp: None,
        args: arguments(&span.what),
    }
}

fn arguments(what: &What) -> Map<String, Value> {
    let What::Operation(o) = what else {
        return Map::new();
    };
    let mut args = Map::new();
    args.insert("group".into(), json!(o.group));
    args.insert("bytes".into(), json!(o.bytes));
    args.insert("started".into(), json!(o.started));
    match o.peer {
        Some(peer) => {
            args.insert("peer".into(), json!(peer));
            args.insert("tag".into(), json!(o.number));
        }
        None => {
            args.insert("number".into(), json!(o.number));
        }
    }
    args
}

/// Both ends of an arrow, each within its span.
fn arrow(timeline: &Timeline, id: usize, flow: &Flow) -> Vec<Event> {
    let of = |(rank, at): (usize, usize)| {
        let (lane, span) = timeline.ranks.get(rank)?.communication.get(at)?;
        Some((rank, lane + 1, *span))
    };
    let (Some((from, out, sent)), Some((to, into, got))) = (of(flow.from), of(flow.to)) else {
        return Vec::new();
    };
    let group = match sent.what {
        What::Operation(o) => o.group,
        _ => "",
    };
    let end = |ph, pid, tid, at, bp| Event {
        name: format!("message of {group}"),
        cat: "message",
        ph,
        pid,
        tid,
        ts: Some(micros(at)),
        dur: None,
        id: Some(id),
        bp,
        args: Map::new(),
    };
    // A span does not hold its own end.
    let arrived = got.end.saturating_sub(1).max(got.begin).max(sent.begin);
    vec![
        end("s", from, out, sent.begin, None),
        end("f", to, into, arrived, Some("e")),
    ]
}

fn micros(nanos: u64) -> f64 {
    nanos as f64 / 1e3
}

#[cfg(test)]
mod tests;
